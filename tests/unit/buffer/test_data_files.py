"""Large files: rows found by newlines, looked at when drawn, refused when the file is another; parquet."""

from __future__ import annotations

import json
import os
import sys
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.buffer.adapters import jsonl, parquet, prompt_file
from services.buffer.adapters.dataset import Found, pack_found, unpack_found
from services.buffer.adapters.jsonl import JsonlFile
from services.buffer.adapters.loader import PromptLoader
from services.buffer.core.permutation import RowOrder
from services.common.errors import ServiceError
from tests.support.engine import write_tokenizer


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_tokenizer(directory)
    return directory


@pytest.fixture
def load(checkpoint):
    """Opens a file as the data set of a run."""

    async def load(path, skipped=None, **keys):
        spec = {
            "data": {"prompt_data": str(path), **keys},
            "rollout": {
                "hf_checkpoint": str(checkpoint),
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 2,
            },
        }
        return await PromptLoader(None).load("r", json.dumps(spec), skipped)

    return load


def write(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


LINES = st.lists(st.sampled_from([b"", b"  ", b"\t\r", b'{"a": 1}', b' {"b": "\xc3\xa9"}', b"x" * 9]), min_size=1)


@given(LINES, st.booleans(), st.integers(1, 24))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_the_lines_that_are_not_blank(tmp_path, monkeypatch, lines, ended, block):
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", block)
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ended else b""))
    expected = [(number, line) for number, line in enumerate(lines) if line.strip()]
    if not expected:
        with pytest.raises(ServiceError, match="it has no rows"):
            JsonlFile(str(path), "prompt_data")
        return
    file = JsonlFile(str(path), "prompt_data")
    assert [(number, line.rstrip(b"\n")) for number, line in file.read(range(len(file)))] == expected
    assert file.rows().tolist() == [number for number, _ in expected]


def test_a_file_that_was_mended_is_indexed_again_and_another_one_refused(tmp_path):
    path = tmp_path / "f.jsonl"
    write(path, [{"input": str(i)} for i in range(5)])
    file = JsonlFile(str(path), "prompt_data")
    file.keep(np.array([True, False, True, True, True]))
    write(path, [{"input": f"longer {i}"} for i in range(5)])
    assert [file.parse(*row)["input"] for row in file.read([1, 3])] == ["longer 2", "longer 4"]
    write(path, [{"input": str(i)} for i in range(6)])
    with pytest.raises(ServiceError, match=r"f\.jsonl has 6 rows, but 5 when it was opened; put the file back"):
        file.read([0])
    path.unlink()
    with pytest.raises(ServiceError, match="cannot read"):
        file.read([0])


def test_a_file_that_is_written_while_it_is_read_is_read_again(tmp_path):
    path = tmp_path / "f.jsonl"
    write(path, [{"input": str(i)} for i in range(5)])

    class Racing(JsonlFile):
        """Another process replaces the file in the middle of the first reads."""

        writes = 1

        def fetch(self, places):
            if self.writes:
                self.writes -= 1
                write(path, [{"input": f"{'longer' * (1 + self.writes)} {i}"} for i in range(5)])
            return super().fetch(places)

    file = Racing(str(path), "prompt_data")
    assert [file.parse(*row)["input"] for row in file.read([4, 0])] == ["longer 4", "longer 0"]
    file.writes = 99
    with pytest.raises(ServiceError, match="it is being written; try again when it is complete"):
        file.read([0])


async def test_rows_beyond_the_checked_ones_are_judged_when_drawn(tmp_path, load, monkeypatch):
    monkeypatch.setattr(prompt_file, "CHECKED_ROWS", 4)
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"input": "x" * (30 if i in (1, 6) else 3)}) for i in range(9)]
    rows[5] = "{broken"
    rows[7] = json.dumps({"input": 7})
    path.write_text("\n".join(rows))
    dataset = await load(path, rollout_max_prompt_len=10)
    # Row 1 was checked and left out; the others stay and are named when they are drawn.
    assert (dataset.row_count, dataset.skipped_count) == (8, 1)
    drawn = await dataset.draw(range(8))
    assert [found.prompt.row for found in drawn] == [0, 2, 3, 4, 5, 6, 7, 8]
    assert [found.reason for found in drawn] == ["", "", "", "", "MALFORMED", "PROMPT_TOO_LONG", "MALFORMED", ""]
    assert f"{path}:6: not valid JSON" in drawn[4].message
    assert drawn[5].message == f"{path}:7: the prompt has 30 tokens, more than 10."
    assert "field 'input' must be a string" in drawn[6].message
    rows[2] = "{broken"
    path.write_text("\n".join(rows))
    with pytest.raises(ServiceError, match=r"rows\.jsonl:3: not valid JSON"):
        await load(path)


async def test_a_malformed_row_of_an_evaluation_set_is_named(tmp_path, load, monkeypatch):
    monkeypatch.setattr(prompt_file, "CHECKED_ROWS", 1)
    write(tmp_path / "a.jsonl", [{"input": "1"}])
    write(tmp_path / "e.jsonl", [{"input": "1"}, {"input": None}])
    dataset = await load(tmp_path / "a.jsonl", eval_prompt_data=["e", str(tmp_path / "e.jsonl")])
    assert (await dataset.eval_prompts("e", 0, 1))[1] == 2
    with pytest.raises(ServiceError, match=r"e\.jsonl:2: no field 'input'"):
        await dataset.eval_prompts("e", 0, 2)


async def test_runs_of_earlier_releases_keep_their_rows_and_their_order(tmp_path, load):
    write(tmp_path / "f.jsonl", [{"input": str(i)} for i in range(70_000)])
    old = zlib.compress(np.diff(np.array([3, 5], np.int32), prepend=0).astype("<i4").tobytes())
    dataset = await load(tmp_path / "f.jsonl", old, rollout_shuffle=True, rollout_seed=9)
    assert (dataset.row_count, dataset.skipped_count) == (69_998, 2)
    table = RowOrder(69_998, shuffle=True, seed=9, tables=True)
    kept = [i for i in range(70_000) if i not in (3, 5)]
    drawn = await dataset.draw(range(20))
    assert [found.prompt.row for found in drawn] == [kept[table.locate(i)[1]] for i in range(20)]
    now = await load(tmp_path / "f.jsonl", rollout_shuffle=True, rollout_seed=9)
    again = await load(tmp_path / "f.jsonl", now.skipped_rows(), rollout_shuffle=True, rollout_seed=9)
    rows = [[found.prompt.row for found in await part.draw(range(20))] for part in (now, again)]
    assert rows[0] == rows[1] != [found.prompt.row for found in drawn]


def test_what_was_found_is_packed_small():
    skipped = np.arange(0, 10_000, 3)
    packed = pack_found([Found("a", 9, skipped), Found("b", 7, np.zeros(0, np.int64))])
    (a, b), old = unpack_found(packed)
    assert not old
    assert (a.name, a.row_count, a.skipped.tolist()) == ("a", 9, skipped.tolist())
    assert (b.name, b.row_count, len(b.skipped)) == ("b", 7, 0)
    assert len(packed) < 200


# -- parquet


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow")


def write_parquet(arrow, path, rows, group=4):
    from pyarrow import parquet as format_of

    format_of.write_table(arrow.Table.from_pylist(rows), path, row_group_size=group)


async def test_parquet_rows_become_the_same_prompts_as_jsonl_rows(arrow, tmp_path, load, monkeypatch):
    rows = [
        {
            "input": [{"role": "user", "content": f"{i}"}],
            "label": str(i),
            "metadata": {"row": i, "tags": ["a"]},
            "other": i * 0.5,
        }
        for i in range(23)
    ]
    write(tmp_path / "f.jsonl", rows)
    write_parquet(arrow, tmp_path / "f.parquet", rows)
    monkeypatch.setattr(parquet, "_KEPT_BYTES", 1)  # every row group is read again
    keys = {
        "apply_chat_template": True, "label_key": "label", "metadata_key": "metadata", "rollout_shuffle": True,
    }  # fmt: skip
    drawn = []
    for name in ("f.jsonl@[2:]", "f.parquet@[2:]"):
        dataset = await load(tmp_path / name, **keys)
        drawn.append([vars(found.prompt) for found in await dataset.draw([30, 4, 4, 0, 17])])
    for one, other in zip(*drawn, strict=True):
        assert one.pop("tokens").tolist() == other.pop("tokens").tolist()
        assert one == other


async def test_values_that_json_does_not_know_are_text_or_refused(arrow, tmp_path, load, monkeypatch):
    import datetime

    rows = [{"input": "1", "label": datetime.date(2026, 1, 2), "metadata": {"b": b"x"}}, {"input": None}]
    monkeypatch.setattr(prompt_file, "CHECKED_ROWS", 0)
    write_parquet(arrow, tmp_path / "f.parquet", rows)
    dataset = await load(tmp_path / "f.parquet", label_key="label")
    good, bad = await dataset.draw([0, 1])
    assert good.prompt.label == "2026-01-02"
    assert bad.reason == "MALFORMED"
    assert ":2: no field 'input'" in bad.message
    with pytest.raises(ServiceError, match="no field 'metadata'"):
        await load(tmp_path / "f.parquet", metadata_key="metadata")


async def test_mistakes_with_parquet_are_one_sentence(arrow, tmp_path, load, monkeypatch):
    write_parquet(arrow, tmp_path / "f.parquet", [{"question": "1"}])
    with pytest.raises(ServiceError, match=r"no column 'input' \(input_key\); the file has question"):
        await load(tmp_path / "f.parquet")
    (tmp_path / "g.parquet").write_text("no")
    with pytest.raises(ServiceError, match="not a parquet file that can be read"):
        await load(tmp_path / "g.parquet")
    write_parquet(arrow, tmp_path / "h.parquet", [{"input": "1"}])
    dataset = await load(tmp_path / "h.parquet")
    write_parquet(arrow, tmp_path / "h.parquet", [{"input": "1"}, {"input": "2"}])
    os.utime(tmp_path / "h.parquet", ns=(1, 1))
    with pytest.raises(ServiceError, match="has 2 rows, but 1 when it was opened"):
        await dataset.draw([0])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ServiceError, match=r"parquet files need pyarrow; install tetrarch\[parquet\]"):
        await load(tmp_path / "f.parquet")
