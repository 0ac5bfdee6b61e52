"""`tetrarch samples` and `tetrarch export-samples`: which groups, and a step's samples as a file."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tetrarch.buffer.v1 import buffer_service_pb2 as buffer_pb
from tetrarch.buffer.v1 import run_pb2
from tetrarch.common.v1 import sample_pb2

from services.common.settings import SettingsError, suggest
from services.common.tensors import to_numpy
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
    write = _writer(out)
    count = asyncio.run(_export(source, name, step, write, console))
    console.print(f"{count} samples of step {step}: {out}")
    return 0


def _writer(out: Path) -> Callable[[list[dict[str, Any]]], None]:
    if out.suffix == ".jsonl":
        return lambda rows: _write_jsonl(out, rows)
    if out.suffix == ".parquet":
        return lambda rows: _write_parquet(out, rows)
    raise SettingsError(f"--out {out} ends in neither .jsonl nor .parquet; name one of these.")


async def _export(
    source: Source, name: str | None, step: int, write: Callable[[list[dict[str, Any]]], None], console: Console
) -> int:
    async with source.open(console) as (clients, _):
        run = await pick_run(clients, name)
        states = tuple(run_pb2.GroupState.Value(f"GROUP_STATE_{state}") for state in ("RESERVED", "CONSUMED"))
        infos = await clients.groups(run.run_id, GroupQuery(states, step - 1), _MOST_GROUPS)
        if not infos:
            raise SettingsError(
                f"Run {run.run_id} has no groups of step {step}; its last step is {run.committed_step + 1}."
            )
        rows = [row async for row in _rows(clients, run.run_id, [info.group_id for info in infos], step)]
    write(rows)
    return len(rows)


async def _rows(clients: Clients, run_id: str, group_ids: list[str], step: int):
    for group_id in group_ids:
        answer = await clients.group(run_id, group_id)
        if not answer.group.samples or not all(sample.tokens.data for sample in answer.group.samples):
            raise SettingsError(
                f"The tokens of group {group_id} are no longer stored: a checkpoint covers step {step}; export it"
                " before, or set save_interval and retained checkpoints so that they are kept longer."
            )
        for row in sample_rows(answer, run_id, step):
            yield row


def sample_rows(answer: buffer_pb.GetGroupResponse, run_id: str, step: int) -> Iterator[dict[str, Any]]:
    """A row per sample: what was asked, what was answered, and all that training needs."""
    prompt = answer.prompt
    for sample in answer.group.samples:
        yield {
            "run_id": run_id,
            "step": step,
            "group_id": sample.group_id,
            "ordinal": answer.info.ordinal,
            "index": sample.index,
            "dataset": prompt.dataset,
            "prompt": prompt.text,
            "label": prompt.label,
            "response": sample.response,
            "status": sample_pb2.SampleStatus.Name(sample.status).removeprefix("SAMPLE_STATUS_").lower(),
            "reward": sample.reward if sample.HasField("reward") else None,
            "unscored_reason": sample.unscored_reason,
            "reward_details_json": json.dumps(dict(sample.reward_details)),
            "metadata_json": sample.metadata_json,
            "prompt_length": sample.prompt_length,
            "tokens": to_numpy(sample.tokens).tolist(),
            "loss_mask": to_numpy(sample.loss_mask).tolist() if sample.loss_mask.data else [],
            "log_probs": to_numpy(sample.log_probs).tolist() if sample.log_probs.data else [],
            "versions": [[span.version, span.start, span.end] for span in sample.versions],
        }


def _write_jsonl(out: Path, rows: list[dict[str, Any]]) -> None:
    with out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_parquet(out: Path, rows: list[dict[str, Any]]) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise SettingsError(
            "A parquet file needs the package pyarrow: pip install 'tetrarch[parquet]'; or write .jsonl."
        ) from error
    # An empty list has no type of its own.
    kinds = {"tokens": pyarrow.int32(), "loss_mask": pyarrow.uint8(), "log_probs": pyarrow.float32()}
    table = pyarrow.Table.from_pylist(rows)
    for name, kind in kinds.items():
        column = pyarrow.array([row[name] for row in rows], pyarrow.list_(kind))
        table = table.set_column(table.schema.get_field_index(name), name, column)
    parquet.write_table(table, out)
