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
from tests.support.group_member import Member

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
            assert groups.join([member.spec for member in made], 60.0) == dict.fromkeys(names)
            assert all(member.answer()["joined"] for member in made)
            yield made
        finally:
            groups.leave_all()
            for member in made:
                member.end()


def arrives(groups: WeightGroups, member: Member, tensor: torch.Tensor, seconds: float = 30.0) -> None:
    """One broadcast, compared."""
    name = member.spec.name
    member.tell(f"receive {tensor.numel()}")
    groups.send(tensor, [name], seconds)
    assert groups.finish([name]) == {name: None}
    assert member.answer()["sha256"] == hashlib.sha256(tensor.cpu().numpy()).hexdigest()


def used_again_and_again(place: Place) -> None:
    """A group is joined once and used until it is left; so says a second join."""
    groups = place.groups()
    with place.members(groups) as (member,):
        name = member.spec.name
        for _ in range(3):
            arrives(groups, member, place.data())
            began = time.monotonic()
            assert groups.join([member.spec], 30.0) == {name: None}
            assert time.monotonic() - began < 0.5
        assert groups.names == (name,)
        groups.leave([name, "never heard of"])
        assert groups.names == ()
        groups.send(place.data(), [name], 1.0)
        assert "was not joined, or has been left" in groups.finish([name])[name]


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
        groups.send(tensor, [name], 30.0)
        assert groups.finish([name]) == {name: None}
        assert member.answer()["sha256"] == hashlib.sha256(bytes([19]) * place.large).hexdigest()


def member_killed_in_a_transfer(place: Place) -> None:
    """An error by the deadline, a device that computes, and a new group with a new member."""
    groups = place.groups()
    with place.members(groups) as (member,):
        name = member.spec.name
        arrives(groups, member, place.data())
        tensor = place.data(place.large)
        member.tell(f"die {tensor.numel()}")
        began = time.monotonic()
        groups.send(tensor, [name], TIMEOUT)
        error = groups.finish([name])[name]
        if error is None:  # all bytes had left before it died
            groups.send(tensor, [name], TIMEOUT)
            error = groups.finish([name])[name]
        assert error
        assert time.monotonic() - began < 2 * (TIMEOUT + GRACE)
        assert groups.names == ()
        place.assert_usable()
    with place.members(groups) as (member,):
        name = member.spec.name
        arrives(groups, member, place.data())


def member_killed_before_its_first_transfer(place: Place) -> None:
    """NCCL makes a communicator with the first transfer, and then meets nobody."""
    groups = place.groups()
    with place.members(groups) as (member,):
        name = member.spec.name
        member.end()
        began = time.monotonic()
        groups.send(place.data(), [name], TIMEOUT)
        assert groups.finish([name])[name]
        assert time.monotonic() - began < TIMEOUT + 2 * GRACE
        assert groups.names == ()
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
        groups.send(tensor, [stopped.spec.name, healthy.spec.name], 30.0)
        assert groups.finish([healthy.spec.name]) == {healthy.spec.name: None}
        assert healthy.answer()["sha256"] == hashlib.sha256(tensor.cpu().numpy()).hexdigest()
        began = time.monotonic()
        groups.leave([stopped.spec.name])
        assert time.monotonic() - began < GRACE
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
        groups.send(place.data(place.large), [name], TIMEOUT)
        assert groups.finish([name])[name] is not None
        assert time.monotonic() - began < TIMEOUT + 2 * GRACE
        assert groups.names == ()
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
        assert time.monotonic() - began < GRACE
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


SCENARIOS = (
    used_again_and_again,
    bytes_written_just_before_are_the_ones_sent,
    member_killed_in_a_transfer,
    member_killed_before_its_first_transfer,
    member_stopped_in_a_transfer,
    deadline_of_a_member_that_never_comes,
    member_dead_while_idle,
    member_leaves_after_us,
)
