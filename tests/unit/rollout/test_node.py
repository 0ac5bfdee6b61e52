"""Which run a node serves."""

import asyncio

from services.common.errors import Code, ServiceError
from services.rollout.core.node import Node, NodeSettings, Outside
from services.rollout.core.ports import ActiveRun
from tests.unit.rollout.parts import Chars, FixedScorer, ListBuffer, make_prompt, make_run


class OneRun(ListBuffer):
    """One supervised run, active whenever it is asked for; the first call for prompts met it ended."""

    ends = 1

    async def newest_active_run(self):
        return ActiveRun("r", "{}")

    async def lease_prompts(self, *args):
        if self.ends:
            self.ends -= 1
            raise ServiceError(Code.FAILED_PRECONDITION, "RUN_FINISHED", "Run r is STOPPED.")
        return await super().lease_prompts(*args)

    async def unregister(self, member_id):
        pass


async def test_a_run_that_ended_and_was_opened_again_between_two_looks_is_taken_up():
    buffer = OneRun([make_prompt("1", "g1")])
    outside = Outside(
        buffer=buffer,
        scorer=FixedScorer(),
        read_run=lambda run: make_run(sft=True, samples_per_prompt=1),
        load_tokenizer=lambda checkpoint: Chars(),
        make_factory=lambda settings: None,
        make_router=lambda settings: None,
    )
    node = Node(NodeSettings("n", poll_seconds=0.01, drain_seconds=0.1), outside)
    serving = asyncio.create_task(node.serve())
    async with asyncio.timeout(5):
        while not buffer.put:
            await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await node.stop()
    assert list(buffer.put) == ["g1"]
