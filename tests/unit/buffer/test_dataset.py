"""JSONL files, slices, chat templates, tokenizers, lengths."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from services.buffer.adapters.jsonl import JsonlFile
from services.buffer.adapters.loader import PromptLoader
from services.buffer.adapters.tokenizer import CheckpointTokenizer
from services.common.errors import ServiceError
from tests.support.engine import write_tokenizer


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_tokenizer(directory)
    return directory


async def take(dataset, ordinals):
    drawn = await dataset.draw(list(ordinals))
    assert not any(found.reason for found in drawn)
    return [found.prompt for found in drawn]


@pytest.fixture
def load(tmp_path, checkpoint):
    """Loads rows as the data set of a run."""

    async def load(rows: list, *, skipped: bytes | None = None, suffix: str = "", **keys):
        path = tmp_path / "rows.jsonl"
        if rows is not None:
            path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        spec = {
            "data": {"prompt_data": f"{path}{suffix}", **keys},
            "rollout": {
                "hf_checkpoint": str(checkpoint),
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 2,
            },
        }
        # No run here has a curriculum, which alone needs a store.
        return await PromptLoader(None).load("r", json.dumps(spec), skipped)

    return load


async def test_rows_become_prompts_with_tokens(load, checkpoint):
    dataset = await load([{"input": f"{i}+{i}", "answer": 2 * i} for i in range(3)], label_key="answer")
    prompts = await take(dataset, [2, 0, 4])
    assert [(p.group_id, p.text, p.label, p.epoch, p.row) for p in prompts] == [
        ("r-2", "2+2", "4", 0, 2), ("r-0", "0+0", "0", 0, 0), ("r-4", "1+1", "2", 1, 1),
    ]  # fmt: skip
    assert prompts[0].tokens.tolist() == CheckpointTokenizer(checkpoint).encode(["2+2"])[0]
    assert prompts[0].tokens.dtype == "int32"


async def test_chat_templates_render_messages_and_strings(load):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé"}]
    dataset = await load([{"input": messages}, {"input": "plain"}], apply_chat_template=True)
    first, second = await take(dataset, [0, 1])
    assert first.text == "be brief\nhé\n"
    assert json.loads(first.messages_json) == messages
    assert second.text == "plain\n"
    assert json.loads(second.messages_json) == [{"role": "user", "content": "plain"}]


async def test_templates_see_special_tokens_options_and_their_own_errors(load, checkpoint):
    (checkpoint / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ style }}"
    )
    rows = [{"input": [{"role": "user", "content": "é"}]}]
    options = {
        "apply_chat_template": True,
        "apply_chat_template_kwargs": {"style": "!", "add_generation_prompt": False},
    }
    dataset = await load(rows, **options)
    assert (await take(dataset, [0]))[0].text == '<bos>{"role": "user", "content": "é"}!'
    rows.insert(0, {"input": [{"role": "tool", "content": "x"}]})
    with pytest.raises(ServiceError, match=r"rows.jsonl:1: the chat template refuses the messages \(no tools here\)"):
        await load(rows, **options)


async def test_long_prompts_are_left_out_and_stay_out_on_another_server(load):
    rows = [{"input": "x" * (3 if i % 3 else 30)} for i in range(1000)]
    dataset = await load(rows, rollout_max_prompt_len=10)
    assert (dataset.row_count, dataset.skipped_count) == (666, 334)
    assert [p.row for p in await take(dataset, [0, 1, 2])] == [1, 2, 4]
    again = await load(rows, skipped=dataset.skipped_rows(), rollout_max_prompt_len=10)
    assert [p.row for p in await take(again, range(666))] == [p.row for p in await take(dataset, range(666))]
    with pytest.raises(ServiceError, match="rollout_max_prompt_len is 1: every prompt of"):
        await load(rows, rollout_max_prompt_len=1)


async def test_slices_and_blank_lines(load):
    rows = ["", {"input": "a"}, "   ", {"input": "b"}, {"input": "c"}, ""]
    dataset = await load(rows, suffix="@[1:]")
    assert [(p.text, p.row) for p in await take(dataset, [0, 1])] == [("b", 3), ("c", 4)]
    assert (await load(rows, suffix="@[-1:]")).row_count == 1
    with pytest.raises(ServiceError, match="no rows in the slice of 3 rows"):
        await load(rows, suffix="@[5:9]")


async def test_a_shuffle_is_the_same_on_every_server(load):
    rows = [{"input": str(i)} for i in range(40)]
    one = await load(rows, rollout_shuffle=True, rollout_seed=3)
    two = await load(rows, rollout_shuffle=True, rollout_seed=3, skipped=one.skipped_rows())
    texts = [p.text for p in await take(one, range(80))]
    assert texts == [p.text for p in await take(two, range(80))]
    assert sorted(texts[:40], key=int) == [str(i) for i in range(40)]
    assert texts[:40] != texts[40:]


@pytest.mark.parametrize(
    ("rows", "keys", "words"),
    [
        ([], {}, ":1: it has no rows"),
        (["{"], {}, "rows.jsonl:1: not valid JSON"),
        ([{"input": "a"}, {"input": None}], {}, "rows.jsonl:2: no field 'input' (input_key); the row has input"),
        ([{"question": "a"}], {"input_key": "questoin"}, "did you mean 'question'?"),
        ([{"input": "a"}], {"label_key": "label"}, "no field 'label' (label_key)"),
        ([{"input": "a"}], {"metadata_key": "meta"}, "no field 'meta' (metadata_key)"),
        (
            [{"input": [{"text": "a"}]}],
            {"apply_chat_template": True},
            "list of chat messages with 'role' and 'content'",
        ),
        ([{"input": "a"}], {"eval_prompt_data": ["e", "/nowhere/e.jsonl"]}, "eval_prompt_data 'e': cannot read"),
        ([{"input": "a"}], {"prompt_data": "/nowhere/data.parquet"}, "cannot read /nowhere/data.parquet: No such file"),
    ],
)
async def test_mistakes_are_one_sentence(load, rows, keys, words):
    with pytest.raises(ServiceError) as caught:
        await load(rows, **keys)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(checkpoint, tmp_path):
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": 100}))
    with pytest.raises(ServiceError, match=r"token id 258, but vocab_size in config\.json is 100"):
        CheckpointTokenizer(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(ServiceError, match="its tokenizer cannot be read"):
        CheckpointTokenizer(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(ServiceError, match=r"it has no tokenizer\.json"):
        CheckpointTokenizer(checkpoint)
    with pytest.raises(ServiceError, match="there is no such directory"):
        CheckpointTokenizer(tmp_path / "none")


def test_an_index_holds_numbers_not_rows(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text(f'{{"input": "{"x" * 500}"}}\n' * 20_000)
    tracemalloc.start()
    file = JsonlFile(str(path), "prompt_data")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(file) == 20_000
    assert peak < 3_000_000  # the file has ten million bytes
    assert [line for line, _ in file.read([19_999, 0])] == [19_999, 0]
