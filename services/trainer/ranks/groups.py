"""Weight groups, the sending side: communicators of this rank (rank 0 of each) and the ranks of engines.

Every group is a communicator of its own, joined, used and left on threads of its own and, with NCCL, on a stream of its
own, so that one that hangs or breaks costs its own deadline and nothing else. Group membership follows SGLang's
`init_custom_process_group`: a TCP store on the trainer, prefixed with the group's name, trainer as rank 0. A group
stands until it is left; it knows nothing of updates.

Invariants:
- No call here outlasts its timeout by more than `_GRACE_SECONDS`; a thread that does not come back is abandoned
  together with its group.
- Nothing waits for the device, only for events of a group's own stream, and an NCCL group ends by abort alone: its
  other members may be dead, and whoever synchronised first would hang with them.
- torch's watchdog ends no group and no process: `NCCL_WATCHDOG_OFF` and `_WATCHDOG_TIMEOUT`. Deadlines are ours.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from services.trainer.core.commands import GroupSpec

NCCL_WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Environment to set before the first process group. By default torch's watchdog takes the process down when a
communicator reports an error or is slow: an engine's death would be the trainer's. A rank that hangs in a group of
the trainer itself is ended by the controller's deadline instead."""

_WATCHDOG_TIMEOUT = timedelta(days=1)
_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.0005


@dataclass
class _Sending:
    """A broadcast under way on a thread. `error`: None while it runs and when it succeeded."""

    timeout: float
    deadline: float
    given_up: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    thread: threading.Thread | None = None


@dataclass
class _Group:
    """A group that stands. `stream`: its own, None without NCCL."""

    backend: str
    process_group: dist.ProcessGroup
    stream: torch.cuda.Stream | None
    sending: _Sending | None = None


class WeightGroups:
    """The groups that this rank is a member of, by name.

    Args:
        device: where the tensors to send are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, _Group] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Groups that stand."""
        return tuple(self._groups)

    def join(self, specs: Iterable[GroupSpec], timeout: float) -> dict[str, str | None]:
        """Hosts the rendezvous of every group and joins it; one that stands already is joined. Returns an error
        sentence or None by name. NCCL makes its communicator with the first bucket, which takes half a second more."""
        specs = list(specs)
        found = {spec.name: None for spec in specs if spec.name in self._groups}
        made: dict[str, _Group] = {}

        def join_one(spec: GroupSpec) -> None:
            made[spec.name] = self._new_group(spec, timedelta(seconds=timeout))

        new = {spec.name: lambda spec=spec: join_one(spec) for spec in specs if spec.name not in found}
        results = _on_threads(new, timeout)
        # One that comes up later was answered with an error: nobody would ever leave it.
        self._groups |= {name: made[name] for name, error in results.items() if error is None}
        return found | results

    def _new_group(self, spec: GroupSpec, timeout: timedelta) -> _Group:
        nccl = spec.backend == "nccl"
        store = dist.TCPStore(
            spec.master_address, spec.master_port, spec.world_size, is_master=True, timeout=timeout, multi_tenant=True
        )
        group, _ = distributed_c10d._new_process_group_helper(
            spec.world_size,
            0,
            [],
            dist.Backend(spec.backend),
            dist.PrefixStore(spec.name, store),
            group_name=spec.name,
            timeout=_WATCHDOG_TIMEOUT if nccl else timeout,
        )
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(spec.world_size)}
        return _Group(spec.backend, group, torch.cuda.Stream(self._device) if nccl else None)

    def send(self, tensor: torch.Tensor, names: Iterable[str], timeout: float) -> None:
        """Begins to broadcast a tensor over every named group; `finish` tells how it went. The tensor must stay as it
        is until then. `timeout` in seconds, from now. A group without NCCL gets a copy in host memory."""
        names = list(names)
        ready = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        over_host = any(name in self._groups and not self._groups[name].stream for name in names)
        host = tensor.cpu() if over_host else tensor
        for name in names:
            group = self._groups.get(name)
            if group is None:
                continue  # `finish` says so
            group.sending = sending = _Sending(timeout, time.monotonic() + timeout)
            source = tensor if group.stream else host
            # The group is passed on, not captured: the thread's end must not keep a group alive that was left.
            sending.thread = threading.Thread(target=self._run, args=(group, sending, source, ready), daemon=True)
            sending.thread.start()

    def _run(self, group: _Group, sending: _Sending, tensor: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        try:
            self._broadcast(group, sending, tensor, ready)
        except Exception as error:
            sending.error = _sentence(error)

    def _broadcast(
        self, group: _Group, sending: _Sending, tensor: torch.Tensor, ready: torch.cuda.Event | None
    ) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=sending.timeout)
        if group.stream is None:
            work = group.process_group.broadcast([tensor], options)
            _await(work.is_completed, sending)
            work.wait()  # raises what went wrong
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(group.stream):
            group.stream.wait_event(ready)
            # With NCCL, wait() makes the group's stream wait and returns at once.
            group.process_group.broadcast([tensor], options).wait()
            done = group.stream.record_event()
        _await(done.query, sending)

    def finish(self, names: Iterable[str]) -> dict[str, str | None]:
        """Waits for the end of the last `send` over the named groups. Returns an error sentence or None by name; a
        group that failed is left."""
        results = {name: self._finish_one(name) for name in names}
        self.leave([name for name, error in results.items() if error is not None])
        return results

    def _finish_one(self, name: str) -> str | None:
        group = self._groups.get(name)
        if group is None or group.sending is None:
            return f"weight group {name} was not joined, or has been left"
        sending = group.sending
        sending.thread.join(max(sending.deadline + _GRACE_SECONDS - time.monotonic(), 0))
        if sending.thread.is_alive():
            return f"did not come back within {sending.timeout:g} s"
        group.sending = None
        return sending.error

    def leave(self, names: Iterable[str]) -> None:
        """Leaves groups, also in the middle of a bucket; unknown names are ignored."""
        ends = {}
        for name in [name for name in names if name in self._groups]:
            group = self._groups.pop(name)
            if group.sending is not None:
                group.sending.given_up.set()
            box = [group.process_group]
            ends[name] = lambda box=box, nccl=group.stream is not None: self._end(box, nccl)
            del group
        _on_threads(ends, 0.0)

    def _end(self, box: list[dist.ProcessGroup], nccl: bool) -> None:
        group = box.pop()  # the last reference dies on this thread: its destructor may wait for a peer
        if nccl:
            torch.cuda.set_device(self._device)
            group._get_backend(self._device).abort()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(group)

    def leave_all(self) -> None:
        """Leaves every group."""
        self.leave(self.names)


def _await(finished: Callable[[], bool], sending: _Sending) -> None:
    while not finished():
        if sending.given_up.is_set():
            raise RuntimeError("the group was left")
        if time.monotonic() > sending.deadline:
            raise TimeoutError(f"no end of the transfer after {sending.timeout:g} s")
        time.sleep(_POLL_SECONDS)
    if sending.given_up.is_set():  # an abort ends the wait as well
        raise RuntimeError("the group was left")


def _on_threads(calls: Mapping[str, Callable[[], None]], timeout: float) -> dict[str, str | None]:
    """Runs every call on a thread of its own; an error sentence or None by name."""
    results: dict[str, str | None] = {}

    def run(name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            results.setdefault(name, _sentence(error))
        else:
            results.setdefault(name, None)

    threads = {name: threading.Thread(target=run, args=(name, call), daemon=True) for name, call in calls.items()}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + timeout + _GRACE_SECONDS
    for name, thread in threads.items():
        thread.join(max(deadline - time.monotonic(), 0))
        results.setdefault(name, f"did not come back within {timeout:g} s")
    return {name: results[name] for name in calls}


def _sentence(error: Exception) -> str:
    """First line of an error, without the source position and the advice that gloo wraps around it."""
    lines = str(error).strip().splitlines() or ["no message"]
    text = re.sub(r"^\[\S+:\d+\] ", "", lines[0]).split(" This is typically")[0]
    return f"{type(error).__name__}: {text}"
