"""Gathering beside everything else: buckets are there one by one, and whatever changes the weights waits for all."""

from __future__ import annotations

import hashlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from services.trainer.core import commands
from services.trainer.core.buckets import TensorSpec
from services.trainer.core.commands import ChecksumRule
from services.trainer.ranks import weights
from services.trainer.ranks.companions import Companions
from services.trainer.ranks.groups import WeightGroups
from services.trainer.ranks.worker import RankWorker

SPECS = tuple(TensorSpec(name, "float32", (256,)) for name in "abc")
CPU = torch.device("cpu")


class Model:
    """Three tensors; each is gathered when it may be."""

    def __init__(self) -> None:
        self.may = {name: threading.Event() for name in "abc"}
        self.values = {name: torch.full((256,), float(number)) for number, name in enumerate("abc")}
        self.broken = False

    def gather(self, *_args):
        for name, go_on in self.may.items():
            assert go_on.wait(10)
            if self.broken:
                raise MemoryError("no room")
            yield name, self.values[name]

    def let(self, *names: str) -> None:
        for name in names:
            self.may[name].set()


@pytest.fixture
def model(monkeypatch) -> Model:
    made = Model()
    state = SimpleNamespace(get_data_parallel_rank=lambda **_: 0, get_tensor_model_parallel_rank=lambda: 0)
    monkeypatch.setattr(weights, "parallel_state", state)
    monkeypatch.setattr(weights, "list_weights", lambda *_: SPECS)
    monkeypatch.setattr(weights, "gather_weights", made.gather)
    return made


def until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_bucket_is_there_before_the_next_is_gathered(model):
    staging = weights.Staging(model, None, 1024, CPU)
    staged = staging.staged
    assert [len(bucket) for bucket in staged.plan.buckets] == [1, 1, 1]
    assert not staged.gathered(0)
    model.let("a")
    until(lambda: staged.gathered(0))
    assert not staged.gathered(1)
    expected = hashlib.sha256(model.values["a"].numpy()).hexdigest()[:16]
    assert staged.checksums({"x": ChecksumRule(("a",))}, "sha256-64") == {"x": expected}
    model.let("b", "c")
    staging.finish()
    assert staged.gathered(2)
    assert torch.equal(torch.cat(staged.buckets).view(torch.float32), torch.cat(list(model.values.values())))


def test_checksums_wait_for_their_bucket(model):
    model.let("a", "b")
    staging = weights.Staging(model, None, 1024, CPU)
    threading.Timer(0.05, model.let, "c").start()
    rules = {"ca": ChecksumRule(("c", "a"), 4)}
    content = model.values["c"].numpy().tobytes() + model.values["a"].numpy().tobytes() + bytes(4)
    assert staging.staged.checksums(rules, "sha256-64") == {"ca": hashlib.sha256(content).hexdigest()[:16]}


def test_memory_is_used_again_when_nobody_needs_it(model):
    model.let("a", "b", "c")
    first = weights.Staging(model, None, 1024, CPU)
    first.finish()
    second = weights.Staging(model, None, 1024, CPU, first.staged)
    second.finish()
    other = weights.Staging(model, None, 2048, CPU, second.staged)
    other.finish()
    places = [bucket.data_ptr() for bucket in first.staged.buckets]
    assert [bucket.data_ptr() for bucket in second.staged.buckets] == places
    assert other.staged.buckets[0].data_ptr() not in places


def test_what_hinders_gathering_is_told_to_all(model):
    model.broken = True
    staging = weights.Staging(model, None, 1024, CPU)
    model.let("a")
    with pytest.raises(RuntimeError, match="could not be gathered: no room"):
        staging.staged.checksums({"x": ChecksumRule(("b",))}, "sha256-64")
    with pytest.raises(MemoryError, match="no room"):
        staging.finish()


def test_the_next_command_waits_and_those_aside_do_not(model):
    worker = RankWorker(0, 1, "127.0.0.1", 0)
    worker._ready, worker._device, worker._groups = True, CPU, WeightGroups(CPU)
    worker._policy = SimpleNamespace(model=model, hf=None, beside=Companions(), optimizer_steps=0)
    worker._files = SimpleNamespace(reads_staged=False)
    assert worker.execute(commands.StageWeights(1024)).value.total_bytes == 3072
    model.let("a")
    rules = {"x": ChecksumRule(("a",))}
    assert worker.execute(commands.Checksums(rules, "sha256-64")).value
    assert worker.execute(commands.SendWeights(("absent",), 1.0)).value is None
    threading.Timer(0.1, model.let, ("b", "c")).start()
    began = time.monotonic()
    assert worker.execute(commands.StageWeights(1024)).value is not None
    assert time.monotonic() - began >= 0.09
    worker.execute(commands.ReleaseWeights())  # all is gathered
    model.broken = True
    worker.execute(commands.StageWeights(1024))
    assert "no room" in worker.execute(commands.ListWeights()).error
