"""The pictures of a study, from its records alone; the paper's points stand beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from scipy import stats

from spiralformer import paper, plots
from spiralformer.plots import BLUE, GREEN, GREY, ORANGE
from spiralformer.study.records import Records, RowRecord
from spiralformer.study.spec import FAMILIES, preset_name
from spiralformer.study.stats import CONFIDENCE, estimate, noise_of, paired, power

SIZES = {"160m": "o", "410m": "s", "1b": "^", "1.4b": "D"}
AXES = {
    "bytes": ("tokens seen", lambda row, tokens, seconds: tokens),
    "FLOPs": ("training FLOPs", lambda row, tokens, seconds: row.training_flops * tokens),
    "seconds": ("seconds of training", lambda row, tokens, seconds: seconds),
}


def draw(records: Records) -> dict[str, bytes]:
    """PNG files by name, the one that shows the study's finding first."""
    drawings: dict[str, Callable[[Records], Figure]] = {
        "families": families,
        "recurrence": recurrence,
        "scaling": scaling,
        "schedule": schedule,
        "power": power_figure,
    }
    with plots.style():
        made = {records.figure: drawings[records.figure](records), "curves": curves(records)}
        if any(len(sweep.tried) > 1 for sweep in records.sweeps.values()):
            made["sweep"] = sweeps(records)
        return {f"{name}.png": plots.to_bytes(figure, "png") for name, figure in made.items()}


def paper_quality(row: RowRecord) -> dict[str, float]:
    """Pile perplexity that the paper prints for this row, by size."""
    table = {name: printed.quality.pile for name, printed in paper.TABLE_1.items()}
    table |= {name: quality.pile for name, quality in paper.TABLE_2.items()}
    names = {size: row.paper.format(size) for size in SIZES} if row.paper else {}
    return {size: table[name] for size, name in names.items() if name in table}


# ---------------------------------------------------------------------------- the claim


def families(records: Records) -> Figure:
    """Left: loss against training FLOPs. Right: differences to the reference, and the paper's."""
    rows = [row for row in records.rows if row.runs]
    figure = plots.new_figure(9.6, max(3.4, 1.2 + 0.36 * len(rows)))
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _curves(left, records, rows, "FLOPs")
    looks, noise = _looks(records.rows), noise_of(records.rows)
    compared = [(row, base) for row in rows if (base := records.reference_of(row)) and base.runs]
    for k, (row, base) in enumerate(reversed(compared)):
        colour, marker = looks[row.id]
        differences = paired([(row, base)])
        measured = estimate(differences, noise)
        if differences:
            mean = float(np.mean(differences))
            error = measured.interval[1] - mean if measured else 0.0
            right.errorbar([mean], [k], xerr=[error], fmt=marker, color=colour, ms=6, capsize=3)
        theirs, reference = paper_quality(row), paper_quality(base)
        for size, shape in SIZES.items():
            if size in theirs and size in reference:
                gap = math.log(theirs[size] / reference[size])
                right.plot([gap], [k - 0.26], shape, color=GREY, mfc="white", ms=3.5)
    right.set_yticks(range(len(compared)), [row.label for row, _ in reversed(compared)])
    right.axvline(0, color=GREY, lw=0.8)
    right.set_xlabel(f"difference to {records.reference}, {records.unit}")
    right.set_title("ours with 95 % interval; hollow: the paper’s, nats/token", loc="left")
    for size in (s for s in SIZES if any(s in paper_quality(row) for row, _ in compared)):
        right.plot([], [], SIZES[size], color=GREY, mfc="white", ms=4, label=f"paper, {size}")
    handles = [ax.get_legend_handles_labels() for ax in (left, right)]
    both = [first + second for first, second in zip(*handles, strict=True)]
    figure.legend(*both, loc="outside lower center", ncols=4)
    for ax in (left, right):
        ax.grid(alpha=0.3, lw=0.6)
    return figure


def curves(records: Records) -> Figure:
    """The same runs by what they saw, what they cost and how long they took."""
    rows = [row for row in records.rows if row.runs]
    figure = plots.new_figure(10.2, 3.6 + 0.12 * len(rows))
    panels = figure.subplots(1, 3, sharey=True)
    for ax, kind in zip(panels, AXES, strict=True):
        _curves(ax, records, rows, kind)
        ax.grid(alpha=0.3, lw=0.6)
    for ax in panels[1:]:
        ax.set_ylabel("")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4)
    return figure


def _curves(ax: Axes, records: Records, rows: Sequence[RowRecord], kind: str) -> None:
    """A line through the means of the seeds, a band from the lowest to the highest."""
    label, place = AXES[kind]
    looks = _looks(records.rows)
    lowest, highest = math.inf, 0.0
    for row in rows:
        colour, marker = looks[row.id]
        shortest = min(len(run.curve) for run in row.runs)
        points = [[(place(row, t, s), loss * run.bits) for t, s, loss in run.curve[:shortest]]
                  for run in row.runs]  # fmt: skip
        if not shortest:
            continue
        x, y = np.array(points).transpose(2, 0, 1)  # runs, points
        name = row.id if row.point else row.label
        ax.plot(
            x.mean(0), y.mean(0), marker=marker, color=colour, ms=3.5, lw=1.2, label=name, zorder=3
        )
        ax.fill_between(x.mean(0), y.min(0), y.max(0), color=colour, alpha=0.18, lw=0)
        lowest, highest = min(lowest, y.min()), max(highest, np.median(y))
    ax.set_xlabel(label)
    ax.set_ylabel(f"validation, {records.unit}")
    if lowest < highest:  # the first steps, far above, would flatten the rest
        ax.set_ylim(lowest - 0.05 * (highest - lowest), lowest + 2 * (highest - lowest))


def _looks(rows: Sequence[RowRecord]) -> dict[str, tuple[str, str]]:
    """Colour and marker by row: the family's where it has one row only, else one of all."""
    all_looks, looks = list(plots.FAMILIES.values()), {}
    families = [row.family for row in rows]
    for k, row in enumerate(rows):
        alone = families.count(row.family) == 1 and row.family in plots.FAMILIES
        looks[row.id] = plots.FAMILIES[row.family] if alone else all_looks[k % len(all_looks)]
    return looks


# ---------------------------------------------------------------------------- the others


def recurrence(records: Records) -> Figure:
    """The U-curve, one line for each compute budget."""
    figure = plots.new_figure(5.4, 3.6)
    ax = figure.subplots()
    budgets = sorted({row.point.get("budget", 1.0) for row in records.rows})
    noise = noise_of(records.rows)
    for budget, colour, style in zip(
        budgets, (BLUE, ORANGE, GREEN), ("o-", "s--", "^:"), strict=False
    ):
        line = [row for row in records.rows if row.runs and row.core is not None]
        line = [row for row in line if row.point.get("budget", 1.0) == budget]
        line.sort(key=lambda row: row.core or 0)
        if not line:
            continue
        x, y = [100 * (row.core or 0) for row in line], [row.mean for row in line]
        errors = [noise.sigma / math.sqrt(len(row.runs)) if noise else 0 for row in line]
        label = f"{np.mean([row.spent for row in line]):.2g} FLOPs"
        ax.errorbar(x, y, errors, fmt=style, color=colour, ms=5, lw=1.3, capsize=2.5, label=label)
        lowest = int(np.argmin(y))
        ax.plot(x[lowest], y[lowest], "o", ms=12, mfc="none", color=colour)
    ax.axvspan(30, 40, color=GREY, alpha=0.15, lw=0, label="best in the paper")
    ax.set_xlabel("recurrence ratio: layers in the shared core, %")
    ax.set_ylabel(f"validation, {records.unit}")
    ax.set_title("parameters fixed (circle: lowest; bars: standard error)", loc="left")
    ax.grid(alpha=0.3, lw=0.6)
    ax.legend()
    return figure


def scaling(records: Records) -> Figure:
    """Loss against training FLOPs and parameters with fitted lines, and the paper's Table 1."""
    figure = plots.new_figure(9.6, 3.6)
    panels = figure.subplots(1, 3)
    names = list(dict.fromkeys(row.name for row in records.rows))
    for ax, key, label in (
        (panels[0], "spent", "training FLOPs"),
        (panels[1], "parameters", "parameters"),
    ):
        for name in names:
            some = [row for row in records.rows if row.name == name]
            _line(ax, name, [(getattr(r, key), y) for r in some for y in r.unit_losses.values()])
        _logarithmic(ax, label)
        ax.set_title("ours, with 95 % bands of the lines", loc="left")
    panels[0].set_ylabel(f"validation, {records.unit}")
    for name in names:
        printed = [paper.TABLE_1.get(preset_name(name, size)) for size in SIZES]
        points = [(row.flops * 1e12, math.log(row.quality.pile)) for row in printed if row]
        _line(panels[2], name, points)
    _logarithmic(panels[2], "FLOPs of a prefill of 4096")
    panels[2].set_title("the paper’s (Table 1, Pile, nats/token)", loc="left")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4)
    return figure


def _line(ax: Axes, name: str, points: Sequence[tuple[float, float]]) -> None:
    """Points, the line of log y over log x through them, and where it may lie."""
    if not points:
        return
    colour, marker = plots.FAMILIES.get(name, (GREY, "o"))
    label = FAMILIES.get(name, name)
    ax.plot(*zip(*points, strict=True), marker, color=colour, ms=4.5, label=label)
    x, y = np.log(np.array(points, dtype=float)).T
    if len(set(x)) < 3:
        return
    fit = stats.linregress(x, y)
    at = np.linspace(x.min(), x.max(), 50)
    line = fit.intercept + fit.slope * at
    ax.plot(np.exp(at), np.exp(line), color=colour, lw=1, alpha=0.8)
    left = y - fit.intercept - fit.slope * x
    freedom = len(x) - 2
    error = math.sqrt(float(left @ left) / freedom) * np.sqrt(
        1 / len(x) + (at - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    )
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * error
    ax.fill_between(
        np.exp(at), np.exp(line - reach), np.exp(line + reach), color=colour, alpha=0.1, lw=0
    )


def _logarithmic(ax: Axes, label: str) -> None:
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.2f}")
    ax.yaxis.set_minor_formatter(lambda value, _: f"{value:.2f}")
    ax.tick_params(axis="y", which="minor", labelsize=6.5)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e+", "e"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel(label)
    ax.grid(alpha=0.3, lw=0.6, which="both")


def schedule(records: Records) -> Figure:
    """Loss of each schedule at equal training FLOPs, against the FLOPs of a forward pass."""
    figure = plots.new_figure(5.8, 4.0)
    ax, noise = figure.subplots(), noise_of(records.rows)
    for row in records.rows:
        if not row.runs:
            continue
        special = row.name == records.reference
        error = noise.sigma / math.sqrt(len(row.runs)) if noise else 0
        x = row.flops / 1e9
        colour, marker = (ORANGE, "^") if special else (BLUE, "o")
        ax.errorbar([x], [row.mean], [error], fmt=marker, color=colour, ms=6, capsize=2.5)
        inside = row.layout.partition("x")[2].rpartition("+")[0] or row.layout
        ax.annotate(inside, (x, row.mean), xytext=(6, 4), textcoords="offset points", size=7)
    ax.margins(x=0.25, y=0.12)
    ax.set_xlabel("FLOPs of a sequence, 1e9")
    ax.set_ylabel(f"validation, {records.unit}")
    ax.set_title("at equal training FLOPs (bars: standard error)", loc="left")
    ax.grid(alpha=0.3, lw=0.6)
    return figure


def power_figure(records: Records) -> Figure:
    """The gap of each budget with its noise."""
    figure = plots.new_figure(5.4, 3.4)
    ax, budgets = figure.subplots(), power(records)
    x = [budget.row.runs[0].tokens for budget in budgets]
    gaps, errors = [budget.gap for budget in budgets], [4 * budget.error for budget in budgets]
    ax.errorbar(x, gaps, errors, fmt="o-", color=BLUE, ms=5, capsize=3)
    ax.axhline(0, color=GREY, lw=0.8)
    ax.set_xlabel("tokens of a run")
    ax.set_ylabel(f"gap, {records.unit}")
    ax.set_title("bars: four standard errors", loc="left")
    ax.grid(alpha=0.3, lw=0.6)
    return figure


def sweeps(records: Records) -> Figure:
    figure = plots.new_figure(5.4, 3.4)
    ax = figure.subplots()
    for family, sweep in records.sweeps.items():
        colour, marker = plots.FAMILIES.get(family, (GREY, "o"))
        points = [(lr, loss) for lr, loss in sweep.tried if loss is not None]
        if points:
            label = FAMILIES.get(family, family)
            ax.plot(
                *zip(*points, strict=True), marker=marker, color=colour, ms=4.5, lw=1, label=label
            )
            ax.plot(*min(points, key=lambda p: p[1]), "o", ms=11, mfc="none", color=colour)
    ax.set_xscale("log", base=2)
    rates = sorted({lr for sweep in records.sweeps.values() for lr, _ in sweep.tried})
    ax.set_xticks(rates, [f"{lr:.2g}" for lr in rates])
    ax.set_xlabel("peak learning rate")
    ax.set_ylabel("validation loss, nats/token")
    ax.set_title("circle: chosen", loc="left")
    ax.grid(alpha=0.3, lw=0.6)
    ax.legend()
    return figure
