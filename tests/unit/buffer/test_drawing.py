"""Rows that cannot be used, through a real server on a real store: evicted and replaced, and too many end the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import pytest_asyncio

from services.buffer.adapters import prompt_file
from services.buffer.app import App
from services.buffer.config import BufferSettings
from services.common.channel import open_channel
from tests.contract.buffer_v1.driver import Driver, refusal, write_data
from tests.support.valkey import valkey, valkey_url  # noqa: F401

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(valkey_url):  # noqa: F811
    """Channel to a running buffer server."""
    app = App(BufferSettings(port=0, store_url=valkey_url, drain_seconds=0))
    await app.start()
    client = open_channel(f"127.0.0.1:{app.server.port}", "buffer")
    yield client
    await client.close()
    await app.stop()


@pytest.fixture
def driver(channel, tmp_path, request, monkeypatch) -> Driver:
    """A driver of a run of 40 rows, of which the first 4 are checked when it is created."""
    monkeypatch.setattr(prompt_file, "CHECKED_ROWS", 4)
    data, checkpoint = write_data(tmp_path / "data", 40)
    return Driver(channel, request.node.name.replace("_", "-")[:60], data, checkpoint)


def spoil(driver: Driver, rows: dict[int, str]) -> None:
    """Replaces lines of the data file."""
    path = Path(driver.spec["data"]["prompt_data"])
    lines = path.read_text().splitlines()
    for row, text in rows.items():
        lines[row] = text
    path.write_text("\n".join(lines) + "\n")


async def test_an_unusable_row_is_evicted_by_name_and_another_drawn(driver):
    spoil(driver, {5: "{", 6: json.dumps({"input": "x" * 50, "label": "1"})})
    await driver.start(data={"rollout_max_prompt_len": 20}, rollout={"rollout_batch_size": 8})
    leases = [*(await driver.lease(8)).leases, *(await driver.lease(8)).leases]
    assert [lease.prompt.row for lease in leases] == [0, 1, 2, 3, 4, 7, 8, 9]
    stats = await driver.stats()
    assert dict(stats.evicted_by_reason) == {"MALFORMED": 1, "PROMPT_TOO_LONG": 1}
    assert (stats.drawn_count, stats.leased_count) == (10, 8)
    broken = await driver.call("GetGroup", group_id=f"{driver.run_id}-5")
    assert (broken.info.evict_reason, broken.prompt.row, broken.prompt.text) == ("MALFORMED", 5, "")
    long = await driver.call("GetGroup", group_id=f"{driver.run_id}-6")
    assert (long.info.evict_reason, len(long.prompt.text)) == ("PROMPT_TOO_LONG", 50)


async def test_when_none_of_a_lease_can_be_used_others_are_drawn_in_the_same_call(driver):
    spoil(driver, dict.fromkeys(range(4, 13), "[]"))
    await driver.start(rollout={"rollout_batch_size": 4})
    first = (await driver.lease(4)).leases
    assert [lease.prompt.row for lease in first] == [0, 1, 2, 3]
    await driver.call("ReleaseLeases", lease_ids=[lease.lease_id for lease in first], evict_reason="TEST")
    answer = await driver.lease(3, request_id="again")
    assert [lease.prompt.row for lease in answer.leases] == [13, 14, 15]
    assert (await driver.stats()).evicted_by_reason["MALFORMED"] == 9


async def test_too_many_malformed_rows_end_the_run_with_the_last_one_named(driver):
    spoil(driver, {4: "{", 6: "", 7: "nonsense", 9: "{"})
    spoil(driver, {6: "{"})
    await driver.start(data={"max_malformed_rows": 2}, rollout={"rollout_batch_size": 20})
    await driver.lease(20)
    error = await refusal(driver.lease(1))
    assert error.reason == "RUN_FINISHED"
    run = (await driver.call("GetRun")).run
    assert "4 rows drawn were malformed, more than max_malformed_rows 2 allows, the last one because" in run.reason
    assert "prompts.jsonl:10: not valid JSON" in run.reason
    # Mended, it goes on.
    spoil(driver, {row: json.dumps({"input": "1", "label": "1"}) for row in (4, 6, 7, 9)})
    await driver.create()
    assert (await driver.lease(1)).leases
    await driver.stats()


async def test_a_run_whose_prompts_are_all_too_long_ends_instead_of_drawing_for_ever(driver):
    spoil(driver, {row: json.dumps({"input": "x" * 30, "label": "1"}) for row in range(40)})
    await driver.start(data={"rollout_max_prompt_len": 29, "metadata_key": None}, rollout={"rollout_batch_size": 8})
    # One call looks at 16 × 8 prompts, three times as many as there are.
    error = await refusal(driver.lease(8))
    assert error.reason == "RUN_FINISHED"
    run = (await driver.call("GetRun")).run
    assert "prompts.jsonl" in run.reason
    assert (
        "the prompt has 30 tokens, more than 29; raise rollout_max_prompt_len, and start the run again." in run.reason
    )


async def test_a_mixture_is_counted_and_listed_by_data_set(driver, tmp_path):
    rows = [{"q": f"hard {i}", "label": "1"} for i in range(3)]
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [
        {"name": "easy", "path": driver.spec["data"].pop("prompt_data"), "weight": 3},
        {"name": "hard", "path": str(tmp_path / "hard.jsonl"), "input_key": "q", "rm_type": "math", "stop": ["x"]},
    ]
    await driver.start(data={"prompt_data_mixture": sets, "metadata_key": None}, rollout={"rollout_batch_size": 12})
    leases = (await driver.lease(12)).leases
    assert [lease.prompt.dataset for lease in leases].count("hard") == 3
    hard = next(lease.prompt for lease in leases if lease.prompt.dataset == "hard")
    assert (hard.rm_type, list(hard.sampling.stop), hard.text) == ("math", ["x"], "hard 0")
    assert dict((await driver.stats()).drawn_by_dataset) == {"easy": 9, "hard": 3}
    groups = (await driver.call("ListGroups", dataset="hard")).groups
    assert [(group.dataset, group.epoch) for group in groups] == [("hard", 0)] * 3
