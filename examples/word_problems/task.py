"""`python -m examples.word_problems.task DIRECTORY [--seed 1]`: arithmetic word problems of one and two steps.

Writes train.jsonl and heldout.jsonl: chat messages as prompt, the number as label. Same seed, same files. No
calculation (kind of story and its numbers) of the one is in the other, whatever names and things it is about.

A prompt begins with three worked examples as earlier turns of the chat: they show the form of an answer. A story is a
sentence pattern; its numbers are drawn so that every result is positive.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SIZES = {"train": 4096, "heldout": 256}
NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kofi",
    "Lena",
    "Mia",
    "Omar",
)
THINGS = ("apples", "books", "pencils", "stickers", "marbles", "cookies", "stamps", "shells", "coins", "cards")

Numbers = tuple[int, ...]
Key = tuple[str, Numbers]

EXAMPLES = [
    {"role": "user", "content": "Lena has 7 pens. Hugo gives Lena 5 more. How many pens does Lena have now?"},
    {"role": "assistant", "content": "7 + 5 = 12"},
    {"role": "user", "content": "There are 4 eggs in a box. Omar buys 3 boxes. How many eggs does Omar buy?"},
    {"role": "assistant", "content": "3 * 4 = 12"},
    {"role": "user", "content": "Mia had 15 keys and lost 6 of them. How many keys does Mia have left?"},
    {"role": "assistant", "content": "15 - 6 = 9"},
]
EXAMPLE_KEYS: tuple[Key, ...] = (("more", (7, 5)), ("packs", (3, 4)), ("fewer", (15, 6)))


@dataclass(frozen=True)
class Story:
    """A kind of problem. `text` names the numbers {a}, {b}, {c} and {name}, {other}, {things}."""

    kind: str
    text: str
    draw: Callable[[random.Random], Numbers]
    solve: Callable[..., int]


def _two(low: int, high: int) -> Callable[[random.Random], Numbers]:
    return lambda rng: (rng.randint(low, high), rng.randint(low, high))


def _some_of(low: int, high: int) -> Callable[[random.Random], Numbers]:
    """A number and a smaller one."""

    def draw(rng: random.Random) -> Numbers:
        whole = rng.randint(low, high)
        return whole, rng.randint(2, whole - 1)

    return draw


def _packs_less_some(rng: random.Random) -> Numbers:
    packs, each = rng.randint(2, 5), rng.randint(2, 6)
    return packs, each, rng.randint(2, packs * each - 1)


STORIES = (
    Story(
        "more",
        "{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have now?",
        _two(2, 12),
        lambda a, b: a + b,
    ),
    Story(
        "fewer",
        "{name} had {a} {things} and lost {b} of them. How many {things} does {name} have left?",
        _some_of(5, 15),
        lambda a, b: a - b,
    ),
    Story(
        "packs",
        "There are {b} {things} in a box. {name} buys {a} boxes. How many {things} does {name} buy?",
        _two(2, 9),
        lambda a, b: a * b,
    ),
    Story(
        "packs less some",
        "{name} buys {a} boxes of {b} {things} and gives {c} of them to {other}. How many {things} are left?",
        _packs_less_some,
        lambda a, b, c: a * b - c,
    ),
    Story(
        "together",
        "{name} has {a} {things}. {other} has {b} more than {name}. How many {things} do they have together?",
        _two(2, 9),
        lambda a, b: 2 * a + b,
    ),
)


def is_held_out(key: Key, seed: int) -> bool:
    """One calculation in four is kept for the evaluation. The worked examples are in every prompt, so none of them."""
    return key not in EXAMPLE_KEYS and zlib.crc32(f"{seed} {key}".encode()) % 4 == 0


def make_problem(rng: random.Random) -> tuple[Key, dict]:
    """A problem: its key, and its row for the file."""
    story = rng.choice(STORIES)
    numbers = story.draw(rng)
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "things": rng.choice(THINGS), **dict(zip("abc", numbers, strict=False))}
    question = {"role": "user", "content": story.text.format(**words)}
    row = {"prompt": [*EXAMPLES, question], "label": str(story.solve(*numbers)), "kind": story.kind}
    return (story.kind, numbers), row


def make_rows(seed: int) -> dict[str, list[dict]]:
    """Rows of the two files. No question comes twice in the held-out one."""
    rng = random.Random(seed)
    train: list[dict] = []
    held_out: dict[str, dict] = {}
    while len(train) < SIZES["train"] or len(held_out) < SIZES["heldout"]:
        key, row = make_problem(rng)
        if not is_held_out(key, seed):
            train.append(row)
        elif len(held_out) < SIZES["heldout"]:
            held_out.setdefault(row["prompt"][-1]["content"], row)
    return {"train": train[: SIZES["train"]], "heldout": list(held_out.values())}


def write_task(directory: Path, seed: int) -> None:
    """Writes the two files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows(seed).items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where train.jsonl and heldout.jsonl are written")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    write_task(chosen.directory, chosen.seed)
    print(", ".join(f"{chosen.directory / name}.jsonl: {size} problems" for name, size in SIZES.items()))


if __name__ == "__main__":
    main()
