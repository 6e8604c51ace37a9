"""What a probe measured, as it is kept in numbers.json, and what it says about the paper's claim.

The file is written and read back before anything is drawn, so that a figure drawn again from it is
the same figure.

Shapes: T iterations, H heads, G chunk size.
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
from spiralformer.console import count
from spiralformer.errors import UserError
from spiralformer.files import digest, read_json, write_text
from spiralformer.probes import NUMBERS
from spiralformer.probes.metrics import (
    METRICS,
    cross_loop_range,
    dynamic_heads,
    mean,
    standard_error,
)

FORMAT = 1

TITLES = {"entropy": "Key-marginal entropy", "local_mass": "Local attention mass"}
SYMBOLS = {"entropy": "H", "local_mass": "LAM"}
TOKENS_SEEN = 20  # how often a token must occur to be ranked by its aggregation weight


@dataclass
class ModelResult:
    """What was measured in one model, averaged over sequences."""

    name: str
    fields: dict[str, Any]  # of the configuration
    sequences: int
    lengths: tuple[int, int]  # shortest and longest
    parameters: int
    skipped: list[str] = field(default_factory=list)  # what could not be measured, and why
    values: dict[str, Any] = field(default_factory=dict)
    """by the name of the probe, which says what is in it (spiralformer.probes.measure)"""

    def __getitem__(self, probe: str) -> Any:
        return self.values[probe]

    def __contains__(self, probe: str) -> bool:
        return probe in self.values

    @cached_property
    def config(self) -> SpiralConfig:
        return SpiralConfig.from_dict(self.fields)

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        return self.config.iterations

    def labels(self) -> list[str]:
        """A short name of each iteration: its resolution, numbered where several are alike."""
        names = [str(iteration.resolution) for iteration in self.iterations]
        repeated = len(set(names)) < len(names)
        return [f"{r}\nt={t}" if repeated else r for t, r in enumerate(names)]

    def loop(self, metric: str) -> np.ndarray:
        """(T, layers, H) of the layers that every iteration has: untied cores may differ."""
        depth = min((iteration.layers for iteration in self.iterations), default=0)
        rows = [self["attention"][str(t)][metric][:depth] for t in range(len(self.iterations))]
        return np.array(rows).reshape(len(rows), depth, self.config.num_heads)

    def delta(self, metric: str) -> np.ndarray:
        """Cross-loop range (layers, H) of each head."""
        return cross_loop_range(self.loop(metric))

    def dynamic(self, metric: str) -> np.ndarray:
        return dynamic_heads(self.delta(metric))

    def heads(self, metric: str, which: str) -> np.ndarray:
        """(T, heads) of the dynamic heads or of all."""
        chosen = self.dynamic(metric) if which == "dynamic" else ~np.isnan(self.delta(metric))
        return self.loop(metric)[:, chosen]

    def profile(self, probe: str, iteration: Iteration) -> dict[str, Any] | None:
        """Aggregation or allocation of an iteration; None where none is learned."""
        profile = self[probe][iteration.index] if probe in self else None
        return profile if isinstance(profile, dict) else None


@dataclass
class ProbeResult:
    """A whole probe: one model, or a model and its control."""

    data: str  # what the sequences were taken from
    models: list[ModelResult]
    notes: list[str]  # what differed from what was asked
    gamma: int

    def compare_losses(self) -> None:
        """Holds the first model's loss by place against the control's, sequence by sequence: what
        is hard in the text is hard for both, and cancels."""
        model, control = self.models
        for own, other in zip(model["loss"]["phases"], control["loss"]["phases"], strict=True):
            difference = own["each"] - other["each"]
            own["against"] = mean(difference)
            own["against_error"] = standard_error(difference)

    def save(self, folder: Path) -> Path:
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        for model in content["models"]:
            model |= model.pop("values")
            for phase in model["loss"]["phases"]:
                phase.pop("each", None)  # of every sequence: too much to keep
        plain = _plain(content)
        plain["checksum"] = digest(plain)
        write_text(folder / NUMBERS, json.dumps(plain, indent=1, allow_nan=False) + "\n")
        return folder / NUMBERS

    @classmethod
    def load(cls, folder: Path) -> ProbeResult:
        path = folder / NUMBERS
        content = read_json(path)
        checksum = content.pop("checksum", None)  # older ones have none
        if checksum is not None and checksum != digest(content):
            raise UserError(f"{path}: damaged (its checksum does not hold); probe the model again")
        if content.pop("format", None) != FORMAT:
            raise UserError(f"{path}: not the numbers of a probe of this version")
        try:
            models = [_model_result(fields) for fields in content.pop("models")]
            return cls(models=models, **content)
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise UserError(f"{path}: damaged ({error!r}); probe the model again") from None


def _model_result(fields: dict[str, Any]) -> ModelResult:
    known = {each.name for each in dataclasses.fields(ModelResult)}
    plain = {name: fields.pop(name) for name in known & fields.keys()}
    model = ModelResult(**plain)
    model.values = {name: _arrays(value) for name, value in fields.items() if value is not None}
    shortest, longest = model.lengths
    model.lengths = (shortest, longest)
    assert model.config  # a legal one
    if missing := {"attention", "reference", "loss"} - model.values.keys():
        raise KeyError(*missing)
    return model


def _plain(value: Any) -> Any:
    """As JSON has it: arrays are lists, and what was not measured is null."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _arrays(value: Any) -> Any:
    """Back again: a list that holds numbers only is an array."""
    if isinstance(value, dict):
        return {k: _arrays(v) for k, v in value.items()}
    if not isinstance(value, list):
        return value
    leaves = np.array(value, dtype=object).ravel()
    if all(leaf is None or isinstance(leaf, (int, float)) for leaf in leaves):
        return np.array(value, dtype=np.float64)
    return [_arrays(v) for v in value]


# ---------------------------------------------------------------------------- the verdict

EXPECTED = {"entropy": -1, "local_mass": +1}  # from the coarsest to the finest iteration


@dataclass(frozen=True)
class Verdict:
    metric: str
    heads: str  # "all" or "dynamic"
    word: str  # yes, partly, opposite, no, geometry, or "not measured"
    sentence: str


def verdicts(model: ModelResult) -> list[Verdict]:
    if not model.iterations:
        return []
    return [judge(model, metric, heads) for metric in METRICS for heads in ("all", "dynamic")]


def judge(model: ModelResult, metric: str, heads: str) -> Verdict:
    def unmeasured(why: str) -> Verdict:
        return Verdict(metric, heads, "not measured", why)

    values = model.heads(metric, heads)  # T heads
    order = sorted(model.iterations, key=lambda iteration: iteration.resolution)  # stable
    order = [each for each in order if not np.isnan(values[each.index]).any()]
    if len(order) < 2:
        return unmeasured("Fewer than two iterations have values: there is nothing to compare.")
    if values.shape[1] < 2:
        kind = "dynamic head" if heads == "dynamic" else "head"
        return unmeasured(f"{count(values.shape[1], kind)}: too few for a spread over heads.")

    coarse, fine = order[0], order[-1]
    difference = values[fine.index] - values[coarse.index]
    mean = float(difference.mean())
    error = float(difference.std(ddof=1) / math.sqrt(len(difference)))
    sign = EXPECTED[metric]
    means = [float(values[each.index].mean()) for each in order]
    reference = model["reference"][metric]
    uniform = float(reference[fine.index] - reference[coarse.index])
    if abs(mean) <= 2 * error:
        word = "no"
    elif uniform * mean > 0 and abs(mean) - abs(uniform) <= 2 * error:
        word = "geometry"
    elif sign * mean < 0:
        word = "opposite"
    else:
        word = "yes" if (sign * np.diff(means) >= 0).all() else "partly"

    path, alone = f"from loop {coarse.index} to loop {fine.index}", ""
    if coarse.resolution != fine.resolution:
        path = f"from resolution {coarse.resolution} to {fine.resolution}"
        alone = f" Uniform attention: {uniform:+.3f}."
    sentence = (
        f"{SYMBOLS[metric]} goes {' → '.join(f'{m:.3f}' for m in means)} {path}: "
        f"{mean:+.3f} ± {error:.3f} per head, {(sign * difference > 0).sum()} of "
        f"{len(difference)} {'dynamic ' * (heads == 'dynamic')}heads "
        f"{'fall' if sign < 0 else 'rise'}.{alone}"
    )
    return Verdict(metric, heads, word, sentence)


def overall(model: ModelResult) -> str:
    """One line on the two metrics, over all heads."""
    if not model.iterations:
        return "This model has no loop: there are no iterations to compare."
    entropy, local = (judge(model, metric, "all").word for metric in METRICS)
    if entropy == local == "yes":
        return "The hierarchy of the paper shows: coarse iterations are diffuse, fine ones local."
    if "not measured" in (entropy, local):
        return "The cross-loop shift of the paper could not be measured."
    claims = {"entropy falls": entropy, "locality rises": local}
    toward = [claim for claim, word in claims.items() if word in ("yes", "partly")]
    if not toward:
        return "The hierarchy of the paper does not show in this model."
    if len(toward) == 2:
        return "The shift of the paper shows from end to end, but not at every step in between."
    along = len({iteration.resolution for iteration in model.iterations}) > 1
    path = "with resolution" if along else "from loop to loop, at one resolution"
    return f"The hierarchy of the paper shows in part: only {toward[0]} {path}."


def against_control(model: ModelResult, control: ModelResult) -> list[str]:
    """How large the shifts are beside the control's, over all heads."""
    lines = []
    for metric in METRICS:
        ranges = [each.delta(metric) for each in (model, control)]
        ranges = [each[~np.isnan(each)] for each in ranges]
        if all(each.size for each in ranges):
            mine, theirs = (float(each.mean()) for each in ranges)
            uniform = [float(np.ptp(each["reference"][metric])) for each in (model, control)]
            lines.append(
                f"Δ{SYMBOLS[metric]}, the range of a head across the loop, is {mine:.3f} on "
                f"average in {model.name} and {theirs:.3f} in {control.name}; with uniform "
                f"attention it would be {uniform[0]:.3f} and {uniform[1]:.3f}."
            )
    return lines
