"""Weights of the versions that engines were given, kept on the host, to ask again what they make of a token.

A token is scored by the weights of the version that generated it, which its sample's version spans name. Versions that
are not kept (older than the newest few, or from before a restart) are left out, and the caller has the engine's own
log-probs for their tokens.

Invariant: outside of `score` the model holds the policy's present weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from services.trainer.ranks.batches import Pack

Weights = dict[str, torch.Tensor]


class KeptActors:
    """The newest `most` sets of weights of a model that is trained, with the versions that they were pushed as."""

    def __init__(self, model: GPTModel, most: int) -> None:
        self._model, self._most = model, most
        self._weights: dict[int, Weights] = {}
        """By the number of optimizer steps made then."""
        self._versions: dict[int, int] = {}
        """Optimizer steps by version."""

    def keep(self, version: int, optimizer_steps: int) -> None:
        """Remembers the model's present weights, those after `optimizer_steps`, as a version."""
        self._versions[version] = optimizer_steps
        if optimizer_steps not in self._weights:
            self._weights[optimizer_steps] = _copied(self._model)
        for old in sorted(self._weights)[: -self._most]:
            del self._weights[old]
        self._versions = {v: steps for v, steps in self._versions.items() if steps in self._weights}

    def clear(self) -> None:
        """Forgets everything: the run goes on from other weights."""
        self._weights.clear()
        self._versions.clear()

    def score(
        self, packs: Sequence[Pack], optimizer_steps: int, evaluate: Callable[[Sequence[Pack]], list[torch.Tensor]]
    ) -> list[torch.Tensor] | None:
        """Log-probs of every token by the weights that generated it, float32 [k] by pack; where those are not kept, the
        engine's. None when all tokens of all ranks are of the present weights. All ranks must call it.

        Args:
            optimizer_steps: that the present weights have seen.
            evaluate: log-probs of packs by the model as it is.
        """
        sets = self._sets_of(packs)
        if sets == {optimizer_steps}:
            return None
        scores = [pack.engine_log_probs for pack in packs]
        for steps in sorted(sets - {None}):
            with self._holding(steps, present=steps == optimizer_steps):
                found = evaluate(packs)
            versions = [v for v, s in self._versions.items() if s == steps]
            scores = [
                torch.where(torch.isin(pack.versions, pack.versions.new_tensor(versions)), new, old)
                for pack, new, old in zip(packs, found, scores, strict=True)
            ]
        return scores

    def known(self, pack: Pack) -> torch.Tensor:
        """Places of a pack's tokens whose weights are kept, int64 [j]."""
        return torch.isin(pack.versions, pack.versions.new_tensor(list(self._versions))).nonzero()[:, 0]

    def _sets_of(self, packs: Sequence[Pack]) -> set:
        """Optimizer steps of all weights that generated the tokens of all ranks; None among them: some are not kept.
        Ranks forward together, so each makes the passes of all."""
        versions = torch.cat([pack.versions for pack in packs]).unique().tolist()
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, versions)
        return {self._versions.get(version) for part in gathered for version in part}

    @contextmanager
    def _holding(self, steps: int, *, present: bool) -> Iterator[None]:
        """The model with a kept set of weights."""
        if present:
            yield
            return
        own = _copied(self._model)
        try:
            _fill(self._model, self._weights[steps])
            yield
        finally:
            _fill(self._model, own)


def _copied(model: GPTModel) -> Weights:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model)}


@torch.no_grad()
def _fill(model: GPTModel, weights: Weights) -> None:
    for name, tensor in _tensors(model):
        tensor.copy_(weights[name])


def _tensors(model: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
