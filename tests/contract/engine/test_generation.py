"""What every engine answers to a request."""

from __future__ import annotations

import asyncio
import functools
import re
from dataclasses import replace

import numpy as np
import pytest

from services.common.errors import Code, ServiceError
from services.common.records import SamplingParams
from services.rollout.core.completion import GenerationRequest, Recording
from tests.support.engine import EOS_ID, VOCAB_SIZE

SECONDS = 30.0
PROMPT = tuple(range(40, 56))


def long_request(engine_process, **sampling) -> GenerationRequest:
    """One that still runs after half a second."""
    return request(tokens=engine_process.traits.long_tokens, extra={"ignore_eos": True}, **sampling)


def request(count: int = 1, tokens: int = 12, prompt=PROMPT, extra=None, **sampling) -> GenerationRequest:
    sampling.setdefault("temperature", 1.0)
    params = SamplingParams(max_new_tokens=tokens, **sampling)
    return GenerationRequest("r-1", tuple(prompt), params, count, extra or {})


async def test_info_states_what_a_trainer_and_a_router_must_know(engine, engine_process):
    info, on_gpu = await engine.info(), engine_process.traits.device == "cuda"
    assert info.kind == engine_process.kind.split("-")[0]
    context = engine_process.traits.context_length
    assert (info.vocab_size, info.context_length, info.rank_count) == (VOCAB_SIZE, context, 1)
    assert info.backends == (("nccl", "gloo") if on_gpu else ("gloo",))
    assert bool(info.nccl_version) is bool(info.collective_env) is on_gpu
    assert info.max_running >= 64
    assert info.engine_version
    assert info.torch_version
    assert await engine.health(5.0)


async def test_samples_are_whole_and_aligned(engine):
    generations = await engine.generate(request(count=4), SECONDS)
    assert len(generations) == 4
    for generation in generations:
        length = len(generation.output_ids)
        assert 1 <= length <= 12
        assert generation.output_ids.dtype == np.int32
        assert generation.log_probs.dtype == np.float32
        assert len(generation.log_probs) == length
        assert np.all(generation.log_probs <= 0)
        assert np.all((generation.output_ids >= 0) & (generation.output_ids < VOCAB_SIZE))
        assert (generation.versions[0].start, generation.versions[-1].end) == (0, length)
        assert generation.engine_url == engine.url
    assert len({tuple(g.output_ids) for g in generations}) > 1


async def test_greedy_decoding_is_deterministic(engine, engine_process):
    """From an empty cache each time: reading a cached prefix is other arithmetic, which shows in bfloat16."""
    answers = []
    for _ in range(2):
        assert await engine.flush_cache()
        answers += await engine.generate(request(count=2, tokens=6, temperature=0.0), SECONDS)
    assert len({tuple(g.output_ids) for g in answers}) == 1
    atol = engine_process.traits.repeat_atol
    np.testing.assert_allclose(answers[0].log_probs, answers[-1].log_probs, atol=atol)


async def test_a_stop_token_ends_a_sample_and_is_part_of_it(engine):
    stops = tuple(range(0, VOCAB_SIZE, 4))
    for generation in await engine.generate(request(count=4, tokens=200, stop_token_ids=stops), SECONDS):
        assert generation.finish_reason == "stop"
        assert generation.output_ids[-1] in {*stops, EOS_ID}
        assert not set(generation.output_ids[:-1].tolist()) & set(stops)


async def test_a_sample_ends_at_its_length(engine):
    (generation,) = await engine.generate(request(tokens=20, extra={"ignore_eos": True}), SECONDS)
    assert generation.finish_reason == "length"
    assert len(generation.output_ids) == 20


async def test_a_full_context_is_served(engine, engine_process):
    prompt = [7] * (engine_process.traits.context_length - 40)
    (generation,) = await engine.generate(request(tokens=40, prompt=prompt), SECONDS)
    assert len(generation.output_ids) == len(generation.log_probs)


@pytest.mark.parametrize(
    ("prompt", "tokens", "reason", "named"),
    [
        ([1, VOCAB_SIZE], 4, "TOKEN_OUT_OF_RANGE", f"token id {VOCAB_SIZE}"),
        ([1, -1], 4, "TOKEN_OUT_OF_RANGE", "token id -1"),
        ([1] * 8, "the context less 7", "PROMPT_TOO_LONG", "8 prompt + "),
        ([], 4, "INVALID_FIELD", "no prompt tokens"),
        ([1], 0, "INVALID_FIELD", "at least 1"),
    ],
)
async def test_a_request_the_engine_cannot_take_is_refused_before_it(
    engine, engine_process, prompt, tokens, reason, named
):
    if isinstance(tokens, str):
        tokens = engine_process.traits.context_length - 7
    with pytest.raises(ServiceError, match=re.escape(named)) as caught:
        await engine.generate(request(tokens=tokens, prompt=prompt), SECONDS)
    assert (caught.value.code, caught.value.reason) == (Code.INVALID_ARGUMENT, reason)
    assert await engine.health(5.0)


async def test_an_unknown_sampling_key_is_refused_by_name(engine):
    with pytest.raises(ServiceError, match="temprature") as caught:
        await engine.generate(request(extra={"temprature": 1.0}), SECONDS)
    assert (caught.value.code, caught.value.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")


@pytest.mark.parametrize("sampling", [{"top_p": 1.5}, {"top_k": 0}, {"temperature": -1.0}])
async def test_a_value_out_of_range_is_refused_in_the_engines_words(engine, sampling):
    with pytest.raises(ServiceError, match=f"{next(iter(sampling))} must be") as caught:
        await engine.generate(request(**sampling), SECONDS)
    assert (caught.value.code, caught.value.reason) == (Code.INVALID_ARGUMENT, "ENGINE_REFUSED")


async def test_a_deadline_is_kept(engine, engine_process):
    with pytest.raises(ServiceError, match="did not answer") as caught:
        await engine.generate(long_request(engine_process), 0.2)
    assert caught.value.code is Code.DEADLINE_EXCEEDED
    await engine.abort_all()


async def test_abort_returns_what_was_produced(engine, engine_process):
    running = asyncio.create_task(engine.generate(long_request(engine_process), SECONDS))
    await asyncio.sleep(0.5)
    await engine.abort_all()
    (generation,) = await running
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.output_ids) < engine_process.traits.long_tokens
    assert len(generation.output_ids) == len(generation.log_probs) == generation.versions[-1].end


async def test_many_small_requests_run_together(engine):
    requests = [request(count=4, prompt=[*PROMPT, index]) for index in range(16)]
    answers = await asyncio.gather(*(engine.generate(each, SECONDS) for each in requests))
    assert sum(map(len, answers)) == 64


async def test_log_probs_are_the_models(engine, engine_process):
    """Requests of several lengths at once, at a temperature, against transformers' forward pass."""
    if engine_process.kind == "simulated":
        pytest.skip("it has no model")
    temperature = 0.7
    prompts = [tuple((7 * index + step) % 250 for step in range(3 + 11 * index)) for index in range(6)]
    requests = [request(count=2, tokens=24, prompt=prompt, temperature=temperature) for prompt in prompts]
    answers = await asyncio.gather(*(engine.generate(each, SECONDS) for each in requests))
    pairs = [(prompt, generation) for prompt, answer in zip(prompts, answers, strict=True) for generation in answer]
    differences = [
        np.abs(
            reference_log_probs(engine_process.checkpoint, prompt, generation.output_ids, temperature)
            - generation.log_probs
        )
        for prompt, generation in pairs
    ]
    assert_close(engine_process, np.concatenate(differences))


def assert_close(engine_process, differences: np.ndarray) -> None:
    """Differences from transformers' log-probs are what the engine's precision explains."""
    mean, largest = float(differences.mean()), float(differences.max())
    print(f"{engine_process.kind}: |log-prob difference| mean {mean:.2e}, largest {largest:.2e}")
    assert mean <= engine_process.traits.mean_atol
    assert largest <= engine_process.traits.max_atol


def reference_log_probs(checkpoint, prompt, output_ids, temperature: float, weights=None) -> np.ndarray:
    """Log-probs [R] of `output_ids` after `prompt` under softmax(logits / temperature), by transformers in float32;
    `weights` replace the checkpoint's."""
    import torch

    tokens = torch.tensor([[*prompt, *output_ids.tolist()]])
    held = {name: tensor.float() for name, tensor in (weights or {}).items()}
    with torch.no_grad():
        logits = torch.func.functional_call(reference_model(checkpoint), held, (tokens,)).logits
    log_probs = torch.log_softmax(logits[0, len(prompt) - 1 : -1] / temperature, dim=-1)
    return log_probs.gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()


@functools.lru_cache
def reference_model(checkpoint):
    """transformers' model of the checkpoint, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


async def test_kept_tokens_are_told_with_log_probs_over_them(engine, engine_process):
    """Where top_p cuts, each token comes with those it was chosen from, and its log-prob is of these alone."""
    asked = replace(request(count=2, top_p=0.5, top_k=VOCAB_SIZE), record=Recording(kept=True))
    if not engine_process.release.sampling_masks:
        with pytest.raises(ServiceError, match="returned no sampling mask"):
            await engine.generate(asked, SECONDS)
        return
    for generation in await engine.generate(asked, SECONDS):
        kept, length = generation.kept, len(generation.output_ids)
        assert len(kept.counts) == length
        assert kept.counts.sum() == len(kept.ids)
        for ids, token, log_prob in zip(
            np.split(kept.ids, kept.counts.cumsum()[:-1]), generation.output_ids, generation.log_probs, strict=True
        ):
            assert token in ids
            assert len(set(ids.tolist())) == len(ids) < VOCAB_SIZE
            assert (log_prob == 0) if len(ids) == 1 else (log_prob < 0)
