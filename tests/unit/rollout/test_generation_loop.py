"""The loop from leases to stored groups, scoring with its deadline, supervised groups."""

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest

from services.common.errors import Code, ServiceError
from services.common.records import SampleStatus
from services.rollout.core import generation_loop
from services.rollout.core.completer import Completer
from services.rollout.core.counters import Counters
from services.rollout.core.generate import Generator
from services.rollout.core.generation_loop import GenerationLoop
from services.rollout.core.makers import RolloutMaker, SupervisedMaker
from services.rollout.core.ports import Score
from services.rollout.core.run_settings import ScoreSettings
from services.rollout.core.scoring import Scoring
from tests.unit.rollout.parts import (
    UNAVAILABLE,
    Chars,
    FixedScorer,
    ListBuffer,
    ScriptedRouter,
    make_prompt,
    make_run,
    piece,
    serving_fleet,
)


def build(buffer, script, run=None, scorer=None, inflight=8):
    run = run or make_run()
    counters = Counters()
    fleet = serving_fleet(ScriptedRouter(script))
    completer = Completer(fleet, Chars(), counters)
    maker = RolloutMaker(
        fleet, Generator(completer, run), Scoring(scorer or FixedScorer(), run.score), run, Chars(), counters
    )
    return GenerationLoop(buffer, maker, run, counters, lambda: inflight, fleet.wait_serving), counters


@contextlib.asynccontextmanager
async def running(loop):
    task = asyncio.create_task(loop.run())
    yield
    await loop.drain(1.0)
    await asyncio.wait_for(task, 5)


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def both(request):
    return [piece("ab"), piece("c", "length")]


async def test_groups_are_generated_scored_and_put():
    prompts = [make_prompt(str(i), f"g{i}") for i in range(20)]
    buffer = ListBuffer(prompts)
    loop, counters = build(buffer, [both])
    async with running(loop):
        await until(lambda: len(buffer.put) == 20)
    group = buffer.put["g7"]
    assert [sample.sample_id for sample in group.samples] == ["g7-0", "g7-1"]
    assert [sample.status for sample in group.samples] == [SampleStatus.COMPLETED, SampleStatus.TRUNCATED]
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]
    assert all(not sample.problem() for sample in group.samples)
    assert group.samples[0].response == "ab"
    assert counters.finished_group_count == 20
    assert counters.put_outcomes == {"STORED": 20}
    assert counters.generated_token_count == 60


async def test_a_failed_group_gets_another_attempt_and_at_last_is_evicted():
    error = ServiceError(Code.INTERNAL, "GENERATE_FAILED", "no")
    buffer = ListBuffer([make_prompt("1", "g1")])
    loop, counters = build(buffer, [error], make_run(max_prompt_attempts=3))
    async with running(loop):
        await until(lambda: buffer.evicted)
    assert buffer.released == ["g1#0", "g1#1"]
    assert buffer.evicted == {"g1": "FAILED"}
    assert counters.failed_group_count == 3


async def test_a_prompt_that_can_never_succeed_is_evicted_at_once():
    error = ServiceError(Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "too long")
    buffer = ListBuffer([make_prompt("1", "g1")])
    loop, _ = build(buffer, [error])
    async with running(loop):
        await until(lambda: buffer.evicted)
    assert buffer.evicted == {"g1": "PROMPT_TOO_LONG"}


async def test_a_group_without_any_reward_is_released_then_evicted_as_unscored():
    buffer = ListBuffer([make_prompt("1", "g1")])
    scorer = FixedScorer(Score(None, "TIMEOUT"))
    loop, counters = build(buffer, [both], make_run(max_prompt_attempts=2), scorer)
    async with running(loop):
        await until(lambda: buffer.evicted)
    assert buffer.evicted == {"g1": "UNSCORED"}
    assert counters.unscored_sample_count == 4


async def test_many_failures_in_a_row_are_the_nodes_problem():
    error = ServiceError(Code.INTERNAL, "GENERATE_FAILED", "the tool is broken")
    buffer = ListBuffer([make_prompt("1", f"g{i}") for i in range(6)])
    loop, _ = build(buffer, [error], make_run(max_prompt_attempts=1))
    async with running(loop):
        await until(lambda: len(buffer.evicted) == 6)
    assert "groups failed in a row, the last one because: the tool is broken" in loop.problem


async def test_a_put_is_repeated_while_the_buffer_is_away():
    buffer = ListBuffer([make_prompt("1", "g1")])
    full = ServiceError(Code.RESOURCE_EXHAUSTED, "STORE_FULL", "the store is full", retry_seconds=0.2)
    buffer.put_errors = [UNAVAILABLE, full, UNAVAILABLE]
    loop, _ = build(buffer, [both])
    async with running(loop):
        await until(lambda: buffer.put)


async def test_a_lease_is_given_back_as_soon_as_the_buffer_answers_again():
    buffer = ListBuffer([make_prompt("1", "g1")])
    buffer.release_errors = [UNAVAILABLE, UNAVAILABLE, UNAVAILABLE]
    loop, _ = build(buffer, [ServiceError(Code.INTERNAL, "GENERATE_FAILED", "no"), both])
    async with running(loop):
        await until(lambda: buffer.put)
    assert buffer.released == ["g1#0"]
    assert not buffer.release_errors


async def test_a_lost_lease_ends_its_work_and_others_are_extended():
    async def forever(request, timeout):
        await asyncio.sleep(60)

    buffer = ListBuffer([make_prompt("1", "g1"), make_prompt("2", "g2")])
    loop, counters = build(buffer, [both], make_run(lease_ttl=0.1))
    loop._maker.fleet.router.generate = forever
    buffer.lost = {"g1#0"}
    async with running(loop):
        await until(lambda: counters.lost_lease_count)
        await until(lambda: loop.running_count == 1)
    assert buffer.extended
    assert buffer.released == ["g2#0"]  # the drain gave it back


async def test_in_flight_work_is_bounded():
    peak = 0

    async def slow(request, timeout):
        nonlocal peak
        peak = max(peak, loop.running_count)
        await asyncio.sleep(0.01)
        return both(request)

    buffer = ListBuffer([make_prompt("1", f"g{i}") for i in range(12)])
    loop, _ = build(buffer, [both], inflight=3)
    loop._maker.fleet.router.generate = slow
    async with running(loop):
        await until(lambda: len(buffer.put) == 12)
    assert peak == 3


async def test_scoring_is_retried_while_the_service_is_away():
    scorer = FixedScorer(errors=[UNAVAILABLE, UNAVAILABLE])
    loop, _ = build(ListBuffer([]), [both], scorer=scorer)
    group = await loop._maker.make(make_prompt())
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]
    assert len(scorer.calls) == 3


async def test_scoring_that_never_answers_leaves_samples_unscored():
    scorer = FixedScorer(errors=[UNAVAILABLE] * 50)
    scoring = Scoring(scorer, ScoreSettings("exact_match", timeout=0.3))
    loop, _ = build(ListBuffer([]), [both])
    samples = await loop._maker.samples(make_prompt(), loop._run.sampling, 2)
    done = await scoring.score(make_prompt(), samples)
    assert [(s.reward, s.unscored_reason) for s in done] == [(None, "REWARD_UNAVAILABLE")] * 2


async def test_a_reward_of_the_generate_function_is_kept():
    scorer = FixedScorer(Score(0.0))
    loop, _ = build(ListBuffer([]), [both], scorer=scorer)
    samples = await loop._maker.samples(make_prompt(), loop._run.sampling, 2)
    done = await loop._maker.score(make_prompt(), [replace(samples[0], reward=0.75), samples[1]])
    assert [sample.reward for sample in done] == [0.75, 0.0]
    assert [len(items) for _, items in scorer.calls] == [1]


async def test_supervised_groups_are_prompt_label_and_end_token():
    maker = SupervisedMaker(make_run(sft=True), Chars())
    (sample,) = (await maker.make(make_prompt("12", label="3"))).samples
    assert sample.tokens.tolist() == [ord("1"), ord("2"), ord("3"), 0]
    assert sample.tokens.dtype == np.int32
    assert sample.loss_mask.tolist() == [1, 1]
    assert (sample.reward, sample.versions, sample.prompt_length) == (0.0, (), 2)
    cut = SupervisedMaker(make_run(sft=True, max_context_length=3), Chars())
    (sample,) = (await cut.make(make_prompt("12", label="3"))).samples
    assert (sample.tokens.tolist()[-1], sample.status) == (ord("3"), SampleStatus.TRUNCATED)
    with pytest.raises(ServiceError, match="has no label"):
        await maker.make(make_prompt("12", label=""))


async def test_a_group_that_hangs_for_a_reason_nobody_thought_of_is_given_back(monkeypatch):
    class Hanging:
        async def make(self, prompt, partial=None):
            await asyncio.Event().wait()

    monkeypatch.setattr(generation_loop, "_PUT_SECONDS", 0.05)
    run = make_run(generate_timeout=0.05, score=ScoreSettings("exact_match", timeout=0.05), max_prompt_attempts=1)
    buffer = ListBuffer([make_prompt("1", "g0")])
    fleet = serving_fleet(ScriptedRouter([both]))
    loop = GenerationLoop(buffer, Hanging(), run, Counters(), lambda: 8, fleet.wait_serving)
    async with running(loop):
        await until(lambda: buffer.evicted)
    assert buffer.evicted == {"g0": "FAILED"}
