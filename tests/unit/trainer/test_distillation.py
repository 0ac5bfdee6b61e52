"""Reverse KL to a teacher against float64 references written from the definitions."""

from __future__ import annotations

import pytest
import torch

from services.trainer.core.algorithms.distillation import reverse_kl_advantage, top_k_reverse_kl

VOCABULARY = 37


def policies(seed: int, rows: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of student and teacher, float64 [rows, vocabulary], the student's with gradient."""
    generator = torch.Generator().manual_seed(seed)
    teacher = 3 * torch.randn(rows, VOCABULARY, generator=generator, dtype=torch.float64)
    student = teacher + torch.randn(rows, VOCABULARY, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), teacher


def ours(student: torch.Tensor, teacher: torch.Tensor, n: int) -> torch.Tensor:
    top, ids = teacher.log_softmax(-1).topk(n)
    return top_k_reverse_kl(student.log_softmax(-1).gather(-1, ids), top)


def by_definition(student: torch.Tensor, teacher: torch.Tensor, n: int) -> torch.Tensor:
    """KL of two distributions over n + 1 outcomes, outcome by outcome."""
    rows = []
    for s, t in zip(student.softmax(-1), teacher.softmax(-1), strict=True):
        chosen = set(t.topk(n).indices.tolist())
        outcomes = [(s[j], t[j]) for j in sorted(chosen)]
        others = [j for j in range(VOCABULARY) if j not in chosen]
        if others:
            outcomes.append((s[others].sum(), t[others].sum()))
        rows.append(sum(p * (p / q).log() for p, q in outcomes))
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n", [1, 5, 36, VOCABULARY])
def test_top_k_equals_the_kl_over_its_outcomes_with_its_gradient(seed, n):
    student, teacher = policies(seed)
    found, expected = ours(student, teacher, n), by_definition(student, teacher, n)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 if n > 30 else 1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    (wanted,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=2e-5 if n > 30 else 1e-12)


def test_with_the_whole_vocabulary_it_is_the_kl_and_else_a_bound_from_below():
    student, teacher = policies(7)
    whole = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=student), torch.distributions.Categorical(logits=teacher)
    )
    torch.testing.assert_close(ours(student, teacher, VOCABULARY), whole, rtol=0, atol=1e-9)
    before = torch.zeros_like(whole)
    for n in (1, 2, 5, 10, 20, VOCABULARY):
        now = ours(student, teacher, n)
        assert (now >= before - 1e-9).all()  # finer outcomes never show less
        before = now
    assert (before <= whole + 1e-9).all()


def test_equal_policies_have_none_and_no_gradient():
    student, _ = policies(3)
    loss = ours(student, student.detach().clone(), 4)
    assert loss.abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("n", [1, 4])
def test_descent_finds_the_teacher_and_does_not_leave_its_tokens(n):
    """Without the outcome of all other tokens the sum is smallest away from the teacher."""
    student, teacher = policies(5, rows=4)
    optimizer = torch.optim.Adam([student], lr=0.05)
    for _ in range(600):
        optimizer.zero_grad()
        ours(student, teacher, n).sum().backward()
        optimizer.step()
    top, ids = teacher.softmax(-1).topk(n)
    torch.testing.assert_close(student.softmax(-1).gather(-1, ids), top, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_float32_is_exact_enough(seed):
    student, teacher = policies(seed)
    top, ids = teacher.log_softmax(-1).topk(8)
    exact = top_k_reverse_kl(student.log_softmax(-1).gather(-1, ids), top)
    single = top_k_reverse_kl(student.float().log_softmax(-1).gather(-1, ids), top.float())
    assert single.dtype is torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-6)


def test_sampled_tokens_estimate_minus_the_reverse_kl():
    student, teacher = (x.detach().log_softmax(-1) for x in policies(1, rows=1))
    expected = -(student.exp() * reverse_kl_advantage(student, teacher)).sum()
    (kl,) = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=student), torch.distributions.Categorical(logits=teacher)
    )
    torch.testing.assert_close(expected, kl, rtol=0, atol=1e-12)


def test_the_policy_gradient_with_this_advantage_is_the_gradient_of_the_reverse_kl():
    """Over all tokens of the vocabulary, each weighted by its probability: the expectation of the sampled form."""
    student, teacher = policies(2, rows=3)
    log_probs, target = student.log_softmax(-1), teacher.log_softmax(-1)
    weight = log_probs.detach().exp() * reverse_kl_advantage(log_probs.detach(), target)
    (found,) = torch.autograd.grad(-(weight * log_probs).sum(), student, retain_graph=True)
    (expected,) = torch.autograd.grad((log_probs.exp() * (log_probs - target)).sum(), student)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_packs_without_trained_tokens():
    nothing = torch.zeros(0, 4, requires_grad=True)
    top_k_reverse_kl(nothing, torch.zeros(0, 4)).sum().backward()
    assert reverse_kl_advantage(torch.zeros(0), torch.zeros(0)).shape == (0,)
