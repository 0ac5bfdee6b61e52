"""What engines tell for replay: read from answers, joined over turns and requests, checked before it is stored."""

from __future__ import annotations

import base64
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from services.common.errors import ServiceError
from services.common.records import Sample, SampleStatus, SamplingParams, VersionSpan
from services.common.side_payloads import KEPT_TOKENS, ROUTED_EXPERTS
from services.rollout.adapters.engine_http import generate, generate_body, read_generations
from services.rollout.core.completer import Completer, Halt
from services.rollout.core.completion import Generation, GenerationRequest, KeptTokens, Recording
from services.rollout.core.counters import Counters
from services.rollout.core.generate import Generator
from services.rollout.core.makers import Interrupted, RolloutMaker
from services.rollout.core.recorded import check_recorded
from services.rollout.core.scoring import Scoring
from services.rollout.core.trajectory import Trajectory
from tests.unit.rollout.parts import (
    SAMPLING,
    Chars,
    FixedScorer,
    ScriptedRouter,
    make_prompt,
    make_run,
    piece,
    serving_fleet,
)

BOTH = Recording(experts=True, kept=True)
REQUEST = GenerationRequest("r", (1, 2, 3), SamplingParams(max_new_tokens=8), record=BOTH)


def told(generation: Generation, read: int, first: int = 0) -> Generation:
    """With two experts for each of the `read` tokens before and of its own but the last, and one kept token each."""
    length = len(generation.output_ids)
    experts = np.arange(2 * (read + length - 1), dtype=np.int32).reshape(-1, 2) + first
    return replace(
        generation,
        routed_experts=experts,
        kept=KeptTokens(np.ones(length, np.int32), generation.output_ids.copy()),
    )


def answer(tokens, **meta):
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, t, None] for t in tokens], **meta}
    return {"text": "", "meta_info": meta}


def test_an_answer_is_read_as_sglang_gives_it():
    experts = np.arange(4 * 6, dtype=np.int32)
    body = answer(
        [7, 8],
        routed_experts=base64.b64encode(experts.tobytes()).decode(),
        output_token_sampling_mask=[[7, 9], [8]],
        output_token_sampling_logprobs=[-0.5, 0.0],
    )
    (made,) = read_generations(body, None, REQUEST)
    assert made.routed_experts.tolist() == experts.reshape(4, 6).tolist()
    assert (made.kept.counts.tolist(), made.kept.ids.tolist()) == ([2, 1], [7, 9, 8])
    assert made.log_probs.tolist() == [-0.5, 0.0]
    assert (generate_body(REQUEST)["return_routed_experts"], generate_body(REQUEST)["return_sampling_mask"]) == (1, 1)
    assert "return_routed_experts" not in generate_body(replace(REQUEST, record=Recording()))


async def test_samples_with_kept_tokens_are_asked_for_one_by_one():
    bodies = []

    class Client:
        async def expect(self, _method, _path, body, *, timeout):
            bodies.append(body)
            return answer([7], output_token_sampling_mask=[[7]], output_token_sampling_logprobs=[0.0])

    several = replace(REQUEST, sample_count=3, record=Recording(kept=True))
    assert len(await generate(Client(), several, 1.0, None)) == 3
    assert [body["rid"] for body in bodies] == ["r#0", "r#1", "r#2"]
    assert not any("n" in body["sampling_params"] for body in bodies)


def test_what_an_engine_does_not_tell_is_named():
    masks = {"output_token_sampling_mask": [[7]], "output_token_sampling_logprobs": [0.0]}
    with pytest.raises(ServiceError, match=r"returned no sampling mask for request r: SGLang tells it from release"):
        read_generations(answer([7]), None, REQUEST)
    with pytest.raises(ServiceError, match="no routed experts for request r: the model must have experts"):
        read_generations(answer([7], **masks), None, REQUEST)
    with pytest.raises(ServiceError, match="no sampling mask of 2 tokens for request r: it gave 1 and 1"):
        read_generations(answer([7, 8], **masks), None, REQUEST)
    three = base64.b64encode(np.zeros(4, np.int32).tobytes()).decode()
    with pytest.raises(ServiceError, match="no routed experts of 3 tokens for request r: it gave 4 numbers"):
        read_generations(answer([7], routed_experts=three, **masks), None, REQUEST)


def test_rows_are_as_they_were_told_first_and_environment_tokens_kept_nothing():
    trajectory = Trajectory([1, 2, 3])
    trajectory.append_generation(told(piece("ab"), 3))
    trajectory.append_environment([9, 9])
    trajectory.append_generation(told(piece("c"), 7, first=100))
    side = trajectory.recorded.side(trajectory.response_length)
    first, second = np.arange(8).reshape(-1, 2), np.arange(8, 14).reshape(-1, 2) + 100
    assert side[ROUTED_EXPERTS].tolist() == [*first.tolist(), *second.tolist()]
    assert side[ROUTED_EXPERTS].dtype == np.uint8
    assert side[KEPT_TOKENS].tolist() == [1, 1, 0, 0, 1, ord("a"), ord("b"), ord("c")]


def test_a_turn_over_other_tokens_is_refused():
    trajectory = Trajectory([1, 2, 3])
    with pytest.raises(ServiceError, match="told where 3 tokens were routed instead of 4"):
        trajectory.append_generation(told(piece("ab"), 2))


def parts(script, record=BOTH):
    run, counters, halt, router = make_run(record=record), Counters(), Halt(), ScriptedRouter(script)
    completer = Completer(serving_fleet(router), Chars(), counters, halt=halt, record=record)
    generator = Generator(completer, run)
    maker = RolloutMaker(completer.fleet, generator, Scoring(FixedScorer(), run.score), run, Chars(), counters)
    return maker, router, halt


async def test_a_completion_in_two_requests_is_told_as_one():
    whole = [told(piece("xy"), 2), told(piece("ab", "abort"), 2)]
    maker, router, _ = parts([whole, [told(piece("cd"), 4, first=100)]])
    group = await maker.make(make_prompt("12"))
    side = group.samples[1].side
    assert side[ROUTED_EXPERTS].tolist() == [[0, 1], [2, 3], [4, 5], [106, 107], [108, 109]]
    assert side[KEPT_TOKENS].tolist() == [1] * 4 + [ord(char) for char in "abcd"]
    assert all(request.record == BOTH for request in router.requests)


async def test_unfinished_work_is_not_handed_over_with_half_a_record():
    maker, _, halt = parts([[told(piece("ab", "abort"), 2)] * 2])
    halt.call()
    with pytest.raises(Interrupted) as caught:
        await maker.make(make_prompt("12"))
    assert caught.value.group.samples == ()


async def test_a_sample_without_its_record_is_not_stored():
    maker, _, _ = parts([[piece("ab"), piece("cd")]])
    with pytest.raises(ServiceError, match="Sample g-0 cannot be replayed in training: where 3 tokens were routed"):
        await maker.make(make_prompt("12"))
    plain, _, _ = parts([[piece("ab"), piece("cd")]], Recording())
    assert not (await plain.make(make_prompt("12"))).samples[0].side


def test_only_trained_tokens_need_to_know_what_was_kept():
    sample = Sample(
        sample_id="s", group_id="g", index=0, status=SampleStatus.COMPLETED, prompt_length=1,
        tokens=np.arange(4, dtype=np.int32), loss_mask=np.array([1, 0, 1], np.uint8),
        log_probs=np.zeros(3, np.float32), versions=(VersionSpan(1, 0, 3),),
        side={KEPT_TOKENS: np.array([1, 0, 1, 5, 6], np.int32)},
    )  # fmt: skip
    check_recorded(sample, Recording(kept=True))
    with pytest.raises(ServiceError, match="not told for 1 trained tokens"):
        check_recorded(replace(sample, loss_mask=np.ones(3, np.uint8)), Recording(kept=True))


@pytest.mark.parametrize(("record", "asked"), [(BOTH, 300), (Recording(experts=True), None)])
async def test_all_of_the_vocabulary_is_asked_for_as_a_number(record, asked):
    """Engines tell which tokens were kept only where their number is bounded."""
    maker, router, _ = parts([[told(piece("ab"), 2)]], record)
    maker.fleet.slots[0].info = SimpleNamespace(vocab_size=300, context_length=64)
    await maker.generator.completer.complete([49, 50], SAMPLING, 1, time.monotonic() + 5)
    assert router.requests[0].sampling.top_k == asked
