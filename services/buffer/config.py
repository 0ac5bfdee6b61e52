"""Settings of a buffer server."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import ServiceSettings


class BufferSettings(ServiceSettings):
    """A buffer server keeps no state: any number of them may share one store."""

    port: int = Field(default=50051, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    store_url: str = "redis://127.0.0.1:6379"
    """Redis or Valkey server: redis://, rediss:// (TLS) or unix://."""
    store_wait_seconds: float = Field(default=20.0, ge=0)
    """Longest wait for the store at the start."""
    sweep_seconds: float = Field(default=2.0, gt=0)
    """Time between sweeps of expired leases and refreshes of the gauges."""
