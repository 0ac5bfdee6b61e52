"""Sampling filters: functions that keep or reject a scored group (dynamic_sampling_filter_path).

The contract is slime's: `def keep(args, group)` with the keys of the run and the samples of one group; it returns a
bool, or an object or mapping with `keep` and `reason`. Invariant: whatever a function does, the caller gets a verdict
or an error that names it, in time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from services.common.errors import Code, ServiceError, invalid_field
from services.common.import_path import load_function
from services.common.records import Prompt, Sample
from services.rollout.core.run_settings import RunSettings
from services.rollout.core.slime import SlimeArgs, finished_sample

KEY = "dynamic_sampling_filter_path"
NONZERO_STD = "check_reward_nonzero_std"
_SECONDS = 30.0
_REASON_LENGTH = 64


class Rejected(Exception):
    """The filter rejected a group."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the sampling filter rejected the group: {reason}")
        self.reason = re.sub(r"[^ -~]", "_", reason)[:_REASON_LENGTH] or "rejected"


def check_reward_nonzero_std(args: Any, group: Sequence[Any]) -> dict[str, Any]:
    """Rejects a group whose rewards are all the same: its advantages are zero. Unscored samples do not count."""
    rewards = [sample.reward for sample in group if sample.reward is not None]
    keep = len(rewards) > 1 and float(np.std(rewards)) > 1e-6
    return {"keep": keep, "reason": "" if keep else f"zero_std_{round(rewards[0], 1) if rewards else 'unscored'}"}


class SamplingFilter:
    """The filter of a run.

    Args:
        function: see the module.
        run: its keys become `args`.
    """

    def __init__(self, function: Callable[..., Any], run: RunSettings) -> None:
        self._function = function
        self._args = SlimeArgs(run.keys)
        self._path = run.filter_path

    async def check(self, prompt: Prompt, samples: Sequence[Sample]) -> None:
        """Returns when the group is kept. Raises Rejected, or FILTER_FAILED."""
        group = [finished_sample(prompt, sample) for sample in samples]
        try:
            verdict = await asyncio.wait_for(asyncio.to_thread(self._function, self._args, group), _SECONDS)
        except TimeoutError:
            raise self._failed(f"did not answer within {_SECONDS:.0f} s") from None
        except Exception as error:
            raise self._failed(f"raised {type(error).__name__}: {error}") from error
        keep, reason = _read(verdict)
        if keep is None:
            raise self._failed(f"returned {verdict!r}; return a bool, or keep and reason")
        if not keep:
            raise Rejected(reason)

    def _failed(self, what: str) -> ServiceError:
        message = f"{KEY} {self._path!r} {what}."
        return ServiceError(Code.FAILED_PRECONDITION, "FILTER_FAILED", message, path=self._path)


def make_filter(run: RunSettings) -> SamplingFilter | None:
    """The filter that a run asks for. Raises FUNCTION_NOT_LOADABLE, INVALID_FIELD."""
    path = run.filter_path
    if path is None:
        return None
    # Run files written for slime name its own module.
    if path == NONZERO_STD or (path.startswith("slime.") and path.endswith(f".{NONZERO_STD}")):
        if run.samples_per_prompt < 2:
            why = "with n_samples_per_prompt 1 it rejects every group; take 2 samples or more"
            raise invalid_field(KEY, path, why)
        return SamplingFilter(check_reward_nonzero_std, run)
    return SamplingFilter(load_function(path, KEY, "the rollout node"), run)


def _read(verdict: Any) -> tuple[bool | None, str]:
    """(keep, reason); keep is None when the verdict says nothing."""
    if isinstance(verdict, bool | np.bool_):
        return bool(verdict), "rejected"
    if isinstance(verdict, Mapping):
        keep, reason = verdict.get("keep"), verdict.get("reason")
    else:
        keep, reason = getattr(verdict, "keep", None), getattr(verdict, "reason", None)
    return (None if keep is None else bool(keep)), str(reason or "rejected")
