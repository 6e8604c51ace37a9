"""What the numbers say: whether runs are comparable, how noisy they are, which claims they bear
out.

All of it is computed from the runs' own records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from spiralformer.accounting import forward_flops, parameters, training_flops_per_token
from spiralformer.errors import UserError
from spiralformer.study.spec import Claim, Row

SEEN, NOT_SEEN, NOISY, NOT_RUN = "seen", "not seen", "too noisy to tell", "not run"
RULE = (
    "Runs of one seed see the same data in the same order, so rows are compared seed by seed. The "
    "noise of a single run, σ, is what is left of the validation losses after each row’s mean and "
    "each seed’s mean are taken out, pooled over all rows that have every seed. A study of one "
    "seed takes σ from the main study at the same scale and budget. A difference of means over n "
    "pairs has the standard error σ·√(2/n). “Seen”: the difference has the paper’s sign and is "
    "more than two standard errors from zero. “Not seen”: more than two standard errors the "
    "other way. “Too noisy to tell”: anything between, or no σ. “Alike” claims are seen if the "
    "difference lies within the margin by two standard errors, and not seen if it lies "
    "outside it by as much. "
    "“Frontier” claims measure each point of the first family from the line fitted to the second "
    "(log loss against log FLOPs or parameters); the scatter about that line adds to σ. FLOPs and "
    "parameters are exact."
)


class Unmatched(UserError):
    """Runs that a table would compare, but that did not see the same."""


@dataclass(frozen=True)
class Found:
    """A row with what its runs recorded, by seed."""

    row: Row
    length: int
    lr: float | None
    records: dict[int, dict[str, Any]]
    failures: dict[int, str]

    @property
    def losses(self) -> dict[int, float]:
        return {seed: record["valid"]["loss"] for seed, record in sorted(self.records.items())}

    @property
    def loss(self) -> float:
        return float(np.mean(list(self.losses.values()))) if self.losses else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation over seeds."""
        return (
            float(np.std(list(self.losses.values()), ddof=1)) if len(self.losses) > 1 else math.nan
        )

    @property
    def bits_per_byte(self) -> float:
        found = [record["valid"]["bits_per_byte"] for record in self.records.values()]
        return float(np.mean(found)) if found and None not in found else math.nan

    @property
    def flops(self) -> int:
        """Of a forward pass over a sequence."""
        return forward_flops(self.row.model, self.length).total

    @property
    def parameters(self) -> int:
        return parameters(self.row.model).total

    @property
    def non_embedding(self) -> int:
        return parameters(self.row.model).non_embedding

    @property
    def training_flops(self) -> float:
        """Of one run."""
        per_token = training_flops_per_token(self.row.model, self.length)
        tokens = [record["tokens"] for record in self.records.values()]
        return per_token * float(np.mean(tokens)) if tokens else math.nan

    def quantity(self, name: str) -> float:
        return float(getattr(self, name))


# ---------------------------------------------------------------------------- matched


def check_matched(records: Iterable[tuple[str, dict[str, Any]]], match: str = "tokens") -> None:
    """That runs of one seed and budget saw the same: data, order, tokens and validation text.

    match: "flops" lets them stop at different steps of the one order, at equal compute."""
    records = list(records)
    for (one, first), (other, second) in pairwise(records):
        for what, a, b in (
            *(
                (f"{key} ", first["run"][key], second["run"][key])
                for key in ("length", "batch", "seed")
            ),
            ("training data ", first["run"]["training data"], second["run"]["training data"]),
            ("validation data ", first["run"]["validation data"], second["run"]["validation data"]),
            ("validation tokens ", first["valid"]["tokens"], second["valid"]["tokens"]),
        ):
            if a != b:
                raise Unmatched(f"runs are not matched: {what}{a} in {one}, {b} in {other}")
        differing = [
            k
            for k in first["order"]
            if second["order"].get(k, first["order"][k]) != first["order"][k]
        ]
        if differing:
            raise Unmatched(
                f"runs are not matched: the order of the data differs between {one} and {other} "
                f"({differing[0]} steps)"
            )
    if not records:
        return
    if match == "tokens":
        for (one, first), (other, second) in pairwise(records):
            if first["tokens"] != second["tokens"]:
                raise Unmatched(
                    f"runs are not matched: {first['tokens']:,} tokens in {one}, "
                    f"{second['tokens']:,} in {other}"
                )
        return
    spent = {name: record["flops_per_token"] * record["tokens"] for name, record in records}
    step = max(
        record["flops_per_token"] * record["tokens"] / record["steps"] for _, record in records
    )
    low, high = min(spent, key=lambda n: spent[n]), max(spent, key=lambda n: spent[n])
    if spent[high] - spent[low] > 1.01 * step:
        raise Unmatched(
            f"runs are not matched: {spent[low]:.3g} FLOPs in {low}, {spent[high]:.3g} in {high}, "
            "which is more than a step apart"
        )


def check_all_matched(found: Sequence[Found], match: str) -> None:
    groups = defaultdict(list)
    for row in found:
        for seed, record in row.records.items():
            groups[seed, row.row.point.get("budget", 1.0)].append(
                (f"{row.row.id}, seed {seed}", record)
            )
    for group in groups.values():
        check_matched(group, match)


# ---------------------------------------------------------------------------- noise


@dataclass(frozen=True)
class Noise:
    """σ of a single run's loss, seed effects that all rows share taken out."""

    sigma: float
    freedom: int
    source: str

    def says(self) -> str:
        freedom = f"{self.freedom} degrees of freedom"
        return f"σ = {self.sigma:.4f} nats per token ({freedom}), {self.source}"


def noise_of(found: Sequence[Found], source: str) -> Noise | None:
    seeds = sorted({seed for row in found for seed in row.losses})
    whole = [[row.losses[s] for s in seeds] for row in found if set(row.losses) == set(seeds)]
    freedom = (len(whole) - 1) * (len(seeds) - 1)
    if freedom < 1:
        return None
    losses = np.array(whole)  # rows, seeds
    left = losses - losses.mean(1, keepdims=True) - losses.mean(0, keepdims=True) + losses.mean()
    return Noise(math.sqrt(float((left**2).sum()) / freedom), freedom, source)


# ---------------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Verdict:
    says: str
    source: str
    word: str
    difference: float | None  # of the first row less the second
    error: float | None  # its standard error
    pairs: int
    why: str


def word_for(difference: float, error: float | None, margin: float | None = None) -> str:
    """The rule: `margin` is None for “less than” and a number for “alike”."""
    if error is None or math.isnan(difference):
        return NOISY
    excess = difference if margin is None else abs(difference) - margin
    if excess < -2 * error:
        return SEEN
    return NOT_SEEN if excess > 2 * error else NOISY


def verdicts(claims: Sequence[Claim], found: Sequence[Found], noise: Noise | None) -> list[Verdict]:
    made = []
    for claim in claims:
        values = sorted({f.row.point[claim.per] for f in found}) if claim.per else [None]
        for value in values:
            some = [f for f in found if value is None or f.row.point[claim.per] == value]
            suffix = f" ({claim.per} ×{value:g})" if value is not None else ""
            made.append(_verdict(claim, claim.says + suffix, some, noise))
    return made


def _verdict(claim: Claim, says: str, found: Sequence[Found], noise: Noise | None) -> Verdict:
    first, second = ([f for f in found if f.row.name == name] for name in claim.rows)
    pairs = [(a, b) for a in first for b in second if a.row.point == b.row.point]
    sigma = noise.sigma if noise else None
    if claim.quantity != "loss":
        ratios = [a.quantity(claim.quantity) / b.quantity(claim.quantity) - 1 for a, b in pairs]
        if not ratios:
            return Verdict(says, claim.source, NOT_RUN, None, None, 0, "a row is missing")
        mean = float(np.mean(ratios))
        why = f"{100 * mean:+.1f} % {claim.quantity}, exact"
        return Verdict(says, claim.source, word_for(mean, 0.0), mean, 0.0, len(ratios), why)
    if claim.kind == "frontier":
        differences, sigma = _from_line(first, second, claim.against, sigma)
    else:
        differences = [
            a.losses[seed] - b.losses[seed]
            for a, b in pairs
            for seed in a.losses
            if seed in b.losses
        ]
    if not differences:
        return Verdict(says, claim.source, NOT_RUN, None, None, 0, "a row is missing or failed")
    mean, n = float(np.mean(differences)), len(differences)
    error = None if sigma is None else sigma * math.sqrt(2 / n)
    word = word_for(mean, error, claim.margin if claim.kind == "alike" else None)
    why = f"{mean:+.4f} nats" + (
        f" ± {error:.4f}" if error is not None else ", no seed spread known"
    )
    return Verdict(says, claim.source, word, mean, error, n, f"{why} over {n} pair{'s' * (n > 1)}")


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """Slope and intercept of log y over log x, and the scatter about it; of 3 points or more."""
    if len(points) < 3:
        return None
    x, y = np.log(np.array(points, dtype=float)).T
    slope, intercept = np.polyfit(x, y, 1)
    scatter = math.sqrt(float(((y - slope * x - intercept) ** 2).sum()) / (len(points) - 2))
    return float(slope), float(intercept), scatter


def _from_line(
    first: Sequence[Found], second: Sequence[Found], against: str, sigma: float | None
) -> tuple[list[float], float | None]:
    """How far each point of the first lies above the line of the second, and the σ of that."""
    line = fitted([(f.quantity(against), f.loss) for f in second if f.losses])
    if line is None:
        return [], None
    slope, intercept, scatter = line
    expected = {
        f.row.id: math.exp(slope * math.log(f.quantity(against)) + intercept) for f in first
    }
    differences = [f.loss - expected[f.row.id] for f in first if f.losses]
    if sigma is None or not differences:
        return differences, None
    mean = float(np.mean([f.loss for f in second if f.losses]))
    return differences, math.hypot(sigma, scatter * mean)
