"""Weight updates, the sending side: full tensors as flat byte buckets, and the groups they are broadcast over.

Every group is a communicator of its own, joined, used and left on threads of its own, so that one that hangs or breaks
costs its own deadline and nothing else. Group membership follows SGLang's `init_custom_process_group`: a TCP store on
the trainer, prefixed with the group's name, trainer as rank 0.

Invariant: no call here outlasts its timeout by more than `_GRACE_SECONDS`; a thread that does not come back is
abandoned together with its group.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from services.common.errors import Code, ServiceError
from services.trainer.core.buckets import BucketPlan, plan_buckets
from services.trainer.core.commands import ChecksumRule, GroupSpec
from services.trainer.ranks.model.hf_config import HfConfig
from services.trainer.ranks.model.hf_weights import gather_weights, list_weights

_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.001


class StagedWeights:
    """The weights of one version as flat uint8 buckets on the device."""

    def __init__(self, plan: BucketPlan, buckets: list[torch.Tensor]) -> None:
        self.plan, self.buckets = plan, buckets
        self._digests: dict[ChecksumRule, str] = {}
        self._places = {}
        for bucket, specs in zip(buckets, plan.buckets, strict=True):
            offset = 0
            for spec in specs:
                self._places[spec.name] = bucket[offset : offset + spec.size_bytes]
                offset += spec.size_bytes

    def checksums(self, rules: Mapping[str, ChecksumRule]) -> dict[str, str]:
        """ "sha256-64" by rule name: first 8 bytes of SHA-256 over the named tensors' bytes, in order, and the padding.

        Raises:
            ServiceError: UNKNOWN_TENSOR when a rule names a tensor that is not sent.
        """
        return {name: self._digest(name, rule) for name, rule in rules.items()}

    def _digest(self, name: str, rule: ChecksumRule) -> str:
        if rule not in self._digests:
            digest = hashlib.sha256()
            for source in rule.sources:
                if source not in self._places:
                    raise ServiceError(
                        Code.INVALID_ARGUMENT,
                        "UNKNOWN_TENSOR",
                        f"Checksum rule {name} needs tensor {source}, which the trainer does not have.",
                        rule=name,
                        tensor=source,
                    )
                digest.update(memoryview(self._places[source].cpu().numpy()))
            digest.update(bytes(rule.padding_bytes))
            self._digests[rule] = digest.hexdigest()[:16]
        return self._digests[rule]


@torch.no_grad()
def stage_weights(
    model: torch.nn.Module, hf: HfConfig, bucket_bytes: int, device: torch.device
) -> StagedWeights | None:
    """Collects the full tensors; the result is on global rank 0 alone. All tensor-parallel ranks must call it."""
    if parallel_state.get_data_parallel_rank() > 0:
        return None  # the same weights as data-parallel rank 0
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    plan = plan_buckets(list_weights(model, hf), bucket_bytes)
    sizes = [sum(spec.size_bytes for spec in specs) for specs in plan.buckets] if first else []
    staged = StagedWeights(plan, [torch.empty(n, dtype=torch.uint8, device=device) for n in sizes]) if first else None
    for name, tensor in gather_weights(model, hf):
        if staged is not None and tensor is not None:
            staged._places[name].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return staged


class WeightGroups:
    """The groups that this rank (rank 0 of the trainer) is a member of, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, dist.ProcessGroup] = {}

    def join(self, specs: Iterable[GroupSpec], timeout: float) -> dict[str, str | None]:
        """Hosts the rendezvous of every group and joins it. Returns an error sentence or None by name."""
        deadline = timedelta(seconds=timeout)

        def join_one(spec: GroupSpec) -> None:
            self._groups[spec.name] = _new_group(spec, deadline)

        return _on_threads({spec.name: lambda spec=spec: join_one(spec) for spec in specs}, timeout)

    def send(self, tensor: torch.Tensor, names: Iterable[str], timeout: float) -> dict[str, str | None]:
        """Broadcasts a tensor over every named group. Returns an error sentence or None by name; a group that failed
        is left."""
        names = list(names)
        results = _on_threads(
            {name: lambda name=name: self._send_one(tensor, name, timeout) for name in names}, timeout
        )
        self.leave([name for name, error in results.items() if error is not None], broken=True)
        return results

    def _send_one(self, tensor: torch.Tensor, name: str, timeout: float) -> None:
        if name not in self._groups:
            raise ValueError(f"weight group {name} was not joined, or has been left")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=timeout)
        deadline = time.monotonic() + timeout
        work = self._groups[name].broadcast([tensor], options)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end of the transfer after {timeout:g} s")
            time.sleep(_POLL_SECONDS)
        work.wait()

    def leave(self, names: Iterable[str], *, broken: bool = False) -> None:
        """Leaves groups; unknown names are ignored. `broken`: abort instead of an orderly end."""
        gone = {name: self._groups.pop(name) for name in names if name in self._groups}
        end = self._abort if broken else dist.destroy_process_group
        _on_threads({name: lambda group=group: end(group) for name, group in gone.items()}, _GRACE_SECONDS)

    def _abort(self, group: dist.ProcessGroup) -> None:
        if self._device.type == "cuda":
            group._get_backend(self._device).abort()
        dist.destroy_process_group(group)

    def leave_all(self) -> None:
        """Leaves every group."""
        self.leave(list(self._groups))


def _new_group(spec: GroupSpec, timeout: timedelta) -> dist.ProcessGroup:
    store = dist.TCPStore(
        spec.master_address, spec.master_port, spec.world_size, is_master=True, timeout=timeout, multi_tenant=True
    )
    group, _ = distributed_c10d._new_process_group_helper(
        spec.world_size,
        0,
        [],
        dist.Backend(spec.backend),
        dist.PrefixStore(spec.name, store),
        group_name=spec.name,
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(spec.world_size)}
    return group


def _on_threads(calls: Mapping[str, Callable[[], None]], timeout: float) -> dict[str, str | None]:
    """Runs every call on a thread of its own; an error sentence or None by name."""
    results: dict[str, str | None] = {}

    def run(name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            results.setdefault(name, _sentence(error))
        else:
            results.setdefault(name, None)

    threads = {name: threading.Thread(target=run, args=(name, call), daemon=True) for name, call in calls.items()}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + timeout + _GRACE_SECONDS
    for name, thread in threads.items():
        thread.join(max(deadline - time.monotonic(), 0))
        results.setdefault(name, f"did not come back within {timeout:g} s")
    return {name: results[name] for name in calls}


def _sentence(error: Exception) -> str:
    """First line of an error, without the source position and the advice that gloo wraps around it."""
    lines = str(error).strip().splitlines() or ["no message"]
    text = re.sub(r"^\[\S+:\d+\] ", "", lines[0]).split(" This is typically")[0]
    return f"{type(error).__name__}: {text}"
