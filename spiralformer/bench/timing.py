"""Timing on a shared machine: interleaved repeats, and the best of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from torch import nn

PATIENCE = 20.0  # seconds: a case that takes longer is run once


def interleave(
    cases: Mapping[str, Callable[[], Any]], repeats: int, label: str = ""
) -> dict[str, float]:
    """Best seconds of each case, by the clock or as the case itself says (a float it returns).

    Every round runs every case once, so that a noisy moment of the machine falls on all of them
    alike. The first round warms up and counts only for cases beyond PATIENCE."""
    best: dict[str, float] = dict.fromkeys(cases, float("inf"))
    slow: set[str] = set()
    for round in range(repeats + 1):
        for done, (name, case) in enumerate(cases.items()):
            if name in slow:
                continue
            if sys.stderr.isatty():
                place = round * len(cases) + done + 1
                total = (repeats + 1) * len(cases)
                print(f"\r\033[K{label} {place}/{total} {name}", end="", file=sys.stderr)
            begun = time.perf_counter()
            own = case()
            took = time.perf_counter() - begun
            if took > PATIENCE:
                slow.add(name)
            if round or name in slow:
                best[name] = min(best[name], own if isinstance(own, float) else took)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return best


class Laps:
    """Times a case in laps, such as its layers or tokens, and adds up the best of each: a shared
    machine is hardly ever quiet for as long as the whole takes."""

    def __init__(self, layers: Iterable[nn.Module] = ()) -> None:
        """A lap ends where one of these layers does, on the way forward and on the way back."""
        self.times: list[float] = []
        self.best: list[float] = []
        for layer in layers:
            layer.register_forward_hook(self._passed)

    def _passed(self, layer: nn.Module, given: Any, out: Any) -> None:
        self.mark()
        out = out[0] if isinstance(out, tuple) else out
        if out.requires_grad:
            out.register_hook(self.mark)

    def mark(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def total(self) -> float:
        """The best laps of this run and those before it, added up; the next run begins."""
        laps = [end - begin for begin, end in pairwise(self.times)]
        self.best = [min(pair) for pair in zip(self.best or laps, laps, strict=True)]
        self.times = []
        return sum(self.best)

    def time(self, case: Callable[[], Any]) -> float:
        self.mark()
        case()
        self.mark()
        return self.total()


def table(rows: list[list[str]], heads: list[str]) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    widths = [max(len(str(row[i])) for row in [heads, *rows]) for i in range(len(heads))]

    def line(row: list[str]) -> str:
        cells = [str(row[0]).ljust(widths[0])]
        cells += [str(c).rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells)

    return "\n".join([line(heads), "  ".join("─" * w for w in widths), *map(line, rows)])
