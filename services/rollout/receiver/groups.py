"""Weight groups of the receiver in an engine's process: join, take what rank 0 broadcasts, leave in the middle of it.

Knows tensors and collectives; no engine, no socket. NCCL: a stream of its own, the end is an event that is asked for,
a communicator is aborted alone. gloo: the transfer is waited for in short turns; a group that is left in the middle of
one is ended on a thread, as its destructor waits for the peers, and may still write into the tensors it was given.

Invariants: no call outlives its timeout by more than `_LEAVE_SECONDS`; a group that failed is left; nothing here
touches the engine's own streams and groups.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from services.common.collective_errors import first_sentence

_WATCHDOG_TIMEOUT = timedelta(days=1)
"""Of NCCL's groups: torch's watchdog would end the engine for a slow trainer; deadlines are kept here."""
_LEAVE_SECONDS = 5.0
_TURN = timedelta(milliseconds=50)
_POLL_SECONDS = 0.0005
_AHEAD = 2
"""Buckets that gloo is asked for at the same time: the next arrives while the end of one is noticed."""


@dataclass(frozen=True)
class Meeting:
    """A group to join and where its members meet. `rank`: this process's in it."""

    name: str
    backend: str
    master_address: str
    master_port: int
    world_size: int
    rank: int


@dataclass
class _Member:
    """A group that this process is in, or tries to be in."""

    backend: str
    group: dist.ProcessGroup | None = None
    stream: torch.cuda.Stream | None = None
    ending: threading.Event = field(default_factory=threading.Event)
    """It is being left: what completes from now on counts as failed."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Nothing that NCCL began writes any more."""
    filling: Sequence[torch.Tensor] = ()
    """What is written into, kept alive until `ended`: freed memory would be given to somebody else meanwhile."""


class Groups:
    """Groups by name.

    Args:
        device: where the tensors to fill are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._members: dict[str, _Member] = {}
        self._left: set[str] = set()
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Groups that stand or are being joined."""
        return list(self._members)

    def join(self, meeting: Meeting, timeout: float) -> None:
        """Joins a group. gloo meets the others now, NCCL at the first bucket. Raises RuntimeError or OSError, also for
        a name that was left before: the command to leave may have overtaken this one."""
        member = _Member(meeting.backend)
        with self._lock:
            if meeting.name in self._left:
                raise RuntimeError(f"group {meeting.name} has been left")
            if meeting.name in self._members:
                raise RuntimeError(f"this engine is a member of group {meeting.name} already")
            self._members[meeting.name] = member
        try:
            group = _meet(meeting, timedelta(seconds=timeout))
        except BaseException:
            self._members.pop(meeting.name, None)
            raise
        if meeting.backend == "nccl":
            member.stream = torch.cuda.Stream(self._device)
        member.group = group
        if member.ending.is_set():  # left while it was joined
            self._end(member)
            raise RuntimeError("the group was left")

    def receive(
        self, name: str, tensors: Sequence[torch.Tensor], timeout: float, before: Callable[[int], None]
    ) -> None:
        """Fills the tensors (uint8, flat) in order by broadcasts from rank 0. `before(i)` is called on the receiving
        thread ahead of the i-th. On any failure the group is left and RuntimeError or TimeoutError raised; where gloo
        is concerned the tensors must not be used for anything else then."""
        member = self._members.get(name)
        if member is None or member.group is None:
            raise RuntimeError(f"this engine is not in group {name}")
        failures: list[str] = []  # not the errors: their frames would keep the group and its sockets
        finished = threading.Event()
        member.filling = tensors

        def run() -> None:
            try:
                take = self._take_nccl if member.stream is not None else self._take_gloo
                take(member, tensors, time.monotonic() + timeout, before)
            except Exception as error:
                failures.append(first_sentence(error) or type(error).__name__)
            finished.set()

        # A thread of its own: making NCCL's communicator, with the first bucket, cannot be bounded otherwise.
        threading.Thread(target=run, daemon=True, name="weight transfer").start()
        deadline = time.monotonic() + timeout
        while not finished.wait(0.2) and not member.ended.is_set() and time.monotonic() < deadline:
            pass
        if finished.is_set() and not failures and not member.ending.is_set():
            member.filling = ()
            return
        was_left = member.ending.is_set()
        self.leave(name)
        member.ended.wait(_LEAVE_SECONDS)
        finished.wait(0.2)
        if was_left:
            raise RuntimeError(_LEFT)
        raise RuntimeError(failures[0] if failures else f"no end of the transfer after {timeout:g} s")

    def _take_nccl(
        self, member: _Member, tensors: Sequence[torch.Tensor], deadline: float, before: Callable[[int], None]
    ) -> None:
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(member.stream):
            for index, tensor in enumerate(tensors):
                before(index)
                # Orders the stream and returns; all buckets are under way before the first is there.
                _group(member).broadcast([tensor], _from_rank_0(_WATCHDOG_TIMEOUT)).wait()
            done = member.stream.record_event()
        while not done.query():
            _check(member, deadline)
            time.sleep(_POLL_SECONDS)
        if member.ending.is_set():  # an abort ends the wait as well
            raise RuntimeError(_LEFT)

    def _take_gloo(
        self, member: _Member, tensors: Sequence[torch.Tensor], deadline: float, before: Callable[[int], None]
    ) -> None:
        under_way: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()

        def finish_one() -> None:
            work, host, tensor = under_way.popleft()
            while not _arrived(work):
                _check(member, deadline)
            if host is not tensor:
                tensor.copy_(host)

        for index, tensor in enumerate(tensors):
            before(index)
            host = tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape, dtype=torch.uint8)
            # gloo's threads hold group and tensor until it ends, whoever leaves: it must not last for ever.
            options = _from_rank_0(timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
            under_way.append((_group(member).broadcast([host], options), host, tensor))
            if len(under_way) == _AHEAD:
                finish_one()
        while under_way:
            finish_one()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def leave(self, name: str) -> None:
        """Leaves a group, also in the middle of a transfer or of joining; an unknown name is ignored. Returns when
        nothing that NCCL began writes any more, or after `_LEAVE_SECONDS`."""
        with self._lock:
            member = self._members.pop(name, None)
            if member is None:
                self._left.add(name)  # its join may come later
                return
        member.ending.set()
        self._end(member)

    def _end(self, member: _Member) -> None:
        with self._lock:  # whoever joins and whoever leaves may both come here; torch takes None for the engine's world
            box, member.group = [member.group], None
        if box[0] is None:
            return

        def end() -> None:
            group = box.pop()  # the last reference dies on this thread: its destructor may wait for a peer
            if member.stream is not None:
                torch.cuda.set_device(self._device)
                with contextlib.suppress(RuntimeError):
                    group._get_backend(self._device).abort()
            member.ended.set()
            member.filling = ()
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)

        threading.Thread(target=end, daemon=True, name="leaving a weight group").start()
        member.ended.wait(_LEAVE_SECONDS)


_LEFT = "the group was left"


def _meet(meeting: Meeting, timeout: timedelta) -> dist.ProcessGroup:
    """The process group, under the prefix that SGLang uses as well: a trainer serves both ways alike."""
    nccl = meeting.backend == "nccl"
    store = dist.TCPStore(meeting.master_address, meeting.master_port, meeting.world_size, False, timeout)
    group, _ = c10d._new_process_group_helper(
        meeting.world_size,
        meeting.rank,
        [],
        c10d.Backend(meeting.backend),
        c10d.PrefixStore(meeting.name, store),
        group_name=meeting.name,
        timeout=_WATCHDOG_TIMEOUT if nccl else timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(meeting.world_size)}
    return group


def _from_rank_0(timeout: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timeout
    return options


def _group(member: _Member) -> dist.ProcessGroup:
    if (group := member.group) is None:
        raise RuntimeError(_LEFT)
    return group


def _arrived(work: Any) -> bool:
    """Waits a turn. Raises what went wrong."""
    try:
        work.wait(_TURN)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises what went wrong, unless it ended well since the turn was over
    return True


def _check(member: _Member, deadline: float) -> None:
    if member.ended.is_set():
        raise RuntimeError(_LEFT)
    if time.monotonic() > deadline:
        raise TimeoutError("not all buckets arrived in time")
