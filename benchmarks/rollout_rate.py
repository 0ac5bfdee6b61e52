"""`python -m benchmarks.rollout_rate [--device cuda --model DIR]`: Tetrarch's rollout rate against its bare engine.

Both send the same requests, as many at a time, to the same engine process, in turn: a bare client straight to
/generate, and the real path, from prompts leased of the buffer to scored groups that a trainer can take. Every response
has the same length, because the checkpoint's copy has no end token.

`--engine simulated` replaces the engine by one that answers at `--engine-tokens-per-second`, to find what the node
itself can carry.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bare_client import Served, flush, saturate
from benchmarks.checkpoints import endless_copy, random_model
from benchmarks.report import Figure, finish, limit, parser
from benchmarks.run_files import bare_settings, write_prompts
from benchmarks.serving import Collected, Serving, serving
from benchmarks.workspace import BENCH_DIR
from examples.first_run.__main__ import CONFIGS
from services.common.records import SamplingParams
from services.common.run_spec import RunSpec
from services.rollout.adapters.engine_http import generate_body
from services.rollout.adapters.tokenizer import load_tokenizer
from services.rollout.core.engine_port import GenerationRequest

ROUNDS_MOST = 15
"""Versions that a group may lag behind in this run: every round publishes one, and the engines keep the first."""
BAR = ">= 0.97"
LIMIT_SECONDS = 1800
START_SECONDS = {"cpu": 180.0, "cuda": 400.0}
RUN_FILES = {"cpu": "first_run_grpo.yaml", "cuda": "smollm2_grpo.yaml"}
SIZES = {"cpu": (32, 16, 64), "cuda": (256, 128, 256)}
"""Groups of a round, groups in flight, response tokens."""


@dataclass
class Measured:
    """Rounds of each kind, and what every process spent in Tetrarch's rounds."""

    bare: list[Served] = field(default_factory=list)
    routed: list[Served] = field(default_factory=list)
    tetrarch: list[Collected] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    bare_cpu: dict[str, float] = field(default_factory=dict)
    calls: dict[str, tuple[float, float]] = field(default_factory=dict)


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__ or "")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", type=Path, help="Hugging Face checkpoint; a small random one on the CPU")
    made.add_argument("--run-file", type=Path, help="whose engine settings are used")
    made.add_argument("--engine", choices=("sglang", "simulated"), default="sglang")
    made.add_argument("--engine-tokens-per-second", type=float, default=1e6, help="of all simulated requests together")
    made.add_argument("--groups", type=int, help="groups of a round")
    made.add_argument("--inflight", type=int, help="groups in flight")
    made.add_argument("--tokens", type=int, help="response tokens")
    made.add_argument("--samples", type=int, default=8, help="samples of a group")
    made.add_argument("--rounds", type=int, default=3, help="rounds of each kind")
    chosen = made.parse_args()
    groups, inflight, tokens = SIZES[chosen.device]
    chosen.groups = -(-(chosen.groups or groups) // (ROUNDS_MOST + 1)) * (ROUNDS_MOST + 1)
    chosen.inflight, chosen.tokens = chosen.inflight or inflight, chosen.tokens or tokens
    chosen.run_file = chosen.run_file or CONFIGS / RUN_FILES[chosen.device]
    if chosen.device == "cuda" and not chosen.model:
        made.error("--device cuda needs --model DIR")
    if not 1 <= chosen.rounds < ROUNDS_MOST:
        made.error(f"--rounds is 1 to {ROUNDS_MOST - 1}")
    return chosen


def make_spec(chosen: argparse.Namespace, directory: Path, model: Path, prompts: Path) -> RunSpec:
    """The run file's run, with this benchmark's sizes and prompts."""
    rollout, trainer = bare_settings(chosen.run_file)
    batch = chosen.groups // (ROUNDS_MOST + 1)
    rollout |= {
        "hf_checkpoint": str(model),
        "engine": chosen.engine,
        "device": chosen.device,
        "num_rollout": 100_000,
        "rollout_batch_size": batch,
        "n_samples_per_prompt": chosen.samples,
        "rollout_max_response_len": chosen.tokens,
        "rollout_stop": [],
        "rollout_stop_token_ids": [],
        "max_inflight": chosen.inflight,
        "rollout_num_gpus": 1,
    }
    if chosen.device == "cuda":
        # As many requests as the run's CUDA graphs hold; those in flight beyond them wait in the engine, either way.
        running = {"max_running_requests": rollout.get("sglang", {}).get("cuda_graph_max_bs_decode", 256)}
        rollout["sglang"] = running | rollout.get("sglang", {})
    if "rollout_max_context_len" in rollout:
        rollout["rollout_max_context_len"] = max(rollout["rollout_max_context_len"], chosen.tokens + 128)
    if chosen.engine == "simulated":
        running = 256
        each = chosen.engine_tokens_per_second / min(running, chosen.inflight * chosen.samples)
        lengths = {"mean_response_len": 1e6, "response_len_spread": 0.0}
        rollout["simulated"] = {"tokens_per_second": each, "max_running_requests": running, **lengths}
    trainer |= {
        "save": str(directory / "checkpoints"),
        "global_batch_size": batch * chosen.samples,
        "num_steps_per_rollout": 1,
        "max_staleness": ROUNDS_MOST,
    }
    data = {"prompt_data": str(prompts), "label_key": "label"}
    run = {"run_id": directory.name, "run_dir": str(directory.parent)}
    return RunSpec.model_validate(run | {"data": data, "rollout": rollout, "trainer": trainer})


def bare_bodies(spec: RunSpec, texts: Sequence[str]) -> list[dict[str, Any]]:
    """The very bodies that the node sends for these prompts."""
    rollout, tokenizer = spec.rollout, load_tokenizer(spec.rollout.hf_checkpoint)
    sampling = SamplingParams(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_new_tokens=rollout.rollout_max_response_len,
    )
    return [
        generate_body(
            GenerationRequest(
                request_id=uuid.uuid4().hex,
                input_ids=tuple(tokenizer.encode(text)),
                sampling=sampling,
                sample_count=rollout.n_samples_per_prompt,
            )
        )
        for text in texts
    ]


def _difference(after: dict[str, float], before: dict[str, float], into: dict[str, float]) -> None:
    for name, value in after.items():
        into[name] = into.get(name, 0.0) + value - before.get(name, 0.0)


async def measure(chosen: argparse.Namespace, spec: RunSpec, texts: Sequence[str]) -> Measured:
    """Warms both ways up, then measures them in turn."""
    measured = Measured()
    async with serving(spec, START_SECONDS[chosen.device]) as served:
        await served.collect(time.monotonic())
        url = (await served.node()).engines[0].url
        bodies = bare_bodies(spec, texts)
        await saturate(url, bodies[: chosen.inflight], chosen.inflight)
        calls = await served.calls()
        for number in range(1, chosen.rounds + 1):
            same = bodies[number * chosen.groups : (number + 1) * chosen.groups]
            await flush(url)
            before = await served.cpu_seconds()
            measured.bare.append(await saturate(url, same, chosen.inflight))
            between = await served.cpu_seconds()
            _difference(between, before, measured.bare_cpu)
            await flush(url)
            measured.tetrarch.append(await _round(served))
            _difference(await served.cpu_seconds(), between, measured.cpu)
        answered = await served.calls()
        measured.calls = {
            name: (answered[name][0] - calls.get(name, (0, 0))[0], answered[name][1] - calls.get(name, (0, 0))[1])
            for name in answered
        }
        await flush(url)
        router = (await served.node()).router_url
        measured.routed.append(await saturate(router, bodies[chosen.groups : 2 * chosen.groups], chosen.inflight))
    return measured


async def _round(served: Serving) -> Collected:
    began = time.monotonic()
    await served.open_round()
    return await served.collect(began)


def figures_of(chosen: argparse.Namespace, measured: Measured) -> list[Figure]:
    """Everything worth knowing of the rounds."""

    def rate(rounds: Sequence[Served | Collected]) -> float:
        return statistics.median(one.tokens / one.seconds for one in rounds)

    bare, tetrarch, routed = rate(measured.bare), rate(measured.tetrarch), rate(measured.routed)
    made = sum(one.tokens for one in measured.tetrarch)
    expected = chosen.groups * chosen.samples * chosen.tokens
    groups = sum(one.groups for one in measured.tetrarch)
    node = measured.cpu["rollout"]
    figures = [
        Figure("bare client, straight to the engine", bare, "tokens/s"),
        Figure("Tetrarch, lease to stored group", tetrarch, "tokens/s"),
        Figure("Tetrarch / bare", tetrarch / bare, "", BAR if chosen.device == "cuda" else ""),
        Figure("bare client through the router / bare", routed / bare),
        *(
            Figure(f"tokens of round {number}, {name}", one.tokens, "", f"== {expected}")
            for name, rounds in (("bare", measured.bare), ("Tetrarch", measured.tetrarch))
            for number, one in enumerate(rounds, 1)
        ),
        Figure("round, bare (median)", statistics.median(one.seconds for one in measured.bare), "s"),
        Figure("round, Tetrarch (median)", statistics.median(one.seconds for one in measured.tetrarch), "s"),
        Figure("node: CPU of a group", 1000 * node / groups, "ms"),
        Figure("node: its own ceiling, one core busy", made / node, "tokens/s"),
        Figure("node: its own ceiling, one core busy", groups / node, "groups/s"),
    ]
    seconds = sum(one.seconds for one in measured.tetrarch)
    for name, value in sorted(measured.cpu.items(), key=lambda item: -item[1]):
        figures.append(Figure(f"  CPU of {name} in Tetrarch's rounds", value / seconds, "cores"))
    for name in ("LeasePrompts", "Score", "PutGroups"):
        spent, count = measured.calls.get(name, (0.0, 0.0))
        if count:
            figures += [
                Figure(f"  {name}: mean of a call", 1000 * spent / count, "ms"),
                Figure(f"  {name}: groups of a call", groups / count),
            ]
    return figures


def main() -> int:
    """Command line entry."""
    chosen = arguments()
    limit(LIMIT_SECONDS)
    directory = (BENCH_DIR / f"rollout-rate-{uuid.uuid4().hex[:6]}").absolute()
    directory.mkdir(parents=True)
    source = chosen.model or random_model(BENCH_DIR / "random-model")
    model = endless_copy(source, directory / "model", positions=None if chosen.model else 1024)
    texts = write_prompts(directory / "prompts.jsonl", chosen.groups * (chosen.rounds + 1))
    spec = make_spec(chosen, directory, model, directory / "prompts.jsonl")
    measured = asyncio.run(measure(chosen, spec, texts))
    sizes = {key: getattr(chosen, key) for key in ("device", "engine", "groups", "inflight", "samples", "tokens")}
    rounds = {
        kind: [{"seconds": one.seconds, "tokens": one.tokens} for one in getattr(measured, kind)]
        for kind in ("bare", "tetrarch", "routed")
    }
    context = {"sizes": sizes, "rounds": rounds, "bare_cpu_seconds": measured.bare_cpu}
    return finish("rollout_rate", figures_of(chosen, measured), chosen.json, **context)


if __name__ == "__main__":
    raise SystemExit(main())
