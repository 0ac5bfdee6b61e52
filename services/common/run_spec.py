"""The settings of a run: one validated model, keys grouped by tier.

Keys are the snake_case forms of the flag names that users of this kind of system know. The model knows
nothing of files or services: that paths exist and addresses answer is checked by the console and by the
tier that uses them.

Invariants: every key name is unique over all groups (so that `--key` is unambiguous), and
`rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from services.common.settings import StrictModel

ADVANTAGE_ESTIMATORS = ("grpo",)
GRADERS = ("exact_match", "math", "custom")


class DataSettings(StrictModel):
    """The prompts (used by the buffer)."""

    prompt_data: str | None = None
    """JSONL file of prompts, one object a line."""
    input_key: str = "input"
    """Field with the prompt: a string, or a list of chat messages."""
    label_key: str | None = None
    """Field with the expected answer."""
    metadata_key: str | None = None
    """Field with an object that graders and generate functions receive."""
    apply_chat_template: bool = False
    """Render the prompt with the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template."""
    rollout_max_prompt_len: int | None = Field(default=None, ge=1)
    """Leave out rows whose prompt has more tokens than this."""
    rollout_shuffle: bool = False
    """Shuffle the rows anew in every epoch."""
    rollout_seed: int = 42
    """Seed of the shuffle and of deterministic sampling."""
    num_epoch: int | None = Field(default=None, ge=1)
    """Passes over the data; not set: as many as num_rollout needs."""
    eval_prompt_data: tuple[str, ...] = ()
    """Evaluation sets: name and JSONL path in turn; a single path is called "eval"."""
    eval_input_key: str | None = None
    """input_key of the evaluation sets; the same as input_key when not set."""
    eval_label_key: str | None = None
    """label_key of the evaluation sets; the same as label_key when not set."""
    async_buffer_size: int | None = Field(default=None, ge=1)
    """Most finished groups that wait for the trainer; not set: bounded by max_staleness alone."""
    max_prompt_attempts: int = Field(default=5, ge=1)
    """Failed attempts at one prompt after which it is evicted as FAILED."""

    @field_validator("eval_prompt_data")
    @classmethod
    def _pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) == 1:
            return ("eval", *value)
        if len(value) % 2:
            raise ValueError("write name and path in turn, as in: --eval-prompt-data math math.jsonl")
        return value

    @property
    def eval_datasets(self) -> dict[str, str]:
        """Path of every evaluation set by name."""
        return dict(zip(self.eval_prompt_data[::2], self.eval_prompt_data[1::2], strict=True))


class RolloutSettings(StrictModel):
    """Generation (used by rollout nodes)."""

    hf_checkpoint: str
    """Hugging Face checkpoint directory: tokenizer, configuration and first weights."""
    engine: Literal["sglang", "simulated"] = "sglang"
    """Inference engine; "simulated" has no model and serves load and fault tests."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engines and ranks run; "auto" takes CUDA when there is a GPU."""
    num_rollout: int = Field(ge=1)
    """Steps of the run: rollout batches that are trained."""
    rollout_batch_size: int = Field(ge=1)
    """Prompts (groups) of a step."""
    n_samples_per_prompt: int = Field(default=1, ge=1)
    """Samples of a group."""
    rollout_max_response_len: int = Field(default=256, ge=1)
    """Longest response in tokens."""
    rollout_max_context_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus response; not set: the model's own limit."""
    rollout_temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; it also divides the trainer's logits."""
    rollout_top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus probability mass."""
    rollout_top_k: int = -1
    """Most likely tokens kept; -1 keeps all."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the tokenizer's end token."""
    rollout_num_gpus: int = Field(default=1, ge=1)
    """Devices for engines, over all nodes; without a GPU each stands for one CPU engine rank."""
    rollout_num_gpus_per_engine: int = Field(default=1, ge=1)
    """Devices of one engine (its tensor parallel size)."""
    custom_generate_function_path: str | None = None
    """Import path of a generate function, "package.module.function"."""
    max_turns: int = Field(default=1, ge=1)
    """Most turns of a generate function."""
    max_inflight: int | None = Field(default=None, ge=1)
    """Most groups in flight on a node; not set: enough to fill its engines."""
    lease_ttl: float = Field(default=60.0, gt=0)
    """Seconds until a lease that its node does not extend expires."""
    generate_timeout: float = Field(default=600.0, gt=0)
    """Longest time of one sample in seconds, tools included."""
    use_fault_tolerance: bool = True
    """Restart engines that die."""
    rollout_health_check_interval: float = Field(default=2.0, gt=0)
    """Seconds between health checks of an engine."""
    rollout_health_check_timeout: float = Field(default=5.0, gt=0)
    """Seconds until a health check counts as failed."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the SGLang server, by its own names."""
    sglang_router_strategy: Literal["round_robin", "random", "cache_aware", "power_of_two", "manual"] = "round_robin"
    """Routing policy."""
    sglang_router: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of sglang-router, by its own names."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to requests in flight when weights arrive."""
    simulated: dict[str, Any] = Field(default_factory=dict)
    """Settings of the simulated engine (tokens_per_second, mean_response_length, ...)."""
    eval_interval: int | None = Field(default=None, ge=1)
    """Steps between evaluations; not set: never."""
    n_samples_per_eval_prompt: int = Field(default=1, ge=1)
    """Samples per evaluation prompt."""
    eval_temperature: float | None = Field(default=None, ge=0)
    """Temperature of evaluations, 0 is greedy; rollout_temperature when not set."""
    eval_top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus mass of evaluations; rollout_top_p when not set."""
    eval_max_response_len: int | None = Field(default=None, ge=1)
    """Longest evaluation response; rollout_max_response_len when not set."""

    @property
    def engine_count(self) -> int:
        """Engines of the run."""
        return self.rollout_num_gpus // self.rollout_num_gpus_per_engine


class RewardSettings(StrictModel):
    """Scoring (used by rollout nodes when they call the reward service)."""

    rm_type: str = "exact_match"
    """Grader: exact_match, math or custom."""
    custom_rm_path: str | None = None
    """Import path of a reward function, "package.module.function"; implies rm_type custom."""
    rm_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the grader."""
    rm_timeout: float = Field(default=30.0, gt=0)
    """Seconds until a sample counts as unscored."""
    group_rm: bool = False
    """Give a custom function all samples of a group in one call."""

    @model_validator(mode="before")
    @classmethod
    def _custom(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("custom_rm_path") and "rm_type" not in data:
            return {**data, "rm_type": "custom"}
        return data

    @model_validator(mode="after")
    def _check(self) -> RewardSettings:
        if self.rm_type not in GRADERS:
            raise ValueError(f"rm_type {self.rm_type!r} is not a grader; use one of {', '.join(GRADERS)}")
        if self.rm_type == "custom" and not self.custom_rm_path:
            raise ValueError("rm_type custom needs custom_rm_path, the import path of the reward function")
        if self.custom_rm_path and self.rm_type != "custom":
            raise ValueError(f"custom_rm_path is set but rm_type is {self.rm_type!r}; set rm_type to custom")
        return self


class TrainerSettings(StrictModel):
    """Training and weight updates (used by the trainer)."""

    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """policy_loss: reinforcement learning. sft_loss: cross-entropy on the labels, without engines."""
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
    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples of an optimizer step; not set: follows from the batch law."""
    num_steps_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps per rollout batch."""
    use_dynamic_batch_size: bool = True
    """Pack micro-batches by tokens (max_tokens_per_gpu) instead of by count (micro_batch_size)."""
    max_tokens_per_gpu: int = Field(default=4096, ge=1)
    """Token budget of a micro-batch; a longer sample sits alone."""
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
    advantage_estimator: str = "grpo"
    """How advantages follow from rewards."""
    disable_grpo_std_normalization: bool = False
    """Leave out the division by the group's standard deviation."""
    eps_clip: float = Field(default=0.2, ge=0)
    """Lower clip range of the ratio (and upper, unless eps_clip_high is set)."""
    eps_clip_high: float | None = Field(default=None, ge=0)
    """Upper clip range of the ratio."""
    use_kl_loss: bool = False
    """Add a KL term against the reference model."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """KL estimator."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    calculate_per_token_loss: bool = False
    """Mean over all tokens of the step instead of the mean over samples of their token means."""
    use_rollout_logprobs: bool = False
    """Take the engines' log-probs as the old policy instead of recomputing them."""
    ref_load: str | None = None
    """Hugging Face checkpoint of the reference model; hf_checkpoint when not set."""
    seed: int = 1234
    """Seed of the trainer."""
    bf16: bool = False
    """Train in bfloat16 with float32 main weights (CUDA)."""
    update_weights_interval: int = Field(default=1, ge=1)
    """Steps between weight updates of the engines."""
    max_staleness: int = Field(default=0, ge=0)
    """Weight versions a sample may lag behind: 0 synchronous, 1 one-step overlap, k asynchronous."""
    stale_policy: Literal["requeue", "drop"] = "requeue"
    """A group that became too stale: generate its prompt again, or drop it and draw another."""
    update_weight_buffer_size: int = Field(default=512 * 1024 * 1024, ge=1024)
    """Bytes of a weight bucket."""
    weight_group_size: int = Field(default=1, ge=1)
    """Engines that share one communicator."""
    update_timeout: float = Field(default=60.0, gt=0)
    """Seconds until an engine that does not answer is left out of a weight update."""
    batch_timeout: float = Field(default=600.0, gt=0)
    """Seconds the trainer waits for a full batch before it ends the run with the reason."""
    eval_before_train: bool = True
    """Evaluate before the first step when there is an evaluation set and an eval_interval."""

    @field_validator("advantage_estimator")
    @classmethod
    def _estimator(cls, value: str) -> str:
        if value not in ADVANTAGE_ESTIMATORS:
            raise ValueError(f"not an advantage estimator; use one of {', '.join(ADVANTAGE_ESTIMATORS)}")
        return value

    @model_validator(mode="after")
    def _check(self) -> TrainerSettings:
        world = self.actor_num_nodes * self.actor_num_gpus_per_node
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
        if self.kl_loss_coef and not self.use_kl_loss:
            raise ValueError(f"kl_loss_coef {self.kl_loss_coef} has no effect without use_kl_loss; set it too")
        return self

    @property
    def world_size(self) -> int:
        """Ranks of the trainer."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node


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
        if rollout.rollout_num_gpus % rollout.rollout_num_gpus_per_engine:
            raise ValueError(
                f"rollout_num_gpus_per_engine {rollout.rollout_num_gpus_per_engine} does not divide"
                f" rollout_num_gpus {rollout.rollout_num_gpus}"
            )
        if trainer.save_interval and not trainer.save:
            raise ValueError(f"save_interval {trainer.save_interval} needs save, the directory of checkpoints")
        if rollout.eval_interval and not self.data.eval_prompt_data:
            raise ValueError(
                f"eval_interval {rollout.eval_interval} needs eval_prompt_data, name and path of a JSONL file"
            )
        if trainer.loss_type == "sft_loss" and not self.data.label_key:
            raise ValueError("loss_type sft_loss needs label_key, the field with the answer to learn")
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
