"""Which settings of the algorithm do not go together, each with the sentence that says so and the remedy.

Pairs of whether a rule is broken and what to say then; the lists are the documentation of the rules. Nothing is taken
in silence that would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from services.common.settings import StrictModel

if TYPE_CHECKING:
    from services.common.run_spec.algorithm import AlgorithmSettings
    from services.common.run_spec.rollout import RolloutSettings
    from services.common.run_spec.trainer import TrainerSettings

Rules = Iterable[tuple[bool, str]]

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose advantages are nothing without whitening."""
GROUP_RELATIVE = ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that compare the samples of a group."""
BUILT_IN_FILTER = "check_reward_nonzero_std"
_DIVIDED = ("grpo", "gspo", "cispo")
_RETURNS = ("reinforce_plus_plus", "ppo")
_KL_IN_REWARDS = (*WHITENED, "ppo")


def algorithm_rules(settings: AlgorithmSettings) -> Iterator[tuple[bool, str]]:
    """Rules within the algorithm's settings."""
    yield from _supervised_rules(settings)  # first: with labels, what the others advise has no effect either
    yield from _loss_rules(settings)
    yield from _advantage_rules(settings)
    yield from _kl_rules(settings)
    yield from _old_policy_rules(settings)
    yield from _correction_rules(settings)


def run_rules(trainer: TrainerSettings, rollout: RolloutSettings, *, engineless: bool) -> Iterator[tuple[bool, str]]:
    """Rules between the algorithm's settings and others."""
    name, samples = trainer.advantage_estimator, rollout.n_samples_per_prompt
    learns = trainer.loss_type != "sft_loss" and not rollout.debug_rollout_only
    compared = name in GROUP_RELATIVE and not trainer.disable_rewards_normalization and not trainer.use_opd
    yield (
        learns and samples == 1 and compared,
        f"advantage_estimator {name} with n_samples_per_prompt 1: it compares the samples of a group, so that every"
        " advantage would be 0; take 2 samples or more, or an estimator without groups (reinforce_plus_plus, ppo)",
    )
    yield (
        learns and samples == 1 and name == "remax",
        "advantage_estimator remax with n_samples_per_prompt 1: the first sample of a group is its greedy baseline and"
        " is not trained; take 2 samples or more",
    )
    yield from _greedy_rules(trainer, rollout)
    path = rollout.dynamic_sampling_filter_path or ""
    yield (
        samples == 1 and path.rpartition(".")[2] == BUILT_IN_FILTER,
        f"dynamic_sampling_filter_path {path} with n_samples_per_prompt 1: a single reward has no deviation, so that"
        " every group would be rejected; take 2 samples or more, or leave the filter out",
    )
    fresh = trainer.max_staleness == 0 and trainer.stale_policy not in ("keep", "custom")
    yield (
        trainer.keep_old_actor and fresh and trainer.update_weights_interval == 1,
        "keep_old_actor has no effect with max_staleness 0: every token is of the weights that are trained; raise"
        " max_staleness, or leave keep_old_actor out",
    )
    yield (
        trainer.keep_old_actor and engineless,
        "keep_old_actor with load_debug_rollout_data: the versions of its samples are another run's; use"
        " use_rollout_logprobs, or leave keep_old_actor out",
    )
    yield (
        trainer.keep_old_actor and trainer.use_routing_replay and not trainer.use_rollout_routing_replay,
        "keep_old_actor with use_routing_replay: the old pass is of several weights, whose routing is not that of the"
        " trained ones; set use_rollout_routing_replay, or leave one of them out",
    )
    once = trainer.num_steps_per_rollout == 1
    yield (
        trainer.use_opsm and trainer.use_decoupled_loss and once,
        "use_opsm has no effect with use_decoupled_loss and num_steps_per_rollout 1: the old policy is that at the"
        " step's begin, which is the current one; take more optimizer steps, or leave use_opsm out",
    )
    same = once and not (trainer.use_rollout_logprobs or trainer.keep_old_actor)
    yield (
        trainer.use_opsm and same,
        "use_opsm has no effect with num_steps_per_rollout 1: the old policy is the current one; set"
        " use_rollout_logprobs or keep_old_actor, or take more optimizer steps",
    )


def _greedy_rules(trainer: TrainerSettings, rollout: RolloutSettings) -> Iterator[tuple[bool, str]]:
    """Rules of groups whose first rollout is a baseline."""
    steps, groups, samples = trainer.num_steps_per_rollout, rollout.rollout_batch_size, rollout.n_samples_per_prompt
    # Baselines are n places apart, so that two rollouts side by side are never both one; a single one may be.
    yield (
        trainer.needs_greedy_sample and groups * samples < 2 * steps,
        f"advantage_estimator remax with rollout_batch_size {groups} × n_samples_per_prompt {samples} and"
        f" num_steps_per_rollout {steps}: an optimizer step of one rollout may have the greedy baseline of a group and"
        f" nothing to train; take at most {groups * samples // 2} optimizer steps",
    )
    yield (
        trainer.needs_greedy_sample and rollout.load_debug_rollout_data is not None,
        "advantage_estimator remax with load_debug_rollout_data: a file does not say which of its samples were decoded"
        " greedily, so that an ordinary one would be the baseline; take another estimator, such as rloo, or generate",
    )


def broken(rules: Rules) -> str:
    """What to say of the first broken rule, or an empty string."""
    return next((sentence for wrong, sentence in rules if wrong), "")


def _changed(settings: StrictModel, key: str) -> bool:
    return getattr(settings, key) != type(settings).model_fields[key].default


def _unused(settings: AlgorithmSettings, keys: Iterable[str], used: bool, needed: str) -> Rules:
    """Keys that have an effect only when `used`, which is when `needed` is set."""
    return [
        (
            not used and _changed(settings, key),
            f"{key} {getattr(settings, key)} has no effect without {needed}; set that too, or leave {key} out",
        )
        for key in keys
    ]


def _loss_rules(s: AlgorithmSettings) -> Iterator[tuple[bool, str]]:
    name = s.advantage_estimator
    yield (
        (s.loss_type == "custom_loss") != (s.custom_loss_function_path is not None),
        f"loss_type {s.loss_type} with custom_loss_function_path {s.custom_loss_function_path!r}: custom_loss needs the"
        " import path of a function, and only custom_loss uses one",
    )
    yield (
        s.loss_type == "custom_loss" and name in ("gspo", "cispo"),
        f"advantage_estimator {name} with loss_type custom_loss: what sets {name} apart is its loss, and yours takes"
        " its place; use grpo, which has the same advantages",
    )
    yield (
        s.eps_clip_c is not None and name == "cispo",
        f"eps_clip_c {s.eps_clip_c} has no effect with advantage_estimator cispo, whose loss has no dual clip; leave it"
        " out",
    )
    yield (
        bool(s.calculate_per_token_loss and s.loss_normalizer not in (None, "token_mean")),
        f"calculate_per_token_loss with loss_normalizer {s.loss_normalizer}: both say what a sum over tokens is divided"
        " by; leave one of them out",
    )
    yield from _unused(s, ["loss_constant"], s.normalizer == "constant", "loss_normalizer constant")


def _advantage_rules(s: AlgorithmSettings) -> Iterator[tuple[bool, str]]:
    name = s.advantage_estimator
    yield (
        (name == "custom") != (s.custom_advantage_function_path is not None),
        f"advantage_estimator {name} with custom_advantage_function_path {s.custom_advantage_function_path!r}: custom"
        " needs the import path of a function, and only custom uses one",
    )
    yield (
        name in WHITENED and not s.normalize_advantages and s.loss_type != "sft_loss",
        f"advantage_estimator {name} without normalize_advantages: its advantages are made for whitening over the whole"
        " step; set normalize_advantages, or leave it out, which sets it",
    )
    yield (
        s.disable_grpo_std_normalization and name not in _DIVIDED,
        f"disable_grpo_std_normalization has no effect with advantage_estimator {name}, which divides by no group's"
        " deviation; leave it out",
    )
    yield (
        s.disable_rewards_normalization and name not in (*GROUP_RELATIVE, "remax"),
        f"disable_rewards_normalization has no effect with advantage_estimator {name}, which takes rewards as they are;"
        " leave it out",
    )
    yield (
        s.disable_grpo_std_normalization and s.disable_rewards_normalization,
        "disable_grpo_std_normalization has no effect with disable_rewards_normalization, which takes rewards as they"
        " are, undivided; leave one of them out",
    )
    yield from _unused(s, ["gamma"], name in _RETURNS, "advantage_estimator reinforce_plus_plus or ppo")
    yield from _unused(s, ["lambd"], name == "ppo", "advantage_estimator ppo")


def _kl_rules(s: AlgorithmSettings) -> Iterator[tuple[bool, str]]:
    name, adaptive = s.advantage_estimator, s.kl_controller == "adaptive"
    yield (
        bool(s.kl_loss_coef) and not s.use_kl_loss,
        f"kl_loss_coef {s.kl_loss_coef} has no effect without use_kl_loss; set it too",
    )
    yield (
        s.kl_coef > 0 and name not in _KL_IN_REWARDS,
        f"kl_coef {s.kl_coef} with advantage_estimator {name}: its advantages have no rewards of tokens that a KL could"
        " go into; put the KL into the loss with use_kl_loss and kl_loss_coef",
    )
    yield (
        s.kl_coef > 0 and s.kl_loss_coef > 0,
        f"kl_coef {s.kl_coef} with kl_loss_coef {s.kl_loss_coef}: the KL to the reference would count twice; keep it in"
        " the rewards (kl_coef) or in the loss (kl_loss_coef)",
    )
    yield (
        s.use_kl_loss and not s.kl_loss_coef and "kl_loss_coef" not in s.model_fields_set,
        "use_kl_loss without kl_loss_coef adds nothing to the loss, while its reference costs memory and passes; set"
        " kl_loss_coef, to 0 if the KL is only to be watched, or leave use_kl_loss out",
    )
    yield adaptive and s.kl_target is None, "kl_controller adaptive needs kl_target, the KL per token to aim at"
    yield (
        adaptive and not s.kl_coef and not s.kl_loss_coef,
        "kl_controller adaptive needs a coefficient to begin with; set kl_coef, or use_kl_loss and kl_loss_coef",
    )
    yield from _unused(s, ["kl_target", "kl_horizon"], adaptive, "kl_controller adaptive")
    yield from _unused(s, ["use_unbiased_kl"], s.use_kl_loss, "use_kl_loss")
    reference = ["ref_load", "ref_update_interval", "kl_loss_type"]
    yield from _unused(s, reference, s.needs_reference, "use_kl_loss or kl_coef")


def _old_policy_rules(s: AlgorithmSettings) -> Iterator[tuple[bool, str]]:
    yield (
        s.use_rollout_logprobs and s.keep_old_actor,
        "use_rollout_logprobs with keep_old_actor: both say which policy is the old one; leave one of them out",
    )
    yield (
        s.use_rollout_logprobs and s.use_tis,
        "use_rollout_logprobs with use_tis: with the engines' log-probs as the old policy the loss's own ratio is taken"
        " to the engine already, and the weights would count it twice; leave one of them out",
    )
    yield (
        s.use_rollout_logprobs and s.use_decoupled_loss,
        "use_rollout_logprobs with use_decoupled_loss: the decoupled loss clips against the policy at the step's begin"
        " and weights by the engines' log-probs as it is; leave use_rollout_logprobs out",
    )
    weighted = s.use_tis or s.custom_tis_function_path is not None
    yield (
        s.use_decoupled_loss and weighted and not s.keep_old_actor,
        "use_decoupled_loss with use_tis or custom_tis_function_path: both weight by the ratio of the trainer to the"
        " engine; leave one of them out, or set keep_old_actor, which tells the two ratios apart",
    )
    yield (
        s.use_decoupled_loss and s.advantage_estimator in ("gspo", "cispo"),
        f"use_decoupled_loss with advantage_estimator {s.advantage_estimator}: its weights are for the clipped ratio of"
        " single tokens; use another estimator, or leave use_decoupled_loss out",
    )
    yield from _unused(s, ["behave_weight_cap"], s.use_decoupled_loss, "use_decoupled_loss")
    yield from _unused(s, ["opsm_delta"], s.use_opsm, "use_opsm")


def _correction_rules(s: AlgorithmSettings) -> Iterator[tuple[bool, str]]:
    yield (
        s.custom_tis_function_path is not None and (s.use_tis or s.use_rs),
        "custom_tis_function_path with use_tis or use_rs: the function takes their place; leave them out",
    )
    yield (
        s.use_tis and s.tis_level == "token" and s.advantage_estimator == "gspo",
        "advantage_estimator gspo with use_tis at tis_level token: its ratios are of whole sequences, and weights of"
        " tokens would undo that; set tis_level to sequence or geometric, or leave use_tis out",
    )
    yield (
        s.use_tis and s.tis_clip_low > 0 and s.tis_mode == "truncate",
        f"tis_clip_low {s.tis_clip_low} has no effect with tis_mode truncate, which caps above only; set tis_mode to"
        " clip or mask, or leave tis_clip_low out",
    )
    yield (
        s.use_tis and s.tis_clip_low >= s.tis_clip,
        f"tis_clip_low {s.tis_clip_low} is not below tis_clip {s.tis_clip}, so that no ratio could lie between them;"
        " lower it",
    )
    high = s.tis_clip if s.rs_clip is None else s.rs_clip
    low = 1 / high if s.rs_clip_low is None else s.rs_clip_low
    yield (
        s.use_rs and low >= high,
        f"use_rs with the bounds {low:g} (rs_clip_low, or 1 / rs_clip) and {high:g} (rs_clip, or tis_clip): no ratio"
        " could lie between them; set rs_clip above 1, or a lower rs_clip_low",
    )
    yield from _unused(s, ["tis_clip_low", "tis_level", "tis_mode", "tis_batch_normalize"], s.use_tis, "use_tis")
    yield from _unused(s, ["tis_clip"], s.use_tis or s.use_rs, "use_tis or use_rs")
    yield from _unused(s, ["rs_level", "rs_clip", "rs_clip_low", "rs_veto_threshold"], s.use_rs, "use_rs")


_POLICY_ONLY = (
    "custom_advantage_function_path",
    "advantage_estimator",
    "disable_grpo_std_normalization",
    "disable_rewards_normalization",
    "gamma",
    "lambd",
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "kl_coef",
    "ref_load",
    "ref_update_interval",
    "entropy_coef",
    "normalize_advantages",
    "use_rollout_logprobs",
    "keep_old_actor",
    "use_decoupled_loss",
    "use_opsm",
    "use_tis",
    "use_rs",
    "custom_tis_function_path",
)


def _supervised_rules(s: AlgorithmSettings) -> Rules:
    return [
        (
            s.loss_type == "sft_loss" and _changed(s, key),
            f"{key} {getattr(s, key)} has no effect with loss_type sft_loss, which learns labels; leave it out",
        )
        for key in _POLICY_ONLY
    ]
