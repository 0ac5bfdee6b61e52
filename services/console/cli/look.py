"""`tetrarch status`, and how a group is shown: a look at runs, live or over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tetrarch.buffer.v1 import buffer_service_pb2 as buffer_pb
from tetrarch.buffer.v1 import run_pb2
from tetrarch.common.v1 import sample_pb2
from tetrarch.rollout.v1 import engine_pb2

from services.common.errors import ServiceError
from services.common.settings import SettingsError
from services.console.adapters.clients import Clients
from services.console.cli.places import Place, services_to_read
from services.console.cli.view import step_line
from services.console.cli.watch import GROUP_STATES
from services.console.core.history import load_history
from services.console.core.report import sparkline
from services.console.core.watched import PHASES
from services.console.state import StateDir


@dataclass(frozen=True)
class Source:
    """Where to look: a state directory, or addresses."""

    state_dir: Path
    buffer: str | None
    trainer: str | None

    @contextlib.asynccontextmanager
    async def open(
        self, console: Console, tiers: tuple[str, ...] = ("store", "buffer")
    ) -> AsyncIterator[tuple[Clients, Place]]:
        """Clients of what runs, or of `tiers` started for this look."""
        async with (
            services_to_read(StateDir(self.state_dir), self.buffer, self.trainer, console, tiers) as place,
            Clients(place.addresses["buffer"], place.addresses.get("trainer")) as clients,
        ):
            yield clients, place


async def pick_run(clients: Clients, name: str | None) -> run_pb2.Run:
    """The named run, or the newest. Raises SettingsError listing the known ones."""
    runs = await clients.runs()
    if name is None:
        if not runs:
            raise SettingsError("There is no run yet; start one with `tetrarch train run.yaml`.")
        return runs[0]
    run = next((run for run in runs if run.run_id == name), None) or await clients.find_run(name)
    if run is None:
        known = ", ".join(run.run_id for run in runs) or "none"
        raise SettingsError(f"There is no run {name!r}; known runs: {known}.")
    return run


def state_name(run: run_pb2.Run) -> str:
    """As in "active"."""
    return run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()


def run_directory(run: run_pb2.Run) -> Path:
    """Directory of a run by its settings."""
    spec = json.loads(run.spec_json)
    return Path(spec["run_dir"]) / run.run_id


def total_steps(run: run_pb2.Run) -> int:
    """Steps the run is to make."""
    return int(json.loads(run.spec_json)["rollout"]["num_rollout"])


# -- status


def show_status(source: Source, name: str | None, console: Console) -> int:
    """Prints tables; returns the exit code."""
    asyncio.run(_status(source, name, console))
    return 0


async def _status(source: Source, name: str | None, console: Console) -> None:
    async with source.open(console) as (clients, place):
        runs = await clients.runs()
        if not runs:
            console.print("No runs yet; start one with `tetrarch train run.yaml`.")
            return
        chosen = await pick_run(clients, name)
        phase = await _phase(clients, place, chosen.run_id)
        console.print(_runs_table(runs, chosen.run_id))
        console.print(_run_panel(chosen, phase, await clients.stats(chosen.run_id)))
        nodes = await clients.nodes() if place.supervisor is None else []
        if nodes:
            console.print(_engines_table(nodes))


async def _phase(clients: Clients, place: Place, run_id: str) -> str:
    """What the trainer does for a run; empty when it does nothing for it."""
    if "trainer" not in place.addresses:
        return ""
    try:
        progress = await clients.progress(run_id)
    except ServiceError as error:
        return error.message
    return PHASES.get(progress.phase, "") if progress else ""


def _runs_table(runs: list[run_pb2.Run], chosen: str) -> Table:
    table = Table(box=None, header_style="bright_black", padding=(0, 2))
    for title in ("run", "state", "steps", "weights", "checkpoint", "created"):
        table.add_column(title)
    for run in runs:
        checkpoint = f"step {run.checkpoint_step + 1}" if run.checkpoint_step >= 0 else "–"
        table.add_row(
            Text(run.run_id, style="bold" if run.run_id == chosen else ""),
            state_name(run),
            f"{run.committed_step + 1}/{total_steps(run)}",
            f"v{run.policy_version}",
            checkpoint,
            run.create_time.ToDatetime().strftime("%d %b %H:%M UTC"),
        )
    return table


def _run_panel(run: run_pb2.Run, phase: str, stats: run_pb2.RunStats) -> Panel:
    body = Table.grid(padding=(0, 2))
    body.add_column(style="bright_black", min_width=9)
    body.add_column()
    history = load_history(run_directory(run))
    if history.steps:
        step = max(history.steps)
        body.add_row("latest", step_line(step, total_steps(run), history.steps[step]))
    if rewards := [value for _, value in history.series("reward_mean")]:
        body.add_row("reward", f"{rewards[-1]:.3f}  {sparkline(rewards)}")
    for dataset, values in history.evaluation_series().items():
        body.add_row(f"eval {dataset}", "   ".join(f"step {step}: {value:.3f}" for step, value in values[-5:]))
    counts = [f"{name} {getattr(stats, f'{name}_count')}" for name in GROUP_STATES]
    body.add_row("groups", f"drawn {stats.drawn_count} = " + " + ".join(counts))
    if stats.evicted_by_reason:
        body.add_row("evicted", "   ".join(f"{reason} {n}" for reason, n in sorted(stats.evicted_by_reason.items())))
    if stats.staleness_histogram:
        lags = "   ".join(f"{lag}: {count}" for lag, count in sorted(stats.staleness_histogram.items()))
        body.add_row("staleness", f"groups by versions behind  {lags}")
    body.add_row("leases", f"{stats.lease_expired_count} expired, {stats.stale_count} given back as stale")
    body.add_row("stored", f"{stats.payload_bytes / 1e6:.1f} MB of samples, {stats.row_count} rows of data")
    body.add_row("files", str(run_directory(run)))
    if run.reason:
        body.add_row("reason", run.reason)
    title = f"[bold]{run.run_id}[/]  {state_name(run)}" + (f", {phase}" if phase and phase != "ended" else "")
    return Panel(body, title=title, title_align="left", border_style="bright_black")


def _engines_table(nodes: list[engine_pb2.Node]) -> Table:
    table = Table(box=None, header_style="bright_black", padding=(0, 2))
    for title in ("node", "run", "groups", "tokens", "engine", "state", "weights", "restarts"):
        table.add_column(title)
    for node in nodes:
        left = [
            node.node_id,
            node.run_id or "–",
            f"{node.running_group_count} in flight",
            f"{node.generated_token_count:,}",
        ]
        for engine in node.engines or [None]:
            right = ["–", node.problem or "no engine", "", ""]
            if engine is not None:
                state = engine_pb2.EngineState.Name(engine.state).removeprefix("ENGINE_STATE_").lower()
                right = [engine.engine_id, state, f"v{engine.weight_version}", str(engine.restart_count)]
            table.add_row(*left, *right)
            left = [""] * 4
    return table


# -- groups


def group_panel(answer: buffer_pb.GetGroupResponse) -> Panel:
    """A group with its prompt, answers and rewards."""
    info, prompt = answer.info, answer.prompt
    body = Table.grid(padding=(0, 2))
    body.add_column(style="bright_black", min_width=9)
    body.add_column(overflow="fold")
    body.add_row("prompt", Text(printable(prompt.text)))
    if prompt.label:
        body.add_row("label", Text(printable(prompt.label)))
    for sample in answer.group.samples:
        body.add_row(*_sample_row(sample))
    if not answer.group.samples and info.rewards:
        rewards = "  ".join("unscored" if math.isnan(reward) else f"{reward:.3f}" for reward in info.rewards)
        body.add_row("rewards", f"{rewards}   (the text was dropped after a checkpoint covered it)")
    state = run_pb2.GroupState.Name(info.state).removeprefix("GROUP_STATE_").lower()
    step = f", step {info.step + 1}" if info.HasField("step") else ""
    version = f", weights v{info.min_version}" if info.HasField("min_version") else ""
    reason = f" ({info.evict_reason})" if info.evict_reason else ""
    origin = f" of {info.dataset}" if info.dataset else ""
    title = f"[bold]{info.group_id}[/]  {state}{reason}{step}{version}, row {prompt.row + 1}{origin}"
    return Panel(body, title=title, title_align="left", border_style="bright_black")


def printable(text: str) -> str:
    """Text of a model without what would steer the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "�" for letter in text.strip())


def _sample_row(sample: sample_pb2.Sample) -> tuple[Text, Text]:
    """Reward, and the response with what is unusual about it."""
    if sample.HasField("reward"):
        label = Text(f"{sample.reward:.3f}", style="green" if sample.reward > 0 else "red")
    else:
        label = Text("unscored", style="yellow")
    text = Text(printable(sample.response) or "(empty)")
    status = sample_pb2.SampleStatus.Name(sample.status).removeprefix("SAMPLE_STATUS_").lower()
    facts = [status] if status != "completed" else []
    facts += [f"{sample.turn_count} turns"] if sample.turn_count > 1 else []
    facts += [sample.unscored_reason] if sample.unscored_reason else []
    text.append(
        f"   {sample.response_length} tokens" + (f", {', '.join(facts)}" if facts else ""), style="bright_black"
    )
    return label, text
