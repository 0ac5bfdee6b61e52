"""Settings of scoring, used by rollout nodes when they call the reward service."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from services.common.settings import StrictModel

GRADERS = ("exact_match", "math", "custom")


class RewardSettings(StrictModel):
    """Scoring (used by rollout nodes when they call the reward service)."""

    rm_type: str = "exact_match"
    """Grader: exact_match, math or custom."""
    custom_rm_path: str | None = None
    """Import path of a reward function, "package.module.function"; implies rm_type custom."""
    rm_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the grader."""
    rm_timeout: float = Field(default=30.0, gt=0)
    """Seconds until a sample counts as unscored."""
    group_rm: bool = False
    """Give a custom function all samples of a group in one call."""
    overlong_buffer_len: int | None = Field(default=None, ge=1)
    """Soft over-long penalty: the trainer lowers the reward of a response in the last so many tokens below
    rollout_max_response_len, the more the longer it is. Filters see rewards without it. Not set: none."""
    overlong_penalty_factor: float = Field(default=1.0, gt=0)
    """Penalty at rollout_max_response_len."""

    @model_validator(mode="before")
    @classmethod
    def _custom(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("custom_rm_path") and "rm_type" not in data:
            return {**data, "rm_type": "custom"}
        return data

    @model_validator(mode="after")
    def _check(self) -> RewardSettings:
        if self.rm_type not in GRADERS:
            raise ValueError(f"rm_type {self.rm_type!r} is not a grader; use one of {', '.join(GRADERS)}")
        if self.rm_type == "custom" and not self.custom_rm_path:
            raise ValueError("rm_type custom needs custom_rm_path, the import path of the reward function")
        if self.custom_rm_path and self.rm_type != "custom":
            raise ValueError(f"custom_rm_path is set but rm_type is {self.rm_type!r}; set rm_type to custom")
        if self.overlong_penalty_factor != 1 and self.overlong_buffer_len is None:
            raise ValueError(
                f"overlong_penalty_factor {self.overlong_penalty_factor} has no effect without overlong_buffer_len; set"
                " it too"
            )
        return self
