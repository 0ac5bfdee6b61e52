"""Trajectory: append rules and version spans."""

import numpy as np
import pytest

from services.common.errors import ServiceError
from services.common.records import SampleStatus, VersionSpan
from services.rollout.core.engine_port import Generation
from services.rollout.core.trajectory import Trajectory, merge_spans


def generation(ids, versions, finish="stop"):
    return Generation(
        text="",
        output_ids=np.array(ids, np.int32),
        log_probs=np.full(len(ids), -0.5, np.float32),
        finish_reason=finish,
        versions=tuple(VersionSpan(*v) for v in versions),
    )


def test_model_tokens_count_and_environment_tokens_do_not():
    trajectory = Trajectory([1, 2, 3])
    trajectory.append_generation(generation([4, 5], [(7, 0, 2)]))
    trajectory.append_environment([6], seconds=0.5)
    trajectory.append_generation(generation([8], [(9, 0, 1)], "length"))
    assert trajectory.input_ids == [1, 2, 3, 4, 5, 6, 8]
    assert trajectory.loss_mask.tolist() == [1, 1, 0, 1]
    assert trajectory.log_probs.tolist() == [-0.5, -0.5, 0.0, -0.5]
    assert trajectory.versions == (VersionSpan(7, 0, 3), VersionSpan(9, 3, 4))
    assert (trajectory.turn_count, trajectory.tool_seconds) == (2, 0.5)
    assert trajectory.status is SampleStatus.TRUNCATED


def test_spans_cover_environment_tokens_at_head_and_tail():
    trajectory = Trajectory([1])
    trajectory.append_environment([2, 3])
    trajectory.append_generation(generation([4, 5, 6], [(1, 0, 1), (2, 1, 3)]))
    trajectory.append_environment([7])
    assert trajectory.versions == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 6))


def test_a_span_inside_one_turn_is_kept_exactly():
    trajectory = Trajectory([1])
    trajectory.append_generation(generation([4, 5], [(3, 0, 2)]))
    trajectory.append_generation(generation([6, 7, 8], [(3, 0, 1), (4, 1, 3)]))
    assert trajectory.versions == (VersionSpan(3, 0, 3), VersionSpan(4, 3, 5))


def test_model_tokens_without_log_probs_or_versions_are_refused():
    with pytest.raises(ServiceError, match="2 model tokens came with 1 log-probs"):
        Trajectory([1]).append_model([2, 3], [-0.1], [VersionSpan(1, 0, 2)])
    with pytest.raises(ServiceError, match="version spans cover 1 of 2"):
        Trajectory([1]).append_model([2, 3], [-0.1, -0.2], [VersionSpan(1, 0, 1)])


def test_a_mask_after_the_fact_never_turns_environment_tokens_on():
    trajectory = Trajectory([1])
    trajectory.append_generation(generation([2, 3], [(1, 0, 2)]))
    trajectory.append_environment([4])
    trajectory.apply_mask([0, 1, 1])
    assert trajectory.loss_mask.tolist() == [0, 1, 0]
    assert trajectory.log_probs.tolist() == [0.0, -0.5, 0.0]
    assert trajectory.versions == (VersionSpan(1, 0, 3),)


def test_merge_spans_joins_neighbours_and_drops_empty_ones():
    spans = [VersionSpan(1, 0, 2), VersionSpan(1, 2, 3), VersionSpan(2, 3, 3), VersionSpan(3, 3, 4)]
    assert merge_spans(spans) == (VersionSpan(1, 0, 3), VersionSpan(3, 3, 4))
