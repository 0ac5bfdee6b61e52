"""Settings of replay: what an engine or an earlier pass decided, used again in training; in the trainer's group."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from services.common.run_spec.algorithm import AlgorithmSettings
from services.common.side_payloads import KEPT_TOKENS, ROUTED_EXPERTS


class ReplaySettings(AlgorithmSettings):
    """What training takes over from generation or from an earlier pass (used by trainer and rollout nodes)."""

    use_routing_replay: bool = False
    """Mixture of experts: send every token to the experts that the pass for the old log-probs chose (R2)."""
    use_rollout_routing_replay: bool = False
    """Mixture of experts: send every token to the experts that the engine chose, also for the old log-probs (R3).
    Engines are then asked directly: the router does not let the request for experts through."""
    use_top_p_replay: bool = False
    """Log-probs over the tokens that rollout_top_p and rollout_top_k left to the engine, token by token, in place of
    the whole vocabulary; entropy stays that of the whole. Engines are then asked directly, not over the router."""

    @property
    def replays_rollout(self) -> bool:
        """Engines must tell more than tokens and log-probs."""
        return self.use_rollout_routing_replay or self.use_top_p_replay

    @property
    def side_payloads(self) -> tuple[str, ...]:
        """Names of the large tensors that come with every sample."""
        wanted = {ROUTED_EXPERTS: self.use_rollout_routing_replay, KEPT_TOKENS: self.use_top_p_replay}
        return tuple(name for name, given in wanted.items() if given)

    @model_validator(mode="after")
    def _check_replay(self) -> Self:
        for key in ("use_routing_replay", "use_rollout_routing_replay", "use_top_p_replay"):
            if getattr(self, key) and self.loss_type == "sft_loss":
                raise ValueError(f"{key} has no meaning with loss_type sft_loss, which has no old policy; leave it out")
        if self.use_routing_replay and not self.use_rollout_routing_replay and self.use_rollout_logprobs:
            raise ValueError(
                "use_routing_replay records in the pass for the old log-probs, which use_rollout_logprobs leaves out;"
                " set use_rollout_routing_replay, or leave one of them out"
            )
        if self.use_routing_replay and not self.use_rollout_routing_replay and self.keep_old_actor:
            raise ValueError(
                "use_routing_replay with keep_old_actor: the old log-probs are by the weights of several versions,"
                " which route differently; set use_rollout_routing_replay, or leave one of them out"
            )
        return self


def replay_problem(trainer: ReplaySettings, *, engineless: bool, top_p: float, top_k: int) -> str:
    """Why the settings of generation do not fit the trainer's, or an empty string."""
    if engineless and trainer.replays_rollout:
        key = "use_top_p_replay" if trainer.use_top_p_replay else "use_rollout_routing_replay"
        return f"{key} needs engines that tell what they decided; leave it out, or load_debug_rollout_data"
    if trainer.use_top_p_replay and top_p >= 1 and top_k == -1:
        return (
            f"use_top_p_replay has no effect with rollout_top_p {top_p} and rollout_top_k {top_k}: nothing is cut off;"
            " set one of them, or leave it out"
        )
    return ""
