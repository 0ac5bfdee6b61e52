"""Groups that a draining node hands over and another goes on with; leases while it drains; sampling filters."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from services.common.errors import Code, ServiceError
from services.common.records import Group, Sample, SampleStatus, VersionSpan
from services.rollout.core import generation_loop
from services.rollout.core.completer import Completer, Halt
from services.rollout.core.counters import Counters
from services.rollout.core.filters import Rejected, make_filter
from services.rollout.core.generate import Generator, Unfinished
from services.rollout.core.generation_loop import GenerationLoop
from services.rollout.core.makers import Interrupted, RolloutMaker
from services.rollout.core.ports import Score
from services.rollout.core.scoring import Scoring
from services.rollout.core.trajectory import Trajectory
from tests.unit.rollout.parts import (
    SAMPLING,
    Chars,
    FixedScorer,
    ListBuffer,
    ScriptedRouter,
    make_prompt,
    make_run,
    piece,
    serving_fleet,
)
from tests.unit.rollout.test_generation_loop import until


def parts(script, run=None, scorer=None):
    run, counters, halt = run or make_run(), Counters(), Halt()
    router = ScriptedRouter(script)
    fleet = serving_fleet(router)
    generator = Generator(Completer(fleet, Chars(), counters, halt=halt), run)
    scoring = Scoring(scorer or FixedScorer(), run.score)
    maker = RolloutMaker(fleet, generator, scoring, run, Chars(), counters, make_filter(run))
    return SimpleNamespace(run=run, counters=counters, halt=halt, router=router, fleet=fleet, maker=maker)


def begun(prompt, index, text, status, version=1):
    tokens = np.array([ord(char) for char in text], np.int32)
    return Sample(
        sample_id=f"{prompt.group_id}-{index}", group_id=prompt.group_id, index=index, status=status,
        prompt_length=len(prompt.tokens), tokens=np.concatenate([prompt.tokens, tokens]),
        loss_mask=np.ones(len(text), np.uint8), log_probs=np.full(len(text), -2.0, np.float32), response=text,
        versions=(VersionSpan(version, 0, len(text)),),
    )  # fmt: skip


async def test_a_halted_completion_hands_over_what_it_has():
    made = parts([[piece("ab"), piece("cd", "abort")]])
    made.halt.call()
    with pytest.raises(Interrupted) as caught:
        await made.maker.make(make_prompt())
    assert not made.router.requests, "nothing new is begun"
    assert not caught.value.group.samples
    made = parts([[piece("ab"), piece("cd", "abort")], RuntimeError])
    made.router.script[0] = lambda request: made.halt.call() or [piece("ab"), piece("cd", "abort")]
    with pytest.raises(Interrupted) as caught:
        await made.maker.make(make_prompt())
    group = caught.value.group
    assert [(s.index, s.response, s.status.name) for s in group.samples] == [
        (0, "ab", "COMPLETED"),
        (1, "cd", "ABORTED"),
    ]
    assert all(not sample.problem() for sample in group.samples)


async def test_a_group_goes_on_from_its_tokens_and_keeps_its_finished_samples():
    prompt = make_prompt("12")
    shares = (begun(prompt, 0, "abc", SampleStatus.ABORTED), begun(prompt, 1, "x", SampleStatus.COMPLETED))
    partial = Group("g", 0, shares)
    made = parts([[piece("de", version=2)]])
    group = await made.maker.make(prompt, partial)
    (request,) = made.router.requests
    assert request.input_ids == tuple(map(ord, "12abc"))
    assert request.sampling.max_new_tokens == SAMPLING.max_new_tokens - 3
    first, second = group.samples
    assert (first.response, first.status, first.turn_count) == ("abcde", SampleStatus.COMPLETED, 1)
    assert first.versions == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 5))
    assert first.log_probs.tolist() == [-2.0] * 3 + [-1.0] * 2
    assert (second.response, second.reward) == ("x", 1.0)
    assert made.counters.resumed_sample_count == 1


async def test_missing_samples_are_made_and_a_full_budget_is_truncated():
    prompt = make_prompt("12")
    partial = Group("g", 0, (begun(prompt, 1, "a" * 8, SampleStatus.ABORTED),))
    made = parts([[piece("b")]])
    group = await made.maker.make(prompt, partial)
    assert [request.sample_count for request in made.router.requests] == [1]
    assert [(s.response, s.status.name) for s in group.samples] == [("b", "COMPLETED"), ("a" * 8, "TRUNCATED")]


async def test_a_share_of_another_prompt_text_is_not_gone_on_with():
    other = begun(make_prompt("99"), 0, "abc", SampleStatus.ABORTED)
    made = parts([[piece("a"), piece("b")]])
    group = await made.maker.make(make_prompt("12"), Group("g", 0, (other,)))
    assert [sample.response for sample in group.samples] == ["a", "b"]


def test_a_trajectory_survives_the_way_through_a_sample():
    sample = begun(make_prompt("12"), 0, "abc", SampleStatus.ABORTED)
    back = Trajectory.of(sample)
    assert back.input_ids == sample.tokens.tolist()
    assert back.versions == sample.versions
    assert back.status is SampleStatus.ABORTED
    np.testing.assert_array_equal(back.log_probs, sample.log_probs)


async def test_a_drain_hands_over_without_an_attempt_and_another_loop_goes_on():
    buffer = ListBuffer([make_prompt("12", "g")])
    made = parts([None])
    ended = asyncio.Event()

    async def generate(request, timeout):
        await ended.wait()
        return [piece("ab"), piece("cd", "abort")]

    made.router.generate = generate

    async def interrupt():
        made.halt.call()
        ended.set()

    loop = GenerationLoop(buffer, made.maker, made.run, made.counters, lambda: 4, made.fleet.wait_serving, interrupt)
    task = asyncio.create_task(loop.run())
    await until(lambda: loop.running_count == 1)
    assert await loop.drain(0.05) == 1
    await asyncio.wait_for(task, 5)
    assert (buffer.unharmed, buffer.pending[0][1]) == (1, 0)
    assert made.counters.unfinished_group_count == 1
    second = parts([[piece("ef", version=2)]])
    loop = GenerationLoop(buffer, second.maker, second.run, second.counters, lambda: 4, second.fleet.wait_serving)
    task = asyncio.create_task(loop.run())
    await until(lambda: "g" in buffer.put)
    await loop.drain(1.0)
    await asyncio.wait_for(task, 5)
    assert [sample.response for sample in buffer.put["g"].samples] == ["ab", "cdef"]


async def test_leases_are_extended_while_the_loop_drains():
    buffer = ListBuffer([make_prompt("12", "g")])
    made = parts([None], make_run(lease_ttl=0.15))

    async def generate(request, timeout):
        await asyncio.sleep(0.6)
        return [piece("ab"), piece("cd")]

    made.router.generate = generate
    loop = GenerationLoop(buffer, made.maker, made.run, made.counters, lambda: 4, made.fleet.wait_serving)
    task = asyncio.create_task(loop.run())
    await until(lambda: loop.running_count == 1)
    assert await loop.drain(5.0) == 0
    await asyncio.wait_for(task, 5)
    assert buffer.extended >= 5
    assert "g" in buffer.put
    extended = buffer.extended
    await asyncio.sleep(0.2)
    assert buffer.extended == extended, "nothing is extended once all is done"


async def test_leases_that_arrive_during_a_drain_are_given_back_unharmed():
    buffer = ListBuffer([])
    made = parts([[piece("a"), piece("b")]])
    asked = asyncio.Event()
    lease = buffer.lease_prompts

    async def slow(*args):
        asked.set()
        await asyncio.sleep(0.2)
        buffer.pending.append((make_prompt("12", "late"), 0))
        return await lease(*args)

    buffer.lease_prompts = slow
    loop = GenerationLoop(buffer, made.maker, made.run, made.counters, lambda: 4, made.fleet.wait_serving)
    task = asyncio.create_task(loop.run())
    await asked.wait()
    await loop.drain(0.0)
    await asyncio.wait_for(task, 5)
    assert buffer.unharmed == 1
    assert not buffer.put


async def test_a_full_store_is_waited_for_and_named(monkeypatch):
    full = ServiceError(Code.RESOURCE_EXHAUSTED, "STORE_FULL", "the store is full", retry_seconds=0.05)
    monkeypatch.setattr(generation_loop, "_PUT_SECONDS", 0.01)
    buffer = ListBuffer([make_prompt("12", "g")])
    buffer.put_errors = [full] * 5
    made = parts([[piece("a"), piece("b")]])
    loop = GenerationLoop(buffer, made.maker, made.run, made.counters, lambda: 4, made.fleet.wait_serving)
    task = asyncio.create_task(loop.run())
    await until(lambda: "the store is full" in loop.problem)
    await until(lambda: "g" in buffer.put)
    await until(lambda: not loop.problem)
    await loop.drain(1.0)
    await asyncio.wait_for(task, 5)
    assert made.counters.failed_group_count == 0


class TurningScorer(FixedScorer):
    """Equal rewards for the first group, different ones for the second."""

    async def score(self, call, items):
        self.calls.append(items)
        return [Score(float(at) if len(self.calls) > 1 else 1.0) for at in range(len(items))]


async def test_a_rejected_group_is_evicted_with_its_reason_and_is_no_failure():
    buffer = ListBuffer([make_prompt("12", "g"), make_prompt("34", "h")])
    made = parts([[piece("a"), piece("b")]], make_run(filter_path="check_reward_nonzero_std"), TurningScorer())
    loop = GenerationLoop(buffer, made.maker, made.run, made.counters, lambda: 1, made.fleet.wait_serving)
    task = asyncio.create_task(loop.run())
    await until(lambda: "h" in buffer.put)
    await loop.drain(1.0)
    await asyncio.wait_for(task, 5)
    assert buffer.evicted == {"g": "FILTERED:zero_std_1.0"}
    assert (made.counters.rejected_group_count, made.counters.failed_group_count) == (1, 0)


def seen(args, group):
    """A filter of a user, in slime's form."""
    sample = group[0]
    assert sample.status is type(sample).Status.COMPLETED
    assert (sample.get_reward_value(args), args.n_samples_per_prompt) == (1.0, 2)
    return SimpleNamespace(keep=sample.response != "a", reason="begins with a\n")


def broken(args, group):
    """A filter that cannot decide."""
    raise KeyError("score")


async def test_filters_of_users_are_called_as_slime_calls_them():
    made = parts([[piece("a"), piece("b")]], make_run(filter_path=f"{__name__}.seen"))
    with pytest.raises(Rejected) as caught:
        await made.maker.make(make_prompt())
    assert caught.value.reason == "begins with a_"
    made = parts([[piece("b"), piece("b")]], make_run(filter_path=f"{__name__}.seen"))
    assert len((await made.maker.make(make_prompt())).samples) == 2
    made = parts([[piece("b"), piece("b")]], make_run(filter_path=f"{__name__}.broken"))
    with pytest.raises(ServiceError, match=r"broken' raised KeyError: 'score'") as caught:
        await made.maker.make(make_prompt())
    assert caught.value.reason == "FILTER_FAILED"


def test_a_filter_that_can_only_reject_is_refused():
    with pytest.raises(ServiceError, match="n_samples_per_prompt 1 it rejects every group"):
        make_filter(make_run(filter_path="check_reward_nonzero_std", samples_per_prompt=1))
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    assert make_filter(make_run(filter_path=path)) is not None
    with pytest.raises(ServiceError, match=r"dynamic_sampling_filter_path .no\.such. cannot be used"):
        make_filter(make_run(filter_path="no.such"))


async def test_unfinished_is_no_failure_of_the_generator():
    made = parts([[piece("ab"), piece("", "abort")]])
    made.router.script[0] = lambda request: made.halt.call() or [piece("ab"), piece("", "abort")]
    with pytest.raises(Unfinished) as caught:
        await made.maker.generator.generate(make_prompt(), SAMPLING, 2)
    assert list(caught.value.trajectories) == [0]
