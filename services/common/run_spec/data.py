"""Settings of the prompts, used by the buffer."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from services.common.settings import StrictModel


class DataSettings(StrictModel):
    """The prompts (used by the buffer)."""

    prompt_data: str | None = None
    """JSONL file of prompts, one object a line."""
    input_key: str = "input"
    """Field with the prompt: a string, or a list of chat messages."""
    label_key: str | None = None
    """Field with the expected answer."""
    metadata_key: str | None = None
    """Field with an object that graders and generate functions receive."""
    apply_chat_template: bool = False
    """Render the prompt with the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template."""
    rollout_max_prompt_len: int | None = Field(default=None, ge=1)
    """Leave out rows whose prompt has more tokens than this."""
    rollout_shuffle: bool = False
    """Shuffle the rows anew in every epoch."""
    rollout_seed: int = 42
    """Seed of the shuffle and of deterministic sampling."""
    num_epoch: int | None = Field(default=None, ge=1)
    """Passes over the data; not set: as many as num_rollout needs."""
    eval_prompt_data: tuple[str, ...] = ()
    """Evaluation sets: name and JSONL path in turn; a single path is called "eval"."""
    eval_input_key: str | None = None
    """input_key of the evaluation sets; the same as input_key when not set."""
    eval_label_key: str | None = None
    """label_key of the evaluation sets; the same as label_key when not set."""
    async_buffer_size: int | None = Field(default=None, ge=1)
    """Most finished groups that wait for the trainer; not set: bounded by max_staleness alone."""
    max_prompt_attempts: int = Field(default=5, ge=1)
    """Failed attempts at one prompt after which it is evicted as FAILED."""
    buffer_filter_path: str | None = None
    """Import path of a function that picks the groups of a batch, "package.module.function"; not set: oldest first."""
    run_max_bytes: int | None = Field(default=None, ge=1)
    """Most bytes of payload the run may hold in the store; not set: no bound of its own."""

    @field_validator("eval_prompt_data")
    @classmethod
    def _pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) == 1:
            return ("eval", *value)
        if len(value) % 2:
            raise ValueError("write name and path in turn, as in: --eval-prompt-data math math.jsonl")
        return value

    @property
    def eval_datasets(self) -> dict[str, str]:
        """Path of every evaluation set by name."""
        return dict(zip(self.eval_prompt_data[::2], self.eval_prompt_data[1::2], strict=True))
