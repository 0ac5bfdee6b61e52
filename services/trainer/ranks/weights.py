"""Weight updates, the sending side: full tensors as flat byte buckets, and what engines must hold of them.

Knows megatron's model through `model.hf_weights`, and nothing of groups (`groups`) or engines. Invariant: the staged
bytes are a copy: they stay as they are while the model trains on, for engines that join late. On a GPU that is a second
copy of the model's weights (in the dtype they are sent in) beside the model, on rank 0 alone.

Gathering goes on while buckets that are full are sent and their checksums made: `Staging` fills, others ask `gathered`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping

import torch
from megatron.core import parallel_state

from services.checksums import compute
from services.common.errors import Code, ServiceError
from services.trainer.core.buckets import BucketPlan, TensorSpec, plan_buckets
from services.trainer.core.commands import ChecksumRule
from services.trainer.ranks.model.hf_config import HfConfig
from services.trainer.ranks.model.hf_weights import gather_weights, list_weights

_POLL_SECONDS = 0.0005


class StagedWeights:
    """The weights of one version as flat uint8 buckets on the device, filled in order. A `groups.Source`."""

    def __init__(self, plan: BucketPlan, buckets: list[torch.Tensor]) -> None:
        self.plan, self.buckets = plan, buckets
        self._marks: list[torch.cuda.Event | None] = []
        self._error: Exception | None = None
        self._beside: torch.cuda.Stream | None = None
        self._digests: dict[tuple[ChecksumRule, str], str] = {}
        self._places: dict[str, tuple[int, torch.Tensor]] = {}
        for index, (bucket, specs) in enumerate(zip(buckets, plan.buckets, strict=True)):
            offset = 0
            for spec in specs:
                self._places[spec.name] = index, bucket[offset : offset + spec.size_bytes]
                offset += spec.size_bytes

    def view(self, spec: TensorSpec) -> torch.Tensor:
        """Where a tensor goes."""
        return self._places[spec.name][1].view(getattr(torch, spec.dtype)).view(spec.shape)

    def filled(self, index: int) -> None:
        """Says that the present stream fills the next bucket, `index`."""
        assert index == len(self._marks)
        device = self.buckets[index].device
        self._marks.append(torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None)

    def fail(self, error: Exception) -> None:
        """Says that no more buckets will be filled."""
        self._error = error

    def gathered(self, index: int) -> bool:
        """Whether a bucket is filled, or will be when its mark is reached. Raises what hindered it."""
        if index < len(self._marks):
            return True
        if self._error is not None:
            raise RuntimeError(f"the weights could not be gathered: {self._error}")
        return False

    def mark(self, index: int) -> torch.cuda.Event | None:
        """Event of a gathered bucket on a GPU."""
        return self._marks[index]

    def checksums(self, rules: Mapping[str, ChecksumRule], algorithm: str) -> dict[str, str]:
        """Checksum by rule name, over the named tensors' bytes, in order, and the padding. `algorithm`: see
        `services.checksums.compute`.

        Raises:
            ServiceError: UNKNOWN_TENSOR when a rule names a tensor that is not sent.
        """
        new = {rule: name for name, rule in rules.items() if (rule, algorithm) not in self._digests}
        parts = {rule: self._parts(name, rule) for rule, name in new.items()}
        # In the order of the buckets, so that those that are there are worked on while others are gathered.
        for last, some in itertools.groupby(sorted(new, key=lambda rule: parts[rule][0]), lambda rule: parts[rule][0]):
            listed = list(some)
            contents = [compute.Content(parts[rule][1], rule.padding_bytes) for rule in listed]
            with self._after(last):
                values = compute.digests(contents, algorithm)
            self._digests |= zip([(rule, algorithm) for rule in listed], values, strict=True)
        return {name: self._digests[rule, algorithm] for name, rule in rules.items()}

    @contextlib.contextmanager
    def _after(self, index: int) -> Iterator[None]:
        """Work on buckets up to `index`; on a GPU in a stream of its own, beside whatever the model does."""
        while not self.gathered(index):  # ends with the thread that gathers
            time.sleep(_POLL_SECONDS)
        if (mark := self.mark(index)) is None:
            yield
            return
        device = self.buckets[index].device
        torch.cuda.set_device(device)
        self._beside = self._beside or torch.cuda.Stream(device)
        self._beside.wait_event(mark)
        with torch.cuda.stream(self._beside):
            yield

    def _parts(self, name: str, rule: ChecksumRule) -> tuple[int, list[torch.Tensor]]:
        """The last bucket that they are in, and the bytes of the sources."""
        missing = [source for source in rule.sources if source not in self._places]
        if missing:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "UNKNOWN_TENSOR",
                f"Checksum rule {name} needs tensor {missing[0]}, which the trainer does not have.",
                rule=name,
                tensor=missing[0],
            )
        places = [self._places[source] for source in rule.sources]
        return max((index for index, _ in places), default=0), [part for _, part in places]


class Staging:
    """Gathering under way: on a thread of its own and, on a GPU, on a stream of its own, bucket by bucket. Collective:
    all tensor-parallel ranks begin it, and none may use the model's group, or change the weights, before `finish`.

    Args:
        model, hf: whose weights.
        bucket_bytes: most bytes of a bucket.
        device: of the model.
        before: staged weights that nobody needs any more; their memory is used again where it fits.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        hf: HfConfig,
        bucket_bytes: int,
        device: torch.device,
        before: StagedWeights | None = None,
    ) -> None:
        self.staged: StagedWeights | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._model, self._hf, self._device = model, hf, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) > 0:
            return  # the same weights as data- and context-parallel rank 0
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            plan = plan_buckets(list_weights(model, hf), bucket_bytes)
            with torch.cuda.stream(self._stream):
                self.staged = StagedWeights(plan, _memory(plan, device, before))
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread = threading.Thread(target=self._run, name="gather", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._stream:
                torch.cuda.set_device(self._device)
            with torch.cuda.stream(self._stream):
                self._gather()
        except Exception as error:
            self._error = error
            if self.staged:
                self.staged.fail(error)

    def _gather(self) -> None:
        tensors = gather_weights(self._model, self._hf)
        if self.staged is None:
            for _ in tensors:
                pass
            return
        for index, specs in enumerate(self.staged.plan.buckets):
            for spec in specs:
                name, tensor = next(tensors)
                assert name == spec.name
                self.staged.view(spec).copy_(tensor)
            self.staged.filled(index)

    def finish(self) -> None:
        """Waits until all is gathered; later work of this thread's stream comes after it. Raises what went wrong."""
        if self._thread is None:
            return
        self._thread.join()  # collective: the controller's deadline ends a rank that waits for a dead one
        if self._error is not None:
            raise self._error
        if self._stream:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._thread = None


def _memory(plan: BucketPlan, device: torch.device, before: StagedWeights | None) -> list[torch.Tensor]:
    sizes = [sum(spec.size_bytes for spec in specs) for specs in plan.buckets]
    if before is not None and [bucket.numel() for bucket in before.buckets] == sizes:
        return before.buckets
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
