"""Weight groups, the sending side: communicators of this rank (rank 0 of each) and the ranks of engines.

Every group is a communicator of its own, joined, used and left on threads of its own and, with NCCL, on a stream of its
own, so that one that hangs or breaks costs its own deadline and nothing else. Group membership follows SGLang's
`init_custom_process_group`: a TCP store on the trainer, prefixed with the group's name, trainer as rank 0. A group
stands until it is left; it knows nothing of updates.

Invariants:
- Every method returns at once. What takes time is begun on a thread; one that does not come back is abandoned together
  with its group.
- One order for all communicators of a process: groups are begun and left in the order of their names, and a member of
  an old group leaves it before it joins another. Since no call waits for a peer, no two groups can wait for each other.
- At most one broadcast of a group is under way on the device, so that one that hangs holds up no queue but its own.
- Nothing waits for the device, only for events of a group's own stream, and an NCCL group ends by abort alone: its
  other members may be dead, and whoever synchronised first would hang with them.
- torch's watchdog ends no group and no process: `NCCL_WATCHDOG_OFF` and `_WATCHDOG_TIMEOUT`. Deadlines are ours.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from services.common.collective_errors import first_sentence
from services.common.fault_points import reach
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
_SLICE = timedelta(seconds=0.05)
_QUICK_SECONDS = 0.1
"""A wait that has lasted longer is looked at less often."""


class Source(Protocol):
    """Buckets to send, which may still be being filled."""

    buckets: Sequence[torch.Tensor]
    """uint8, on one device."""

    def gathered(self, index: int) -> bool:
        """Whether a bucket is filled, or will be when its mark is reached. Raises what hindered it."""
        ...

    def mark(self, index: int) -> torch.cuda.Event | None:
        """What a stream must wait for before it reads a gathered bucket on a GPU."""
        ...


@dataclass
class _Group:
    """A group. `process_group`: None until it is joined; `stream`: its own, None without NCCL; `error`: why it is of
    no use any more."""

    spec: GroupSpec
    stream: torch.cuda.Stream | None
    process_group: dist.ProcessGroup | None = None
    left: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    at_work: list[threading.Thread] = field(default_factory=list)


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
        """Groups that have not been left."""
        return tuple(self._groups)

    @property
    def at_work(self) -> tuple[str, ...]:
        """Groups that are being joined or sent to."""
        groups = list(self._groups.items())
        return tuple(name for name, group in groups if any(thread.is_alive() for thread in group.at_work))

    def join(self, specs: Iterable[GroupSpec], timeout: float) -> None:
        """Begins to host the rendezvous of every group and to join it, for at most `timeout` seconds; one that stands
        is left as it is. NCCL makes its communicator with the first bucket, which takes half a second more."""
        for spec in sorted(specs, key=lambda spec: spec.name):
            if spec.name not in self._groups:
                nccl = spec.backend == "nccl"
                group = _Group(spec, torch.cuda.Stream(self._device) if nccl else None)
                self._groups[spec.name] = group
                self._begin(group, self._join, timeout)

    def send(self, source: Source, names: Iterable[str], timeout: float) -> None:
        """Begins to broadcast every bucket over every named group, in order, for at most `timeout` seconds in all; a
        group that is still being joined is sent to when it is. The buckets must stay as they are until then. A group
        without NCCL gets copies in host memory."""
        for name in sorted(names):
            if group := self._groups.get(name):
                self._begin(group, self._send, source, timeout)

    def errors(self, names: Iterable[str]) -> dict[str, str | None]:
        """What went wrong on this side, by name; None for a group that is well or at work."""
        found = {name: self._groups.get(name) for name in names}
        gone = "weight group {} was not joined, or has been left"
        return {name: group.error if group else gone.format(name) for name, group in found.items()}

    def leave(self, names: Iterable[str]) -> None:
        """Leaves groups, whatever they are at; unknown names are ignored."""
        for name in sorted(names):
            if group := self._groups.pop(name, None):
                self._end(group)

    def leave_all(self) -> None:
        """Leaves every group."""
        self.leave(self.names)

    def _begin(self, group: _Group, work: Callable, *args: object) -> None:
        before = [thread for thread in group.at_work if thread.is_alive()]
        deadline = time.monotonic() + float(args[-1])
        # The group is passed on, not captured: the thread's end must not keep a group alive that was left.
        thread = threading.Thread(target=self._run, args=(group, before, work, *args[:-1], deadline), daemon=True)
        group.at_work = [*before, thread]
        thread.start()

    def _run(self, group: _Group, before: list[threading.Thread], work: Callable, *args: object) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            _await(lambda: not any(thread.is_alive() for thread in before), group, args[-1])
            if group.error is None:
                work(group, *args)
        except Exception as error:
            group.error = f"{type(error).__name__}: {first_sentence(error) or 'no message'}"
            if not group.left.is_set():
                self._end(group)  # whoever waits for us at the other end learns it from a closed connection

    def _join(self, group: _Group, deadline: float) -> None:
        spec, timeout = group.spec, timedelta(seconds=max(deadline - time.monotonic(), 0.1))
        store = dist.TCPStore(
            spec.master_address,
            spec.master_port,
            spec.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        made, _ = distributed_c10d._new_process_group_helper(
            spec.world_size,
            0,
            [],
            dist.Backend(spec.backend),
            dist.PrefixStore(spec.name, store),
            group_name=spec.name,
            timeout=_WATCHDOG_TIMEOUT if group.stream else timeout,
        )
        distributed_c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(spec.world_size)}
        group.process_group = made
        if group.left.is_set():  # meanwhile: nobody else would ever end it
            self._end(group)

    def _send(self, group: _Group, source: Source, deadline: float) -> None:
        for index, bucket in enumerate(source.buckets):
            reach("rank.mid_transfer", bucket=str(index))
            _await(lambda index=index: source.gathered(index), group, deadline)
            self._broadcast(group, bucket, source.mark(index), deadline)

    def _broadcast(self, group: _Group, bucket: torch.Tensor, mark: torch.cuda.Event | None, deadline: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.1))
        made = group.process_group
        if made is None:
            raise RuntimeError("the group was left")
        if group.stream is None:
            if mark:
                mark.synchronize()  # of gathering, which waits for nobody
            work = made.broadcast([bucket.cpu()], options)
            _await(lambda: _over(work), group, deadline)
            return
        with torch.cuda.stream(group.stream):
            group.stream.wait_event(mark)
            # With NCCL, wait() makes the group's stream wait and returns at once.
            made.broadcast([bucket], options).wait()
            done = group.stream.record_event()
        _await(done.query, group, deadline)

    def _end(self, group: _Group) -> None:
        """Ends a group's communicator on a thread: an abort may wait for the device."""
        group.left.set()
        # Not in a variable of this thread: if the other one were faster, the last reference would die here, and wait.
        box, group.process_group = [group.process_group], None
        if box[0] is not None:
            threading.Thread(target=self._destroy, args=(box, group.stream is not None), daemon=True).start()

    def _destroy(self, box: list[dist.ProcessGroup], nccl: bool) -> None:
        made = box.pop()  # the last reference dies on this thread: its destructor may wait for a peer
        if nccl:
            torch.cuda.set_device(self._device)
        with contextlib.suppress(RuntimeError):  # without a communicator there is nothing to abort
            made._get_backend(self._device if nccl else torch.device("cpu")).abort()
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(made)


def _await(finished: Callable[[], bool], group: _Group, deadline: float) -> None:
    began = time.monotonic()
    while not finished():
        now = time.monotonic()
        if group.left.is_set():
            raise RuntimeError("the group was left")
        if now > deadline:
            raise TimeoutError("no end of the transfer by its deadline")
        time.sleep(0.0001 if now - began < _QUICK_SECONDS else 0.001)
    if group.left.is_set():  # an abort ends the wait as well
        raise RuntimeError("the group was left")


def _over(work: dist.Work) -> bool:
    """Whether work of gloo is over, after a while in which it may end. Raises what went wrong."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises what went wrong, unless it ended well since the while was over
    return True
