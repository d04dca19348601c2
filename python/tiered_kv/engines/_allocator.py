"""Keeps the C library from handing freed memory back to the system between forward passes.

A forward pass over a few tokens behind a long prefix allocates and frees the same hundreds of
megabytes again and again. With glibc's defaults a thread other than the main one gives them back
each time and takes a page fault for every 4 KiB at the next layer, which doubles the time to first
token.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The largest that glibc takes; larger blocks are mapped and unmapped as before.
_MMAP_BYTES = 32 << 20
_TRIM_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """Lets each heap of the process keep up to 512 MiB of freed memory.

    Returns:
        Whether the C library took the settings; others than glibc do not know them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
