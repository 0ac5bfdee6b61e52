"""All rows of the table, in its order. A new file of rows is added here."""

from __future__ import annotations

from benchmarks.recovery import disks, engines, links, network, tiers, trainers
from benchmarks.recovery.measure import Row

ROWS: list[Row] = [*engines.ROWS, *tiers.ROWS, *trainers.ROWS, *network.ROWS, *links.ROWS, *disks.ROWS]
