"""Every engine can be a teacher: log-probs of a given response, and of the most likely tokens at its places."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.errors import ServiceError
from services.common.records import Sample, SampleStatus
from services.rollout.adapters.teacher import HttpTeacher
from tests.support.engine import VOCAB_SIZE

SECONDS = 30.0
K = 5


@pytest.fixture
async def teacher(engine_process):
    client = HttpTeacher(f"http://127.0.0.1:{engine_process.port}")
    yield client
    await client.close()


def make_sample(seed: int, prompt: int, response: int) -> Sample:
    tokens = np.random.default_rng(seed).integers(0, 256, prompt + response).astype(np.int32)
    return Sample(
        f"s-{seed}", "g", 0, SampleStatus.COMPLETED, prompt, tokens, np.ones(response, np.uint8),
        np.zeros(response, np.float32), reward=0.0,
    )  # fmt: skip


async def test_log_probs_are_aligned_and_the_same_again(teacher, engine_process):
    sample = make_sample(0, 9, 40)
    found = await teacher.log_probs(sample, K, SECONDS)
    assert not found.problem(40)
    assert found.top.shape == (40, K)
    assert (np.diff(found.top) <= 0).all()
    assert (found.top_ids >= 0).all()
    assert (found.top_ids < VOCAB_SIZE).all()
    assert (found.sampled <= found.top[:, 0] + 1e-6).all()
    again = await teacher.log_probs(sample, K, SECONDS)  # now from the prefix cache
    np.testing.assert_allclose(again.sampled, found.sampled, atol=engine_process.traits.repeat_atol)
    alone = await teacher.log_probs(sample, 0, SECONDS)
    assert alone.top.shape == (40, 0)
    np.testing.assert_allclose(alone.sampled, found.sampled, atol=engine_process.traits.repeat_atol)


async def test_they_are_what_transformers_computes(teacher, engine_process):
    if engine_process.kind == "simulated":
        pytest.skip("the simulated engine has no model")
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(engine_process.checkpoint, dtype=torch.float32)
    traits = engine_process.traits
    for seed, (prompt, response) in enumerate([(1, 30), (17, 1), (33, 64)]):
        sample = make_sample(seed, prompt, response)
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0, prompt - 1 : -1]
        expected = logits.float().log_softmax(-1).numpy()
        found = await teacher.log_probs(sample, K, SECONDS)
        rows = np.arange(response)
        np.testing.assert_allclose(found.sampled, expected[rows, sample.tokens[prompt:]], atol=traits.max_atol)
        np.testing.assert_allclose(found.top, np.sort(expected)[:, ::-1][:, :K], atol=traits.max_atol)
        np.testing.assert_allclose(found.top, expected[rows[:, None], found.top_ids], atol=traits.max_atol)


@pytest.mark.parametrize(("prompt", "response"), [(4, 5000), (4, 12_000)])
async def test_what_does_not_fit_its_context_is_refused_in_its_words(teacher, engine_process, prompt, response):
    if prompt + response <= engine_process.traits.context_length:
        pytest.skip("it fits")
    with pytest.raises(ServiceError, match="context") as caught:
        await teacher.log_probs(make_sample(1, prompt, response), 0, SECONDS)
    assert caught.value.reason == "TEACHER_REFUSED"
    assert (await teacher.log_probs(make_sample(1, 3, 4), 0, SECONDS)).sampled.shape == (4,)
