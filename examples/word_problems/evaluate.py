"""`python -m examples.word_problems.evaluate MODEL HELDOUT.jsonl`: greedy accuracy of a checkpoint.

With transformers alone: neither an engine nor a trainer of ours is in this second opinion on a run.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

MAX_NEW_TOKENS = 32
BATCH = 64


def last_number(text: str) -> str | None:
    """The last whole number of an answer, as the run's grader takes it."""
    numbers = re.findall(r"(?<![\w.)])-?\d+|\d+", text)
    return numbers[-1] if numbers else None


def accuracy(model_dir: Path, rows: list[dict[str, Any]], device: str) -> float:
    """Share of rows answered rightly when the likeliest token is always taken."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device).eval()
    right = 0
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        chats = [row["prompt"] for row in batch]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        with torch.inference_mode():
            made = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers = tokenizer.batch_decode(made[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        right += sum(last_number(answer) == row["label"] for answer, row in zip(answers, batch, strict=True))
    return right / len(rows)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0")
    parser.add_argument("--rows", type=int, help="only the first so many")
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in chosen.heldout.read_text().splitlines()][: chosen.rows]
    print(json.dumps({"rows": len(rows), "greedy_accuracy": accuracy(chosen.model, rows, chosen.device)}))


if __name__ == "__main__":
    main()
