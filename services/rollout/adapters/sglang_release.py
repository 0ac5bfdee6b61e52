"""What SGLang releases promise differently: one row a release, read by the client, the launcher and the contract tests.

A row holds from its release on until the next row. Rows name where the contract suite ran on them; a row that it ran
on nowhere was read in the source. Differences no row can tell (a field that moved) are handled where they are read.
docs/engines.md lists what was found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.checksums.names import SHA256, TILED


@dataclass(frozen=True)
class Release:
    """Capabilities of SGLang from `version` on."""

    version: str
    tested_on: tuple[str, ...]
    """Devices."""
    brackets_updates: bool
    """An update must lie between `begin_weight_update` and `end_weight_update`; without: neither exists."""
    version_spans: bool
    """A completion says which version made which token; without: the version at its end only."""
    flushes_retracted: bool
    """The prefix cache can go while retracted requests wait; without: the client ends those requests first."""
    sampling_masks: bool
    """A completion can say which tokens top-p and top-k left to the sampler."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Algorithm of `weights_checker` by device; it fails on others."""


RELEASES = (
    Release(
        "0.5.15.post1",
        tested_on=("cuda",),
        brackets_updates=False,
        version_spans=False,
        flushes_retracted=False,
        sampling_masks=False,
        checksums={"cuda": TILED},
    ),
    Release(
        "0.5.21",
        tested_on=(),
        brackets_updates=True,
        version_spans=True,
        flushes_retracted=False,
        sampling_masks=True,
        checksums={"cuda": TILED},
    ),
    Release(
        "0.5.23",
        tested_on=("cpu",),
        brackets_updates=True,
        version_spans=True,
        flushes_retracted=True,
        sampling_masks=True,
        checksums={"cpu": SHA256, "cuda": TILED},
    ),
)
"""Oldest first. Older releases than the first are not supported."""


def release_of(version: str) -> Release:
    """The row for an SGLang version; the first row for an older one, the last for an unknown ("") one."""
    if not version:
        return RELEASES[-1]
    return next((row for row in reversed(RELEASES) if _numbers(row.version) <= _numbers(version)), RELEASES[0])


def is_tested(version: str, device: str) -> bool:
    """True when the contract suite ran on exactly this release and device."""
    return any(row.version == version and device in row.tested_on for row in RELEASES)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0]))
