"""`python -m benchmarks.soak --minutes 30 --seed 1`: processes of every tier are killed while the demo's run learns.

The tiers are those of `tetrarch up`, the run that of the demo: GRPO with real SGLang on the CPU, two engines, one step
of overlap. Nobody types anything: after every strike the run has to go on by itself. At the end it must have learned,
and the ledger of prompts and the versions of tokens must be clean.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tetrarch.rollout.v1 import engine_pb2

from benchmarks.report import Figure, finish, parser
from benchmarks.soak_strikes import TIERS, Deck, Striker
from benchmarks.soak_verdict import (
    Ledger,
    Versions,
    curve_of,
    ledger_of,
    progress_of,
    read_steps,
    verified_versions,
    versions_of,
)
from benchmarks.soak_world import World
from benchmarks.workspace import BENCH_DIR, sft_workspace, tiers_up
from examples.first_run.__main__ import Workspace
from services.common.fault_points import VARIABLE

BATCH, MAX_STALENESS, SAVE_INTERVAL, EVAL_INTERVAL = 32, 1, 3, 25
START_SECONDS = 1200.0
STANDSTILL_SECONDS = 240.0
"""Longest time without a step. A run that needs longer does not go on by itself."""
SETTLE_SECONDS = 240.0
STOP_SECONDS = 120.0
KILLS_PER_MINUTE = 2.6
LEARNED = 0.9


class Standstill(Exception):
    """The run did not go on; the message says after what and what its parts say."""


class Teller:
    """Lines for whoever watches, and for a file."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.file = log.open("w")
        self._began = time.monotonic()
        self._console = Console(width=150, soft_wrap=True, highlight=False)

    def show(self, table: Table) -> None:
        """Shows a table."""
        for file in (None, self.file):
            Console(width=120, file=file).print(table)
        self.file.flush()

    def __call__(self, text: str) -> None:
        """Tells a line with the minutes passed."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self._console.print(f"{minutes:02}:{seconds:02} {text}", markup=False)
        self.file.write(f"{minutes:02}:{seconds:02} {text}\n")
        self.file.flush()


def flags_of(chosen: argparse.Namespace, samples: Path) -> list[str]:
    """What differs from the demo: two engines, overlap, more steps than the time allows, and a smaller learning rate
    the longer the soak, so that the run learns through most of it."""
    rate = min(3e-4, 1.2e-3 / chosen.minutes)
    return [
        *("--rollout-num-gpus", "2", "--max-staleness", str(MAX_STALENESS), "--num-rollout", "100000"),
        *("--rollout-batch-size", str(BATCH), "--lr", f"{rate:.2e}", "--lr-decay-style", "constant"),
        *("--save-interval", str(SAVE_INTERVAL), "--eval-interval", str(EVAL_INTERVAL)),
        *("--save-debug-rollout-data", str(samples), "--lease-ttl", "20", "--update-timeout", "20"),
    ]


async def soak(world: World, chosen: argparse.Namespace, say: Teller) -> Striker:
    """Starts the run, strikes for the time given, and lets it settle. Raises Standstill."""
    chance = random.Random(chosen.seed)
    striker = Striker(world, Deck(random.Random(chance.random())), chance)
    world.start(flags_of(chosen, world.run_dir / "samples"))
    if not await world.steps_more(2, START_SECONDS):
        raise Standstill(f"The run did not begin within {START_SECONDS:.0f} s; {await _state(world)}")
    say(f"run {world.run_id} has begun; {chosen.kills} kills in {chosen.minutes:g} minutes, seed {chosen.seed}")
    began = time.monotonic()
    pace = chosen.minutes * 60 / chosen.kills
    while (spent := time.monotonic() - began) < chosen.minutes * 60:
        # Late after a long recovery: the next ones come closer, each still only after a step.
        due = sum(striker.kills.values()) * pace + chance.uniform(0.0, 0.6) * pace
        await asyncio.sleep(min(max(due - spent, 0.0), chosen.minutes * 60 - spent))
        if not await world.steps_more(chance.choice((0, 0, 0, 1, 2)), STANDSTILL_SECONDS):
            raise Standstill(f"No step within {STANDSTILL_SECONDS:.0f} s, long after a strike; {await _state(world)}")
        strike = await striker.strike()
        if strike is None:
            await asyncio.sleep(1.0)
            continue
        strike.recovered = await world.step_after(strike.at, STANDSTILL_SECONDS)
        if strike.recovered is None:
            raise Standstill(f"No step within {STANDSTILL_SECONDS:.0f} s after {strike.text}; {await _state(world)}")
        last = next(row for row in reversed(world.journal.rows) if row["kind"] == "step")
        said = f"next step after {strike.recovered:.1f} s (step {last['step'] + 1}, reward {last['reward_mean']:.2f})"
        say(f"#{strike.number:<3} {strike.text}: {said}")
    say(f"{sum(striker.kills.values())} kills; the run is left alone until it is whole and evaluated")
    await settle(world, say)
    return striker


async def settle(world: World, say: Teller) -> None:
    """Waits until both engines serve the current version, and for an evaluation after that. Raises Standstill."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not ((node := await world.node()) and all(e.state == engine_pb2.ENGINE_STATE_READY for e in node.engines)):
        if time.monotonic() > deadline or world.ended:
            raise Standstill(
                f"Not every engine serves {SETTLE_SECONDS:.0f} s after the last strike; {await _state(world)}"
            )
        await asyncio.sleep(0.5)
    known = len(curve_of(world.journal.read()))
    if not await world.until(lambda: len(curve_of(world.journal.read())) > known, SETTLE_SECONDS):
        raise Standstill(f"No evaluation within {SETTLE_SECONDS:.0f} s after the last strike; {await _state(world)}")
    steps, reward = curve_of(world.journal.rows)[-1]
    say(f"whole again: held-out reward {reward:.3f} after {steps} steps")


async def _state(world: World) -> str:
    """What the parts of the run say."""
    node = await world.node()
    engines = [f"{e.engine_id} {engine_pb2.EngineState.Name(e.state)[13:]} v{e.weight_version}" for e in node.engines] \
        if node else ["no node answers"]  # fmt: skip
    problem = f" ({node.problem})" if node and node.problem else ""
    notices = [row["message"] for row in world.journal.rows if row["kind"] == "notice"][-3:]
    command = "the command has ended; " if world.ended else ""
    return f"{command}trainer in phase {await world.phase()}; {', '.join(engines)}{problem}; last notices: {notices}"


async def judge(world: World, striker: Striker, chosen: argparse.Namespace, node_log: Path) -> list[Figure]:
    """The figures, once the run was stopped."""
    rows = world.journal.read()
    progress = progress_of(rows)
    stats = await world.clients.stats(world.run_id)
    run = await world.clients.find_run(world.run_id)
    assert run
    steps = read_steps(world.run_dir / "samples", run.committed_step + 1)
    ledger = ledger_of(stats, await world.groups(), steps, BATCH)
    versions = versions_of(rows, steps, verified_versions(node_log), MAX_STALENESS)
    curve = curve_of(rows)
    recovered = sorted(strike.recovered for strike in striker.strikes if strike.recovered is not None)
    starts = {engine: len(known) - 1 for engine, known in world.seen.incarnations.items()}
    unasked = sum(max(count - striker.starts_owed(engine), 0) for engine, count in starts.items())
    return [
        Figure("minutes of strikes", chosen.minutes),
        Figure("strikes", len(striker.strikes)),
        Figure("kills (SIGKILL)", sum(striker.kills.values()), "", f">= {chosen.bar}"),
        *(Figure(f"  {tier}", striker.kills[tier], "", ">= 1" if chosen.every_tier else "") for tier in TIERS),
        Figure("held-out reward before (greedy)", curve[0][1]),
        Figure("held-out reward after (greedy)", curve[-1][1], "", f">= {LEARNED}"),
        Figure("steps in the surviving history", len(steps)),
        Figure("steps repeated from checkpoints", progress.repeated),
        Figure("restores from checkpoints", progress.restores),
        Figure("next step after a strike, median", recovered[len(recovered) // 2], "s"),
        Figure("next step after a strike, longest", recovered[-1], "s", f"<= {STANDSTILL_SECONDS:.0f}"),
        Figure("longest standstill between two steps", progress.longest_gap, "s"),
        Figure("seconds between steps, median", progress.median_gap, "s"),
        Figure("engines restarted", sum(starts.values())),
        Figure("  although neither they nor their node were struck", unasked, "", "== 0"),
        *_ledger_figures(ledger, world),
        *_version_figures(versions, world),
    ]


def _ledger_figures(ledger: Ledger, world: World) -> list[Figure]:
    balance = ledger.drawn - ledger.trained - ledger.evicted - ledger.in_hand
    return [
        Figure("prompts drawn", ledger.drawn),
        Figure("  trained", ledger.trained),
        Figure("  dropped for a reason", ledger.evicted),
        Figure("  in flight", ledger.in_hand),
        Figure("  drawn - trained - dropped - in flight", balance, "", "== 0"),
        Figure("prompts lost", len(ledger.lost), "", "== 0"),
        Figure("prompts duplicated", len(ledger.duplicated), "", "== 0"),
        Figure("steps whose groups differ between buffer and files", len(ledger.contradictions), "", "== 0"),
        Figure("looks at the buffer's counts", world.seen.looks),
        Figure("  that did not add up", len(world.seen.broken_identities), "", "== 0"),
    ]


def _version_figures(versions: Versions, world: World) -> list[Figure]:
    return [
        Figure("tokens trained", versions.tokens),
        *(Figure(f"  {lag} versions behind", count) for lag, count in sorted(versions.by_lag.items())),
        Figure("  of a version that no engine verified", versions.unverified, "", "== 0"),
        Figure("  of a version that was not published itself", versions.unpublished),
        Figure("  newer than what was published", versions.too_new, "", "== 0"),
        Figure(f"  more than {MAX_STALENESS} behind", versions.too_old, "", "== 0"),
        Figure("  without a version", versions.unlabelled, "", "== 0"),
        Figure("versions that became smaller", len(versions.went_back) + len(world.seen.went_back), "", "== 0"),
    ]


def strikes_table(striker: Striker) -> Table:
    """Strikes by tier, and how soon the run went on."""
    table = Table(title="strikes by tier", title_justify="left")
    for column in ("tier", "strikes", "SIGKILL", "at a named moment", "next step: median s", "longest s"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for tier in TIERS:
        made = [strike for strike in striker.strikes if strike.card.tier == tier]
        seconds = [strike.recovered for strike in made if strike.recovered is not None]
        named = sum("." in strike.card.moment and not strike.missed for strike in made)
        times = (f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("", "")
        table.add_row(tier, str(len(made)), str(striker.kills[tier]), str(named), *times)
    return table


@contextlib.contextmanager
def armed_environment() -> Iterator[Path]:
    """A directory for named moments, known to every process that is started inside the block."""
    with tempfile.TemporaryDirectory(prefix="tetrarch-soak-") as directory:
        os.environ[VARIABLE] = directory
        try:
            yield Path(directory)
        finally:
            del os.environ[VARIABLE]


def new_workspace() -> Workspace:
    """A directory with the demo's task and SFT model, and a store of its own."""
    made = sft_workspace(1)
    number = 1
    while (path := BENCH_DIR.absolute() / f"soak-{number}").exists():
        number += 1
    shutil.copytree(made.path / "data", path / "data")
    shutil.copytree(made.path / "sft" / "hf", path / "sft" / "hf")
    return Workspace(path, made.seed)


async def run(workspace: Workspace, chosen: argparse.Namespace, say: Teller) -> tuple[list[Figure], dict]:
    """The soak from the tiers' start to their end. Raises Standstill."""
    with armed_environment() as fault_dir:
        with tiers_up(workspace) as running:
            say(f"the tiers are up; logs in {workspace.state / 'logs'}")
            world = World(workspace, running, "soak", fault_dir)
            try:
                striker = await soak(world, chosen, say)
                status = await world.stop(STOP_SECONDS)
                say(f"the run was told to stop: exit status {status}")
                say.show(strikes_table(striker))
                figures = await judge(world, striker, chosen, workspace.state / "logs" / "rollout.log")
            finally:
                await world.close()
        await asyncio.sleep(2.0)
        figures.append(Figure("processes left over", len(world.left_over()), "", "== 0"))
    rows = world.journal.rows
    context = {
        "seed": chosen.seed,
        "curve": curve_of(rows),
        "strikes": [
            {"number": s.number, "what": s.text, "step": s.step, "seconds_to_next_step": s.recovered}
            for s in striker.strikes
        ],
        "notices": [row["message"] for row in rows if row["kind"] == "notice"],
    }
    return figures, context


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--minutes", type=float, default=30.0)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--kills", type=int, help=f"kills aimed at; not given: {KILLS_PER_MINUTE} a minute")
    arguments.add_argument("--log", type=Path, help="write a line per strike to this file; else beside the run")
    chosen = arguments.parse_args()
    chosen.bar = chosen.kills or int(2 * chosen.minutes)
    chosen.kills = chosen.kills or round(KILLS_PER_MINUTE * chosen.minutes)
    chosen.every_tier = chosen.kills >= 60
    workspace = new_workspace()
    say = Teller(chosen.log or workspace.path / "soak.log")
    try:
        figures, context = asyncio.run(run(workspace, chosen, say))
    except Standstill as error:
        say(str(error))
        return 1
    return finish("soak", figures, chosen.json, **context)


if __name__ == "__main__":
    raise SystemExit(main())
