"""The settings of a run: one validated model, keys grouped by tier.

Keys are the snake_case forms of the flag names that users of this kind of system know. The model knows
nothing of files or services: that paths exist and addresses answer is checked by the console and by the
tier that uses them.

Invariants: every key name is unique over all groups (so that `--key` is unambiguous), and
`rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout`.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import field_validator, model_validator

from services.common.run_spec.algorithm import ADVANTAGE_ESTIMATORS
from services.common.run_spec.data import DataSettings, PromptSet
from services.common.run_spec.replay import replay_problem
from services.common.run_spec.reward import GRADERS, RewardSettings
from services.common.run_spec.rollout import RolloutSettings
from services.common.run_spec.rules import broken, run_rules
from services.common.run_spec.trainer import TrainerSettings
from services.common.sample_file import step_path
from services.common.settings import StrictModel

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "GRADERS",
    "GROUPS",
    "DataSettings",
    "PromptSet",
    "RewardSettings",
    "RolloutSettings",
    "RunSpec",
    "ServiceAddresses",
    "TrainerSettings",
    "key_groups",
]


class ServiceAddresses(StrictModel):
    """Where running services listen; all not set: the console starts them on this machine."""

    buffer: str | None = None
    """host:port of the buffer."""
    reward: str | None = None
    """host:port of the reward service."""
    trainer: str | None = None
    """host:port of the trainer."""


class RunSpec(StrictModel):
    """A run."""

    run_id: str = "run"
    """Name of the run: letters, digits, '-', '_' and '.'."""
    run_dir: str = "runs"
    """Directory in which the run's own directory is made (metrics, logs, checkpoints)."""
    data: DataSettings = DataSettings()
    """The prompts."""
    rollout: RolloutSettings
    """Generation."""
    reward: RewardSettings = RewardSettings()
    """Scoring."""
    trainer: TrainerSettings = TrainerSettings()
    """Training and weight updates."""
    services: ServiceAddresses = ServiceAddresses()
    """Addresses of running services."""

    @field_validator("run_id")
    @classmethod
    def _run_id(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
            raise ValueError("use 1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit")
        return value

    @model_validator(mode="before")
    @classmethod
    def _derive_batch(cls, data: Any) -> Any:
        """Fills global_batch_size from the batch law when it is not given."""
        if not isinstance(data, dict):
            return data
        rollout, trainer = data.get("rollout"), data.get("trainer") or {}
        if not isinstance(rollout, dict) or not isinstance(trainer, dict) or trainer.get("global_batch_size"):
            return data
        samples = rollout.get("rollout_batch_size"), rollout.get("n_samples_per_prompt", 1)
        steps = trainer.get("num_steps_per_rollout", 1)
        if not all(isinstance(x, int) and x > 0 for x in (*samples, steps)) or samples[0] * samples[1] % steps:
            return data
        return {**data, "trainer": {**trainer, "global_batch_size": samples[0] * samples[1] // steps}}

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        rollout, trainer = self.rollout, self.trainer
        made = rollout.rollout_batch_size * rollout.n_samples_per_prompt
        if trainer.global_batch_size is None:
            raise ValueError(
                f"the batch law cannot be kept: rollout_batch_size {rollout.rollout_batch_size} × n_samples_per_prompt"
                f" {rollout.n_samples_per_prompt} = {made} samples, which num_steps_per_rollout"
                f" {trainer.num_steps_per_rollout} does not divide; choose a number of steps that does"
            )
        used = trainer.global_batch_size * trainer.num_steps_per_rollout
        if made != used:
            raise ValueError(
                f"the batch law is violated: rollout_batch_size {rollout.rollout_batch_size} × n_samples_per_prompt"
                f" {rollout.n_samples_per_prompt} = {made}, but global_batch_size {trainer.global_batch_size} ×"
                f" num_steps_per_rollout {trainer.num_steps_per_rollout} = {used}; change one so that both are equal"
            )
        admitted = rollout.over_sampling_batch_size
        if admitted is not None and admitted < rollout.rollout_batch_size:
            raise ValueError(
                f"over_sampling_batch_size {admitted} is below rollout_batch_size {rollout.rollout_batch_size}, so no"
                " batch could ever fill; raise it, or leave it out"
            )
        if rollout.rollout_num_gpus % rollout.rollout_num_gpus_per_engine:
            raise ValueError(
                f"rollout_num_gpus_per_engine {rollout.rollout_num_gpus_per_engine} does not divide"
                f" rollout_num_gpus {rollout.rollout_num_gpus}"
            )
        temperature, kept = rollout.rollout_temperature, trainer.use_top_p_replay
        if problem := trainer.opd_problem(trainer.loss_type, temperature, top_p_replay=kept):
            raise ValueError(problem)
        if problem := trainer.critic_problem(rollout.num_rollout):
            raise ValueError(problem)
        if trainer.save_interval and not trainer.save:
            raise ValueError(f"save_interval {trainer.save_interval} needs save, the directory of checkpoints")
        if rollout.eval_interval and not self.data.eval_prompt_data:
            raise ValueError(
                f"eval_interval {rollout.eval_interval} needs eval_prompt_data, name and path of a JSONL file"
            )
        if trainer.loss_type == "sft_loss" and not (self.data.label_key or self.data.prompt_data_mixture):
            raise ValueError("loss_type sft_loss needs label_key, the field with the answer to learn")
        return self

    @model_validator(mode="after")
    def _check_overlong(self) -> RunSpec:
        buffer, longest = self.reward.overlong_buffer_len, self.rollout.rollout_max_response_len
        if buffer is None:
            return self
        if self.trainer.loss_type == "sft_loss":
            raise ValueError("overlong_buffer_len lowers rewards, and loss_type sft_loss has none; leave it out")
        if buffer > longest:
            raise ValueError(
                f"overlong_buffer_len {buffer} is more than rollout_max_response_len {longest}, so every response would"
                " be penalized; choose a smaller one"
            )
        return self

    @model_validator(mode="after")
    def _check_debug(self) -> RunSpec:
        rollout = self.rollout
        if rollout.debug_train_only and not rollout.load_debug_rollout_data:
            raise ValueError("debug_train_only needs load_debug_rollout_data, the file whose groups are trained")
        if rollout.debug_rollout_only and self.engineless:
            other = "load_debug_rollout_data" if rollout.load_debug_rollout_data else "loss_type sft_loss"
            raise ValueError(f"debug_rollout_only generates and {other} does not; leave one of them out")
        if rollout.save_debug_rollout_data:
            try:
                step_path(rollout.save_debug_rollout_data, 0)
            except ValueError as error:
                raise ValueError(f"save_debug_rollout_data {rollout.save_debug_rollout_data}: {error}") from error
        return self

    @model_validator(mode="after")
    def _check_replay(self) -> RunSpec:
        rollout = self.rollout
        problem = replay_problem(
            self.trainer, engineless=self.engineless, top_p=rollout.rollout_top_p, top_k=rollout.rollout_top_k
        )
        if problem:
            raise ValueError(problem)
        return self

    @property
    def engineless(self) -> bool:
        """True when nothing is generated: labels are learned, or the groups of a file are trained again."""
        return self.trainer.loss_type == "sft_loss" or self.rollout.load_debug_rollout_data is not None

    @model_validator(mode="after")
    def _check_mixture(self) -> RunSpec:
        for part in self.data.prompt_data_mixture:
            if self.trainer.loss_type == "sft_loss" and not (part.label_key or self.data.label_key):
                raise ValueError(
                    f"loss_type sft_loss needs label_key, the field with the answer to learn; data set {part.name} of"
                    " prompt_data_mixture has none"
                )
            if part.rm_type == "custom" and not self.reward.custom_rm_path:
                raise ValueError(
                    f"data set {part.name} of prompt_data_mixture has rm_type custom; set custom_rm_path, the import"
                    " path of the reward function"
                )
        return self

    @model_validator(mode="after")
    def _check_algorithm(self) -> RunSpec:
        if sentence := broken(run_rules(self.trainer, self.rollout, engineless=self.engineless)):
            raise ValueError(sentence)
        return self

    @property
    def directory(self) -> str:
        """The run's own directory."""
        return f"{self.run_dir.rstrip('/')}/{self.run_id}"


GROUPS: dict[str, type[StrictModel]] = {
    "data": DataSettings,
    "rollout": RolloutSettings,
    "reward": RewardSettings,
    "trainer": TrainerSettings,
}
"""Groups of a run file whose keys are flags."""


def key_groups() -> dict[str, str]:
    """Group of every key; "" for keys at the top of the file."""
    owners = {name: group for group, model in GROUPS.items() for name in model.model_fields}
    return owners | {"run_id": "", "run_dir": ""}
