"""Random histories against two buffer servers and a Valkey; `python -m benchmarks.buffer_ledger` plays longer ones."""

from __future__ import annotations

import pytest

from benchmarks.buffer_ledger import play


@pytest.mark.parametrize("seed", [3])
async def test_random_histories_with_crashes_lose_and_double_nothing(tmp_path, seed):
    outcome = await play(tmp_path, seed, operations=600, per_run=300, disturbance=0.04)
    assert (outcome.lost, outcome.doubled, outcome.wrong_payloads) == (0, 0, 0)
    assert outcome.counts["restore"] > 0
    assert outcome.trained > 0
    assert outcome.restarts["server killed"] > 0
    assert outcome.restarts["store killed"] > 0
