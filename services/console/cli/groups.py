"""`tetrarch samples` and `tetrarch export-samples`: which groups, and a step's samples as a file."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tetrarch.buffer.v1 import run_pb2

from services.common.sample_file import SUFFIXES, write_rows
from services.common.sample_rows import has_tokens, sample_rows
from services.common.settings import SettingsError, suggest
from services.console.adapters.clients import Clients, GroupQuery
from services.console.cli.look import Source, group_panel, pick_run

_MOST_GROUPS = 20_000
"""Groups looked through for the best, the worst or a reward."""
_STATES = ("pending", "leased", "ready", "reserved", "consumed", "evicted")
_WITH_SAMPLES = ("ready", "reserved", "consumed")


@dataclass(frozen=True)
class Selection:
    """Which groups to show.

    Args:
        step: from 1.
        states: names; empty: those that have samples.
        start: ordinal of the first; pages go on from there. None: the latest.
        min_reward: least mean reward.
    """

    step: int | None = None
    best: bool = False
    worst: bool = False
    count: int = 3
    states: tuple[str, ...] = ()
    dataset: str | None = None
    reasons: tuple[str, ...] = ()
    min_reward: float | None = None
    start: int | None = None

    def query(self) -> GroupQuery:
        """What the buffer is asked for. Raises SettingsError."""
        if self.best and self.worst:
            raise SettingsError("--best and --worst exclude each other; give one of them.")
        if self.start is not None and (self.best or self.worst):
            raise SettingsError("--from goes through groups in order; leave out --best and --worst.")
        for state in self.states:
            if state not in _STATES:
                raise SettingsError(
                    f"--state {state!r} is no state; use some of {', '.join(_STATES)}.{suggest(state, _STATES)}"
                )
        names = self.states or (("evicted",) if self.reasons else _WITH_SAMPLES)
        states = [run_pb2.GroupState.Value(f"GROUP_STATE_{name.upper()}") for name in names]
        step = None if self.step is None else self.step - 1
        return GroupQuery(tuple(states), step, self.reasons, self.dataset or "", self.start or 0)


def show_samples(source: Source, name: str | None, selection: Selection, console: Console) -> int:
    """Prints groups; returns the exit code."""
    query = selection.query()
    asyncio.run(_samples(source, name, (selection, query), console))
    return 0


async def _samples(source: Source, name: str | None, wanted: tuple[Selection, GroupQuery], console: Console) -> None:
    selection, query = wanted
    async with source.open(console) as (clients, _):
        run = await pick_run(clients, name)
        # In order and without a look at rewards, a page and one more is enough.
        simple = selection.start is not None and selection.min_reward is None
        found = await clients.groups(run.run_id, query, selection.count + 1 if simple else _MOST_GROUPS)
        infos, following = choose(found, selection)
        if not infos:
            console.print(f"Run {run.run_id} has no such groups.")
            return
        for info in infos:
            console.print(group_panel(await clients.group(run.run_id, info.group_id)))
        if following is not None:
            console.print(f"more from ordinal {following}: add --from {following}", style="bright_black")


def choose(infos: list[run_pb2.GroupInfo], selection: Selection) -> tuple[list[run_pb2.GroupInfo], int | None]:
    """(best, worst, next or latest groups, ordinal of the first left out after them).

    Groups without a scored sample are neither best nor worst, and below every least reward.
    """
    if selection.min_reward is not None:
        infos = [info for info in infos if mean_reward(info) >= selection.min_reward]
    if selection.best or selection.worst:
        scored = [info for info in infos if not math.isnan(mean_reward(info))]
        return sorted(scored, key=mean_reward, reverse=selection.best)[: selection.count], None
    if selection.start is None:
        return infos[-selection.count :], None
    rest = infos[selection.count :]
    return infos[: selection.count], rest[0].ordinal if rest else None


def mean_reward(info: run_pb2.GroupInfo) -> float:
    """Mean over scored samples; NaN when there is none."""
    rewards = [reward for reward in info.rewards if not math.isnan(reward)]
    return sum(rewards) / len(rewards) if rewards else math.nan


# -- export


def export_samples(source: Source, name: str | None, step: int, out: Path, console: Console) -> int:
    """Writes every sample of a step with its tokens; returns the exit code."""
    if out.suffix not in SUFFIXES:
        raise SettingsError(f"--out {out} ends in neither .jsonl nor .parquet; name one of these.")
    rows = asyncio.run(_export(source, name, step, console))
    try:
        write_rows(out, rows)
    except ModuleNotFoundError as error:
        raise SettingsError(
            "A parquet file needs the package pyarrow: pip install 'tetrarch[parquet]'; or write .jsonl."
        ) from error
    except OSError as error:
        raise SettingsError(f"--out {out} cannot be written: {error.strerror}.") from error
    console.print(f"{len(rows)} samples of step {step}: {out}")
    return 0


async def _export(source: Source, name: str | None, step: int, console: Console) -> list[dict[str, Any]]:
    async with source.open(console) as (clients, _):
        run = await pick_run(clients, name)
        states = tuple(run_pb2.GroupState.Value(f"GROUP_STATE_{state}") for state in ("RESERVED", "CONSUMED"))
        infos = await clients.groups(run.run_id, GroupQuery(states, step - 1), _MOST_GROUPS)
        if not infos:
            raise SettingsError(
                f"Run {run.run_id} has no groups of step {step}; its last step is {run.committed_step + 1}."
            )
        return [row async for row in _rows(clients, run.run_id, [info.group_id for info in infos], step)]


async def _rows(clients: Clients, run_id: str, group_ids: list[str], step: int):
    for group_id in group_ids:
        answer = await clients.group(run_id, group_id)
        if not has_tokens(answer):
            raise SettingsError(
                f"The tokens of group {group_id} are no longer stored: a checkpoint covers step {step}; export it"
                " before, or set save_interval and retained checkpoints so that they are kept longer."
            )
        for row in sample_rows(answer, run_id, step):
            yield row
