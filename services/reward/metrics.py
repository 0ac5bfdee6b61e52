"""Prometheus metrics of the reward service."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

ITEMS = Counter(
    "tetrarch_reward_items", "Items scored, by grader and outcome (SCORED or a reason)", ["grader", "outcome"]
)
ITEM_SECONDS = Histogram(
    "tetrarch_reward_item_seconds",
    "Time of the grader for one item",
    ["grader"],
    buckets=(0.0001, 0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60),
)
WORKERS_REPLACED = Counter("tetrarch_reward_workers_replaced", "Worker processes killed and replaced", ["why"])
