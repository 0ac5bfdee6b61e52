"""A pytest plugin: one line a clause instead of what pytest says; the tests' fixtures find the server in it."""

from __future__ import annotations

import os
from collections import Counter

import pytest


class Report:
    """Where the server is, and what the clauses came to.

    Args:
        target: host:port of the server under test.
        run_prefix: beginning of the ids of all runs.
    """

    def __init__(self, target: str, run_prefix: str) -> None:
        self.target, self.run_prefix = target, run_prefix
        self.counts: Counter[str] = Counter()
        self._chapter = ""
        # pytest takes stdout away while tests run.
        self._out = os.fdopen(os.dup(1), "w")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Prints a clause once it is decided."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            outcome = {"passed": "ok", "failed": "FAILED", "skipped": "left out"}[report.outcome]
        elif report.failed:
            outcome = "FAILED"
        else:
            return
        self.counts[outcome] += 1
        chapter = report.nodeid.split("::")[0].rsplit("/", 1)[-1].removeprefix("test_").removesuffix(".py")
        if chapter != self._chapter:
            self._chapter = chapter
            self._say(f"\n{chapter.replace('_', ' ')}")
        self._say(f"  {outcome:<9} {sentence(report.nodeid)}{why(report, outcome)}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot even be read is a failure too."""
        if report.failed:
            self.counts["FAILED"] += 1
            self._say(f"  FAILED    {report.nodeid}: {_last_line(report)}")

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def summary(self) -> str:
        """The last line."""
        counts = [f"{self.counts[name]} {name}" for name in ("ok", "FAILED", "left out")]
        return f"\n{self.target}: {', '.join(counts)}."


def sentence(nodeid: str) -> str:
    """The clause that a test's name states."""
    name = nodeid.split("::")[-1]
    words, bracket, case = name.partition("[")
    text = words.removeprefix("test_").replace("_", " ")
    return text[:1].upper() + text[1:] + (f" ({case[:-1]})" if bracket else "")


def why(report: pytest.TestReport, outcome: str) -> str:
    """What to add when it is not ok."""
    if outcome == "ok":
        return "."
    if outcome == "left out":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return f": {reason.removeprefix('Skipped: ')}."
    return f": {_last_line(report)}"


def _last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:300]
