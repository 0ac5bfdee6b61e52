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


def _packs(target: str, build: Callable[..., Any], options: dict[str, Any]) -> Callable[[Callable[..., None]], Any]:
    """A decorator that adds options to a command, which gets what `build` makes of them as `target`.

    Args:
        options: annotation of each; the default is None, or False where the annotation is of a bool.
    """
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, kind, default=False if note.__origin__ is bool else None, annotation=note)
        for name, note in options.items()
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        kept = [parameter for name, parameter in signature.parameters.items() if name != target]

        @functools.wraps(command)
        def packed(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in options}
            command(**given, **{target: build(**chosen)})

        packed.__signature__ = signature.replace(parameters=[*kept, *added])
        packed.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *added]}
        return packed

    return decorate


def _wish(trainer_gpus: str | None, rollout_gpus: str | None) -> Any:
    from services.console.core.placement import Wish

    return Wish(trainer_gpus, rollout_gpus)


def _selection(**given: Any) -> Any:
    from services.console.cli.groups import Selection

    given["count"] = given["count"] or 3
    many = {name: tuple(given.pop(name[:-1]) or ()) for name in ("states", "reasons")}
    return Selection(**given, **many)


_deals_gpus = _packs(
    "wish",
    _wish,
    {
        "trainer_gpus": Annotated[
            str | None, typer.Option(metavar="IDS", help=f"GPUs of the trainer, as 0,1. {_GPU_DEFAULT}")
        ],
        "rollout_gpus": Annotated[
            str | None, typer.Option(metavar="IDS", help=f"GPUs of the engines, as 2,3. {_GPU_DEFAULT}")
        ],
    },
)
_selects_groups = _packs(
    "selection",
    _selection,
    {
        "step": Annotated[int | None, typer.Option(help="Only groups of this step (from 1).", min=1)],
        "best": Annotated[bool, typer.Option("--best", help="Highest rewards first.")],
        "worst": Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")],
        "count": Annotated[
            int | None, typer.Option("-n", "--count", help="Groups to show; by default 3.", min=1, max=500)
        ],
        "state": Annotated[list[str] | None, typer.Option(help="Only groups in this state; may be repeated.")],
        "dataset": Annotated[str | None, typer.Option(help="Only prompts of this set of a mixture.")],
        "reason": Annotated[list[str] | None, typer.Option(help="Only groups evicted for this; may be repeated.")],
        "min_reward": Annotated[float | None, typer.Option(help="Only groups with this mean reward or more.")],
        "start": Annotated[int | None, typer.Option("--from", help="In order, from this ordinal on.", min=0)],
    },
)


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
def runs(state_dir: StateOption = _STATE, buffer: BufferOption = None) -> None:
    """List every run of the store: state, steps, groups, bytes."""
    from services.console.cli.look import Source
    from services.console.cli.runs import show_runs

    _end(show_runs(Source(state_dir, buffer, None), _console()))


@app.command("delete-run")
def delete_run(
    run: Annotated[str, typer.Argument(help="Run.")],
    force: Annotated[bool, typer.Option("--force", help="Ask nothing; also a run that is active.")] = False,
    state_dir: StateOption = _STATE,
    buffer: BufferOption = None,
) -> None:
    """Delete a run from the store, completely. Checkpoints and logs in its directory stay."""
    from services.console.cli.look import Source
    from services.console.cli.runs import delete_run as run_delete

    _end(run_delete(Source(state_dir, buffer, None), run, force=force, ask=typer.confirm, console=_console()))


@app.command()
def watch(
    run: RunArgument = None,
    interval: Annotated[float, typer.Option(help="Shortest time between two lines, in seconds.")] = 1.0,
    state_dir: StateOption = _STATE,
    buffer: BufferOption = None,
) -> None:
    """Print a run's groups by state whenever they change, until the run ends."""
    from services.console.cli.look import Source
    from services.console.cli.runs import watch_counts

    _end(watch_counts(Source(state_dir, buffer, None), run, interval, _console()))


@app.command()
@_selects_groups
def samples(
    run: RunArgument = None, state_dir: StateOption = _STATE, buffer: BufferOption = None, selection: Any = None
) -> None:
    """Look at prompts, responses and rewards; the latest when nothing else is asked."""
    from services.console.cli.groups import show_samples
    from services.console.cli.look import Source

    _end(show_samples(Source(state_dir, buffer, None), run, selection, _console()))


@app.command("export-samples")
def export_samples(
    step: Annotated[int, typer.Option(help="Step (from 1).", min=1)],
    out: Annotated[Path, typer.Option(help="File to write: .jsonl or .parquet.")],
    run: RunArgument = None,
    state_dir: StateOption = _STATE,
    buffer: BufferOption = None,
) -> None:
    """Write a step's samples with tokens, masks, log-probs and rewards, one row a sample."""
    from services.console.cli.groups import export_samples as run_export
    from services.console.cli.look import Source

    _end(run_export(Source(state_dir, buffer, None), run, step, out, _console()))


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
        named = isinstance(error, OSError)
        _fail(f"{error.filename}: {error.strerror}." if named else str(error), code)
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
    # A file that cannot be written or read: the user's disk or rights.
    named = isinstance(error, OSError) and error.filename
    return 1 if named or isinstance(error, TierFailed) else None


def _fail(message: str, code: int) -> NoReturn:
    print(f"tetrarch: {message}", file=sys.stderr)
    raise SystemExit(code)
