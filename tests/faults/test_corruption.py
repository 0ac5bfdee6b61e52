"""Weights that are not what was meant: never served, named, and gone with the next good update.

The trainer's side is the real updater, client and groups over a rank without a model; node and engines are processes.
Each engine of the real kinds is checked by what it holds, whatever the damage; meanwhile requests go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import grpc
import pytest
import torch
from safetensors.torch import load_file
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.rollout.v1 import rollout_service_pb2 as pb2

from services.common import fault_points
from services.common.convert import sample_from_proto
from services.trainer import convert
from services.trainer.adapters.rollout_client import GrpcRollout
from services.trainer.core.update_report import UpdateReport
from services.trainer.ranks.weights import StagedWeights
from tests.contract.rollout_v1.conftest import Client, World, until
from tests.support.lying_receiver import installed
from tests.support.node_world import MODES, node_world, run_on
from tests.support.process_memory import flip
from tests.support.weight_rank import WeightRank, altered, updater

TENSOR = "model.layers.1.mlp.down_proj.weight"
"""The same name in every engine."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Where the node's processes look for modules."""
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def lie(directory) -> Iterator[Path]:
    """A file that makes the next receiver lie."""
    with installed(directory) as flag:
        yield flag


@pytest.fixture(scope="module")
def world(directory, lie) -> Iterator[World]:
    """A node."""
    with node_world(directory) as world:
        yield world


@dataclass
class Scene:
    """A run with its engines at version 1, and a trainer's end."""

    client: Client
    rank: WeightRank
    rollout: GrpcRollout
    push: Callable
    good: dict[str, torch.Tensor]
    count: int
    kind: str
    version: int = 0

    @property
    def neighbours(self) -> list[str]:
        """Engine tensors beside TENSOR in its bucket: of many that are wrong the first few are named."""
        bucket = next(b for b in self.rank.staged.plan.buckets if TENSOR in {spec.name for spec in b})
        return [spec.name for spec in bucket if "q_proj" not in spec.name] if len(bucket) > 1 else []

    async def update(self, **changes: torch.Tensor | None) -> UpdateReport:
        """Pushes the next version: the good tensors, moved a little, but for `changes` by name (None: left out)."""
        self.version += 1
        tensors = {name: tensor + 0.001 * self.version for name, tensor in self.good.items()} | changes
        self.rank.tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return await self.push(self.version)

    async def engines(self) -> list[engine_pb2.Engine]:
        return list((await self.client.node()).engines)

    async def assert_good_again(self, before: list[engine_pb2.Engine]) -> None:
        """The next update holds everywhere, and no process was replaced for it."""
        self.rank.alter = None
        report = await self.update()
        assert len(report.committed) == self.count, report.failed
        after = await self.engines()
        assert [(engine.pid, engine.incarnation) for engine in after] == [(e.pid, e.incarnation) for e in before]
        assert {engine.weight_version for engine in after} == {self.version}

    @contextlib.asynccontextmanager
    async def requests(self) -> AsyncIterator[set[int]]:
        """Requests without a pause; → the versions of the tokens that came back."""
        seen: set[int] = set()

        async def ask() -> None:
            request = pb2.GenerateRequest(
                run_id=self.client.run_id, prompt={"text": "1"}, sampling={"max_new_tokens": 4}
            )
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    for sample in (await self.client.rollout.Generate(request, timeout=2.0)).samples:
                        seen.update(span.version for span in sample_from_proto(sample).versions)
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(ask()) for _ in range(2)]
        try:
            yield seen
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="module", params=MODES)
def mode(request) -> str:
    """All tests of a mode follow each other: its engines are started once."""
    return request.param


@pytest.fixture
async def scene(mode, world) -> AsyncIterator[Scene]:
    """A run of its own on the mode's engines."""
    async with run_on(world, mode) as client:
        count = MODES[mode]["rollout_num_gpus"]
        await client.engines(engine_pb2.ENGINE_STATE_STALE, count, seconds=240.0)

        async def where() -> list[str]:
            return [world.node.address]

        rank, rollout = WeightRank({}), GrpcRollout(where)
        pusher = updater(rank, rollout, client.run_id, client.session)

        async def push(version: int) -> UpdateReport:
            await pusher.stage()
            engines = [engine for node in await rollout.nodes() for engine in node.engines if engine.joinable]
            return await pusher.push(version, engines)

        scene = Scene(client, rank, rollout, push, load_file(world.checkpoint / "model.safetensors"), count, mode)
        report = await scene.update()
        assert len(report.committed) == count, report.failed
        await client.publish(1)
        yield scene
        await rank.stop()
        await rollout.close()


def flipped_bit(staged: StagedWeights) -> None:
    view = staged._places[TENSOR][1]
    view[len(view) // 2] ^= 4


def swapped(staged: StagedWeights) -> None:
    """Two tensors of one shape in each other's place."""
    one, other = staged._places[TENSOR][1], staged._places[TENSOR.replace("layers.1", "layers.0")][1]
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def uninitialised(staged: StagedWeights) -> None:
    """A whole bucket of memory that nobody wrote."""
    bucket = staged.buckets[staged._places[TENSOR][0]]
    bucket.random_(0, 256)


@pytest.mark.parametrize("damage", [flipped_bit, swapped, uninitialised])
async def test_other_bytes_than_were_staged_are_named_and_never_served(scene, damage):
    before = await scene.engines()
    scene.rank.alter = altered(damage)
    async with scene.requests() as seen:
        report = await scene.update()
        hit = before[0].engine_id
        assert set(report.failed) == {hit}
        assert hit in report.failed[hit]
        assert any(name in report.failed[hit] for name in (TENSOR, *scene.neighbours)), report.failed
        (engine, *others) = await scene.engines()
        assert (engine.state, engine.weight_version) == (engine_pb2.ENGINE_STATE_STALE, 0)
        assert all(other.weight_version == scene.version for other in others)
        assert len(report.committed) == len(others)
        await asyncio.sleep(0.3)
    assert seen <= ({1, scene.version} if others else {1})
    await scene.assert_good_again(before)


def other_dtype(good: dict[str, torch.Tensor]) -> dict:
    return {TENSOR: good[TENSOR].half()}


def left_out(good: dict[str, torch.Tensor]) -> dict:
    return {TENSOR: None}


def one_too_many(good: dict[str, torch.Tensor]) -> dict:
    return {TENSOR.replace("layers.1", "layers.7"): good[TENSOR]}


def other_shape(good: dict[str, torch.Tensor]) -> dict:
    return {TENSOR: good[TENSOR].T.contiguous()}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (other_dtype, f"{TENSOR} is sent as float16"),
        (left_out, f"not in the update, the first is {TENSOR}"),
        (one_too_many, "no place in the engine, the first is model.layers.7."),
        (other_shape, f"Tensor {TENSOR} of the update has shape [128, 64], and [64, 128]"),
    ],
)
async def test_a_plan_that_is_not_the_models_is_refused_before_anything_is_sent(scene, damage, named):
    if damage is other_dtype and scene.kind.startswith("simulated"):
        pytest.skip("it holds what it is sent")
    before = await scene.engines()
    report = await scene.update(**damage(scene.good))
    assert set(report.failed) == {engine.engine_id for engine in before}
    assert all(named in why for why in report.failed.values()), report.failed
    after = await scene.engines()
    assert [(e.state, e.weight_version) for e in after] == [(engine_pb2.ENGINE_STATE_READY, 1)] * scene.count
    await scene.assert_good_again(before)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"plan_digest": "0" * 16}, "but the trainer means 0000000000000000"),
        ({"bucket_tensor_counts": [1]}, "bucket_tensor_counts"),
        ({"bucket_tensor_counts": []}, "bucket_tensor_counts"),
        ({"bucket_tensor_counts": [-1, 26]}, "bucket_tensor_counts"),
    ],
)
async def test_a_plan_that_does_not_fit_its_tensors_is_refused(world, scene, changes, named):
    """What a trainer of another release might send."""
    before = await scene.engines()
    real = convert.prepare_to_proto

    def altered_message(engine, request):
        message = real(engine, request)
        for name, value in changes.items():
            message.ClearField(name)
            message.MergeFrom(type(message)(**{name: value}))
        return message

    with mock.patch.object(convert, "prepare_to_proto", altered_message):
        report = await scene.update()
    assert all(named in why for why in report.failed.values()), report.failed
    assert len(report.failed) == scene.count
    assert {engine.weight_version for engine in await scene.engines()} == {1}
    await scene.assert_good_again(before)


async def test_an_engine_that_says_all_is_there_and_received_nothing_serves_nothing_of_it(scene, lie):
    if scene.kind == "simulated-direct":
        pytest.skip("it has no receiver")
    before = await scene.engines()
    lie.touch()
    async with scene.requests() as seen:
        report = await scene.update()
        assert not lie.exists()
        ((liar, why),) = report.failed.items()
        assert "holds other bytes than were sent in" in why
        assert liar in why
        states = {engine.engine_id: (engine.state, engine.weight_version) for engine in await scene.engines()}
        assert states.pop(liar) == (engine_pb2.ENGINE_STATE_STALE, 0)
        assert set(states.values()) <= {(engine_pb2.ENGINE_STATE_READY, scene.version)}
    assert seen <= {1, scene.version} if states else {1}
    await scene.assert_good_again(before)


async def test_a_bit_that_flips_in_the_staging_memory_is_named(scene, tmp_path, monkeypatch):
    """Between the last bucket and Commit."""
    if scene.kind == "simulated-direct":
        pytest.skip("it has no staging memory")
    before = await scene.engines()
    monkeypatch.setenv(fault_points.VARIABLE, str(tmp_path))
    held = [tmp_path / f"trainer.before_commit@{number}" for number in range(scene.count)]
    for file in held:
        file.write_text("{}")
    updating = asyncio.create_task(scene.update())
    reached = [file.with_name(file.name + fault_points.REACHED) for file in held]

    async def all_are_there() -> bool:
        return all(file.exists() for file in reached)

    await until(all_are_there, 30.0)
    pattern = scene.rank.tensors[TENSOR].numpy().tobytes()
    try:
        count = await asyncio.to_thread(flip, before[0].pid, pattern, len(pattern) // 2)
    except PermissionError:
        count = 0
    for file in reached:
        file.unlink()
    report = await updating
    if not count:
        pytest.skip("no right to write into the memory of an engine")
    (why,) = (report.failed[engine_id] for engine_id in {before[0].engine_id} & report.failed.keys())
    assert "in 1 of" in why
    assert TENSOR in why
    assert len(report.committed) == scene.count - 1
    states = [(engine.state, engine.weight_version) for engine in await scene.engines()]
    assert states[0] == (engine_pb2.ENGINE_STATE_STALE, 0)
    await scene.assert_good_again(before)
