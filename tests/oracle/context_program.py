"""Rank processes of the context-parallel tests, two of them: `... context_program RANK WORLD PORT ROOT`.

Rank 0 leaves the numbers in ROOT/context.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from services.trainer.ranks import runtime
from tests.oracle.rank_program import Trainee, make_spec

WORLD = 2
SEGMENTS = {
    "ragged": (24, 7, 41, 16, 7, 1),
    "one long": (96,),
    "single tokens": (1,) * 12,
    "nothing between": (5, 0, 80, 11),
}
"""Lengths of the segments of packs."""
WIDTH, HEADS, KV_HEADS = 16, 4, 2


def differences() -> dict[str, dict[str, float]]:
    """Attention over the cut pack against the whole one: output and gradients of query, key and value."""
    from services.trainer.ranks.model.attention import PackedAttention
    from services.trainer.ranks.model.context import context_cut
    from services.trainer.ranks.model.packing import PackLayout

    config = SimpleNamespace(attention_dropout=0.0, kv_channels=WIDTH)
    module = PackedAttention(config, 1, None, None, [1e4 ** (-2 * i / WIDTH) for i in range(WIDTH // 2)])
    found = {}
    for name, lengths in SEGMENTS.items():
        tokens, device = sum(lengths), torch.device("cpu")
        generator = torch.Generator().manual_seed(1)
        shapes = [(tokens, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        pull = torch.randn(tokens, HEADS * WIDTH, generator=generator)
        expected = module(*whole, packed_seq_params=PackLayout(lengths, device))
        expected.backward(pull)
        layout = PackLayout(lengths, device, cut=context_cut())
        own = [layout.own_tokens(x.detach()).clone().requires_grad_() for x in whole]
        got = module(*own, packed_seq_params=layout)
        got.backward(layout.own_tokens(pull))
        pairs = {"output": (got, expected)}
        pairs |= {key: (x.grad, y.grad) for key, x, y in zip(("query", "key", "value"), own, whole, strict=True)}
        found[name] = {key: (x - layout.own_tokens(y)).abs().max().item() for key, (x, y) in pairs.items()}
    return found


def rows() -> bool:
    """Whether values of rows come together in order, several at once, and gradients go back to where they belong; also
    when all rows, or none, are on one rank."""
    from services.trainer.ranks.model.context import context_cut
    from services.trainer.ranks.model.packing import PackLayout

    right = []
    for wanted in (torch.arange(1, 16, 2), torch.tensor([0, 1, 15]), torch.tensor([5, 6]), torch.arange(0)):
        layout = PackLayout((16,), torch.device("cpu"), wanted, context_cut())
        values = torch.arange(16.0).square()
        own = layout.own_tokens(values)[layout.rows].requires_grad_()
        first, second = layout.all_rows(own, own[:, None].expand(-1, 3)[:, 0] * 2)
        (first * wanted).sum().backward()
        right += [torch.equal(first, values[wanted]), torch.equal(second, 2 * values[wanted])]
        right.append(torch.equal(own.grad, layout.own_rows(wanted).float()))
    return all(right)


def checkpoints(root: Path) -> dict:
    """A context-parallel policy trains, is saved, goes on; a data-parallel one loads that and goes on."""
    from services.trainer.ranks.checkpoint import load_checkpoint, save_checkpoint
    from services.trainer.ranks.export import export_hf
    from services.trainer.ranks.weights import Staging

    settings = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    trainee = Trainee(make_spec(root / "qwen3", WORLD, 1, context_parallel_size=WORLD, **settings))
    export_hf(trainee.policy.model, trainee.policy.hf, root / "qwen3", root / "exported")
    staging = Staging(trainee.policy.model, trainee.policy.hf, 20_000, torch.device("cpu"))
    staging.finish()
    trainee.step(0)
    save_checkpoint(trainee.policy, root / "checkpoints", 1)
    out = {"staged": staging.staged is not None, "uninterrupted": [trainee.step(seed) for seed in (1, 2)]}
    _regroup(1)
    other = Trainee(make_spec(root / "qwen3", WORLD, 1, **settings))
    load_checkpoint(other.policy, root / "checkpoints")
    return out | {"data_parallel": [other.step(seed) for seed in (1, 2)]}


def _regroup(context: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, context_parallel_size=context, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)


def main() -> None:
    """Runs as one rank."""
    (rank, world, port), root = map(int, sys.argv[1:4]), Path(sys.argv[4])
    runtime.start(runtime.Layout(rank, world, port, 1, context_parallel_size=world), "cpu", seed=1)
    results: list = [None] * world
    torch.distributed.all_gather_object(results, {"attention": differences(), "rows": rows(), **checkpoints(root)})
    if rank == 0:
        torch.save(results, root / "context.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
