"""One run on one node: its engines, its updates, its loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.common.errors import Code, ServiceError
from services.common.records import Prompt, Sample, SamplingParams
from services.common.telemetry import get_logger
from services.rollout.core.completer import Completer, Halt
from services.rollout.core.counters import Counters
from services.rollout.core.evaluation import Evaluation, EvaluationRequest
from services.rollout.core.filters import make_filter
from services.rollout.core.fleet import Fleet
from services.rollout.core.generate import Generator, make_generator
from services.rollout.core.generation_loop import GenerationLoop
from services.rollout.core.makers import RolloutMaker, SupervisedMaker
from services.rollout.core.ports import PromptBuffer, Scorer, Teacher, Tokenizer
from services.rollout.core.replay import KEY as REPLAY_KEY
from services.rollout.core.replay import ReplayMaker
from services.rollout.core.run_settings import RunSettings
from services.rollout.core.scoring import Scoring
from services.rollout.core.teaching import TaughtMaker
from services.rollout.core.unattended import Unattended
from services.rollout.core.weight_files import VersionFiles
from services.rollout.core.weights import WeightUpdates

log = get_logger(__name__)

_SFT_INFLIGHT = 512
_RUNNING_DEFAULT = 64
"""Requests an engine is assumed to decode at once before it has told."""


@dataclass(frozen=True)
class Services:
    """The tiers a session talks to, and the node's counters."""

    buffer: PromptBuffer
    scorer: Scorer
    counters: Counters
    files: VersionFiles | None = None
    """The run's weights as files."""
    teacher: Teacher | None = None
    """Of a distillation, behind a URL."""


class RunSession:
    """A run being served.

    Args:
        run: its settings.
        services: buffer, reward and counters.
        tokenizer: of the run's checkpoint.
        fleet: engines; None for a supervised run.

    Raises FUNCTION_NOT_LOADABLE for a generate function or a filter that cannot be used.
    """

    def __init__(self, run: RunSettings, services: Services, tokenizer: Tokenizer, fleet: Fleet | None) -> None:
        self.run = run
        self.fleet = fleet
        self.updates: WeightUpdates | None = None
        self._services = services
        self._task: asyncio.Task[None] | None = None
        self._generator: Generator | None = None
        self._maker: RolloutMaker | None = None
        self._halt = Halt()
        self.policy_version = 0
        """Newest published version, as the buffer says."""
        self._unattended: Unattended | None = None
        self._watch: asyncio.Task[None] | None = None
        if fleet is None:
            maker: RolloutMaker | SupervisedMaker | ReplayMaker | TaughtMaker = (
                ReplayMaker(run) if run.keys.get(REPLAY_KEY) else SupervisedMaker(run, tokenizer)
            )
        else:
            completer = Completer(fleet, tokenizer, services.counters, run.max_context_length)
            self._generator = make_generator(completer, run)
            # Evaluations are not given back: they go on where an engine ended them.
            training = replace(self._generator, completer=replace(completer, halt=self._halt, record=run.record))
            files = services.files
            self.updates = WeightUpdates(fleet, services.counters, run.pause_mode, run.update_timeout, files)
            if files is not None:
                self._unattended = Unattended(fleet, self.updates, files, self._published, run.max_staleness)
            self._maker = RolloutMaker(
                fleet, self._generator, Scoring(services.scorer, run.score), run, tokenizer, services.counters
            )
            maker = replace(self._maker, generator=training, filter=make_filter(run))
        if run.teacher is not None and services.teacher is not None:
            maker = TaughtMaker(maker, services.teacher, run.teacher, services.counters)
        self._loop = GenerationLoop(
            services.buffer, maker, run, services.counters, self._inflight, self._ready, self._interrupt
        )

    def _inflight(self) -> int:
        """Groups in flight: twice what the engines decode at once keeps them full while others are scored."""
        if self.run.max_inflight:
            return self.run.max_inflight
        if self.fleet is None:
            return _SFT_INFLIGHT
        return max(8, 2 * self._running_count() // self.run.samples_per_prompt)

    def _running_count(self) -> int:
        """Requests that all engines together decode at once."""
        slots = self.fleet.slots if self.fleet else []
        return sum((slot.info and slot.info.max_running) or _RUNNING_DEFAULT for slot in slots)

    def _published(self) -> int:
        return self.policy_version

    async def _ready(self, timeout: float) -> bool:
        return True if self.fleet is None else await self.fleet.wait_serving(timeout)

    def start(self) -> None:
        """Begins to lease prompts."""
        if self._unattended is not None:
            self._watch = asyncio.create_task(self._unattended.watch(), name=f"engines of {self.run.run_id} alone")
        self._task = asyncio.create_task(self._loop.run(), name=f"generation of {self.run.run_id}")

    @property
    def running_group_count(self) -> int:
        """Groups in flight."""
        return self._loop.running_count

    @property
    def draining(self) -> bool:
        """It leases no more prompts."""
        return self._loop.draining

    @property
    def run_ended(self) -> bool:
        """True once the buffer answered that the run is over; no prompt is leased any more."""
        return self._loop.run_ended

    @property
    def problem(self) -> str:
        """Why groups do not come, in one sentence; empty when they do."""
        if self._task is not None and self._task.done() and not self._task.cancelled() and self._task.exception():
            return f"The generation loop ended: {self._task.exception()}"
        return self._loop.problem

    async def _interrupt(self) -> None:
        """Makes the engines hand over what they have of every group."""
        self._halt.call()
        if self.fleet is not None:
            await self.fleet.abort_requests()

    async def drain(self, max_wait: float, *, keep: bool = True) -> int:
        """Stops leasing; returns how many groups were given back unfinished, with what was made of them (`keep`)."""
        return await self._loop.drain(max_wait, keep=keep)

    async def stop(self, max_wait: float) -> None:
        """Drains and ends; the fleet is left running."""
        await self._loop.drain(max_wait, keep=not self.run_ended)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.updates is not None:
            await self.updates.close()
        if self._services.files is not None:
            await self._services.files.close()
        if self._services.teacher is not None:
            await self._services.teacher.close()
        if self._generator is not None:
            self._generator.close()

    def evaluation(self, request: EvaluationRequest) -> Evaluation:
        """An evaluation on this run's engines. Raises NO_ENGINE_READY for a supervised run."""
        maker = self._engines_of("evaluate")
        per_prompt = request.sample_count or self.run.samples_per_eval_prompt
        concurrency = max(4, 2 * self._running_count() // per_prompt)
        return Evaluation(self._services.buffer, maker, request, concurrency)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, sample_count: int, timeout: float
    ) -> Sequence[Sample]:
        """Unscored samples of a prompt given by text or tokens, single turn."""
        maker = self._engines_of("generate")
        if not len(prompt.tokens):
            prompt = replace(prompt, tokens=np.array(maker.tokenizer.encode(prompt.text), np.int32))
        limited = replace(self.run, generate_timeout=min(timeout, self.run.generate_timeout))
        generator = Generator(maker.generator.completer, limited)
        single = replace(maker, generator=generator)
        return await single.samples(prompt, self.run.sampling.overlaid(sampling), max(1, sample_count))

    def _engines_of(self, verb: str) -> RolloutMaker:
        if self._maker is None:
            raise ServiceError(
                Code.UNAVAILABLE,
                "NO_ENGINE_READY",
                f"Run {self.run.run_id} trains labels or a file and has no engines: it cannot {verb}.",
                run_id=self.run.run_id,
            )
        return self._maker
