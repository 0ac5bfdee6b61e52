"""The node's counters as Prometheus metrics, read at every scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.rollout.core.engine_state import EngineState
from services.rollout.core.node import Node

_PREFIX = "tetrarch_rollout_"
_COUNTERS = {
    "finished_group_count": "Groups stored.",
    "failed_group_count": "Groups given back or evicted.",
    "unscored_sample_count": "Samples without a reward.",
    "lost_lease_count": "Leases lost before their group was put.",
    "rejected_group_count": "Groups that the sampling filter rejected.",
    "unfinished_group_count": "Groups given back with what was made so far.",
    "resumed_sample_count": "Samples taken up from what an earlier lease had made.",
    "retried_request_count": "Requests sent again after the router gave them up.",
    "continued_sample_count": "Samples taken up again after an engine ended them half way.",
    "generated_token_count": "Response tokens generated.",
    "idle_seconds": "Seconds with no prompt to work on.",
    "generate_seconds": "Seconds of generation, summed over samples.",
    "score_seconds": "Seconds of scoring, summed over groups.",
    "teacher_seconds": "Seconds of asking the teacher, summed over groups.",
    "pause_seconds": "Seconds engines stood still for weight updates.",
    "transfer_seconds": "Seconds in which weights arrived, summed over engines.",
    "received_bytes": "Bytes of weights received, summed over engines.",
    "update_count": "Weight updates committed, summed over engines.",
}


class NodeCollector:
    """A collector for `prometheus_client`'s registry."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        """All metrics of the node now."""
        counters = self._node.counters
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=getattr(counters, name))
        outcomes = CounterMetricFamily(_PREFIX + "put", "Groups put, by outcome.", labels=["outcome"])
        for outcome, count in dict(counters.put_outcomes).items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        session = self._node.session
        running = session.running_group_count if session else 0
        yield GaugeMetricFamily(_PREFIX + "running_group_count", "Groups in flight.", value=running)
        states = GaugeMetricFamily(_PREFIX + "engine_count", "Engines by state.", labels=["state"])
        versions = GaugeMetricFamily(_PREFIX + "engine_weight_version", "Verified version.", labels=["engine_id"])
        slots = list(self._node.slots)
        for state in EngineState:
            states.add_metric([state.name], sum(slot.state is state for slot in slots))
        for slot in slots:
            versions.add_metric([slot.engine_id], slot.version)
        yield states
        yield versions
