"""`tetrarch eval`, `export` and `stop`: things done to a run from outside."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tetrarch.buffer.v1 import run_pb2
from tetrarch.rollout.v1 import rollout_service_pb2 as rollout_pb

from services.common.errors import Code, ServiceError
from services.common.run_spec import RunSpec
from services.common.settings import SettingsError
from services.console.adapters.clients import Clients
from services.console.cli.look import Source, pick_run, printable, state_name
from services.console.state import StateDir

_STOP_SECONDS = 600.0
_EXAMPLES = 3


@dataclass(frozen=True)
class EvalRequest:
    """What to evaluate; 0 and None mean what the run says."""

    dataset: str | None
    sample_count: int
    prompt_count: int


def run_eval(source: Source, name: str | None, request: EvalRequest, console: Console) -> int:
    """Evaluates; returns the exit code."""
    if not source.buffer and StateDir(source.state_dir).running() is None:
        raise SettingsError(
            "An evaluation needs running engines and nothing runs here; start `tetrarch up` and a run, or name the"
            " buffer with --buffer."
        )
    asyncio.run(_eval(source, name, request, console))
    return 0


async def _eval(source: Source, name: str | None, request: EvalRequest, console: Console) -> None:
    async with source.open(console) as (clients, _):
        run = await pick_run(clients, name)
        datasets = list(RunSpec.model_validate_json(run.spec_json).data.eval_datasets)
        if request.dataset and request.dataset not in datasets:
            known = ", ".join(datasets) or "none"
            raise SettingsError(
                f"Run {run.run_id} has no evaluation set {request.dataset!r}; it has {known} (eval_prompt_data)."
            )
        if not datasets:
            raise SettingsError(f"Run {run.run_id} has no evaluation set; set eval_prompt_data, name and path.")
        address = await _serving_node(clients, run)
        for dataset in [request.dataset] if request.dataset else datasets:
            await _eval_one(clients, address, run.run_id, dataset, request, console)


async def _serving_node(clients: Clients, run: run_pb2.Run) -> str:
    """Address of a node with the run's engines. Raises SettingsError."""
    nodes = {node.node_id: node for node in await clients.nodes()}
    for member in await clients.members():
        node = nodes.get(member.member_id)
        if node is not None and node.run_id == run.run_id and node.engines:
            return member.address
    raise SettingsError(
        f"No rollout node serves run {run.run_id} ({state_name(run)}); engines run while a run is active, and shortly"
        " after."
    )


async def _eval_one(
    clients: Clients, address: str, run_id: str, dataset: str, request: EvalRequest, console: Console
) -> None:
    message = rollout_pb.EvaluateRequest(
        run_id=run_id, dataset=dataset, sample_count=request.sample_count, max_prompt_count=request.prompt_count
    )
    result = None
    with console.status(f"evaluating {dataset}") as status:
        async for answer in clients.evaluate(address, message):
            status.update(f"evaluating {dataset}: {answer.done_prompt_count}/{answer.total_prompt_count} prompts")
            if answer.HasField("result"):
                result = answer.result
    if result is None:
        raise ServiceError(
            Code.INTERNAL,
            "NO_RESULT",
            f"The evaluation of {dataset!r} ended without a result; look at the log of the rollout node.",
            dataset=dataset,
        )
    console.print(_result_table(result))


def _result_table(result: rollout_pb.EvaluateResult) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", min_width=9)
    table.add_column(overflow="fold")
    unscored = f", {result.unscored_count} unscored" if result.unscored_count else ""
    versions = f"v{result.min_version}" + (
        f" to v{result.max_version}" if result.max_version != result.min_version else ""
    )
    table.add_row("data set", f"[bold]{result.dataset}[/]")
    table.add_row("reward", f"[bold]{result.mean_reward:.4f}[/] over {result.scored_count} samples{unscored}")
    table.add_row(
        "response", f"{result.mean_response_length:.1f} tokens, {result.truncated_fraction:.0%} cut at the limit"
    )
    table.add_row("weights", f"{versions}, {result.seconds:.1f} s")
    for sample in list(result.examples)[:_EXAMPLES]:
        reward = f"{sample.reward:.2f}" if sample.HasField("reward") else "unscored"
        table.add_row("example", Text(f"[{reward}] {printable(sample.response)}"))
    return table


def run_export(source: Source, name: str | None, path: Path, console: Console) -> int:
    """Exports; returns the exit code."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingsError(f"{path} exists and is not an empty directory; name a new one.")
    asyncio.run(_export(source, name, path.absolute(), console))
    return 0


async def _export(source: Source, name: str | None, path: Path, console: Console) -> None:
    async with source.open(console, ("store", "buffer", "trainer")) as (clients, place):
        if "trainer" not in place.addresses:
            raise SettingsError("An export is written by the trainer; name it with --trainer host:port.")
        run = await pick_run(clients, name)
        with console.status(f"exporting run {run.run_id}"):
            answer = await clients.export(run.run_id, str(path))
    steps = answer.step_count
    console.print(
        f"Wrote {answer.path}: run {run.run_id} after {steps} steps, a Hugging Face checkpoint.", soft_wrap=True
    )


def run_stop(source: Source, name: str | None, console: Console) -> int:
    """Stops a run; returns the exit code."""
    if not source.buffer and StateDir(source.state_dir).running() is None:
        console.print("Nothing runs here.")
        return 0
    asyncio.run(_stop(source, name, console))
    return 0


async def _stop(source: Source, name: str | None, console: Console) -> None:
    async with source.open(console) as (clients, place):
        run = await pick_run(clients, name)
        if run.state != run_pb2.RUN_STATE_ACTIVE:
            console.print(f"Run {run.run_id} is not active: it is {state_name(run)}.")
            return
        if "trainer" not in place.addresses:
            raise SettingsError("A run is stopped by its trainer; name it with --trainer host:port.")
        with console.status(f"stopping run {run.run_id} after its step"):
            try:
                progress = await clients.stop_run(run.run_id, _STOP_SECONDS)
                done = progress.step_count
            except ServiceError as error:
                if error.reason != "RUN_NOT_FOUND":
                    raise
                # No trainer holds it: nothing is in progress that could be lost.
                await clients.finish_run(run.run_id, "stopped by the user")
                done = run.committed_step + 1
    console.print(f"Stopped run {run.run_id} after {done} steps; `tetrarch train` with its run file goes on with it.")
