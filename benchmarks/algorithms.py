"""`python -m benchmarks.algorithms`: every formula of the trainer beside an independent one, on random ragged batches.

A row's value is the largest absolute difference over all batches. Rows whose reference is not installed are named and
not counted.
"""

from __future__ import annotations

from benchmarks.algorithm_cases import Case, cases
from benchmarks.algorithm_cases.batch import SEEDS, Ragged, ragged
from benchmarks.report import Figure, finish, limit, parser

LIMIT_SECONDS = 900


def main() -> int:
    """Measures; returns the exit status."""
    arguments = parser("Every formula of the trainer beside an independent one.").parse_args()
    limit(LIMIT_SECONDS)
    batches = [ragged(seed) for seed in SEEDS]
    rows = list(cases())
    figures = [_figure(case, batches) for case in rows if case.available]
    missing = sorted({case.needs for case in rows if not case.available})
    if missing:
        print(f"{len(rows) - len(figures)} of {len(rows)} rows are left out: {', '.join(missing)} not installed")
    return finish("formulas", figures, arguments.json, batches=len(batches), left_out=missing)


def _figure(case: Case, batches: list[Ragged]) -> Figure:
    worst = max(case.error(batch) for batch in batches)
    return Figure(f"{case.family} · {case.name} ({case.reference})", worst, bar=f"<= {case.bar:g}")


if __name__ == "__main__":
    raise SystemExit(main())
