"""Which weight group an engine is in, update after update; real groups are in the contract suite."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import Code, ServiceError
from services.rollout.core import weights
from services.rollout.core.compatibility import TrainerSide
from services.rollout.core.counters import Counters
from services.rollout.core.engine_port import ChecksumRule, EngineInfo, GroupSpec, TensorSpec
from services.rollout.core.engine_state import EngineState
from services.rollout.core.fleet import Fleet
from services.rollout.core.update_state import UpdateRequest
from services.rollout.core.weights import WeightUpdates

TENSORS = (TensorSpec("a", "float32", (4,)),)


class ScriptedEngine:
    """Notes what it is asked; holds what the trainer expects."""

    url = "http://engine"
    checksum_algorithm = "sglang-tiled-64"
    staging = None

    def __init__(self):
        self.groups: list[str] = []
        self.asked: list[str] = []
        self.refusing: set[str] = set()
        self.hanging: set[str] = set()

    def __getattr__(self, name):
        async def call(*_):
            self.asked.append(name)
            return True

        return call

    async def join_group(self, group, timeout):
        await self._fail("join_group")
        self.groups.append(group.name)

    async def leave_group(self, name, timeout):
        await self._fail("leave_group")
        if name in self.groups:
            self.groups.remove(name)

    async def receive_bucket(self, specs, group_name, timeout):
        assert group_name in self.groups
        await self._fail("receive_bucket")

    async def checksums(self):
        return {"a": "1"}

    async def checksum_rules(self, specs):
        self.asked.append("checksum_rules")
        return [ChecksumRule("a", ("a",))]

    async def _fail(self, name):
        self.asked.append(name)
        if name in self.refusing:
            raise ServiceError(Code.INTERNAL, "ENGINE_REFUSED", f"{name} failed.")
        if name in self.hanging:
            await asyncio.sleep(60)


class Node:
    """One engine and its updates."""

    def __init__(self):
        class Router:
            async def add_worker(self, url, limits): ...
            async def remove_worker(self, url): ...

        self.fleet = Fleet("n", 1, Router())
        (self.slot,) = self.fleet.slots
        self.engine = self.slot.engine = ScriptedEngine()
        self.slot.reborn("life-1")
        self.slot.state = EngineState.STALE
        self.slot.info = EngineInfo("simulated", "", "", "", ("gloo",), {}, 64, 64, rank_count=1, max_running=8)
        self.updates = WeightUpdates(self.fleet, Counters(), "retract", 2.0)
        self.epoch = 0

    async def prepare(self, group: str):
        self.epoch += 1
        spec = GroupSpec(group, "gloo", "127.0.0.1", 9, 2, 1)
        trainer = TrainerSide("gloo", "")
        request = UpdateRequest("n-0", self.slot.incarnation, self.epoch, self.epoch, spec, trainer, (TENSORS,))
        return await self.updates.prepare(request, 2.0)

    async def update(self, group: str) -> None:
        await self.prepare(group)
        await self.updates.transfer("n-0", self.epoch, 2.0)
        await self.updates.commit("n-0", self.epoch, self.epoch, {"a": "1"}, 2.0)


async def test_an_engine_stays_in_its_group_and_says_once_what_it_holds():
    node = Node()
    for _ in range(3):
        await node.update("g1")
    assert node.engine.groups == ["g1"]
    assert node.engine.asked.count("join_group") == 1
    assert node.engine.asked.count("checksum_rules") == 1
    assert node.slot.state is EngineState.READY


async def test_prepare_names_the_engines_algorithm():
    result = await Node().prepare("g1")
    assert [rule.engine_name for rule in result.rules] == ["a"]
    assert not result.staged
    assert result.algorithm == "sglang-tiled-64"


async def test_another_group_is_joined_after_the_old_one_is_left():
    node = Node()
    await node.update("g1")
    await node.update("g2")
    assert node.engine.groups == ["g2"]
    assert node.slot.groups_left == {"g1"}


@pytest.mark.parametrize("where", ["before", "after"])
async def test_an_abort_ends_the_group_before_and_after_a_bucket(where):
    node = Node()
    await node.update("g1")
    await node.prepare("g1")
    if where == "after":
        await node.updates.transfer("n-0", node.epoch, 2.0)
    await node.updates.abort("n-0", node.epoch, "test")
    assert node.engine.groups == []
    assert node.slot.state is (EngineState.READY if where == "before" else EngineState.STALE)
    with pytest.raises(ServiceError) as caught:
        await node.prepare("g1")
    assert caught.value.reason == "GROUP_LEFT"
    await node.update("g2")
    assert node.slot.state is EngineState.READY


async def test_a_failed_bucket_ends_the_group():
    node = Node()
    await node.update("g1")
    node.engine.refusing = {"receive_bucket"}
    with pytest.raises(ServiceError):
        await node.update("g1")
    assert (node.engine.groups, node.slot.group) == ([], None)


async def test_a_silent_trainer_ends_the_group():
    node = Node()
    node.updates = WeightUpdates(node.fleet, Counters(), "retract", 0.2)
    await node.prepare("g1")
    await asyncio.sleep(0.5)
    assert (node.engine.groups, node.slot.group) == ([], None)


async def test_a_group_that_could_not_be_joined_is_left_and_not_named_again():
    node = Node()
    node.engine.refusing = {"join_group"}
    with pytest.raises(ServiceError, match="join_group failed"):
        await node.prepare("g1")
    assert (node.slot.group, node.slot.groups_left) == (None, {"g1"})
    assert node.slot.condemned == ""


@pytest.mark.parametrize("how", ["refusing", "hanging"])
async def test_an_engine_that_cannot_leave_a_dead_trainers_group_is_replaced(monkeypatch, how):
    monkeypatch.setattr(weights, "_LEAVE_SECONDS", -0.8)  # with a second of grace: 0.2 s
    node = Node()
    await node.update("g1")
    setattr(node.engine, how, {"leave_group"})
    with pytest.raises(ServiceError) as caught:
        await node.prepare("g2")
    assert caught.value.reason == "ENGINE_UNAVAILABLE"
    assert "did not leave" in node.slot.condemned
    assert "join_group" not in node.engine.asked[node.engine.asked.index("leave_group") :]


async def test_a_prepare_that_was_overtaken_leaves_the_newer_update_alone():
    node = Node()
    hold = asyncio.Event()

    async def slow_rules(specs):
        await hold.wait()
        return [ChecksumRule("a", ("a",))]

    node.engine.checksum_rules = slow_rules
    older = asyncio.create_task(node.prepare("g1"))
    await asyncio.sleep(0)
    del node.engine.checksum_rules
    await node.prepare("g2")
    hold.set()
    with pytest.raises(ServiceError) as caught:
        await older
    assert caught.value.reason == "FENCED"
    assert node.engine.groups == ["g2"]
    await node.updates.transfer("n-0", 2, 2.0)


async def test_a_run_made_anew_under_its_old_name_uses_group_names_again():
    node = Node()
    await node.update("g1")
    await node.update("g2")
    await node.fleet.begin_run("r", "made anew")
    node.epoch = 0
    await node.update("g1")
    assert node.engine.groups == ["g1"]


async def test_a_restarted_engine_knows_no_group():
    node = Node()
    await node.update("g1")
    node.slot.reborn("life-2")
    assert (node.slot.group, node.slot.groups_left, node.slot.rules) == (None, set(), None)
