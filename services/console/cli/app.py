"""The commands of `tetrarch`. Each imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from services.console.state import DEFAULT_STATE_DIR

app = typer.Typer(
    name="tetrarch",
    help="Reinforcement-learning post-training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

StateOption = Annotated[
    Path, typer.Option("--state-dir", help="Directory of what runs on this machine: store, logs, addresses.")
]
BufferOption = Annotated[str | None, typer.Option("--buffer", help="host:port of the buffer, when it runs elsewhere.")]
TrainerOption = Annotated[
    str | None, typer.Option("--trainer", help="host:port of the trainer, when it runs elsewhere.")
]
RunArgument = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run; the newest when not given.")]
_STATE = Path(DEFAULT_STATE_DIR)
_GPU_DEFAULT = "By default what the run needs, or half of them each."


def _deals_gpus(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --trainer-gpus and --rollout-gpus to a command, which gets both as `wish`."""
    signature = inspect.signature(command, eval_str=True)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "wish"]
    helps = {"trainer": "GPUs of the trainer, as 0,1.", "rollout": "GPUs of the engines, as 2,3."}
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(
            f"{tier}_gpus",
            kind,
            default=None,
            annotation=Annotated[str | None, typer.Option(metavar="IDS", help=f"{text} {_GPU_DEFAULT}")],
        )
        for tier, text in helps.items()
    ]

    @functools.wraps(command)
    def with_gpus(*, trainer_gpus: str | None, rollout_gpus: str | None, **options: Any) -> None:
        from services.console.core.placement import Wish

        command(**options, wish=Wish(trainer_gpus, rollout_gpus))

    with_gpus.__signature__ = signature.replace(parameters=[*kept, *added])
    with_gpus.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *added]}
    return with_gpus


@app.command()
@_deals_gpus
def up(
    state_dir: StateOption = _STATE,
    store_port: Annotated[int, typer.Option(min=1, max=65535)] = 50050,
    buffer_port: Annotated[int, typer.Option(min=1, max=65535)] = 50051,
    trainer_port: Annotated[int, typer.Option(min=1, max=65535)] = 50052,
    rollout_port: Annotated[int, typer.Option(min=1, max=65535)] = 50053,
    reward_port: Annotated[int, typer.Option(min=1, max=65535)] = 50054,
    wish: Any = None,
) -> None:
    """Start every tier on this machine, in the foreground, under one supervisor."""
    from services.console.cli.up import up as run_up
    from services.console.state import StateDir
    from services.console.tiers import Ports

    ports = Ports(store_port, buffer_port, trainer_port, rollout_port, reward_port)
    _end(run_up(StateDir(state_dir), ports, wish, _console()))


@app.command()
def down(state_dir: StateOption = _STATE) -> None:
    """Stop what `tetrarch up` started."""
    from services.console.cli.up import down as run_down
    from services.console.state import StateDir

    _end(run_down(StateDir(state_dir), _console()))


@app.command(context_settings={"ignore_unknown_options": True})
@_deals_gpus
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.yaml] [--key value ...]",
            help="Run file, and any key of a run as a flag (docs/flags.md lists them all).",
        ),
    ] = None,
    state_dir: StateOption = _STATE,
    plain: Annotated[
        bool | None,
        typer.Option("--plain/--live", help="One line per step, or a live panel; by default as the terminal allows."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Validate and print the run, start nothing.")] = False,
    wish: Any = None,
) -> None:
    """Train: check the run, start what is needed, show progress. The same command again resumes.

    Keys most often set: --run-id --hf-checkpoint --prompt-data --label-key
    --rm-type --num-rollout --rollout-batch-size --n-samples-per-prompt
    --rollout-max-response-len --lr --max-staleness --save-interval
    --eval-prompt-data --eval-interval.
    """
    from services.console.cli.train import TrainOptions
    from services.console.cli.train import train as run_train

    options = TrainOptions(state_dir, plain, check, wish)
    _end(run_train(arguments or [], options, _console()))


@app.command()
def status(
    run: RunArgument = None,
    state_dir: StateOption = _STATE,
    buffer: BufferOption = None,
    trainer: TrainerOption = None,
) -> None:
    """Show runs, groups by state, nodes and engines, and the latest metrics."""
    from services.console.cli.look import Source, show_status

    _end(show_status(Source(state_dir, buffer, trainer), run, _console()))


@app.command()
def samples(
    run: RunArgument = None,
    step: Annotated[int | None, typer.Option(help="Only groups of this step (from 1).", min=1)] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    count: Annotated[int, typer.Option("-n", "--count", help="Groups to show.", min=1, max=500)] = 3,
    state_dir: StateOption = _STATE,
    buffer: BufferOption = None,
) -> None:
    """Look at prompts, responses and rewards; the latest when nothing else is asked."""
    from services.console.cli.look import Selection, Source, show_samples

    _end(show_samples(Source(state_dir, buffer, None), run, Selection(step, best, worst, count), _console()))


@app.command("eval")
def evaluate(
    run: RunArgument = None,
    dataset: Annotated[str | None, typer.Option(help="Evaluation set of the run; all when not given.")] = None,
    samples_per_prompt: Annotated[
        int, typer.Option("--samples", help="Answers per prompt; 0: as the run says.", min=0)
    ] = 0,
    prompts: Annotated[int, typer.Option("--prompts", help="Most prompts to use; 0: all.", min=0)] = 0,
    state_dir: StateOption = _STATE,
    buffer: BufferOption = None,
) -> None:
    """Evaluate a run on its engines, with the weights they hold now."""
    from services.console.cli.actions import EvalRequest, run_eval
    from services.console.cli.look import Source

    _end(run_eval(Source(state_dir, buffer, None), run, EvalRequest(dataset, samples_per_prompt, prompts), _console()))


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="Directory to write.")],
    run: Annotated[str | None, typer.Option(help="Run; the newest when not given.")] = None,
    state_dir: StateOption = _STATE,
    buffer: BufferOption = None,
    trainer: TrainerOption = None,
) -> None:
    """Write the weights of a run as a Hugging Face checkpoint."""
    from services.console.cli.actions import run_export
    from services.console.cli.look import Source

    _end(run_export(Source(state_dir, buffer, trainer), run, path, _console()))


@app.command()
def stop(
    run: RunArgument = None,
    state_dir: StateOption = _STATE,
    buffer: BufferOption = None,
    trainer: TrainerOption = None,
) -> None:
    """Stop a run after its step, with a checkpoint; `train` resumes it."""
    from services.console.cli.actions import run_stop
    from services.console.cli.look import Source

    _end(run_stop(Source(state_dir, buffer, trainer), run, _console()))


def _console():
    from rich.console import Console

    console = Console(highlight=False)
    # In a pipe or a log there is no width to fit; 80 columns would cut every line in two.
    return console if console.is_terminal else Console(highlight=False, width=140)


def _end(code: int) -> None:
    if code:
        raise typer.Exit(code)


def run() -> NoReturn:
    """Runs the command line; every failure is one sentence on stderr."""
    try:
        app(prog_name="tetrarch", standalone_mode=True)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        _fail(str(error), code)
    raise SystemExit(0)


def exit_code(error: Exception) -> int | None:
    """2 for what the user gave, 1 for what failed, None for a bug."""
    from services.common.errors import Code, ServiceError
    from services.common.settings import SettingsError
    from services.console.supervisor import TierFailed

    if isinstance(error, SettingsError):
        return 2
    if isinstance(error, ServiceError):
        return 2 if error.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS) else 1
    return 1 if isinstance(error, TierFailed) else None


def _fail(message: str, code: int) -> NoReturn:
    print(f"tetrarch: {message}", file=sys.stderr)
    raise SystemExit(code)
