"""The figures, drawn from a result alone and always to the same bytes.

Each drawing fills a figure (or a part of one) with one model; files show the models side by side,
on scales common to all. Wherever two lines must be told apart their markers and dashes differ too,
for print in grey.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator

from spiralformer import plots
from spiralformer.plots import BLUE, GREEN, GREY, ORANGE
from spiralformer.probes.metrics import METRICS, min_max
from spiralformer.probes.result import SYMBOLS, TITLES, ModelResult

BLUES = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0, 0.75, 256)))  # black stays seen
MAP = BLUES.with_extremes(bad="#f4f4f4")

Canvas = Figure | SubFigure
Draw = Callable[[Canvas, ModelResult, list[ModelResult]], None]
"""Draws a model; the list has all models that the drawing applies to, for common scales."""


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
        """What the reader is told is what the function says of itself."""
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


def inapplicable(model: ModelResult) -> list[str]:
    """Which figures this model has not, and what they would need."""
    return [f"{each.title}: needs {each.needs}" for each in DRAWINGS if not each.applies(model)]


def render(drawing: Drawing, shown: list[ModelResult], everyone: list[ModelResult]) -> Figure:
    """A figure with these models side by side, on scales common to everyone."""
    with plots.style():
        width, height = drawing.size
        figure = plots.new_figure(width * len(shown), height)
        comparable = [model for model in everyone if drawing.applies(model)]
        parts: Any = figure.subfigures(1, len(shown), squeeze=False)[0]
        for part, model in zip(parts, shown, strict=True):
            drawing.draw(part, model, comparable)
            if len(everyone) > 1:
                part.suptitle(f"{model.name}   {model.config.layout}", size=8.5, weight="bold")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # what was laid out once stays so in every format
        return figure


def write_figures(models: list[ModelResult], folder: Path) -> dict[str, list[tuple[str, bytes]]]:
    """NAME.png and NAME.svg of every drawing that applies to at least one of the models. Gives the
    SVGs of each drawing, model by model: [(model, SVG), …]."""
    panels = {}
    for each in DRAWINGS:
        shown = [model for model in models if each.applies(model)]
        if shown:
            figure = render(each, shown, models)
            for kind in ("png", "svg"):
                plots.save(figure, folder / f"{each.name}.{kind}")
            alone = [figure if len(shown) == 1 else render(each, [m], models) for m in shown]
            panels[each.name] = [
                (model.name, plots.to_bytes(figure, "svg"))
                for model, figure in zip(shown, alone, strict=True)
            ]
    return panels


# ---------------------------------------------------------------------------- the paper's


def _shift(which: str, canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    axes = canvas.subplots(2, 2, width_ratios=(1.15, 1))
    labels, colours = model.labels(), plots.shades(len(model.iterations))
    for (ridge, box), metric in zip(axes, METRICS, strict=True):
        values = model.heads(metric, which)  # T heads
        pooled = [f.heads(metric, which).ravel() for f in everyone]
        references = [f["reference"][metric] for f in everyone]
        span = _limits(np.concatenate([*pooled, *references]))
        bins = np.linspace(*span, 29)
        _ridgelines(ridge, values, bins, labels, colours)
        ridge.set_xlabel(TITLES[metric])
        _boxes(box, values, model["reference"][metric], labels, colours)
        box.set_ylim(*span)
        box.set_ylabel(SYMBOLS[metric])
        count = values.shape[1]
        words = f"all {count} heads" if which == "all" else f"{count} dynamic heads"
        ridge.set_title(words, loc="left")
    axes[1, 1].set_xlabel("resolution (loop order →)")
    canvas.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower right", ncols=2)


def _limits(values: np.ndarray) -> tuple[float, float]:
    values = values[np.isfinite(values)]
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    margin = 0.05 * (high - low) or 0.01
    return max(low - margin, -0.005), min(high + margin, 1.005)


def _ridgelines(
    ax: Axes, values: np.ndarray, bins: np.ndarray, labels: list[str], colours: list[Any]
) -> None:
    """One histogram of heads per iteration, the first at the top; a tick under it is a head."""
    counts = [np.histogram(row[np.isfinite(row)], bins)[0] for row in values]
    highest = max((c.max() for c in counts), default=0) or 1
    for t, (row, count) in enumerate(zip(values, counts, strict=True)):
        base = len(values) - 1 - t
        kwargs = {"baseline": base, "color": colours[t], "zorder": 2 * t}
        ax.stairs(base + 0.78 * count / highest, bins, fill=True, alpha=0.75, **kwargs)
        ax.stairs(base + 0.78 * count / highest, bins, lw=0.8, **kwargs)
        finite = row[np.isfinite(row)]
        ax.vlines(finite, base - 0.09, base - 0.02, color=colours[t], lw=0.6)
        if not finite.size:
            ax.text(bins[0], base + 0.1, " not measured", color=GREY, size=7)
    ax.set_yticks(range(len(values)), [label.replace("\n", ", ") for label in reversed(labels)])
    ax.set_ylim(-0.15, len(values) - 0.1)
    ax.set_xlim(bins[0], bins[-1])
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _boxes(
    ax: Axes, values: np.ndarray, reference: np.ndarray, labels: list[str], colours: list[Any]
) -> None:
    """A box per iteration, a faint line per head, the means joined, uniform attention beside."""
    x = np.arange(len(values))
    if values.shape[1] <= 256:
        ax.plot(x, values, color="#999999", lw=0.5, alpha=0.45, zorder=1)
    thin: dict[str, Any] = {"whiskerprops": {"lw": 0.7}, "capprops": {"lw": 0.7}}
    thin |= {"medianprops": {"color": "black", "lw": 0.9}, "showfliers": False, "zorder": 2}
    measured = [row[np.isfinite(row)] for row in values]
    drawn = ax.boxplot(measured, positions=x, widths=0.5, patch_artist=True, **thin)
    for box, colour in zip(drawn["boxes"], colours, strict=True):
        box.set(facecolor=colour, alpha=0.75, lw=0.7)
    means = values.mean(axis=1) if values.shape[1] else np.full(len(values), np.nan)
    ax.plot(x, means, "o-", color="black", ms=3.5, lw=1.1, zorder=4, label="mean of heads")
    style: dict[str, Any] = {"color": ORANGE, "ms": 3.5, "lw": 0.8, "mfc": "white", "zorder": 3}
    ax.plot(x, reference, "D:", label="uniform attention", **style)
    ax.set_xticks(x, labels)
    ax.set_xlim(-0.5, len(values) - 0.5)
    ax.yaxis.set_major_locator(MaxNLocator(5))


@drawing(
    "shift-dynamic",
    "Cross-loop shifts, dynamic heads",
    (4.6, 4.3),
    applies=lambda model: any(model.dynamic(metric).any() for metric in METRICS),
    needs="a loop of two or more iterations whose heads differ",
    in_paper=True,
)
def draw_dynamic_shift(canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    """The 40 % of heads with the largest range across the loop, chosen for each metric by itself.
    Left: how heads are distributed at each iteration (a tick is a head). Right: boxes, a faint line
    for each head, the mean in black. Diamonds: what a head that attends to all earlier keys alike
    would give, that is, the geometry of the iteration."""
    _shift("dynamic", canvas, model, everyone)


@drawing("shift-all", "Cross-loop shifts, all heads", (4.6, 4.3), in_paper=True)
def draw_shift(canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    """The same without any selection of heads."""
    _shift("all", canvas, model, everyone)


@drawing(
    "heads",
    "Where the shifts are: layer and head",
    (4.6, 3.8),
    in_paper=True,
)
def draw_heads(canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    """The range of each head across the loop, min–max normalised in each map; the true ranges
    stand above. Boxed: dynamic heads."""
    depths = [len(f.delta("entropy")) for f in everyone]
    axes = canvas.subplots(2, 1)
    for ax, metric in zip(axes, METRICS, strict=True):
        delta, dynamic = model.delta(metric), model.dynamic(metric)
        image = ax.imshow(
            min_max(delta), cmap=MAP, norm=Normalize(0, 1), aspect="auto", interpolation="none"
        )
        for layer, head in np.argwhere(dynamic):
            corner = (head - 0.46, layer - 0.44)
            ax.add_patch(Rectangle(corner, 0.92, 0.88, fill=False, ec="black", lw=1.2))
        finite = delta[np.isfinite(delta)]
        span = f"{finite.min():.3f} to {finite.max():.3f}" if finite.size else "not measured"
        ax.set_title(f"Δ{SYMBOLS[metric]}: {span}", loc="left")
        ax.set_ylabel("layer of the core")
        ax.set_ylim(max(depths) - 0.5, -0.5)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
        for axis, count in ((ax.xaxis, delta.shape[1]), (ax.yaxis, delta.shape[0])):
            axis.set_major_locator(FixedLocator(list(range(0, count, 1 + (count - 1) // 16))))
        canvas.colorbar(image, ax=ax, pad=0.02, aspect=14, ticks=[0, 0.5, 1])
    axes[1].set_xlabel("head")


# ---------------------------------------------------------------------------- beyond the paper


@drawing(
    "profile",
    "Attention through the whole depth",
    (4.6, 3.6),
    applies=lambda model: True,
)
def draw_profile(canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    """Every layer in the order in which it runs: median of the heads, quartiles (band) and
    extremes (lines). Windows and lengths are each stage’s own."""
    axes = canvas.subplots(2, 1, sharex=True)
    names = {"pre": "pre", "post": "post"}
    names |= {str(iteration.index): str(iteration.resolution) for iteration in model.iterations}
    colours = {"pre": GREY, "post": GREY}
    colours |= {str(t): c for t, c in enumerate(plots.shades(len(model.iterations)))}
    for ax, metric in zip(axes, METRICS, strict=True):
        left = 0
        for stage, values in model["attention"].items():
            rows = values[metric]
            x = left + np.arange(len(rows))
            if np.isfinite(rows).any():
                low, middle, high = np.percentile(rows, (25, 50, 75), axis=1)
                ax.fill_between(x, low, high, color=colours[stage], alpha=0.3, lw=0, step=None)
                ax.vlines(x, rows.min(1), rows.max(1), color=colours[stage], lw=0.6, alpha=0.7)
                ax.plot(x, middle, "o-", color=colours[stage], ms=3, lw=1.2)
            if left:
                ax.axvline(left - 0.5, color="#bbbbbb", lw=0.6)
            if ax is axes[0]:
                place = (left + len(rows) / 2 - 0.5, 1.02)
                ax.text(*place, names[stage], transform=ax.get_xaxis_transform(), ha="center")
            left += len(rows)
        pooled = [np.ravel(v[metric]) for f in everyone for v in f["attention"].values()]
        ax.set_ylim(*_limits(np.concatenate(pooled)))
        ax.set_ylabel(TITLES[metric])
    axes[1].set_xlabel("layer of the unrolled computation")
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))


@drawing(
    "lens",
    "Logit lens: at which loop does the answer appear?",
    (4.6, 4.0),
    applies=lambda model: "lens" in model,
)
def draw_lens(canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    """Above: the loss if the loop ended at this state, read through f_post (the last one is the
    model’s own loss) or by the final norm and head alone. Below: at which state the most likely
    token first is what it will be at the end, and stays so. At a fixed draw of
    positions where a sequence is long."""
    top, bottom = canvas.subplots(2, 1, sharex=True, height_ratios=(1.25, 1))
    x = np.arange(len(model["lens"]["loss"]))
    top.plot(x, model["lens"]["loss"], "o-", color=BLUE, ms=4, lw=1.2, label="through post")
    style: dict[str, Any] = {"color": GREY, "ms": 4, "lw": 1, "label": "norm and head only"}
    top.plot(x, model["lens"]["direct_loss"], "^--", **style)
    for k, loss in enumerate(model["lens"]["loss"]):
        at: dict[str, Any] = {"xytext": (0, -5), "textcoords": "offset points", "va": "top"}
        top.annotate(f"{loss:.2f}", (k, loss), color=BLUE, size=7, ha="center", **at)
    losses = [f["lens"][k] for f in everyone for k in ("loss", "direct_loss")]
    low, high = np.nanmin(np.concatenate(losses)), np.nanmax(np.concatenate(losses))
    top.set_ylim(max(0, low - 0.22 * (high - low) - 0.2), high + 0.08 * (high - low))
    top.set_ylabel("loss, nats per token")
    top.legend(loc="upper right", borderpad=0)
    for key, side, colour, hatch, label in (
        ("settled", -0.19, BLUE, "", "all positions"),
        ("settled_right", 0.19, ORANGE, "////", "where it is right"),
    ):
        shares = 100 * model["lens"][key]
        style = {"color": colour, "ec": "white", "lw": 0, "hatch": hatch, "label": label}
        bars = bottom.bar(x + side, np.nan_to_num(shares), 0.38, **style)
        bottom.bar_label(bars, [f"{s:.0f}" for s in shares], size=6.5, padding=1)
    bottom.set_ylim(0, 112)
    bottom.set_yticks([0, 50, 100])
    bottom.set_ylabel("% of answers")
    bottom.legend(loc="upper left", ncols=2, borderpad=0, bbox_to_anchor=(0, 1.16))
    bottom.set_xticks(x, _state_names(model))
    bottom.set_xlabel("state: before the loop, then after each iteration")


@drawing(
    "updates",
    "How far each iteration moves the state",
    (4.6, 2.6),
    applies=lambda model: "updates" in model,
)
def draw_updates(canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    """Means over tokens; bars are two standard errors over sequences."""
    ax, turn = canvas.subplots(1, 2, width_ratios=(1.4, 1))
    x = np.arange(len(model.iterations))
    curves = (
        ("size", "s-", BLUE, "update ‖ũ‖ / ‖h‖"),
        ("change", "o--", ORANGE, "change ‖h′-h‖ / ‖h‖"),
    )
    for key, style, colour, label in curves:
        errors = model["updates"][f"{key}_error"]
        _with_errors(ax, x, model["updates"][key], errors, style, color=colour, label=label)
    others = [f["updates"][k] for f in everyone for k in ("size", "change")]
    top = np.nanmax(np.concatenate([*others, [0.1]]))
    ax.set_ylim(0, 1.1 * top)
    ax.set_ylabel("relative to the state")
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderpad=0)
    errors = model["updates"]["cosine_error"]
    _with_errors(turn, x, model["updates"]["cosine"], errors, "D-", color=GREEN)
    lowest = min(float(np.nanmin([*f["updates"]["cosine"], 1])) for f in everyone)
    turn.set_ylim(min(0.0, lowest - 0.05), 1.03)
    turn.set_title("cosine of h and h′", loc="left")
    for each in (ax, turn):
        each.set_xticks(x, model.labels())
        each.set_xlim(-0.4, len(x) - 0.6)
        each.set_xlabel("iteration")


@drawing(
    "cka",
    "Similarity of states (CKA)",
    (3.4, 2.9),
    applies=lambda model: "cka" in model,
)
def draw_cka(canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    """Linear CKA with the unbiased estimator, of the loop state before the loop and after each
    iteration: 1 means the same up to rotation and scale."""
    ax = canvas.subplots()
    names = _state_names(model)
    _heatmap(ax, model["cka"], names, names, Normalize(0, 1))


@drawing(
    "routing",
    "MeSH routing",
    (5.6, 4.6),
    applies=lambda model: "routing" in model,
    needs="topology mesh",
)
def draw_routing(canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    """Means over tokens. Above: the slots into which v and each update ũ are written, and the
    slots that each state reads. Below: the coefficients of each state over the embeddings x,
    the pre-loop output v and the updates so far; and the same weighted by their norms."""
    axes = canvas.subplots(2, 2, width_ratios=(1, 1))
    count, slots = model["routing"]["write"].shape
    states = _state_names(model, lines=False)
    terms = ["x", "v", *(f"ũ {name}" for name in _update_names(model))]
    writers = ["v", *(f"ũ {name}" for name in _update_names(model))]
    weights = [f["routing"][k].max() for f in everyone for k in ("write", "read")]
    names = [str(slot) for slot in range(slots)]
    scale = Normalize(0, max(*weights, 0.5))
    _heatmap(axes[0, 0], model["routing"]["write"], writers, names, scale)
    _heatmap(axes[0, 1], model["routing"]["read"], states, names, scale)
    later = np.triu(np.ones((count, count + 1), bool), 2)  # a state knows no later update
    for ax, key in ((axes[1, 0], "coefficients"), (axes[1, 1], "share")):
        values = np.where(later, np.nan, model["routing"][key])
        _heatmap(ax, values, states, terms, Normalize(0, max(float(np.nanmax(values)), 0.5)))
    axes[0, 0].set_title("into which slot it is written", loc="left")
    axes[0, 1].set_title("which slot the state reads", loc="left")
    axes[1, 0].set_title("coefficient in the state", loc="left")
    axes[1, 1].set_title("share of the state, by norm", loc="left")


@drawing(
    "chunks",
    "Inside a chunk: aggregation and allocation",
    (4.8, 3.4),
    applies=lambda model: any(
        model.profile(name, iteration)
        for name in ("aggregation", "allocation")
        for iteration in model.iterations
    ),
    needs="chunks with learned aggregation or allocation",
)
def draw_chunks(canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    """How much each place of a chunk gives to its latent (α) and how much of the update it is
    dealt (β), as multiples of an even share; lines are one standard deviation over chunks. The
    update dealt to place ρ reaches the token s places later. Evenness is entropy over log g."""
    coarse = [iteration for iteration in model.iterations if iteration.chunk > 1]
    axes = canvas.subplots(2, len(coarse), sharey="row", squeeze=False)
    colours = plots.shades(len(model.iterations))
    for column, iteration in zip(axes.T, coarse, strict=True):
        profiles = [model.profile(name, iteration) for name in ("aggregation", "allocation")]
        for ax, profile in zip(column, profiles, strict=True):
            x = np.arange(iteration.chunk)
            ax.axhline(1, color=GREY, lw=0.7, ls=":")
            if profile is None:
                ax.text(0.5, 0.5, "fixed", transform=ax.transAxes, ha="center", color=GREY)
            else:
                mean, spread = (profile[key] * iteration.chunk for key in ("mean", "spread"))
                kwargs = {"ecolor": GREY, "capsize": 1.5, "error_kw": {"lw": 0.6}}
                low = np.minimum(spread, mean)
                colour = colours[iteration.index]
                ax.bar(x, mean, 0.8, color=colour, alpha=0.8, yerr=[low, spread], **kwargs)
                ax.set_title(f"evenness {profile['evenness']:.2f}", loc="right", size=7, pad=2)
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            ax.set_xlim(-0.6, iteration.chunk - 0.4)
            ax.set_ylim(bottom=0)
        column[0].set_title(str(iteration.resolution), loc="left", weight="bold")
        column[1].set_xlabel("place in chunk")
    axes[0, 0].set_ylabel("α · g (aggregation)")
    axes[1, 0].set_ylabel("β · g (allocation)")


@drawing(
    "position",
    "Loss by position, and within chunks",
    (4.6, 4.8),
    applies=lambda model: True,
)
def draw_position(canvas: Canvas, model: ModelResult, everyone: list[ModelResult]) -> None:
    """Loss of the token predicted at each position; below, its excess over the mean by the
    place in the chunk of the token that predicts, with two standard errors over sequences;
    beside it the same less the control’s on the same text, where there is one. With the
    right-shift the latent of a chunk is known only from its last place on."""
    phases = model["loss"]["phases"]
    heights = [1.3] + [1] * len(phases)
    top, *rest = canvas.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    edges = model["loss"]["edges"]
    x = np.arange(len(edges) - 1)
    top.plot(x, model["loss"]["by_position"], "o-", color=BLUE, ms=3, lw=1.2)
    names = [f"{int(a)}" if b <= a + 1 else f"{int(a)}–" for a, b in pairwise(edges)]
    top.set_xticks(x[:: 1 + len(x) // 9], names[:: 1 + len(x) // 9])
    top.set_xlabel("position in the sequence", labelpad=1)
    top.set_ylabel("loss")
    top.yaxis.set_major_locator(MaxNLocator(4))
    losses = np.concatenate([f["loss"]["by_position"] for f in everyone])
    margin = 0.06 * float(np.nanmax(losses) - np.nanmin(losses)) + 0.01
    top.set_ylim(np.nanmin(losses) - margin, np.nanmax(losses) + margin)
    every = [phase for f in everyone for phase in f["loss"]["phases"]]
    peak = [np.abs(p["excess"]) + np.nan_to_num(2 * p["error"]) for p in every]
    limit = 1.15 * float(np.nanmax(np.concatenate([*peak, [1e-3]])))
    for ax, phase in zip(rest, phases, strict=True):
        g = int(phase["chunk"])
        ax.axhline(0, color=GREY, lw=0.7)
        _with_errors(ax, np.arange(g), phase["excess"], phase["error"], "s", color=ORANGE)
        if "against" in phase:
            style = {"color": BLUE, "mfc": "white", "label": "less the control’s"}
            beside = np.arange(g) + 0.12
            _with_errors(ax, beside, phase["against"], phase["against_error"], "o", **style)
            if ax is rest[0]:
                ax.legend(loc="lower right", borderpad=0, bbox_to_anchor=(1, 0.97))
        ax.set_ylim(-limit, limit)
        ax.set_xlim(-0.5, g - 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.set_ylabel(f"excess, g = {g}")
    if rest:
        rest[-1].set_xlabel("place of the token in its chunk")


def _with_errors(
    ax: Axes, x: np.ndarray, values: np.ndarray, errors: np.ndarray, style: str, **kwargs: Any
) -> None:
    """Bars of two standard errors; none where a single sequence has no error."""
    ax.errorbar(x, values, np.nan_to_num(2 * errors), fmt=style, ms=4, lw=1.2, capsize=2, **kwargs)


def _heatmap(
    ax: Axes, values: np.ndarray, rows: list[str], columns: list[str], norm: Normalize
) -> None:
    ax.imshow(values, cmap=MAP, norm=norm, aspect="auto", interpolation="none")
    for (r, c), value in np.ndenumerate(values):
        if np.isfinite(value):
            text = f"{value:.2f}".replace("0.", ".", 1) if value < 0.995 else f"{value:.2g}"
            ax.text(c, r, text, ha="center", va="center", size=6.5)
    crowded = len(columns) > 5 and max(map(len, columns)) > 2
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns, rotation=30 if crowded else 0)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def _update_names(model: ModelResult) -> list[str]:
    return [label.split("\n")[-1].replace("loop ", "t=") for label in model.labels()]


def _state_names(model: ModelResult, lines: bool = True) -> list[str]:
    """h⁽⁰⁾ is "before"; the others are named by the iteration that made them."""
    names = model.labels() if lines else _update_names(model)
    return ["before", *names]
