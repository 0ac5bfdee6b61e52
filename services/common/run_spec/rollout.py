"""Settings of generation, used by rollout nodes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.common.settings import StrictModel


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
    """Samples of a group (rollouts, where a generate function returns several samples of one). With remax the first is
    decoded greedily, compared with, and not trained."""
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
    dynamic_sampling_filter_path: str | None = None
    """Import path of a function that keeps or rejects a scored group, "package.module.function", or
    "check_reward_nonzero_std"; a rejected group is replaced by one more prompt."""
    max_filter_rejections: int | None = Field(default=None, ge=1)
    """Groups rejected in a row after which the run fails; not set: 20 × rollout_batch_size."""
    over_sampling_batch_size: int | None = Field(default=None, ge=1)
    """Groups admitted per step; those that a step does not take wait for the next. Not set: rollout_batch_size."""
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
    rollout_health_check_interval: float = Field(default=1.0, gt=0)
    """Seconds between health checks of an engine."""
    rollout_health_check_timeout: float = Field(default=2.0, gt=0)
    """Seconds until a health check counts as failed: the engine leaves the routing then, and is replaced after
    30 s of silence."""
    load_debug_rollout_data: str | None = None
    """Train the groups of this file, which `tetrarch export-samples` or save_debug_rollout_data wrote, instead of
    generating: no engine is started. "{rollout_id}" in it stands for the step, from 0; without, every step goes on in
    the same file."""
    save_debug_rollout_data: str | None = None
    """Write every step's samples with their tokens: a directory, in which files are called <step>.jsonl, or a path
    with "{rollout_id}" for the step, from 0, that ends in .jsonl or .parquet."""
    debug_rollout_only: bool = False
    """Generate and score, but train nothing: engines keep the first weights, and nothing is saved as a checkpoint."""
    debug_train_only: bool = False
    """Start no engine; needs load_debug_rollout_data, which implies it."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the SGLang server, by its own names."""
    sglang_router_strategy: Literal["round_robin", "random", "cache_aware", "power_of_two", "manual"] = "round_robin"
    """Routing policy."""
    sglang_router: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of sglang-router, by its own names."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to requests in flight when weights arrive."""
    weight_staging: Literal["auto", "off"] = "auto"
    """Where new weights arrive. "auto": beside those that an engine serves, which stands still only to take them over,
    where its memory suffices; "off": in their place, and engines stand still from the first byte on."""
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
