"""Does the hierarchy of the paper show? A stated rule, applied to the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spiralformer.probes.findings import METRICS, Findings

TITLES = {"entropy": "Key-marginal entropy", "local_mass": "Local attention mass"}
SYMBOLS = {"entropy": "H", "local_mass": "LAM"}
EXPECTED = {"entropy": -1, "local_mass": +1}  # from the coarsest to the finest iteration
RULE = (
    "The paper says that entropy falls and local attention mass rises from the coarsest to the "
    "finest iteration. Each head is compared with itself: its value at the finest iteration less "
    "that at the coarsest (iterations of equal resolution keep the order of the loop). “Yes”: the "
    "mean of these differences has the paper’s sign and lies more than two standard errors over "
    "heads from zero, and the mean over heads never steps the other way in between. “Partly”: it "
    "steps the other way somewhere. “Opposite”: the mean difference is clear and has the other "
    "sign. “No”: it is not clear. “Geometry”: it is clear, but a head that attends to all earlier "
    "keys alike moves as far in the same direction, only because the iterations have different "
    "lengths and windows; an untrained model gets this."
)


@dataclass(frozen=True)
class Verdict:
    metric: str
    heads: str  # "all" or "dynamic"
    word: str  # yes, partly, opposite, no, geometry, or "not measured"
    sentence: str
    mean: float = math.nan  # of the paired differences
    error: float = math.nan


def verdicts(found: Findings) -> list[Verdict]:
    return [judge(found, metric, heads) for metric in METRICS for heads in ("all", "dynamic")]


def judge(found: Findings, metric: str, heads: str) -> Verdict:
    def unmeasured(why: str) -> Verdict:
        return Verdict(metric, heads, "not measured", why)

    if not found.iterations:
        return unmeasured("The model has no loop: there are no iterations to compare.")
    order = sorted(found.iterations, key=lambda it: it.resolution)  # stable
    values = found.heads(metric, heads)[[it.index for it in order]]
    order = [it for it, row in zip(order, values, strict=True) if not np.isnan(row).any()]
    values = values[~np.isnan(values).any(axis=1)]
    if len(order) < 2:
        return unmeasured("Fewer than two iterations have values: there is nothing to compare.")
    if values.shape[1] < 2:
        return unmeasured(f"{values.shape[1]} {heads} heads: too few for a spread over heads.")

    difference = values[-1] - values[0]
    mean = float(difference.mean())
    error = float(difference.std(ddof=1) / math.sqrt(len(difference)))
    sign = EXPECTED[metric]
    means = values.mean(axis=1)
    monotone = bool((sign * np.diff(means) >= 0).all())
    reference = found.reference[metric]
    uniform = float(reference[order[-1].index] - reference[order[0].index])
    if abs(mean) <= 2 * error:
        word = "no"
    elif uniform * mean > 0 and abs(mean) - abs(uniform) <= 2 * error:
        word = "geometry"
    elif sign * mean < 0:
        word = "opposite"
    else:
        word = "yes" if monotone else "partly"
    along = int((sign * difference > 0).sum())
    ends = [str(it.resolution) for it in (order[0], order[-1])]
    path = (
        f"from resolution {ends[0]} to {ends[1]}"
        if ends[0] != ends[1]
        else f"from loop {order[0].index} to loop {order[-1].index}"
    )
    alone = f" Uniform attention: {uniform:+.3f}." if ends[0] != ends[1] else ""
    count = f"{len(difference)} {'dynamic ' * (heads == 'dynamic')}heads"
    sentence = (
        f"{SYMBOLS[metric]} goes {' → '.join(f'{m:.3f}' for m in means)} {path}: "
        f"{mean:+.3f} ± {error:.3f} per head, {along} of {count} "
        f"{'fall' if sign < 0 else 'rise'}.{alone}"
    )
    return Verdict(metric, heads, word, sentence, mean, error)


def overall(found: Findings) -> str:
    """One line on the two metrics, over all heads."""
    if not found.iterations:
        return "This model has no loop: there are no iterations to compare."
    entropy, local = (judge(found, metric, "all").word for metric in METRICS)
    if entropy == local == "yes":
        return "The hierarchy of the paper shows: coarse iterations are diffuse, fine ones local."
    if "not measured" in (entropy, local):
        return "The cross-loop shift of the paper could not be measured."
    toward = [
        name
        for name, word in (("entropy falls", entropy), ("locality rises", local))
        if word in ("yes", "partly")
    ]
    if not toward:
        return "The hierarchy of the paper does not show in this model."
    if len(toward) == 2:
        return "The shift of the paper shows from end to end, but not at every step in between."
    along = len({it.resolution for it in found.iterations}) > 1
    path = "with resolution" if along else "from loop to loop, at one resolution"
    return f"The hierarchy of the paper shows in part: only {toward[0]} {path}."


def against_control(found: Findings, control: Findings) -> list[str]:
    """How large the shifts are beside the control's, over all heads."""
    lines = []
    for metric in METRICS:
        both = (found, control)
        ranges = [f.delta(metric) for f in both if f.iterations]
        ranges = [r[~np.isnan(r)] for r in ranges]
        if len(ranges) < 2 or not all(len(r) for r in ranges):
            continue
        mine, theirs = (float(r.mean()) for r in ranges)
        uniform = [float(np.ptp(f.reference[metric])) for f in both]
        lines.append(
            f"Δ{SYMBOLS[metric]}, the range of a head across the loop, is {mine:.3f} on average in "
            f"{found.name} and {theirs:.3f} in {control.name}; with uniform attention it would be "
            f"{uniform[0]:.3f} and {uniform[1]:.3f}."
        )
    return lines
