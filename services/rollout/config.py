"""Settings of a rollout node."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import ServiceSettings


class RolloutNodeSettings(ServiceSettings):
    """A rollout node; everything about a run comes from the buffer."""

    port: int = Field(default=50053, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    buffer_address: str = "127.0.0.1:50051"
    """host:port of the buffer."""
    reward_address: str = "127.0.0.1:50054"
    """host:port of the reward service."""
    node_id: str | None = None
    """Stable name of this node, unique among nodes; host name and port when not set."""
    poll_seconds: float = Field(default=1.0, gt=0)
    """Seconds between looks for a new run."""
    linger_seconds: float = Field(default=30.0, ge=0)
    """Seconds engines outlive their run, for a next run with the same engine settings."""
    member_ttl: float = Field(default=10.0, gt=0)
    """Seconds until this node counts as gone in the registry unless it renews."""
    engine_count: int | None = Field(default=None, ge=1)
    """Engines of this node; not set: all engines of the run (one node)."""
    log_dir: str | None = None
    """Directory of engine and router logs; not set: none are written."""
