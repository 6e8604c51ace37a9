"""The benchmarks' JSON files as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spiralformer.bench.results import read

COLOURS = {
    "hugging face": "#9aa0a6",
    "baseline": "#5f6b7a",
    "looped": "#c98a2b",
    "spiral-b": "#2a6fb0",
    "spiral-b parallel": "#6fb1e0",
    "spiral-l": "#2c8c6a",
}


def draw(folder: Path) -> Path | None:
    """Every bar as a dot on its way to its limit, and the growth of time with length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = read(folder)
    bars = [
        (f"{name}: {bar['name']}", bar)
        for name, results in found.items()
        for bar in results["bars"]
        if name != "scaling" and bar["limit"]
    ]
    growth = found.get("scaling", {}).get("measurements", [])
    if not bars and not growth:
        return None
    kinds = list(dict.fromkeys(m["kind"] for m in growth))
    height = 1.2 + 0.3 * len(bars)
    figure = plt.figure(figsize=(11, height + (3.6 if kinds else 0)), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[height, 3.6]) if kinds else [figure]
    if bars:
        _ratios(parts[0].subplots(), bars)
    if kinds:
        for axes, kind in zip(
            parts[1].subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True
        ):
            _growth(axes, kind, [m for m in growth if m["kind"] == kind])
    path = folder / "bench.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _ratios(axes: Any, bars: list[tuple[str, dict[str, Any]]]) -> None:
    for place, (_, bar) in enumerate(bars):
        # right of 1 is better than the bar asks, whichever way it points
        score = bar["figure"] / bar["limit"]
        score = score if bar["at_least"] else 1 / max(score, 1e-9)
        colour = "#2c8c6a" if bar["holds"] else "#c0392b"
        axes.plot([1, score], [place, place], color=colour, linewidth=2)
        axes.plot(score, place, "o", color=colour)
        sign = "≥" if bar["at_least"] else "≤"
        text = f"{bar['figure']:.2f} ({sign} {bar['limit']:.2f})"
        axes.annotate(text, (score, place), (6, 4), textcoords="offset points", fontsize=7)
    axes.axvline(1, color="#444", linewidth=1)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.margins(x=0.15)
    axes.set_xlabel("how well each bar is met (right of the line: it holds)")
    axes.spines[["top", "right"]].set_visible(False)


def _growth(axes: Any, kind: str, measurements: list[dict[str, Any]]) -> None:
    for m in measurements:
        colour = COLOURS.get(m["case"])
        axes.plot(m["lengths"], m["seconds"], "o-", color=colour, label=m["case"], markersize=4)
        rate = m["seconds"][0] / m["flops"][0]
        axes.plot(m["lengths"], [f * rate for f in m["flops"]], ":", color=colour, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(f"seconds of a {kind} (dotted: as FLOPs grow)", fontsize=9)
    axes.set_xlabel("tokens")
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
