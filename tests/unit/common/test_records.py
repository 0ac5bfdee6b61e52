"""Records and tensors survive the wire, and broken ones are refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from services.common import convert
from services.common.errors import ServiceError
from services.common.records import Group, Prompt, Sample, SampleStatus, SamplingParams, VersionSpan
from services.common.tensors import to_numpy, to_proto


def make_sample(**changes: object) -> Sample:
    sample = Sample(
        sample_id="g-0",
        group_id="g",
        index=0,
        status=SampleStatus.COMPLETED,
        prompt_length=2,
        tokens=np.array([5, 6, 7, 8, 9], np.int32),
        loss_mask=np.array([1, 0, 1], np.uint8),
        log_probs=np.array([-0.5, 0.0, -0.25], np.float32),
        response="abc",
        reward=1.0,
        versions=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 3)),
        reward_details={"accuracy": 1.0},
    )
    return dataclasses.replace(sample, **changes)


def same(a: Sample, b: Sample) -> bool:
    def plain(sample: Sample) -> dict:
        return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in vars(sample).items()}

    return plain(a) == plain(b)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = to_numpy(to_proto(array))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_big_endian_and_strided_arrays_are_packed_little_endian_and_contiguous() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    assert to_numpy(to_proto(array)).tolist() == array.tolist()


def test_short_tensor_data_is_refused() -> None:
    message = to_proto(np.arange(4, dtype=np.int32))
    message.data = message.data[:-1]
    with pytest.raises(ServiceError, match="needs 16"):
        to_numpy(message)


@pytest.mark.parametrize("reward", [None, 0.0, 1.0])
def test_sample_round_trip_keeps_absent_apart_from_zero(reward: float | None) -> None:
    sample = make_sample(reward=reward)
    assert same(convert.sample_from_proto(convert.sample_to_proto(sample)), sample)


def test_versions_of_a_sample() -> None:
    assert (make_sample().min_version, make_sample().max_version) == (3, 4)
    assert Group("g", 0, (make_sample(), make_sample(versions=(VersionSpan(2, 0, 3),)))).min_version == 2


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"loss_mask": np.ones(2, np.uint8)}, "loss_mask has 2 entries for 3 tokens"),
        ({"log_probs": np.ones(4, np.float32)}, "log_probs has 4 entries for 3 tokens"),
        ({"prompt_length": 9}, "prompt_length 9 does not fit"),
        ({"versions": (VersionSpan(1, 0, 1), VersionSpan(2, 2, 3))}, "do not cover"),
    ],
)
def test_a_sample_that_contradicts_itself_is_refused(changes: dict, fragment: str) -> None:
    message = convert.sample_to_proto(make_sample(**changes))
    with pytest.raises(ServiceError, match=fragment):
        convert.sample_from_proto(message)


def test_prompt_and_sampling_round_trip() -> None:
    prompt = Prompt("g", 4, 1, 2, "1+1=", "2", np.array([1, 2], np.int32), '{"a": 1}')
    back = convert.prompt_from_proto(convert.prompt_to_proto(prompt))
    assert back.tokens.tolist() == [1, 2]
    assert dataclasses.replace(back, tokens=prompt.tokens) == prompt
    for params in (SamplingParams(), SamplingParams(temperature=0.0, top_k=-1, stop=("a",), stop_token_ids=(1,))):
        assert convert.sampling_from_proto(convert.sampling_to_proto(params)) == params
