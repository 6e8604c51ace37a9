"""What the numbers say: paired differences, their intervals, and which claims they bear out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from scipy import stats

from spiralformer.console import count
from spiralformer.study.records import Records, RowRecord
from spiralformer.study.spec import Claim

SEEN, NOT_SEEN, UNDECIDED, NO_VERDICT = "seen", "not seen", "undecided", "no verdict"
WORDS = (SEEN, NOT_SEEN, UNDECIDED, NO_VERDICT)
CONFIDENCE, POWER = 0.95, 0.8
LEAST_SEEDS, LEAST_STEPS = 2, 300
ENOUGH = 4  # standard errors that the gap of a budget should have
RULE = (
    "Runs of one seed see the same data in the same order, so rows are compared seed by seed. The "
    "noise of a run, σ, is what is left of the losses after the mean of each row and of each seed "
    "are taken out, pooled over the rows of the study (for two rows this is the paired t test). A "
    "mean difference over n pairs has the standard error σ·√(2/n) and Student’s 95 % interval. "
    "Seen: the whole interval has the claimed sign. Not seen: the whole interval has the other. "
    "Undecided: it holds zero. Claims of likeness: seen if the interval lies within the margin, "
    "not seen if it lies outside. Frontier claims fit two parallel lines (log loss over log FLOPs "
    "or parameters) to the runs of both families; the difference is the distance of the lines. "
    "Detectable is the smallest difference that such an interval would show in 80 % of repeats. "
    "There is no verdict where a row has fewer than "
    f"{LEAST_SEEDS} seeds or {LEAST_STEPS} steps, or where a learning rate comes from a sweep "
    "whose best lies at its edge. FLOPs and parameters are exact."
)


@dataclass(frozen=True)
class Estimate:
    """A mean difference with its standard error."""

    mean: float
    error: float
    freedom: int

    @property
    def interval(self) -> tuple[float, float]:
        if not self.error:
            return self.mean, self.mean
        low, high = stats.t.interval(CONFIDENCE, self.freedom, self.mean, self.error)
        return float(low), float(high)

    @property
    def detectable(self) -> float:
        """The smallest difference that is found in `POWER` of all repeats."""
        t = stats.t(self.freedom)
        return float(t.ppf((1 + CONFIDENCE) / 2) + t.ppf(POWER)) * self.error

    def in_words(self) -> tuple[str, str, str]:
        """Mean, interval, and what is detectable."""
        low, high = self.interval
        return f"{self.mean:+.4f}", f"{low:+.4f} … {high:+.4f}", f"{self.detectable:.4f}"


@dataclass(frozen=True)
class Noise:
    """σ of a single run, seed effects that all rows share taken out."""

    sigma: float
    freedom: int


def noise_of(rows: Sequence[RowRecord]) -> Noise | None:
    """Pooled over the points of the grid; of the rows that have all the seeds of their point."""
    squares, freedom = 0.0, 0
    key = lambda row: sorted(row.point.items())
    for _, points in groupby(sorted(rows, key=key), key):
        group = list(points)
        seeds = sorted({seed for row in group for seed in row.unit_losses})
        whole = [row.unit_losses for row in group if row.unit_losses.keys() == set(seeds)]
        if len(whole) > 1 and len(seeds) > 1:
            losses = np.array([[row[seed] for seed in seeds] for row in whole])
            means = losses.mean(1, keepdims=True) + losses.mean(0, keepdims=True) - losses.mean()
            squares += float(((losses - means) ** 2).sum())
            freedom += (len(whole) - 1) * (len(seeds) - 1)
    return Noise(math.sqrt(squares / freedom), freedom) if freedom else None


def paired(pairs: Iterable[tuple[RowRecord, RowRecord]]) -> list[float]:
    """Differences of the seeds that both have."""
    return [
        first.unit_losses[seed] - second.unit_losses[seed]
        for first, second in pairs
        for seed in first.unit_losses
        if seed in second.unit_losses
    ]


def estimate(differences: Sequence[float], noise: Noise | None) -> Estimate | None:
    if noise is None or not differences:
        return None
    error = noise.sigma * math.sqrt(2 / len(differences))
    return Estimate(float(np.mean(differences)), error, noise.freedom)


def between_lines(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]
) -> Estimate | None:
    """How far the first points' line lies above the second's, at the mean loss: parallel lines of
    log y over log x, by least squares."""
    points = np.log(np.array([*first, *second], dtype=float).reshape(-1, 2))
    freedom = len(points) - 3
    if freedom < 1 or len(first) < 2 or len(second) < 2:
        return None
    belongs = np.repeat([1.0, 0.0], [len(first), len(second)])
    design = np.stack([np.ones(len(points)), points[:, 0], belongs], 1)
    solution, *_ = np.linalg.lstsq(design, points[:, 1], rcond=None)
    left = points[:, 1] - design @ solution
    spread = np.linalg.pinv(design.T @ design)[2, 2] * float(left @ left) / freedom
    level = float(np.exp(points[:, 1].mean()))
    return Estimate(float(solution[2]) * level, math.sqrt(spread) * level, freedom)


# ---------------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    says: str
    word: str
    why: str  # there is no verdict; or the whole comparison, where it is exact
    estimate: Estimate | None = None
    differences: tuple[float, ...] = ()


def word_for(interval: tuple[float, float], margin: float | None = None) -> str:
    """`margin` is None for “less than” and a number for “alike”."""
    low, high = interval
    if margin is None:
        return SEEN if high < 0 else NOT_SEEN if low > 0 else UNDECIDED
    if -margin < low and high < margin:
        return SEEN
    return NOT_SEEN if low > margin or high < -margin else UNDECIDED


def verdicts(records: Records) -> list[Verdict]:
    made, noise = [], noise_of(records.rows)
    for claim in records.claims:
        if not claim.per:
            made.append(_verdict(records, claim, claim.says, records.rows, noise))
            continue
        for value in sorted({row.point[claim.per] for row in records.rows}):
            some = [row for row in records.rows if row.point[claim.per] == value]
            says = f"{claim.says} ({claim.per} ×{value:g})"
            made.append(_verdict(records, claim, says, some, noise))
    return made


def _verdict(
    records: Records, claim: Claim, says: str, rows: Sequence[RowRecord], noise: Noise | None
) -> Verdict:
    pairs = _pairs(claim, rows)
    first, second = ([row for row in rows if row.name == name] for name in claim.rows)
    if claim.quantity != "loss":
        ratios = [getattr(a, claim.quantity) / getattr(b, claim.quantity) - 1 for a, b in pairs]
        mean = float(np.mean(ratios))
        why = f"{100 * mean:+.1f} % {claim.quantity}, exact"
        return Verdict(claim, says, word_for((mean, mean)), why)
    if claim.frontier:
        key = "spent" if claim.against == "flops" else "parameters"
        points = [
            [(getattr(row, key), loss) for row in family for loss in row.unit_losses.values()]
            for family in (first, second)
        ]
        differences, measured = [], between_lines(*points)
    else:
        differences = paired(pairs)
        measured = estimate(differences, noise)
    why = _no_verdict(records, [*first, *second]) or ("" if measured else "too few runs")
    word = NO_VERDICT
    if measured and not why:
        word = word_for(measured.interval, claim.margin if claim.alike else None)
    return Verdict(claim, says, word, why, measured, tuple(differences))


def _pairs(claim: Claim, rows: Sequence[RowRecord]) -> list[tuple[RowRecord, RowRecord]]:
    """The claim's rows at each point of the grid."""
    one, other = claim.rows
    named = [(a, b) for a in rows if a.name == one for b in rows if b.name == other]
    return [(a, b) for a, b in named if a.point == b.point]


def _no_verdict(records: Records, rows: Sequence[RowRecord]) -> str:
    """Why these rows allow of no verdict; "" where they do."""
    for row in rows:
        if len(row.runs) < LEAST_SEEDS:
            return f"{row.id} has {len(row.runs)} of {LEAST_SEEDS} seeds needed"
        if min(run.steps for run in row.runs) < LEAST_STEPS:
            return f"{row.id} has fewer than {LEAST_STEPS} steps"
        sweep = records.sweeps.get(row.family)
        if sweep is None or not sweep.bracketed:
            return f"the learning rate of {row.family or row.id} is not bracketed by a sweep"
    return ""


# ---------------------------------------------------------------------------- power


@dataclass(frozen=True)
class Power:
    """The gap of a budget beside its noise."""

    row: RowRecord
    gap: float
    spread: float  # of the differences of pairs
    error: float  # of their mean
    seeds_needed: int  # for a gap of `ENOUGH` standard errors, two at least

    @property
    def enough(self) -> bool:
        return abs(self.gap) >= ENOUGH * self.error


def power(records: Records) -> list[Power]:
    """Of the first claim's rows at each point of the grid, cheapest first."""
    made = []
    for one, other in _pairs(records.claims[0], records.rows) if records.claims else []:
        differences = paired([(one, other)])
        if len(differences) < LEAST_SEEDS:
            continue
        gap, spread = float(np.mean(differences)), float(np.std(differences, ddof=1))
        needed = max(LEAST_SEEDS, math.ceil((ENOUGH * spread / gap) ** 2)) if gap else 0
        made.append(Power(one, gap, spread, spread / math.sqrt(len(differences)), needed))
    return sorted(made, key=lambda budget: budget.row.spent)


# ---------------------------------------------------------------------------- in words


def finding(records: Records) -> str:
    """The study in one sentence."""
    if records.figure == "power":
        enough = next((budget for budget in power(records) if budget.enough), None)
        if enough is None:
            return f"No budget has a gap of {ENOUGH} standard errors with these seeds."
        return (
            f"The cheapest budget whose gap is at least {ENOUGH} standard errors is "
            f"{enough.row.runs[0].tokens:,} {records.seen} a run: {enough.gap:+.4f} "
            f"{records.unit} with a standard error of {enough.error:.4f}."
        )
    best = min((row for row in records.rows if row.runs), key=lambda row: row.mean)
    lowest = f"{best.label} ({best.layout}) has the lowest loss, {best.mean:.4f} {records.unit}"
    judged = verdicts(records)
    head = next((verdict for verdict in judged if verdict.claim.quantity == "loss"), None)
    if head is None:
        return f"{lowest}."
    counts = [(sum(v.word == word for v in judged), word) for word in WORDS]
    summary = ", ".join(f"{number} {word}" for number, word in counts if number)
    return (
        f"{head.says}: {head.word} ({measured(head, records.unit)}); {lowest}; of all "
        f"{count(len(judged), 'claim')}: {summary}."
    )


def measured(verdict: Verdict, unit: str) -> str:
    """What a verdict rests on."""
    if verdict.estimate is None:
        return verdict.why
    mean, interval, detectable = verdict.estimate.in_words()
    numbers = f"{mean} {unit}, 95 % interval {interval}, detectable {detectable}"
    return f"{verdict.why}: {numbers}" if verdict.why else numbers
