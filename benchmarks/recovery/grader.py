"""The reward function of the recovery run: a user's plug-in, run by the reward service in a process of its own.

A reward that follows from the response alone, about half of them 1, so that groups have an advantage.
"""

from __future__ import annotations

import zlib
from typing import Any

from services.common.fault_points import reach

PATH = "benchmarks.recovery.grader.reward"
POINT = "plugin.scoring"


def reward(sample: Any) -> float:
    """0 or 1."""
    reach(POINT)
    return float(zlib.crc32(sample.response.encode()) & 1)
