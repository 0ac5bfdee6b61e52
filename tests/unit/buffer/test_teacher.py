"""A teacher's log-probs go through the buffer's bytes unchanged, or the group is refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.common.v1 import sample_pb2

from services.buffer.core.records import PackedGroup, PutOutcome
from services.buffer.pack import pack_groups
from services.common import convert
from services.common.errors import ServiceError
from services.common.records import Group, Sample, SampleStatus, TeacherLogProbs, VersionSpan
from services.common.tensors import to_proto

R = 3


def teacher(k: int) -> TeacherLogProbs:
    ids = np.arange(R * k, dtype=np.int32).reshape(R, k)
    return TeacherLogProbs(np.array([-0.1, -2.0, -3.0], np.float32), ids, -ids.astype(np.float32) - 0.5)


def leased(taught: TeacherLogProbs | None) -> pb.LeasedGroup:
    sample = Sample(
        "run-0-0", "run-0", 0, SampleStatus.COMPLETED, 2, np.arange(2 + R, dtype=np.int32), np.ones(R, np.uint8),
        np.zeros(R, np.float32), reward=1.0, versions=(VersionSpan(1, 0, R),), teacher=taught,
    )  # fmt: skip
    return pb.LeasedGroup(lease_id="l", group=convert.group_to_proto(Group("run-0", 0, (sample,))))


def pack(item: pb.LeasedGroup):
    (packed,) = pack_groups([item], "run", 1)
    return packed


@pytest.mark.parametrize("k", [0, 4])
def test_log_probs_of_a_teacher_come_back(k):
    packed = pack(leased(teacher(k)))
    assert isinstance(packed, PackedGroup), packed
    back = convert.sample_from_proto(sample_pb2.Sample.FromString(packed.heads[0] + packed.tensors[0])).teacher
    for name, array in vars(teacher(k)).items():
        assert getattr(back, name).dtype == array.dtype
        assert np.array_equal(getattr(back, name), array)
    assert not sample_pb2.Sample.FromString(packed.heads[0]).HasField("teacher_log_probs")


def test_without_a_teacher_nothing_is_added():
    packed = pack(leased(None))
    assert convert.sample_from_proto(sample_pb2.Sample.FromString(packed.heads[0] + packed.tensors[0])).teacher is None


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("teacher_log_probs", np.zeros(R + 1, np.float32)),
        ("teacher_log_probs", np.zeros(R, np.float64)),
        ("teacher_top_ids", np.zeros(R, np.int32)),
        ("teacher_top_ids", np.zeros((R, 4), np.int64)),
        ("teacher_top_log_probs", np.zeros((R, 5), np.float32)),
        ("teacher_top_log_probs", np.zeros((R - 1, 4), np.float32)),
    ],
)
def test_what_does_not_fit_the_response_is_refused(name, array):
    item = leased(teacher(4))
    getattr(item.group.samples[0], name).CopyFrom(to_proto(array))
    packed = pack(item)
    assert packed.outcome is PutOutcome.INVALID
    assert f"run-0-0: {name}" in packed.message


def test_a_record_that_contradicts_itself_is_refused():
    message = leased(teacher(4)).group.samples[0]
    message.teacher_top_log_probs.CopyFrom(to_proto(np.zeros((R, 5), np.float32)))
    with pytest.raises(ServiceError, match=r"run-0-0: teacher_top_ids and teacher_top_log_probs have shapes"):
        convert.sample_from_proto(message)
    broken = dataclasses.replace(teacher(0), sampled=np.zeros(R - 1, np.float32))
    assert "teacher_log_probs" in broken.problem(R)
