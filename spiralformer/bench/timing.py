"""Whole runs that take turns, and what is known of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import NonNegativeInt, PositiveFloat

from spiralformer.console import Progress

PATIENCE = 60.0  # seconds: a case that takes longer is run once
Name = TypeVar("Name")


@dataclass(frozen=True)
class Measurement:
    """One case: a model that does one thing."""

    setting: str  # what was done
    dtype: str
    model: str
    runner: str = ""  # what ran it, where there is a choice
    length: NonNegativeInt = 0  # of the sequence, or of what came before
    tokens: NonNegativeInt = 0  # of one run
    seconds: tuple[PositiveFloat, ...] = ()  # of each run
    bytes: NonNegativeInt = 0  # held, where memory was measured

    @property
    def label(self) -> str:
        return f"{self.model}, {self.runner}" if self.runner else self.model

    @property
    def median(self) -> float:
        """Tokens per second of the middle run."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """Tokens per second of the fastest run."""
        return self.tokens / min(self.seconds)


def interleave(
    cases: Mapping[Name, Callable[[], object]], repeats: int, label: str
) -> dict[Name, tuple[float, ...]]:
    """Seconds of each run of each case.

    Every round runs every case once, so that a slow moment of the machine falls on all of them
    alike. The first round warms up and does not count, except for a case beyond PATIENCE, which is
    run no more.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in cases}
    slow: set[Name] = set()
    with Progress(label, (repeats + 1) * len(cases), "runs") as progress:
        for round in range(repeats + 1):
            for name, case in cases.items():
                if name not in slow:
                    begun = time.perf_counter()
                    case()
                    took = time.perf_counter() - begun
                    if took > PATIENCE:
                        slow.add(name)
                    if round or name in slow:
                        seconds[name].append(took)
                progress.advance()
    return {name: tuple(runs) for name, runs in seconds.items()}
