"""Asking a teacher: what is asked and read, retries, deadlines, and what becomes of a group it does not answer for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web

from services.common.errors import Code, ServiceError
from services.common.process import free_port
from services.common.records import TeacherLogProbs
from services.rollout.adapters.teacher import HttpTeacher
from services.rollout.core.completer import Completer
from services.rollout.core.counters import Counters
from services.rollout.core.generate import Generator
from services.rollout.core.generation_loop import GenerationLoop
from services.rollout.core.makers import RolloutMaker
from services.rollout.core.ports import Score
from services.rollout.core.run_settings import TeacherSettings
from services.rollout.core.scoring import Scoring
from services.rollout.core.teaching import TaughtMaker
from tests.unit.rollout.parts import (
    Chars,
    FixedScorer,
    ListBuffer,
    ScriptedRouter,
    make_prompt,
    make_run,
    piece,
    serving_fleet,
)
from tests.unit.rollout.test_generation_loop import running, until

AWAY = ServiceError(Code.UNAVAILABLE, "ENGINE_UNAVAILABLE", "The teacher does not answer.")
REFUSED = ServiceError(Code.FAILED_PRECONDITION, "TEACHER_REFUSED", "No.")
K = 3


class ListedTeacher:
    """Answers after the errors of a list; remembers what it was asked."""

    def __init__(self, errors=()):
        self.errors, self.asked = list(errors), []

    async def log_probs(self, sample, top_k, timeout):
        self.asked.append(sample.sample_id)
        if self.errors:
            raise self.errors.pop(0)
        length = sample.response_length
        ids = np.zeros((length, top_k), np.int32)
        return TeacherLogProbs(np.full(length, -2.0, np.float32), ids, ids - np.float32(1))

    async def close(self):
        pass


def build(buffer, teacher, scorer=None, timeout=5.0, **changes):
    run = make_run(teacher=TeacherSettings("http://t", K, timeout), **changes)
    counters = Counters()
    fleet = serving_fleet(ScriptedRouter([lambda request: [piece("ab"), piece("c", "length")]]))
    generator = Generator(Completer(fleet, Chars(), counters), run)
    maker = RolloutMaker(fleet, generator, Scoring(scorer or FixedScorer(), run.score), run, Chars(), counters)
    taught = TaughtMaker(maker, teacher, run.teacher, counters)
    return GenerationLoop(buffer, taught, run, counters, lambda: 8, fleet.wait_serving), counters


async def test_every_sample_of_a_group_gets_log_probs():
    buffer, teacher = ListBuffer([make_prompt("1", "g1")]), ListedTeacher()
    loop, counters = build(buffer, teacher)
    async with running(loop):
        await until(lambda: buffer.put)
    samples = buffer.put["g1"].samples
    assert [sample.teacher.sampled.tolist() for sample in samples] == [[-2.0, -2.0], [-2.0]]
    assert [sample.teacher.top.shape for sample in samples] == [(2, K), (1, K)]
    assert not any(sample.problem() for sample in samples)
    assert counters.teacher_seconds > 0


async def test_a_teacher_that_is_away_for_a_moment_is_asked_again():
    buffer, teacher = ListBuffer([make_prompt("1", "g1")]), ListedTeacher([AWAY, AWAY])
    loop, counters = build(buffer, teacher)
    async with running(loop):
        await until(lambda: buffer.put)
    assert len(teacher.asked) == 4
    assert counters.failed_group_count == 0


async def test_no_prompt_is_lost_while_the_teacher_is_away():
    """However often: it is released unharmed, and at last trained."""
    buffer, teacher = ListBuffer([make_prompt("1", "g1")]), ListedTeacher([AWAY] * 8)
    loop, counters = build(buffer, teacher, timeout=0.05, max_prompt_attempts=2)
    async with running(loop):
        await until(lambda: buffer.released)
        assert "Groups wait for the teacher: The teacher gave no log-probs of sample g1-" in loop.problem
        await until(lambda: buffer.put, 10)
    assert counters.failed_group_count == buffer.unharmed == 4
    assert not buffer.evicted
    assert not loop.problem


async def test_a_refusal_counts_as_an_attempt_and_is_not_repeated():
    buffer, teacher = ListBuffer([make_prompt("1", "g1")]), ListedTeacher([REFUSED] * 4)
    loop, _ = build(buffer, teacher, max_prompt_attempts=2)
    async with running(loop):
        await until(lambda: buffer.evicted, 10)
    assert buffer.evicted == {"g1": "FAILED"}
    assert len(teacher.asked) == 4


async def test_what_is_not_trained_is_not_asked_for():
    teacher = ListedTeacher()
    maker = TaughtMaker(Given(), teacher, TeacherSettings("http://t", K), Counters())
    samples = (await maker.make(make_prompt())).samples
    assert teacher.asked == ["g-0"]
    assert [sample.teacher is None for sample in samples] == [False, True, True]
    again = TaughtMaker(Given(samples), teacher, TeacherSettings("http://t", K), Counters())
    assert (await again.make(make_prompt())).samples == samples  # of a file that has them
    assert teacher.asked == ["g-0"]


class Given:
    """A maker of one group: a scored sample, an unscored one, an empty one."""

    def __init__(self, samples=None):
        self.samples = samples

    async def make(self, prompt, partial=None):
        group = make_group()
        return replace(group, samples=self.samples or group.samples)


def make_group():
    from services.common.records import Group, Sample, SampleStatus

    def sample(index, tokens, reward):
        length = len(tokens) - 2
        return Sample(
            f"g-{index}", "g", index, SampleStatus.COMPLETED, 2, np.array(tokens, np.int32),
            np.ones(length, np.uint8), np.zeros(length, np.float32), reward=reward,
        )  # fmt: skip

    return Group("g", 0, (sample(0, [5, 6, 7, 8, 9], 1.0), sample(1, [5, 6, 7], None), sample(2, [5, 6], 1.0)))


SAMPLE = make_group().samples[0]


class TeacherServer:
    """Answers one response to every request."""

    def __init__(self, status=200, body=None, seconds=0.0):
        self.answer, self.seconds, self.requests = (status, body), seconds, []

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/generate", self._handle)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        port = free_port()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.teacher = HttpTeacher(f"http://127.0.0.1:{port}/")
        return self

    async def _handle(self, request):
        self.requests.append(await request.json())
        await asyncio.sleep(self.seconds)
        return web.json_response(self.answer[1], status=self.answer[0])

    async def __aexit__(self, *_):
        await self.teacher.close()
        await self._runner.cleanup()


def answer(ids=(6, 7, 8, 9), k=K, first=None, **changes):
    rows = [[first, ids[0], None], *([-0.5 * i, token, None] for i, token in enumerate(ids[1:]))]
    tops = [None, *([[-0.1 * j, 10 * i + j, None] for j in range(k)] for i in range(len(ids) - 1))]
    return {"meta_info": {"input_token_logprobs": rows, "input_top_logprobs": tops} | changes}


async def test_what_is_asked_and_read():
    async with TeacherServer(body=answer()) as server:
        found = await server.teacher.log_probs(SAMPLE, K, 5.0)
    (asked,) = server.requests
    assert asked["input_ids"] == [5, 6, 7, 8, 9]
    assert (asked["logprob_start_len"], asked["top_logprobs_num"], asked["return_logprob"]) == (1, K, True)
    assert asked["sampling_params"]["max_new_tokens"] == 0
    assert found.sampled.tolist() == [0.0, -0.5, -1.0]
    assert found.top_ids.tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    np.testing.assert_allclose(found.top, [[0.0, -0.1, -0.2]] * 3)


async def test_without_top_k_none_are_read():
    async with TeacherServer(body=answer(input_top_logprobs=None)) as server:
        found = await server.teacher.log_probs(SAMPLE, 0, 5.0)
    assert found.top_ids.shape == found.top.shape == (3, 0)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (answer(ids=(6, 7, 8, 1)), "are not of the 3 response tokens"),
        (answer(k=2), "it has not 3 most likely tokens for each of 3 places"),
        (answer(input_top_logprobs=[]), "it has not 3 most likely tokens"),
        (answer(input_token_logprobs=[[None, 7, None], [-1.0, 8, None], [-1.0, 9, None]]), "no input log-probs"),
        (answer(input_token_logprobs=[[float("nan"), 7, None], [-1, 8, None], [-1, 9, None]]), "no finite numbers"),
        ({"choices": []}, "it has no input log-probs (KeyError"),
    ],
)
async def test_answers_that_are_not_of_the_sample_are_refused(body, why):
    async with TeacherServer(body=body) as server:
        with pytest.raises(ServiceError, match="opd_teacher_url must be an engine") as caught:
            await server.teacher.log_probs(SAMPLE, K, 5.0)
    assert caught.value.reason == "TEACHER_ANSWER_UNUSABLE"
    assert why in caught.value.message
    assert "sample g-0" in caught.value.message


async def test_refusals_carry_the_teachers_own_words():
    async with TeacherServer(400, {"error": {"message": "The input is longer than the model's context."}}) as server:
        with pytest.raises(ServiceError, match="longer than the model's context") as caught:
            await server.teacher.log_probs(SAMPLE, K, 5.0)
    assert caught.value.reason == "TEACHER_REFUSED"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_teacher_may_be_asked_again(status):
    async with TeacherServer(status, {"error": "busy"}) as server:
        with pytest.raises(ServiceError) as caught:
            await server.teacher.log_probs(SAMPLE, K, 5.0)
    assert caught.value.code is Code.UNAVAILABLE


async def test_a_teacher_that_hangs_is_given_up_at_the_deadline():
    async with TeacherServer(body=answer(), seconds=3.0) as server:
        maker = TaughtMaker(Given(), server.teacher, TeacherSettings("http://t", K, 0.3), Counters())
        began = time.monotonic()
        with pytest.raises(ServiceError, match=r"within 0\.3 s: The teacher at http://127\.0\.0\.1") as caught:
            await maker.make(make_prompt())
        assert time.monotonic() - began < 3.0
    assert caught.value.reason == "TEACHER_UNAVAILABLE"


async def test_nobody_at_the_url():
    teacher = HttpTeacher(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ServiceError, match="does not answer /generate") as caught:
        await teacher.log_probs(SAMPLE, K, 1.0)
    assert caught.value.code is Code.UNAVAILABLE
    await teacher.close()


async def test_a_scored_group_is_asked_for_after_scoring_only():
    buffer, teacher = ListBuffer([make_prompt("1", "g1")]), ListedTeacher()
    loop, _ = build(buffer, teacher, FixedScorer(Score(None, "TIMEOUT")), max_prompt_attempts=1)
    async with running(loop):
        await until(lambda: buffer.evicted)
    assert not teacher.asked
