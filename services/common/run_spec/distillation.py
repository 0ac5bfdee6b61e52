"""Settings of on-policy distillation; part of the trainer's group."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from services.common.settings import StrictModel


class DistillationSettings(StrictModel):
    """A teacher that grades every token of what the policy wrote (used by the trainer, and by rollout nodes)."""

    use_opd: bool = False
    """On-policy distillation: pull the policy towards a teacher on the tokens that the policy itself wrote."""
    opd_type: Literal["sglang", "megatron"] = "sglang"
    """Where the teacher is. sglang: an engine at opd_teacher_url, asked by rollout nodes after each group. megatron: a
    second, frozen model on the trainer's ranks."""
    opd_kl_coef: float = Field(default=1.0, gt=0)
    """Weight of the KL to the teacher: in the advantages, or with opd_top_k in the loss."""
    opd_teacher_url: str | None = None
    """Base URL of the teacher: any engine or router with SGLang's /generate, for instance http://host:30000. It must
    share the policy's vocabulary."""
    opd_teacher_timeout: float = Field(default=120.0, gt=0)
    """Seconds until the teacher has answered for a sample, tries included; after that its prompt is generated again."""
    opd_teacher_load: str | None = None
    """Hugging Face checkpoint of the teacher on the ranks; of any supported architecture and size with the policy's
    vocabulary."""
    opd_top_k: int | None = Field(default=None, ge=1, le=1024)
    """Learn the teacher's distribution over its k most likely tokens at every place, by a term of the loss, instead of
    its log-probs of the sampled tokens by the advantage. With an engine this adds 8 · k bytes a token to a sample."""

    @property
    def opd_sampled(self) -> bool:
        """The teacher's log-probs of sampled tokens enter the advantage."""
        return self.use_opd and self.opd_top_k is None

    @model_validator(mode="after")
    def _check_distillation(self) -> Self:
        self._check_used()
        if not self.use_opd:
            return self
        needed, other = "opd_teacher_url", "opd_teacher_load"
        if self.opd_type == "megatron":
            needed, other = other, needed
        what = {"opd_teacher_url": "the URL of an engine", "opd_teacher_load": "a Hugging Face checkpoint"}
        if not getattr(self, needed):
            raise ValueError(f"opd_type {self.opd_type} needs {needed}, {what[needed]}")
        if getattr(self, other):
            remedy = "megatron" if other == "opd_teacher_load" else "sglang"
            raise ValueError(
                f"{other} {getattr(self, other)} has no effect with opd_type {self.opd_type}; leave it out, or set"
                f" opd_type {remedy}"
            )
        if self.opd_teacher_url is not None:
            check_url(self.opd_teacher_url)
        return self

    def opd_problem(self, loss_type: str, temperature: float, *, top_p_replay: bool) -> str:
        """What does not go together with distillation, in one sentence, or an empty string."""
        if not self.use_opd:
            return ""
        if loss_type != "policy_loss":
            return f"use_opd has no effect with loss_type {loss_type}; set policy_loss, or leave use_opd out"
        if self.opd_top_k is not None and top_p_replay:
            return (
                f"opd_top_k {self.opd_top_k} with use_top_p_replay: the policy's log-probs are over the tokens that"
                " top-p left, the teacher's over all; leave one of them out"
            )
        if self.opd_type == "sglang" and top_p_replay:
            return (
                "opd_type sglang with use_top_p_replay: an engine gives log-probs over all tokens, the policy's are"
                " over those that top-p left; use opd_type megatron, or leave one of them out"
            )
        if self.opd_type == "sglang" and temperature != 1:
            return (
                f"rollout_temperature {temperature} with opd_type sglang: an engine gives log-probs of given tokens at"
                " temperature 1 only; set rollout_temperature 1, or opd_type megatron"
            )
        return ""

    def _check_used(self) -> None:
        defaults = DistillationSettings.model_fields
        for name in defaults if not self.use_opd else ():
            if name != "use_opd" and getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} {getattr(self, name)} has no effect without use_opd; set it too")
        if self.use_opd and self.opd_type == "megatron" and self.opd_teacher_timeout != 120.0:
            raise ValueError("opd_teacher_timeout has no effect with opd_type megatron: the teacher is on the ranks")


def check_url(url: str) -> None:
    """Raises ValueError unless it is an http(s) URL with a host and nothing that a request would lose."""
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:  # no port
        known = False
    if not known or parts.query or parts.fragment:
        raise ValueError(f"opd_teacher_url {url} is no base URL; write it like http://host:30000")
