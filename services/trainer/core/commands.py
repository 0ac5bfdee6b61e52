"""What the controller tells a rank, and what a rank answers: frozen, picklable values, no torch.

A rank is `python -m services.trainer.ranks --socket PATH --rank R --world-size W --master-port P`. It connects to the
controller's Unix socket (`multiprocessing.connection`, key in the environment variable `TETRARCH_RANK_KEY`), says
`Hello`, and then answers every command, one at a time and in order, with a `Result` or a `Failure`. It ends when
the connection closes or after `Shutdown`.

Rank 0 makes a second connection, with `Hello.aside`, for the commands of `ASIDE`: they move staged weights and are
carried out beside whatever the rank is doing, also beside each other. Each travels with a number, and so does its
answer, which comes when it is done.

"collective" commands must be sent to every rank, else the ranks wait for each other; the others go to rank 0.
After the `Failure` of a collective command the ranks no longer agree: end them all and start from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from services.trainer.core.buckets import BucketPlan, TensorSpec
from services.trainer.core.file_commands import FilesWritten, WriteFiles
from services.trainer.core.schedule import StepPlan

KEY_VARIABLE = "TETRARCH_RANK_KEY"
"""Environment variable with the hex authentication key of the socket."""


@dataclass(frozen=True)
class Hello:
    """First message of a rank, on each of its connections."""

    rank: int
    pid: int
    aside: bool = False


@dataclass(frozen=True)
class Result:
    """Answer of a command that was carried out; `value` is what the command's docstring names."""

    value: object = None


@dataclass(frozen=True)
class Failure:
    """Answer of a command that failed: one sentence for the user, a traceback for the log."""

    error: str
    traceback: str = ""
    reason: str = "RANK_FAILED"


@dataclass(frozen=True)
class Setup:
    """Collective, first. Builds model and optimizer and loads `rollout.hf_checkpoint`. → SetupResult."""

    spec_json: str
    device: str
    """"cpu" or "cuda" (never "auto")."""
    critic: bool = False
    """These ranks are the critic's: the model has a value head, and is trained by ComputeValues and TrainCritic."""


@dataclass(frozen=True)
class SetupResult:
    """What the controller must know of the ranks. `collective_env` must agree over a weight group."""

    torch_version: str
    nccl_version: str
    backends: tuple[str, ...]
    collective_env: Mapping[str, str]
    parameter_count: int
    data_parallel_size: int
    data_parallel_rank: int
    tensor_parallel_size: int
    seconds: float


@dataclass(frozen=True)
class Load:
    """Collective. Restores model, optimizer and counters from a trainer checkpoint: one checkpoint's own
    directory, or a directory of checkpoints with a `latest` file. `new_run`: the checkpoint is another run's, so the
    learning rate begins its schedule anew. A critic takes its own part of the checkpoint; when another run had no
    critic it goes on with the weights of its Setup. → LoadResult."""

    path: str
    new_run: bool = False


@dataclass(frozen=True)
class LoadResult:
    """Steps (rollout batches) and optimizer steps contained in the loaded checkpoint."""

    step_count: int
    optimizer_steps: int


@dataclass(frozen=True)
class TrainStep:
    """Collective. Fetches this rank's samples from the buffer and trains every optimizer step. → TrainResult.

    `step` counts from 0 and must follow the last one trained or loaded. `advantages` has one value per scored
    sample; a sample without one has weight zero (sft_loss needs none). The learning rate follows from the run's
    settings and the rank's own count of optimizer steps.
    """

    step: int
    run_id: str
    buffer_address: str
    plan: StepPlan
    advantages: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """ppo: the critic's value of the state before every trained token, float32 [trained tokens], by sample."""
    update: bool = True
    """False while the critic is trained alone: returns and metrics are computed, and nothing is updated; the step
    counts, its optimizer steps do not."""
    critic_plan: StepPlan | None = None
    """The same samples dealt to the critic's ranks; not for the actor."""


@dataclass(frozen=True)
class TrainResult:
    """Metrics, equal on all ranks, and this rank's seconds by part.

    metrics: loss, pg_loss, kl_loss, entropy, ppo_kl, pg_clipfrac, ratio_mean, ratio_max, grad_norm, lr,
    trained_tokens, total_tokens, optimizer_steps; ppo_kl_first, of the first optimizer step; trainer against engine,
    over all trained tokens of all ranks whose weights are known, before any update, and left out where there is none:
    log_prob_diff_mean (trainer − engine), log_prob_abs_diff_mean, log_prob_abs_diff_p99 (the smallest difference that
    99% of the tokens do not exceed), log_prob_abs_diff_max, and `mis_<name>` of `corrections.mismatch_metrics`. Means
    over the optimizer steps of the batch, except counts, maxima and lr. With use_rollout_logprobs, and without
    corrections, later optimizer steps know no log-probs of before the update; the first stands for all then.
    With their settings: kl (to the reference, mean over all trained tokens), kl_coef (of an adaptive controller, at
    this step), reference_step, kept_missing_fraction (tokens whose weights keep_old_actor has no more), those of
    `corrections.correction_metrics`, opsm_fraction (tokens left out), behave_weight, behave_dropped_fraction,
    `custom_<name>` of a custom loss.
    seconds: fetch, pack, old_log_probs, ref_log_probs, token_stage, forward_backward, optimizer, metrics, total.
    """

    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    returns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """ppo: what the critic's values should have been, float32 [trained tokens], by sample of this rank."""


@dataclass(frozen=True)
class ComputeValues:
    """Collective, to a critic. Fetches this rank's samples, and values the state before every trained token. Which
    samples are trained: those in `advantages`. → ValuesResult."""

    step: int
    run_id: str
    buffer_address: str
    plan: StepPlan
    advantages: Mapping[str, float]


@dataclass(frozen=True)
class ValuesResult:
    """float32 [trained tokens] by sample of this rank, and its seconds by part."""

    values: Mapping[str, np.ndarray]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class TrainCritic:
    """Collective, to a critic, after ComputeValues of the same step, whose samples it has. → TrainResult with metrics
    value_loss, value_clipfrac, explained_variance (1 − Var(returns − values) / Var(returns) of the values before the
    step), value_mean, return_mean, critic_grad_norm, critic_lr."""

    step: int
    returns: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ListWeights:
    """Any rank. → tuple[TensorSpec, ...] in the order of every update."""


@dataclass(frozen=True)
class StageWeights:
    """Collective. Begins to gather the full tensors and answers; rank 0 keeps them as flat byte buckets until
    ReleaseWeights or the next StageWeights. Whatever the ranks are asked next, but for the commands of `ASIDE`, waits
    until all is gathered. → BucketPlan on rank 0, None elsewhere."""

    bucket_bytes: int
    version: int = 0
    """As which they are pushed; runs with keep_old_actor remember them by it. 0: as none."""


@dataclass(frozen=True)
class ChecksumRule:
    """A tensor held by an engine: the bytes of the tensors `sources` in this order, then `padding_bytes` zeros."""

    sources: tuple[str, ...]
    padding_bytes: int = 0


@dataclass(frozen=True)
class Checksums:
    """Rank 0, aside, after StageWeights. `rules`: held tensor's name → how it is made up. `algorithm`: one of
    `services.checksums.names`. → dict of held tensor's name → 16 hex digits."""

    rules: Mapping[str, ChecksumRule]
    algorithm: str


@dataclass(frozen=True)
class GroupSpec:
    """A weight group: a communicator of the trainer (rank 0, hosts the rendezvous) and engine ranks."""

    name: str
    backend: str
    master_address: str
    master_port: int
    world_size: int


@dataclass(frozen=True)
class JoinGroups:
    """Rank 0, aside. Begins to join groups, each on a thread of its own, for at most `timeout` seconds. → None, at
    once: that an engine has joined is for the engine to say, and what failed here for `GroupErrors`."""

    groups: tuple[GroupSpec, ...]
    timeout: float


@dataclass(frozen=True)
class SendWeights:
    """Rank 0, aside, after StageWeights. Begins to broadcast all buckets in order over each group, on a thread of its
    own, for at most `timeout` seconds in all; a bucket leaves as soon as it is gathered. → None, at once."""

    group_names: tuple[str, ...]
    timeout: float


@dataclass(frozen=True)
class GroupErrors:
    """Rank 0, aside. What went wrong on this side. → dict name → error, None for a group that is well or at work."""

    group_names: tuple[str, ...]


@dataclass(frozen=True)
class LeaveGroups:
    """Rank 0, aside. Leaves groups, also while they are joined or sent to; unknown names are no error. → None, at
    once: an abort of a communicator takes its time on a thread."""

    group_names: tuple[str, ...]


@dataclass(frozen=True)
class ReleaseWeights:
    """Rank 0. Frees the staged buckets. → None."""


@dataclass(frozen=True)
class SaveCheckpoint:
    """Collective. Writes `path`/step_NNNNNN and then `path`/latest. A critic writes its part beside them instead, where
    only the actor's command of the same step count, `with_critic`, makes it part of the checkpoint. → SaveResult."""

    path: str
    step_count: int
    with_critic: bool = False


@dataclass(frozen=True)
class SaveResult:
    """Directory of the checkpoint, and seconds it took. `problem`: why there is none; the ranks can go on."""

    path: str
    seconds: float
    problem: str = ""


@dataclass(frozen=True)
class ExportHf:
    """Collective. Writes a Hugging Face checkpoint with tokenizer files. → ExportResult."""

    path: str


@dataclass(frozen=True)
class ExportResult:
    """Directory of the export and its bytes of weights."""

    path: str
    total_bytes: int


@dataclass(frozen=True)
class Shutdown:
    """Ends the rank after its answer. → None."""


Command = (
    Setup
    | Load
    | TrainStep
    | ComputeValues
    | TrainCritic
    | ListWeights
    | StageWeights
    | Checksums
    | JoinGroups
    | SendWeights
    | GroupErrors
    | LeaveGroups
    | WriteFiles
    | FilesWritten
    | ReleaseWeights
    | SaveCheckpoint
    | ExportHf
    | Shutdown
)

ASIDE = (Checksums, JoinGroups, SendWeights, GroupErrors, LeaveGroups, WriteFiles, FilesWritten)

__all__ = ["ASIDE", "BucketPlan", "Command", "StepPlan", "TensorSpec"]
