"""The checked-draft example: a second turn after a wrong draft, the tool's tokens masked out."""

import pytest

from services.rollout.core.completer import Completer
from services.rollout.core.counters import Counters
from services.rollout.core.generate import make_generator
from tests.unit.rollout.parts import SAMPLING, Chars, ScriptedRouter, make_prompt, make_run, piece, serving_fleet

PATH = "examples.checked_draft.generate.generate"


@pytest.mark.parametrize(
    ("answers", "response", "mask"),
    [
        (["551"], "551", [1] * 3),
        (["441", "551"], "44169+86=551", [1] * 3 + [0] * 6 + [1] * 3),
    ],
)
async def test_a_wrong_draft_gets_a_second_turn(answers, response, mask):
    router = ScriptedRouter([[piece(answer)] for answer in answers])
    run = make_run(generate_path=PATH, max_turns=2)
    generator = make_generator(Completer(serving_fleet(router), Chars(), Counters()), run)
    (sample,) = await generator.generate(make_prompt("69+86=", label="551"), SAMPLING, 1)
    generator.close()
    assert Chars().decode(sample.response_ids) == response
    assert sample.loss_mask.tolist() == mask
    assert sample.turn_count == len(answers)
