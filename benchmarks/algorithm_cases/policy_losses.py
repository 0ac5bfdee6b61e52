"""Policy losses with their gradients, clip fractions and normalisers; the supervised loss; the over-long penalty."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.algorithm_cases import Case, distance
from benchmarks.algorithm_cases.batch import WIDTH, Ragged
from services.common.run_spec.algorithm import Normalizer
from services.trainer.core.algorithms.normalizers import sample_weights, token_weights
from services.trainer.core.algorithms.overlong import overlong_penalty
from services.trainer.core.algorithms.policy_losses import (
    PolicyLossSettings,
    PolicyTerms,
    decoupled,
    policy_terms,
    supervised_loss,
)

LOSSES = {
    "PPO clip": PolicyLossSettings(0.2, 0.2),
    "clip-higher": PolicyLossSettings(0.2, 0.28),
    "dual clip": PolicyLossSettings(0.2, 0.2, dual_clip=1.3),
    "GSPO": PolicyLossSettings(0.01, 0.02, kind="gspo"),
    "CISPO": PolicyLossSettings(0.2, 0.28, kind="cispo"),
}
NO_LOWER_BOUND = PolicyLossSettings(1.0, 0.28, kind="cispo")
TRL_NORMALIZERS: dict[str, Normalizer] = {
    "grpo": "sample_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "constant",
}


def cases() -> Iterator[Case]:
    """Rows of this family."""
    for name, settings in LOSSES.items():
        yield Case("policy loss", f"{name}, token mean", "verl", partial(_verl, settings), needs="verl")
        if settings.kind != "cispo":
            yield Case("policy loss", f"{name}, sample mean", "trl", partial(_trl, settings, "grpo"), needs="trl")
        yield Case("policy loss", f"{name}, by token", "float64", partial(_paper, settings), bar=5e-6)
    yield Case("policy loss", "CISPO without a lower bound", "trl", partial(_trl, NO_LOWER_BOUND, "cispo"), needs="trl")
    clip = LOSSES["PPO clip"]
    yield Case("policy loss", "PPO clip, token mean", "trl", partial(_trl, clip, "bnpo"), needs="trl")
    yield Case("policy loss", "PPO clip, constant (Dr. GRPO)", "trl", partial(_trl, clip, "dr_grpo"), needs="trl")
    yield Case("policy loss", "decoupled PPO, with cap", "float64", _decoupled)
    yield Case("policy loss", "no clip, ratio 1, KL 0 where old is current", "exact", _on_policy, bar=0.0)
    yield Case("supervised loss", "SFT", "torch cross_entropy, float64", _supervised, bar=5e-6)
    yield Case("reward", "soft over-long penalty", "trl", _overlong, bar=1e-12, needs="trl")


def _ours(batch: Ragged, settings: PolicyLossSettings) -> tuple[torch.Tensor, PolicyTerms]:
    """Current log-probs with gradient [k], and the terms of advantages that are the samples' rewards."""
    current = batch.flat(batch.current).requires_grad_()
    return current, policy_terms(
        current,
        batch.flat(batch.old),
        batch.flat(torch.from_numpy(batch.rewards)),
        settings,
        batch.segments,
        batch.count,
    )


def reduced(objective: torch.Tensor, batch: Ragged, kind: Normalizer, constant: float | None = None) -> torch.Tensor:
    """A batch's loss as the trainer makes it of a loss by token."""
    shares = sample_weights(batch.trained, kind, rollouts=batch.rollouts.tolist(), constant=constant)
    return (objective * torch.from_numpy(token_weights(batch.trained, shares.weights))).sum() / int(shares.counts.sum())


def _advantages(batch: Ragged) -> torch.Tensor:
    """[s, w], float64."""
    return torch.from_numpy(batch.rewards).double()[:, None].expand(batch.mask.shape)


def _verl(settings: PolicyLossSettings, batch: Ragged) -> float:
    """Loss, gradient, clip fraction, KL. A batch without tokens has no mean there."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    if not batch.mask.any():
        return float(len(_ours(batch, settings)[1].objective))
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=settings.eps_low,
        clip_ratio_low=settings.eps_low,
        clip_ratio_high=settings.eps_high,
        clip_ratio_c=settings.dual_clip or 1e9,
    )
    leaf = batch.current.double().requires_grad_()
    theirs, metrics = get_policy_loss_fn("vanilla" if settings.kind == "clip" else settings.kind)(
        old_log_prob=batch.old.double(),
        log_prob=leaf,
        advantages=_advantages(batch),
        response_mask=batch.mask.double(),
        loss_agg_mode="token-mean",
        config=config,
    )
    current, terms = _ours(batch, settings)
    loss = reduced(terms.objective, batch, "token_mean")
    loss.backward()
    theirs.backward()
    return max(
        distance(loss, theirs),
        distance(current.grad, leaf.grad[batch.mask]),
        distance(terms.clipped.mean(), metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]),
        distance(terms.log_ratio.mean(), metrics["actor/ppo_kl"]),
    )


def _trl(settings: PolicyLossSettings, loss_type: str, batch: Ragged) -> float:
    """Loss and gradient of trl's `_compute_loss`, with the model's part replaced by given log-probs."""
    from trl import GRPOTrainer

    if not batch.mask.any():
        return float(len(_ours(batch, settings)[1].objective))
    leaf = batch.current.double().requires_grad_()
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if settings.kind == "gspo" else "token",
        beta=0.0,
        args=types.SimpleNamespace(use_bias_correction_kl=False, delta=settings.dual_clip, steps_per_generation=1),
        loss_type=loss_type,
        epsilon_low=settings.eps_low,
        epsilon_high=settings.eps_high + (loss_type == "cispo"),  # of CISPO it bounds the ratio itself
        use_vllm=False,
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=WIDTH,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
    )
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": batch.mask.double(),
        "advantages": _advantages(batch)[:, 0],
        "old_per_token_logps": batch.old.double(),
        "num_items_in_batch": batch.mask.double().sum(),
    }
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    current, terms = _ours(batch, settings)
    loss = reduced(terms.objective, batch, TRL_NORMALIZERS[loss_type], WIDTH)
    loss.backward()
    theirs.backward()
    return max(distance(loss, theirs), distance(current.grad, leaf.grad[batch.mask]))


def _paper(settings: PolicyLossSettings, batch: Ragged) -> float:
    """Loss of every token, and the gradient of their sum over samples of means."""
    low, high = 1 - settings.eps_low, 1 + settings.eps_high
    leaf = batch.flat(batch.current).double().requires_grad_()
    rows: list[torch.Tensor] = []
    for new, old, advantage in zip(
        leaf.split(batch.trained), batch.flat(batch.old).double().split(batch.trained), batch.rewards, strict=True
    ):
        a = float(advantage)
        ratio = (new - old).exp()
        if settings.kind == "gspo":
            ratio = (new - old).mean().exp().expand(len(new)) if len(new) else ratio
        if settings.kind == "cispo":
            row = -ratio.clamp(low, high).detach() * a * new
        else:
            row = -torch.minimum(ratio * a, ratio.clamp(low, high) * a)
            if settings.dual_clip and a < 0:
                row = -torch.maximum(-row, torch.full_like(row, settings.dual_clip * a))
        rows.append(row)
    theirs = torch.cat(rows)
    sum(row.mean() for row in rows if len(row)).backward() if len(theirs) else None
    current, terms = _ours(batch, settings)
    (reduced(terms.objective, batch, "sample_mean") * batch.count).backward()
    gradient = torch.zeros(0) if leaf.grad is None else leaf.grad
    return max(distance(terms.objective, theirs), distance(current.grad, gradient))


def _decoupled(batch: Ragged) -> float:
    """The objective of every token, the gradient of their sum, and how many are left out."""
    cap, a = 1.1, batch.flat(torch.from_numpy(batch.rewards))
    weights, dropped = decoupled(batch.flat(batch.old), batch.flat(batch.engine), cap)
    current, terms = _ours(batch, LOSSES["PPO clip"])
    ours = terms.objective * weights
    ours.sum().backward()
    leaf = batch.flat(batch.current).double().requires_grad_()
    behave = (batch.flat(batch.old).double() - batch.flat(batch.engine).double()).exp()
    ratio = (leaf - batch.flat(batch.old).double()).exp()
    theirs = -torch.where(behave <= cap, behave, 0.0) * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    theirs.sum().backward()
    return max(distance(ours, theirs), distance(current.grad, leaf.grad), distance(dropped.sum(), (behave > cap).sum()))


def _on_policy(batch: Ragged) -> float:
    """First step of every policy loss: ratio 1, KL 0, nothing clipped."""
    log_probs, advantages = batch.flat(batch.current), batch.flat(torch.from_numpy(batch.rewards))
    worst = 0.0
    for settings in (*LOSSES.values(), NO_LOWER_BOUND):
        terms = policy_terms(log_probs, log_probs.clone(), advantages, settings, batch.segments, batch.count)
        zeros = torch.zeros(len(log_probs))
        worst = max(worst, *(distance(x, zeros) for x in (terms.ratio - 1, terms.log_ratio, terms.clipped)))
    return worst


def _supervised(batch: Ragged) -> float:
    rng = np.random.default_rng(batch.count)
    logits = torch.from_numpy(rng.normal(0, 2, (int(batch.mask.sum()), 17)).astype(np.float32))
    targets = torch.from_numpy(rng.integers(0, 17, len(logits)))
    chosen = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    theirs: Callable[..., torch.Tensor] = torch.nn.functional.cross_entropy
    return distance(supervised_loss(chosen), theirs(logits.double(), targets, reduction="none"))


def _overlong(batch: Ragged) -> float:
    from trl.rewards import get_soft_overlong_punishment

    longest, buffer = WIDTH // 2, WIDTH // 10
    theirs = get_soft_overlong_punishment(longest, buffer)([[0] * n for n in batch.trained])
    return distance(np.array([overlong_penalty(n, longest, buffer, 1.0) for n in batch.trained]), np.array(theirs))
