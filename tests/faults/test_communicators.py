"""Communicators made and ended in any order by any process: none waits for another."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from services.common.process import free_port
from services.trainer.core.commands import GroupSpec
from services.trainer.ranks.groups import WeightGroups

SECONDS = 30.0
SIZE = 100_000


class Buckets:
    """Two buckets: a `groups.Source`."""

    buckets = tuple(torch.full((SIZE,), value, dtype=torch.uint8) for value in (3, 4))

    def gathered(self, index: int) -> bool:
        return True

    def mark(self, index: int) -> None:
        return None


class Engine:
    """A receiver's groups in a process, which joins, uses and leaves those of `specs` one after the other."""

    def __init__(self, specs: Sequence[GroupSpec]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "services.rollout.receiver.groups", __name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_member, args=(tuple(specs), theirs), daemon=True)
        self._process.start()

    def tell(self, what: str) -> None:
        self._pipe.send(what)

    def answer(self) -> object:
        if not self._pipe.poll(2 * SECONDS):
            raise TimeoutError("an engine does not answer")
        return self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join(10.0)


def _member(specs: tuple[GroupSpec, ...], pipe: Connection) -> None:
    from services.rollout.receiver.groups import Groups, Meeting

    groups = Groups(torch.device("cpu"))
    while True:
        what = pipe.recv()
        for spec in specs:
            if what == "join":
                place = (spec.master_address, spec.master_port, spec.world_size)
                groups.join(Meeting(spec.name, spec.backend, *place, 1), SECONDS)
            elif what == "receive":
                buffers = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
                groups.receive(spec.name, buffers, SECONDS, lambda _: None)
                assert [int(buffer.sum()) for buffer in buffers] == [3 * SIZE, 4 * SIZE]
            else:
                groups.leave(spec.name)
        pipe.send((what, groups.names))


def group(name: str) -> GroupSpec:
    return GroupSpec(name, "gloo", "127.0.0.1", free_port(), 2)


def begin(side: WeightGroups, what: str, specs: Sequence[GroupSpec]) -> None:
    """A trainer's end of it."""
    for spec in specs:
        if what == "join":
            side.join([spec], SECONDS)
        elif what == "receive":
            side.send(Buckets(), [spec.name], SECONDS)
        else:
            side.leave([spec.name])


def whole_life(trainers: Sequence[Sequence[GroupSpec]], engines: Sequence[Sequence[GroupSpec]]) -> None:
    """Everybody joins, uses and leaves its groups, each in its own order."""
    began = time.monotonic()
    sides = [(WeightGroups(torch.device("cpu")), specs) for specs in trainers]
    members = [Engine(specs) for specs in engines]
    try:
        for what in ("join", "receive", "leave"):
            for member in members:
                member.tell(what)
            for side, specs in sides:
                begin(side, what, specs)
            for member, specs in zip(members, engines, strict=True):
                said, names = member.answer()
                assert said == what
                assert sorted(names) == ([] if what == "leave" else sorted(spec.name for spec in specs))
            for side, specs in sides:
                if what != "leave":
                    assert not any(side.errors([spec.name for spec in specs]).values())
        assert time.monotonic() - began < SECONDS, "nobody came to a deadline"
    finally:
        for side, _ in sides:
            side.leave_all()
        for member in members:
            member.end()


def test_one_trainer_and_one_engine_meet_in_two_groups_in_opposite_order():
    one, two = group("order-1"), group("order-2")
    whole_life([[one, two]], [[two, one]])


def test_two_trainers_and_two_engines_meet_crosswise():
    """As when a new trainer begins while the old one still makes its groups."""
    old = [group("old-a"), group("old-b")]
    new = [group("new-a"), group("new-b")]
    whole_life([old, new[::-1]], [[old[0], new[0]], [new[1], old[1]]])


def test_many_groups_of_one_trainer_stand_at_once():
    specs = [group(f"many-{number}") for number in range(6)]
    whole_life([specs], [[spec] for spec in reversed(specs)])
