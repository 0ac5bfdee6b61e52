"""Fault points: who is held, for how long, and that nobody is when nothing is armed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from services.common import fault_points

WAIT = 10.0


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(fault_points.VARIABLE, str(tmp_path))
    return tmp_path


def held(name: str, **labels: str) -> threading.Thread:
    """A thread that reaches a point."""
    thread = threading.Thread(target=fault_points.reach, args=(name,), kwargs=labels, daemon=True)
    thread.start()
    return thread


def wait_for(path) -> dict:
    deadline = time.monotonic() + WAIT
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return json.loads(path.read_text())


def test_nothing_is_held_without_the_variable_or_an_arming(tmp_path, monkeypatch):
    monkeypatch.delenv(fault_points.VARIABLE, raising=False)
    (tmp_path / "a.point").write_text("{}")
    fault_points.reach("a.point")
    monkeypatch.setenv(fault_points.VARIABLE, str(tmp_path))
    fault_points.reach("another.point")
    assert (tmp_path / "a.point").exists()


def test_the_first_that_matches_is_held_until_it_is_let_go(directory):
    (directory / "a.point").write_text('{"engine": "e1"}')
    fault_points.reach("a.point", engine="e0")
    thread = held("a.point", engine="e1")
    said = wait_for(directory / "a.point.reached")
    assert (said["pid"], said["engine"]) == (os.getpid(), "e1")
    fault_points.reach("a.point", engine="e1")  # one arming holds one
    assert thread.is_alive()
    (directory / "a.point.reached").unlink()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_several_may_be_armed_at_a_time(directory):
    (directory / "a.point@0").write_text('{"engine": "e0"}')
    (directory / "a.point@1").write_text('{"engine": "e1"}')
    threads = [held("a.point", engine=engine) for engine in ("e0", "e1")]
    for number in (0, 1):
        assert wait_for(directory / f"a.point@{number}.reached")["engine"] == f"e{number}"
        (directory / f"a.point@{number}.reached").unlink()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_of_many_processes_one_is_held(directory):
    (directory / "a.point").write_text("{}")
    code = "from services.common.fault_points import reach; reach('a.point')"
    processes = [subprocess.Popen([sys.executable, "-c", code], env=os.environ) for _ in range(4)]
    pid = wait_for(directory / "a.point.reached")["pid"]
    for process in processes:
        if process.pid != pid:
            assert process.wait(WAIT) == 0
    (directory / "a.point.reached").unlink()
    assert [process.wait(WAIT) for process in processes] == [0] * 4
