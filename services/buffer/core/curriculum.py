"""A mixture whose weights a user's function chooses anew for every block of ordinals.

The function is asked once a block, by whichever server draws from the block first; what it answered is kept in the
store, the first answer wins, and every server and every restart draws by it. Knows neither the store nor how the
function is found. Invariants: a block is decided after the one before it; a decided block never changes.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.buffer.core.mixture import Block, DecidedBlock, before_all
from services.common.errors import Code, ServiceError

FUNCTION_SECONDS = 10.0
RECENT = 1024
"""Ordinals before a block whose rewards the function is told."""
_KEPT_BLOCKS = 256


@dataclass(frozen=True)
class CurriculumState:
    """What a curriculum function is told. Mappings are by name of the data set.

    Attributes:
        block: number of the block whose weights are asked for, from 0; a block is one batch of prompts.
        ordinal: first ordinal of the block, the number of prompts drawn before it.
        step: steps trained so far.
        weights: weights of the block before; for block 0 those of the settings.
        drawn: prompts drawn from each set so far.
        scored: finished groups of each set among the last 1,024 prompts before the block.
        mean_reward: mean reward of those; None where there are none.
    """

    block: int
    ordinal: int
    step: int
    weights: Mapping[str, float]
    drawn: Mapping[str, int]
    scored: Mapping[str, int]
    mean_reward: Mapping[str, float | None]


class BlockStore(Protocol):
    """Where decided blocks are kept. Every call may raise STORE_UNAVAILABLE."""

    async def read_block(self, run_id: str, index: int) -> str | None:
        """A decided block."""
        ...

    async def decide_block(self, run_id: str, index: int, text: str) -> str:
        """Keeps a block unless there is one; returns the one that is kept."""
        ...

    async def last_block(self, run_id: str) -> tuple[int, str] | None:
        """The newest decided block."""
        ...

    async def rewards(self, run_id: str, ordinals: Sequence[int]) -> list[list[float]]:
        """Rewards of the samples of each group, empty where there are none (yet)."""
        ...

    async def trained_steps(self, run_id: str) -> int:
        """Steps committed so far."""
        ...


@dataclass(frozen=True)
class CurriculumSettings:
    """Which run, which sets with which first weights, how many ordinals a block has, and the function."""

    run_id: str
    names: tuple[str, ...]
    weights: tuple[float, ...]
    size: int
    function: Callable[[CurriculumState], Any]
    path: str


class CurriculumMixture:
    """The mixture of a run with a curriculum function."""

    def __init__(self, settings: CurriculumSettings, store: BlockStore) -> None:
        self._settings = settings
        self._store = store
        self._decided: OrderedDict[int, DecidedBlock] = OrderedDict()
        self._lock = asyncio.Lock()

    async def locate(self, ordinal: int) -> tuple[int, int]:
        """(set, its draws before) of an ordinal; decides its block if need be. Raises CURRICULUM_FAILED."""
        index, offset = divmod(ordinal, self._settings.size)
        async with self._lock:
            return (await self._block(index)).block.locate(offset)

    async def peek(self, ordinal: int) -> tuple[int, int] | None:
        """The same for an ordinal whose block is decided, else None."""
        index, offset = divmod(ordinal, self._settings.size)
        found = await self._known(index)
        return found.block.locate(offset) if found else None

    async def counts(self, drawn: int) -> list[int]:
        """Draws of each set among the first `drawn` ordinals, as far as their blocks are decided."""
        index, offset = divmod(drawn, self._settings.size)
        found = await self._known(index)
        if found is not None:
            return found.block.counts(offset)
        last = await self._store.last_block(self._settings.run_id)
        if last is None:
            return [0] * len(self._settings.names)
        return _parse(last[1]).block.counts(self._settings.size)

    async def _block(self, index: int) -> DecidedBlock:
        """A block, decided after all before it."""
        first = index
        while first > 0 and await self._known(first) is None:
            first -= 1
        for number in range(first, index + 1):
            if await self._known(number) is None:
                self._keep(number, await self._decide(number))
        found = await self._known(index)
        assert found is not None
        return found

    async def _decide(self, index: int) -> DecidedBlock:
        before = await self._known(index - 1) if index else before_all(len(self._settings.names))
        assert before is not None
        weights = await self._ask(await self._state(index, before))
        text = _render(before.following(weights, self._settings.size))
        return _parse(await self._store.decide_block(self._settings.run_id, index, text))

    async def _state(self, index: int, before: DecidedBlock) -> CurriculumState:
        settings = self._settings
        ordinal = index * settings.size
        recent = range(max(0, ordinal - RECENT), ordinal)
        rewards: list[list[float]] = [[] for _ in settings.names]
        groups = [0] * len(settings.names)
        for number, found in zip(recent, await self._store.rewards(settings.run_id, recent), strict=True):
            place = await self.peek(number) if found else None
            if place:
                rewards[place[0]] += found
                groups[place[0]] += 1
        drawn = [a + b for a, b in zip(before.block.starts, before.block.quotas, strict=True)]
        return CurriculumState(
            block=index,
            ordinal=ordinal,
            step=await self._store.trained_steps(settings.run_id),
            weights=dict(zip(settings.names, before.weights if index else settings.weights, strict=True)),
            drawn=dict(zip(settings.names, drawn, strict=True)),
            scored=dict(zip(settings.names, groups, strict=True)),
            mean_reward={
                name: math.fsum(values) / len(values) if values else None
                for name, values in zip(settings.names, rewards, strict=True)
            },
        )

    async def _ask(self, state: CurriculumState) -> list[float]:
        """The function's weights in the order of the sets. Raises CURRICULUM_FAILED."""
        try:
            async with asyncio.timeout(FUNCTION_SECONDS):
                answer = await asyncio.to_thread(self._settings.function, state)
        except TimeoutError as error:
            raise self._failed(f"it did not answer within {FUNCTION_SECONDS:.0f} s") from error
        except Exception as error:
            raise self._failed(f"it raised {type(error).__name__}: {error}") from error
        names = self._settings.names
        if not isinstance(answer, Mapping):
            raise self._failed(f"it returned {type(answer).__name__}; return a mapping of data set to weight")
        unknown = sorted(set(map(str, answer)) - set(names))
        if unknown:
            raise self._failed(f"it names {unknown[0]!r}; the data sets are {', '.join(names)}")
        try:
            weights = [float(answer.get(name, 0.0)) for name in names]
        except (TypeError, ValueError) as error:
            raise self._failed(f"a weight is no number ({error})") from error
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights):
            raise self._failed(f"its weights are {weights}; they must be finite, not below 0, and not all 0")
        return weights

    async def _known(self, index: int) -> DecidedBlock | None:
        if index in self._decided:
            self._decided.move_to_end(index)
            return self._decided[index]
        text = await self._store.read_block(self._settings.run_id, index)
        return None if text is None else self._keep(index, _parse(text))

    def _keep(self, index: int, decided: DecidedBlock) -> DecidedBlock:
        self._decided[index] = decided
        while len(self._decided) > _KEPT_BLOCKS:
            self._decided.popitem(last=False)
        return decided

    def _failed(self, why: str) -> ServiceError:
        path = self._settings.path
        return ServiceError(
            Code.FAILED_PRECONDITION,
            "CURRICULUM_FAILED",
            f"curriculum_path {path!r} gave no weights: {why}; correct the function and restart the buffer.",
            path=path,
            run_id=self._settings.run_id,
        )


def _render(decided: DecidedBlock) -> str:
    block = decided.block
    return json.dumps([block.starts, block.quotas, decided.owed, decided.weights])


def _parse(text: str) -> DecidedBlock:
    starts, quotas, owed, weights = (tuple(values) for values in json.loads(text))
    return DecidedBlock(Block(starts, quotas), owed, weights)
