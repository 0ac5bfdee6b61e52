"""Formulas of the trainer beside independent ones: a row each, for `benchmarks.algorithms` and the tests of oracles.

A module here is one family of formulas; its `cases()` gives the rows. A row computes both sides on a ragged batch and
says how far they are apart. References are other libraries, or a few lines of float64 written from the paper; none of
them calls the trainer's code.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.algorithm_cases.batch import Ragged

FLOAT32 = 1e-6


@dataclass(frozen=True)
class Case:
    """A row. `error`: largest absolute difference on a batch; `bar`: what it may be. `needs`: package of the
    reference, "" when it is written here."""

    family: str
    name: str
    reference: str
    error: Callable[[Ragged], float]
    bar: float = FLOAT32
    needs: str = ""

    @property
    def available(self) -> bool:
        """Its reference is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None


def cases() -> Iterator[Case]:
    """All rows."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        yield from getattr(importlib.import_module(module.name), "cases", tuple)()


def distance(ours: torch.Tensor | np.ndarray | float, theirs: torch.Tensor | np.ndarray | float) -> float:
    """Largest absolute difference; infinite when shapes differ or one side is no number."""
    one, two = (
        np.asarray(side.detach() if isinstance(side, torch.Tensor) else side, np.float64) for side in (ours, theirs)
    )
    if one.shape != two.shape:
        return float("inf")
    worst = float(np.abs(one - two).max(initial=0.0))
    return worst if np.isfinite(worst) else float("inf")
