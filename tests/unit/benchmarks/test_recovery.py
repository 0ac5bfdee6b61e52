"""The recovery table's arithmetic: when full rate is reached, what a row's bars say, what the page shows."""

from __future__ import annotations

import json

import pytest

from benchmarks.recovery.measure import RowResult, steady_after
from benchmarks.recovery.page import load, merge, misses, write_page
from benchmarks.recovery.rows import ROWS

UNDISTURBED = [float(second) for second in range(11)]
"""Ends of steps of one second each."""


def repetition(**changes):
    """What one strike cost."""
    values = {"detect_seconds": 0.1, "steady_seconds": 0.0, "back_seconds": 3.0, "others_seconds": None}
    counts = {"steps_repeated": 0, "engines_restarted": 1, "engines_restarted_needlessly": 0}
    return values | counts | {"undisturbed_step_seconds": 0.5} | changes


def result(name: str, *repetitions: dict, lost: int = 0) -> RowResult:
    """A measured row."""
    return RowResult(name, list(repetitions), 100, lost, 0, [])


@pytest.mark.parametrize(
    ("later", "seconds"),
    [
        ([11, 12, 13, 14], 0.0),  # nothing was to be seen of it
        ([11, 12, 13], None),  # not told yet
        ([20, 21, 22, 23, 24], 9.5),  # a gap, then as before
        ([20, 23, 24, 25, 26, 27], 12.5),  # and a slow step after it
        ([20, 23, 26, 29, 32], None),
    ],
)
def test_full_rate_is_reached_where_a_window_as_before_follows(later, seconds):
    assert steady_after([*UNDISTURBED, *map(float, later)], struck=10.5, median=1.0) == seconds


def test_a_row_measured_again_replaces_the_old(tmp_path):
    path = tmp_path / "recovery.json"
    merge(path, result("engine-idle", repetition(steady_seconds=11.0)), "simulated")
    assert misses(path) == ["engine-idle: steady_seconds 11.00 is above 10"]
    merge(path, result("engine-idle", repetition()), "simulated")
    merge(path, result("store", repetition(engines_restarted_needlessly=1), lost=2), "simulated")
    assert misses(path) == ["store: 2 prompts lost", "store: 1 engines restarted that nobody had struck"]
    assert list(load(path)["rows"]) == ["engine-idle", "store"]


def test_the_page_has_its_rows_and_what_falls_short(tmp_path):
    path, page, rows = tmp_path / "recovery.json", tmp_path / "recovery.md", ROWS[::6]
    for row in rows:
        merge(path, result(row.name, repetition(), repetition(detect_seconds=0.3)), "simulated")
    write_page(page, path)
    text = page.read_text()
    assert all(f"| {row.victim} | {row.moment} | 0.20 / 0.30 |" in text for row in rows)
    assert "every bar is met" in text
    json.loads(path.read_text())
