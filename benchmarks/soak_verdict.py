"""What a soaked run shows at its end: the ledger of prompts, the versions of tokens, what was repeated. Pure.

Two witnesses that know nothing of each other are compared: the buffer's list of groups, and the files in which the
trainer kept every step's samples before it committed the step (the last file of a step is the one that counts).
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tetrarch.buffer.v1 import run_pb2

_SKIP = 1000
"""The store skips at least so many version numbers when it restarts (that makes no group older)."""
_COMMITTED = re.compile(r"weights committed .*\bversion=(\d+)")


@dataclass
class Ledger:
    """Where every prompt that was drawn has gone."""

    drawn: int = 0
    trained: int = 0
    evicted: int = 0
    in_hand: int = 0
    lost: list[int] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    """Steps of which buffer and files tell different things."""


@dataclass(frozen=True)
class Step:
    """A committed step as its file tells it."""

    number: int
    groups: dict[str, list[dict[str, Any]]]
    """Rows by group."""


def read_steps(directory: Path, count: int) -> list[Step]:
    """The files of the first `count` steps. Raises FileNotFoundError when one is missing."""
    steps = []
    for number in range(count):
        groups: dict[str, list[dict[str, Any]]] = {}
        for line in (directory / f"{number}.jsonl").open():  # splitlines() also cuts at characters of a response
            row = json.loads(line)
            groups.setdefault(row["group_id"], []).append(row)
        steps.append(Step(number, groups))
    return steps


def ledger_of(
    stats: run_pb2.RunStats, groups: Sequence[run_pb2.GroupInfo], steps: Sequence[Step], batch: int
) -> Ledger:
    """Compares the buffer's groups with its counts and with the files. `batch`: groups of a step."""
    by_state = Counter(group.state for group in groups)
    trained = {group.group_id: group.step for group in groups if group.state == run_pb2.GROUP_STATE_CONSUMED}
    ledger = Ledger(
        stats.drawn_count,
        len(trained),
        by_state[run_pb2.GROUP_STATE_EVICTED],
        sum(by_state.values()) - len(trained) - by_state[run_pb2.GROUP_STATE_EVICTED],
    )
    ordinals = Counter(group.ordinal for group in groups)
    ledger.lost = sorted(set(range(stats.drawn_count)) - set(ordinals))
    ledger.duplicated = [f"ordinal {ordinal}" for ordinal, count in ordinals.items() if count > 1]
    in_files: dict[str, int] = {}
    for step in steps:
        told = {group for group, number in trained.items() if number == step.number}
        if told != set(step.groups) or len(told) != batch:
            ledger.contradictions.append(f"step {step.number}: {len(told)} in the buffer, {len(step.groups)} in files")
        for group in step.groups:
            if group in in_files:
                ledger.duplicated.append(f"{group} in steps {in_files[group]} and {step.number}")
            in_files[group] = step.number
    ledger.duplicated += _asked_twice(steps, stats.row_count)
    return ledger


def _asked_twice(steps: Iterable[Step], rows: int) -> list[str]:
    """Prompts that were trained under two ordinals of the same epoch."""
    asked: dict[tuple[int, str], str] = {}
    twice = []
    for step in steps:
        for group, samples in step.groups.items():
            key = (samples[0]["ordinal"] // rows, samples[0]["prompt"])
            if asked.setdefault(key, group) != group:
                twice.append(f"{samples[0]['prompt']} in {asked[key]} and {group}")
    return twice


@dataclass
class Versions:
    """What the versions of all trained tokens show. A figure counts tokens."""

    tokens: int = 0
    unverified: int = 0
    unpublished: int = 0
    too_new: int = 0
    too_old: int = 0
    unlabelled: int = 0
    by_lag: Counter[int] = field(default_factory=Counter)
    went_back: list[str] = field(default_factory=list)


def verified_versions(node_log: Path) -> set[int]:
    """Versions that an engine served after its checksums were compared, as the node's log tells."""
    return {int(found[1]) for line in node_log.open(errors="replace") if (found := _COMMITTED.search(line))}


def versions_of(
    rows: Sequence[dict[str, Any]], steps: Sequence[Step], verified: set[int], max_staleness: int
) -> Versions:
    """Looks at every span of every trained sample.

    Args:
        rows: the run's history.
        verified: versions that some engine verified.
        max_staleness: published versions that a token may be behind.
    """
    found = Versions()
    published, taken_at = published_versions(rows), versions_at_take(rows)
    found.went_back = [f"{a} to {b}" for a, b in itertools.pairwise(published) if b <= a]
    known = set(published)
    for step in steps:
        at = taken_at[step.number]
        for row in itertools.chain.from_iterable(step.groups.values()):
            responses = len(row["tokens"]) - row["prompt_length"]
            found.tokens += responses
            spans = row["versions"]
            found.unlabelled += responses - sum(end - start for _, start, end in spans)
            for version, start, end in spans:
                lag = _lag(version, at, published)
                found.by_lag[lag] += end - start
                found.unverified += (end - start) * (version not in verified)
                found.unpublished += (end - start) * (version not in known)
                found.too_new += (end - start) * (version > at)
                found.too_old += (end - start) * (lag > max_staleness)
    return found


def published_versions(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Versions in the order in which the trainer published them."""
    return [int(row["policy_version"]) for row in rows if row["kind"] == "update_weights"]


def versions_at_take(rows: Sequence[dict[str, Any]]) -> dict[int, int]:
    """By step: the version that was published when its batch was taken, in the surviving history.

    That is the last one with just the steps before it: whoever trains a step again has pushed those weights again. (A
    step may have no line of its own: its trainer can die between the checkpoint and the line.)
    """
    return {row["step"] + 1: int(row["policy_version"]) for row in rows if row["kind"] == "update_weights"}


def _lag(version: int, at: int, published: Sequence[int]) -> int:
    """How many versions a token is behind; numbers that a restart of the store skipped do not count."""
    between = sorted({version, at, *(one for one in published if version < one < at)})
    return sum(1 if after - before >= _SKIP else after - before for before, after in itertools.pairwise(between))


@dataclass(frozen=True)
class Progress:
    """Steps in time."""

    steps: int
    repeated: int
    restores: int
    longest_gap: float
    median_gap: float


def progress_of(rows: Sequence[dict[str, Any]]) -> Progress:
    """How the run went on. Seconds."""
    ended = [row["time"] for row in rows if row["kind"] == "step"]
    kept = len({row["step"] for row in rows if row["kind"] == "step"})
    gaps = [after - before for before, after in itertools.pairwise(ended)] or [0.0]
    restores = sum(row["kind"] == "restore" for row in rows) - 1
    return Progress(kept, len(ended) - kept, restores, max(gaps), statistics.median(gaps))


def curve_of(rows: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(steps done, held-out reward), in order of time."""
    return [(row["step"] + 1, row["heldout/mean_reward"]) for row in rows if row["kind"] == "eval"]
