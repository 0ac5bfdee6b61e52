"""How a benchmark tells its result: a table of figures beside their bars, a JSON file, an exit status."""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

_PACKAGES = ("torch", "sglang", "sglang-router", "megatron-core", "transformers", "grpcio")
_CLEANUP_SECONDS = 120
_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True)
class Figure:
    """A measured value. `bar` is "<= 600", ">= 0.9", "== 0" or empty when the value is only reported."""

    name: str
    value: float
    unit: str = ""
    bar: str = ""

    @property
    def passed(self) -> bool:
        """True when the value meets its bar, or has none."""
        if not self.bar:
            return True
        sign, limit = self.bar.split()
        return _COMPARE[sign](self.value, float(limit))


def parser(description: str) -> argparse.ArgumentParser:
    """Arguments every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, help="write the figures to this file too")
    return made


def limit(seconds: int) -> None:
    """Ends this process when it is not done in time: with an error that lets it clean up, and two minutes later for
    good. Processes that it started die with it."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CLEANUP_SECONDS)
        raise SystemExit(f"The benchmark was not done after {seconds} s; nothing is reported.")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    found: dict[str, object] = {"cpus": os.cpu_count(), "platform": platform.platform()}
    found["python"] = platform.python_version()
    models = [line.split(":", 1)[1].strip() for line in _driver_lines() if line.startswith("Model:")]
    versions = {name: _version(name) for name in _PACKAGES}
    return found | {"gpus": models, "packages": {name: version for name, version in versions.items() if version}}


def _driver_lines() -> list[str]:
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [line for file in files for line in file.read_text().splitlines()]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def finish(name: str, figures: list[Figure], json_file: Path | None, **context: object) -> int:
    """Prints and writes the figures; returns the exit status."""
    table = Table(title=name)
    for column in ("figure", "value", "bar", ""):
        table.add_column(column, justify="right" if column == "value" else "left")
    for figure in figures:
        verdict = "" if not figure.bar else "ok" if figure.passed else "[red]FALLS SHORT[/red]"
        table.add_row(figure.name, f"{figure.value:.6g} {figure.unit}".strip(), figure.bar, verdict)
    Console(width=120).print(table)
    if json_file:
        rows = [asdict(figure) | {"passed": figure.passed} for figure in figures]
        content = {"benchmark": name, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": machine()}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(content | {"figures": rows, "context": context}, indent=1) + "\n")
    return 0 if all(figure.passed for figure in figures) else 1
