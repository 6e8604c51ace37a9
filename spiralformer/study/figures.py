"""The figures of a study, from its results alone; the paper's points stand beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from spiralformer import paper
from spiralformer.plots import BLUE, GREEN, GREY, ORANGE, STYLE, to_bytes
from spiralformer.study.conduct import Results
from spiralformer.study.judge import Found, fitted
from spiralformer.study.spec import FAMILIES, preset_name

PURPLE, SKY, YELLOW, BLACK = "#CC79A7", "#56B4E9", "#E69F00", "#222222"
LOOKS = {  # colour and marker of a family: told apart in grey too
    "baseline": (BLACK, "o"),
    "baseline-mesh": (GREY, "D"),
    "looped-anchor": (SKY, "v"),
    "looped-mesh": (BLUE, "s"),
    "spiral-b-anchor": (YELLOW, "P"),
    "spiral-b-mesh": (ORANGE, "^"),
    "spiral-l-anchor": (PURPLE, "X"),
    "spiral-l-mesh": (GREEN, "*"),
}
SIZES = {"160m": "o", "410m": "s", "1b": "^", "1.4b": "D"}
Quality = Callable[[Found], dict[str, float]]


def draw(results: Results, quality: Quality) -> dict[str, bytes]:
    """PNG files by name."""
    drawings: dict[str, Callable[[Results, Quality], Figure]] = {
        "families": families,
        "ablation": families,
        "recurrence": recurrence,
        "scaling": scaling,
        "schedule": schedule,
    }
    made = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        name = results.study.figure
        made[name] = to_bytes(drawings[name](results, quality), "png")
        if any(len(tuned.tried) > 1 for tuned in results.tuned.values()):
            made["sweep"] = to_bytes(sweep(results), "png")
    return made


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def families(results: Results, quality: Quality) -> Figure:
    """Left: the loss of every seed. Right: differences to the reference, ours and the paper's."""
    found = [f for f in results.found if f.losses]
    figure = _figure(8.6, 1.2 + 0.42 * len(found))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.15))
    y = np.arange(len(found))[::-1]
    base = next((f for f in found if f.row.name == results.study.reference), None)
    for k, f in zip(y, found, strict=True):
        colour, marker = LOOKS[f.row.tuned]
        left.plot(
            list(f.losses.values()), [k] * len(f.losses), marker, color=colour, ms=4, alpha=0.5
        )
        left.plot([f.loss], [k], "|", color=colour, ms=16, mew=2)
        if base is None:
            continue
        error = 2 * results.noise.sigma * math.sqrt(2 / len(f.losses)) if results.noise else 0
        if f is not base:
            right.errorbar(
                [f.loss - base.loss], [k], xerr=[error], fmt=marker, color=colour, ms=6, capsize=3
            )
        theirs, reference = quality(f), quality(base)
        for size, shape in SIZES.items():
            if size in theirs and size in reference and f is not base:
                gap = math.log(theirs[size] / reference[size])
                right.plot([gap], [k - 0.24], shape, color=GREY, mfc="white", ms=3.5)
    left.set_yticks(y, [f.row.label for f in found])
    left.set_ylim(-0.6, len(found) - 0.4)
    left.set_xlabel("validation loss, nats per token")
    left.set_title("each seed, and the mean", loc="left")
    right.axvline(0, color=GREY, lw=0.8)
    right.set_xlabel(f"difference to {base.row.label if base else results.study.reference}, nats")
    right.set_title("ours, with two standard errors; hollow: the paper’s", loc="left")
    shown = [s for s in SIZES if any(s in quality(f) for f in found if f is not base)]
    for size in shown:
        right.plot([], [], SIZES[size], color=GREY, mfc="white", ms=4, label=f"paper, {size}")
    if shown:
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=4)
    for ax in (left, right):
        ax.grid(axis="x", alpha=0.3, lw=0.6)
    return figure


def recurrence(results: Results, quality: Quality) -> Figure:
    """The U-curve, one line for each compute budget."""
    figure = _figure(5.4, 3.6)
    ax = figure.subplots()
    budgets = sorted({f.row.point.get("budget", 1.0) for f in results.found})
    for budget, colour, style in zip(
        budgets, (BLUE, ORANGE, GREEN), ("o-", "s--", "^:"), strict=False
    ):
        line = [
            f
            for f in results.found
            if f.row.point.get("budget", 1.0) == budget and f.losses and f.row.core is not None
        ]
        line.sort(key=lambda f: f.row.core or 0)
        if not line:
            continue
        x, mean = [100 * float(f.row.core or 0) for f in line], [f.loss for f in line]
        error = results.noise.sigma if results.noise else 0
        flops = np.mean([f.training_flops for f in line])
        ax.errorbar(
            x,
            mean,
            error,
            fmt=style,
            color=colour,
            ms=5,
            lw=1.3,
            capsize=2.5,
            label=f"{flops:.2g} FLOPs",
        )
        lowest = int(np.argmin(mean))
        ax.plot(x[lowest], mean[lowest], "o", ms=12, mfc="none", color=colour)
    ax.axvspan(30, 40, color=GREY, alpha=0.15, lw=0, label="best in the paper")
    ax.set_xlabel("recurrence ratio: layers in the shared core, %")
    ax.set_ylabel("validation loss, nats per token")
    ax.set_title("SpiralFormer-L, parameters fixed (circle: lowest; bars: σ of a run)", loc="left")
    ax.grid(alpha=0.3, lw=0.6)
    ax.legend()
    return figure


def scaling(results: Results, quality: Quality) -> Figure:
    """Loss against training FLOPs and parameters with fitted lines, and the paper's Table 1."""
    figure = _figure(9.6, 3.6)
    panels = figure.subplots(1, 3)
    names = list(dict.fromkeys(f.row.name for f in results.found))
    for ax, key, label in (
        (panels[0], "training_flops", "training FLOPs"),
        (panels[1], "parameters", "parameters"),
    ):
        for name in names:
            some = [f for f in results.found if f.row.name == name and f.losses]
            _line(ax, name, [(float(getattr(f, key)), f.loss) for f in some])
        _logarithmic(ax, label)
    panels[0].set_ylabel("validation loss, nats per token")
    panels[0].set_title("ours", loc="left")
    panels[1].set_title("ours", loc="left")
    for name in names:
        rows = [paper.TABLE_1.get(preset_name(name, size)) for size in SIZES]
        points = [(row.flops * 1e12, math.log(row.quality.pile)) for row in rows if row]
        _line(panels[2], name, points)
    _logarithmic(panels[2], "FLOPs of a prefill of 4096")
    panels[2].set_title("the paper’s (Table 1, Pile, 160M–1.4B)", loc="left")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _line(ax: Axes, name: str, points: list[tuple[float, float]]) -> None:
    if not points:
        return
    colour, marker = LOOKS.get(name, (GREY, "o"))
    ax.plot(
        *zip(*points, strict=True), marker, color=colour, ms=5.5, label=FAMILIES.get(name, name)
    )
    fit = fitted(points)
    if fit:
        x = np.geomspace(min(p[0] for p in points), max(p[0] for p in points), 50)
        ax.plot(x, np.exp(fit[0] * np.log(x) + fit[1]), color=colour, lw=1, alpha=0.8)


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


def schedule(results: Results, quality: Quality) -> Figure:
    """Loss against the FLOPs of a forward pass; lower left is better."""
    figure = _figure(5.6, 3.8)
    ax = figure.subplots()
    error = results.noise.sigma if results.noise else 0
    for f in results.found:
        if not f.losses:
            continue
        special = f.row.name == results.study.reference
        colour = ORANGE if special else BLUE
        x = f.flops / 1e9
        ax.errorbar(
            [x], [f.loss], [error], fmt="^" if special else "o", color=colour, ms=6, capsize=2.5
        )
        inside = ",".join(map(str, f.row.model.parsed_layout.resolutions))
        style: dict[str, Any] = {"xytext": (6, 4), "textcoords": "offset points", "size": 7}
        ax.annotate(f"{{{inside}}}", (x, f.loss), **style)
    ax.margins(x=0.25, y=0.12)
    ax.set_xlabel(f"FLOPs of {results.study.scale.length} tokens, 1e9")
    ax.set_ylabel("validation loss, nats per token")
    ax.set_title("lower left is better (bars: σ of a run)", loc="left")
    ax.grid(alpha=0.3, lw=0.6)
    return figure


def sweep(results: Results) -> Figure:
    figure = _figure(5.4, 3.4)
    ax = figure.subplots()
    for family, tuned in results.tuned.items():
        colour, marker = LOOKS[family]
        points = [(lr, loss) for lr, loss in tuned.tried.items() if math.isfinite(loss)]
        if points:
            ax.plot(
                *zip(*points, strict=True),
                marker=marker,
                color=colour,
                ms=4.5,
                lw=1,
                label=FAMILIES[family],
            )
        if tuned.chosen is not None:
            ax.plot(tuned.chosen, tuned.tried[tuned.chosen], "o", ms=11, mfc="none", color=colour)
    ax.set_xscale("log", base=2)
    rates = sorted({lr for tuned in results.tuned.values() for lr in tuned.tried})
    ax.set_xticks(rates, [f"{lr:.2g}" for lr in rates])
    ax.set_xlabel("peak learning rate")
    ax.set_ylabel("validation loss of the shorter runs")
    ax.set_title("circle: chosen", loc="left")
    ax.grid(alpha=0.3, lw=0.6)
    ax.legend()
    return figure
