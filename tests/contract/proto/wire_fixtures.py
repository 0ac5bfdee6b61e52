"""Writes the wire fixtures of a release: `python -m tests.contract.proto.wire_fixtures v0.1`.

Each main message is filled completely (every field, recursively, values derived from names and numbers) and
written as JSON and as bytes. Released fixtures are never changed; a later release adds a folder. One exception is on
record: TransferBucketRequest was taken out of v0.1, because v0.1 never left this repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

from google.protobuf import json_format, message_factory, symbol_database
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from tetrarch.buffer.v1 import buffer_service_pb2, registry_service_pb2  # noqa: F401
from tetrarch.common.v1 import sample_pb2  # noqa: F401
from tetrarch.reward.v1 import reward_service_pb2  # noqa: F401
from tetrarch.rollout.v1 import rollout_service_pb2, weight_service_pb2  # noqa: F401
from tetrarch.trainer.v1 import trainer_service_pb2  # noqa: F401

MAIN_MESSAGES = (
    "tetrarch.buffer.v1.CreateRunResponse",
    "tetrarch.buffer.v1.GetStatsResponse",
    "tetrarch.buffer.v1.LeasePromptsResponse",
    "tetrarch.buffer.v1.Member",
    "tetrarch.buffer.v1.PutGroupsRequest",
    "tetrarch.buffer.v1.TakeBatchResponse",
    "tetrarch.common.v1.Group",
    "tetrarch.common.v1.Prompt",
    "tetrarch.common.v1.SamplingParams",
    "tetrarch.reward.v1.ScoreRequest",
    "tetrarch.reward.v1.ScoreResponse",
    "tetrarch.rollout.v1.CommitUpdateRequest",
    "tetrarch.rollout.v1.EvaluateResponse",
    "tetrarch.rollout.v1.GetNodeResponse",
    "tetrarch.rollout.v1.PrepareUpdateRequest",
    "tetrarch.trainer.v1.WatchProgressResponse",
)


def message_class(full_name: str) -> type[Message]:
    """Class of a message by its full name."""
    return message_factory.GetMessageClass(symbol_database.Default().pool.FindMessageTypeByName(full_name))


def _scalar(field: FieldDescriptor) -> object:
    if field.enum_type:
        return field.enum_type.values[-1].number
    by_kind = {
        FieldDescriptor.CPPTYPE_STRING: b"\x01\x02" if field.type == FieldDescriptor.TYPE_BYTES else f"a {field.name}",
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_DOUBLE: field.number + 0.5,
        FieldDescriptor.CPPTYPE_FLOAT: field.number + 0.5,
    }
    return by_kind.get(field.cpp_type, 1000 + field.number)


def fill(descriptor: Descriptor) -> Message:
    """A message of the type with every field set."""
    message = message_class(descriptor.full_name)()
    for field in descriptor.fields:
        if field.message_type and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            entries = getattr(message, field.name)
            if value.message_type:
                entries[_scalar(key)].CopyFrom(fill(value.message_type))
            else:
                entries[_scalar(key)] = _scalar(value)
        elif field.message_type:
            filled = fill(field.message_type)
            if field.is_repeated:
                getattr(message, field.name).append(filled)
            else:
                getattr(message, field.name).CopyFrom(filled)
        elif field.is_repeated:
            getattr(message, field.name).append(_scalar(field))
        else:
            setattr(message, field.name, _scalar(field))
    return message


def main(release: str) -> None:
    """Writes a release's fixtures; refuses to overwrite."""
    folder = Path(__file__).resolve().parents[1] / "released" / release
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty; released fixtures never change.")
    for name in MAIN_MESSAGES:
        message = fill(message_class(name).DESCRIPTOR)
        text = json_format.MessageToJson(message, preserving_proto_field_name=True, sort_keys=True)
        (folder / f"{name}.json").write_text(text + "\n")
        (folder / f"{name}.binpb").write_bytes(message.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main(sys.argv[1])
