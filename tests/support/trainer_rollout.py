"""Rollout nodes of `trainer_world`: one node, whose engines keep what rank 0 staged last when they commit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from services.trainer.core.commands import ChecksumRule
from services.trainer.core.ports import Prepared, Received
from services.trainer.core.records import EngineState, EngineView, EvalResult, NodeView

if TYPE_CHECKING:
    from tests.support.trainer_world import World


_RULES = {"ab": ChecksumRule(("a", "b"))}


class MemoryRollout:
    """Engines that keep whatever rank 0 staged last when they commit."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.aborted: list[tuple[str, int]] = []
        self.epochs: list[int] = []
        self.groups: list[str] = []  # that each Prepare named, or its path
        self.rules: dict[str, dict[str, ChecksumRule]] = {}  # of engines that answer others than _RULES

    async def nodes(self) -> list[NodeView]:
        engines = tuple(self.world.engines.values())
        return [NodeView("n", "n:1", "r", engines, 1, 4, 100, 1.0, 2.0, 0.5, self.world.problem)]

    def _answer(self, call: str, engine: EngineView) -> None:
        self.world.tick(f"{call} {engine.engine_id}")
        fault = self.world.faults.get((call, engine.engine_id))
        if fault:
            self.world.engines[engine.engine_id] = replace(engine, state=EngineState.STALE, weight_version=0)
            raise fault

    async def prepare(self, engine: EngineView, request: Any, timeout: float) -> Prepared:
        self._answer("prepare", engine)
        assert not self.epochs or request.epoch >= max(self.epochs), "epochs only grow"
        self.epochs.append(request.epoch)
        self.groups.append(request.group.name if request.group else request.weights_path)
        return Prepared(True, "sha256-64", self.rules.get(engine.engine_id, _RULES))

    async def transfer(self, engine: EngineView, epoch: int, timeout: float) -> Received:
        self._answer("transfer", engine)
        return Received(56, 0.125)

    async def commit(self, engine: EngineView, epoch: int, version: int, checksums: dict, timeout: float) -> float:
        self._answer("commit", engine)
        assert checksums.keys() == self.rules.get(engine.engine_id, _RULES).keys(), (
            "an engine compares before it serves"
        )
        if checksums:
            self.world.held[engine.engine_id] = (version, int(checksums["ab"].removeprefix("sum of ")))
        self.world.engines[engine.engine_id] = replace(engine, state=EngineState.READY, weight_version=version)
        self.world.tick()
        return 0.25

    async def abort(self, engine: EngineView, epoch: int, reason: str, timeout: float) -> None:
        self.aborted.append((engine.engine_id, epoch))

    async def evaluate(self, node: NodeView, run_id: str, dataset: str, min_version: int, timeout: float) -> EvalResult:
        self.world.tick(f"evaluate {dataset}")
        return EvalResult(dataset, 0.5, 10, 0, 4.0, 0.1, min_version, min_version, 0.1)
