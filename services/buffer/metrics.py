"""Gauges of the buffer. Every buffer server reports the same store, so take the maximum, not the sum, over servers."""

from __future__ import annotations

from prometheus_client import Gauge

from services.buffer.core.records import Stats

_DEPTH = Gauge("tetrarch_buffer_groups", "Groups by state", ["run", "state"])
_DRAWN = Gauge("tetrarch_buffer_drawn", "Groups opened so far", ["run"])
_CAPACITY = Gauge("tetrarch_buffer_capacity", "Prompts that may be leased now", ["run"])
_EXPIRED = Gauge("tetrarch_buffer_leases_expired", "Leases that expired and were given back", ["run"])
_STALE = Gauge("tetrarch_buffer_groups_stale", "Groups given back because they had become too stale", ["run"])
_EVICTED = Gauge("tetrarch_buffer_groups_evicted", "Groups dropped, by reason", ["run", "reason"])
_STALENESS = Gauge("tetrarch_buffer_staleness_groups", "Groups by versions behind when taken", ["run", "versions"])
_BYTES = Gauge("tetrarch_buffer_payload_bytes", "Bytes of stored payload", ["run"])
_VERSION = Gauge("tetrarch_buffer_policy_version", "Published weight version", ["run"])

_STATES = ("pending", "leased", "ready", "reserved", "consumed", "evicted")


def report(run_id: str, stats: Stats) -> None:
    """Sets the gauges of a run."""
    for state in _STATES:
        _DEPTH.labels(run_id, state).set(getattr(stats, state))
    _DRAWN.labels(run_id).set(stats.drawn)
    _CAPACITY.labels(run_id).set(stats.capacity)
    _EXPIRED.labels(run_id).set(stats.lease_expired)
    _STALE.labels(run_id).set(stats.stale)
    _BYTES.labels(run_id).set(stats.payload_bytes)
    _VERSION.labels(run_id).set(stats.policy_version)
    for reason, count in stats.evicted_by_reason.items():
        _EVICTED.labels(run_id, reason).set(count)
    for versions, count in stats.staleness.items():
        _STALENESS.labels(run_id, versions).set(count)
