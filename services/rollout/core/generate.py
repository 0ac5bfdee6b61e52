"""From one prompt to trajectories: the default single turn, and generate functions of the user.

Two signatures are known (chosen by the names of the parameters):
- ours: `async def generate(context, prompt, sampling) -> Trajectory`;
- slime's: `async def generate(args, sample, sampling_params) -> sample`, see `services.rollout.core.slime`.

Either may return a list: the samples of one rollout (sub-agents, say, or a context that was cut on the way). A group
has as many rollouts as the run asks for, and advantages count each once.

User functions run in a thread of their own; their calls of the engines come back to the node's loop.
Invariant: whatever a function returns, the trajectory satisfies the rules of `Trajectory` or the sample fails.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.common.errors import Code, ServiceError
from services.common.import_path import load_function
from services.common.records import Prompt, SampleStatus, SamplingParams
from services.rollout.core.completer import Completer
from services.rollout.core.engine_port import Generation
from services.rollout.core.ports import Tokenizer
from services.rollout.core.run_settings import RunSettings
from services.rollout.core.slime import SlimeFunction
from services.rollout.core.trajectory import Trajectory
from services.rollout.core.user_loop import UserLoop

PATH_KEY = "custom_generate_function_path"

_Rollout = Trajectory | list[Trajectory]
"""What one rollout gave."""


class TurnLimitReached(Exception):
    """A generate function asked for more turns than `max_turns`. Uncaught, it ends the sample as TRUNCATED."""


class Unfinished(Exception):
    """The node halted: what was made of a group so far, by index; unfinished trajectories are ABORTED."""

    def __init__(self, trajectories: Mapping[int, Trajectory]) -> None:
        super().__init__(f"{len(trajectories)} samples were begun")
        self.trajectories = dict(trajectories)


class GenerateContext:
    """What a generate function may use. One object per sample.

    Attributes:
        tokenizer: of the run's checkpoint.
        run: settings of the run; `run.keys` holds every key by its flat name.
        max_turns: bound on `generate` calls.
        index: position of the sample in its group.
    """

    def __init__(self, completer: Completer, run: RunSettings, index: int, deadline: float) -> None:
        self.tokenizer: Tokenizer = completer.tokenizer
        self.run = run
        self.max_turns = run.max_turns
        self.index = index
        self.trajectory: Trajectory | None = None
        self._completer = completer
        self._deadline = deadline
        self._turns = 0
        self._home = asyncio.get_running_loop()

    @property
    def turns_left(self) -> int:
        """`generate` calls that remain."""
        return self.max_turns - self._turns

    def start(self, prompt: Prompt) -> Trajectory:
        """A trajectory that begins with the prompt's tokens."""
        self.trajectory = Trajectory(prompt.tokens)
        return self.trajectory

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """One turn of the model. Raises TurnLimitReached, or the errors of `Completer.complete`."""
        if self._turns >= self.max_turns:
            raise TurnLimitReached(f"max_turns is {self.max_turns}")
        self._turns += 1
        call = self._completer.complete(input_ids, sampling, 1, self._deadline)
        if asyncio.get_running_loop() is self._home:
            (made,) = await call
        else:
            (made,) = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._home))
        if made.finish_reason == "abort":
            raise ServiceError(Code.UNAVAILABLE, "HALTED", "The node gives its unfinished work back.")
        return made


@dataclass(frozen=True)
class Generator:
    """Turns prompts into trajectories for one run. Build it with `make_generator`."""

    completer: Completer
    run: RunSettings
    function: Callable[..., Any] | None = None
    """Ours; None: single turn."""
    slime: SlimeFunction | None = None
    loop: UserLoop | None = None

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        rollout_count: int,
        begun: Mapping[int, Trajectory] | None = None,
        *,
        greedy_first: bool = False,
    ) -> list[Trajectory]:
        """The trajectories of `rollout_count` rollouts in order; one each, unless the user's function fans out.

        `begun`: what there is of some by rollout; ABORTED ones are not finished yet. `greedy_first`: the first rollout
        is decoded greedily.

        Raises ServiceError when any sample failed for good, Unfinished when the node halted first.
        """
        deadline = time.monotonic() + self.run.generate_timeout
        begun = begun or {}
        samplings = [sampling] * rollout_count
        if greedy_first:
            samplings[0] = replace(sampling, temperature=0.0)
        done = {index: made for index, made in begun.items() if made.status is not SampleStatus.ABORTED}
        if self.function is None and self.slime is None:
            made = await self._single_turn(prompt, samplings, deadline, begun)
        else:
            # A function of the user cannot be entered half way: what it had not finished is made again.
            left = [index for index in range(rollout_count) if index not in done]
            calls = [self._custom(prompt, samplings[index], index, deadline) for index in left]
            made = dict(zip(left, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        return self._complete(done, made, rollout_count)

    def _complete(
        self, done: Mapping[int, Trajectory], made: Mapping[int, _Rollout | BaseException], rollout_count: int
    ) -> list[Trajectory]:
        """All trajectories in order. Raises the first failure that is not the halt, then Unfinished."""
        whole = {index: [trajectory] for index, trajectory in done.items()}
        for index, outcome in made.items():
            if not isinstance(outcome, BaseException):
                whole[index] = outcome if isinstance(outcome, list) else [outcome]
            elif not (isinstance(outcome, ServiceError) and self.completer.halt.called):
                raise outcome
        everything = [one for rollout in whole.values() for one in rollout]
        for one in everything if self.loop is not None else ():
            if not one.versions and one.status is not SampleStatus.ABORTED:
                raise self._misused("returned a sample without any token of the model")
        halted = any(one.status is SampleStatus.ABORTED for one in everything) and self.completer.halt.called
        if halted or len(whole) < rollout_count:
            # A rollout of several samples is made again as a whole.
            single = {index: rollout[0] for index, rollout in sorted(whole.items()) if len(rollout) == 1}
            raise Unfinished({index: one for index, one in single.items() if one.response_length})
        if len(everything) > rollout_count:
            for index, rollout in whole.items():
                for one in rollout:
                    one.rollout_index = index
        return [one for index in range(rollout_count) for one in whole[index]]

    def _misused(self, what: str) -> ServiceError:
        return ServiceError(
            Code.FAILED_PRECONDITION, "GENERATE_FAILED", f"{PATH_KEY} {self.run.generate_path!r} {what}."
        )

    async def _single_turn(
        self,
        prompt: Prompt,
        samplings: Sequence[SamplingParams],
        deadline: float,
        begun: Mapping[int, Trajectory],
    ) -> dict[int, Trajectory | BaseException]:
        """Outcome by index of the samples that were not done."""
        fresh: dict[SamplingParams, list[int]] = {}
        for index, sampling in enumerate(samplings):
            if index not in begun:
                fresh.setdefault(sampling, []).append(index)
        unfinished = [index for index, one in begun.items() if one.status is SampleStatus.ABORTED]
        start = [
            self.completer.complete(prompt.tokens, sampling, len(indexes), deadline)
            for sampling, indexes in fresh.items()
        ]
        going_on, started = await asyncio.gather(
            asyncio.gather(
                *(self._go_on(begun[index], samplings[index], deadline) for index in unfinished), return_exceptions=True
            ),
            asyncio.gather(*start, return_exceptions=True),
        )
        made: dict[int, Trajectory | BaseException] = dict(zip(unfinished, going_on, strict=True))
        for index, answer in made.items():
            if isinstance(answer, ServiceError) and self.completer.halt.called:
                made[index] = begun[index]  # no engine took it up
        for indexes, answer in zip(fresh.values(), started, strict=True):
            if isinstance(answer, BaseException):
                made |= dict.fromkeys(indexes, answer)
                continue
            for index, generation in zip(indexes, answer, strict=True):
                trajectory = Trajectory(prompt.tokens)
                trajectory.append_generation(generation)
                made[index] = trajectory
        return made

    async def _go_on(self, begun: Trajectory, sampling: SamplingParams, deadline: float) -> Trajectory:
        """A trajectory taken up from its tokens."""
        budget = sampling.max_new_tokens
        if budget is not None and begun.response_length >= budget:
            begun.finish(SampleStatus.TRUNCATED)
            return begun
        rest = sampling if budget is None else replace(sampling, max_new_tokens=budget - begun.response_length)
        (more,) = await self.completer.complete(begun.input_ids, rest, 1, deadline)
        self.completer.counters.resumed_sample_count += 1
        turns = begun.turn_count
        begun.append_generation(more)
        begun.turn_count = max(1, turns)
        return begun

    async def _custom(self, prompt: Prompt, sampling: SamplingParams, index: int, deadline: float) -> _Rollout:
        # No user code runs before an engine can answer it; the time it has begins then.
        if not await self.completer.fleet.wait_serving(deadline - time.monotonic()):
            raise ServiceError(Code.UNAVAILABLE, "NO_ENGINE_READY", "No engine of this node became READY in time.")
        assert self.loop is not None
        remaining = deadline - time.monotonic()
        if self.slime is not None:
            return await self.slime.run(self.loop, prompt, sampling, index, remaining)
        context = GenerateContext(self.completer, self.run, index, deadline)
        return await self.loop.run(lambda: self._call(context, prompt, sampling), remaining)

    async def _call(self, context: GenerateContext, prompt: Prompt, sampling: SamplingParams) -> _Rollout:
        assert self.function is not None
        try:
            result = await self.function(context, prompt, sampling)
        except TurnLimitReached:
            result = context.trajectory
            if result is None:
                raise
            result.finish(SampleStatus.TRUNCATED)
        rollout = list(result) if isinstance(result, list | tuple) else [result]
        if wrong := [type(one).__name__ for one in rollout if not isinstance(one, Trajectory)]:
            raise self._misused(f"returned {wrong[0]}; return the Trajectory that context.start(prompt) gave")
        if not rollout:
            raise self._misused("returned no Trajectory; return one at least")
        return rollout

    def close(self) -> None:
        """Ends the thread of user functions."""
        if self.loop is not None:
            self.loop.close()


def check_function(run: RunSettings) -> tuple[Callable[..., Any], bool] | None:
    """The run's generate function and whether its signature is slime's; None for the default.

    Raises FUNCTION_NOT_LOADABLE with one sentence.
    """
    if run.generate_path is None:
        return None
    function = load_function(run.generate_path, PATH_KEY, "the rollout node")
    if not inspect.iscoroutinefunction(function):
        raise _unusable(run.generate_path, "it is not an async function; write async def generate(...)")
    names = list(inspect.signature(function).parameters)
    if names[:2] == ["args", "sample"] or "sampling_params" in names:
        return function, True
    if len(names) != 3:
        raise _unusable(
            run.generate_path,
            f"its parameters are ({', '.join(names)});"
            " use (context, prompt, sampling) or (args, sample, sampling_params)",
        )
    return function, False


def make_generator(completer: Completer, run: RunSettings) -> Generator:
    """The generator a run asks for. Raises FUNCTION_NOT_LOADABLE with one sentence."""
    custom = check_function(run)
    if custom is None:
        return Generator(completer, run)
    function, is_slime = custom
    loop = UserLoop(str(run.generate_path))
    if is_slime:
        return Generator(completer, run, slime=SlimeFunction(function, completer, run), loop=loop)
    return Generator(completer, run, function=function, loop=loop)


def _unusable(path: str, why: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION, "FUNCTION_NOT_LOADABLE", f"{PATH_KEY} {path!r} cannot be used: {why}.", path=path
    )
