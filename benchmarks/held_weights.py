"""Compares a Hugging Face checkpoint with what running engines hold, tensor by tensor, by engines' own checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from services.checksums.compute import digest
from services.console.adapters.clients import Clients
from services.rollout.adapters.sglang_launch import SGLangFactory
from services.rollout.core.engine_port import LaunchSpec, TensorSpec


@dataclass(frozen=True)
class Held:
    """Tensors of an engine that equal the checkpoint's, and that differ. `version`: the weights it says it holds."""

    version: int
    equal: int
    different: Sequence[str]


def read_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, on the CPU."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            tensors |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - no mapping
    return tensors


async def compare(buffer: str, checkpoint: Path, device: str) -> list[Held]:
    """Asks every engine. `buffer`: host:port; `device`: cpu or cuda, where the engines run."""
    tensors = read_checkpoint(checkpoint)
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    async with Clients(buffer, None) as clients:
        urls = [engine.url for node in await clients.nodes() for engine in node.engines]
    found = []
    for url in urls:
        # A client only; nothing is started.
        engine = SGLangFactory().build(0, int(url.rpartition(":")[2]), LaunchSpec(checkpoint, device)).engine
        try:
            rules, held, version = await engine.checksum_rules(specs), await engine.checksums(), await engine.version()
        finally:
            await engine.close()
        different = []
        for rule in rules:
            parts = [tensors[name].contiguous().view(-1).view(torch.uint8) for name in rule.source_names]
            if digest(parts, rule.padding_bytes, engine.checksum_algorithm) != held[rule.engine_name]:
                different.append(rule.engine_name)
        found.append(Held(version, len(rules) - len(different), different))
    return found
