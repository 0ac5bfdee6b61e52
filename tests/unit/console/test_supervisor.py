"""The supervisor, with real child processes that are killed by pid."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.process import free_port
from services.console.adapters.valkey import ping, valkey_arguments
from services.console.state import Running, StateDir
from services.console.supervisor import Patience, Supervisor, Tier, TierFailed

QUICK = Patience(start=10.0, first_pause=0.05, longest_pause=0.1, restarts=2, stable=1.0, poll=0.02)


def file_tier(name: str, folder: Path, code: str = "pass") -> Tier:
    """A process that writes its pid to a file, then sleeps; ready when the file is there."""
    mark = folder / name
    program = (
        f"import os, time; {code}; print('up', flush=True);"
        f" open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )

    async def ready() -> str:
        return "" if mark.exists() else "no file yet"

    return Tier(name, (sys.executable, "-c", program), ready, stop_seconds=2.0)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_starts_in_order_restarts_and_stops_in_reverse(tmp_path):
    notes, lines, stages = [], [], []

    async def on_stage(index: int) -> None:
        stages.append((index, (tmp_path / "b").exists()))

    supervisor = Supervisor(
        [[file_tier("a", tmp_path)], [file_tier("b", tmp_path)]],
        tmp_path / "logs",
        on_line=lambda tier, line: lines.append((tier, line)),
        on_note=notes.append,
        patience=QUICK,
    )
    await supervisor.start(on_stage)
    assert stages == [(0, False), (1, True)]
    await until(lambda: ("b", "up") in lines)
    first = supervisor.pid("a")
    (tmp_path / "a").unlink()
    os.kill(first, signal.SIGKILL)
    await until(lambda: "a is back." in notes)
    second = supervisor.pid("a")
    assert second != first
    assert notes == ["a ended (signal 9); starting it again.", "a is back."]
    assert "up" in (tmp_path / "logs" / "a.log").read_text()
    await supervisor.stop()
    assert not alive(second)
    assert supervisor.pid("b") == 0


async def test_a_tier_that_keeps_dying_is_given_up_with_its_output(tmp_path):
    supervisor = Supervisor([[file_tier("a", tmp_path)]], tmp_path / "logs", patience=QUICK)
    await supervisor.start()
    killer = asyncio.create_task(_kill_repeatedly(supervisor))
    failure = await asyncio.wait_for(supervisor.wait_failed(), 20)
    killer.cancel()
    assert str(failure).startswith("a died 3 times in a row (log: ")
    await supervisor.stop()


async def test_a_tier_that_was_of_use_is_started_again_however_often_it_is_struck(tmp_path):
    notes = []
    patience = Patience(start=10.0, first_pause=9.0, restarts=1, stable=0.1, poll=0.02)
    supervisor = Supervisor([[file_tier("a", tmp_path)]], tmp_path / "logs", on_note=notes.append, patience=patience)
    await supervisor.start()
    for death in range(1, 5):
        await asyncio.sleep(0.15)
        os.kill(supervisor.pid("a"), signal.SIGKILL)
        await until(lambda death=death: notes.count("a is back.") == death)
    assert set(notes) == {"a ended (signal 9); starting it again.", "a is back."}
    await supervisor.stop()


async def _kill_repeatedly(supervisor: Supervisor) -> None:
    while True:
        if pid := supervisor.pid("a"):
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.05)


async def test_a_tier_that_does_not_start_says_why(tmp_path):
    tiers = [[file_tier("a", tmp_path)], [file_tier("b", tmp_path, "raise SystemExit('no such card')")]]
    supervisor = Supervisor(tiers, tmp_path / "logs", patience=QUICK)
    with pytest.raises(TierFailed) as caught:
        await supervisor.start()
    assert "b ended with status 1 at its start" in str(caught.value)
    assert "no such card" in str(caught.value)
    assert not alive(int((tmp_path / "a").read_text()))


async def test_a_tier_that_is_never_ready_is_named(tmp_path):
    async def never() -> str:
        return "still loading"

    tier = Tier("slow", (sys.executable, "-c", "import time; time.sleep(60)"), never, stop_seconds=1.0)
    supervisor = Supervisor([[tier]], tmp_path, patience=Patience(start=0.5, poll=0.05))
    with pytest.raises(TierFailed, match=r"slow was not ready within 0 seconds: still loading"):
        await supervisor.start()


async def test_hurry_does_not_wait(tmp_path):
    tier = file_tier("a", tmp_path, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    supervisor = Supervisor([[tier]], tmp_path / "logs", patience=QUICK)
    await supervisor.start()
    began = time.monotonic()
    stopping = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0.1)
    supervisor.hurry()
    await stopping
    assert time.monotonic() - began < 1.5


async def test_valkey_keeps_its_data_over_a_kill(tmp_path):
    port = free_port()
    tier = Tier("store", tuple(valkey_arguments(port, tmp_path)), lambda: ping(port), patient=False)
    supervisor = Supervisor([[tier]], tmp_path / "logs", patience=QUICK)
    assert await ping(port)
    await supervisor.start()
    await _command(port, "SET", "key", "value")
    await asyncio.sleep(1.2)  # the file is synced every second
    os.kill(first := supervisor.pid("store"), signal.SIGKILL)
    await until(lambda: supervisor.pid("store") not in (0, first))
    async with asyncio.timeout(10):
        while await ping(port):
            await asyncio.sleep(0.05)
    assert await _command(port, "GET", "key") == b"value"
    await supervisor.stop()
    await supervisor.stop()


async def _command(port: int, *words: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"*{len(words)}\r\n".encode() + b"".join(f"${len(w)}\r\n{w}\r\n".encode() for w in words))
    first = await reader.readline()
    answer = (await reader.readline()).strip() if first.startswith(b"$") else first.strip()
    writer.close()
    return answer


def test_a_killed_supervisor_leaves_no_orphans(tmp_path):
    code = f"""
import asyncio
from pathlib import Path
from services.console.supervisor import Supervisor
from tests.unit.console.test_supervisor import file_tier
async def main():
    supervisor = Supervisor([[file_tier("a", Path({str(tmp_path)!r}))]], Path({str(tmp_path)!r}) / "logs")
    await supervisor.start()
    print("ready", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    child = int((tmp_path / "a").read_text())
    assert alive(child)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


def test_state_directory_has_one_holder(tmp_path):
    state, other = StateDir(tmp_path / "s"), StateDir(tmp_path / "s")
    assert state.running() is None
    assert state.acquire()
    state.write(Running(os.getpid(), "up", {"buffer": "127.0.0.1:1"}))
    assert not other.acquire()
    assert other.running() == Running(os.getpid(), "up", {"buffer": "127.0.0.1:1"})
    state.release()
    assert other.running() is None
    assert other.acquire()
    other.release()


def test_state_of_a_dead_holder_does_not_count(tmp_path):
    (tmp_path / "up.json").write_text('{"pid": 1, "command": "up"}')
    state = StateDir(tmp_path)
    assert state.running() is None
    assert state.acquire()
    state.release()
