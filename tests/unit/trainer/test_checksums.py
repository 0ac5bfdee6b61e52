"""Checksums of weights: against values of the kernels that engines run."""

from __future__ import annotations

import hashlib

import pytest
import torch

from services.checksums import compute
from services.checksums.compute import Content, digest, digests

# Made by `gpu_tensor_hash`'s own Triton kernels of SGLang 0.5.15.post1 under TRITON_INTERPRET=1 (triton 3.6.0, on a
# CPU) from `data(n)`, filled up to whole words as it does: no byte, less than a word, one tile, a tile and a byte, ...
KERNEL_VALUES = {
    0: "0000000000000000",
    1: "3d93a6540b54ef2a",
    3: "f417e9622e9f463d",
    4: "832e10af412149e4",
    5: "3b49fd022c905d4d",
    1024: "5eaa48fe4b899d70",
    32768: "185a46a7e5b677e7",
    32769: "65172be0fb745a6f",
    100_002: "723602ed38166f27",
    163_840: "d3296a36de3ca000",
    1_000_003: "efb3e69b5d409478",
}


def data(count: int) -> torch.Tensor:
    return ((torch.arange(count, dtype=torch.int64) * 2654435761 >> 13) & 255).to(torch.uint8)


@pytest.mark.parametrize("count", KERNEL_VALUES)
def test_tiled_checksum_equals_the_kernels(count):
    assert digest([data(count)], 0, "sglang-tiled-64") == KERNEL_VALUES[count]


@pytest.mark.parametrize("chunk", [8192, 3 * 8192, compute._CHUNK_WORDS])
def test_parts_and_padding_are_one_tensor_whatever_the_chunks(monkeypatch, chunk):
    monkeypatch.setattr(compute, "_CHUNK_WORDS", chunk)
    whole = data(70_001)
    parts = [whole[:11], whole[11:40_000], whole[40_000:]]
    # The kernels' value of the same bytes and 777 zeros.
    assert digest(parts, 777, "sglang-tiled-64") == "df3ded8c30e17582"
    assert digest([torch.cat([whole, torch.zeros(777, dtype=torch.uint8)])], 0, "sglang-tiled-64") == "df3ded8c30e17582"


@pytest.mark.parametrize("chunk", [8192, compute._CHUNK_WORDS])
def test_contents_of_one_size_are_told_apart_and_stay_in_order(monkeypatch, chunk):
    monkeypatch.setattr(compute, "_CHUNK_WORDS", chunk)
    counts = [100_002, 5, 0, 100_002, 1024, 5]
    contents = [Content([data(count)]) for count in counts]
    contents[3] = Content([data(100_002).flip(0)])
    values = digests(contents, "sglang-tiled-64")
    assert [values[index] for index in (0, 1, 2, 4, 5)] == [KERNEL_VALUES[counts[index]] for index in (0, 1, 2, 4, 5)]
    assert values[3] == digest([data(100_002).flip(0)], 0, "sglang-tiled-64") != values[0]


def test_one_bit_and_one_place_change_it():
    before, flipped, moved = data(50_000), data(50_000), data(50_000).roll(4)
    flipped[31_234] ^= 1
    values = {digest([tensor], 0, "sglang-tiled-64") for tensor in (before, flipped, moved)}
    assert len(values) == 3


def test_sha256_covers_parts_and_padding():
    whole = data(5000)
    expected = hashlib.sha256(bytes(whole.tolist()) + bytes(96)).hexdigest()[:16]
    assert digest([whole[:123], whole[123:]], 96, "sha256-64") == expected


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match="'crc' is not one of sha256-64, sglang-tiled-64"):
        digest([], 0, "crc")
