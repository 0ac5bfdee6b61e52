"""Sends tokens to the experts that an earlier pass, or the engine, chose: megatron's router replay, pack by pack.

A `RoutingRecord` belongs to one pack. Without ids it is filled by the first pass without gradients (R2); an engine's
ids fill it from the start (R3). Every later pass over the pack takes the record's ids; only they are replayed, the
weights of the experts are the router's own. A pass with gradients consumes the record.

Only models that a `RoutingReplay` was made for take part: reference, teacher and critic route by themselves.
Invariants: a record is consumed at most once, and by every layer with experts; a first training pass without a record
(nothing was updated since it would have been made) routes by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from services.common.errors import Code, ServiceError
from services.trainer.ranks.model.experts import routers
from services.trainer.ranks.model.hf_config import Experts

UNKNOWN = -1
"""In place of an expert: nobody recorded it; the router chooses."""


@dataclass
class RoutingRecord:
    """Experts of this rank's tokens of one pack.

    subject: names the pack in messages; ids: int64 [own tokens, experts per token] for every layer with experts, None
    until recorded; consumed: whether a pass with gradients has used them.
    """

    subject: str
    ids: Sequence[torch.Tensor] | None = None
    consumed: bool = False

    def consume(self) -> None:
        """Raises ROUTING_REPLAY the second time."""
        if self.consumed:
            raise _broken(f"the record of {self.subject} is to be replayed in training a second time")
        self.consumed = True


class _LayerReplay(RouterReplay):
    """Stands beside the router of one layer; adds to megatron's replay that places may be unknown, and a count."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.subject, self.passes = layer, "", 0

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """As megatron's. scores [own tokens, experts] → values and ids [own tokens, topk]."""
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            wanted, found = (scores.size(0), topk), tuple(self.target_topk_idx.shape)
            if wanted != found:
                raise _broken(
                    f"the record of {self.subject} has shape {list(found)} in layer {self.layer}, whose router is asked"
                    f" for {list(wanted)}"
                )
            known = self.target_topk_idx >= 0
            _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            # All experts of a token or none: a mixture could name one twice.
            self.target_topk_idx = torch.where(known.all(-1, keepdim=True), self.target_topk_idx, own)
        self.passes += 1
        return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)


class RoutingReplay:
    """Replay in the routers of one model; the model finds it as its attribute `routing_replay`."""

    def __init__(self, model: GPTModel, experts: Experts) -> None:
        self._layers: list[_LayerReplay] = []
        for layer, router in routers(model, experts):
            router.router_replay = _LayerReplay(layer)
            self._layers.append(router.router_replay)
        # Megatron's list of all routers of the process, which nobody here asks, would keep the model alive.
        RouterReplay.clear_global_router_replay_instances()
        model.routing_replay = self

    @contextlib.contextmanager
    def during(self, record: RoutingRecord) -> Iterator[None]:
        """Records or replays in the one forward pass inside, as the module says."""
        training = torch.is_grad_enabled()
        if record.ids is not None:
            if training:
                record.consume()
            action = RouterReplayAction.REPLAY_FORWARD
        else:
            action = None if training else RouterReplayAction.RECORD
        for index, replay in enumerate(self._layers):
            replay.subject, replay.passes, replay.router_replay_action = record.subject, 0, action
            replay.target_topk_idx = None if record.ids is None else record.ids[index]
        try:
            yield
            for replay in self._layers:
                if replay.passes != 1:
                    asked = f"layer {replay.layer} asked {replay.passes} times for the experts of {record.subject}"
                    raise _broken(f"{asked} in one pass")
            if action is RouterReplayAction.RECORD:
                record.ids = [replay.recorded_topk_idx.detach() for replay in self._layers]
        finally:
            for replay in self._layers:
                replay.clear_indices()
                replay.clear_router_replay_action()


def replaying(model: torch.nn.Module, record: RoutingRecord | None) -> contextlib.AbstractContextManager[None]:
    """`RoutingReplay.during` for a model, wrapped or not; nothing for models and packs without replay."""
    while hasattr(model, "module"):
        model = model.module
    replay = getattr(model, "routing_replay", None)
    return contextlib.nullcontext() if replay is None or record is None else replay.during(record)


def check_consumed(records: Sequence[RoutingRecord]) -> None:
    """Raises ROUTING_REPLAY for a record that no training pass has used."""
    for record in records:
        if record.ids is not None and not record.consumed:
            raise _broken(f"the record of {record.subject} was not replayed in training")


def _broken(what: str) -> ServiceError:
    return ServiceError(Code.INTERNAL, "ROUTING_REPLAY", f"Routing cannot be replayed: {what}.")
