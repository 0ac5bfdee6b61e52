"""The contract as descriptors, with its comments."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[3]
PROTO = ROOT / "proto"
SERVICE_FIELD, METHOD_FIELD = 6, 2  # numbers in FileDescriptorProto and ServiceDescriptorProto


def tool(name: str) -> str:
    """Path of a program that came with the test environment."""
    return str(Path(sys.executable).parent / name)


@dataclass(frozen=True)
class Rpc:
    """A method of the contract. `comment` holds the service's and its own."""

    package: str
    service: str
    name: str
    own_comment: str
    comment: str
    idempotent: bool

    def __str__(self) -> str:
        return f"{self.package}.{self.service}.{self.name}"


@dataclass(frozen=True)
class ServiceConfig:
    """Timeouts in seconds and retry policies by (full service name, method)."""

    timeouts: dict[tuple[str, str], float] = field(default_factory=dict)
    retries: dict[tuple[str, str], dict] = field(default_factory=dict)


def read_service_configs() -> ServiceConfig:
    """All files of proto/service_config."""
    config = ServiceConfig()
    for file in sorted((PROTO / "service_config").glob("*.json")):
        for entry in json.loads(file.read_text())["methodConfig"]:
            for name in entry["name"]:
                key = (name["service"], name["method"])
                assert key not in config.timeouts, f"{file.name}: {key} is listed twice"
                config.timeouts[key] = float(entry["timeout"].removesuffix("s"))
                if "retryPolicy" in entry:
                    config.retries[key] = entry["retryPolicy"]
    return config


def read_rpcs(descriptor_set: descriptor_pb2.FileDescriptorSet) -> list[Rpc]:
    """Every method of our packages with its comments."""
    rpcs = []
    for file in descriptor_set.file:
        if not file.package.startswith("tetrarch."):
            continue
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        for number, service in enumerate(file.service):
            above = comments.get((SERVICE_FIELD, number), "")
            for position, method in enumerate(service.method):
                own = comments.get((SERVICE_FIELD, number, METHOD_FIELD, position), "")
                level = method.options.idempotency_level
                idempotent = level != descriptor_pb2.MethodOptions.IDEMPOTENCY_UNKNOWN
                rpcs.append(Rpc(file.package, service.name, method.name, own, above + own, idempotent))
    return rpcs


@pytest.fixture(scope="session")
def rpcs(tmp_path_factory) -> list[Rpc]:
    """Every method, read from the .proto files themselves."""
    target = tmp_path_factory.mktemp("image") / "image.binpb"
    subprocess.run([tool("buf"), "build", "--as-file-descriptor-set", "-o", target], cwd=PROTO, check=True)
    return read_rpcs(descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()))
