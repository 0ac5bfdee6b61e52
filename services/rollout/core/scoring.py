"""Rewards for samples, within a deadline; what has none by then is unscored, which is an outcome, not a zero."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from services.common.errors import Code, ServiceError
from services.common.records import Prompt, Sample
from services.common.telemetry import get_logger
from services.rollout.core.batching import Batcher
from services.rollout.core.ports import Score, ScoreCall, ScoreItem, Scorer
from services.rollout.core.run_settings import ScoreSettings
from services.rollout.core.samples import scored

log = get_logger(__name__)

_RETRY_SECONDS = (0.1, 2.0)
_RPC_SLACK = 0.9
"""Share of the remaining time that the reward service gets, so that its answer arrives in time."""


class Scoring:
    """Scores the samples of one run.

    Args:
        scorer: the reward service.
        settings: grader, options and timeout of the run.
    """

    def __init__(self, scorer: Scorer, settings: ScoreSettings) -> None:
        self._scorer = scorer
        self._settings = settings
        self._batchers: dict[tuple[str, str], Batcher[list[ScoreItem], list[Score]]] = {}

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with rewards or reasons. Samples that have a reward keep it. Never raises ServiceError."""
        items = [
            ScoreItem(s.sample_id, s.group_id, prompt.text, s.response, prompt.label, prompt.metadata_json)
            for s in samples
            if s.reward is None
        ]
        if not items:
            return list(samples)
        scores = await self._batcher(prompt).submit(items)
        by_id = dict(zip((item.item_id for item in items), scores, strict=True))
        return [scored(s, by_id[s.sample_id]) if s.sample_id in by_id else s for s in samples]

    def _batcher(self, prompt: Prompt) -> Batcher[list[ScoreItem], list[Score]]:
        """Calls of one grader with one set of options: the prompt's own, or else the run's."""
        grader = prompt.rm_type or self._settings.grader
        # Options belong to a grader: a set that names another one does not inherit the run's.
        inherited = self._settings.options_json if grader == self._settings.grader else "{}"
        key = (grader, prompt.rm_options_json or inherited)
        if key not in self._batchers:
            # A grouped grader sees one group a call; else items of many groups share calls when there are many.
            grouped = self._grouped(grader)
            self._batchers[key] = Batcher(
                lambda groups: self._score_groups(*key, groups),
                max_items=1 if grouped else 64,
                concurrency=64 if grouped else 8,
            )
        return self._batchers[key]

    def _grouped(self, grader: str) -> bool:
        return self._settings.grouped and grader == "custom"

    async def _score_groups(self, grader: str, options: str, groups: list[list[ScoreItem]]) -> list[list[Score]]:
        items = [item for group in groups for item in group]
        scores = await self._until_deadline(grader, options, items)
        result, at = [], 0
        for group in groups:
            result.append(scores[at : at + len(group)])
            at += len(group)
        return result

    async def _until_deadline(self, grader: str, options: str, items: Sequence[ScoreItem]) -> list[Score]:
        settings = self._settings
        deadline = time.monotonic() + settings.timeout
        pause, longest = _RETRY_SECONDS
        while True:
            remaining = deadline - time.monotonic()
            path = settings.custom_path if grader == "custom" else ""
            call = ScoreCall(grader, path, options, self._grouped(grader), remaining * _RPC_SLACK)
            try:
                return await asyncio.wait_for(self._scorer.score(call, items), max(remaining, 0.01))
            except TimeoutError:
                return [Score(None, "TIMEOUT")] * len(items)
            except ServiceError as error:
                if error.code is Code.DEADLINE_EXCEEDED:
                    return [Score(None, "TIMEOUT")] * len(items)
                if error.code is not Code.UNAVAILABLE:
                    log.warning("scoring was refused", error=str(error))
                    return [Score(None, error.reason)] * len(items)
                if time.monotonic() + pause >= deadline:
                    log.warning("the reward service did not answer in time", error=str(error))
                    return [Score(None, "REWARD_UNAVAILABLE")] * len(items)
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
