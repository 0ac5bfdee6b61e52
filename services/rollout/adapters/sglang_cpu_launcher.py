"""Starts the unmodified SGLang server on a machine without an accelerator.

    python -m services.rollout.adapters.sglang_cpu_launcher --model-path DIR --device cpu ...

takes the arguments of `sglang.launch_server`. On a CPU without AMX every layer of SGLang runs its plain torch
path, yet its modules still name three packages that exist for accelerators only: `triton`, `sgl_kernel` and
`torchvision`. This module puts importable placeholders in their place and then runs SGLang's own entry point;
no file of SGLang is changed. It knows nothing of the node.

Invariants: an installed package always wins over its placeholder; a placeholder kernel that is really called
raises, it never returns a made-up result. One kernel is called on this path (`assign_req_to_token_pool_cpu`):
it is written out here in torch. Attention runs in `sglang_cpu_attention`.

Tested with sglang 0.5.23, torch 2.13.0 (CPU), transformers 5.19.0.
"""

from __future__ import annotations

import datetime
import enum
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import runpy
import sys
import types
from typing import Any

KERNEL_PACKAGE = "sgl_kernel"
COMPILER_PACKAGE = "triton"
VISION_PACKAGE = "torchvision"


def _missing_kernel(path: str):
    def kernel(*_args: Any, **_kwargs: Any):
        raise NotImplementedError(f"{path} needs an accelerator; this engine runs on the CPU.")

    return kernel


class Placeholder(types.ModuleType):
    """A package that has every attribute. Lower-case names are submodules that also serve as decorators
    (`triton.jit`), capitalised names are empty classes, names in the kernel package are kernels that raise
    (but for `scalar_type`, a table of constants)."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, _LOADER, is_package=True)
        sys.modules[name] = self

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        path = f"{self.__name__}.{attribute}"
        value: Any
        if attribute[0].isupper():
            value = type(attribute, (), {"__init__": lambda self, *args, **kwargs: None})
        elif path.startswith(f"{KERNEL_PACKAGE}.") and ".scalar_type" not in path:
            value = _missing_kernel(path)
        else:
            value = sys.modules.get(path) or Placeholder(path)
        setattr(self, attribute, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bare = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if bare else (lambda function: function)


class PlaceholderLoader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any submodule of a package that is stood in for."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return sys.modules.get(spec.name) or Placeholder(spec.name)

    def exec_module(self, module):
        """Nothing to run: attributes appear when they are asked for."""


_LOADER = PlaceholderLoader()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _assign_req_to_token_pool_cpu(rows, table, starts, ends, values, *_unused) -> None:
    """Write `values` (flat) into table[row, start:end] for each request."""
    position = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = values[position : position + end - start].to(table.dtype)
        position += end - start


def _stand_in_for_kernels() -> None:
    _LOADER.packages.add(KERNEL_PACKAGE)
    Placeholder(KERNEL_PACKAGE).assign_req_to_token_pool_cpu = _assign_req_to_token_pool_cpu


class _TritonConfig:
    """Autotuning tables are built at import; nothing reads them."""

    def __init__(self, kwargs: dict | None = None, **options: Any) -> None:
        self.kwargs = kwargs or {}
        vars(self).update(options)


def _stand_in_for_compiler() -> None:
    _LOADER.packages.add(COMPILER_PACKAGE)
    triton = Placeholder(COMPILER_PACKAGE)
    triton.__version__ = "3.7.0"  # SGLang compares it with the oldest release it takes
    triton.Config = _TritonConfig
    triton.cdiv = lambda dividend, divisor: (dividend + divisor - 1) // divisor
    triton.next_power_of_2 = lambda value: 1 if value <= 1 else 1 << (value - 1).bit_length()


def _stand_in_for_vision() -> None:
    import torch
    import transformers.utils

    if transformers.utils.is_torchvision_available():  # asked, and cached, before the placeholder exists
        # The wheel on the package index is a CUDA build: beside a CPU torch only these two schemas are missing.
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        return
    _LOADER.packages.add(VISION_PACKAGE)
    transforms = Placeholder(f"{VISION_PACKAGE}.transforms")
    transforms.InterpolationMode = enum.Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC")


def install_placeholders() -> None:
    """Make SGLang importable in this process."""
    import torch

    _stand_in_for_vision()
    sys.meta_path.append(_LOADER)
    if not _installed(KERNEL_PACKAGE):
        _stand_in_for_kernels()
    if not _installed(COMPILER_PACKAGE):
        _stand_in_for_compiler()
    # Returning routed experts pins a host buffer through this call.
    torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)


def import_once_then_fork() -> None:
    """Have SGLang's worker processes inherit this process's modules: each import costs some 14 CPU seconds."""
    gc.disable()  # millions of new objects, none of them garbage: collecting costs a tenth of the start
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler  # noqa: F401

    gc.freeze()  # and the children share these pages as long as no collection touches them
    gc.enable()
    multiprocessing.set_start_method = lambda *_args, **_kwargs: None  # SGLang asks for "spawn"


def bound_group_waits() -> None:
    """Groups that SGLang joins wait half an hour for a missing member by default, and the engine stands still
    that long. TETRARCH_GROUP_TIMEOUT_SECONDS bounds the wait of every collective of this engine."""
    from torch.distributed import distributed_c10d

    seconds = os.environ.get("TETRARCH_GROUP_TIMEOUT_SECONDS")
    if seconds:
        distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=float(seconds))


def main() -> None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch.compile would call a C++ compiler
    install_placeholders()
    bound_group_waits()
    import_once_then_fork()
    from services.rollout.adapters import sglang_cpu_attention

    sglang_cpu_attention.register()
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
