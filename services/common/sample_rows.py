"""The buffer's answer about a group → rows of a file of samples (`sample_file`). Knows messages, not files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tetrarch.buffer.v1 import buffer_service_pb2 as buffer_pb
from tetrarch.common.v1 import sample_pb2

from services.common.tensors import to_numpy


def has_tokens(answer: buffer_pb.GetGroupResponse) -> bool:
    """False when the payload is no longer stored."""
    return bool(answer.group.samples) and all(sample.tokens.data for sample in answer.group.samples)


def sample_rows(answer: buffer_pb.GetGroupResponse, run_id: str, step: int) -> Iterator[dict[str, Any]]:
    """A row per sample: what was asked, what was answered, and all that training needs. `step`: from 1."""
    prompt = answer.prompt
    for sample in answer.group.samples:
        yield {
            "run_id": run_id,
            "step": step,
            "group_id": sample.group_id,
            "ordinal": answer.info.ordinal,
            "index": sample.index,
            "rollout_index": sample.rollout_index if sample.HasField("rollout_index") else None,
            "dataset": prompt.dataset,
            "prompt": prompt.text,
            "label": prompt.label,
            "response": sample.response,
            "status": sample_pb2.SampleStatus.Name(sample.status).removeprefix("SAMPLE_STATUS_").lower(),
            "reward": sample.reward if sample.HasField("reward") else None,
            "unscored_reason": sample.unscored_reason,
            "reward_details_json": json.dumps(dict(sample.reward_details)),
            "metadata_json": sample.metadata_json,
            "prompt_length": sample.prompt_length,
            "tokens": to_numpy(sample.tokens).tolist(),
            "loss_mask": to_numpy(sample.loss_mask).tolist() if sample.loss_mask.data else [],
            "log_probs": to_numpy(sample.log_probs).tolist() if sample.log_probs.data else [],
            "versions": [[span.version, span.start, span.end] for span in sample.versions],
            "teacher": _teacher(sample) if sample.HasField("teacher_log_probs") else None,
        }


def _teacher(sample: sample_pb2.Sample) -> dict[str, Any]:
    top = sample.HasField("teacher_top_ids")
    return {
        "log_probs": to_numpy(sample.teacher_log_probs).tolist(),
        "top_ids": to_numpy(sample.teacher_top_ids).tolist() if top else [],
        "top_log_probs": to_numpy(sample.teacher_top_log_probs).tolist() if top else [],
    }
