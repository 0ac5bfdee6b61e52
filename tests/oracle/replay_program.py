"""What the replay tests run inside rank processes: `python -m tests.oracle.replay_program LAYOUT RANK WORLD PORT ROOT`.

A layout is the size of the tensor- or context-parallel group, "tp2" for instance; numbers are left in
ROOT/<layout>.pt (rank 0). Samples carry experts and kept tokens that no router and no sampler would have chosen, so
nothing passes by chance.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from services.common.errors import ServiceError
from services.common.records import Sample
from services.common.run_spec import RunSpec
from services.common.side_payloads import KEPT_TOKENS, ROUTED_EXPERTS
from services.trainer.core.schedule import LossWeight
from services.trainer.ranks import runtime
from tests.oracle import rank_program
from tests.oracle.models import VOCAB_SIZE
from tests.oracle.rank_program import random_samples
from tests.oracle.training_program import KL

MODEL = "qwen3_moe"
LAYERS, PER_TOKEN, EXPERTS = 3, 2, 8
LAYOUTS = {"single": (1, 1), "tp2": (2, 1), "cp2": (1, 2)}
"""Tensor- and context-parallel size."""


def samples_with_side(seed: int) -> dict[str, Sample]:
    """The oracle's random samples; engines told nothing of the last token's experts, as they never read it."""
    rng = np.random.default_rng(seed)
    equipped = {}
    for name, sample in random_samples(seed).items():
        rows, length = len(sample.tokens) - 1, sample.response_length
        every = np.tile(np.arange(EXPERTS), (rows * LAYERS, 1))
        experts = rng.permuted(every, axis=1)[:, :PER_TOKEN].reshape(rows, LAYERS * PER_TOKEN)
        counts = np.where(sample.loss_mask != 0, rng.integers(1, 9, length), 0)
        ids = [np.zeros(0, np.int64), *(rng.choice(VOCAB_SIZE, count, replace=False) for count in counts)]
        side = {
            ROUTED_EXPERTS: experts.astype(np.uint8),
            KEPT_TOKENS: np.concatenate([counts, *ids]).astype(np.int32),
        }
        equipped[name] = replace(sample, side=side)
    return equipped


def spec_of(root: Path, layout: str, **trainer) -> RunSpec:
    """The oracle's run with replay."""
    tensor, context = LAYOUTS[layout]
    spec = rank_program.make_spec(root / MODEL, tensor * context, tensor, context_parallel_size=context)
    values = spec.model_dump()
    values["rollout"]["rollout_top_p"] = 0.9
    return RunSpec.model_validate(values | {"trainer": values["trainer"] | trainer | {"global_batch_size": None}})


class Replayed:
    """One policy with its replay, and a pack of the first four samples."""

    def __init__(self, root: Path, layout: str, **trainer) -> None:
        from services.trainer.ranks.batches import PackSettings
        from services.trainer.ranks.model.context import context_cut
        from services.trainer.ranks.policy import build_policy
        from services.trainer.ranks.replay import StepReplay

        self.spec = spec_of(root, layout, **trainer)
        self.policy = build_policy(self.spec, torch.device("cpu"))
        self.replay = StepReplay(self.spec.trainer, self.policy)
        self.samples = [sample for sample in samples_with_side(0).values() if sample.reward is not None][:4]
        self.packing = PackSettings(pad_multiple=4, supervised=False, cut=context_cut())

    def pack(self):
        """Equipped for replay."""
        from services.trainer.ranks.batches import make_pack

        advantages = {sample.sample_id: 1.0 for sample in self.samples}
        weights = {sample.sample_id: LossWeight(1.0, 1) for sample in self.samples}
        pack = make_pack(self.samples, advantages, weights, self.packing, torch.device("cpu"))
        return self.replay.equip(pack, self.samples)

    def log_probs(self, pack) -> torch.Tensor:
        """float32 [k], with gradients when they are enabled."""
        from services.trainer.ranks.policy import logits_of, trained_log_probs

        policy = self.policy
        return trained_log_probs(logits_of(policy.model, pack), pack, policy.hf, policy.temperature)[0]

    def refused(self, **side) -> str:
        """Sentence about a sample with other tensors beside it."""
        samples = [replace(self.samples[0], side=self.samples[0].side | side), *self.samples[1:]]
        kept, self.samples = self.samples, samples
        try:
            self.pack()
        except ServiceError as error:
            return error.message
        finally:
            self.samples = kept
        return ""


def transformers_log_probs(root: Path, samples: list[Sample], temperature: float) -> dict[str, torch.Tensor]:
    """Log-probs of the trained tokens by transformers, with experts that are forced ("experts"), with kept tokens only
    ("kept", float64) and plainly; and the gradient norm of the sum of the first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / MODEL, dtype=torch.float32, attn_implementation="eager")
    out: dict[str, list[torch.Tensor]] = {"plain": [], "kept": [], "experts": []}
    for sample in samples:
        rows = np.flatnonzero(sample.loss_mask) + sample.prompt_length - 1
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        targets = tokens[rows + 1][:, None]
        logits = model(tokens[None]).logits[0, rows] / temperature
        out["plain"].append(logits.log_softmax(-1).gather(-1, targets)[:, 0])
        cut = torch.from_numpy(_cut(sample, rows))
        out["kept"].append((logits.double() + cut).log_softmax(-1).gather(-1, targets)[:, 0])
        with _forced(model, sample):
            forced = model(tokens[None]).logits[0, rows] / temperature
        out["experts"].append(forced.log_softmax(-1).gather(-1, targets)[:, 0])
    whole = {name: torch.cat(parts) for name, parts in out.items()}
    whole["experts"].sum().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return {name: values.detach() for name, values in whole.items()} | {"norm": norm}


def _cut(sample: Sample, rows: np.ndarray) -> np.ndarray:
    """float64 [k, vocabulary]: 0 at kept tokens and at the target, −∞ elsewhere."""
    flat, length = sample.side[KEPT_TOKENS], sample.response_length
    ends = flat[:length].cumsum()
    cut = np.full((len(rows), VOCAB_SIZE), -np.inf)
    for index, place in enumerate(rows + 1 - sample.prompt_length):
        cut[index, flat[length:][ends[place] - flat[place] : ends[place]]] = 0
        cut[index, sample.tokens[sample.prompt_length + place]] = 0
    return cut


class _forced:  # noqa: N801
    """Routers of a transformers model that take a sample's experts, and their own for its last token."""

    def __init__(self, model, sample: Sample) -> None:
        blocks = [(index, layer.mlp) for index, layer in enumerate(model.model.layers)]
        self._routers = [(index, block.gate) for index, block in blocks if hasattr(block, "gate")]
        self._experts = sample.side[ROUTED_EXPERTS].reshape(-1, LAYERS, PER_TOKEN)

    def __enter__(self) -> None:
        for layer, router in self._routers:
            router.forward = self._make(router, torch.from_numpy(self._experts[:, layer].astype(np.int64)))

    def __exit__(self, *_) -> None:
        for _, router in self._routers:
            del router.forward

    @staticmethod
    def _make(router, ids: torch.Tensor):
        def forward(hidden_states: torch.Tensor):
            probs = torch.nn.functional.linear(hidden_states, router.weight).softmax(-1)
            chosen = torch.cat([ids, probs[len(ids) :].topk(PER_TOKEN, -1).indices])
            weights = probs.gather(-1, chosen)
            return probs, weights / weights.sum(-1, keepdim=True), chosen

        return forward


def engine_routing(root: Path, layout: str) -> dict:
    """R3: log-probs without and with gradients, the gradient norm, and what a second training pass says."""
    replayed = Replayed(root, layout, use_rollout_routing_replay=True)
    pack = replayed.pack()
    with torch.no_grad():
        before = replayed.log_probs(pack)
    now = replayed.log_probs(pack)
    now.sum().backward()
    out = {"before": before, "now": now.detach(), "consumed": pack.routing.consumed}
    if layout == "single":
        gradients = [parameter.main_grad.norm() for parameter in replayed.policy.model.parameters()]
        out["norm"] = torch.stack(gradients).norm()
    out["again"] = _sentence(lambda: replayed.log_probs(pack))
    out["unused"] = _sentence(lambda: replayed.replay.check([[replayed.pack()]]))
    short = replayed.samples[0].side[ROUTED_EXPERTS]
    out["refused"] = [
        replayed.refused(**{ROUTED_EXPERTS: short[:-9]}),
        replayed.refused(**{ROUTED_EXPERTS: short[:, :4]}),
        replayed.refused(**{ROUTED_EXPERTS: short + np.uint8(EXPERTS)}),
    ]
    pack.routing.consumed, pack.routing.ids = False, [ids[:-1] for ids in pack.routing.ids]
    out["cut"] = _sentence(lambda: replayed.log_probs(pack))
    return out


def trainer_routing(root: Path, layout: str) -> dict:
    """R2: routers are moved between recording and training; log-probs of before, with the record, and without."""
    replayed = Replayed(root, layout, use_routing_replay=True)
    pack, fresh = replayed.pack(), replayed.pack()
    with torch.no_grad():
        before = replayed.log_probs(pack)
        torch.manual_seed(2)
        for layer in replayed.policy.model.decoder.layers:
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.weight.add_(torch.randn_like(layer.mlp.router.weight))
    ids = [one.clone() for one in pack.routing.ids]
    with torch.no_grad():
        again = replayed.log_probs(pack)
    replayed.log_probs(pack)
    unrecorded = replayed.log_probs(fresh).detach()
    out = {"before": before, "again": again, "unrecorded": unrecorded, "consumed": pack.routing.consumed}
    out["same"] = all(torch.equal(a, b) for a, b in zip(ids, pack.routing.ids, strict=True))
    out["fresh"] = (fresh.routing.ids, fresh.routing.consumed)
    return out


def nucleus(root: Path, layout: str) -> dict:
    """Top-p replay: log-probs, and sentences about samples that do not fit."""
    replayed = Replayed(root, layout, use_top_p_replay=True)
    flat = replayed.samples[0].side[KEPT_TOKENS]
    length = replayed.samples[0].response_length
    none = np.concatenate([np.zeros(length, np.int32), flat[:0]])
    with torch.no_grad():
        found = replayed.log_probs(replayed.pack())
    wrong = (flat[:-1], none, np.append(flat[:-1], VOCAB_SIZE).astype(np.int32))
    return {"log_probs": found, "refused": [replayed.refused(**{KEPT_TOKENS: side}) for side in wrong]}


def training(root: Path, layout: str) -> dict:
    """Two steps of two optimizer steps with R3 and top-p, and with R2."""
    rank_program.random_samples = samples_with_side
    settings = {
        "rollout": {"use_rollout_routing_replay": True, "use_top_p_replay": True, **KL},
        "trainer": {"use_routing_replay": True},
    }
    out = {}
    try:
        for name, options in settings.items():
            trainee = rank_program.Trainee(spec_of(root, layout, num_steps_per_rollout=2, **options))
            trainee.pad = trainee.spec.trainer.pad_multiple
            out[name] = [trainee.step(seed) for seed in range(2)]
    finally:
        rank_program.random_samples = random_samples
    return out


def _sentence(action) -> str:
    try:
        action()
    except ServiceError as error:
        return error.message
    return ""


def main() -> None:
    """Runs everything as one rank."""
    layout, rank, world, port, root = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    tensor, context = LAYOUTS[layout]
    runtime.start(runtime.Layout(rank, world, port, tensor, context_parallel_size=context), "cpu", seed=1)
    path = Path(root)
    result = {
        "engine": engine_routing(path, layout),
        "trainer": trainer_routing(path, layout),
        "nucleus": nucleus(path, layout),
        "training": {} if layout == "cp2" else training(path, layout),
    }
    if layout == "single":
        replayed = Replayed(path, layout)
        result["transformers"] = transformers_log_probs(path, replayed.samples, replayed.policy.temperature)
        result["dense"] = _sentence(lambda: _dense(path))
    if rank == 0:
        torch.save(result, path / f"{layout}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _dense(root: Path) -> None:
    from services.trainer.ranks.policy import build_policy
    from services.trainer.ranks.replay import StepReplay

    spec = rank_program.make_spec(root / "qwen3", 1, 1, use_routing_replay=True)
    StepReplay(spec.trainer, build_policy(spec, torch.device("cpu")))


if __name__ == "__main__":
    main()
