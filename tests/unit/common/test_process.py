"""Child processes: output, stopping a group, and no orphan when the parent is SIGKILLed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time

import pytest

from services.common.process import ManagedProcess, free_port, hold_port, port_in_use

PARENT = """
import asyncio, sys
from services.common.process import ManagedProcess
async def main():
    child = ManagedProcess("child", [sys.executable, "-c", "import time; time.sleep(60)"])
    await child.start()
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_output_is_kept_and_passed_on(tmp_path) -> None:
    seen: list[str] = []
    child = ManagedProcess(
        "echo",
        [sys.executable, "-c", "print('one'); print('two')"],
        log_path=tmp_path / "a" / "log",
        on_line=seen.append,
    )
    await child.start()
    assert await child.wait() == 0
    assert seen == child.tail() == ["one", "two"]
    assert (tmp_path / "a" / "log").read_text() == "one\ntwo\n"


async def test_stop_kills_a_child_that_ignores_sigterm() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = ManagedProcess("stubborn", [sys.executable, "-c", code])
    await child.start()
    while not child.tail():
        await asyncio.sleep(0.02)
    started = time.monotonic()
    assert await child.stop(grace_seconds=0.3) == -signal.SIGKILL
    assert time.monotonic() - started < 5


async def test_a_killed_parent_leaves_no_orphan() -> None:
    parent = ManagedProcess("parent", [sys.executable, "-c", PARENT], env={"PYTHONPATH": os.pathsep.join(sys.path)})
    await parent.start()
    while not parent.tail():
        await asyncio.sleep(0.05)
    orphan = int(parent.tail()[0])
    assert alive(orphan)
    os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while alive(orphan) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not alive(orphan)
    await parent.stop()


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert port_in_use(taken.getsockname()[1])
    assert not port_in_use(free_port())


def test_a_held_port_is_for_who_listens_there_with_its_number() -> None:
    with hold_port() as held, socket.socket() as other, socket.socket() as rank:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(("127.0.0.1", port))
        rank.listen()
        socket.create_connection(("127.0.0.1", port), 5.0).close()
