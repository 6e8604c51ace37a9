"""Timing on a shared machine: interleaved repeats, and the best of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleave(
    cases: Mapping[str, Callable[[], Any]], repeats: int, label: str = ""
) -> dict[str, float]:
    """Best seconds of each case, by the clock or as the case itself says (a float it returns).

    Every round runs every case once, so that a noisy moment of the machine falls on all of them
    alike."""
    best: dict[str, float] = dict.fromkeys(cases, float("inf"))
    for round in range(repeats):
        for done, (name, case) in enumerate(cases.items()):
            if sys.stderr.isatty():
                place = round * len(cases) + done + 1
                print(
                    f"\r{label} {place}/{repeats * len(cases)} {name:<40}", end="", file=sys.stderr
                )
            begun = time.perf_counter()
            own = case()
            took = own if isinstance(own, float) else time.perf_counter() - begun
            best[name] = min(best[name], took)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return best


def table(rows: list[list[str]], heads: list[str]) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    widths = [max(len(str(row[i])) for row in [heads, *rows]) for i in range(len(heads))]

    def line(row: list[str]) -> str:
        cells = [str(row[0]).ljust(widths[0])]
        cells += [str(c).rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells)

    return "\n".join([line(heads), "  ".join("─" * w for w in widths), *map(line, rows)])
