"""The prompts of a run: its data sets, which of them an ordinal is drawn from, and in which order their rows come.

Knows files and tokenizers, not leases. Invariant: the same ordinal gives the same prompt on every server. What was
found when the run was created (rows of each set, which of the checked ones are too long, how rows are shuffled) is
kept with the run, so that another server draws the same.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from services.buffer.adapters.prompt_file import Place, PromptFile
from services.buffer.core import ids
from services.buffer.core.mixture import FixedMixture
from services.buffer.core.permutation import RowOrder
from services.buffer.core.records import Drawn
from services.common.errors import Code, ServiceError, invalid_field
from services.common.records import Prompt

_FORMAT = b"2"


class Mixture(Protocol):
    """Which data set an ordinal is drawn from, and how many ordinals of that set came before it."""

    async def locate(self, ordinal: int) -> tuple[int, int]:
        """(set, its draws before). Raises CURRICULUM_FAILED."""
        ...

    async def peek(self, ordinal: int) -> tuple[int, int] | None:
        """The same for what is decided, else None."""
        ...

    async def counts(self, drawn: int) -> list[int]:
        """Draws of each set among the first `drawn` ordinals."""
        ...


@dataclass(frozen=True)
class SteadyMixture:
    """A mixture with fixed weights (or of one set)."""

    fixed: FixedMixture

    async def locate(self, ordinal: int) -> tuple[int, int]:
        """(set, its draws before)."""
        return self.fixed.locate(ordinal)

    async def peek(self, ordinal: int) -> tuple[int, int] | None:
        """The same."""
        return self.fixed.locate(ordinal)

    async def counts(self, drawn: int) -> list[int]:
        """Draws of each set among the first `drawn` ordinals."""
        return self.fixed.counts(drawn)


@dataclass(frozen=True)
class DataPart:
    """One data set of a run: rows as prompts, their order, and the rows that were left out (int32)."""

    prompts: PromptFile
    order: RowOrder
    skipped: np.ndarray

    @property
    def name(self) -> str:
        """Name in the mixture; empty when the run has one set only."""
        return self.prompts.traits.dataset


class RunDataset:
    """Training and evaluation prompts of a run."""

    def __init__(
        self,
        run_id: str,
        parts: Sequence[DataPart],
        mixture: Mixture,
        evals: dict[str, PromptFile],
        malformed_limit: int,
    ) -> None:
        self._run_id = run_id
        self._parts = parts
        self._mixture = mixture
        self._evals = evals
        self.malformed_limit = malformed_limit
        self.row_count = sum(len(part.prompts) for part in parts)

    @property
    def skipped_count(self) -> int:
        """Rows left out because their prompt is too long, among those that were checked."""
        return sum(len(part.skipped) for part in self._parts)

    def skipped_rows(self) -> bytes:
        """What must be the same on every server: `Found` of every part."""
        return pack_found([Found(part.name, len(part.prompts), part.skipped) for part in self._parts])

    async def draw(self, ordinals: Sequence[int]) -> list[Drawn]:
        """What ordinals stand for. Raises DATA_NOT_FOUND, DATA_MALFORMED (not the file it was), CURRICULUM_FAILED."""
        wanted: dict[int, list[tuple[int, Place]]] = defaultdict(list)
        for at, ordinal in enumerate(ordinals):
            part, number = await self._mixture.locate(ordinal)
            epoch, position = self._parts[part].order.locate(number)
            wanted[part].append((at, Place(ids.group_id(self._run_id, ordinal), ordinal, epoch, position)))
        return await asyncio.to_thread(self._read, wanted, len(ordinals)) if ordinals else []

    def _read(self, wanted: dict[int, list[tuple[int, Place]]], count: int) -> list[Drawn]:
        found: dict[int, Drawn] = {}
        for part, places in wanted.items():
            drawn = self._parts[part].prompts.draw([place for _, place in places])
            found |= dict(zip((at for at, _ in places), drawn, strict=True))
        return [found[at] for at in range(count)]

    async def origins(self, ordinals: Sequence[int]) -> list[tuple[str, int]]:
        """(data set of the mixture, its epoch) of drawn ordinals."""
        found = []
        for ordinal in ordinals:
            part, number = await self._mixture.peek(ordinal) or (0, 0)
            found.append((self._parts[part].name, self._parts[part].order.locate_epoch(number)))
        return found

    async def drawn_by_dataset(self, drawn: int) -> dict[str, int]:
        """How many of the first `drawn` ordinals each set of the mixture has; empty when there is one set only."""
        if not self._parts[0].name:
            return {}
        counts = await self._mixture.counts(drawn)
        return {part.name: count for part, count in zip(self._parts, counts, strict=True)}

    async def eval_prompts(self, name: str, start: int, count: int) -> tuple[list[Prompt], int]:
        """(prompts from row `start`, rows in all) of an evaluation set. Raises DATASET_NOT_FOUND."""
        found = self._evals.get(name)
        if found is None:
            known = ", ".join(sorted(self._evals)) or "none; set eval_prompt_data"
            raise ServiceError(
                Code.NOT_FOUND,
                "DATASET_NOT_FOUND",
                f"Run {self._run_id} has no evaluation set {name!r}; it has: {known}.",
                dataset=name,
                run_id=self._run_id,
            )
        rows = range(start, min(start + count, len(found)))
        places = [Place(f"eval-{name}-{row}", row, 0, row) for row in rows]
        return (await asyncio.to_thread(found.prompts, places) if places else []), len(found)


@dataclass(frozen=True)
class Found:
    """What was found of a data set when the run was created. `skipped`: row numbers left out."""

    name: str
    row_count: int
    skipped: np.ndarray


def pack_found(found: Sequence[Found]) -> bytes:
    """Bytes for the store."""
    sets = [[part.name, part.row_count, np.diff(part.skipped, prepend=0).tolist()] for part in found]
    return _FORMAT + zlib.compress(json.dumps(sets).encode())


def unpack_found(packed: bytes) -> tuple[list[Found], bool]:
    """(sets, whether the run was made by a release before 0.2, which knew one set only and shuffled by tables)."""
    if not packed.startswith(_FORMAT):
        rows = np.frombuffer(zlib.decompress(packed), "<i4") if packed else np.zeros(0, np.int32)
        return [Found("", -1, np.cumsum(rows))], True
    sets = json.loads(zlib.decompress(packed[len(_FORMAT) :]))
    return [Found(name, count, np.cumsum(np.array(rows, np.int64))) for name, count, rows in sets], False


def open_part(prompts: PromptFile, found: Found | None, order: RowOrderSettings) -> DataPart:
    """A data set that is looked at now (`found` None), or as it was found before. Raises DATA_*, INVALID_FIELD."""
    if found is None:
        mask = prompts.check()
    else:
        mask = ~np.isin(prompts.file.rows(), found.skipped) if len(found.skipped) else np.ones(len(prompts), bool)
    if not mask.any():
        why = f"every prompt of {prompts.source} is longer; raise it"
        raise invalid_field("rollout_max_prompt_len", prompts.max_length, why)
    skipped = prompts.file.rows()[~mask] if not mask.all() else np.zeros(0, np.int32)
    prompts.file.keep(mask)
    if found is not None and found.row_count >= 0 and found.row_count != len(prompts) and prompts.traits.dataset:
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "DATA_MALFORMED",
            f"{prompts.source} has {len(prompts)} usable rows, but {found.row_count} when the run was created; put the"
            " file back, or start a run with another run_id.",
            path=prompts.source,
        )
    row_order = RowOrder(len(prompts), shuffle=order.shuffle, seed=order.seed, tables=order.tables)
    return DataPart(prompts, row_order, skipped)


@dataclass(frozen=True)
class RowOrderSettings:
    """How rows are ordered; see RowOrder."""

    shuffle: bool
    seed: int
    tables: bool = False

    def seeded_for(self, name: str) -> RowOrderSettings:
        """The same with a seed of its own for a set of a mixture."""
        return replace(self, seed=self.seed + (zlib.crc32(name.encode()) << 32))
