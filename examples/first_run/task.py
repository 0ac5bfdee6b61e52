"""The demo's task: two-digit addition, the sum written lowest digit first, and a careless teacher.

The teacher adds column by column but forgets a carry more often than not. A model that imitates it knows both
ways to answer and prefers the wrong one; a reward for the right sum is all that GRPO needs to turn that round.

`write_task(directory, seed)` makes sft.jsonl (the teacher's answers), train.jsonl and heldout.jsonl (right
answers). No question is in two of the files.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

DIGITS = 2
SIZES = {"sft": 6400, "train": 2560, "heldout": 512}
SLIP = 0.6
"""Probability with which the teacher forgets a carry."""


def answer(a: int, b: int, slip: float = 0.0, rng: random.Random | None = None) -> str:
    """Column addition, lowest digit first, DIGITS + 1 characters; every carry is forgotten with probability `slip`."""
    written, carry = "", 0
    for column in range(DIGITS):
        total = a // 10**column % 10 + b // 10**column % 10 + carry
        written += str(total % 10)
        carry = total // 10
        if carry and rng and rng.random() < slip:
            carry = 0
    return written + str(carry)


def make_rows(seed: int) -> dict[str, list[dict]]:
    """Rows of the three files."""
    rng = random.Random(seed)
    questions = iter(rng.sample(range(100**DIGITS), sum(SIZES.values())))
    files: dict[str, list[dict]] = {}
    for name, size in SIZES.items():
        rows = files[name] = []
        for _ in range(size):
            a, b = divmod(next(questions), 10**DIGITS)
            message = {"role": "user", "content": f"{a:0{DIGITS}d}+{b:0{DIGITS}d}"}
            label = answer(a, b, SLIP, rng) if name == "sft" else answer(a, b)
            rows.append({"prompt": [message], "label": label})
    return files


def write_task(directory: Path, seed: int) -> None:
    """Writes the three files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows(seed).items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
