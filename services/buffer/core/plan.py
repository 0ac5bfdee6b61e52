"""What the buffer takes from the settings of a run, and which of them may change when a run is opened again.

Knows the keys of a run, not where they come from. Invariant: two plans that differ only in changeable keys
draw the same prompts in the same order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.common.errors import invalid_field

CHANGEABLE = frozenset(
    {
        # how long a run goes on, and what is kept or looked at on the way
        "rollout.num_rollout", "trainer.save_interval", "trainer.load", "trainer.eval_before_train",
        "data.eval_prompt_data", "data.eval_input_key", "data.eval_label_key",
        "rollout.eval_interval", "rollout.n_samples_per_eval_prompt", "rollout.eval_temperature",
        "rollout.eval_top_p", "rollout.eval_max_response_len",
        # where it runs
        "run_dir", "rollout.device", "rollout.rollout_num_gpus", "rollout.rollout_num_gpus_per_engine",
        "rollout.sglang", "rollout.sglang_router", "rollout.sglang_router_strategy", "trainer.weight_group_size",
        "trainer.update_weight_buffer_size", "trainer.update_weight_transport", "trainer.update_weight_mode",
        "trainer.update_weight_disk_dir", "trainer.update_weight_disk_keep_files",
        "trainer.update_weight_local_checkpoint_dir", "trainer.update_weight_delta_encoding",
        # how long things may take
        "rollout.lease_ttl", "rollout.max_inflight", "rollout.generate_timeout", "rollout.use_fault_tolerance",
        "rollout.rollout_health_check_interval", "rollout.rollout_health_check_timeout", "reward.rm_timeout",
        "trainer.update_timeout", "trainer.batch_timeout", "data.max_prompt_attempts", "data.async_buffer_size",
        "data.max_malformed_rows",
        # how much is kept, and when to give up
        "data.run_max_bytes", "trainer.keep_checkpoints", "rollout.max_filter_rejections",
        "rollout.over_sampling_batch_size", "data.buffer_filter_path",
    }
)  # fmt: skip
"""Keys that may differ when a run is opened again."""
_CHANGEABLE_GROUPS = ("services.", "logging.", "log.")


@dataclass(frozen=True)
class RunPlan:
    """Settings of a run that the buffer acts on."""

    batch: int
    """Groups of a step."""
    samples: int
    """Samples of a group."""
    steps: int
    max_staleness: int
    interval: int
    """Steps between weight updates."""
    stale_policy: str
    sft: bool
    most_ready: int
    """Most READY groups held; 0 is no limit of its own."""
    max_attempts: int
    epochs: int | None
    saves: bool
    """Whether the trainer writes checkpoints on the way, so that consumed payloads are kept until one covers them."""
    admitted: int
    """Groups admitted per step; what a step does not take waits for the next."""
    max_rejections: int
    """Groups that the sampling filter may reject in a row before the run fails."""
    max_bytes: int
    """Most bytes of payload of the run; 0 is no limit of its own."""
    keep_checkpoints: int
    """Newest checkpoints whose payload is kept."""
    picks: bool
    """Whether a function of the user picks the groups of a batch."""

    def draw_limit(self, row_count: int) -> int:
        """Prompts that can be drawn in all; -1 when there is no end."""
        return -1 if self.epochs is None else self.epochs * row_count


def make_plan(spec: Any) -> RunPlan:
    """Plan of a RunSpec. Raises INVALID_FIELD for combinations that could never fill a batch."""
    data, rollout, trainer = spec.data, spec.rollout, spec.trainer
    batch = rollout.rollout_batch_size
    if data.async_buffer_size is not None and data.async_buffer_size < batch:
        raise invalid_field(
            "async_buffer_size",
            data.async_buffer_size,
            f"it is below rollout_batch_size {batch}, so no batch could ever fill; use {batch} or more",
        )
    return RunPlan(
        batch=batch,
        samples=rollout.n_samples_per_prompt,
        steps=rollout.num_rollout,
        max_staleness=trainer.max_staleness,
        interval=trainer.update_weights_interval,
        stale_policy=trainer.stale_policy,
        sft=spec.engineless,
        most_ready=data.async_buffer_size or 0,
        max_attempts=data.max_prompt_attempts,
        epochs=data.num_epoch,
        saves=trainer.save_interval is not None,
        admitted=rollout.over_sampling_batch_size or batch,
        max_rejections=rollout.max_filter_rejections or 20 * batch,
        max_bytes=data.run_max_bytes or 0,
        keep_checkpoints=trainer.keep_checkpoints,
        picks=data.buffer_filter_path is not None,
    )


def flatten(spec: dict[str, Any]) -> dict[str, Any]:
    """'group.key' → value of a resolved spec."""
    flat: dict[str, Any] = {}
    for name, value in spec.items():
        if isinstance(value, dict) and name in ("data", "rollout", "reward", "trainer", "services"):
            flat |= {f"{name}.{key}": leaf for key, leaf in value.items()}
        else:
            flat[name] = value
    return flat


def fixed_differences(old_json: str, new_json: str) -> list[str]:
    """Keys that differ between two specs and may not, each as "key (old → new)"."""
    old, new = flatten(json.loads(old_json)), flatten(json.loads(new_json))
    return [
        f"{key} ({old.get(key)!r} → {new.get(key)!r})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and key not in CHANGEABLE
        and not key.startswith(_CHANGEABLE_GROUPS)
        # A run made before there was the key did not use what it turns on.
        and (key in old or new[key])
    ]
