"""Settings of the prompts, used by the buffer."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from services.common.run_spec.reward import GRADERS
from services.common.settings import StrictModel


class PromptSet(StrictModel):
    """One data set of a mixture. What is not set is the run's.

    The temperature is always the run's: it also divides the trainer's logits.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name, in statistics and filters."""
    path: str
    """JSONL or parquet file of prompts."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the prompts drawn, relative to the weights of the others."""
    input_key: str | None = None
    """Field with the prompt."""
    label_key: str | None = None
    """Field with the expected answer."""
    metadata_key: str | None = None
    """Field with an object that graders and generate functions receive."""
    apply_chat_template: bool | None = None
    """Render the prompt with the tokenizer's chat template."""
    rm_type: str | None = None
    """Grader of this set."""
    rm_options: dict[str, Any] | None = None
    """Options of that grader, instead of the run's."""
    max_response_len: int | None = Field(default=None, ge=1)
    """Longest response in tokens."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus probability mass."""
    top_k: int | None = None
    """Most likely tokens kept; -1 keeps all."""
    stop: tuple[str, ...] | None = None
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that end a response."""

    @field_validator("rm_type")
    @classmethod
    def _grader(cls, value: str | None) -> str | None:
        if value is not None and value not in GRADERS:
            raise ValueError(f"not a grader; use one of {', '.join(GRADERS)}")
        return value


class DataSettings(StrictModel):
    """The prompts (used by the buffer)."""

    prompt_data: str | None = None
    """File of prompts: JSONL, one object a line, or parquet (.parquet)."""
    prompt_data_mixture: tuple[PromptSet, ...] = ()
    """Several data sets instead of prompt_data, each a mapping of name, path, weight and what differs from the run:
    input_key, label_key, metadata_key, apply_chat_template, rm_type, rm_options, max_response_len, top_p, top_k, stop,
    stop_token_ids."""
    curriculum_path: str | None = None
    """Import path of a function that chooses the weights of the mixture for every batch of prompts, imported by the
    buffer, "package.module.function"; not set: the weights stay."""
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
    """Leave out rows whose prompt has more tokens than this; beyond the first 10,000 rows when they are drawn."""
    rollout_shuffle: bool = False
    """Shuffle the rows of every data set anew in every epoch."""
    rollout_seed: int = 42
    """Seed of the shuffle and of deterministic sampling."""
    num_epoch: int | None = Field(default=None, ge=1)
    """Passes over the data (of a mixture: over as many prompts as all its sets have); not set: as many as num_rollout
    needs."""
    eval_prompt_data: tuple[str, ...] = ()
    """Evaluation sets: name and path of a JSONL or parquet file in turn; a single path is called "eval". One named as a
    set of the mixture takes that set's fields and grader."""
    eval_input_key: str | None = None
    """input_key of the evaluation sets; the same as input_key when not set."""
    eval_label_key: str | None = None
    """label_key of the evaluation sets; the same as label_key when not set."""
    async_buffer_size: int | None = Field(default=None, ge=1)
    """Most finished groups that wait for the trainer; not set: bounded by max_staleness alone."""
    max_prompt_attempts: int = Field(default=5, ge=1)
    """Failed attempts at one prompt after which it is evicted as FAILED."""
    max_malformed_rows: int = Field(default=100, ge=0)
    """Malformed rows that are evicted when drawn before the run is failed; the first 10,000 rows of a file are checked
    when the run is created, and one malformed row among them refuses it."""
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

    @model_validator(mode="after")
    def _check(self) -> DataSettings:
        names = [part.name for part in self.prompt_data_mixture]
        if names and self.prompt_data is not None:
            raise ValueError("prompt_data and prompt_data_mixture are both set; a run has one of them")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"prompt_data_mixture has two data sets called {twice!r}; give each its own name")
        if self.curriculum_path and not names:
            raise ValueError("curriculum_path chooses the weights of a mixture; set prompt_data_mixture")
        return self

    @property
    def eval_datasets(self) -> dict[str, str]:
        """Path of every evaluation set by name."""
        return dict(zip(self.eval_prompt_data[::2], self.eval_prompt_data[1::2], strict=True))
