"""An engine's end of a weight group as a process: `python -m tests.support.group_member NAME PORT BACKEND DEVICE`.

Joins as SGLang does, as rank 1 of 2, and answers lines of standard input with lines of JSON: "receive N" takes N bytes
by broadcast, "die N" is killed in the middle of that, "leave" destroys the group. `Member` is the test's handle.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from services.common.process import free_port
from services.trainer.core.commands import GroupSpec

ROOT = Path(__file__).resolve().parents[2]


def spec_of(name: str, backend: str) -> GroupSpec:
    """A new group of the trainer and one member."""
    return GroupSpec(name, backend, "127.0.0.1", free_port(), 2)


class Member:
    """A member process on `device`, and the spec with which the trainer's side joins."""

    def __init__(self, name: str, backend: str, device: str, spec: GroupSpec | None = None) -> None:
        self.spec = spec or spec_of(name, backend)
        arguments = [name, str(self.spec.master_port), backend, device]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.group_member", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)

    def tell(self, line: str) -> None:
        """Asks for something."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self, seconds: float = 60.0) -> dict:
        """Its next answer; raises queue.Empty when there is none in time."""
        return json.loads(self._lines.get(timeout=seconds))

    def signal(self, number: int) -> None:
        """Sends a signal to it alone."""
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """SIGKILL, also when it is stopped."""
        self._process.kill()
        self._process.wait(10)


def _main(name: str, port: str, backend: str, place: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    device = torch.device(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=120)
    store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=timeout))
    store = dist.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend(backend), store, group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    print(json.dumps({"joined": True}), flush=True)
    for line in sys.stdin:
        what, _, count = line.strip().partition(" ")
        began = time.monotonic()
        if what == "leave":
            dist.destroy_process_group(group)
            print(json.dumps({"seconds": time.monotonic() - began}), flush=True)
            continue
        where = device if backend == "nccl" else torch.device("cpu")
        buffer = torch.empty(int(count), dtype=torch.uint8, device=where)
        work = dist.broadcast(buffer, src=0, group=group, async_op=True)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
        digest = hashlib.sha256(buffer.cpu().numpy()).hexdigest()
        print(json.dumps({"sha256": digest}), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
