"""Losses, KL estimates and advantages against trl's and verl's own functions, on random ragged batches.

Each library is used where it is installed; the extra `dev` brings trl. Tolerance 1e-6, float64 inputs on both sides
where the formula allows it, so that only the formula can differ.
"""

from __future__ import annotations

import types
from collections import defaultdict

import numpy as np
import pytest
import torch

from services.trainer.core.algorithms.estimators import ScoredSample, group_advantages
from services.trainer.core.algorithms.kl import kl_estimate
from services.trainer.core.algorithms.normalizers import sample_weights, token_weights
from services.trainer.core.algorithms.policy_losses import PolicyLossSettings, policy_terms

TOLERANCE = 1e-6
LOW, HIGH = 0.2, 0.28
SEEDS = range(5)


def ragged(seed: int) -> types.SimpleNamespace:
    """Padded [samples, longest] float64 tensors with a ragged mask; `lengths` counts the mask's ones."""
    rng = np.random.default_rng(seed)
    samples, longest = 9, 23
    mask = np.zeros((samples, longest))
    for row in mask:
        row[: rng.integers(1, longest + 1)] = 1
        row[1:] *= rng.random(longest - 1) < 0.8
    current = rng.normal(-2, 1, mask.shape)
    tensor = torch.from_numpy
    return types.SimpleNamespace(
        mask=tensor(mask),
        lengths=[int(n) for n in mask.sum(1)],
        current=tensor(current),
        old=tensor(current + rng.normal(0, 0.3, mask.shape)),
        reference=tensor(current + rng.normal(0, 0.5, mask.shape)),
        advantages=tensor(rng.normal(0, 1, samples)),
    )


def flat(batch: types.SimpleNamespace) -> types.SimpleNamespace:
    """The trained tokens one after another, as the trainer has them."""
    chosen = batch.mask.bool()
    return types.SimpleNamespace(
        current=batch.current[chosen].requires_grad_(),
        old=batch.old[chosen],
        reference=batch.reference[chosen],
        advantages=batch.advantages[:, None].expand_as(batch.mask)[chosen],
        segments=chosen.nonzero()[:, 0],
    )


def our_loss(tokens: types.SimpleNamespace, lengths: list[int], *, per_token: bool, kl_coef: float) -> torch.Tensor:
    """The trainer's loss of a whole batch: weighted sum over the divisor."""
    terms = policy_terms(
        tokens.current, tokens.old, tokens.advantages, PolicyLossSettings(LOW, HIGH), tokens.segments, 9
    )
    loss = terms.objective + kl_coef * kl_estimate(tokens.current, tokens.reference, "k3")
    shares = sample_weights(lengths, "token_mean" if per_token else "sample_mean")
    weights = torch.from_numpy(token_weights(lengths, shares.weights)).double()
    exact = torch.tensor([1.0 if per_token else 1.0 / n for n in lengths], dtype=torch.float64)
    torch.testing.assert_close(weights, exact.repeat_interleave(torch.tensor(lengths)), rtol=1e-7, atol=0)
    return (loss * exact.repeat_interleave(torch.tensor(lengths))).sum() / (sum(lengths) if per_token else len(lengths))


@pytest.fixture(scope="module")
def trl_trainer():
    """trl's GRPO trainer class."""
    from trl import GRPOTrainer

    return GRPOTrainer


def _trl_loss(trainer_class, batch: types.SimpleNamespace, current: torch.Tensor, kind: str, beta: float):
    """trl's `_compute_loss` with the model's part replaced by given log-probs."""
    accelerator = types.SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (current, torch.zeros_like(current), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        args=types.SimpleNamespace(use_bias_correction_kl=False, delta=None),
        loss_type=kind,
        epsilon_low=LOW,
        epsilon_high=HIGH,
        use_vllm=False,
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=accelerator,
    )
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
    }
    return trainer_class._compute_loss(trainer, None, inputs), trainer._metrics["train"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "per_token"), [("grpo", False), ("bnpo", True)])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_loss_and_gradient_equal_trl(trl_trainer, seed: int, kind: str, per_token: bool, beta: float) -> None:
    batch = ragged(seed)
    theirs_in = batch.current.clone().requires_grad_()
    theirs, _ = _trl_loss(trl_trainer, batch, theirs_in, kind, beta)
    tokens = flat(batch)
    ours = our_loss(tokens, batch.lengths, per_token=per_token, kl_coef=beta)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(tokens.current.grad, theirs_in.grad[batch.mask.bool()], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_fraction_equals_trl(trl_trainer, seed: int) -> None:
    batch = ragged(seed)
    _, metrics = _trl_loss(trl_trainer, batch, batch.current, "bnpo", 0.0)
    tokens = flat(batch)
    terms = policy_terms(
        tokens.current, tokens.old, tokens.advantages, PolicyLossSettings(LOW, HIGH), tokens.segments, 9
    )
    assert terms.clipped.mean().item() == pytest.approx(metrics["clip_ratio/region_mean"][0], abs=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_equal_trl_statistics_with_unscored_samples(trl_trainer, seed: int) -> None:
    from trl.trainer.utils import nanstd

    rewards = torch.from_numpy(np.random.default_rng(seed).normal(0, 1, (4, 6)))
    rewards[1, 2] = rewards[3, 0] = float("nan")
    expected = (rewards - rewards.nanmean(1, keepdim=True)) / (nanstd(rewards, dim=1)[:, None] + 1e-6)
    samples = [
        ScoredSample(f"{g}-{i}", f"g{g}", None if rewards[g, i].isnan() else rewards[g, i].item())
        for i in range(6)
        for g in range(4)
    ]
    ours = group_advantages(samples)
    assert len(ours) == 22
    for name, value in ours.items():
        group, index = map(int, name.split("-"))
        assert value == pytest.approx(expected[group, index].item(), abs=TOLERANCE)


@pytest.fixture(scope="module")
def verl():
    """verl's formulas."""
    from verl.trainer.ppo import core_algos

    return core_algos


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("mode", "per_token"), [("seq-mean-token-mean", False), ("token-mean", True)])
def test_policy_loss_equals_verl(verl, seed: int, mode: str, per_token: bool) -> None:
    class Config(dict):
        clip_ratio, clip_ratio_low, clip_ratio_high = LOW, LOW, HIGH
        global_batch_info: dict = {}  # noqa: RUF012

    batch = ragged(seed)
    theirs, metrics = verl.compute_policy_loss_vanilla(
        old_log_prob=batch.old,
        log_prob=batch.current,
        advantages=batch.advantages[:, None].expand_as(batch.mask),
        response_mask=batch.mask,
        loss_agg_mode=mode,
        config=Config(clip_ratio_c=1e9),  # no dual clip
    )
    tokens = flat(batch)
    ours = our_loss(tokens, batch.lengths, per_token=per_token, kl_coef=0.0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    terms = policy_terms(
        tokens.current, tokens.old, tokens.advantages, PolicyLossSettings(LOW, HIGH), tokens.segments, 9
    )
    assert terms.clipped.mean().item() == pytest.approx(metrics["actor/pg_clipfrac"], abs=TOLERANCE)
    assert terms.log_ratio.mean().item() == pytest.approx(metrics["actor/ppo_kl"], abs=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_equals_verl(verl, seed: int, kind: str) -> None:
    batch = ragged(seed)
    scale = 20 if kind == "low_var_kl" else 1  # reach the clamp too
    current, reference = scale * batch.current, scale * batch.reference
    ours = kl_estimate(current, reference, kind)
    torch.testing.assert_close(ours, verl.kl_penalty(current, reference, kind), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_equal_verl(verl, seed: int, normalize_std: bool) -> None:
    rng = np.random.default_rng(seed)
    groups = np.array([f"g{i}" for i in rng.permutation(np.repeat(np.arange(5), 4))])
    rewards = rng.normal(0, 1, len(groups))
    theirs, _ = verl.compute_grpo_outcome_advantage(
        torch.from_numpy(rewards)[:, None], torch.ones(len(groups), 1), groups, norm_adv_by_std_in_grpo=normalize_std
    )
    samples = [ScoredSample(str(i), g, float(r)) for i, (g, r) in enumerate(zip(groups, rewards, strict=True))]
    ours = group_advantages(samples, normalize_std=normalize_std)
    assert list(ours) != []
    for i in range(len(groups)):
        assert ours[str(i)] == pytest.approx(theirs[i, 0].item(), abs=TOLERANCE)
