"""What the C library does with the memory that tensors free."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
THEIRS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}


def keep_freed_memory() -> None:
    """Keeps freed memory for the next tensors, unless the environment already says what to do.

    By default glibc gives large blocks back to the system, which hands them out again zeroed, page
    by page: up to a tenth of a training step on a CPU."""
    if sys.platform != "linux" or THEIRS & os.environ.keys():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl does not
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_MMAP_THRESHOLD, 2**31 - 1)
