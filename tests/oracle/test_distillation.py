"""Distillation on the ranks against transformers' models and autograd, and two ranks against one. All float32.

Policy and teacher differ in architecture. Cases whose teacher comes with the samples carry what transformers says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.records import Sample, SampleStatus, TeacherLogProbs
from tests.oracle.distillation_program import CASES, COEF, IN_LAYOUTS, LAYOUTS, TOP_K
from tests.oracle.models import VOCAB_SIZE, write_models
from tests.support.rank_processes import run_ranks

TOLERANCE = 1e-5
"""Largest difference of a gradient, relative to the largest gradient; measured 2e-6."""
_DEADLINE_SECONDS = 400
POLICY, TEACHER = "qwen3", "qwen2"


def random_samples() -> list[Sample]:
    """Ragged samples with holes in the mask: one unscored, one without trained tokens, one without a response."""
    rng = np.random.default_rng(4)
    samples = []
    for index, response in enumerate((17, 1, 33, 9, 12, 26, 0, 5)):
        prompt = int(rng.integers(1, 9))
        mask = (rng.random(response) < 0.8).astype(np.uint8) * (index != 3)
        samples.append(
            Sample(
                f"s{index}",
                "g",
                index,
                SampleStatus.COMPLETED,
                prompt,
                rng.integers(2, VOCAB_SIZE, prompt + response).astype(np.int32),
                mask,
                (rng.normal(-4, 1, response) * mask).astype(np.float32),
                reward=None if index == 4 else float(rng.normal()),
            )
        )
    return samples


def load(path: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def log_probs(model, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """[R, vocabulary] at the places of a response."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    return (model(tokens[None]).logits[0, sample.prompt_length - 1 : -1] / temperature).log_softmax(-1)


def taught(sample: Sample, teacher) -> Sample:
    with torch.no_grad():
        scores = log_probs(teacher, sample)
    chosen = torch.from_numpy(sample.tokens[sample.prompt_length :].astype(np.int64))
    top, ids = scores.topk(TOP_K)
    sampled = scores.gather(-1, chosen[:, None])[:, 0]
    return replace(sample, teacher=TeacherLogProbs(sampled.numpy(), ids.int().numpy(), top.numpy()))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("distillation")
    write_models(path)
    for name, of in (("policy", POLICY), ("teacher", TEACHER)):
        (path / name).symlink_to(path / of)
    teacher = load(path / "teacher")
    samples = [s if s.reward is None or not s.response_length else taught(s, teacher) for s in random_samples()]
    torch.save(samples, path / "samples.pt")
    return path


def run(root: Path, world: int) -> dict:
    """Cases by layout."""
    run_ranks("tests.oracle.distillation_program", world=world, root=root, seconds=_DEADLINE_SECONDS)
    return torch.load(root / f"world-{world}.pt", weights_only=False)


@pytest.fixture(scope="module")
def single(root: Path) -> dict:
    return run(root, 1)["one"]


@pytest.fixture(scope="module")
def pair(root: Path) -> dict:
    return run(root, 2)


def expected(root: Path, case: str) -> dict:
    """Loss, KL and gradients by autograd through transformers' models."""
    settings, temperature = CASES[case]
    policy, teacher = load(root / "policy"), load(root / "teacher")
    policy.train(False)
    top_k, parts = settings.get("opd_top_k"), []
    for sample in torch.load(root / "samples.pt", weights_only=False):
        if sample.reward is None or not sample.loss_mask.any():
            continue
        mask = torch.from_numpy(sample.loss_mask) != 0
        chosen = torch.from_numpy(sample.tokens[sample.prompt_length :].astype(np.int64))[:, None]
        student = log_probs(policy, sample, temperature)[mask]
        with torch.no_grad():
            target = log_probs(teacher, sample, temperature)[mask]
        engine = torch.from_numpy(sample.log_probs)[mask]
        own, theirs = (x.gather(-1, chosen[mask])[:, 0] for x in (student, target))
        before = engine if settings.get("use_rollout_logprobs") else own.detach()
        advantages = torch.full_like(own, sample.reward)
        if top_k:
            ids = target.topk(top_k).indices
            p, q = student.gather(-1, ids).double().exp(), target.gather(-1, ids).double().exp()
            p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
            kl = (p * (p / q).log()).sum(-1)
        else:
            kl = before - theirs
            advantages = advantages - COEF * kl.detach()
        parts.append((own, before, advantages, kl))
    own, before, advantages, kl = (torch.cat(column) for column in zip(*parts, strict=True))
    if settings.get("normalize_advantages"):
        advantages = (advantages - advantages.mean()) / advantages.std()
    loss = -((own - before).exp() * advantages).mean() + (COEF * kl.mean() if top_k else 0.0)
    loss.backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {"loss": loss.item(), "kl": kl.mean().item(), "gradients": gradients}


def apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Largest difference of any gradient over the largest gradient."""
    assert set(one) == set(two)
    scale = max(gradient.abs().max().item() for gradient in two.values())
    return max((one[name] - two[name]).abs().max().item() for name in two) / scale


@pytest.mark.timeout(500)
@pytest.mark.parametrize("case", CASES)
def test_loss_kl_and_gradients_equal_transformers_autograd(root, single, case):
    found, wanted = single[case], expected(root, case)
    name = "opd_top_k_kl" if "opd_top_k" in CASES[case][0] else "opd_reverse_kl"
    assert found["metrics"][name] == pytest.approx(wanted["kl"], rel=1e-5)
    assert found["metrics"]["loss"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-6)
    assert apart(found["gradients"], wanted["gradients"]) <= TOLERANCE


def test_a_teacher_on_the_ranks_says_what_an_engine_says(single):
    for kind in ("sampled", "top"):
        assert apart(single[f"{kind}, of samples"]["gradients"], single[kind]["gradients"]) <= TOLERANCE


@pytest.mark.timeout(500)
@pytest.mark.parametrize("layout", LAYOUTS[2])
@pytest.mark.parametrize("case", IN_LAYOUTS)
def test_layouts_give_the_same_gradients(single, pair, layout, case):
    found = pair[layout][case]
    assert apart(found["gradients"], single[case]["gradients"]) <= TOLERANCE
    for name, value in single[case]["metrics"].items():
        if "kl" in name or name == "loss":
            assert found["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_first_step_invariants(single):
    """The policy is its own old policy: ratio 1, nothing clipped."""
    for case in ("sampled", "top", "sampled, whitened"):
        metrics = single[case]["metrics"]
        assert (metrics["ratio_mean"], metrics["pg_clipfrac"]) == (1.0, 0.0)
        assert metrics["ppo_kl"] == pytest.approx(0.0, abs=1e-7)
