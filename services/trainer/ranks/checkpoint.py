"""Trainer checkpoints: model, optimizer, companions and counters in megatron's format, independent of the layout.

`directory`/step_NNNNNN is a checkpoint, `directory`/latest names the newest complete one. A checkpoint is written
beside its place, renamed, and only then named in `latest`: whenever a process dies, `latest` names a complete one.

A critic's ranks write their part beside it first, as `directory`/.critic_NNNNNN, which nothing reads. The actor's ranks
move it into the checkpoint of the same step before they rename that: a checkpoint has both parts, or does not exist.

Nothing random happens in training (no dropout), so there is no generator state to keep.
"""

from __future__ import annotations

import functools
import os
import queue
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint.api import CheckpointException

from services.common.errors import Code, ServiceError
from services.common.fault_points import reach
from services.common.files import write_whole
from services.trainer.ranks.policy import Policy

_LATEST = "latest"
_CRITIC = "critic"
"""The critic's part, in a checkpoint."""
_COMPLETE = "metadata.json"
_SETTINGS = ("weight_decay", "betas", "eps", "fused")
"""Of AdamW, kept when a checkpoint is loaded; the learning rate is set at every step."""


@dataclass(frozen=True)
class Counters:
    """Steps (rollout batches) and optimizer steps contained in a checkpoint."""

    step_count: int
    optimizer_steps: int


class _InProcessWriter(filesystem_async.FileSystemWriterAsync):
    """Writes in this process. Megatron's writer forks, which a process with gRPC threads must not, and starts a manager
    process that imports everything again (5 s at the first save)."""

    def get_save_function_and_args(self):
        save, stage, arguments = super().get_save_function_and_args()
        return (functools.partial(self._write_all, save.args[0]) if save else None), stage, arguments

    @staticmethod
    def _write_all(transforms: list, _rank: int, buckets: list, results: queue.Queue) -> None:
        parts, running = queue.Queue(), queue.Queue()
        outcome: dict | Exception = {}
        for index, bucket in enumerate(buckets):
            running.put(index)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, parts, running, True)
            _, written = parts.get_nowait()
            if isinstance(written, Exception):
                outcome = written
                break
            outcome[index] = written
            reach("rank.mid_checkpoint", part="critic" if "/.critic_" in str(bucket[0]) else "actor")
        results.put(outcome)


filesystem_async._results_queue = queue.Queue()
torch_strategies.FileSystemWriterAsync = _InProcessWriter


def _state(policy: Policy, reference_step: int, *, loading: bool) -> dict:
    model = policy.model.sharded_state_dict()
    state = {"model": model, "optimizer": policy.optimizer.sharded_state_dict(model, is_loading=loading)}
    return state | policy.beside.sharded_state(reference_step)


def save_checkpoint(policy: Policy, directory: str | Path, step_count: int, *, with_critic: bool = False) -> Path:
    """Writes `directory`/step_<step_count> and names it in `latest`. All ranks must call it. `with_critic`: what
    `save_critic` wrote for this step becomes part of it.

    Raises:
        ServiceError: CHECKPOINT_FAILED, on every rank: the disk refused it. Nothing of it is left, the checkpoints
            before it are as they were, and the ranks can go on. Any other error leaves the ranks apart.
    """
    target = Path(directory) / f"step_{step_count:06d}"
    critic = _critic_part(directory, step_count) if with_critic else None
    _write(policy, step_count, target, critic)
    return target


def save_critic(policy: Policy, directory: str | Path, step_count: int) -> Path:
    """Writes the critic's part of a checkpoint. All ranks of the critic must call it. Raises as `save_checkpoint`."""
    target = _critic_part(directory, step_count)
    _write(policy, step_count, target, None)
    return target


def _critic_part(directory: str | Path, step_count: int) -> Path:
    return Path(directory) / f".critic_{step_count:06d}"


def _write(policy: Policy, step_count: int, target: Path, critic: Path | None) -> None:
    scratch = target.parent / f".{target.name.lstrip('.')}.writing"
    companions = policy.beside.numbers()
    state = _state(policy, int(companions.get("reference_step", 0)), loading=False)
    state["companions"] = companions
    state["counters"] = {"step_count": step_count, "optimizer_steps": policy.optimizer_steps}
    while not filesystem_async._results_queue.empty():  # of a save that failed
        filesystem_async._results_queue.get_nowait()
    try:
        _make_room(target, scratch)
        dist_checkpointing.save(state, str(scratch), sharded_strategy=_strategy())
        _publish(scratch, target, critic)
    except CheckpointException as error:  # a BaseException, which would end the process
        raise _failed(target, scratch, _cause(error)) from error
    except OSError as error:
        if dist.get_world_size() > 1:
            raise  # the other ranks wait for this one
        raise _failed(target, scratch, str(error)) from error


def _make_room(target: Path, scratch: Path) -> None:
    """An empty place for a checkpoint, on a disk that has room for one as large as the last. Raises CheckpointException
    on every rank when it has not."""
    told = [_refusal(target, scratch) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told)
    if told[0]:
        raise CheckpointException("room", {0: (OSError(told[0]), None)})  # pyright: ignore


def _refusal(target: Path, scratch: Path) -> str:
    """Makes the place; → why it cannot be used, or an empty string."""
    root = target.parent
    first = target.name.startswith(f".{_CRITIC}")
    try:
        for left in [*root.glob(".step_*.writing"), *(root.glob(f".{_CRITIC}_*") if first else ())]:
            shutil.rmtree(left, ignore_errors=True)
        scratch.mkdir(parents=True)
        # What is written first needs room for both parts.
        needed, free = _size_of_latest(root, whole=first), shutil.disk_usage(root).free
    except OSError as error:
        return str(error)
    return f"{free / 1e6:.1f} MB are free, the last one took {needed / 1e6:.1f} MB" if free < needed else ""


def _size_of_latest(root: Path, *, whole: bool) -> int:
    """Bytes of the checkpoint that `latest` names, with its critic's if `whole`; 0 without one."""
    try:
        target = root / (root / _LATEST).read_text().strip()
        files = (path for path in target.rglob("*") if path.is_file())
        return sum(path.stat().st_size for path in files if whole or path.parent.name != _CRITIC)
    except OSError:
        return 0


def _publish(scratch: Path, target: Path, critic: Path | None) -> None:
    """Gives what was written its place, and names a checkpoint in `latest`."""
    if dist.get_rank() == 0:
        if critic is not None:
            os.rename(critic, scratch / _CRITIC)
            reach("rank.critic_joined")
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
        if not target.name.startswith("."):
            reach("rank.before_latest")
            write_whole(target.parent / _LATEST, f"{target.name}\n".encode())
    dist.barrier()


def _failed(target: Path, scratch: Path, why: str) -> ServiceError:
    if dist.get_rank() == 0:
        for left in (scratch, *target.parent.glob(f".{_CRITIC}_*")):
            shutil.rmtree(left, ignore_errors=True)
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "CHECKPOINT_FAILED",
        f"The checkpoint {target} could not be written ({why}); make room on that disk.",
        path=target,
    )


def _cause(error: CheckpointException) -> str:
    return "; ".join(str(failure[0]) for failure in error.failures.values())


def _strategy() -> torch_strategies.TorchDistSaveShardedStrategy:
    return torch_strategies.TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)


def _resolve(path: str | Path) -> Path:
    root = Path(path)
    target = root
    if (root / _LATEST).exists():
        target = root / (root / _LATEST).read_text().strip()
    if not (target / _COMPLETE).exists():
        raise ServiceError(
            Code.NOT_FOUND,
            "CHECKPOINT_INVALID",
            f"load {path}: {target} is not a complete trainer checkpoint; give a directory with a"
            f" `{_LATEST}` file, or a step_NNNNNN directory in it.",
            path=path,
        )
    return target


def load_checkpoint(policy: Policy, path: str | Path, *, new_run: bool = False) -> Counters:
    """Restores model and optimizer from a checkpoint, or from the latest one in a directory. All ranks must call it.

    The optimizer keeps the settings it was built with. With `new_run` the policy counts its optimizer steps, and so the
    schedule of learning rates, from 0; its companions stay what they are.

    Raises:
        ServiceError: CHECKPOINT_INVALID.
    """
    return _read(policy, _resolve(path), new_run=new_run)


def load_critic(policy: Policy, path: str | Path, *, new_run: bool = False) -> Counters:
    """The same with the critic's part. A `new_run` keeps the weights it has when the checkpoint has no critic.

    Raises:
        ServiceError: CHECKPOINT_INVALID.
    """
    whole = _resolve(path)
    if (whole / _CRITIC / _COMPLETE).exists():
        return _read(policy, whole / _CRITIC, new_run=new_run)
    if new_run:
        return Counters(dist_checkpointing.load_common_state_dict(str(whole))["counters"]["step_count"], 0)
    raise ServiceError(
        Code.NOT_FOUND,
        "CHECKPOINT_INVALID",
        f"The checkpoint {whole} has no critic: it is of a run that trained none. Start a run with another run_id and"
        f" --load {path}.",
        path=path,
    )


def _read(policy: Policy, target: Path, *, new_run: bool) -> Counters:
    try:
        common = {} if new_run else dist_checkpointing.load_common_state_dict(str(target))
        companions = common.get("companions", {})
        wanted = _state(policy, int(companions.get("reference_step", 0)), loading=True)
        state = dist_checkpointing.load(wanted, str(target))
    except CheckpointException as error:
        raise ServiceError(
            Code.INTERNAL,
            "CHECKPOINT_FAILED",
            f"The checkpoint {target} could not be read ({_cause(error)}); does it belong to this model?",
            path=target,
        ) from error
    with torch.no_grad():
        policy.model.load_state_dict(state["model"])
    optimizer = state["optimizer"]
    # A step of 0 is not written; mixed precision keeps Adam one level deeper.
    optimizer.get("optimizer", optimizer)["state"].setdefault("common_step", torch.tensor(0.0))
    # The state brings the settings of the run that saved it, which may have been another.
    own = [{name: group[name] for name in _SETTINGS} for group in policy.optimizer.param_groups]
    policy.optimizer.load_state_dict(optimizer)
    for group, settings in zip(policy.optimizer.param_groups, own, strict=True):
        group.update(settings)
        _place_steps(policy.optimizer, group)
    counters = Counters(**state["counters"])
    policy.optimizer_steps = 0 if new_run else counters.optimizer_steps
    policy.beside.restore(companions, state)
    return counters


def _place_steps(optimizer, group: dict) -> None:
    """Adam's fused kernel reads its count on the device; a checkpoint written without it has them on the host."""
    for parameter in group["params"]:
        state = optimizer.optimizer.state[parameter]
        state["step"] = torch.as_tensor(state["step"], device=parameter.device if group["fused"] else "cpu").float()
