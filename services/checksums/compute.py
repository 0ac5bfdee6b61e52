"""Checksums of weights as bytes, on whatever device the bytes are. Knows nothing of models, groups or engines.

Two algorithms, each 16 hex digits. "sha256-64" is the first 8 bytes of SHA-256. "sglang-tiled-64" is what SGLang's
`/weights_checker` answers for tensors on a GPU: a sum over tiles of 8192 words, made for thousands of threads; it
tells transmission errors, not forgeries. Definition, all arithmetic modulo 2^32 unless said otherwise:

- The bytes, filled up with zeros to whole words of 4, are n little-endian words w[i].
- mix(x): x ^= x>>16; x *= 0x85EBCA6B; x ^= x>>13; x *= 0xC2B2AE35; x ^= x>>16 (MurmurHash3's finaliser).
- For j = 1, 2: k_j[i] = mix(w[i] ^ ((i·A_j + s_j) ^ rotl(i, r_j))).
- A tile's h_j = mix(sum of its k_j ^ 4n); its value is h_1·2^32 + h_2.
- The result is SplitMix64's finaliser of the sum of all tiles modulo 2^64, and 0 for no bytes.

On a GPU `kernels` reads the bytes once: 8 GB in some milliseconds. The passes in torch here serve CPUs, GPUs
on which Triton cannot build, and its tests.

Invariants of the passes in torch: beside the inputs at most some ten times `_CHUNK_WORDS` words are in use; tensors of
one size are worked on together and the device is waited for once, because a model has hundreds of small ones.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from services.checksums.names import ALGORITHMS, SHA256, TILED
from services.common.telemetry import get_logger

_TILE_WORDS = 8192
_CHUNK_WORDS = 16 * 2**20
"""A multiple of the tile."""
_SEED = 0x243F6A88
_MASK_32 = 0xFFFFFFFF
_LANES = (
    (0x27D4EB2D, _SEED, 15),
    (0x165667B1, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK_32, 13),
)
"""(A, s, r) of the two halves."""


@dataclass(frozen=True)
class Content:
    """The bytes of `parts`, uint8 [any], one after the other, and then zeros."""

    parts: Sequence[torch.Tensor]
    padding_bytes: int = 0

    @property
    def byte_count(self) -> int:
        """Bytes in all."""
        return sum(part.numel() for part in self.parts) + self.padding_bytes


def digests(contents: Sequence[Content], algorithm: str) -> list[str]:
    """16 hex digits of each content, in order.

    Raises:
        ValueError: for another algorithm than those of `ALGORITHMS`.
    """
    if algorithm == SHA256:
        return [_sha256(content.parts, content.padding_bytes) for content in contents]
    if algorithm == TILED:
        return [f"{value:016x}" for value in _tiled(contents)]
    raise ValueError(f"checksum algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}")


def prepare(device: torch.device) -> None:
    """Builds what is built at first use, which takes a second or two on a GPU; that is this thread's from now on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton builds for the thread's present one
    digest([torch.zeros(8, dtype=torch.uint8, device=device)], 0, TILED)


def digest(parts: Sequence[torch.Tensor], padding_bytes: int, algorithm: str) -> str:
    """The one of `Content(parts, padding_bytes)`; see `digests`."""
    return digests([Content(parts, padding_bytes)], algorithm)[0]


def _sha256(parts: Sequence[torch.Tensor], padding_bytes: int) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(memoryview(part.contiguous().cpu().numpy()))
    state.update(bytes(padding_bytes))
    return state.hexdigest()[:16]


def has_kernels(device: torch.device) -> bool:
    """Whether this is a GPU on which they can be built; builds them."""
    return _kernels(device) is not None


@torch.no_grad()
def _tiled(contents: Sequence[Content]) -> list[int]:
    device = next((part.device for content in contents for part in content.parts), torch.device("cpu"))
    kernels = _kernels(device)
    sums = _sums_by_kernel(kernels, contents) if kernels else _sums_by_torch(contents)
    return [_finish_64(value & (2**64 - 1)) for value in sums]


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The module of kernels, on a GPU on which they can be built."""
    if device.type != "cuda":
        return None
    try:
        from services.checksums import kernels

        _sums_by_kernel(kernels, [Content([torch.zeros(8, dtype=torch.uint8, device=device)])])
    except Exception as error:  # whatever hinders Triton: it is missing, or a compiler, or Python's headers
        get_logger(__name__).warning(
            "checksums are computed without Triton's kernel, which is slower; it needs a C compiler", error=str(error)
        )
        return None
    return kernels


def _sums_by_kernel(kernels: ModuleType, contents: Sequence[Content]) -> list[int]:
    """Sum of the tiles' values of every content, modulo 2^64, as int64 has it."""
    sums, tiles = kernels.tile_sums(contents, _LANES)
    counts = torch.tensor(tiles).to(sums.device)
    sizes = torch.tensor([_signed(4 * -(-content.byte_count // 4) & _MASK_32) for content in contents])
    sums ^= sizes.to(torch.int32).to(sums.device).repeat_interleave(counts)[:, None]
    halves = _mix(sums).to(torch.int64)
    owner = torch.arange(len(contents), device=sums.device).repeat_interleave(counts)
    total = torch.zeros(len(contents), dtype=torch.int64, device=sums.device)
    return total.index_add_(0, owner, (halves[:, 0] << 32) | (halves[:, 1] & _MASK_32)).tolist()


def _sums_by_torch(contents: Sequence[Content]) -> list[int]:
    """As `_sums_by_kernel`."""
    by_size: dict[int, list[int]] = {}
    for index, content in enumerate(contents):
        by_size.setdefault(content.byte_count, []).append(index)
    order, sums = [], []
    for size, indices in by_size.items():
        at_once = max(_CHUNK_WORDS // max(-(-size // 4), 1), 1)
        for start in range(0, len(indices), at_once):
            some = indices[start : start + at_once]
            order += some
            sums.append(_tile_sums([contents[index] for index in some], size))
    values = torch.cat([each.cpu() for each in sums]).tolist() if sums else []
    found = dict(zip(order, values, strict=True))
    return [found[index] for index in range(len(contents))]


def _tile_sums(contents: Sequence[Content], byte_count: int) -> torch.Tensor:
    """Sum of the tiles' values of k contents of one size, modulo 2^64: int64 [k]."""
    device = contents[0].parts[0].device if contents[0].parts else torch.device("cpu")
    total, first = torch.zeros(len(contents), dtype=torch.int64, device=device), 0
    for words in zip(*(_chunks(content) for content in contents), strict=True):
        table = torch.stack(words) if len(words) > 1 else words[0][None]
        total += _sum_of_tiles(table, first, 4 * -(-byte_count // 4) & _MASK_32)
        first += table.size(1)
    return total


def _chunks(content: Content) -> Iterator[torch.Tensor]:
    """The bytes and zeros as int32 words, at most `_CHUNK_WORDS` at a time, in memory of their own."""
    size, room, pieces = 4 * _CHUNK_WORDS, 4 * _CHUNK_WORDS, []
    zeros = content.padding_bytes + -content.byte_count % 4
    for part in (*content.parts, zeros):
        blank = isinstance(part, int)
        left, at = (part if blank else part.numel()), 0
        while left:
            take = min(left, room)
            device = content.parts[0].device if content.parts else None
            pieces.append(torch.zeros(take, dtype=torch.uint8, device=device) if blank else part[at : at + take])
            at, left, room = at + take, left - take, room - take
            if not room:
                yield torch.cat(pieces).view(torch.int32)
                pieces, room = [], size
    if pieces:
        yield torch.cat(pieces).view(torch.int32)


def _sum_of_tiles(words: torch.Tensor, first: int, byte_count: int) -> torch.Tensor:
    """Sum of the tiles' values modulo 2^64: int64 [k]. `words`, int32 [k, n], begin at position `first`."""
    count = words.size(1)
    # int32 and int64 wrap around as unsigned numbers do.
    position = torch.arange(first, first + count, dtype=torch.int64, device=words.device).to(torch.int32)
    halves = []
    for multiplier, addend, turn in _LANES:
        mixed = (position * _signed(multiplier)).add_(_signed(addend))
        mixed.bitwise_xor_((position << turn).bitwise_or_(_shifted(position, 32 - turn)))
        mixed = _mix(words ^ mixed)
        if count % _TILE_WORDS:
            mixed = torch.nn.functional.pad(mixed, (0, -count % _TILE_WORDS))
        sums = mixed.view(len(words), -1, _TILE_WORDS).sum(2, dtype=torch.int64).to(torch.int32)
        halves.append(_mix(sums.bitwise_xor_(_signed(byte_count))).to(torch.int64))
    return ((halves[0] << 32) | (halves[1] & _MASK_32)).sum(1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """In place, int32."""
    x.bitwise_xor_(_shifted(x, 16)).mul_(_signed(0x85EBCA6B))
    x.bitwise_xor_(_shifted(x, 13)).mul_(_signed(0xC2B2AE35))
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits without the sign, int32."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    """The int32 with the bits of an unsigned number."""
    return value - 2**32 if value >= 2**31 else value


def _finish_64(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & (2**64 - 1)
    return x ^ x >> 31
