"""Settings of the reward service."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import ServiceSettings


class RewardSettings(ServiceSettings):
    """Settings of the reward service."""

    port: int = Field(default=50054, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    workers: int = Field(default=2, ge=1, le=256)
    """Processes for math and for functions that are not async; each runs one item at a time."""
    default_budget_seconds: float = Field(default=30.0, gt=0)
    """Budget of a request that names none."""
    item_timeout_seconds: float = Field(default=10.0, gt=0)
    """Longest run of one item in math or a function that is not async; its worker is then replaced."""
    import_timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest import of a reward function."""
    python_path: tuple[str, ...] = ()
    """Directories with reward functions, beside the working directory."""
