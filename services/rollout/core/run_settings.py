"""What a rollout node must know of a run, free of pydantic and of the keys of other tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.records import SamplingParams
from services.rollout.core.completion import NOTHING, Recording
from services.rollout.core.engine_port import LaunchSpec


@dataclass(frozen=True)
class FleetSettings:
    """Which engines a run wants. Two runs with equal settings can share running engines."""

    engine: str
    launch: LaunchSpec
    engine_count: int
    router_strategy: str
    router_options: Mapping[str, Any] = field(default_factory=dict)
    restart: bool = True
    health_interval: float = 1.0
    health_timeout: float = 2.0


@dataclass(frozen=True)
class ScoreSettings:
    """How samples are scored. `timeout` in seconds."""

    grader: str
    custom_path: str = ""
    options_json: str = "{}"
    timeout: float = 30.0
    grouped: bool = False


@dataclass(frozen=True)
class TeacherSettings:
    """The engine that grades tokens. `top_k`: most likely tokens wanted at each place, 0 for none; `timeout`: seconds
    for a sample."""

    url: str
    top_k: int = 0
    timeout: float = 120.0


@dataclass(frozen=True)
class FilesSettings:
    """Where weights are as files. `directory`: shared with the trainer; `local`: for a copy, empty for the node's own
    choice; `copies_full`: whether full files are copied as well."""

    directory: str
    local: str = ""
    copies_full: bool = False


@dataclass(frozen=True)
class RunSettings:
    """A run as seen by a rollout node. Times in seconds, lengths in tokens."""

    run_id: str
    checkpoint: str
    sft: bool
    sampling: SamplingParams
    eval_sampling: SamplingParams
    score: ScoreSettings
    fleet: FleetSettings
    samples_per_prompt: int = 1
    """Rollouts of a prompt."""
    greedy_first: bool = False
    """The first rollout of every prompt is decoded greedily."""
    samples_per_eval_prompt: int = 1
    max_turns: int = 1
    max_inflight: int | None = None
    max_context_length: int | None = None
    max_prompt_attempts: int = 5
    lease_ttl: float = 60.0
    generate_timeout: float = 600.0
    update_timeout: float = 60.0
    pause_mode: str = "retract"
    max_staleness: int = 0
    files: FilesSettings | None = None
    record: Recording = NOTHING
    """What training wants to know of generations."""
    teacher: TeacherSettings | None = None
    generate_path: str | None = None
    filter_path: str | None = None
    """Function that keeps or rejects a scored group."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Every key of the run by its flat name, for generate functions that ask for it."""
