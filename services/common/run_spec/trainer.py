"""Settings of training and weight updates, used by the trainer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from services.common.run_spec.critic import CriticSettings
from services.common.run_spec.distillation import DistillationSettings
from services.common.run_spec.replay import ReplaySettings


class TrainerSettings(CriticSettings, DistillationSettings, ReplaySettings):
    """Training and weight updates (used by the trainer)."""

    load: str | None = None
    """Trainer checkpoint directory to start from."""
    save: str | None = None
    """Directory of trainer checkpoints; a run with checkpoints there resumes from the latest."""
    save_interval: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; not set: only at the end."""
    actor_num_nodes: int = Field(default=1, ge=1)
    """Hosts of the trainer."""
    actor_num_gpus_per_node: int = Field(default=1, ge=1)
    """Ranks per host; without a GPU each is a CPU process."""
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share one copy of the model."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of a micro-batch, each with its own part of long sequences."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples of an optimizer step; not set: follows from the batch law."""
    num_steps_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps per rollout batch."""
    use_dynamic_batch_size: bool = True
    """Pack micro-batches by tokens (max_tokens_per_gpu) instead of by count (micro_batch_size)."""
    max_tokens_per_gpu: int = Field(default=4096, ge=1)
    """Token budget of a micro-batch, for each rank that shares it; a longer sample sits alone."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Samples of a micro-batch when use_dynamic_batch_size is off."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay (AdamW)."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """First moment's decay."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Second moment's decay."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Denominator's offset."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest gradient norm; 0 clips nothing."""
    seed: int = 1234
    """Seed of the trainer."""
    bf16: bool = False
    """Train in bfloat16 with float32 main weights (CUDA)."""
    update_weights_interval: int = Field(default=1, ge=1)
    """Steps between weight updates of the engines."""
    max_staleness: int = Field(default=0, ge=0)
    """Weight versions a sample may lag behind: 0 synchronous, 1 one-step overlap, k asynchronous."""
    stale_policy: Literal["requeue", "drop", "keep", "custom"] = "requeue"
    """A group that became too stale: generate its prompt again, drop it and draw another, train it all the same, or
    ask stale_policy_path."""
    stale_policy_path: str | None = None
    """Import path of a function that the buffer asks of each stale group, "package.module.function"; implies
    stale_policy custom."""
    update_weight_buffer_size: int = Field(default=512 * 1024 * 1024, ge=1024)
    """Bytes of a weight bucket."""
    weight_group_size: int = Field(default=1, ge=1)
    """Engines that share one communicator."""
    update_weight_transport: Literal["collective", "disk"] = "collective"
    """How weights travel to the engines: over a collective, or as files in update_weight_disk_dir. What fails takes the
    other way when there is one."""
    update_weight_mode: Literal["full", "delta"] = "full"
    """Files of every tensor, or of what changed since the version before; delta needs the transport disk."""
    update_weight_disk_dir: str | None = None
    """Directory that the trainer and all rollout nodes see under this path. With the collective too: the published
    version is kept there, and a node whose engine restarts while the trainer is down takes it from there."""
    update_weight_disk_keep_files: bool = False
    """Keep the files of old versions."""
    update_weight_local_checkpoint_dir: str | None = None
    """Where a rollout node keeps a copy of its own, brought up to date by deltas; not set: in its log directory for
    deltas, and no copy for full files."""
    update_weight_delta_encoding: Literal["overwrite", "xor"] = "overwrite"
    """What a delta holds of a changed element: its new bytes, or new XOR old, which is smaller."""
    update_timeout: float = Field(default=60.0, gt=0)
    """Seconds until an engine that does not answer is left out of a weight update."""
    batch_timeout: float = Field(default=600.0, gt=0)
    """Seconds the trainer waits for a full batch before it ends the run with the reason."""
    eval_before_train: bool = True
    """Evaluate before the first step when there is an evaluation set and an eval_interval."""

    keep_checkpoints: int = Field(default=3, ge=1)
    """Newest checkpoints that the run can be restored to without generating anything again."""

    @model_validator(mode="before")
    @classmethod
    def _custom(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("stale_policy_path") and "stale_policy" not in data:
            return {**data, "stale_policy": "custom"}
        return data

    @model_validator(mode="after")
    def _check(self) -> TrainerSettings:
        world = self.actor_num_nodes * self.actor_num_gpus_per_node
        if self.context_parallel_size > 1 and world % (self.tensor_model_parallel_size * self.context_parallel_size):
            raise ValueError(
                f"tensor_model_parallel_size {self.tensor_model_parallel_size} × context_parallel_size"
                f" {self.context_parallel_size} does not divide the {world} ranks of actor_num_nodes"
                f" {self.actor_num_nodes} × actor_num_gpus_per_node {self.actor_num_gpus_per_node}"
            )
        if world % self.tensor_model_parallel_size:
            raise ValueError(
                f"tensor_model_parallel_size {self.tensor_model_parallel_size} does not divide the {world} ranks of"
                f" actor_num_nodes {self.actor_num_nodes} × actor_num_gpus_per_node {self.actor_num_gpus_per_node}"
            )
        if self.actor_num_nodes > 1:
            raise ValueError(
                f"actor_num_nodes {self.actor_num_nodes} cannot be used yet: the trainer places its ranks on one host;"
                " set actor_num_nodes to 1 and actor_num_gpus_per_node to the ranks you want"
            )
        if (self.stale_policy == "custom") != (self.stale_policy_path is not None):
            raise ValueError(
                f"stale_policy {self.stale_policy!r} with stale_policy_path {self.stale_policy_path!r}: custom needs"
                " the import path of a function, and only custom uses one"
            )
        self._check_files()
        self.critic_layout((world, self.tensor_model_parallel_size, self.context_parallel_size))
        return self

    def _check_files(self) -> None:
        if self.update_weight_mode == "delta" and self.update_weight_transport != "disk":
            raise ValueError(
                "update_weight_mode delta needs update_weight_transport disk: a collective sends all tensors; set the"
                " transport too, or leave the mode at full"
            )
        if self.update_weight_disk_dir:
            return
        local = self.update_weight_local_checkpoint_dir
        needing = {
            "update_weight_transport disk": self.update_weight_transport == "disk",
            "update_weight_disk_keep_files": self.update_weight_disk_keep_files,
            f"update_weight_local_checkpoint_dir {local}": bool(local),
        }
        for name in (name for name, given in needing.items() if given):
            raise ValueError(
                f"{name} needs update_weight_disk_dir, a directory that the trainer and all rollout nodes see"
            )

    @property
    def world_size(self) -> int:
        """Ranks of the trainer."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def micro_batch_tokens(self) -> int:
        """Token budget of a micro-batch over the ranks that share it."""
        return self.max_tokens_per_gpu * self.context_parallel_size

    @property
    def pad_multiple(self) -> int:
        """What the tokens of a pack are a multiple of: equal shares, two chunks a rank when they are cut over ranks."""
        chunks = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return self.tensor_model_parallel_size * chunks

    @property
    def critic_world_size(self) -> int:
        """Ranks of the critic; 0 without one."""
        actor = self.world_size, self.tensor_model_parallel_size, self.context_parallel_size
        return self.critic_layout(actor)[0] if self.needs_critic else 0
