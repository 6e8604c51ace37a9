"""The numbers of a probe: everything that the figures and the report are drawn from.

They are written as one JSON file and read back before anything is drawn, so that a figure drawn
again from the file is the same figure.

Shapes: T iterations, H heads, M memory slots, G chunk size, S = T+1 states h⁽⁰⁾ … h⁽ᵀ⁾.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spiralformer.config import ConfigError, Iteration, SpiralConfig
from spiralformer.errors import UserError
from spiralformer.probes.metrics import cross_loop_range, dynamic_heads, mean, standard_error

FORMAT = 1
NUMBERS = "numbers.json"
METRICS = ("entropy", "local_mass")


@dataclass
class Findings:
    """What was found in one model, averaged over sequences."""

    name: str
    fields: dict[str, Any]  # of the configuration
    sequences: int
    lengths: tuple[int, int]  # shortest and longest
    parameters: int

    attention: dict[str, dict[str, np.ndarray]]
    """stage ("pre", "0", "1", …, "post") → metric → (layers, H)"""
    reference: dict[str, np.ndarray]
    """metric → (T): uniform attention at the longest length"""

    loss: dict[str, Any]
    """mean; error; edges and by_position (one number per bin of positions); phases, a list of
    {chunk, offset, excess (G), error (G)}: loss by place in a chunk, less the mean; beside a
    control also against and against_error, the same less the control's on the same sequences"""
    skipped: list[str] = field(default_factory=list)  # what could not be measured, and why

    updates: dict[str, np.ndarray] | None = None
    """size ‖ũ‖/‖h‖, change ‖h′-h‖/‖h‖, cosine of h and h′, the error of each: (T)"""
    cka: np.ndarray | None = None  # (S, S)
    lens: dict[str, np.ndarray] | None = None
    """loss and accuracy through f_post, and without it (direct_…): (S); settled and settled_right:
    the share of positions whose answer appears, to stay, at each state (S)"""
    routing: dict[str, np.ndarray] | None = None
    """write and read (S, M), coefficients and their spread over tokens, and the share of the state
    that each term makes up (S, T+2): x, v, ũ⁽⁰⁾, …"""
    aggregation: list[dict[str, Any] | None] = field(default_factory=list)
    """per iteration: mean and spread of α (G), evenness; tokens, [text, lift, count] each"""
    allocation: list[dict[str, Any] | None] = field(default_factory=list)
    """per iteration: mean and spread of β (G), evenness"""

    @cached_property
    def config(self) -> SpiralConfig:
        return SpiralConfig.from_dict(self.fields)

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        return self.config.iterations

    def labels(self) -> list[str]:
        """A short name of each iteration: its resolution, numbered where several are alike."""
        names = [str(it.resolution) for it in self.iterations]
        repeated = len(set(names)) < len(names)
        return [f"{r}\nloop {t}" if repeated else r for t, r in enumerate(names)]

    def loop(self, metric: str) -> np.ndarray:
        """(T, layers, H); layers that only some untied cores have are NaN in the others."""
        found = [self.attention[str(it.index)][metric] for it in self.iterations]
        depth = max((len(values) for values in found), default=0)
        rows = np.full((len(found), depth, self.config.num_heads), np.nan)
        for t, values in enumerate(found):
            rows[t, : len(values)] = values
        return rows

    def delta(self, metric: str) -> np.ndarray:
        """Cross-loop ranges (layers, H) of the heads that every iteration has."""
        depth = min((it.layers for it in self.iterations), default=0)
        return cross_loop_range(self.loop(metric)[:, :depth])

    def dynamic(self, metric: str) -> np.ndarray:
        return dynamic_heads(self.delta(metric))

    def heads(self, metric: str, which: str) -> np.ndarray:
        """(T, heads) of the dynamic heads or of all that every iteration has."""
        delta = self.delta(metric)
        values = self.loop(metric)[:, : len(delta)]
        return values[:, self.dynamic(metric) if which == "dynamic" else ~np.isnan(delta)]


@dataclass
class Numbers:
    """A whole probe: one model, or a model and its control."""

    data: str  # what the sequences were taken from
    models: list[Findings]
    notes: list[str]  # what differed from what was asked
    gamma: int

    def pair_losses(self) -> None:
        """Holds the first model's loss by place against the control's, sequence by sequence: what
        is hard in the text is hard for both, and cancels."""
        found, control = self.models
        for own, other in zip(found.loss["phases"], control.loss["phases"], strict=True):
            difference = own["each"] - other["each"]
            own["against"] = mean(difference)
            own["against_error"] = standard_error(difference)

    def save(self, folder: Path) -> Path:
        path = folder / NUMBERS
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        for found in content["models"]:
            for phase in found["loss"]["phases"]:
                phase.pop("each", None)  # of every sequence: too much to keep
        path.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n", "utf-8")
        return path

    @classmethod
    def load(cls, folder: Path) -> Numbers:
        path = folder / NUMBERS
        try:
            content = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; `spiralformer probe` writes it") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise UserError(f"{path}: not the numbers of a probe of this version")
        try:
            models = [_findings(fields) for fields in content.pop("models")]
            return cls(models=models, **content)
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise UserError(f"{path}: damaged ({error!r}); probe the model again") from None


def _findings(fields: dict[str, Any]) -> Findings:
    kept, per_iteration = ("fields", "skipped", "lengths"), ("aggregation", "allocation")
    read = {k: v for k, v in fields.items() if k in kept}
    for name in fields.keys() - set(kept):
        value = fields[name]
        read[name] = list(map(_arrays, value)) if name in per_iteration else _arrays(value)
    found = Findings(**read)
    found.lengths = (found.lengths[0], found.lengths[1])
    assert found.config  # the configuration is a legal one
    return found


def _plain(value: Any) -> Any:
    """As JSON has it: arrays are lists, and what was not measured is null."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    """Back again: a list that holds numbers only is an array."""
    if isinstance(value, dict):
        return {k: _arrays(v) for k, v in value.items()}
    if isinstance(value, list):
        leaves = list(_leaves(value))
        if leaves and all(v is None or isinstance(v, (int, float)) for v in leaves):
            return np.array(value, dtype=np.float64)
        return [_arrays(v) for v in value]
    return value


def _leaves(value: Any) -> Any:
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
