"""What is replayed of a step: the large tensors that came with samples, cut to packs and checked against the model.

Names the sample whose tensors do not fit. Knows nothing of how they came, nor of routers and the softmax.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from megatron.core import parallel_state

from services.common.errors import Code, ServiceError
from services.common.records import Sample
from services.common.run_spec import TrainerSettings
from services.common.side_payloads import KEPT_TOKENS, ROUTED_EXPERTS
from services.trainer.ranks.batches import Pack
from services.trainer.ranks.kept_tokens import KeptTokens
from services.trainer.ranks.model.hf_config import Experts
from services.trainer.ranks.policy import Policy
from services.trainer.ranks.routing_replay import UNKNOWN, RoutingRecord, RoutingReplay, check_consumed


class StepReplay:
    """Replay for one policy, whose routers it prepares.

    Raises MODEL_UNSUPPORTED when routing is to be replayed in a model without experts.
    """

    def __init__(self, settings: TrainerSettings, policy: Policy) -> None:
        self._settings, self._hf = settings, policy.hf
        self._routing = settings.use_routing_replay or settings.use_rollout_routing_replay
        if not self._routing:
            return
        if policy.hf.experts is None:
            key = "use_rollout_routing_replay" if settings.use_rollout_routing_replay else "use_routing_replay"
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "MODEL_UNSUPPORTED",
                f"{key} is set, but a {policy.hf.model_type} model has no experts to route to; leave it out.",
            )
        RoutingReplay(policy.model, policy.hf.experts)

    def equip(self, pack: Pack, samples: Sequence[Sample]) -> Pack:
        """The pack of these samples with what is replayed in it. Raises REPLAY_MISMATCH naming the sample."""
        if self._routing:
            pack = replace(pack, routing=self._record(pack, samples))
        if self._settings.use_top_p_replay:
            pack = replace(pack, kept=_kept(pack, samples, self._hf.vocab_size))
        return pack

    def check(self, packs: Iterable[Sequence[Pack]]) -> None:
        """After a step: every record was used. Raises ROUTING_REPLAY."""
        check_consumed([pack.routing for step in packs for pack in step if pack.routing is not None])

    def _record(self, pack: Pack, samples: Sequence[Sample]) -> RoutingRecord:
        subject = f"a pack of {len(samples)} samples" + (f" from {samples[0].sample_id} on" if samples else "")
        if not self._settings.use_rollout_routing_replay:
            return RoutingRecord(subject)
        experts, layers = self._hf.experts, self._hf.layers
        whole = np.full((len(pack.tokens), layers, experts.per_token), UNKNOWN, np.int64)
        start = 0
        for sample in samples:
            rows = routed_experts(sample, experts, layers)
            whole[start : start + len(rows)] = rows
            start += len(sample.tokens)
        own = pack.layout.own_tokens(torch.from_numpy(whole[:, experts.layers]))
        ranks = parallel_state.get_tensor_model_parallel_world_size()  # the sequence is cut over them in layers
        own = own.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()].to(pack.tokens.device)
        return RoutingRecord(subject, own.unbind(1))


def routed_experts(sample: Sample, experts: Experts, layers: int) -> np.ndarray:
    """Experts of a sample's first tokens, [n, layers, experts per token]. Raises REPLAY_MISMATCH."""
    rows = sample.side.get(ROUTED_EXPERTS, np.zeros((0, layers * experts.per_token), np.uint8))
    trained = np.flatnonzero(sample.loss_mask)
    needed = sample.prompt_length + int(trained[-1]) if len(trained) else 0
    width, most = layers * experts.per_token, len(sample.tokens)
    if rows.ndim != 2 or rows.shape[1] != width or not needed <= len(rows) <= most:
        raise _mismatch(
            sample,
            f"its routed experts have shape {list(rows.shape)}, but a model of {layers} layers with"
            f" {experts.per_token} experts a token needs {needed} to {most} rows of {width}",
        )
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < experts.count:
        raise _mismatch(sample, f"it was routed to expert {int(rows.max())} of a model that has {experts.count}")
    return rows.reshape(len(rows), layers, experts.per_token)


def kept_tokens(sample: Sample, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Number of kept tokens at each of R response tokens, and their ids. Raises REPLAY_MISMATCH."""
    length = sample.response_length
    flat = sample.side.get(KEPT_TOKENS, np.zeros(0, np.int32))
    counts, ids = flat[:length], flat[length:]
    if flat.ndim != 1 or len(counts) != length or counts.sum() != len(ids):
        raise _mismatch(
            sample,
            f"its kept tokens have shape {list(flat.shape)}, which is not {length} counts and as many ids as they sum"
            " up to",
        )
    (without,) = np.nonzero((counts == 0) & (sample.loss_mask != 0))
    if len(without):
        raise _mismatch(sample, f"no kept tokens are recorded for its trained response token {without[0]}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise _mismatch(sample, f"it kept token {int(ids.max())} of a vocabulary of {vocab_size}")
    return counts, ids


def _kept(pack: Pack, samples: Sequence[Sample], vocab_size: int) -> KeptTokens:
    """Of the trained tokens of a pack, in its order."""
    rows, segments = pack.rows.cpu().numpy(), pack.segments.cpu().numpy()
    starts = np.cumsum([0, *(len(sample.tokens) for sample in samples)])
    counts, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for index, sample in enumerate(samples):
        of_sample = rows[segments == index] + 1 - starts[index] - sample.prompt_length  # places in the response
        if not len(of_sample):
            continue
        every, kept = kept_tokens(sample, vocab_size)
        ends = every.cumsum()
        counts.append(every[of_sample])
        ids += [kept[ends[place] - every[place] : ends[place]] for place in of_sample]
    device = pack.tokens.device
    return KeptTokens.of(np.concatenate(counts), np.concatenate(ids), pack.targets.cpu().numpy(), device)


def _mismatch(sample: Sample, what: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "REPLAY_MISMATCH",
        f"Sample {sample.sample_id} cannot be replayed: {what}.",
        sample_id=sample.sample_id,
    )
