"""What changed in a tensor between two versions, element by element and whatever the elements mean.

A tensor's delta is a row of chunks, one for every 4,194,304 elements in which something changed:

    u32 chunk number · u32 changed elements · u32 length of gaps · u32 length of values · gaps · values

`gaps` are the distances between the positions of changed elements (the first counted from the chunk's beginning) as
LEB128 numbers; `values` are those elements' bytes, all first bytes, then all second bytes, and so on. Both are zstd
frames. With the encoding "overwrite" a value is the new element, so that a delta applied twice is harmless; with "xor"
it is new ^ old, which is smaller, because training moves most elements to a neighbouring number.

Invariants: bytes are compared, never numbers (NaN, -0.0 and their payloads travel); a damaged delta raises ValueError
or yields other bytes than the manifest's checksum, never a write outside of the tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import zstandard

ENCODINGS = ("overwrite", "xor")
CHUNK = 4 * 1024 * 1024
"""Elements of a chunk; positions within one fit in 32 bits, and scratch memory stays small."""
_HEADER = struct.Struct("<IIII")
_LEVEL = 1
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode(old: np.ndarray, new: np.ndarray, item_bytes: int, encoding: str) -> tuple[bytes, int]:
    """Delta of two uint8 [n] of equal size, elements of `item_bytes`; → bytes, changed elements. Empty if equal."""
    before, after = old.view(_WORDS[item_bytes]), new.view(_WORDS[item_bytes])
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    parts, total = [], 0
    for number, start in enumerate(range(0, len(after), CHUNK)):
        was, now = before[start : start + CHUNK], after[start : start + CHUNK]
        positions = np.flatnonzero(was != now)
        if not len(positions):
            continue
        values = now[positions] ^ was[positions] if encoding == "xor" else now[positions]
        planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, item_bytes).T)
        gaps = packer.compress(_to_leb128(np.diff(positions, prepend=0).astype(np.uint32)).data)
        packed = packer.compress(planes.data)
        parts += [_HEADER.pack(number, len(positions), len(gaps), len(packed)), gaps, packed]
        total += len(positions)
    return b"".join(parts), total


def apply(target: np.ndarray, delta: memoryview | bytes | bytearray, item_bytes: int, encoding: str) -> int:
    """Changes `target`, uint8 [n], in place; → changed elements. Raises ValueError for a delta that is none."""
    elements, total = target.view(_WORDS[item_bytes]), 0
    for number, count, gaps, packed in _chunks(memoryview(delta)):
        chunk = elements[number * CHUNK : (number + 1) * CHUNK]
        if not 0 < count <= len(chunk):
            raise ValueError(f"{count} elements in a chunk of {len(chunk)}")
        positions = np.cumsum(_from_leb128(_unpack(gaps, 5 * count), count))
        if positions[-1] >= len(chunk):
            raise ValueError(f"a position beyond the chunk's {len(chunk)} elements")
        planes = np.frombuffer(_unpack(packed, count * item_bytes), np.uint8)
        if len(planes) != count * item_bytes:
            raise ValueError(f"{len(planes)} bytes of values instead of {count * item_bytes}")
        values = np.ascontiguousarray(planes.reshape(item_bytes, -1).T).view(chunk.dtype).reshape(-1)
        chunk[positions] = values ^ chunk[positions] if encoding == "xor" else values
        total += count
    return total


def _chunks(data: memoryview) -> Iterator[tuple[int, int, memoryview, memoryview]]:
    at = 0
    while at < len(data):
        if at + _HEADER.size > len(data):
            raise ValueError("it ends within a header")
        number, count, gap_bytes, value_bytes = _HEADER.unpack_from(data, at)
        first = at + _HEADER.size
        at = first + gap_bytes + value_bytes
        if at > len(data):
            raise ValueError("it ends within a chunk")
        yield number, count, data[first : first + gap_bytes], data[first + gap_bytes : at]


def _unpack(frame: memoryview, most: int) -> bytes:
    """Content of a zstd frame of at most `most` bytes."""
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= most:
            raise ValueError(f"a frame of {size} bytes where at most {most} can be")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=most)
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error


def _to_leb128(numbers: np.ndarray) -> np.ndarray:
    """uint32 [n] → bytes, seven bits each, the lowest first; all but a number's last have the high bit set."""
    lengths = np.ones(len(numbers), np.intp)
    for bits in (7, 14, 21, 28):
        lengths += numbers >> bits > 0
    first = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    for index in range(int(lengths.max())):
        some = np.flatnonzero(lengths > index)
        more = np.where(lengths[some] > index + 1, 0x80, 0)
        out[first[some] + index] = (numbers[some] >> (7 * index) & 0x7F) | more
    return out


def _from_leb128(data: bytes, count: int) -> np.ndarray:
    """The inverse: int64 [count]."""
    raw = np.frombuffer(data, np.uint8)
    last = np.flatnonzero(raw < 0x80)
    if len(last) != count or (count and last[-1] != len(raw) - 1):
        raise ValueError(f"{len(last)} positions instead of {count}")
    if len(raw) == count:  # the usual case: every gap is below 128
        return raw.astype(np.int64)
    first = np.concatenate(([0], last[:-1] + 1))
    places = np.arange(len(raw)) - np.repeat(first, last - first + 1)
    if places.max(initial=0) > 4:
        raise ValueError("a position of more than five bytes")
    return np.add.reduceat((raw & 0x7F).astype(np.int64) << (7 * places), first)
