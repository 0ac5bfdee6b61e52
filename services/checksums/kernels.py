"""A Triton kernel for "sglang-tiled-64": the bytes are read once, from wherever they are, and nothing is copied.

For every device that Triton knows and for its interpreter. `compute` has the definition and the names. A content is a
list of pieces in memory, and a tile may lie in several of them: since a tile's value is made of sums over its words,
every program adds what its piece has of one tile to that tile's two sums. Pieces that are not whole words at whole
addresses are put together first, which copies them; weights hardly ever are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from services.checksums.compute import Content

TILE_WORDS = 8192
_WARPS = 8


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _lane_sum(word, position, inside, multiplier, addend, turn):
    turned = (position << turn) | (position >> (32 - turn))
    mixed = _mix(word ^ ((position * multiplier + addend) ^ turned))
    return tl.sum(tl.where(inside, mixed, 0).to(tl.int64), 0).to(tl.int32)  # the interpreter's sums do not wrap


@triton.jit
def _sums_kernel(owner, pieces, sums, TILE: tl.constexpr, LANES: tl.constexpr):  # noqa: N803
    """One piece's part of one tile a program. owner: int32 [programs], the piece; pieces: int64 [k, 5], address, first
    word's position in its content, words, first program, slot of the content's first tile; sums: int32 [tiles, 2]."""
    piece = pieces + tl.load(owner + tl.program_id(0)).to(tl.int64) * 5
    words = tl.load(piece).to(tl.pointer_type(tl.int32))
    first, count = tl.load(piece + 1), tl.load(piece + 2)
    start = (first // TILE + (tl.program_id(0) - tl.load(piece + 3))) * TILE
    lower = tl.maximum(first - start, 0).to(tl.int32)
    upper = tl.minimum(first + count - start, TILE).to(tl.int32)
    lane = tl.arange(0, TILE)
    inside = (lane >= lower) & (lane < upper)
    word = tl.load(words + (start - first) + lane, mask=inside, other=0).to(tl.uint32, bitcast=True)
    position = start.to(tl.uint32) + lane.to(tl.uint32)
    slot = sums + (tl.load(piece + 4) + start // TILE) * 2
    tl.atomic_add(slot, _lane_sum(word, position, inside, LANES[0], LANES[1], LANES[2]))
    tl.atomic_add(slot + 1, _lane_sum(word, position, inside, LANES[3], LANES[4], LANES[5]))


def tile_sums(contents: Sequence[Content], lanes: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, list[int]]:
    """Sums of the mixed words of every tile, int32 [tiles, 2], and how many tiles each content has. `lanes`: (A, s, r)
    of the two."""
    rows: list[tuple[int, int, int, int, int]] = []
    programs: list[int] = []
    tiles: list[int] = []
    kept: list[torch.Tensor] = []  # alive until the kernel has been given to the device's queue
    device = next(part.device for content in contents for part in content.parts)
    program, slot = 0, 0
    for content in contents:
        position = 0
        for piece in _pieces(content, device):
            kept.append(piece)
            words = piece.numel() // 4
            touched = (position + words - 1) // TILE_WORDS - position // TILE_WORDS + 1
            rows.append((piece.data_ptr(), position, words, program, slot))
            programs.append(touched)
            position += words
            program += touched
        tiles.append(-(-position // TILE_WORDS))
        slot += tiles[-1]
    sums = torch.zeros(slot, 2, dtype=torch.int32, device=device)
    if rows:
        table = torch.tensor(rows, dtype=torch.int64).to(device)
        counts = torch.tensor(programs).to(device)
        owner = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32, device=device), counts)
        flat = tuple(number for lane in lanes for number in lane)
        _sums_kernel[(len(owner),)](owner, table, sums, TILE=TILE_WORDS, LANES=flat, num_warps=_WARPS)
    return sums, tiles


def _pieces(content: Content, device: torch.device) -> list[torch.Tensor]:
    """The content in whole words: parts that follow each other in memory as one, unless any is not made of words."""
    pieces: list[torch.Tensor] = []
    for part in (part for part in content.parts if part.numel()):
        before = pieces[-1] if pieces else None
        if before is not None and _adjoins(before, part):
            pieces[-1] = before.as_strided((before.numel() + part.numel(),), (1,))
        else:
            pieces.append(part)
    blank = content.padding_bytes
    if any(piece.numel() % 4 or piece.data_ptr() % 4 for piece in pieces):
        zeros = torch.zeros(blank + -content.byte_count % 4, dtype=torch.uint8, device=device)
        return [torch.cat([*pieces, zeros])]
    if blank:
        pieces.append(torch.zeros(blank + -blank % 4, dtype=torch.uint8, device=device))
    return pieces


def _adjoins(before: torch.Tensor, after: torch.Tensor) -> bool:
    same = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    return same and before.data_ptr() + before.numel() == after.data_ptr()
