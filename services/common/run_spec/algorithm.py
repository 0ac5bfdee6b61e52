"""Settings of the algorithm: advantages, losses, KL, corrections; part of the trainer's group."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.common.run_spec.rules import WHITENED, algorithm_rules, broken
from services.common.settings import StrictModel

ADVANTAGE_ESTIMATORS = (
    "grpo",
    "dr_grpo",
    "gspo",
    "cispo",
    "rloo",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
    "custom",
)
Level = Literal["token", "sequence", "geometric"]
Normalizer = Literal["token_mean", "sample_mean", "rollout_mean", "constant"]


class AlgorithmSettings(StrictModel):
    """What a step optimizes (used by the trainer)."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """policy_loss: reinforcement learning. sft_loss: cross-entropy on the labels, without engines. custom_loss: the
    function of custom_loss_function_path."""
    custom_loss_function_path: str | None = None
    """Import path of a loss, "package.module.function"; implies loss_type custom_loss."""
    advantage_estimator: str = "grpo"
    """How advantages follow from rewards, and which policy loss: gspo and cispo have their own, the others clip."""
    custom_advantage_function_path: str | None = None
    """Import path of a function of a step's samples that gives each its advantage, "package.module.function"; implies
    advantage_estimator custom."""
    disable_grpo_std_normalization: bool = False
    """Leave out the division by the group's standard deviation."""
    disable_rewards_normalization: bool = False
    """Take rewards as they are, without the group's mean."""
    normalize_advantages: bool = False
    """Whiten advantages over all trained tokens of a step; on by itself with reinforce_plus_plus and
    reinforce_plus_plus_baseline."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of token rewards (ppo, reinforce_plus_plus)."""
    lambd: float = Field(default=1.0, ge=0, le=1)
    """λ of generalized advantage estimation (ppo)."""
    eps_clip: float = Field(default=0.2, ge=0)
    """Lower clip range of the ratio (and upper, unless eps_clip_high is set); cispo: 1 or more is no lower bound."""
    eps_clip_high: float | None = Field(default=None, ge=0)
    """Upper clip range of the ratio."""
    eps_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip: where the advantage is negative the loss is at most this many times it; not set: no such bound."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    calculate_per_token_loss: bool = False
    """Mean over all tokens of the step; the same as loss_normalizer token_mean."""
    loss_normalizer: Normalizer | None = None
    """What a sum over tokens is divided by. token_mean: the step's trained tokens. sample_mean: tokens of the sample,
    then samples of the step. rollout_mean: the same with all samples of one rollout as one. constant: loss_constant
    times samples. Not set: token_mean with calculate_per_token_loss, constant with dr_grpo, else sample_mean."""
    loss_constant: float | None = Field(default=None, gt=0)
    """Tokens that count as one sample with loss_normalizer constant; not set: rollout_max_response_len."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference model in the rewards (ppo, reinforce_plus_plus and its baseline form)."""
    use_kl_loss: bool = False
    """Add a KL term against the reference model to the loss."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term of the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """KL estimator, in rewards and loss."""
    use_unbiased_kl: bool = False
    """Weight the KL of the loss by the ratio current / old, with its gradient."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: the coefficient follows the measured KL towards kl_target."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL per token that the adaptive controller aims at."""
    kl_horizon: int = Field(default=10000, ge=1)
    """Samples over which the adaptive controller reacts."""
    ref_load: str | None = None
    """Hugging Face checkpoint of the reference model; hf_checkpoint when not set."""
    ref_update_interval: int | None = Field(default=None, ge=1)
    """Steps after which the reference becomes the current policy; not set: never."""

    use_rollout_logprobs: bool = False
    """Take the engines' log-probs as the old policy instead of recomputing them."""
    keep_old_actor: bool = False
    """Take as the old policy, for every token, the weights of the version that generated it."""
    use_tis: bool = False
    """Weight tokens by the importance ratio trainer / engine, limited by tis_clip."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Upper bound of the importance ratio."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    """Lower bound of the importance ratio."""
    tis_level: Level = "token"
    """What a ratio is taken of: a token, a whole response, or the geometric mean of a response."""
    tis_mode: Literal["truncate", "clip", "mask"] = "truncate"
    """truncate: cap above. clip: both bounds. mask: 0 outside of the bounds (IcePop)."""
    use_rs: bool = False
    """Reject what lies outside of rs_clip_low and rs_clip, besides the weights of use_tis."""
    rs_level: Level = "geometric"
    """What is rejected as one."""
    rs_clip: float | None = Field(default=None, gt=0)
    """Upper bound; tis_clip when not set."""
    rs_clip_low: float | None = Field(default=None, ge=0)
    """Lower bound; 1 / upper bound when not set."""
    rs_veto_threshold: float | None = Field(default=None, gt=0, lt=1)
    """Reject a response with any token of a smaller ratio; not set: none."""
    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the step."""
    custom_tis_function_path: str | None = None
    """Import path of a correction, "package.module.function", in place of use_tis and use_rs."""
    use_opsm: bool = False
    """Off-policy sequence masking: leave out responses with negative advantage whose mean old − current log-prob is
    above opsm_delta."""
    opsm_delta: float = Field(default=1e-4, ge=0)
    """Bound of use_opsm."""
    use_decoupled_loss: bool = False
    """Decoupled PPO: clip against the policy at the step's begin, weight by its ratio to the policy that generated."""
    behave_weight_cap: float = Field(default=5.0, gt=1)
    """Tokens with a larger weight are left out of the decoupled loss."""

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        implied = {
            "custom_loss_function_path": ("loss_type", "custom_loss"),
            "custom_advantage_function_path": ("advantage_estimator", "custom"),
        }
        for path, (key, value) in implied.items():
            if data.get(path) and key not in data:
                data = {**data, key: value}
        if data.get("advantage_estimator") in WHITENED and data.get("loss_type") != "sft_loss":
            data = {"normalize_advantages": True, **data}
        return data

    @field_validator("advantage_estimator")
    @classmethod
    def _estimator(cls, value: str) -> str:
        if value not in ADVANTAGE_ESTIMATORS:
            raise ValueError(f"not an advantage estimator; use one of {', '.join(ADVANTAGE_ESTIMATORS)}")
        return value

    @property
    def normalizer(self) -> Normalizer:
        """`loss_normalizer`, or what stands for it."""
        if self.loss_normalizer:
            return self.loss_normalizer
        if self.calculate_per_token_loss:
            return "token_mean"
        return "constant" if self.advantage_estimator == "dr_grpo" else "sample_mean"

    @property
    def needs_critic(self) -> bool:
        """Values are learned."""
        return self.loss_type != "sft_loss" and self.advantage_estimator == "ppo"

    @property
    def needs_greedy_sample(self) -> bool:
        """The first rollout of every group is decoded greedily, is compared with, and is not trained (remax)."""
        return self.loss_type != "sft_loss" and self.advantage_estimator == "remax"

    @property
    def needs_reference(self) -> bool:
        """Log-probs of a reference model are used."""
        return self.loss_type != "sft_loss" and (self.use_kl_loss or self.kl_coef > 0)

    @property
    def corrects(self) -> bool:
        """The difference between trainer and engine changes the loss."""
        return self.use_tis or self.use_rs or self.custom_tis_function_path is not None

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        if sentence := broken(algorithm_rules(self)):
            raise ValueError(sentence)
        return self
