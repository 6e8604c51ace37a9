"""The pictures of a study, from its records alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from scipy import stats

from spiralformer import paper, plots, presets
from spiralformer.plots import BLUE, GREY
from spiralformer.study.records import Records, RowRecord
from spiralformer.study.spec import FAMILIES, preset_name
from spiralformer.study.stats import CONFIDENCE, ENOUGH, estimate, noise_of, paired, power

CAPTIONS = {
    "families": "Loss against training compute, and the difference to the reference",
    "recurrence": "Loss against recurrence ratio",
    "scaling": "Scaling, beside the paper’s",
    "power": "The gap of each budget",
    "curves": "The runs by what they saw, what they cost and how long they took",
}


def draw(records: Records) -> dict[str, bytes]:
    """PNG files by name, the one that shows the study's finding first."""
    drawings: dict[str, Callable[[Records], Figure]] = {
        "families": families,
        "recurrence": recurrence,
        "scaling": scaling,
        "power": budgets,
    }
    with plots.style():
        made = {records.figure: drawings[records.figure](records), "curves": curves(records)}
        return {f"{name}.png": plots.to_bytes(figure, "png") for name, figure in made.items()}


# ---------------------------------------------------------------------------- the claim


def families(records: Records) -> Figure:
    """Left: loss against training FLOPs. Right: differences to the reference."""
    rows = [row for row in records.rows if row.runs]
    figure = plots.new_figure(9.6, max(3.4, 1.2 + 0.36 * len(rows)))
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _curves(left, records, "training FLOPs")
    looks, noise = _looks(records.rows), noise_of(records.rows)
    compared = [(row, base) for row in rows if (base := records.reference_of(row)) and base.runs]
    for k, (row, base) in enumerate(reversed(compared)):
        differences = paired([(row, base)])
        measured = estimate(differences, noise)
        if differences:
            mean = float(np.mean(differences))
            error = measured.interval[1] - mean if measured else 0.0
            colour, marker = looks[row.id]
            right.errorbar([mean], [k], xerr=[error], fmt=marker, color=colour, ms=6, capsize=3)
    right.set_yticks(range(len(compared)), [row.label for row, _ in reversed(compared)])
    right.axvline(0, color=GREY, lw=0.8)
    right.set_xlabel(f"difference to {records.reference}, {records.unit}")
    right.set_title("95 % intervals", loc="left")
    right.grid(alpha=0.3, lw=0.6)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def curves(records: Records) -> Figure:
    """The same runs by what they saw, what they cost and how long they took."""
    figure = plots.new_figure(10.2, 3.6 + 0.12 * len(records.rows))
    panels = figure.subplots(1, 3, sharey=True)
    for ax, over in zip(panels, (records.seen, "training FLOPs", "seconds"), strict=True):
        _curves(ax, records, over)
        ax.label_outer()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _curves(ax: Axes, records: Records, over: str) -> None:
    """A line through the means of the seeds, a band from the lowest to the highest."""
    looks, lowest, highest = _looks(records.rows), math.inf, 0.0
    for row in records.rows:
        points = min((len(run.curve) for run in row.runs), default=0)
        if not points:
            continue
        tokens, seconds, losses = np.array([run.curve[:points] for run in row.runs]).T
        places = {"seconds": seconds, "training FLOPs": row.training_flops * tokens}
        x = places.get(over, tokens).mean(1)
        y = losses * [run.bits for run in row.runs]  # points, runs
        colour, marker = looks[row.id]
        name = row.id if row.point else row.label
        ax.plot(x, y.mean(1), marker=marker, color=colour, ms=3.5, lw=1.2, label=name, zorder=3)
        ax.fill_between(x, y.min(1), y.max(1), color=colour, alpha=0.18, lw=0)
        lowest, highest = min(lowest, y.min()), max(highest, np.median(y))
    ax.set_xlabel(over)
    ax.set_ylabel(f"validation, {records.unit}")
    ax.grid(alpha=0.3, lw=0.6)
    if lowest < highest:  # the first steps, far above, would flatten the rest
        ax.set_ylim(lowest - 0.05 * (highest - lowest), lowest + 2 * (highest - lowest))


def _looks(rows: Sequence[RowRecord]) -> dict[str, tuple[str, str]]:
    """Colour and marker by row: the family's where it has one row only, else one of all; runs of
    no family take such as are far apart."""
    all_looks, looks = list(plots.FAMILIES.values()), {}
    families = [row.family for row in rows]
    for k, row in enumerate(rows):
        alone = families.count(row.family) == 1 and row.family in plots.FAMILIES
        place = k if row.family in plots.FAMILIES else 5 * k  # of eight
        looks[row.id] = plots.FAMILIES[row.family] if alone else all_looks[place % len(all_looks)]
    return looks


# ---------------------------------------------------------------------------- the others


def recurrence(records: Records) -> Figure:
    """Loss against the share of layers in the core, a line for each compute budget."""
    figure = plots.new_figure(5.4, 3.6)
    ax, noise = figure.subplots(), noise_of(records.rows)
    lines: dict[float, list[RowRecord]] = {}
    for row in records.rows:
        if row.runs and row.core is not None:
            lines.setdefault(row.point.get("budget", 1.0), []).append(row)
    for rows in lines.values():
        x, y = [100 * (row.core or 0) for row in rows], [row.mean for row in rows]
        errors = [noise.sigma / math.sqrt(len(row.runs)) if noise else 0 for row in rows]
        label = f"{np.mean([row.spent for row in rows]):.2g} FLOPs"
        ax.errorbar(x, y, errors, fmt="o-", ms=5, lw=1.3, capsize=2.5, label=label)
    ax.axvspan(30, 40, color=GREY, alpha=0.15, lw=0, label="best in the paper")
    ax.set_xlabel("recurrence ratio: layers in the shared core, %")
    ax.set_ylabel(f"validation, {records.unit}")
    ax.set_title("at equal training FLOPs and parameters (bars: standard error)", loc="left")
    ax.grid(alpha=0.3, lw=0.6)
    ax.legend()
    return figure


def scaling(records: Records) -> Figure:
    """Loss against training FLOPs and parameters with fitted lines, and the paper's Table 1."""
    figure = plots.new_figure(9.6, 3.6)
    panels = figure.subplots(1, 3)
    for name in dict.fromkeys(row.name for row in records.rows):
        some = [row for row in records.rows if row.name == name]
        for ax, key in zip(panels, ("spent", "parameters"), strict=False):
            _line(ax, name, [(getattr(r, key), y) for r in some for y in r.unit_losses.values()])
        printed = [paper.TABLE_1.get(preset_name(name, size)) for size in presets.SIZES]
        points = [(row.flops * 1e12, math.log(row.quality.pile)) for row in printed if row]
        _line(panels[2], name, points)
    ours, theirs = "ours, with 95 % bands of the lines", "the paper’s (Table 1, Pile, nats/token)"
    labels = ("training FLOPs", "parameters", "FLOPs of a prefill of 4096")
    for ax, label, title in zip(panels, labels, (ours, ours, theirs), strict=True):
        _logarithmic(ax, label)
        ax.set_title(title, loc="left")
    panels[0].set_ylabel(f"validation, {records.unit}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
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
    error = fit.stderr * np.sqrt((at - x.mean()) ** 2 + x.var())
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2) * error
    ax.plot(np.exp(at), np.exp(line), color=colour, lw=1, alpha=0.8)
    band = np.exp(line - reach), np.exp(line + reach)
    ax.fill_between(np.exp(at), *band, color=colour, alpha=0.1, lw=0)


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


def budgets(records: Records) -> Figure:
    """The gap of each budget with its noise."""
    figure = plots.new_figure(5.4, 3.4)
    ax, measured = figure.subplots(), power(records)
    x, gaps = [each.row.runs[0].tokens for each in measured], [each.gap for each in measured]
    errors = [ENOUGH * each.error for each in measured]
    ax.errorbar(x, gaps, errors, fmt="o-", color=BLUE, ms=5, capsize=3)
    ax.axhline(0, color=GREY, lw=0.8)
    ax.set_xlabel(f"{records.seen} of a run")
    ax.set_ylabel(f"gap, {records.unit}")
    ax.set_title(f"bars: {ENOUGH} standard errors", loc="left")
    ax.grid(alpha=0.3, lw=0.6)
    return figure
