"""`tetrarch samples`, `export-samples`, `runs`, `watch` and `delete-run` against a running buffer server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from pyarrow import parquet
from tetrarch.buffer.v1 import run_pb2

from benchmarks.buffer_world import Client, Store, channel_to, finished, kill, start_server, write_data

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Place:
    """A buffer server with a run of three steps, the last one's tokens still stored."""

    def __init__(self, client: Client, port: int) -> None:
        self.client, self.port = client, port

    def tetrarch(self, *arguments: str, answer: str = "") -> tuple[int, str]:
        """(exit status, output) of a command."""
        command = [sys.executable, "-m", "services.console", *arguments, "--buffer", f"127.0.0.1:{self.port}"]
        done = subprocess.run(command, input=answer, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout + done.stderr

    async def step(self, step: int) -> None:
        """Four groups trained, with rewards of their ordinal."""
        client = self.client
        answer = await client.lease(4)
        groups = [finished(lease, client.samples, answer.policy_version) for lease in answer.leases]
        for group in groups:
            for sample in group.group.samples:
                sample.reward = group.group.ordinal
        await client.put(groups)
        await client.take(step, 4)
        await client.call("CommitStep", trainer_epoch=client.epoch, step=step)
        await client.publish(step + 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    directory = tmp_path_factory.mktemp("looking")
    store = await Store(directory / "store").start()
    server, port = await start_server(store.url, directory)
    async with channel_to([port]) as channel:
        place = Place(Client(channel, "looked-at"), port)
        await place.client.create(*write_data(directory / "data", 50))
        await place.client.session()
        await place.client.publish(0)
        for step in range(3):
            await place.step(step)
        checkpoint = {"trainer_epoch": place.client.epoch, "step": 1, "path": "checkpoints/1"}
        await place.client.call("RecordCheckpoint", **checkpoint)
        lease = (await place.client.lease(1)).leases[0]
        await place.client.call("ReleaseLeases", lease_ids=[lease.lease_id], evict_reason="TOO_EASY")
        yield place
    await kill(server)
    await store.kill()


async def test_groups_are_chosen_by_step_state_reason_and_reward(place):
    code, output = place.tetrarch("samples", "--step", "2", "-n", "1")
    assert code == 0, output
    assert "looked-at-7  consumed, step 2" in output
    code, output = place.tetrarch("samples", "--min-reward", "10", "--worst", "-n", "1")
    assert code == 0, output
    assert "looked-at-10" in output
    code, output = place.tetrarch("samples", "--reason", "TOO_EASY")
    assert code == 0, output
    assert "looked-at-12  evicted (TOO_EASY)" in output
    assert place.tetrarch("samples", "--state", "pending") == (0, "Run looked-at has no such groups.\n")


async def test_groups_are_paged_in_order(place):
    code, output = place.tetrarch("samples", "--from", "2", "-n", "2")
    assert code == 0, output
    assert "looked-at-2" in output
    assert "looked-at-3" in output
    assert "more from ordinal 4: add --from 4" in output
    assert "more" not in place.tetrarch("samples", "--from", "10", "-n", "2")[1]


async def test_choices_that_contradict_are_named(place):
    assert place.tetrarch("samples", "--state", "reddy") == (
        2,
        "tetrarch: --state 'reddy' is no state; use some of pending, leased, ready, reserved, consumed, evicted."
        " Did you mean 'ready'?\n",
    )
    assert "--best and --worst exclude each other" in place.tetrarch("samples", "--best", "--worst")[1]
    assert "--from goes through groups in order" in place.tetrarch("samples", "--best", "--from", "1")[1]


async def test_a_step_is_exported_with_its_tokens(place, tmp_path):
    code, output = place.tetrarch("export-samples", "--step", "3", "--out", str(tmp_path / "step.jsonl"))
    assert (code, output) == (0, f"8 samples of step 3: {tmp_path / 'step.jsonl'}\n")
    rows = [json.loads(line) for line in (tmp_path / "step.jsonl").open()]
    assert [(row["ordinal"], row["index"]) for row in rows] == [(o, i) for o in range(8, 12) for i in range(2)]
    assert rows[0]["tokens"][-4:] == [8, 8, 8, 8]
    assert (rows[0]["loss_mask"], rows[0]["log_probs"]) == ([1] * 4, [-0.5] * 4)
    assert (rows[0]["prompt"], rows[0]["reward"], rows[0]["status"], rows[0]["step"]) == ("8+1=", 8.0, "completed", 3)
    code, output = place.tetrarch("export-samples", "--step", "3", "--out", str(tmp_path / "step.parquet"))
    assert code == 0, output
    table = parquet.read_table(tmp_path / "step.parquet")
    assert [str(table.schema.field(name).type) for name in ("tokens", "loss_mask", "log_probs")] == [
        "list<element: int32>", "list<element: uint8>", "list<element: float>",
    ]  # fmt: skip
    assert table.to_pylist() == rows


async def test_what_cannot_be_exported_is_named(place, tmp_path):
    freed = place.tetrarch("export-samples", "--step", "1", "--out", str(tmp_path / "a.jsonl"))
    assert freed[0] == 2
    assert "The tokens of group looked-at-0 are no longer stored: a checkpoint covers step 1" in freed[1]
    assert (
        "has no groups of step 9; its last step is 3"
        in place.tetrarch("export-samples", "--step", "9", "--out", "a.jsonl")[1]
    )
    assert "ends in neither" in place.tetrarch("export-samples", "--step", "1", "--out", "a.csv")[1]


async def test_runs_are_listed_watched_and_deleted(place):
    client = place.client
    code, output = place.tetrarch("runs")
    assert code == 0, output
    assert "looked-at    active" in output
    assert "step 2" in output
    assert place.tetrarch("delete-run", "looked-at", answer="n\n")[0] == 1
    assert "Run looked-at is active" in place.tetrarch("delete-run", "looked-at", answer="y\n")[1]
    await client.call("FinishRun", state=run_pb2.RUN_STATE_STOPPED, reason="by hand")
    code, output = place.tetrarch("watch", "looked-at")
    assert code == 0, output
    assert "drawn 13 = pending 0 + leased 0 + ready 0 + reserved 0 + consumed 12 + evicted 1" in output
    assert output.endswith("run looked-at is stopped\n")
    code, output = place.tetrarch("delete-run", "looked-at", "--force")
    assert code == 0, output
    assert "run looked-at is deleted" in output
    assert place.tetrarch("runs") == (0, "No runs yet; start one with `tetrarch train run.yaml`.\n")
