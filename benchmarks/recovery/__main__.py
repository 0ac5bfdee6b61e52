"""`python -m benchmarks.recovery [--rows a,b]`: what each death costs, and whether it cost a prompt.

Every row strikes one victim at one moment, over and over, in a run of real processes that goes on through all of it.
Results are kept row by row in a JSON file, from which `--write` makes the page; a row measured again replaces the old.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.recovery.measure import Measured, Row, measure
from benchmarks.recovery.page import merge, misses, show, write_page
from benchmarks.recovery.rows import ROWS
from benchmarks.recovery.world import Stuck, world
from benchmarks.report import limit
from services.common.errors import ServiceError

LIMIT_SECONDS = 3 * 3600


def chosen_rows(names: str) -> list[Row]:
    """Rows by name, in the table's order. Raises SystemExit."""
    if not names:
        return ROWS
    wanted = names.split(",")
    if unknown := set(wanted) - {row.name for row in ROWS}:
        known = ", ".join(row.name for row in ROWS)
        raise SystemExit(f"There is no row {', '.join(sorted(unknown))}; there are {known}.")
    return [row for row in ROWS if row.name in wanted]


async def run(rows: Sequence[Row], chosen: argparse.Namespace, directory: Path) -> list[str]:
    """Measures rows, those of equal worlds in one; → what could not be measured."""
    console, failed = Console(), []

    def say(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, soft_wrap=True)

    rows = [replace(row, shape=replace(row.shape, engine=chosen.engine)) for row in rows]
    by_shape = sorted(rows, key=lambda row: str(row.shape))
    for number, (_, same) in enumerate(itertools.groupby(by_shape, key=lambda row: row.shape)):
        left = list(same)
        while left:
            place = directory / f"world-{number}-{len(left)}"
            try:
                async with world(place, left[0].shape) as made:
                    measured = Measured(made)
                    while left:
                        result = await measure(measured, left[0], chosen.repetitions, say)
                        merge(chosen.json, result, chosen.engine)
                        left.pop(0)
            except (Stuck, ServiceError, AssertionError) as error:
                failed.append(f"{left.pop(0).name}: {error}")
                say(f"NOT MEASURED {failed[-1]}")
    return failed


def main() -> int:
    """Command line entry."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--rows", default="", help="names of rows, with commas; all without it")
    made.add_argument("--repetitions", type=int, default=10)
    made.add_argument("--engine", choices=("simulated", "sglang"), default="simulated")
    made.add_argument("--json", type=Path, default=Path("docs/benchmarks/recovery.json"), help="results, row by row")
    made.add_argument("--write", type=Path, help="make the page from all results")
    made.add_argument("--keep", type=Path, help="directory for what the runs write, kept")
    made.add_argument("--list", action="store_true", help="names of the rows, and nothing else")
    chosen = made.parse_args()
    if chosen.list:
        print("\n".join(f"{row.name}: {row.victim}, {row.moment}" for row in ROWS))
        return 0
    limit(LIMIT_SECONDS)
    failed: list[str] = []
    if chosen.repetitions:
        rows = chosen_rows(chosen.rows)
        with tempfile.TemporaryDirectory(prefix="tetrarch-recovery-") as scratch:
            failed = asyncio.run(run(rows, chosen, chosen.keep or Path(scratch)))
    show(chosen.json)
    if chosen.write:
        write_page(chosen.write, chosen.json)
    for sentence in [*failed, *misses(chosen.json)]:
        print(sentence)
    return 1 if failed or misses(chosen.json) else 0


if __name__ == "__main__":
    raise SystemExit(main())
