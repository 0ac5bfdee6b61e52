"""Settings of a buffer server."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import ServiceSettings


class BufferSettings(ServiceSettings):
    """A buffer server keeps no state: any number of them may share one store."""

    port: int = Field(default=50051, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    store_url: str = "redis://127.0.0.1:6379"
    """Redis or Valkey: redis://, rediss:// (TLS) or unix://; redis+sentinel://host,host/service; redis+cluster://host."""
    store_max_bytes: int | None = Field(default=None, ge=1)
    """Memory of the store above which payload is refused with STORE_FULL; not set: 0.9 of its maxmemory."""
    store_wait_seconds: float = Field(default=20.0, ge=0)
    """Longest wait for the store at the start."""
    sweep_seconds: float = Field(default=2.0, gt=0)
    """Time between sweeps of expired leases and refreshes of the gauges."""
