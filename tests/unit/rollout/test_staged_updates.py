"""The order in which an engine that stages is asked, and what becomes of it when a step fails."""

from __future__ import annotations

import pytest

from services.common.errors import Code, ServiceError
from services.rollout.core.engine_port import Activation
from services.rollout.core.engine_state import EngineState
from tests.unit.rollout.test_update_groups import Node

STANDSTILL = ["pause", "flush_cache", "begin_update", "activate", "end_update", "set_version", "resume"]


class ScriptedStaging:
    """Notes what it is asked among what its engine is asked. `copies`: it repeats copies when it may; `told`: its
    checksums."""

    def __init__(self, engine):
        self.engine = engine
        self.failing: dict[str, Code] = {}
        self.copies = False
        self.trusted = False
        self.told: dict[str, str] = {}
        self.repeats: list[bool] = []

    def _note(self, name):
        self.engine.asked.append(name)
        if name in self.failing:
            raise ServiceError(self.failing[name], "ENGINE_REFUSED", f"{name} failed.")

    async def reserve(self, buckets, timeout):
        self._note("reserve")

    async def drop(self):
        self._note("drop")

    async def join_group(self, group, timeout):
        self._note("join_group")

    async def leave_group(self, name, timeout):
        self._note("leave_group")

    async def receive(self, epoch, group_name, timeout):
        self._note("receive")
        return 0.5

    async def activate(self, epoch, timeout, *, repeat, names=()):
        self._note("activate")
        self.repeats.append(repeat)
        assert list(names) == ["a"]
        return Activation("copied" if repeat and self.copies else "loaded", self.told)


@pytest.fixture
async def node():
    """An engine that serves version 1 and is in group g."""
    node = Node()
    node.engine.staging = ScriptedStaging(node.engine)
    await node.update("g")
    node.engine.asked.clear()
    return node


async def test_an_engine_stands_still_in_commit_alone(node):
    result = await node.prepare("g")
    assert result.staged
    moved = await node.updates.transfer("n-0", node.epoch, 2.0)
    assert (moved.received_bytes, moved.seconds) == (16, 0.5)
    assert node.engine.asked == ["reserve", "receive"]
    assert (node.slot.state, node.slot.version) == (EngineState.READY, 1)
    await node.updates.commit("n-0", 2, 2, {"a": "1"}, 2.0)
    assert node.engine.asked[2:] == STANDSTILL
    assert (node.slot.state, node.slot.version) == (EngineState.READY, 2)


async def test_a_transfer_that_fails_costs_the_group_and_not_the_version(node):
    node.engine.staging.failing = {"receive": Code.INTERNAL}
    await node.prepare("g")
    with pytest.raises(ServiceError, match="keeps version 1") as caught:
        await node.updates.transfer("n-0", node.epoch, 2.0)
    assert caught.value.reason == "TRANSFER_FAILED"
    assert node.engine.asked == ["reserve", "receive", "leave_group"]
    assert (node.slot.state, node.slot.version, node.slot.group) == (EngineState.READY, 1, None)


async def test_weights_that_were_not_transferred_are_not_committed(node):
    await node.prepare("g")
    with pytest.raises(ServiceError) as caught:
        await node.updates.commit("n-0", node.epoch, 2, {"a": "1"}, 2.0)
    assert caught.value.reason == "EPOCH_NOT_PREPARED"
    assert (node.slot.state, node.slot.version) == (EngineState.READY, 1)


async def test_an_activation_that_fails_leaves_an_engine_that_serves_nobody(node):
    node.engine.staging.failing = {"activate": Code.INTERNAL}
    with pytest.raises(ServiceError, match="activate failed"):
        await node.update("g")
    assert (node.slot.state, node.slot.version) == (EngineState.STALE, 0)
    assert node.engine.asked[-3:] == ["leave_group", "end_update", "abort_all"]


async def test_memory_that_does_not_suffice_makes_it_stand_still_from_the_first_byte_on(node):
    node.engine.staging.failing = {"reserve": Code.RESOURCE_EXHAUSTED}
    result = await node.prepare("g2")
    assert not result.staged
    assert node.engine.groups == ["g2"]  # the engine's own, and the receiver has left
    assert node.engine.asked == ["reserve", "leave_group", "join_group"]
    await node.updates.transfer("n-0", node.epoch, 2.0)
    assert (node.slot.state, node.slot.version) == (EngineState.UPDATING, 0)
    await node.updates.commit("n-0", node.epoch, 2, {"a": "1"}, 2.0)
    assert node.slot.version == 2


async def test_the_group_of_one_way_is_not_that_of_the_other(node):
    """The trainer keeps the name; the receiver is in that group, and the engine itself is not."""
    node.engine.staging.failing = {"reserve": Code.RESOURCE_EXHAUSTED}
    with pytest.raises(ServiceError) as caught:
        await node.prepare("g")
    assert caught.value.reason == "GROUP_LEFT"
    await node.update("g2")
    assert node.slot.version == node.epoch


async def test_copies_that_do_not_hold_are_loaded_again(node):
    node.engine.staging.copies = True
    held = iter([{"a": "old"}, {"a": "1"}])

    async def checksums():
        return next(held)

    node.engine.checksums = checksums
    await node.update("g")
    assert node.engine.staging.repeats[1:] == [True, False]
    assert (node.slot.state, node.slot.version) == (EngineState.READY, 2)


async def test_bytes_that_are_wrong_both_ways_are_never_served(node):
    node.engine.staging.copies = True
    count_checksums(node.engine, {"a": "old"})
    with pytest.raises(ServiceError) as caught:
        await node.update("g")
    assert caught.value.reason == "CHECKSUM_MISMATCH"
    assert (node.slot.state, node.slot.version) == (EngineState.STALE, 0)
    assert node.engine.staging.repeats[1:] == [True, False]


def count_checksums(engine, held: dict[str, str]) -> list[str]:
    """Has the engine hold `held`; → grows with every time that it is asked."""
    asked = []

    async def checksums():
        asked.append("checksums")
        return held

    engine.checksums = checksums
    return asked


async def test_a_receivers_checksums_count_once_they_were_the_engines_own(node):
    staging = node.engine.staging
    asked = count_checksums(node.engine, {"a": "1"})
    staging.told = {"a": "1"}
    await node.update("g")
    assert (asked, staging.trusted) == (["checksums"], True)
    staging.copies = True
    await node.update("g")
    assert asked == ["checksums"]
    assert (node.slot.state, node.slot.version) == (EngineState.READY, 3)


async def test_a_receiver_that_tells_other_checksums_is_not_believed(node):
    staging = node.engine.staging
    asked = count_checksums(node.engine, {"a": "1"})
    staging.told, staging.copies = {"a": "2"}, True
    await node.update("g")
    await node.update("g")
    assert len(asked) == 2
    assert not staging.trusted
    assert (node.slot.state, node.slot.version) == (EngineState.READY, 3)


async def test_copies_that_a_trusted_receiver_finds_wrong_are_loaded_again(node):
    staging = node.engine.staging
    asked = count_checksums(node.engine, {"a": "1"})
    staging.trusted, staging.told, staging.copies = True, {"a": "old"}, True
    await node.update("g")
    assert staging.repeats[1:] == [True, False]
    assert (asked, staging.trusted) == (["checksums"], False)
    assert (node.slot.state, node.slot.version) == (EngineState.READY, 2)
