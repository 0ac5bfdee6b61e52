"""What the GPU tests run inside rank processes: `python -m tests.gpu.rank_program PROGRAM DEVICE RANK WORLD PORT ROOT`.

Rank 0 leaves the numbers in ROOT/<program>-<device>.pt. Everything but `attention` also runs on the CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.trainer.ranks import runtime
from tests.oracle.rank_program import Trainee, make_spec

LENGTHS = (200, 33, 1, 517, 64, 96)
SMOOTH = {"adam_eps": 1e-2, "lr": 1e-2, "lr_warmup_iters": 0}
"""With a large epsilon Adam's first step is a smooth function of the gradient; else it is little but its sign."""
HEADS = {"grouped": (9, 3, 64), "wide": (8, 8, 128), "odd": (6, 2, 80)}
"""Query heads, key-value heads, head_dim."""


def write_model(directory: Path) -> None:
    """A Qwen3 checkpoint of 10 million random weights in bfloat16, with logits of a realistic scale."""
    import transformers as hf

    torch.manual_seed(5)
    config = hf.Qwen3Config(
        vocab_size=5003,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def _tokens() -> torch.Tensor:
    return torch.randint(0, 5003, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def _hf_log_probs(root: Path, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Of every token but the first of its segment, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=dtype, attn_implementation="eager").to(device)
    found = []
    with torch.no_grad():
        for segment in _tokens().to(device).split(LENGTHS):
            scores = model(segment[None]).logits[0, :-1].float().log_softmax(-1)
            found.append(scores.gather(-1, segment[1:, None])[:, 0])
    return torch.cat(found).cpu()


def log_probs(root: Path, device: str) -> dict:
    """Log-probs of the packed segments: ours in bfloat16, by the kernels and by torch; transformers' in both types."""
    from services.trainer.ranks import log_probs as module
    from services.trainer.ranks import softmax_torch
    from services.trainer.ranks.batches import Pack
    from services.trainer.ranks.model.packing import PackLayout
    from services.trainer.ranks.policy import evaluate_log_probs

    trainee = Trainee(make_spec(root / "model", 1, 1, bf16=True), device)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    inner = torch.ones(sum(LENGTHS), dtype=torch.bool)
    inner[ends] = False
    rows, tokens = inner.nonzero()[:, 0].to(device), _tokens().to(device)
    nothing = torch.zeros(len(rows), device=device)
    layout = PackLayout(LENGTHS, trainee.device, rows)
    segments = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS) - 1).to(device)
    pack = Pack(
        layout, tokens, rows, tokens[rows + 1], nothing, nothing, nothing, 1, nothing[:0], len(tokens),
        segments, torch.zeros_like(segments), tuple(map(str, range(len(LENGTHS)))),
    )  # fmt: skip

    def ours() -> torch.Tensor:
        (found,) = evaluate_log_probs(trainee.policy.model, [pack], trainee.policy.hf, 1.0)
        return found.cpu()

    kernels, name = ours(), module.passes(trainee.device).__name__
    softmax_torch._CHUNK_ELEMENTS = 50_000
    module.passes = lambda _device: softmax_torch
    return {
        "ours": kernels,
        "passes": name,
        "chunks": ours(),
        "bfloat16": _hf_log_probs(root, device, torch.bfloat16),
        "float32": _hf_log_probs(root, device, torch.float32),
    }


def attention(_root: Path, device: str) -> dict:
    """Output and gradients of packed attention in bfloat16 (the kernel) and float32 (the padded way)."""
    from types import SimpleNamespace

    from services.trainer.ranks.model.attention import PackedAttention
    from services.trainer.ranks.model.packing import PackLayout

    out: dict = {}
    for name, (heads, kv_heads, width) in HEADS.items():
        config = SimpleNamespace(attention_dropout=0.0, kv_channels=width)
        frequencies = [1e4 ** (-2 * i / width) for i in range(width // 2)]
        module = PackedAttention(config, 1, None, None, frequencies)
        generator = torch.Generator().manual_seed(1)
        shapes = [(sum(LENGTHS), h, width) for h in (heads, kv_heads, kv_heads)]
        inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        pull = torch.randn(sum(LENGTHS), heads * width, generator=generator).bfloat16()
        out[name] = {}
        for dtype in (torch.bfloat16, torch.float32):
            leaves = [x.to(device, dtype).detach().requires_grad_() for x in inputs]
            result = module(*leaves, packed_seq_params=PackLayout(LENGTHS, torch.device(device)))
            result.backward(pull.to(device, dtype))
            key = str(dtype).removeprefix("torch.")
            out[name][key] = [x.float().cpu() for x in (result.detach(), *(leaf.grad for leaf in leaves))]
    return out


def cut_attention(_root: Path, device: str) -> dict:
    """Output and gradients of two ranks' queries over all keys, put together, and of the whole pack: bfloat16 by the
    kernel on a GPU, float32 with padding elsewhere. One process stands for both ranks, so nothing is gathered."""
    from types import SimpleNamespace

    from services.trainer.ranks.model.attention import PackedAttention
    from services.trainer.ranks.model.context import WHOLE, ContextCut
    from services.trainer.ranks.model.packing import PackLayout

    lengths = [*LENGTHS, -sum(LENGTHS) % 4]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    out: dict = {}
    for name, (heads, kv_heads, width) in HEADS.items():
        module = PackedAttention(SimpleNamespace(attention_dropout=0.0, kv_channels=width), 1, None, None, [])
        way = module._variable_length if device == "cuda" else module._padded
        generator = torch.Generator().manual_seed(1)
        shapes = [(sum(lengths), h, width) for h in (heads, kv_heads, kv_heads, heads)]
        *inputs, pull = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        out[name] = []
        for cuts in ((WHOLE,), (ContextCut(0, 2), ContextCut(1, 2))):
            query, key, value = (x.clone().requires_grad_() for x in inputs)
            result = torch.zeros_like(query)
            for cut in cuts:
                layout = PackLayout(lengths, torch.device(device), cut=cut)
                places = layout.own_tokens(torch.arange(sum(lengths), device=device))
                result = result.index_add(0, places, way(layout.own_tokens(query), key, value, layout))
            result.backward(pull)
            out[name].append([x.float().cpu() for x in (result.detach(), query.grad, key.grad, value.grad)])
    return out


def step(root: Path, device: str) -> dict:
    """One step in float32 and in bfloat16: metrics and weights."""
    out: dict = {}
    for name in ("qwen3", "llama31", "qwen2"):
        trainee = Trainee(make_spec(root / name, 1, 1, **SMOOTH), device)
        out[name] = trainee.step(0), {key: value.cpu() for key, value in trainee.weights().items()}
    out["bfloat16"] = Trainee(make_spec(root / "qwen3", 1, 1, bf16=True, **SMOOTH), device).step(0)
    return out


def checkpoint(root: Path, device: str) -> dict:
    """Everything the optimizer and the model hold, when saved and when loaded; the step after it."""
    from services.trainer.ranks.checkpoint import load_checkpoint, save_checkpoint

    spec = make_spec(root / "model", 1, 1, bf16=True)
    saved, loaded = Trainee(spec, device), Trainee(spec, device)
    saved.step(0)
    start = time.perf_counter()
    save_checkpoint(saved.policy, root / "checkpoint", 1)
    seconds = time.perf_counter() - start
    loaded.step(1)
    counters = load_checkpoint(loaded.policy, root / "checkpoint")
    states = [_state(trainee) for trainee in (saved, loaded)]
    return {
        "states": states,
        "seconds": seconds,
        "counters": (counters.step_count, counters.optimizer_steps),
        "next": [trainee.step(2) for trainee in (saved, loaded)],
    }


def _state(trainee: Trainee) -> dict[str, torch.Tensor]:
    state = {f"weight {name}": tensor.cpu() for name, tensor in trainee.weights().items()}
    for number, group in enumerate(trainee.policy.optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            place = f"{number}.{index}"
            state[f"main {place}"] = parameter.detach().cpu().clone()
            inner = trainee.policy.optimizer.optimizer.state[parameter]
            state |= {f"{key} {place}": value.cpu().clone() for key, value in inner.items()}
    return state


def parallel(root: Path, device: str) -> dict:
    """Two steps in float32, data parallel, then tensor parallel, then context parallel."""
    from megatron.core import parallel_state, tensor_parallel

    rank = torch.distributed.get_rank()
    where = f"cuda:{rank}" if device == "cuda" else device
    out = {}
    for name, (size, context) in {"data": (1, 1), "tensor": (2, 1), "context": (1, 2)}.items():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(size, context_parallel_size=context, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=device == "cpu", force_reset_rng=True)
        trainee = Trainee(make_spec(root / "qwen3", 2, size, context_parallel_size=context), where)
        out[name] = [trainee.step(seed) for seed in range(2)]
    return out


def lone(root: Path, device: str) -> dict:
    """The same on one rank."""
    trainee = Trainee(make_spec(root / "qwen3", 1, 1), device)
    return {"lone": [trainee.step(seed) for seed in range(2)]}


PROGRAMS = {f.__name__: f for f in (log_probs, attention, cut_attention, step, checkpoint, parallel, lone)}


def main(programs: dict[str, Callable[[Path, str], dict]]) -> None:
    """Runs one of some programs as one rank."""
    program, device = sys.argv[1:3]
    rank, world, port = map(int, sys.argv[3:6])
    root = Path(sys.argv[6])
    runtime.start(runtime.Layout(rank, world, port, 1), device, seed=1)
    result = programs[program](root, device)
    if rank == 0:
        torch.save(result, root / f"{program}-{device}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(PROGRAMS)
