"""What the kernel says of a group of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from services.common.process_group import any_stopped, members


def test_a_stopped_child_of_a_group_is_seen():
    code = "import os, time; os.fork(); time.sleep(60)"
    leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline = time.monotonic() + 10
        while len(members(leader.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        pids = members(leader.pid)
        (child,) = set(pids) - {leader.pid}
        assert not any_stopped(pids)
        os.kill(child, signal.SIGSTOP)
        while not any_stopped(pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert any_stopped(pids)
        assert not any_stopped([leader.pid])
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
    assert not any_stopped(pids)
