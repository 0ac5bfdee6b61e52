"""What the loop says: metrics of an update, the line of a step, and why a batch did not come. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.common.errors import Code, ServiceError
from services.trainer.core.fleet import describe_node
from services.trainer.core.records import GroupCounts, NodeView
from services.trainer.core.weights import UpdateReport


def update_metrics(report: UpdateReport) -> dict[str, float]:
    """Seconds of an update in all and by part; what it moved, and for whom."""
    rate = report.total_bytes / report.wire_seconds / 1e9 if report.wire_seconds else 0.0
    return {f"update_{part}_seconds": value for part, value in report.seconds.items()} | {
        "update_total_seconds": report.total_seconds,
        "update_wire_seconds": report.wire_seconds,
        "update_pause_seconds": report.pause_seconds,
        "update_bytes": float(report.total_bytes),
        "update_file_bytes": float(report.file_bytes),
        "update_changed_share": report.changed_share,
        "update_gigabytes_per_second": rate,
        "update_bucket_count": float(report.bucket_count),
        "update_verified_tensor_count": float(report.verified_tensor_count),
        "update_engine_count": float(len(report.committed)),
        "update_staged_engine_count": float(report.staged_count),
        "update_failed_engine_count": float(len(report.failed) - len(report.late)),
        "update_late_engine_count": float(len(report.late)),
    }


def update_message(version: int, report: UpdateReport) -> str:
    """The line of an update."""
    names = f"{len(report.committed)} engine{'s' if len(report.committed) != 1 else ''}"
    rate = f" ({report.total_bytes / report.wire_seconds / 1e9:.2f} GB/s)" if report.wire_seconds else ""
    text = f"version {version} on {names}, {report.total_bytes / 1e6:.1f} MB{rate} in {report.total_seconds:.2f} s"
    text += f", generation paused {report.pause_seconds:.2f} s"
    if report.file_bytes:
        text += f", {report.file_bytes / 1e6:.1f} MB in files"
    left_out = ((len(report.failed) - len(report.late), "failed"), (len(report.late), "late"))
    return text + "".join(f", {count} {what}" for count, what in left_out if count)


def step_message(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """The line of a step. What a run does not have, a reward or a loss, is left out."""
    parts = [f"{name} {metrics[key]:{form}}" for name, key, form in _OF_STEP if key in metrics]
    return f"step {step + 1}/{total}: {', '.join([*parts, ''])}{metrics['total_seconds']:.2f} s"


_OF_STEP = (("reward", "reward_mean", ".3f"), ("loss", "loss", ".4f"))


def batch_timeout(
    where: tuple[str, int, int], waited: float, counts: GroupCounts, nodes: Sequence[NodeView]
) -> ServiceError:
    """The error of a step whose groups did not come. `where`: run, step, groups asked for; `waited`: seconds."""
    run_id, step, count = where
    said = "; ".join(describe_node(node) for node in nodes) or "no rollout node is registered"
    evicted = ", ".join(f"{number} {reason}" for reason, number in counts.evicted.items()) or "none"
    return ServiceError(
        Code.DEADLINE_EXCEEDED,
        "BATCH_TIMEOUT",
        f"No {count} groups for step {step} within {waited:.0f} s (batch_timeout): {counts.ready} are ready,"
        f" {counts.leased} leased, {counts.pending} pending, evicted: {evicted}; {said}.",
        run_id=run_id,
        step=step,
    )
