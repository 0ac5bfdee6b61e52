"""The run's correction of trainer against engine: which formula, and its mean over a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from services.common.errors import Code, ServiceError
from services.common.import_path import load_function
from services.common.run_spec.algorithm import AlgorithmSettings
from services.trainer.core.algorithms.corrections import (
    Correction,
    batch_normalized,
    correct,
    correction_settings,
    custom_correction,
)
from services.trainer.ranks.batches import Pack

CUSTOM_KEY = "custom_tis_function_path"


class Corrector:
    """What the run's settings, or the user's function, make of log-probs of the trainer and of the engine."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self._settings, self._formula = settings, correction_settings(settings)
        path = settings.custom_tis_function_path
        self._function = load_function(path, CUSTOM_KEY, "the trainer") if path else None

    def __call__(self, generating: torch.Tensor, pack: Pack) -> Correction:
        """Correction of a pack. `generating`: float32 [k], log-probs by the weights that generated, of the trainer.

        Raises:
            ServiceError: CUSTOM_CORRECTION_FAILED.
        """
        arguments = generating.detach(), pack.engine_log_probs, pack.segments, pack.sample_count
        if self._function is None:
            return correct(*arguments, self._formula)
        try:
            return custom_correction(self._function, *arguments, self._settings)
        except Exception as error:
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            text = f"{CUSTOM_KEY} {self._settings.custom_tis_function_path!r} failed: {said}."
            raise ServiceError(Code.FAILED_PRECONDITION, "CUSTOM_CORRECTION_FAILED", text) from error

    def of_step(
        self, packs: Sequence[Pack], generating: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> list[Correction]:
        """Corrections of all packs of a step, with weights over their mean in the step on all data-parallel ranks."""
        found = [self(log_probs, pack) for log_probs, pack in zip(generating, packs, strict=True)]
        sums = [torch.stack([one.sums["level_weight"], one.sums["level_count"]]) for one in found]
        whole = torch.stack(sums).sum(0)
        if group.size() > 1:
            dist.all_reduce(whole, group=group)
        weight, count = whole.tolist()
        return [replace(one, weights=batch_normalized(one.weights, weight, count)) for one in found]
