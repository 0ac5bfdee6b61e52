"""Random histories against two buffer servers and a Valkey; `python -m benchmarks.buffer_ledger` plays longer ones."""

from __future__ import annotations

from benchmarks.buffer_ledger import play

HISTORIES = 5


async def test_random_histories_with_crashes_lose_and_double_nothing(tmp_path):
    """Clients race, so a seed does not fix what a short history contains: one follows another until all is seen."""
    unseen = {"restore", "server killed", "store killed"}
    for number in range(HISTORIES):
        directory = tmp_path / str(number)
        directory.mkdir()
        outcome = await play(directory, 3 + number, operations=600, per_run=300, disturbance=0.04)
        assert (outcome.lost, outcome.doubled, outcome.wrong_payloads) == (0, 0, 0)
        assert outcome.trained > 0
        unseen -= {name for name, count in (outcome.counts | outcome.restarts).items() if count}
        if not unseen:
            return
    raise AssertionError(f"{HISTORIES} histories without {', '.join(sorted(unseen))}")
