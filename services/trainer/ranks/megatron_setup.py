"""Makes megatron-core 0.16.1 usable where there is no TransformerEngine, and where there is no CUDA.

`prepare()` must run before any other module of this package imports megatron. It edits no file of megatron-core: in
this process it replaces what is slow without TransformerEngine and apex, and on a CPU also the places where megatron
names the CUDA device. Nothing here knows about models or training.

What every device needs (the numbers of megatron-core 0.16.1):
- importing it must not compile: some forty functions are decorated with torch.compile, which loads inductor
  (4 s a process) and would look for a C++ compiler at the first call; our layers call none of them;
- its own replacements for the kernels of apex work tensor by tensor, and wait for the device at each gradient's norm;
- the gate of its experts asks for a function of TransformerEngine by a name that does not exist without it.

What a CPU needs:
- `torch.cuda.current_device()` is written as the device of about ninety tensors; every factory also takes a
  torch.device, so it may return the CPU;
- in some functions the device or the type of a gradient is a string literal ("cuda", "torch.cuda.FloatTensor");
- synchronising and the CUDA random state have no meaning;
- experts get their tokens with the help of a second stream, which copies sizes that are on the CPU already.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import types
import warnings
from collections.abc import Iterator

import torch

_CPU_NAMES = {"cuda": "cpu"} | {
    f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")
}
_MODULES_WITH_LITERALS = (
    "pipeline_parallel.schedules",
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "optimizer.distrib_optimizer",
    "transformer.utils",
    "utils",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.exchange_utils",
)
_prepared = False


def prepare(device: str) -> None:
    """Prepares this process for `device`, "cpu" or "cuda". Calling it again does nothing."""
    global _prepared
    if _prepared:
        return
    _silence()
    with _compile_disabled():
        _import_megatron()
    _replace_loops()
    if device == "cpu":
        _replace_cuda()
    _prepared = True


def _silence() -> None:
    """Megatron warns once per missing accelerator library and per deprecated decorator; none of it is news."""
    warnings.filterwarnings("ignore", module=r"megatron|torch\.jit")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _import_megatron() -> None:
    for name in _MODULES_WITH_LITERALS:
        importlib.import_module(f"megatron.core.{name}")
    importlib.import_module("megatron.core.models.gpt")


@contextlib.contextmanager
def _compile_disabled() -> Iterator[None]:
    def keep(function=None, **_):
        return function if function is not None else keep

    compile_ = torch.compile
    torch.compile = keep
    try:
        yield
    finally:
        torch.compile = compile_


def _replace_loops() -> None:
    """Gives megatron one operation over all tensors where it would loop; left alone with TransformerEngine or apex."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm
    for module in (clip_grads, optimizer):
        if module.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
            module.multi_tensor_scale_impl = _scale


def _norm(_chunk_size, _flag, tensor_lists, _per_tensor):
    return torch.stack(torch._foreach_norm(tensor_lists[0])).norm()[None], None


def _scale(_chunk_size, _flag, tensor_lists, factor) -> None:
    sources, targets = tensor_lists
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    if factor != 1.0:
        torch._foreach_mul_(targets, factor)


def _replace_cuda() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    random._get_cuda_rng_state = lambda *_, **__: None
    random._set_cuda_rng_state = lambda *_, **__: None
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = lambda self, point, tokens_per_expert=None: (
        tokens_per_expert
    )
    for name in _MODULES_WITH_LITERALS:
        module = importlib.import_module(f"megatron.core.{name}")
        if not sum(_rewrite_literals(function) for function in _functions(module)):
            raise RuntimeError(f"megatron.core.{name} names no CUDA device; is this megatron-core 0.16.1?")


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Functions and methods that the module itself defines, decorators taken off."""
    classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    for owner in (module, *classes):
        for value in list(vars(owner).values()):
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                yield function


def _rewrite_literals(function: types.FunctionType) -> bool:
    code = _cpu_code(function.__code__)
    if code == function.__code__:
        return False
    function.__code__ = code
    return True


def _cpu_code(constant):
    if isinstance(constant, str):
        return _CPU_NAMES.get(constant, constant)
    if isinstance(constant, tuple):
        return tuple(_cpu_code(item) for item in constant)
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=_cpu_code(constant.co_consts))
    return constant
