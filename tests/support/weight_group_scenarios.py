"""What a weight group must stand, on either device: `SCENARIOS` take a `Place`. Real groups with member processes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from services.trainer.ranks.groups import WeightGroups
from tests.support.group_member import Member, spec_of

_NUMBERS = itertools.count()
"""A name is used once, as in a run."""
SMALL = 3_000_001
TIMEOUT = 4.0
GRACE = 2.5
"""Beyond a deadline, until a call must be back."""


@dataclass(frozen=True)
class Place:
    """Backend of the groups, devices of trainer and members, and bytes of a broadcast that takes a while."""

    backend: str
    ours: str
    theirs: str
    large: int

    def groups(self) -> WeightGroups:
        """The trainer's side."""
        return WeightGroups(torch.device(self.ours))

    def data(self, count: int = SMALL) -> torch.Tensor:
        """Random bytes."""
        return torch.randint(0, 256, (count,), dtype=torch.uint8, device=self.ours)

    def assert_usable(self) -> None:
        """The device computes, and nothing on it hangs."""
        began = time.monotonic()
        assert int(torch.ones(1000, device=self.ours).sum()) == 1000
        if self.ours != "cpu":
            torch.cuda.synchronize(self.ours)
        assert time.monotonic() - began < 3

    @contextlib.contextmanager
    def members(self, groups: WeightGroups, count: int = 1) -> Iterator[list[Member]]:
        """Members that have joined, in a group each; the groups are left at the end."""
        made = [Member(f"group-{next(_NUMBERS)}", self.backend, self.theirs) for _ in range(count)]
        names = [member.spec.name for member in made]
        try:
            groups.join([member.spec for member in made], 60.0)
            assert all(member.answer()["joined"] for member in made)
            assert ends(groups, names, 10.0) == dict.fromkeys(names)
            yield made
        finally:
            groups.leave_all()
            for member in made:
                member.end()


class Ready:
    """Buckets that are there. A `groups.Source`."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.buckets = tensors
        on_gpu = tensors[0].device.type == "cuda"
        self._mark = torch.cuda.current_stream(tensors[0].device).record_event() if on_gpu else None

    def gathered(self, index: int) -> bool:
        return True

    def mark(self, index: int) -> torch.cuda.Event | None:
        return self._mark


def ends(groups: WeightGroups, names: list[str], seconds: float = 30.0) -> dict[str, str | None]:
    """Errors of groups that are at work no more."""
    deadline = time.monotonic() + seconds
    while set(names) & set(groups.at_work):
        assert time.monotonic() < deadline, "it has not ended"
        time.sleep(0.005)
    return groups.errors(names)


def arrives(groups: WeightGroups, member: Member, *tensors: torch.Tensor, seconds: float = 30.0) -> None:
    """Buckets, compared."""
    for tensor in tensors:
        member.tell(f"receive {tensor.numel()}")
    groups.send(Ready(*tensors), [member.spec.name], seconds)
    assert ends(groups, [member.spec.name]) == {member.spec.name: None}
    for tensor in tensors:
        assert member.answer()["sha256"] == hashlib.sha256(tensor.cpu().numpy()).hexdigest()


def used_again_and_again(place: Place) -> None:
    """A group is joined once and used until it is left; a second join changes nothing."""
    groups = place.groups()
    with place.members(groups) as (member,):
        name = member.spec.name
        for _ in range(3):
            arrives(groups, member, place.data(), place.data(17), place.data())
            groups.join([member.spec], 30.0)
        assert groups.names == (name,)
        groups.leave([name, "never heard of"])
        assert groups.names == ()
        groups.send(Ready(place.data()), [name], 1.0)
        assert "was not joined, or has been left" in groups.errors([name])[name]


def bytes_written_just_before_are_the_ones_sent(place: Place) -> None:
    """The group's stream waits for what the device still has to do."""
    groups = place.groups()
    with place.members(groups) as (member,):
        name = member.spec.name
        arrives(groups, member, place.data())
        tensor = torch.zeros(place.large, dtype=torch.uint8, device=place.ours)
        for number in range(20):
            tensor.fill_(number)
        member.tell(f"receive {tensor.numel()}")
        groups.send(Ready(tensor), [name], 30.0)
        assert ends(groups, [name]) == {name: None}
        assert member.answer()["sha256"] == hashlib.sha256(bytes([19]) * place.large).hexdigest()


def buckets_leave_as_they_are_gathered(place: Place) -> None:
    """The first arrives while the second is not there yet."""

    class Slow(Ready):
        count = 1

        def gathered(self, index: int) -> bool:
            return index < self.count

    groups = place.groups()
    with place.members(groups) as (member,):
        source = Slow(place.data(), place.data())
        for tensor in source.buckets:
            member.tell(f"receive {tensor.numel()}")
        groups.send(source, [member.spec.name], 30.0)
        digests = [hashlib.sha256(tensor.cpu().numpy()).hexdigest() for tensor in source.buckets]
        assert member.answer()["sha256"] == digests[0]
        assert groups.at_work == (member.spec.name,)
        source.count = 2
        assert member.answer()["sha256"] == digests[1]


def member_killed_in_a_transfer(place: Place) -> None:
    """An error by the deadline, a device that computes, and a new group with a new member."""
    groups = place.groups()
    with place.members(groups) as (member,):
        name = member.spec.name
        arrives(groups, member, place.data())
        tensor = place.data(place.large)
        member.tell(f"die {tensor.numel()}")
        began = time.monotonic()
        groups.send(Ready(tensor), [name], TIMEOUT)
        error = ends(groups, [name])[name]
        if error is None:  # all bytes had left before it died
            groups.send(Ready(tensor), [name], TIMEOUT)
            error = ends(groups, [name])[name]
        assert error
        assert time.monotonic() - began < 2 * (TIMEOUT + GRACE)
        groups.leave([name])
        assert groups.names == ()
        place.assert_usable()
    with place.members(groups) as (member,):
        arrives(groups, member, place.data())


def member_killed_before_its_first_transfer(place: Place) -> None:
    """NCCL makes a communicator with the first transfer, and then meets nobody."""
    groups = place.groups()
    with place.members(groups) as (member,):
        name = member.spec.name
        member.end()
        groups.send(Ready(place.data()), [name], TIMEOUT)
        time.sleep(TIMEOUT + GRACE)  # NCCL may never come back from this
        began = time.monotonic()
        groups.leave([name])
        assert time.monotonic() - began < 0.5
        place.assert_usable()
    with place.members(groups) as (member,):
        arrives(groups, member, place.data())


def member_stopped_in_a_transfer(place: Place) -> None:
    """Whoever knows better than to wait leaves at once; another group goes on meanwhile."""
    groups = place.groups()
    with place.members(groups, 2) as (stopped, healthy):
        arrives(groups, stopped, place.data())
        arrives(groups, healthy, place.data())
        stopped.signal(signal.SIGSTOP)
        tensor = place.data(place.large)
        healthy.tell(f"receive {tensor.numel()}")
        names = [stopped.spec.name, healthy.spec.name]
        groups.send(Ready(tensor), names, 30.0)
        assert ends(groups, names[1:]) == {healthy.spec.name: None}
        assert healthy.answer()["sha256"] == hashlib.sha256(tensor.cpu().numpy()).hexdigest()
        began = time.monotonic()
        groups.leave(names[:1])
        assert time.monotonic() - began < 0.5
        place.assert_usable()
        arrives(groups, healthy, place.data())


def deadline_of_a_member_that_never_comes(place: Place) -> None:
    """A transfer that nobody takes fails by its own deadline."""
    groups = place.groups()
    with place.members(groups) as (member,):
        name = member.spec.name
        arrives(groups, member, place.data())
        member.signal(signal.SIGSTOP)
        began = time.monotonic()
        # More than what fits into buffers between two processes.
        groups.send(Ready(place.data(place.large)), [name], TIMEOUT)
        assert ends(groups, [name])[name] is not None
        assert time.monotonic() - began < TIMEOUT + GRACE
        groups.leave([name])
        place.assert_usable()


def member_dead_while_idle(place: Place) -> None:
    """Leaving does not wait for the dead."""
    groups = place.groups()
    with place.members(groups) as (member,):
        name = member.spec.name
        arrives(groups, member, place.data())
        member.end()
        began = time.monotonic()
        groups.leave([name])
        assert time.monotonic() - began < 0.5
        place.assert_usable()


def member_leaves_after_us(place: Place) -> None:
    """An engine can leave the group of a trainer that is gone, or every restart of a trainer would cost its engines."""
    groups = place.groups()
    with place.members(groups) as (member,):
        name = member.spec.name
        arrives(groups, member, place.data())
        groups.leave([name])
        member.tell("leave")
        assert member.answer(10.0)["seconds"] < 5


def groups_joined_in_the_opposite_order(place: Place) -> None:
    """We begin both at once; the member joins the second, uses and leaves it, and then the first."""
    groups = place.groups()
    specs = [spec_of(f"group-{next(_NUMBERS)}", place.backend) for _ in range(2)]
    groups.join(specs, 60.0)
    for spec in reversed(specs):
        member = Member(spec.name, place.backend, place.theirs, spec)
        try:
            assert member.answer()["joined"]
            arrives(groups, member, place.data())
        finally:
            member.end()
    groups.leave_all()


SCENARIOS = (
    used_again_and_again,
    bytes_written_just_before_are_the_ones_sent,
    buckets_leave_as_they_are_gathered,
    member_killed_in_a_transfer,
    member_killed_before_its_first_transfer,
    member_stopped_in_a_transfer,
    deadline_of_a_member_that_never_comes,
    member_dead_while_idle,
    member_leaves_after_us,
    groups_joined_in_the_opposite_order,
)
