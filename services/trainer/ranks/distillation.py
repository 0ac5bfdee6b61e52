"""On-policy distillation on the ranks: what a teacher says of a step's tokens, and the loss over its likely tokens.

A teacher is a second, frozen model here (`ModelTeacher`), or an engine whose log-probs came with the samples
(`SampleTeacher`). Sampled log-probs go to the token stage; this module adds the top-k term to the loss. Formulas are in
`core.algorithms.distillation`. Top tokens are kept for this rank's rows only, so context parallelism costs no exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

from services.common.errors import Code, ServiceError
from services.common.records import Sample, TeacherLogProbs
from services.common.run_spec import RunSpec, TrainerSettings
from services.trainer.core.algorithms.distillation import top_k_reverse_kl
from services.trainer.ranks.batches import Pack
from services.trainer.ranks.model.build import build_model, transformer_config
from services.trainer.ranks.model.hf_config import read_hf_config
from services.trainer.ranks.model.hf_weights import load_weights
from services.trainer.ranks.model.packing import to_device
from services.trainer.ranks.objective import Work
from services.trainer.ranks.policy import Policy, logits_of, trained_log_probs
from services.trainer.ranks.scores import Scores, TopTokens
from services.trainer.ranks.statistics import Collected
from services.trainer.ranks.timing import PartTimer

_IMPOSSIBLE = -1e4
"""Log-prob of a token that the policy does not have: a teacher's vocabulary may be padded further."""


class StepTeacher(Protocol):
    """Says what a teacher thinks of a pack."""

    def score(self, pack: Pack, samples: Sequence[Sample]) -> tuple[torch.Tensor, TopTokens | None]:
        """Log-probs of the trained tokens, float32 [k], and top tokens of this rank's rows."""
        ...


class Distillation:
    """The distillation of a run."""

    def __init__(self, settings: TrainerSettings, policy: Policy, teacher: StepTeacher) -> None:
        self._settings, self._policy, self._teacher = settings, policy, teacher

    def add_scores(
        self, scores: list[list[Scores]], packs: list[list[Pack]], samples: Mapping[str, Sample], timer: PartTimer
    ) -> list[list[Scores]]:
        """The scores of a step with the teacher's. Raises TEACHER_MISSING."""
        with timer.part("teacher_log_probs"):
            return [
                [self._scored(*pair, samples) for pair in zip(*step, strict=True)]
                for step in zip(scores, packs, strict=True)
            ]

    def _scored(self, scores: Scores, pack: Pack, samples: Mapping[str, Sample]) -> Scores:
        sampled, top = self._teacher.score(pack, [samples[i] for i in pack.sample_ids])
        return replace(scores, teacher=sampled, teacher_top=top)

    def add_loss(
        self, loss: torch.Tensor, collected: Collected, logits: torch.Tensor, log_probs: torch.Tensor, work: Work
    ) -> torch.Tensor:
        """The loss [k] with the term of the teacher's top tokens, where there is one; notes the KL as a metric.

        Args:
            logits: [own, vocabulary shard] of the current policy.
            log_probs: [k] by the current policy, with gradient.
        """
        if work.targets.reverse_kl is not None:
            collected.means["opd_reverse_kl"] = work.targets.reverse_kl
        top, layout, pack = work.scores.teacher_top, work.pack.layout, work.pack
        if top is None:
            return loss
        targets, policy = layout.own_rows(pack.targets), self._policy
        student = log_probs_at(logits, top.ids, targets, layout.own_rows(log_probs), policy.temperature)
        student = torch.where(top.ids < policy.hf.vocab_size, student, _IMPOSSIBLE)
        (kl,) = layout.all_rows(top_k_reverse_kl(student, top.log_probs))
        collected.means["opd_top_k_kl"] = kl
        return loss + self._settings.opd_kl_coef * kl


class SampleTeacher:
    """An engine, whose log-probs the samples carry."""

    def __init__(self, top_k: int, device: torch.device) -> None:
        self._top_k, self._device = top_k, device

    def score(self, pack: Pack, samples: Sequence[Sample]) -> tuple[torch.Tensor, TopTokens | None]:
        """As the rollout node stored them. Raises TEACHER_MISSING naming the sample."""
        rows, segments = pack.rows.cpu().numpy(), pack.segments.cpu().numpy()
        for index in np.unique(segments):
            self._check(samples[index])
        ends = np.cumsum([0, *(len(sample.tokens) for sample in samples)])
        prompts = np.array([sample.prompt_length for sample in samples], np.int64)
        lengths = np.array([sample.response_length for sample in samples], np.int64)
        shift = lengths.cumsum() - lengths - ends[:-1] - prompts  # place in the pack → among all response tokens
        places = rows + 1 + shift[segments]
        taught = [sample.teacher or self._nothing(sample) for sample in samples]
        sampled = self._at(places, np.zeros(0, np.float32), [said.sampled for said in taught])
        if not self._top_k:
            return sampled, None
        own, none = pack.layout.own_rows, (0, self._top_k)
        ids = self._at(places, np.zeros(none, np.int32), [said.top_ids[:, : self._top_k] for said in taught])
        top = self._at(places, np.zeros(none, np.float32), [said.top[:, : self._top_k] for said in taught])
        return sampled, TopTokens(own(ids).long(), own(top))

    def _at(self, places: np.ndarray, nothing: np.ndarray, arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return to_device(torch.from_numpy(np.concatenate([nothing, *arrays])[places]), self._device)

    def _nothing(self, sample: Sample) -> TeacherLogProbs:
        """In place of what an untrained sample lacks."""
        top = (sample.response_length, self._top_k)
        return TeacherLogProbs(np.zeros(top[0], np.float32), np.zeros(top, np.int32), np.zeros(top, np.float32))

    def _check(self, sample: Sample) -> None:
        if sample.teacher is None or sample.teacher.top.shape[1] < self._top_k:
            found = "none" if sample.teacher is None else f"{sample.teacher.top.shape[1]} most likely tokens"
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "TEACHER_MISSING",
                f"Sample {sample.sample_id} does not have the teacher's log-probs that use_opd needs (it has {found},"
                f" opd_top_k is {self._top_k}): it was made under other settings. Start a run with another run_id.",
                sample_id=sample.sample_id,
            )


class ModelTeacher:
    """A second, frozen model on the ranks, in the policy's parallel layout; its architecture and size are its own."""

    def __init__(self, spec: RunSpec, policy: Policy, device: torch.device) -> None:
        path, settings = str(spec.trainer.opd_teacher_load), spec.trainer
        self._hf = read_hf_config(path)
        self._top_k, self._temperature = settings.opd_top_k or 0, policy.temperature
        self._shared = min(self._hf.vocab_size, policy.hf.vocab_size)
        if self._top_k > self._shared:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INVALID_FIELD",
                f"opd_top_k {self._top_k} is more than the {self._shared} tokens that policy and teacher share.",
            )
        self._model = build_model(self._hf, transformer_config(self._hf, bf16=settings.bf16, device=device), device)
        load_weights(self._model, self._hf, path)
        self._model.requires_grad_(False)

    @torch.no_grad()
    def score(self, pack: Pack, samples: Sequence[Sample]) -> tuple[torch.Tensor, TopTokens | None]:
        """From a forward pass."""
        logits = logits_of(self._model, pack)
        sampled, _ = trained_log_probs(logits, pack, self._hf, self._temperature)
        if not self._top_k:
            return sampled, None
        own = pack.layout.own_rows
        ids = top_ids(logits, self._top_k, self._shared)
        return sampled, TopTokens(ids, log_probs_at(logits, ids, own(pack.targets), own(sampled), self._temperature))


def make_distillation(spec: RunSpec, policy: Policy, device: torch.device) -> Distillation | None:
    """The distillation of a run, None without one."""
    settings = spec.trainer
    if not settings.use_opd:
        return None
    if settings.opd_type == "megatron":
        return Distillation(settings, policy, ModelTeacher(spec, policy, device))
    return Distillation(settings, policy, SampleTeacher(settings.opd_top_k or 0, device))


def log_probs_at(
    logits: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor, log_probs: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-probs of any tokens from those of one: log p(j) = log p(target) + (logit j − logit target) / temperature.

    Collective over the tensor-parallel ranks; differentiable.

    Args:
        logits: [own, shard], this rank's part of the vocabulary.
        ids: int64 [own, n], of the whole vocabulary.
        targets: int64 [own].
        log_probs: float32 [own], of the targets under softmax(logits / temperature).
    """
    shard = logits.size(-1)
    columns = torch.cat([targets[:, None], ids], 1) - parallel_state.get_tensor_model_parallel_rank() * shard
    inside = (columns >= 0) & (columns < shard)
    found = torch.where(inside, logits.gather(-1, columns.clamp(0, shard - 1)).float(), 0.0) / temperature
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        found = reduce_from_tensor_model_parallel_region(found)
    return log_probs[:, None] + found[:, 1:] - found[:, :1]


def top_ids(logits: torch.Tensor, count: int, vocab_size: int) -> torch.Tensor:
    """The `count` most likely of the first `vocab_size` tokens at every row, int64 [own, count], most likely first.
    Collective over the tensor-parallel ranks."""
    group = parallel_state.get_tensor_model_parallel_group()
    start = group.rank() * logits.size(-1)
    own = max(min(vocab_size - start, logits.size(-1)), 0)
    values, columns = logits[:, :own].topk(min(count, own))
    if group.size() == 1:
        return columns
    lacking = (0, count - values.size(-1))
    values = torch.nn.functional.pad(values.float(), lacking, value=-torch.inf)
    ids = torch.nn.functional.pad(columns + start, lacking)
    all_values = [torch.empty_like(values) for _ in range(group.size())]
    all_ids = [torch.empty_like(ids) for _ in range(group.size())]
    dist.all_gather(all_values, values.contiguous(), group=group)
    dist.all_gather(all_ids, ids.contiguous(), group=group)
    best = torch.cat(all_values, 1).topk(count).indices
    return torch.cat(all_ids, 1).gather(1, best)
