"""Reward functions of the user: loading, recognising the form, calling.

Forms, each plain or async:

* `reward(item) -> float | dict`; called with a list and returning a list when the request is grouped;
* `reward(args, sample) -> float | dict` and, grouped, `reward(args, samples) -> list`, the signature of other
  frameworks. `args` carries the grader's options as attributes.

What the function gets in place of item or sample is a `GradedSample`.

Invariant: an exception of the function concerns its own items only.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from services.common.errors import ServiceError
from services.common.settings import suggest
from services.reward.core.catalogue import check_custom_path, not_loadable
from services.reward.core.records import Item, Outcome, Task, Unscored, unscored
from services.reward.core.rewards import to_outcome


@dataclass
class GradedSample:
    """An item as a reward function sees it. The function may set `reward` instead of returning it."""

    prompt: str
    response: str
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)
    group_id: str = ""
    item_id: str = ""
    reward: Any = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the sample has no {name!r}; the reward service knows prompt, response, label, metadata, group_id,"
            " item_id and reward"
        )


@dataclass(frozen=True)
class CustomFunction:
    """A loaded reward function. `file` is where its module was read from, or empty."""

    call: Callable[..., Any]
    is_async: bool
    takes_args: bool
    file: str = ""


def load(path: str) -> CustomFunction:
    """Imports a reward function. Raises GRADER_NOT_LOADABLE, after which the module may be mended and tried again."""
    module_name, name = check_custom_path(path)
    try:
        return _load(path, module_name, name)
    except ServiceError:
        sys.modules.pop(module_name, None)
        importlib.invalidate_caches()
        raise


def _load(path: str, module_name: str, name: str) -> CustomFunction:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            why = (
                f"there is no module {missing!r}; start the reward service in the directory that holds it,"
                " or add that directory to python_path"
            )
        else:
            why = f"its module needs {missing!r}, which is not installed here"
        raise not_loadable(path, why) from error
    except Exception as error:
        raise not_loadable(path, f"importing {module_name} raised {describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        problem = "is not a function" if hasattr(module, name) else "does not exist"
        hint = suggest(name, [key for key, value in vars(module).items() if callable(value)]).rstrip("?")
        raise not_loadable(path, f"{name!r} {problem} in module {module_name}{'.' + hint if hint else ''}")
    target = function if inspect.isroutine(function) else function.__call__
    return CustomFunction(
        function,
        inspect.iscoroutinefunction(target),
        _takes_args(path, function),
        getattr(module, "__file__", "") or "",
    )


def _takes_args(path: str, function: Callable) -> bool:
    """True for `f(args, sample)`, False for `f(item)`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    if required > 2 or not positional:
        raise not_loadable(path, f"it takes {required} arguments; use f(item) or f(args, sample)")
    return required == 2 or (len(positional) >= 2 and positional[0].name == "args")


def describe(error: BaseException) -> str:
    """Type, message and place of an exception in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:200]}{place}" if message else f"{type(error).__name__}{place}"


def to_sample(item: Item) -> GradedSample:
    """What the function sees."""
    return GradedSample(item.prompt, item.response, item.label, dict(item.metadata), item.group_id, item.item_id)


def arguments(function: CustomFunction, task: Task, samples: list[GradedSample]) -> tuple[Any, ...]:
    """Positional arguments of the call for a task of one item, or for a grouped one."""
    subject = samples if task.grouped else samples[0]
    if not function.takes_args:
        return (subject,)
    known = {"rm_type": task.grader, "custom_rm_path": task.custom_path, "group_rm": task.grouped, "reward_key": None}
    return (SimpleNamespace(**{**known, **task.options}), subject)


def call(function: CustomFunction, task: Task, run: Callable[[Awaitable[Any]], Any]) -> tuple[list[GradedSample], Any]:
    """Calls the function now; `run` waits for an awaitable. Returns its samples and what it returned."""
    samples = [to_sample(item) for item in task.items]
    raw = function.call(*arguments(function, task, samples))
    return samples, run(raw) if inspect.isawaitable(raw) else raw


def outcomes(task: Task, samples: list[GradedSample], raw: Any, seconds: float) -> list[Outcome]:
    """Outcome of every item of a task from what its function returned."""
    if not task.grouped:
        values = [raw]
    elif raw is None:
        values = [None] * len(samples)
    else:
        values = list(raw) if not isinstance(raw, (str, dict)) and hasattr(raw, "__iter__") else [raw]
        if len(values) != len(samples):
            message = f"The grader returned {len(values)} rewards for a group of {len(samples)}."
            return [unscored(Unscored.INVALID_REWARD, message, seconds)] * len(samples)
    key = task.options.get("reward_key")
    return [
        to_outcome(sample.reward if value is None else value, reward_key=key, seconds=seconds)
        for sample, value in zip(samples, values, strict=True)
    ]


def failure(task: Task, error: BaseException, seconds: float) -> list[Outcome]:
    """Outcome of every item of a task whose function raised."""
    return [unscored(Unscored.GRADER_ERROR, f"The grader raised {describe(error)}.", seconds)] * len(task.items)
