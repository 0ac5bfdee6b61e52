"""records ⇄ `tetrarch.reward.v1` messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tetrarch.reward.v1 import reward_service_pb2 as pb

from services.common.errors import invalid_field
from services.reward.core.records import Item, Job, Outcome


def _json_object(text: str, field: str) -> dict[str, Any]:
    """Decoded object; an empty string is an empty object. Raises INVALID_FIELD."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise invalid_field(field, text[:80], f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise invalid_field(field, text[:80], "it must be a JSON object")
    return value


def job_from_proto(request: pb.ScoreRequest) -> Job:
    """Job of a request. Raises INVALID_FIELD."""
    items = tuple(
        Item(
            item_id=item.item_id,
            prompt=item.prompt,
            response=item.response,
            label=item.label,
            group_id=item.group_id,
            metadata=_json_object(item.metadata_json, f"items[{index}].metadata_json"),
        )
        for index, item in enumerate(request.items)
    )
    options = _json_object(request.options_json, "options_json")
    return Job(request.grader, items, options, request.custom_path, request.grouped)


def response_to_proto(job: Job, outcomes: Sequence[Outcome]) -> pb.ScoreResponse:
    """Response with one result per item of the job."""
    return pb.ScoreResponse(
        results=[
            pb.ScoreResult(
                item_id=item.item_id,
                reward=outcome.reward,
                unscored_reason=outcome.reason.value if outcome.reason else "",
                message=outcome.message,
                details=outcome.details,
                seconds=outcome.seconds,
            )
            for item, outcome in zip(job.items, outcomes, strict=True)
        ]
    )
