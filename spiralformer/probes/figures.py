"""The figures, drawn from a result alone and always to the same bytes.

A figure is a function with `@drawing`: it fills a canvas with one model, and its docstring is what
the reader is told. Files and page show the models side by side. Wherever two lines must be told
apart their markers and dashes differ too, for print in grey.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from spiralformer import plots
from spiralformer.plots import BLUE, GREEN, GREY, ORANGE
from spiralformer.probes.metrics import METRICS, min_max
from spiralformer.probes.result import SYMBOLS, TITLES, ModelResult

BLUES = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0, 0.75, 256)))  # black stays seen
MAP = BLUES.with_extremes(bad="#f4f4f4")

Canvas = Figure | SubFigure
Draw = Callable[[Canvas, ModelResult], Sequence[Axis]]
"""Draws a model. Gives the axes on which models side by side have a common scale."""


@dataclass(frozen=True)
class Drawing:
    name: str  # of its files
    title: str
    size: tuple[float, float]  # inches, for one model
    draw: Draw
    applies: Callable[[ModelResult], bool] = lambda model: bool(model.iterations)
    needs: str = "a loop"  # said where it does not apply
    in_paper: bool = False

    @property
    def caption(self) -> str:
        return " ".join((self.draw.__doc__ or "").split())


DRAWINGS: list[Drawing] = []


def drawing(
    name: str, title: str, size: tuple[float, float], **kwargs: Any
) -> Callable[[Draw], Draw]:
    """Adds a function to the drawings, which are shown in this order."""

    def register(draw: Draw) -> Draw:
        DRAWINGS.append(Drawing(name, title, size, draw, **kwargs))
        return draw

    return register


def render(drawing: Drawing, models: list[ModelResult]) -> Figure:
    with plots.style():
        width, height = drawing.size
        figure = plots.new_figure(width * len(models), height)
        parts: Any = figure.subfigures(1, len(models), squeeze=False)[0]
        scales = [drawing.draw(part, model) for part, model in zip(parts, models, strict=True)]
        for alike in zip(*scales, strict=True):
            ends = np.array([axis.get_view_interval() for axis in alike])
            for axis in alike:
                axis.set_view_interval(ends.min(), ends.max(), ignore=True)
        for part, model in zip(parts, models, strict=True):
            part.suptitle(f"{model.name}   {model.config.layout}", size=8.5, weight="bold")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # what was laid out once stays so in every format
        return figure


def inapplicable(model: ModelResult) -> list[str]:
    """Which figures this model has not, and what they would need."""
    return [f"{each.title}: needs {each.needs}" for each in DRAWINGS if not each.applies(model)]


# ---------------------------------------------------------------------------- the paper's


@drawing(
    "shift-dynamic",
    "Cross-loop shifts, dynamic heads",
    (4.6, 4.3),
    applies=lambda model: any(model.dynamic(metric).any() for metric in METRICS),
    needs="a loop of two or more iterations whose heads differ",
    in_paper=True,
)
def draw_dynamic_shift(canvas: Canvas, model: ModelResult) -> Sequence[Axis]:
    """The 40 % of heads with the largest range across the loop, chosen for each metric by itself.
    Left: how heads are distributed at each iteration (a tick is a head). Right: boxes, a faint line
    for each head, the mean in black. Diamonds: what a head that attends to all earlier keys alike
    would give, that is, the geometry of the iteration."""
    return _shift(canvas, model, "dynamic")


@drawing("shift-all", "Cross-loop shifts, all heads", (4.6, 4.3), in_paper=True)
def draw_shift(canvas: Canvas, model: ModelResult) -> Sequence[Axis]:
    """The same without any selection of heads."""
    return _shift(canvas, model, "all")


def _shift(canvas: Canvas, model: ModelResult, which: str) -> Sequence[Axis]:
    axes = canvas.subplots(2, 2, width_ratios=(1.15, 1))
    for (ridge, box), metric in zip(axes, METRICS, strict=True):
        values = model.heads(metric, which)  # T heads
        _ridgelines(ridge, values, model.labels())
        ridge.set_xlabel(TITLES[metric])
        words = "dynamic heads" if which == "dynamic" else "heads, all of them"
        ridge.set_title(f"{values.shape[1]} {words}", loc="left")
        _boxes(box, values, model["reference"][metric], model.labels())
        box.set_ylabel(SYMBOLS[metric])
    axes[1, 1].set_xlabel("resolution (loop order →)")
    canvas.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower right", ncols=2)
    return [axis for ridge, box in axes for axis in (ridge.xaxis, box.yaxis)]


def _ridgelines(ax: Axes, values: np.ndarray, labels: list[str]) -> None:
    """One histogram of heads per iteration, the first at the top; a tick under it is a head."""
    colours = plots.shades(len(values))
    rows = [row[np.isfinite(row)] for row in values]
    bins = np.histogram_bin_edges(np.concatenate(rows), 28)
    counts = [np.histogram(row, bins)[0] for row in rows]
    highest = max(np.max(counts), 1)
    for t, (row, count, colour) in enumerate(zip(rows, counts, colours, strict=True)):
        base = len(rows) - 1 - t
        ridge = base + 0.78 * count / highest
        ax.stairs(ridge, bins, baseline=base, fill=True, color=colour, alpha=0.75, zorder=2 * t)
        ax.stairs(ridge, bins, baseline=base, color=colour, lw=0.8, zorder=2 * t)
        ax.vlines(row, base - 0.09, base - 0.02, color=colour, lw=0.6)
        if not row.size:
            ax.text(bins[0], base + 0.1, " not measured", color=GREY, size=7)
    ax.set_yticks(range(len(rows)), labels[::-1])
    ax.set_ylim(-0.15, len(rows) - 0.1)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _boxes(ax: Axes, values: np.ndarray, reference: np.ndarray, labels: list[str]) -> None:
    """A box per iteration, a faint line per head, the means joined, uniform attention beside."""
    x = np.arange(len(values))
    ax.plot(x, values, color="#999999", lw=0.5, alpha=0.45, zorder=1)
    thin: dict[str, Any] = {"whiskerprops": {"lw": 0.7}, "capprops": {"lw": 0.7}}
    thin |= {"medianprops": {"color": "black", "lw": 0.9}, "showfliers": False, "zorder": 2}
    measured = [row[np.isfinite(row)] for row in values]
    drawn = ax.boxplot(measured, positions=x, widths=0.5, patch_artist=True, **thin)
    for box, colour in zip(drawn["boxes"], plots.shades(len(values)), strict=True):
        box.set(facecolor=colour, alpha=0.75, lw=0.7)
    means = values.mean(axis=1) if values.shape[1] else np.full(len(values), np.nan)
    ax.plot(x, means, "o-", color="black", ms=3.5, lw=1.1, zorder=4, label="mean of heads")
    style: dict[str, Any] = {"color": ORANGE, "ms": 3.5, "lw": 0.8, "mfc": "white", "zorder": 3}
    ax.plot(x, reference, "D:", label="uniform attention", **style)
    ax.set_xticks(x, labels)
    ax.set_xlim(-0.5, len(values) - 0.5)


@drawing("heads", "Where the shifts are: layer and head", (4.6, 3.8), in_paper=True)
def draw_heads(canvas: Canvas, model: ModelResult) -> Sequence[Axis]:
    """The range of each head across the loop, min–max normalised in each map; the true ranges
    stand above. Boxed: dynamic heads."""
    axes = canvas.subplots(2, 1)
    for ax, metric in zip(axes, METRICS, strict=True):
        delta = model.delta(metric)
        scale = {"vmin": 0, "vmax": 1, "cmap": MAP, "aspect": "auto", "interpolation": "none"}
        image = ax.imshow(min_max(delta), **scale)
        for layer, head in np.argwhere(model.dynamic(metric)):
            corner = (head - 0.46, layer - 0.44)
            ax.add_patch(Rectangle(corner, 0.92, 0.88, fill=False, ec="black", lw=1.2))
        finite = delta[np.isfinite(delta)]
        span = f"{finite.min():.3f} to {finite.max():.3f}" if finite.size else "not measured"
        ax.set_title(f"Δ{SYMBOLS[metric]}: {span}", loc="left")
        ax.set_ylabel("layer of the core")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(16, integer=True))
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
        canvas.colorbar(image, ax=ax, pad=0.02, aspect=14, ticks=[0, 0.5, 1])
    axes[1].set_xlabel("head")
    return []


# ---------------------------------------------------------------------------- beyond the paper


@drawing("profile", "Attention through the whole depth", (4.6, 3.6), applies=lambda model: True)
def draw_profile(canvas: Canvas, model: ModelResult) -> Sequence[Axis]:
    """Every layer in the order in which it runs: median of the heads, quartiles (band) and
    extremes (lines). Windows and lengths are each stage’s own."""
    axes = canvas.subplots(2, 1, sharex=True)
    colours = plots.shades(len(model.iterations))
    for ax, metric in zip(axes, METRICS, strict=True):
        left = 0
        for stage, values in model["attention"].items():
            name, colour = stage, GREY
            if stage.isdigit():
                name, colour = str(model.iterations[int(stage)].resolution), colours[int(stage)]
            rows = values[metric]
            x = left + np.arange(len(rows))
            if np.isfinite(rows).any():
                low, middle, high = np.percentile(rows, (25, 50, 75), axis=1)
                ax.fill_between(x, low, high, color=colour, alpha=0.3, lw=0)
                ax.vlines(x, rows.min(1), rows.max(1), color=colour, lw=0.6, alpha=0.7)
                ax.plot(x, middle, "o-", color=colour, ms=3, lw=1.2)
            if left:
                ax.axvline(left - 0.5, color="#bbbbbb", lw=0.6)
            if ax is axes[0]:
                place = (left + len(rows) / 2 - 0.5, 1.02)
                ax.text(*place, name, transform=ax.get_xaxis_transform(), ha="center")
            left += len(rows)
        ax.set_ylabel(TITLES[metric])
    axes[1].set_xlabel("layer of the unrolled computation")
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return [ax.yaxis for ax in axes]


@drawing("lens", "Logit lens: at which loop does the answer appear?", (4.6, 4.0))
def draw_lens(canvas: Canvas, model: ModelResult) -> Sequence[Axis]:
    """Above: the loss if the loop ended at this state, read through f_post (the last one is the
    model’s own loss) or by the final norm and head alone. Below: at which state the most likely
    token first is what it will be at the end, and stays so. At a fixed draw of
    positions where a sequence is long."""
    top, bottom = canvas.subplots(2, 1, sharex=True, height_ratios=(1.25, 1))
    lens = model["lens"]
    x = np.arange(len(lens["loss"]))
    top.plot(x, lens["loss"], "o-", color=BLUE, ms=4, lw=1.2, label="through post")
    direct: dict[str, Any] = {"color": GREY, "ms": 4, "lw": 1, "label": "norm and head only"}
    top.plot(x, lens["direct_loss"], "^--", **direct)
    for place in zip(x, lens["loss"], strict=True):
        words = {"xytext": (0, -5), "textcoords": "offset points", "va": "top", "ha": "center"}
        top.annotate(f"{place[1]:.2f}", place, color=BLUE, size=7, **words)
    top.margins(y=0.22)
    top.set_ylabel("loss, nats per token")
    top.legend(loc="best", borderpad=0)
    for key, side, colour, hatch, label in (
        ("settled", -0.19, BLUE, "", "all positions"),
        ("settled_right", 0.19, ORANGE, "////", "where it is right"),
    ):
        shares = 100 * lens[key]
        style = {"color": colour, "ec": "white", "lw": 0, "hatch": hatch, "label": label}
        bars = bottom.bar(x + side, np.nan_to_num(shares), 0.38, **style)
        bottom.bar_label(bars, [f"{share:.0f}" for share in shares], size=6.5, padding=1)
    bottom.set_ylim(0, 112)
    bottom.set_yticks([0, 50, 100])
    bottom.set_ylabel("% of answers")
    bottom.legend(loc="upper left", ncols=2, borderpad=0, bbox_to_anchor=(0, 1.16))
    bottom.set_xticks(x, ["before", *model.labels()])
    bottom.set_xlabel("state: before the loop, then after each iteration")
    return [top.yaxis]


@drawing("updates", "How far each iteration moves the state", (4.6, 2.6))
def draw_updates(canvas: Canvas, model: ModelResult) -> Sequence[Axis]:
    """Means over tokens; bars are two standard errors over sequences."""
    ax, turn = canvas.subplots(1, 2, width_ratios=(1.4, 1))
    for place, key, style, colour, label in (
        (ax, "size", "s-", BLUE, "update ‖ũ‖ / ‖h‖"),
        (ax, "change", "o--", ORANGE, "change ‖h′-h‖ / ‖h‖"),
        (turn, "cosine", "D-", GREEN, "cosine of h and h′"),
    ):
        values, errors = model["updates"][key], model["updates"][f"{key}_error"]
        _with_errors(place, values, errors, style, color=colour, label=label)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("relative to the state")
    turn.set_ylim(min(0, turn.get_ylim()[0]), 1.03)
    for each in (ax, turn):
        each.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderpad=0)
        each.set_xticks(range(len(model.iterations)), model.labels())
        each.set_xlim(-0.4, len(model.iterations) - 0.6)
        each.set_xlabel("iteration")
    return [ax.yaxis, turn.yaxis]


@drawing("cka", "Similarity of states (CKA)", (3.4, 2.9))
def draw_cka(canvas: Canvas, model: ModelResult) -> Sequence[Axis]:
    """Linear CKA with the unbiased estimator, of the loop state before the loop and after each
    iteration: 1 means the same up to rotation and scale."""
    names = ["before", *model.labels()]
    _heatmap(canvas.subplots(), "", model["cka"], names, names)
    return []


@drawing(
    "routing",
    "MeSH routing",
    (5.6, 4.6),
    applies=lambda model: "routing" in model,
    needs="topology mesh",
)
def draw_routing(canvas: Canvas, model: ModelResult) -> Sequence[Axis]:
    """Means over tokens. Above: the slots into which v and each update ũ are written, and the
    slots that each state reads. Below: the coefficients of each state over the embeddings x,
    the pre-loop output v and the updates so far; and the same weighted by their norms."""
    routing = model["routing"]
    states, updates = ["before", *model.labels()], [f"ũ {name}" for name in model.labels()]
    slots = [str(slot) for slot in range(routing["write"].shape[1])]
    later = np.triu(np.ones(routing["share"].shape, bool), 2)  # a state knows no later update
    made_of = {key: np.where(later, np.nan, routing[key]) for key in ("coefficients", "share")}
    (a, b), (c, d) = canvas.subplots(2, 2)
    _heatmap(a, "into which slot it is written", routing["write"], ["v", *updates], slots)
    _heatmap(b, "which slot the state reads", routing["read"], states, slots)
    terms = ["x", "v", *updates]
    _heatmap(c, "coefficient in the state", made_of["coefficients"], states, terms)
    _heatmap(d, "share of the state, by norm", made_of["share"], states, terms)
    return []


@drawing(
    "chunks",
    "Inside a chunk: aggregation and allocation",
    (4.8, 3.4),
    applies=lambda model: any(
        model.profile(probe, iteration)
        for probe in ("aggregation", "allocation")
        for iteration in model.iterations
    ),
    needs="chunks with learned aggregation or allocation",
)
def draw_chunks(canvas: Canvas, model: ModelResult) -> Sequence[Axis]:
    """How much each place of a chunk gives to its latent (α) and how much of the update it is
    dealt (β), as multiples of an even share; lines are one standard deviation over chunks. The
    update dealt to place ρ reaches the token s places later. Evenness is entropy over log g."""
    coarse = [iteration for iteration in model.iterations if iteration.chunk > 1]
    axes = canvas.subplots(2, len(coarse), sharey="row", squeeze=False)
    colours = plots.shades(len(model.iterations))
    for row, probe, symbol in zip(axes, ("aggregation", "allocation"), "αβ", strict=True):
        row[0].set_ylabel(f"{symbol} · g ({probe})")
        for ax, iteration in zip(row, coarse, strict=True):
            profile, g = model.profile(probe, iteration), iteration.chunk
            ax.axhline(1, color=GREY, lw=0.7, ls=":")
            if profile is None:
                ax.text(0.5, 0.5, "fixed", transform=ax.transAxes, ha="center", color=GREY)
            else:
                mean, spread = g * profile["mean"], g * profile["spread"]
                style = {"ecolor": GREY, "capsize": 1.5, "error_kw": {"lw": 0.6}, "alpha": 0.8}
                style |= {
                    "color": colours[iteration.index],
                    "yerr": [spread.clip(max=mean), spread],
                }
                ax.bar(np.arange(g), mean, **style)
                ax.set_title(f"evenness {profile['evenness']:.2f}", loc="right", size=7, pad=2)
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            ax.set_xlim(-0.6, g - 0.4)
        row[0].set_ylim(bottom=0)
    for (upper, lower), iteration in zip(axes.T, coarse, strict=True):
        upper.set_title(str(iteration.resolution), loc="left", weight="bold")
        lower.set_xlabel("place in chunk")
    return []


@drawing("position", "Loss by position, and within chunks", (4.6, 4.8), applies=lambda model: True)
def draw_position(canvas: Canvas, model: ModelResult) -> Sequence[Axis]:
    """Loss of the token predicted at each position; below, its excess over the mean by the
    place in the chunk of the token that predicts, with two standard errors over sequences;
    beside it the same less the control’s on the same text, where there is one. With the
    right-shift the latent of a chunk is known only from its last place on."""
    loss = model["loss"]
    heights = [1.3] + [1] * len(loss["phases"])
    top, *rest = canvas.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    x = np.arange(len(loss["by_position"]))
    top.plot(x, loss["by_position"], "o-", color=BLUE, ms=3, lw=1.2)
    names = [f"{int(a)}" if b <= a + 1 else f"{int(a)}–" for a, b in pairwise(loss["edges"])]
    every = 1 + len(x) // 9
    top.set_xticks(x[::every], names[::every])
    top.set_xlabel("position in the sequence", labelpad=1)
    top.set_ylabel("loss")
    for ax, phase in zip(rest, loss["phases"], strict=True):
        ax.sharey(rest[0])
        ax.axhline(0, color=GREY, lw=0.7)
        _with_errors(ax, phase["excess"], phase["error"], "s", color=ORANGE)
        if "against" in phase:
            style = {"color": BLUE, "mfc": "white", "label": "less the control’s"}
            _with_errors(ax, phase["against"], phase["against_error"], "o", 0.12, **style)
        g = int(phase["chunk"])
        ax.set_xlim(-0.5, g - 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.set_ylabel(f"excess, g = {g}")
    if rest:
        rest[-1].set_xlabel("place of the token in its chunk")
        if rest[0].get_legend_handles_labels()[1]:
            rest[0].legend(loc="lower right", borderpad=0, bbox_to_anchor=(1, 0.97))
    return [ax.yaxis for ax in (top, *rest)]


def _with_errors(
    ax: Axes, values: np.ndarray, errors: np.ndarray, style: str, right: float = 0, **kwargs: Any
) -> None:
    """Bars of two standard errors; none where a single sequence has no error."""
    x, bars = np.arange(len(values)) + right, np.nan_to_num(2 * errors)
    ax.errorbar(x, values, bars, fmt=style, ms=4, lw=1.2, capsize=2, **kwargs)


def _heatmap(ax: Axes, title: str, values: np.ndarray, rows: list[str], columns: list[str]) -> None:
    highest = np.fmax.reduce(values, axis=None, initial=0.5)
    ax.imshow(values, cmap=MAP, vmin=0, vmax=highest, aspect="auto", interpolation="none")
    for (r, c), value in np.ndenumerate(values):
        if np.isfinite(value):
            ax.text(c, r, f"{value:.2f}", ha="center", va="center", size=6.5)
    ax.set_title(title, loc="left")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
