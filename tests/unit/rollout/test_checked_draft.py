"""The checked-draft example: two turns, the tool's marks masked out."""

from examples.checked_draft.generate import marks
from services.rollout.core.completer import Completer
from services.rollout.core.counters import Counters
from services.rollout.core.generate import make_generator
from tests.unit.rollout.parts import SAMPLING, Chars, ScriptedRouter, make_prompt, make_run, piece, serving_fleet

PATH = "examples.checked_draft.generate.generate"


def test_marks():
    assert marks("441", "551") == "001"
    assert marks("", "551") == "000"


async def test_draft_marks_and_final_answer():
    router = ScriptedRouter([[piece("441")], [piece("551")]])
    generator = make_generator(
        Completer(serving_fleet(router), Chars(), Counters()), make_run(generate_path=PATH, max_turns=2)
    )
    (sample,) = await generator.generate(make_prompt("69+86=", label="551"), SAMPLING, 1)
    generator.close()
    assert Chars().decode(sample.response_ids) == "441=001=551"
    assert sample.loss_mask.tolist() == [1] * 3 + [0] * 5 + [1] * 3
    assert router.requests[1].input_ids == tuple(Chars().encode("69+86=441=001="))
