"""Ports of the rollout node towards inference engines and their router.

The node's core codes against these Protocols; `services.rollout.adapters` implements them. This module knows
no engine, no HTTP and no torch. Shapes: P prompt tokens, R response tokens.

Invariants every adapter keeps:
- `len(output_ids) == len(log_probs) == R` and `versions` cover 0..R in order without gaps (empty if R == 0).
- `log_probs` are the log-probabilities of the sampled tokens under softmax(logits / temperature), before
  top-k and top-p. At temperature 0 (greedy) they are those of temperature 1. Where a request has the kept tokens
  recorded, they are of the distribution that top-k and top-p left.
- A request that `RequestLimits.check` refuses never reaches an engine.
- Every failure is a `ServiceError`; no call outlives its timeout by more than a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from services.rollout.core.completion import NOTHING, Generation, GenerationRequest, Recording, RequestLimits

ITEM_BYTES = {"bool": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8}
"""Bytes of one element by dtype."""
HIGHEST_PORT = 55535
"""Of an engine: SGLang 0.5.15 ends at its start when there is no port 10,000 above."""
PAUSE_MODES = ("retract", "in_place", "abort")


@dataclass(frozen=True)
class EngineInfo:
    """What a running engine says of itself. Constant for the life of its process."""

    kind: str
    engine_version: str
    torch_version: str
    nccl_version: str
    """Empty without CUDA."""
    backends: tuple[str, ...]
    """Collective backends it can join, best first."""
    collective_env: Mapping[str, str]
    """Environment on which every member of a weight group must agree."""
    vocab_size: int
    context_length: int
    rank_count: int
    max_running: int
    """Requests it decodes at the same time."""

    @property
    def limits(self) -> RequestLimits:
        """Bounds of the requests it accepts."""
        return RequestLimits(self.vocab_size, self.context_length)


@dataclass(frozen=True)
class GroupSpec:
    """A weight group to join: rank 0 is the trainer's; this engine takes rank_offset … + rank_count - 1."""

    name: str
    backend: str
    master_address: str
    master_port: int
    world_size: int
    rank_offset: int


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as it is sent: Hugging Face name, dtype ("float32", "bfloat16", …) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        """Its size on the wire."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ChecksumRule:
    """The engine's tensor `engine_name` is the byte concatenation of the sent tensors `source_names`, then zeros."""

    engine_name: str
    source_names: tuple[str, ...]
    padding_bytes: int = 0


Buckets = tuple[tuple[TensorSpec, ...], ...]
"""A plan: the tensors of each flat byte tensor that is sent, in order."""


FilePiece = tuple[str, int, int]
"""Path, offset and length of one bucket in a file."""


@dataclass(frozen=True)
class Activation:
    """How staged bytes became weights: "loaded" by the model, or "copied", as copies were noted before. `checksums`: of
    what the engine then holds, by engine name, or none."""

    how: str = "loaded"
    checksums: Mapping[str, str] = field(default_factory=dict)


class Staging(Protocol):
    """Receives weights in an engine's process beside those it serves; the engine serves on until `activate`.

    Methods raise `ServiceError` as an `Engine`'s do. It is in groups of its own, apart from the engine's.
    """

    trusted: bool
    """Its checksums were the engine's own when both were last made."""

    async def reserve(self, buckets: Buckets, timeout: float) -> None:
        """Takes memory for a plan, or keeps it; what was staged is forgotten. Raises RESOURCE_EXHAUSTED with a sentence
        when it does not fit beside the weights; nothing is held then."""
        ...

    async def drop(self) -> None:
        """Gives the memory back."""
        ...

    async def join_group(self, group: GroupSpec, timeout: float) -> None:
        """As an engine's; every rank of the engine is a member."""
        ...

    async def leave_group(self, name: str, timeout: float) -> None:
        """Leaves a group, also in the middle of a transfer; one it is not in is ignored."""
        ...

    async def receive(self, epoch: int, group_name: str, timeout: float) -> float:
        """Receives every bucket of the reserved plan over the group; → seconds. When it fails the group is left and
        the memory forgotten."""
        ...

    async def fill(self, epoch: int, pieces: Sequence[FilePiece], timeout: float) -> float:
        """Reads every bucket of the reserved plan from files; → seconds."""
        ...

    async def activate(self, epoch: int, timeout: float, *, repeat: bool, names: Sequence[str] = ()) -> Activation:
        """Makes what was staged for `epoch` the engine's weights, within an update and while the engine is paused, and
        makes checksums of the held tensors `names` where it can. `repeat` allows copies: only for callers that compare
        checksums then, and ask again without it when these differ."""
        ...


class Engine(Protocol):
    """One running inference server, seen through its control API.

    Methods raise `ServiceError`: UNAVAILABLE/ENGINE_UNAVAILABLE when it does not answer,
    DEADLINE_EXCEEDED/ENGINE_TIMEOUT, FAILED_PRECONDITION or INTERNAL/ENGINE_REFUSED with the engine's own
    sentence, and INTERNAL/TRANSFER_FAILED from `receive_bucket` (the engine's weights are unknown then).
    """

    url: str
    checksum_algorithm: str
    """Empty when the engine cannot say what it holds."""
    staging: Staging | None
    """None until `info` was asked, and for engines that cannot stage."""

    async def health(self, timeout: float) -> bool:
        """True when it serves; never raises."""
        ...

    async def info(self) -> EngineInfo:
        """Facts about the running engine. The first time the engine must be idle: its receiver is started."""
        ...

    async def ended(self) -> None:
        """Returns when a process that the engine needs has gone, although the one that was started may run on."""
        ...

    async def generate(self, request: GenerationRequest, timeout: float) -> list[Generation]:
        """Complete on this very engine, past the router; same contract as `Router.generate`."""
        ...

    async def pause(self, mode: str) -> None:
        """Stop decoding. retract: running requests go back to the queue and are recomputed later; in_place:
        they keep their KV cache; abort: they end now with finish_reason "abort". New requests wait."""
        ...

    async def resume(self) -> None:
        """Decode again."""
        ...

    async def flush_cache(self) -> bool:
        """Drop the prefix cache. False when the engine could not because requests hold it."""
        ...

    async def abort_all(self) -> None:
        """End all requests, running and waiting, with finish_reason "abort"."""
        ...

    async def join_group(self, group: GroupSpec, timeout: float) -> None:
        """Join a weight group; returns when the collective stands. The trainer must join at the same time."""
        ...

    async def leave_group(self, name: str, timeout: float) -> None:
        """Leave the group; leaving a group it is not in is not an error."""
        ...

    async def begin_update(self) -> None:
        """Open an update; required before `receive_bucket`. A no-op on engines that do not know the notion."""
        ...

    async def receive_bucket(self, specs: Sequence[TensorSpec], group_name: str, timeout: float) -> None:
        """Receive one flat byte tensor (`flat_bytes`) by broadcast from rank 0 and load it. If this raises
        before the engine joined the broadcast, the trainer's side hangs until it is aborted."""
        ...

    async def load_files(self, directory: Path, timeout: float) -> None:
        """Load a checkpoint's weights, safetensors with an index, in an update. If this raises, the engine's weights
        are unknown."""
        ...

    async def end_update(self) -> None:
        """Close an update: post-load work runs once."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Checksum of every tensor the engine holds, by engine name (`checksum_algorithm`)."""
        ...

    async def checksum_rules(self, specs: Sequence[TensorSpec]) -> list[ChecksumRule]:
        """How the engine's tensors are made from `specs`: every one of them, as a mixture of versions would pass else.
        Raises FAILED_PRECONDITION naming the tensor: TENSORS_UNKNOWN (it has no place in the engine), TENSORS_MISSING
        (it is not sent), SHAPE_MISMATCH or DTYPE_MISMATCH."""
        ...

    async def set_version(self, version: int) -> None:
        """Set the version that tokens generated from now on carry. Aborts nothing."""
        ...

    async def version(self) -> int:
        """The version set last; 0 after start."""
        ...

    async def close(self) -> None:
        """Close connections; the process is not touched."""
        ...


@dataclass(frozen=True)
class LaunchSpec:
    """What a run wants of each engine. `device`: "auto", "cpu" or "cuda"."""

    model_path: Path
    device: str = "auto"
    rank_count: int = 1
    """Tensor-parallel ranks (accelerators) of one engine."""
    seed: int = 0
    context_length: int | None = None
    """None: the model's own."""
    engine_count: int = 1
    """Engines of this node; they share devices when there are fewer."""
    group_timeout: float = 60.0
    """Seconds an engine waits for the other members of a weight group before it gives up and serves again. Bytes that
    NCCL began to wait for hold it up until it is replaced."""
    staging: bool = True
    """Whether the engine gets a receiver of weights in its process."""
    record: Recording = NOTHING
    """What it must be able to tell of generations."""
    sglang: Mapping[str, Any] = field(default_factory=dict)
    """Pass-through server arguments, snake_case or kebab-case."""
    simulated: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the simulated engine."""


@dataclass(frozen=True)
class EngineLaunch:
    """How to start one engine process, and the client that talks to it. `env` is added to the node's own."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    engine: Engine
    start_seconds: float
    """Longest time from start to healthy."""


class EngineFactory(Protocol):
    """Builds engines of one kind."""

    kind: str

    def build(self, index: int, port: int, spec: LaunchSpec) -> EngineLaunch:
        """Command and client of engine number `index` of this node, listening on `port` of the loopback.
        Starts nothing. Raises INVALID_ARGUMENT/INVALID_FIELD for arguments it cannot pass on and
        FAILED_PRECONDITION/ENGINE_MISSING when the engine's package is not installed."""
        ...


class Router(Protocol):
    """Spreads requests over the engines that may serve. Supervises its own process."""

    url: str

    async def start(self) -> None:
        """Start; returns when it accepts requests. UNAVAILABLE/ROUTER_UNAVAILABLE with the reason if it does not."""
        ...

    async def stop(self) -> None:
        """Stop the process; requests in flight fail."""
        ...

    async def add_worker(self, url: str, limits: RequestLimits) -> None:
        """Send requests to the engine at `url` from now on. Idempotent."""
        ...

    async def remove_worker(self, url: str) -> None:
        """Send no more requests to `url`; those in flight go on. Idempotent."""
        ...

    async def worker_urls(self) -> tuple[str, ...]:
        """Engines that are routed to now."""
        ...

    async def generate(self, request: GenerationRequest, timeout: float) -> list[Generation]:
        """`sample_count` completions, in order. Retried on another engine when one fails before it answered.

        Raises the errors of `RequestLimits.check`, UNAVAILABLE/NO_ENGINE_READY when nothing is routed to,
        UNAVAILABLE/ENGINE_UNAVAILABLE when retries are used up, DEADLINE_EXCEEDED/ENGINE_TIMEOUT, and
        INVALID_ARGUMENT/ENGINE_REFUSED with the engine's sentence. An abort is not an error: see
        `Generation.finish_reason`."""
        ...
