"""Which NCCL the torch of this Python loads, asked of the library itself; torch is not imported.

Packages' metadata may name another release than the one that is loaded: an image's own library, a wheel of another
torch. Engines run with this Python, so what holds here holds in them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

_NAME = "libnccl.so.2"


@functools.cache
def nccl_version() -> str:
    """ "2.28.9"; empty when no library is found (a torch without CUDA, or one with NCCL linked into it)."""
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        number = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)) == 0:
            return _text(number.value)
    return ""


def _candidates() -> list[str]:
    """torch's own search path comes before the loader's."""
    torch = importlib.util.find_spec("torch")
    beside = Path(torch.origin).parents[1] / "nvidia" / "nccl" / "lib" / _NAME if torch and torch.origin else None
    return [str(beside), _NAME] if beside and beside.exists() else [_NAME]


def _text(number: int) -> str:
    """NCCL's number of its release, 22809, in the usual form."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
