"""Groups with a teacher's log-probs, for on-policy distillation.

The teacher is asked after a group is scored and kept, once for each sample. Invariant: a group is passed on only with
the log-probs of all its scored samples; one that the teacher has no answer for is given back to be made again, and
when the teacher is merely away that is no failed attempt of its prompt.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Protocol

from services.common.errors import Code, ServiceError
from services.common.records import Group, Prompt, Sample, TeacherLogProbs
from services.rollout.core.counters import Counters
from services.rollout.core.ports import Teacher
from services.rollout.core.run_settings import TeacherSettings

AWAY = "TEACHER_UNAVAILABLE"
"""Reason of a group that waits for its teacher."""
_RETRY_SECONDS = (0.1, 2.0)


class GroupSource(Protocol):
    """Makes finished groups."""

    async def make(self, prompt: Prompt, partial: Group | None = None) -> Group:
        """The group of a prompt."""
        ...


@dataclass(frozen=True)
class TaughtMaker:
    """Adds a teacher's log-probs to the groups of another maker."""

    maker: GroupSource
    teacher: Teacher
    settings: TeacherSettings
    counters: Counters

    async def make(self, prompt: Prompt, partial: Group | None = None) -> Group:
        """The group. Raises what the other maker does, TEACHER_UNAVAILABLE, or what the teacher says of a sample."""
        group = await self.maker.make(prompt, partial)
        began = time.monotonic()
        answers = await asyncio.gather(*map(self._taught, group.samples), return_exceptions=True)
        self.counters.teacher_seconds += time.monotonic() - began
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return replace(group, samples=tuple(answers))

    async def _taught(self, sample: Sample) -> Sample:
        """The sample with log-probs; unchanged when nothing of it is trained, or when it has them already."""
        if sample.reward is None or not sample.response_length or self._has(sample.teacher):
            return sample
        return replace(sample, teacher=await self._ask(sample))

    def _has(self, teacher: TeacherLogProbs | None) -> bool:
        return teacher is not None and teacher.top.shape[1] >= self.settings.top_k

    async def _ask(self, sample: Sample) -> TeacherLogProbs:
        """The teacher's answer, asked for again while it is away."""
        deadline = time.monotonic() + self.settings.timeout
        pause, longest = _RETRY_SECONDS
        while True:
            try:
                return await self.teacher.log_probs(sample, self.settings.top_k, max(deadline - time.monotonic(), 0.01))
            except ServiceError as error:
                if error.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                    raise
                if time.monotonic() + pause >= deadline:
                    raise ServiceError(
                        Code.UNAVAILABLE,
                        "TEACHER_UNAVAILABLE",
                        f"The teacher gave no log-probs of sample {sample.sample_id} within"
                        f" {self.settings.timeout:g} s: {error.message} Its prompt is generated again; look at the"
                        " engine behind opd_teacher_url.",
                        sample_id=sample.sample_id,
                        url=self.settings.url,
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
