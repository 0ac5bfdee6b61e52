"""A two-turn tool: the model writes `calc(3+4)`, the environment answers, the model goes on.

Use it in a run with:  --custom-generate-function-path examples.tool_calculator.generate.generate --max-turns 2
Tokens of the tool's answer are in the response but left out of the loss.
"""

from __future__ import annotations

import ast
import operator
import re
import time
from dataclasses import replace

from services.common.records import Prompt, SamplingParams
from services.rollout.core.generate import GenerateContext
from services.rollout.core.trajectory import Trajectory

CALL = re.compile(r"calc\(([0-9+\-*/ ().]{1,64})\)\s*$")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Value of an arithmetic expression, or the word "error"."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise SyntaxError(expression)

    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (SyntaxError, ArithmeticError, KeyError, TypeError):
        return "error"


async def generate(context: GenerateContext, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
    """Turns until the model stops calling the tool or no turn is left."""
    trajectory = context.start(prompt)
    # A turn ends at the closing bracket of a call, at the model's own end token, or at the length limit.
    sampling = replace(sampling, stop=(*sampling.stop, ")"))
    while True:
        turn = await context.generate(trajectory.input_ids, sampling)
        trajectory.append_generation(turn)
        call = CALL.search(context.tokenizer.decode(trajectory.response_ids))
        if call is None or not context.turns_left:
            return trajectory
        began = time.monotonic()
        answer = context.tokenizer.encode(f"={calculate(call[1])}\n")
        trajectory.append_environment(answer, seconds=time.monotonic() - began)
