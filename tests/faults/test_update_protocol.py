"""The update protocol under random histories; `tests.support.scripted_node` holds it to its promises at every turn.

TETRARCH_PROTOCOL_SEEDS=FIRST:COUNT runs others, or more: a history is its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from random import Random

import pytest
import structlog
from tetrarch.common.v1 import tensor_pb2
from tetrarch.rollout.v1 import weight_service_pb2 as pb2

from services.common.errors import ServiceError
from services.rollout.core.engine_state import EngineState
from tests.support import virtual_time
from tests.support.scripted_node import RUN, Network, ScriptedNode
from tests.support.scripted_trainer import ScriptedBuffer, ScriptedTrainer
from tests.support.scripted_wires import TENSORS, Wires, checksums, contents

VARIABLE = "TETRARCH_PROTOCOL_SEEDS"
BUCKETS = (2, 1, 1)


@pytest.fixture(autouse=True)
def _quiet():
    """Histories write more than anybody reads; whoever names a seed sees all of it."""
    with contextlib.nullcontext() if VARIABLE in os.environ else structlog.testing.capture_logs():
        yield


def seeds(count: int) -> range:
    """Histories to run."""
    first, _, many = os.environ.get(VARIABLE, f"0:{count}").partition(":")
    return range(int(first), int(first) + int(many or 1))


class Undisciplined:
    """Two trainers' messages in any order, without waiting for answers; senders that send all, some or wrong bytes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.wires = Wires(self.random)
        self.update_timeout = self.random.choice((2.0, 8.0, 30.0))
        count, staging = self.random.choice((1, 1, 2)), self.random.random() < 0.7
        self.node = ScriptedNode(self.wires, count, self.update_timeout, staging=staging)
        self.networks = [Network(self.node), Network(self.node)]
        self.counters = [0, 0]
        self.versions = 0
        self.updates: list[tuple[int, str, int, str]] = []
        self.tasks: list[asyncio.Task] = []
        self.committed = 0
        self.answers: list[str] = []

    def spawn(self, work) -> None:
        self.tasks.append(asyncio.create_task(work))

    def patience(self, short: float) -> float:
        """Deadline of a call: now and then too short."""
        return short if self.wires.strike(0.3) else self.update_timeout + 5.0

    def new_epoch(self, trainer: int) -> int:
        self.counters[trainer] += 1
        self.versions += 1
        epoch = (trainer + 1) * 1_000_000 + self.counters[trainer]
        self.node.epochs[epoch] = self.versions
        return epoch

    async def tell(self, trainer: int, method: str, message, timeout: float) -> str:
        """Reason of the answer, "OK" for a success."""
        try:
            await getattr(self.networks[trainer], method)(message, timeout)
        except ServiceError as error:
            answer = error.reason
        else:
            answer = "OK"
        self.answers.append(f"{method} {answer}")
        return answer

    async def prepare(self, trainer: int, epoch: int, engine_id: str, group: str) -> str:
        slot = self.node.fleet.slot(engine_id)
        sender = self.wires.group(group)
        if not self.wires.strike(0.1):
            asyncio.get_running_loop().call_later(self.wires.moment(), sender.sender_there.set)
        message = pb2.PrepareUpdateRequest(
            run_id=RUN,
            engine_id=engine_id,
            incarnation=slot.incarnation,
            update_epoch=epoch,
            version=self.node.epochs[epoch],
            group_name=group,
            backend="gloo",
            world_size=2,
            rank_offset=1,
            tensors=[
                tensor_pb2.TensorSpec(name=spec.name, data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=spec.shape)
                for spec in TENSORS
            ],
            bucket_tensor_counts=BUCKETS,
        )
        return await self.tell(trainer, "PrepareUpdate", message, self.patience(1.0))

    async def transfer(self, trainer: int, epoch: int, engine_id: str, group: str) -> str:
        self.spawn(self.send(group, self.node.epochs[epoch]))
        message = pb2.TransferWeightsRequest(engine_id=engine_id, update_epoch=epoch)
        return await self.tell(trainer, "TransferWeights", message, self.patience(0.3))

    async def send(self, group: str, version: int) -> None:
        """Buckets of a version, at some pace; now and then they end early, or one byte differs."""
        words, wire = list(contents(version).items()), self.wires.group(group)
        for count in BUCKETS:
            bucket, words = dict(words[:count]), words[count:]
            await asyncio.sleep(self.wires.moment())
            if self.wires.strike(0.03):
                wire.broken.set()
                return
            if self.wires.strike(0.03):
                bucket = dict.fromkeys(bucket, f"flipped@{version}")
            wire.wire.put_nowait(bucket)

    async def commit(self, trainer: int, epoch: int, engine_id: str) -> str:
        version = self.node.epochs[epoch]
        sums = checksums(contents(version))
        if self.wires.strike(0.1):
            sums.pop(self.random.choice(list(sums)))
        message = pb2.CommitUpdateRequest(
            engine_id=engine_id,
            update_epoch=epoch,
            version=version,
            checksums=[pb2.TensorChecksum(engine_name=name, checksum=value) for name, value in sums.items()],
        )
        answer = await self.tell(trainer, "CommitUpdate", message, self.patience(1.0))
        self.committed += answer == "OK"
        return answer

    async def abort(self, trainer: int, epoch: int, engine_id: str) -> str:
        message = pb2.AbortUpdateRequest(engine_id=engine_id, update_epoch=epoch, reason="test")
        return await self.tell(trainer, "AbortUpdate", message, 5.0)

    async def whole(self, trainer: int, engine_id: str) -> str:
        """An update as a trainer makes it, each call after the answer of the one before."""
        epoch = self.new_epoch(trainer)
        stands = [group for t, e, _, group in self.updates if (t, e) == (trainer, engine_id)]
        group = self.random.choice(stands[-1:] * (not self.wires.calm) + [f"{RUN}-{epoch}"])
        self.updates.append((trainer, engine_id, epoch, group))
        answer = await self.prepare(trainer, epoch, engine_id, group)
        if answer == "OK":
            answer = await self.transfer(trainer, epoch, engine_id, group)
        if answer == "OK":
            answer = await self.commit(trainer, epoch, engine_id)
        return answer

    def message_at_random(self) -> None:
        """One message, of the newer trainer more often."""
        trainer = self.random.choice((0, 1, 1))
        slot = self.random.choice(self.node.fleet.slots)
        chance = self.random.random()
        known = [update for update in self.updates if update[1] == slot.engine_id]
        if chance < 0.4 or not known:
            self.spawn(self.whole(trainer, slot.engine_id))
            return
        trainer, engine_id, epoch, group = self.random.choice(known[-4:])
        if chance < 0.55:
            self.spawn(self.prepare(trainer, epoch, engine_id, group))
        elif chance < 0.7:
            self.spawn(self.transfer(trainer, epoch, engine_id, group))
        elif chance < 0.85:
            self.spawn(self.commit(trainer, epoch, engine_id))
        else:
            self.spawn(self.abort(trainer, epoch, engine_id))

    async def run(self) -> None:
        async with self.node.running():
            for _ in range(self.random.choice((10, 30))):
                await asyncio.sleep(self.random.choice((0.0, 0.0, 0.01, 0.1, 1.0, 10.0)))
                self.message_at_random()
                if self.random.random() < 0.1:
                    await self.node.strike_at_random()
            await asyncio.wait_for(asyncio.gather(*self.tasks), 300.0)
            await self.settle()

    async def settle(self) -> None:
        """No more faults: the node comes to rest by its own deadlines, and the newest trainer's next update holds."""
        self.node.calm_down()
        await asyncio.sleep(120.0)
        self.node.assert_at_rest()
        for slot in self.node.fleet.slots:
            assert await self.whole(1, slot.engine_id) == "OK", self.answers[-10:]
            assert slot.state is EngineState.READY
        await asyncio.sleep(120.0)
        self.node.assert_at_rest()


@pytest.mark.parametrize("seed", seeds(25))
def test_no_order_of_messages_makes_an_engine_serve_what_was_not_verified(seed):
    history: list[Undisciplined] = []

    async def main() -> None:
        history.append(Undisciplined(seed))
        await history[0].run()

    virtual_time.run(main(), lambda: history and history[0].node.look())


class Rivals:
    """Trainers of one run, each begun while the one before dies, is cut off, or goes on as if nothing had happened."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.wires = Wires(self.random)
        self.timeout = self.random.choice((3.0, 10.0, 30.0))
        count, staging = self.random.choice((1, 2, 3)), self.random.random() < 0.7
        self.node = ScriptedNode(self.wires, count, self.timeout, staging=staging)
        self.node.senders_keep_order = True
        self.buffer = ScriptedBuffer()
        self.trainers: list[ScriptedTrainer] = []

    async def run(self) -> None:
        async with self.node.running():
            for _ in range(self.random.choice((1, 2, 3))):
                trainer = ScriptedTrainer(self.node, self.buffer, self.timeout)
                self.trainers.append(trainer)
                trainer.start()
                for _ in range(self.random.choice((2, 5))):
                    await asyncio.sleep(self.random.choice((0.01, 0.3, 3.0, 12.0)))
                    if self.random.random() < 0.6:
                        await self.node.strike_at_random()
                fate = self.random.choice(("dies", "is cut off", "goes on"))
                trainer.network.cut = fate == "is cut off"
                if fate == "dies":
                    await trainer.die()
            await self.settle()

    async def settle(self) -> None:
        """No more faults, and a last trainer: every engine comes to what it publishes, whatever the others do."""
        self.node.calm_down()
        last = ScriptedTrainer(self.node, self.buffer, self.timeout)
        last.start()
        for rival in self.trainers:
            rival.network.cut = False
        await asyncio.sleep(100.0)
        assert not last.why_ended
        await last.stop()
        await asyncio.sleep(100.0)
        self.node.assert_at_rest()
        held = {slot.engine_id: (slot.state.name, slot.version) for slot in self.node.fleet.slots}
        assert set(held.values()) == {("READY", self.buffer.published)}, held
        for rival in self.trainers:
            assert rival.why_ended in ("", "FENCED", "NO_ENGINE", "RANKS_FAILED"), rival.why_ended


@pytest.mark.parametrize("seed", seeds(25))
def test_an_older_trainer_changes_nothing_and_the_newest_reaches_every_engine(seed):
    history: list[Rivals] = []

    async def main() -> None:
        history.append(Rivals(seed))
        await history[0].run()

    virtual_time.run(main(), lambda: history and history[0].node.look())
