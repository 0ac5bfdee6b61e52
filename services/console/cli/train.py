"""`tetrarch train`: from a run file to a trained model."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tetrarch.buffer.v1 import run_pb2
from tetrarch.trainer.v1 import trainer_service_pb2 as trainer_pb

from services.common.files import write_whole
from services.common.run_spec import RunSpec
from services.common.settings import SettingsError
from services.console.adapters.clients import Clients
from services.console.adapters.engine_arguments import check_engine_arguments
from services.console.cli.places import Place, placement_for, services_for_run
from services.console.cli.summary import show_summary
from services.console.cli.watch import Interrupted, Watcher
from services.console.core.flags import parse_flags
from services.console.core.history import load_history
from services.console.core.placement import NO_WISH, Wish
from services.console.core.resolve import resolve
from services.console.core.show_spec import compact, to_yaml
from services.console.core.validate import validate
from services.console.core.watched import Watched
from services.console.state import DEFAULT_STATE_DIR, StateDir

SUCCESS, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class TrainOptions:
    """What is not a key of the run. `plain`: None decides by the terminal; `wish`: GPUs of the tiers started here."""

    state_dir: Path
    plain: bool | None = None
    check: bool = False
    wish: Wish = NO_WISH


def train(tokens: Sequence[str], options: TrainOptions, console: Console) -> int:
    """Runs the command; returns the exit code. Raises SettingsError, ServiceError, TierFailed."""
    line = parse_flags(tokens)
    if not line.run_file and not line.values:
        raise SettingsError(
            "Give a run file, as in `tetrarch train run.yaml`, or every key as a flag; see docs/cli.md."
        )
    spec = resolve(line)
    if _local(spec):
        validate(spec)
        check_engine_arguments(spec.rollout)
    placement_for(spec, StateDir(options.state_dir), options.wish)
    show_spec(spec, console)
    if options.check:
        console.print("The run is valid; nothing was started.")
        return SUCCESS
    return asyncio.run(_train(spec, tokens, options, console))


def _local(spec: RunSpec) -> bool:
    """Paths of a run whose services are on other hosts are looked at there."""
    return all(
        not address or address.startswith(("127.", "localhost")) for address in spec.services.model_dump().values()
    )


def show_spec(spec: RunSpec, console: Console) -> None:
    """Prints what differs from the defaults; the file in the run's directory has every key."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", min_width=9)
    table.add_column()
    table.add_row("run", f"[bold]{spec.run_id}[/]")
    for group, text in compact(spec):
        table.add_row(group, text)
    console.print(table)


class _Finished(Exception):
    """There is nothing left to do in this run."""


async def _train(spec: RunSpec, tokens: Sequence[str], options: TrainOptions, console: Console) -> int:
    async def prepare(buffer: str, own: bool) -> None:
        async with Clients(buffer, None) as clients:
            answer = await clients.create_run(spec.run_id, spec.model_dump_json())
            if answer.run.state == run_pb2.RUN_STATE_FINISHED:
                raise _Finished
            if answer.skipped_row_count:
                rows = f"{answer.skipped_row_count} rows are longer than rollout_max_prompt_len and left out"
                console.print(f"{rows}; {answer.row_count} are used.")
            if own:
                await _set_others_aside(clients, spec.run_id, console)

    services = services_for_run(spec, StateDir(options.state_dir), console, prepare, options.wish)
    try:
        async with services as place, Clients(place.addresses["buffer"], place.addresses["trainer"]) as clients:
            _store(spec)
            await clients.start_run(spec.run_id)
            code = await _follow(clients, spec, options, place, console)
    except _Finished:
        console.print(
            f"Run {spec.run_id} is finished: all {spec.rollout.num_rollout} steps are done. Give a larger --num-rollout"
            " to go on, or another --run-id to start anew."
        )
        show_summary(console, spec.run_id, Path(spec.directory), load_history(spec.directory))
        return SUCCESS
    if code == INTERRUPTED:
        place = [] if options.state_dir == Path(DEFAULT_STATE_DIR) else ["--state-dir", str(options.state_dir)]
        command = shlex.join(["tetrarch", "train", *tokens, *place])
        console.print(f"Run the same command to go on from the last checkpoint: {command}", soft_wrap=True)
    return code


async def _set_others_aside(clients: Clients, run_id: str, console: Console) -> None:
    """Runs that a killed command left active would draw the engines to themselves."""
    for run in await clients.runs():
        if run.state == run_pb2.RUN_STATE_ACTIVE and run.run_id != run_id:
            await clients.finish_run(run.run_id, f"set aside for run {run_id}")
            console.print(f"Run {run.run_id} was interrupted earlier; its own command goes on with it.")


def _store(spec: RunSpec) -> None:
    """Keeps the resolved form with the run."""
    write_whole(Path(spec.directory) / "run.yaml", to_yaml(spec).encode())


async def _follow(clients: Clients, spec: RunSpec, options: TrainOptions, place: Place, console: Console) -> int:
    plain = not console.is_terminal if options.plain is None else options.plain
    watched = Watched(spec.run_id, total_steps=spec.rollout.num_rollout)
    watched.history = load_history(spec.directory)
    watcher = Watcher(clients, watched, console, plain=plain, place=place)
    try:
        progress = await watcher.follow()
    except Interrupted as error:
        if place.supervisor:
            place.supervisor.hurry()
        console.print(f"Interrupted: {error}.")
        return INTERRUPTED
    show_summary(console, spec.run_id, Path(spec.directory), watched.history)
    stopped = watcher.stop_requested or await _was_stopped(clients, spec.run_id)
    return _exit_code(progress, stopped, console)


async def _was_stopped(clients: Clients, run_id: str) -> bool:
    """True when another command stopped the run."""
    run = await clients.find_run(run_id)
    return run is not None and run.state == run_pb2.RUN_STATE_STOPPED


def _exit_code(progress: trainer_pb.Progress, stopped: bool, console: Console) -> int:
    if progress.succeeded:
        return SUCCESS
    if stopped:
        console.print(f"Stopped after {progress.step_count} of {progress.total_step_count} steps.")
        return INTERRUPTED
    console.print(f"[red]The run ended early:[/] {progress.reason or 'no reason was given'}", soft_wrap=True)
    return FAILED
