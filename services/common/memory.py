"""Memory of processes that pass on messages of megabytes: what is freed is kept for the next one.

By default glibc takes large blocks fresh from the kernel and gives them back, page by page, several times a message;
on a virtual machine that costs more than copying the bytes.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_MIB = 1 << 20


def keep_freed_memory(most: int = 64 * _MIB) -> None:
    """Lets this process keep up to `most` freed bytes; without glibc it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_MMAP_THRESHOLD, 32 * _MIB)
        mallopt(_TRIM_THRESHOLD, most)
        mallopt(_TOP_PAD, 4 * _MIB)
