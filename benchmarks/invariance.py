"""`python -m benchmarks.invariance`: one batch, however it is laid out, gives the same gradients.

The same samples are trained in other micro-batches, other orders, and by ranks that are parallel over data, tensors and
context, with every kind of loss and normaliser; each time all gradients are compared with those of one rank that takes
one sample after the other. Float32 on CPU processes, ratios away from 1 and partly clipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.invariance_ranks import AGAINST, ALGORITHMS, LAYOUTS, REFERENCE, VOCABULARY
from benchmarks.random_qwen3 import Shape, write_random_qwen3
from benchmarks.report import Figure, finish, limit, parser
from services.common.process import free_port

BAR = 1e-5
EFFECT = 1e-2
"""Least difference between the gradients of two algorithms: a setting that nothing obeys would be invariant too."""
LIMIT_SECONDS, WORLD_SECONDS = 7200, 3000
METRICS = {
    "loss",
    "pg_loss",
    "kl_loss",
    "entropy",
    "ppo_kl",
    "pg_clipfrac",
    "ratio_mean",
    "ratio_max",
    "trained_tokens",
}
SHAPE = Shape(48, 2, 4, 2, 16, 64, VOCABULARY, torch.float32)


def write_models(root: Path) -> None:
    """Two random models with logits of a realistic scale: the trained one, and a reference that is a little off."""
    generator = torch.Generator().manual_seed(1)
    for name in ("model", "reference"):
        write_random_qwen3(root / name, SHAPE, root / name)
    for file in (root / "model").glob("*.safetensors"):
        tensors = {}
        for key, tensor in load_file(file).items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[key] = 1 + 0.2 * noise if tensor.dim() == 1 else 0.2 * noise
        save_file(tensors, file, {"format": "pt"})
        moved = {key: tensor + 0.01 * torch.randn(tensor.shape, generator=generator) for key, tensor in tensors.items()}
        save_file(moved, root / "reference" / file.name, {"format": "pt"})


def run_world(root: Path, world: int) -> dict:
    """Gradients and metrics of a world's layouts, by algorithm and layout."""
    port, logs, processes = free_port(), [root / f"world-{world}-{rank}.log" for rank in range(world)], []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "benchmarks.invariance_ranks", str(root), str(rank), str(world), str(port)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment))
    try:
        codes = [process.wait(WORLD_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        tails = "\n".join(log.read_text()[-3000:] for log in logs)
        raise SystemExit(f"Ranks of a world of {world} failed:\n{tails}")
    return torch.load(root / f"world-{world}.pt", weights_only=False)


def difference(gradients: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """‖g − reference‖ / ‖reference‖ of all gradients as one vector, and the largest of a single tensor."""
    if gradients.keys() != reference.keys():
        raise SystemExit(f"Other tensors have gradients: {sorted(gradients.keys() ^ reference.keys())}")
    apart = {name: (gradients[name].double() - tensor.double()).norm() for name, tensor in reference.items()}
    norms = {name: tensor.double().norm() for name, tensor in reference.items()}
    whole = torch.stack(list(apart.values())).norm() / torch.stack(list(norms.values())).norm()
    worst = max(float(apart[name] / norms[name]) for name in apart)
    return float(whole), worst


def metrics_apart(metrics: Mapping[str, float], reference: Mapping[str, float]) -> float:
    """Largest difference of a metric: relative above 1, absolute below. Times and norms are no part of it."""
    return max(
        abs(metrics[name] - reference[name]) / max(abs(reference[name]), 1.0) for name in METRICS & metrics.keys()
    )


def measure(root: Path, worlds: Sequence[int], algorithms: Sequence[str]) -> list[Figure]:
    """Difference of every algorithm and layout from the reference. The first world must be 1; `algorithms` must have
    those that the others are to differ from."""
    write_models(root)
    (root / "algorithms.json").write_text(json.dumps(list(algorithms)))
    found = [run_world(root, world) for world in worlds]
    figures = []
    for name in algorithms:
        reference, worst, apart = found[0][name][REFERENCE], 0.0, 0.0
        for results in found:
            for layout, result in results[name].items():
                if layout == REFERENCE:
                    continue
                whole, single = difference(result["gradients"], reference["gradients"])
                worst = max(worst, single)
                apart = max(apart, metrics_apart(result["metrics"], reference["metrics"]))
                figures.append(Figure(f"{name}: {layout}", whole, "", f"<= {BAR:g}"))
        other = AGAINST[name]
        if name != other:
            effect, _ = difference(reference["gradients"], found[0][other][REFERENCE]["gradients"])
            figures.append(Figure(f"{name}: difference from {other}, same layout", effect, "", f">= {EFFECT:g}"))
        figures.append(Figure(f"{name}: metrics, worst layout", apart, "", f"<= {BAR:g}"))
        figures.append(Figure(f"{name}: gradient of a single tensor, worst layout", worst))
    return figures


def main() -> int:
    """Command line entry."""
    chosen = parser(__doc__ or "").parse_args()
    limit(LIMIT_SECONDS)
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory), list(LAYOUTS), list(ALGORITHMS))
    return finish("invariance", figures, chosen.json, settings=ALGORITHMS)


if __name__ == "__main__":
    raise SystemExit(main())
