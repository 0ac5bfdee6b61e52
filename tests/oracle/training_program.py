"""What `test_training_algorithms` runs inside one rank process: `python -m tests.oracle.training_program PORT ROOT`.

Real models, one step or a few of every algorithm; the numbers are left in ROOT/algorithms.pt.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common.errors import ServiceError
from services.common.records import Sample, VersionSpan
from services.trainer.ranks import runtime
from tests.oracle.rank_program import Trainee, make_spec, random_samples

KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
HERE, EXAMPLE = "tests.oracle.training_program", "examples.custom_algorithm.functions"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": KL,
    "grpo_two_steps": {**KL, "num_steps_per_rollout": 2},
    "dr_grpo": {"advantage_estimator": "dr_grpo", "loss_constant": 40.0, **KL},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4, **KL},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0, **KL},
    "rloo": {"advantage_estimator": "rloo", **KL},
    "dapo": {"eps_clip_high": 0.28, "eps_clip_c": 10.0, "calculate_per_token_loss": True},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1},
    "remax": {"advantage_estimator": "remax", **KL},
    "ppo": {"advantage_estimator": "ppo", "kl_coef": 0.1, "lambd": 0.95, "normalize_advantages": True},
    "unbiased_kl": {**KL, "use_unbiased_kl": True, "kl_loss_type": "k3"},
    "engine_log_probs": {"use_rollout_logprobs": True, **KL},
    "kept_actor": {"keep_old_actor": True, "max_staleness": 1, **KL},
    "tis": {"use_tis": True},
    "icepop": {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.5},
    "mis": {"use_tis": True, "tis_level": "sequence", "use_rs": True, "rs_veto_threshold": 1e-4},
    "tis_normalized": {"use_tis": True, "tis_batch_normalize": True},
    "opsm": {"use_opsm": True, "use_rollout_logprobs": True},
    "decoupled": {"use_decoupled_loss": True},
    "decoupled_kept": {"use_decoupled_loss": True, "keep_old_actor": True, "use_tis": True, "max_staleness": 1},
    "rollout_mean": {"loss_normalizer": "rollout_mean"},
    "custom": {
        "custom_advantage_function_path": f"{EXAMPLE}.ranked",
        "custom_loss_function_path": f"{EXAMPLE}.soft_clip",
        "custom_tis_function_path": f"{EXAMPLE}.near_or_nothing",
        **KL,
    },
}
"""Settings whose first step must find the current policy to be every other."""


def broken_loss(inputs: Any, settings: Any) -> torch.Tensor:
    """A loss of the wrong shape."""
    return inputs.log_probs.sum()


class ExactEngine:
    """A trainee whose samples have the log-probs of its own weights, as a perfect engine would say them."""

    def __init__(self, root: Path, **trainer: Any) -> None:
        self.trainee = Trainee(make_spec(root / "qwen3", 1, 1, **trainer))

    def samples(self, seed: int, version: int = 0) -> dict[str, Sample]:
        """The samples of a seed as the present weights would have made them."""
        from services.trainer.core.schedule import LossWeight
        from services.trainer.ranks.batches import PackSettings, make_pack
        from services.trainer.ranks.policy import evaluate_log_probs

        policy, found = self.trainee.policy, {}
        for name, sample in random_samples(seed).items():
            settings = PackSettings(pad_multiple=1, supervised=True)
            pack = make_pack([sample], {}, {name: LossWeight(1.0, 1)}, settings, self.trainee.device)
            (numbers,) = evaluate_log_probs(policy.model, [pack], policy.hf, policy.temperature)
            log_probs = np.zeros(sample.response_length, np.float32)
            log_probs[sample.loss_mask != 0] = numbers.numpy()
            spans = (VersionSpan(version, 0, sample.response_length),) if version else ()
            found[name] = replace(sample, log_probs=log_probs, versions=spans)
        return found

    def step(self, samples: dict[str, Sample]) -> dict[str, float]:
        """Metrics of a step on samples."""
        return self.trainee.step(samples)


def first_steps(root: Path) -> dict:
    """Metrics of the first step of every algorithm."""
    out = {}
    for name, settings in ALGORITHMS.items():
        engine = ExactEngine(root, **settings)
        if engine.trainee.policy.beside.kept:
            engine.trainee.policy.beside.kept.keep(1, 0)
        out[name] = engine.step(engine.samples(0, version=1))
    return out


def kept_actors(root: Path) -> dict:
    """Samples of two versions: with kept weights the trainer finds the engine's log-probs again."""
    engine = ExactEngine(root, keep_old_actor=True, use_tis=True, max_staleness=2)
    policy = engine.trainee.policy
    kept = policy.beside.kept
    kept.keep(1, 0)
    old = engine.samples(1, version=1)
    engine.step(engine.samples(0, version=1))
    kept.keep(2, policy.optimizer_steps)
    new = engine.samples(1, version=2)
    mixed = {}
    for name in old:  # the first half of a response by the old weights, the rest by the present ones
        cut = old[name].response_length // 2
        spans = (VersionSpan(1, 0, cut), VersionSpan(2, cut, old[name].response_length))
        log_probs = np.concatenate([old[name].log_probs[:cut], new[name].log_probs[cut:]])
        mixed[name] = replace(old[name], log_probs=log_probs, versions=tuple(s for s in spans if s.end > s.start))
    before = [tensor.clone() for tensor in policy.model.parameters()]
    with kept._holding(0, present=False):
        other = [tensor.clone() for tensor in policy.model.parameters()]
    after = [tensor.clone() for tensor in policy.model.parameters()]
    known = engine.step(mixed)
    kept.clear()
    return {
        "known": known,
        "forgotten": engine.step(mixed),
        "swapped": not any(torch.equal(a, b) for a, b in zip(before, other, strict=True)),
        "restored": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
    }


def stopped(root: Path) -> dict:
    """What a step says of a sample whose numbers are none, and whether the weights are what they were."""
    out = {}
    cases = {
        "log_prob": {"use_rollout_logprobs": True},
        "whitened": {"normalize_advantages": True},
        "shape": {"custom_loss_function_path": f"{HERE}.broken_loss"},
    }
    for name, settings in cases.items():
        engine = ExactEngine(root, **settings)
        samples, before = engine.samples(0), engine.trainee.weights()
        bad = samples["s3"]
        if name == "log_prob":
            samples["s3"] = replace(bad, log_probs=np.where(bad.loss_mask, np.nan, 0).astype(np.float32))
        if name == "whitened":
            samples["s3"] = replace(bad, reward=float("inf"))
        try:
            engine.step(samples)
        except ServiceError as error:
            said = error.reason, error.message
        same = all(torch.equal(before[n], t) for n, t in engine.trainee.weights().items())
        out[name] = {"said": said, "unchanged": same, "steps": engine.trainee.policy.optimizer_steps}
    return out


def moving(root: Path) -> dict:
    """A reference that follows and a coefficient that adapts, interrupted by a death and not."""
    from services.trainer.ranks.checkpoint import load_checkpoint, save_checkpoint

    settings = {**KL, "ref_update_interval": 2, "kl_controller": "adaptive", "kl_target": 1e-4, "kl_horizon": 100}
    trainee = Trainee(make_spec(root / "qwen3", 1, 1, **settings))
    first = [trainee.step(seed) for seed in range(2)]
    reference = [p.clone() for p in trainee.policy.beside.reference.model.parameters()]
    followed = all(torch.equal(a, b) for a, b in zip(reference, trainee.policy.model.parameters(), strict=True))
    third = trainee.step(2)
    save_checkpoint(trainee.policy, root / "moving", 3)
    uninterrupted = [trainee.step(seed) for seed in range(3, 5)]
    resumed = Trainee(make_spec(root / "qwen3", 1, 1, **settings))
    load_checkpoint(resumed.policy, root / "moving")
    resumed.done = 3
    again = [resumed.step(seed) for seed in range(3, 5)]
    other = Trainee(make_spec(root / "qwen3", 1, 1, **settings))
    load_checkpoint(other.policy, root / "moving", new_run=True)
    return {
        "first": first,
        "followed": followed,
        "third": third,
        "uninterrupted": uninterrupted,
        "resumed": again,
        "weights": (trainee.weights(), resumed.weights()),
        "new_run": (other.policy.beside.kl.coef, other.policy.beside.reference.step),
    }


def adapting(root: Path) -> list[dict[str, float]]:
    """Two steps whose KL per token is far below its target, and far above it as the loss weights it."""
    settings = {"kl_controller": "adaptive", "kl_target": 1.0, "kl_horizon": 100, "num_steps_per_rollout": 2}
    weighted = {"loss_normalizer": "constant", "loss_constant": 1e-9}
    trainee = Trainee(make_spec(root / "qwen3", 1, 1, **KL, **settings, **weighted))
    return [trainee.step(seed) for seed in range(2)]


def stages(root: Path) -> dict:
    """Advantages of two packs by the token stage, and by loops over their tokens in float64."""
    from megatron.core import parallel_state

    from services.trainer.core.schedule import LossWeight
    from services.trainer.ranks.batches import PackSettings, make_pack
    from services.trainer.ranks.scores import Scores
    from services.trainer.ranks.token_stage import StageSettings, token_stage

    samples = list(random_samples(4).values())
    advantages = {s.sample_id: float(i) - 4 for i, s in enumerate(samples) if s.reward is not None}
    weights = {s.sample_id: LossWeight(1.0, 1) for s in samples}
    packing = PackSettings(pad_multiple=1, supervised=False)
    packs = [make_pack(part, advantages, weights, packing, torch.device("cpu")) for part in (samples[:5], samples[5:])]
    generator = torch.Generator().manual_seed(2)
    drawn = [[torch.randn(len(pack.rows), generator=generator) for _ in range(3)] for pack in packs]
    scores = [Scores(trainer=t, reference=r, values=v) for t, r, v in drawn]
    group, out = parallel_state.get_data_parallel_group(), {}
    for form, whiten in (("broadcast", True), ("returns", True), ("baseline_kl", False), ("gae", True)):
        settings = StageSettings(form=form, kl=True, kl_type="k1", gamma=0.9, lambd=0.8, whiten=whiten)
        got = token_stage(packs, scores, settings, 0.3, group)
        expected = np.concatenate([_by_hand(form, pack, *row) for pack, row in zip(packs, drawn, strict=True)])
        if whiten:
            expected = (expected - expected.mean()) / np.sqrt(expected.var(ddof=1) + 1e-8)
        found = torch.cat([target.advantages for target in got]).numpy()
        out[form] = float(np.abs(found - expected).max())
    return out


def _by_hand(form: str, pack: Any, trainer: torch.Tensor, reference: torch.Tensor, values: torch.Tensor) -> np.ndarray:
    """Advantages of a pack before whitening: kl_coef 0.3, gamma 0.9, lambda 0.8, KL k1."""
    kl, value = (trainer - reference).double().numpy(), values.double().numpy()
    number, segment = pack.advantages.double().numpy(), pack.segments.numpy()
    if form == "broadcast":
        return number
    if form == "baseline_kl":
        return number - 0.3 * kl
    out = np.zeros(len(kl))
    later = following = 0.0
    for t in reversed(range(len(kl))):
        last = t + 1 == len(kl) or segment[t + 1] != segment[t]
        if last:
            later = following = 0.0
        reward = -0.3 * kl[t] + (number[t] if last else 0.0)
        later = reward + 0.9 * later if form == "returns" else reward + 0.9 * following - value[t] + 0.72 * later
        out[t], following = later, value[t]
    return out


def main() -> None:
    """Runs everything."""
    port, root = int(sys.argv[1]), Path(sys.argv[2])
    runtime.start(runtime.Layout(0, 1, port, 1), "cpu", seed=1)
    parts = (stages, first_steps, kept_actors, stopped, moving, adapting)
    torch.save({part.__name__: part(root) for part in parts}, root / "algorithms.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
