"""Estimates of the KL to a reference, with their gradients, and the adaptive coefficient."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.algorithm_cases import Case, distance
from benchmarks.algorithm_cases.batch import Ragged
from services.trainer.core.algorithms.kl import AdaptiveKl, kl_estimate, unbiased


def cases() -> Iterator[Case]:
    """Rows of this family."""
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        yield Case("kl", f"{kind}, with gradient", "verl", _against_verl(kind), needs="verl")
        yield Case("kl", f"{kind}, with gradient", "float64", _against_paper(kind))
    yield Case(
        "kl",
        "low_var_kl far apart (clamped), with gradient",
        "verl",
        _against_verl("low_var_kl", 30),
        bar=1e-5,
        needs="verl",
    )
    for kind in ("k1", "k2", "k3"):
        yield Case("kl", f"unbiased {kind}, with gradient", "float64", _unbiased(kind))
    yield Case(
        "kl", "unbiased k3: mean over old policy = exact KL and its gradient", "float64 over a vocabulary", _exact
    )
    yield Case("kl", "adaptive coefficient", "verl", _adaptive, bar=1e-12, needs="verl")


Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _both(batch: Ragged, ours: Formula, theirs: Formula, scale: float = 1.0) -> float:
    """Values and gradients to the current log-probs; theirs in float64."""
    current, reference = scale * batch.flat(batch.current), scale * batch.flat(batch.reference)
    found = []
    for formula, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        leaf = current.to(dtype, copy=True).requires_grad_()
        values = formula(leaf, reference.to(dtype))
        values.sum().backward()
        found.append((values, leaf.grad))
    return max(distance(one, two) for one, two in zip(*found, strict=True))


def _against_verl(kind: str, scale: float = 1.0) -> Callable[[Ragged], float]:
    def error(batch: Ragged) -> float:
        from verl.trainer.ppo.core_algos import kl_penalty

        return _both(batch, lambda p, q: kl_estimate(p, q, kind), lambda p, q: kl_penalty(p, q, kind), scale)

    return error


PAPER: dict[str, Formula] = {
    "k1": lambda p, q: -torch.log(q.exp() / p.exp()),
    "k2": lambda p, q: torch.log(q.exp() / p.exp()) ** 2 / 2,
    "k3": lambda p, q: (q.exp() / p.exp() - 1) - torch.log(q.exp() / p.exp()),
}
PAPER["low_var_kl"] = PAPER["k3"]
"""Schulman's estimators as he writes them, with r = q / p; far from where they are clamped."""


def _against_paper(kind: str) -> Callable[[Ragged], float]:
    return lambda batch: _both(batch, lambda p, q: kl_estimate(p, q, kind), PAPER[kind])


def _unbiased(kind: str) -> Callable[[Ragged], float]:
    def error(batch: Ragged) -> float:
        old = batch.flat(batch.old)
        return _both(
            batch,
            lambda p, q: unbiased(kl_estimate(p, q, kind), p, old),
            lambda p, q: p.exp() / old.double().exp() * PAPER[kind](p, q),
        )

    return error


def _exact(batch: Ragged) -> float:
    """The estimate's mean over tokens drawn from the old policy, against KL(current ‖ reference) by its definition."""
    generator = torch.Generator().manual_seed(batch.count)
    logits = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    old, reference = logits[1].log_softmax(0), logits[2].log_softmax(0)
    found = []
    for formula in (
        lambda p: (old.exp() * unbiased(kl_estimate(p, reference, "k3"), p, old)).sum(),
        lambda p: (p.exp() * (p - reference)).sum(),
    ):
        leaf = logits[0].clone().requires_grad_()
        value = formula(leaf.log_softmax(0))
        value.backward()
        found.append((value, leaf.grad))
    return max(distance(one, two) for one, two in zip(*found, strict=True))


def _adaptive(batch: Ragged) -> float:
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    ours, theirs = AdaptiveKl(0.1, 0.05, 100), AdaptiveKLController(0.1, 0.05, 100)
    worst = 0.0
    for value in batch.values.abs().flatten()[:50].tolist():
        theirs.update(value / 10, 16)
        worst = max(worst, distance(ours.update(value / 10, 16), theirs.value))
    return worst
