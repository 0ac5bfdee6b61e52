"""Waits double, have a limit, and end with a success."""

from __future__ import annotations

from services.common.backoff import Backoff


def test_waits_double_up_to_the_longest_and_start_anew_after_a_success():
    now = [0.0]
    backoff = Backoff(2.0, 5.0, lambda: now[0])
    assert backoff.due("a")
    assert [backoff.failed("a") for _ in range(3)] == [2.0, 4.0, 5.0]
    assert not backoff.due("a")
    assert backoff.due("b")
    now[0] = 5.0
    assert backoff.due("a")
    backoff.succeeded("a")
    assert backoff.failed("a") == 2.0
