"""Reverse KL to a teacher: over its most likely tokens, with gradients, and of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.algorithm_cases import Case, distance
from benchmarks.algorithm_cases.batch import Ragged
from services.trainer.core.algorithms.distillation import reverse_kl_advantage, top_k_reverse_kl

_VOCABULARY, _MOST = 61, 64
_TOP = (1, 8)

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cases() -> Iterator[Case]:
    """Rows of this family."""
    for top in _TOP:
        name = f"reverse KL over the teacher's top {top} and the rest, with gradient"
        # trl's own module needs datasets.
        yield Case("distillation", name, "trl", _top(top, _trl), needs="datasets")
        yield Case("distillation", name, "float64, outcome by outcome", _top(top, _outcomes))
    name = "reverse KL over the whole vocabulary, with gradient"
    yield Case("distillation", name, "torch.distributions", _whole)
    name = "sampled tokens: mean policy gradient = gradient of the reverse KL"
    yield Case("distillation", name, "float64 over a vocabulary", _sampled)


def _policies(batch: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of student and teacher, float32 [k, vocabulary], at no more than the first places of the batch."""
    places = min(int(batch.mask.sum()), _MOST)
    rng = np.random.default_rng(places)
    teacher = rng.normal(0, 2, (places, _VOCABULARY))
    student = teacher + rng.normal(0, 1, teacher.shape)
    return torch.from_numpy(student.astype(np.float32)), torch.from_numpy(teacher.astype(np.float32))


def _compare(batch: Ragged, ours: Divergence, theirs: Divergence) -> float:
    """Values by place and gradients to the student's logits; theirs in float64."""
    student, teacher = _policies(batch)
    found = []
    for formula, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        leaf = student.to(dtype, copy=True).requires_grad_()
        values = formula(leaf.log_softmax(-1), teacher.to(dtype).log_softmax(-1))
        values.sum().backward()
        found.append((values, leaf.grad))
    return max(distance(one, two) for one, two in zip(*found, strict=True))


def _top(count: int, theirs: Divergence) -> Callable[[Ragged], float]:
    def chosen(formula: Divergence) -> Divergence:
        def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
            top, ids = teacher.topk(count)
            return formula(student.gather(-1, ids), top)

        return divergence

    return lambda batch: _compare(batch, chosen(top_k_reverse_kl), chosen(theirs))


def _trl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence

    return compute_divergence(add_tail_bucket(student), add_tail_bucket(teacher), 1.0)


def _outcomes(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    values = []
    for s, t in zip(student.exp(), teacher.exp(), strict=True):
        outcomes = [*zip(s, t, strict=True), (1 - s.sum(), 1 - t.sum())]
        values.append(sum(p * (p / q).log() for p, q in outcomes))
    return torch.stack(values) if values else student.sum(-1)


def _whole(batch: Ragged) -> float:
    def theirs(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        one, two = (torch.distributions.Categorical(logits=x, validate_args=False) for x in (student, teacher))
        return torch.distributions.kl_divergence(one, two)

    return _compare(batch, top_k_reverse_kl, theirs)


def _sampled(batch: Ragged) -> float:
    """Every token of the vocabulary once, weighted by its probability: the expectation over sampled tokens."""

    def ours(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        fixed = student.detach()
        advantage = reverse_kl_advantage(fixed, teacher)
        value = -(fixed.exp() * advantage).sum(-1)
        surrogate = -(fixed.exp() * advantage * student).sum(-1)
        return value + surrogate - surrogate.detach()

    return _compare(batch, ours, lambda student, teacher: (student.exp() * (student - teacher)).sum(-1))
