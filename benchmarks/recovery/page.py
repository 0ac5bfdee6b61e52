"""Results of rows: kept in JSON, judged by their bars, shown as a table and as the page."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.recovery.measure import RowResult
from benchmarks.recovery.rows import ROWS
from benchmarks.report import machine

COLUMNS = ("victim", "moment", "detected s", "full rate s", "back s", "lost", "twice", "steps repeated", "restarted")


def load(path: Path) -> dict[str, Any]:
    """All results so far."""
    return json.loads(path.read_text()) if path.is_file() else {"benchmark": "recovery", "rows": {}}


def merge(path: Path, result: RowResult, engine: str) -> None:
    """Puts a row's result in the place of its older one."""
    content = load(path)
    entry = result.to_json() | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": _commit()}
    content["rows"][result.name if engine == "simulated" else f"{result.name} {engine}"] = entry | {"engine": engine}
    content["machine"] = machine()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _values(entry: dict[str, Any], figure: str) -> list[float]:
    return [one[figure] for one in entry["repetitions"] if one.get(figure) is not None]


def _cell(entry: dict[str, Any], figure: str, form: str = ".1f") -> str:
    values = _values(entry, figure)
    middle, most = statistics.median(values), max(values)
    return f"{middle:{form}} / {most:{form}}"


def cells(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    """One row of the table; p50 / max."""
    row = next(row for row in ROWS if row.name == name.split()[0])
    return (
        row.victim if entry["engine"] == "simulated" else f"{row.victim} ({entry['engine']})",
        row.moment,
        _cell(entry, "detect_seconds", ".2f"),
        _cell(entry, "steady_seconds"),
        _cell(entry, "back_seconds"),
        str(entry["lost"]),
        str(entry["doubled"]),
        _cell(entry, "steps_repeated", ".0f"),
        _cell(entry, "engines_restarted", ".0f"),
    )


def ordered(content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Results in the table's order; rows that are no more are left out."""
    places = {row.name: place for place, row in enumerate(ROWS)}
    known = [(name, entry) for name, entry in content["rows"].items() if name.split()[0] in places]
    return sorted(known, key=lambda item: (places[item[0].split()[0]], item[0]))


def misses(path: Path) -> list[str]:
    """A sentence for every bar that a row misses."""
    found = []
    for name, entry in ordered(load(path)):
        row = next(row for row in ROWS if row.name == name.split()[0])
        for figure, most in row.bars.items():
            if (worst := max(_values(entry, figure), default=0.0)) > most:
                found.append(f"{name}: {figure} {worst:.2f} is above {most:g}")
        for figure in ("lost", "doubled"):
            if entry[figure]:
                found.append(f"{name}: {entry[figure]} prompts {figure}")
        if needless := max(_values(entry, "engines_restarted_needlessly")):
            found.append(f"{name}: {needless} engines restarted that nobody had struck")
        found += [f"{name}: {fault}" for fault in entry["faults"]]
    return found


def show(path: Path) -> None:
    """Prints the table."""
    table = Table(title="p50 / max")
    for column in COLUMNS:
        table.add_column(column)
    for name, entry in ordered(load(path)):
        table.add_row(*cells(name, entry))
    Console(width=170).print(table)


def write_page(page: Path, path: Path) -> None:
    """Writes the page."""
    raise NotImplementedError
