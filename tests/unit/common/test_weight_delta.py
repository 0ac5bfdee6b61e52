"""Deltas of tensors: any bytes, any element, and what damage does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.weight_files import delta


@st.composite
def versions(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Two versions of a tensor's bytes, and the bytes of an element: random bits, hence NaNs and zeros of all kinds."""
    item = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.integers(0, 3000))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = random.integers(0, 256, count * item, dtype=np.uint8)
    new = old.copy()
    share = draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
    changed = np.flatnonzero(random.random(count) < share)
    new.reshape(-1, item)[changed] = random.integers(0, 256, (len(changed), item), dtype=np.uint8)
    return old, new, item


@pytest.mark.parametrize("encoding", delta.ENCODINGS)
@settings(deadline=None, max_examples=60)
@given(made=versions())
def test_a_delta_leads_from_the_old_bytes_to_the_new_ones(encoding: str, made) -> None:
    old, new, item = made
    changes, count = delta.encode(old, new, item, encoding)
    assert count == int((old.reshape(-1, item) != new.reshape(-1, item)).any(1).sum())
    assert bool(changes) == bool(count)
    target = old.copy()
    assert delta.apply(target, changes, item, encoding) == count
    assert np.array_equal(target, new)
    if encoding == "overwrite":  # once more does no harm
        delta.apply(target, changes, item, encoding)
        assert np.array_equal(target, new)


@pytest.mark.parametrize("encoding", delta.ENCODINGS)
def test_chunks_positions_of_every_length_and_payloads_of_nan_travel(encoding: str, monkeypatch) -> None:
    monkeypatch.setattr(delta, "CHUNK", 70_000)
    old = np.full(300_000, 0x7FC0, np.uint16)  # NaN in bfloat16
    new = old.copy()
    places = [0, 1, 127, 128, 129, 16_000, 33_000, 69_999, 70_000, 139_999, 299_999]
    new[places] = 0x7FC1  # another NaN
    new[5] = 0x8000  # -0.0 …
    old[5] = 0x0000  # … was 0.0
    changes, count = delta.encode(old.view(np.uint8), new.view(np.uint8), 2, encoding)
    target = old.view(np.uint8).copy()
    assert (count, delta.apply(target, changes, 2, encoding)) == (12, 12)
    assert np.array_equal(target, new.view(np.uint8))


@settings(deadline=None, max_examples=200)
@given(made=versions(), where=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_is_an_error_or_other_bytes_never_a_write_elsewhere(made, where: int, bit: int, cut: bool) -> None:
    old, new, item = made
    changes, count = delta.encode(old, new, item, "overwrite")
    if not count:
        return
    damaged = bytearray(changes)
    if cut:
        del damaged[where % len(damaged) :]
    else:
        damaged[where % len(damaged)] ^= 1 << bit
    guarded = np.zeros(len(old) + 64, np.uint8)
    guarded[32:-32] = old
    try:
        delta.apply(guarded[32:-32], bytes(damaged), item, "overwrite")
    except ValueError:
        return
    finally:
        assert not guarded[:32].any()
        assert not guarded[-32:].any()


def test_few_changes_of_one_step_take_few_bytes() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, 1_000_000, dtype=np.uint16)
    new = old.copy()
    places = random.choice(len(old), 20_000, replace=False)
    new[places] += 1
    sizes = {name: len(delta.encode(old.view(np.uint8), new.view(np.uint8), 2, name)[0]) for name in delta.ENCODINGS}
    assert sizes["overwrite"] < 0.035 * old.nbytes
    assert sizes["xor"] < 0.7 * sizes["overwrite"]
