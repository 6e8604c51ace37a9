"""The learning rate of each family: the best of a declared grid of shorter runs.

A best at the edge of the grid says little, so the grid is then extended beyond it by a factor of
two, as often as the study allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Tuned:
    """What came of a sweep."""

    tried: dict[float, float]  # learning rate → validation loss; inf where the run failed
    chosen: float | None  # None if every run failed, or none was made
    extended: int
    at_edge: bool  # the best is at the edge still

    def says(self) -> str:
        if self.chosen is None:
            return "no run of the sweep finished"
        text = f"{self.chosen:.3g} of {', '.join(f'{lr:.3g}' for lr in self.tried)}"
        if self.extended:
            text += f" (grid extended {'once' if self.extended == 1 else f'{self.extended} times'})"
        return text + ("; still at the edge" if self.at_edge else "")


def best(tried: Mapping[float, float]) -> float | None:
    finite = {lr: loss for lr, loss in tried.items() if math.isfinite(loss)}
    return min(finite, key=lambda lr: (finite[lr], lr)) if finite else None


def next_rate(tried: Mapping[float, float], grid: int, extensions: int) -> float | None:
    """The learning rate to try after these, if the best is at an edge and may be extended."""
    chosen = best(tried)
    if chosen is None or len(tried) < 2 or len(tried) - grid >= extensions:
        return None
    if chosen == max(tried):
        return 2 * chosen
    if chosen == min(tried):
        return chosen / 2
    return None


def settled(tried: Mapping[float, float], grid: int) -> Tuned:
    chosen = best(tried)
    edges = (min(tried), max(tried)) if len(tried) > 1 else ()
    return Tuned(dict(sorted(tried.items())), chosen, max(0, len(tried) - grid), chosen in edges)
