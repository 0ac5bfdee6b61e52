"""How SGLang's tensors are made from those that a trainer sends, and whether these are what its checkpoint has.

SGLang fuses modules and pads vocabularies; a checksum rule says of each tensor that it holds which sent ones make it
up. Pure.

Invariants: every tensor that an engine has from its checkpoint has a rule, every one that is sent a place: an update
that left one out would have the engine serve a mixture of versions, and checksums alone would not show it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from services.common.errors import Code, ServiceError
from services.rollout.core.engine_port import ITEM_BYTES, ChecksumRule, TensorSpec

Headers = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtypes and shapes in the engine's checkpoint, by name; empty when its files do not tell."""

FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
"""Engine modules made of several checkpoint modules, whose rows follow each other in this order."""
EXPERTS = (("experts.w13_weight", ("gate_proj", "up_proj")), ("experts.w2_weight", ("down_proj",)))
"""Engine tensors made of those of every expert, one expert after the other."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SAME = "trainer and engine must load the same checkpoint architecture"


def checksum_rules(
    held: Sequence[str], specs: Sequence[TensorSpec], own: Headers, *, tied: bool, vocabulary_multiple: int
) -> list[ChecksumRule]:
    """Rules for the engine tensors `held`, vocabularies padded to a multiple of rows. Raises as `match_tensors`."""
    by_name = {spec.name: spec for spec in specs}
    rules = match_tensors(held, [spec.name for spec in specs], own, tied=tied)
    return [replace(rule, padding_bytes=_padding(by_name[rule.source_names[0]], vocabulary_multiple)) for rule in rules]


def match_tensors(
    held: Sequence[str], sent: Sequence[str], own: Collection[str] = (), *, tied: bool
) -> list[ChecksumRule]:
    """Rules for the engine tensors `held`, made of the checkpoint tensors `sent`.

    With `tied` embeddings the engine may hold, and the sender may send, either of two names of one tensor. What is not
    in the engine's checkpoint, if `own` tells, is its own business.
    Raises FAILED_PRECONDITION: TENSORS_UNKNOWN for a sent tensor without a place, TENSORS_MISSING for one that is not
    sent.
    """
    known, rules, placed, lacking = set(sent), [], set(), {}
    for name in held:
        sources = _sources(name, known)
        if tied and name == _HEAD and name not in known:
            sources = (_EMBEDDING,)
        placed.update(sources)
        absent = [source for source in sources if source not in known]
        if not absent:
            rules.append(ChecksumRule(name, sources))
        elif not own or any(source in own for source in sources):
            lacking[absent[0]] = name
    strangers = [name for name in sent if name not in placed and not (tied and name == _HEAD)]
    if strangers:
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "TENSORS_UNKNOWN",
            f"{len(strangers)} tensors of the update have no place in the engine, the first is {strangers[0]}:"
            f" {_SAME}.",
            first=strangers[0],
            count=len(strangers),
        )
    if lacking:
        first = next(iter(lacking))
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "TENSORS_MISSING",
            f"{len(lacking)} tensors of the engine are not in the update, the first is {first}"
            f" (of the engine's {lacking[first]}): {_SAME}.",
            first=first,
            count=len(lacking),
        )
    return rules


def check_shapes(specs: Sequence[TensorSpec], own: Headers) -> None:
    """Raises FAILED_PRECONDITION/SHAPE_MISMATCH."""
    for spec in specs:
        if spec.name in own and own[spec.name][1] != spec.shape:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "SHAPE_MISMATCH",
                f"Tensor {spec.name} of the update has shape {list(spec.shape)}, and {list(own[spec.name][1])} in the"
                f" engine's checkpoint: {_SAME}.",
                tensor=spec.name,
            )


def check_dtypes(specs: Sequence[TensorSpec], dtype: str, own: Headers, url: str) -> None:
    """An engine converts what it loads to its own `dtype`, but for tensors whose checkpoint has them in another, and
    would then hold other bytes than were sent. Raises FAILED_PRECONDITION/DTYPE_MISMATCH."""
    for spec in specs:
        if spec.dtype != dtype and spec.dtype != own.get(spec.name, ("", ()))[0]:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "DTYPE_MISMATCH",
                f"Tensor {spec.name} is sent as {spec.dtype}, but the engine at {url} holds {dtype}: make both equal"
                " (trainer.bf16 and sglang.dtype: bfloat16, or neither and sglang.dtype: float32).",
                url=url,
                tensor=spec.name,
                engine_dtype=dtype,
            )


def _padding(spec: TensorSpec, multiple: int) -> int:
    """Bytes of the zeros with which an engine pads a vocabulary."""
    if spec.name not in (_EMBEDDING, _HEAD):
        return 0
    return -spec.shape[0] % multiple * spec.shape[1] * ITEM_BYTES[spec.dtype]


def _sources(engine_name: str, known: set[str]) -> tuple[str, ...]:
    """Checkpoint tensors of which the engine makes its own."""
    if engine_name in known:
        return (engine_name,)
    for fused, parts in FUSED:
        pattern = rf"(?<=\.){fused}(?=\.)"
        if re.search(pattern, engine_name):
            return tuple(re.sub(pattern, part, engine_name) for part in parts)
    for stacked, parts in EXPERTS:
        if engine_name.endswith(f".{stacked}"):
            prefix, numbers = engine_name.removesuffix(stacked), itertools.count()
            of_all = ([f"{prefix}experts.{number}.{part}.weight" for part in parts] for number in numbers)
            found = tuple(itertools.chain(*itertools.takewhile(lambda names: names[0] in known, of_all)))
            return found or (engine_name,)
    return (engine_name,)
