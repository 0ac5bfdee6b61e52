"""The calculator example: two turns, the tool's tokens masked out."""

import pytest

from examples.tool_calculator.generate import calculate
from services.rollout.core.completer import Completer
from services.rollout.core.counters import Counters
from services.rollout.core.generate import make_generator
from tests.unit.rollout.parts import SAMPLING, Chars, ScriptedRouter, make_prompt, make_run, piece, serving_fleet


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3+4", "7"), ("2*(3-5)", "-4"), ("1/4", "0.25"), ("1/0", "error"), ("3+", "error"), ("-2.5", "-2.5")],
)
def test_calculate(expression, value):
    assert calculate(expression) == value


async def test_the_model_calls_and_answers():
    router = ScriptedRouter([[piece("calc(3+4)")], [piece("7")]])
    run = make_run(generate_path="examples.tool_calculator.generate.generate", max_turns=2)
    generator = make_generator(Completer(serving_fleet(router), Chars(), Counters()), run)
    (sample,) = await generator.generate(make_prompt("3+4?"), SAMPLING, 1)
    generator.close()
    assert Chars().decode(sample.response_ids) == "calc(3+4)=7\n7"
    assert sample.loss_mask.tolist() == [1] * 9 + [0] * 3 + [1]
    assert sample.turn_count == 2
    assert router.requests[1].input_ids == tuple(Chars().encode("3+4?calc(3+4)=7\n"))
    assert router.requests[0].sampling.stop == (")",)


async def test_without_a_call_it_is_a_single_turn():
    run = make_run(generate_path="examples.tool_calculator.generate.generate", max_turns=2)
    generator = make_generator(Completer(serving_fleet(ScriptedRouter([[piece("7")]])), Chars(), Counters()), run)
    (sample,) = await generator.generate(make_prompt("3+4?"), SAMPLING, 1)
    generator.close()
    assert (sample.turn_count, sample.loss_mask.tolist()) == (1, [1])
