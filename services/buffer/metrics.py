"""Gauges of the buffer. Every buffer server reports the same store, so take the maximum, not the sum, over servers.

Invariant: what a run does not have any more is not reported: a gauge that stays where it was would be a lie.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Gauge

from services.buffer.core.records import Stats

_DEPTH = Gauge("tetrarch_buffer_groups", "Groups by state", ["run", "state"])
_DRAWN = Gauge("tetrarch_buffer_drawn", "Groups opened so far", ["run"])
_DRAWN_FROM = Gauge("tetrarch_buffer_drawn_from", "Groups opened so far, by data set of a mixture", ["run", "dataset"])
_AGE = Gauge("tetrarch_buffer_oldest_age_seconds", "Time that the oldest group is in its state", ["run", "state"])
_CAPACITY = Gauge("tetrarch_buffer_capacity", "Prompts that may be leased now", ["run"])
_EXPIRED = Gauge("tetrarch_buffer_leases_expired", "Leases that expired and were given back", ["run"])
_STALE = Gauge("tetrarch_buffer_groups_stale", "Groups that left READY because they had become too stale", ["run"])
_EVICTED = Gauge("tetrarch_buffer_groups_evicted", "Groups dropped, by reason", ["run", "reason"])
_STALENESS = Gauge("tetrarch_buffer_staleness_groups", "Groups by versions behind when taken", ["run", "versions"])
_BYTES = Gauge("tetrarch_buffer_payload_bytes", "Bytes of stored payload", ["run"])
_VERSION = Gauge("tetrarch_buffer_policy_version", "Published weight version", ["run"])
_USED = Gauge("tetrarch_buffer_store_used_bytes", "Memory the store uses, all runs together")
_LIMIT = Gauge("tetrarch_buffer_store_limit_bytes", "Memory above which payload is refused; 0 without a bound")

_STATES = ("pending", "leased", "ready", "reserved", "consumed", "evicted")
_OPEN_STATES = _STATES[:4]
_SINGLE = (_DRAWN, _CAPACITY, _EXPIRED, _STALE, _BYTES, _VERSION)
_reported: dict[str, set[tuple[Gauge, str]]] = {}
"""Labelled children by run."""


def report(run_id: str, stats: Stats) -> None:
    """Sets the gauges of a run."""
    _DRAWN.labels(run_id).set(stats.drawn)
    _CAPACITY.labels(run_id).set(stats.capacity)
    _EXPIRED.labels(run_id).set(stats.lease_expired)
    _STALE.labels(run_id).set(stats.stale)
    _BYTES.labels(run_id).set(stats.payload_bytes)
    _VERSION.labels(run_id).set(stats.policy_version)
    _USED.set(stats.store_used_bytes)
    _LIMIT.set(stats.store_limit_bytes)
    _set(run_id, _DEPTH, {state: getattr(stats, state) for state in _STATES})
    _set(run_id, _AGE, {state: stats.oldest_age_seconds.get(state.upper(), 0.0) for state in _OPEN_STATES})
    _set(run_id, _DRAWN_FROM, stats.drawn_by_dataset)
    _set(run_id, _EVICTED, stats.evicted_by_reason)
    _set(run_id, _STALENESS, {str(versions): count for versions, count in stats.staleness.items()})


def forget_all_but(run_ids: set[str]) -> None:
    """Takes the gauges of ended and deleted runs out of the report."""
    for run_id in _reported.keys() - run_ids:
        for gauge, label in _reported.pop(run_id):
            gauge.remove(run_id, label)
        for gauge in _SINGLE:
            gauge.remove(run_id)


def _set(run_id: str, gauge: Gauge, values: Mapping[str, float]) -> None:
    for label, value in values.items():
        gauge.labels(run_id, label).set(value)
        _reported.setdefault(run_id, set()).add((gauge, label))
