"""Top-p replay: log-probs over the tokens that were left to the sampler, and their gradients, against float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from benchmarks.algorithm_cases import Case, distance
from benchmarks.algorithm_cases.batch import Ragged

_VOCABULARY, _TEMPERATURE, _BAR = 61, 0.7, 1e-5


def cases() -> list[Case]:
    """Rows of the table."""
    row = partial(Case, "replay", reference="log-softmax of masked logits in float64", bar=_BAR)
    return [
        row("log-probs of the tokens that top-p left", error=_log_probs),
        row("their gradients, with the entropy's", error=_gradients),
        row("a sampled token that an engine did not name is kept", error=partial(_log_probs, named=False)),
    ]


def _log_probs(batch: Ragged, *, named: bool = True) -> float:
    ours, theirs = _both(batch, named)
    return distance(ours[0], theirs[0])


def _gradients(batch: Ragged) -> float:
    ours, theirs = _both(batch, named=True)
    return distance(ours[1], theirs[1])


def _both(batch: Ragged, named: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs, and gradients of the logits for random gradients of log-probs and entropies, on both sides."""
    from services.trainer.ranks.kept_tokens import KeptShard, KeptTokens
    from services.trainer.ranks.log_probs import vocabulary_softmax

    places = int(batch.mask.sum())
    rng = np.random.default_rng(places)
    logits = torch.from_numpy(rng.normal(0, 3, (places, _VOCABULARY)).astype(np.float32))
    targets = rng.integers(0, _VOCABULARY, places)
    pulls = torch.from_numpy(rng.random((2, places)).astype(np.float32))
    kept = rng.random((places, _VOCABULARY)) < rng.random((places, 1))
    kept[np.arange(places), targets] = named
    kept[rng.random(places) < 0.1] = False  # nothing is told of these: the whole vocabulary
    told = KeptTokens.of(kept.sum(1), kept.nonzero()[1], targets, torch.device("cpu"))
    allowed = kept | ~kept.any(1, keepdims=True)
    allowed[np.arange(places), targets] = True

    single = logits.clone().requires_grad_()
    shard = KeptShard.of(told, 0, _VOCABULARY, None)
    ours = vocabulary_softmax(single, torch.from_numpy(targets), 0, _TEMPERATURE, None, shard)
    (ours[0] @ pulls[0] + ours[1] @ pulls[1]).backward()

    double = logits.double().requires_grad_()
    scores = double / _TEMPERATURE
    whole = scores.log_softmax(-1)
    cut = scores.masked_fill(~torch.from_numpy(allowed), -torch.inf).log_softmax(-1)
    theirs = cut.gather(-1, torch.from_numpy(targets)[:, None])[:, 0]
    (theirs @ pulls[0].double() - (whole.exp() * whole).sum(-1) @ pulls[1].double()).backward()
    return [(ours[0], single.grad), (theirs, double.grad)]
