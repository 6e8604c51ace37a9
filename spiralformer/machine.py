"""What this machine has: memory, devices, packages, time. Asked before any work begins."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spiralformer.errors import UserError

if TYPE_CHECKING:
    import torch

LIMITS = (  # where Linux tells what a container may use, in bytes
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory() -> int | None:
    """Bytes that this machine, or the container we are in, has; None where nobody tells."""
    try:
        known = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):
        return None
    for path in LIMITS:
        if path.is_file() and (limit := path.read_text().strip()).isdigit():
            known.append(int(limit))
    return min(known)


def require_memory(needed: float, what: str, device: torch.device | str = "cpu") -> None:
    """Refuses what cannot fit however empty the machine is: better than to be killed half-way."""
    if str(device).startswith("cuda"):
        import torch

        known: int | None = torch.cuda.mem_get_info(device)[1]
    else:
        known = memory()
    if known is not None and needed > known:
        raise UserError(
            f"{what} needs at least {needed / 1e9:,.1f} GB of memory, and {device} has "
            f"{known / 1e9:,.1f}; make it smaller"
        )


@contextlib.contextmanager
def within(seconds: float, message: str) -> Iterator[None]:
    """Ends what takes longer, where the system has an alarm for it."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() != threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise UserError(message)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def require_package(module: str, purpose: str, extra: str) -> None:
    if not (sys.modules.get(module) or importlib.util.find_spec(module)):
        raise UserError(
            f"{purpose} needs the package {module}: pip install 'spiralformer[{extra}]'"
        )
