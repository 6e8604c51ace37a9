"""One HTML page with everything in it: verdict, diagram, figures, numbers. No network is needed."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np

from spiralformer.console import count
from spiralformer.files import write_text
from spiralformer.probes import diagram, figures, result
from spiralformer.probes.metrics import METRICS, window
from spiralformer.probes.result import SYMBOLS, ModelResult, ProbeResult
from spiralformer.templates import render

PAGE = "report.html"


def write(probed: ProbeResult, folder: Path) -> Path:
    """The figures, the diagrams and the page; all from the numbers alone. Gives the page."""
    panels = figures.write_figures(probed.models, folder / "figures")
    for k, model in enumerate(probed.models):
        name = "diagram.svg" if k == 0 else f"diagram-{k + 1}.svg"
        write_text(folder / "figures" / name, diagram.svg(model.config) + "\n")
    write_text(folder / PAGE, html(probed, panels))
    return folder / PAGE


def html(probed: ProbeResult, panels: dict[str, list[tuple[str, bytes]]]) -> str:
    """The page; `panels` are the SVGs of each drawing, model by model."""
    return render(
        "probe.html",
        title="Probe of " + " and ".join(model.name for model in probed.models),
        result=probed,
        models=probed.models,
        notes=notes(probed),
        panels={
            name: [(model, base64.b64encode(svg).decode()) for model, svg in shown]
            for name, shown in panels.items()
        },
        drawings=figures.DRAWINGS,
        inapplicable=figures.inapplicable,
        diagram=diagram.svg,
        verdicts=result.verdicts,
        overall=result.overall,
        against_control=result.against_control,
        titles=result.TITLES,
        numbers=result.NUMBERS,
        tokens_seen=result.TOKENS_SEEN,
        amount=amount,
        preferred=preferred,
        table=lambda model: table(model, probed.gamma),
        count=count,
    )


def notes(probed: ProbeResult) -> list[str]:
    """What could not be done as asked."""
    return [
        *probed.notes,
        *(f"{model.name}: {line}" for model in probed.models for line in model.skipped),
    ]


def amount(model: ModelResult) -> str:
    """How much text a model was probed on."""
    shortest, longest = model.lengths
    tokens = count(longest, "token")
    if shortest < longest:
        tokens = f"{shortest:,} to {tokens}"
    return f"{count(model.sequences, 'sequence')} of {tokens}"


def preferred(model: ModelResult) -> list[tuple[str, Any, Any]]:
    """By iteration, the tokens that self-aggregation prefers and those that it passes over, with
    their lift."""
    rows = []
    for iteration in model.iterations:
        profile = model.profile("aggregation", iteration)
        if profile and len(profile["tokens"]):
            ranked = [(_visible(text), lift) for text, lift, _ in profile["tokens"]]
            half = len(ranked) // 2
            rows.append((str(iteration.resolution), ranked[:half], ranked[half:][::-1]))
    return rows


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"


def table(model: ModelResult, gamma: int) -> tuple[list[str], list[list[str]]]:
    """Head and rows: by iteration, or by layer where there is no loop."""
    if not model.iterations:
        layers = zip(*(model["attention"]["pre"][metric] for metric in METRICS), strict=True)
        rows = [[str(n), *(_number(heads.mean()) for heads in m)] for n, m in enumerate(layers)]
        return ["layer", *SYMBOLS.values()], rows
    head = ["iteration", "g", "ω", "s", "n", "window"]
    head += [f"{s}\n{w}" for s in SYMBOLS.values() for w in ("all", "dynamic", "uniform")]
    head += ["update", "change", "cosine", "lens\nloss", "lens\nright", "settles\nhere"]

    def lens(state: int) -> list[str]:
        shares = (model["lens"][key][state] for key in ("accuracy", "settled"))
        return [_number(model["lens"]["loss"][state]), *map(_percent, shares)]

    rows = [["before the loop", *[""] * (len(head) - 4), *lens(0)]]
    for iteration in model.iterations:
        t = iteration.index
        cells = [f"{t} at {iteration.resolution}"]
        geometry = (iteration.chunk, iteration.offset, iteration.shift)
        cells += map(str, (*geometry, iteration.chunks(model.lengths[1])))
        cells.append(str(window(iteration.resolution, gamma)))
        for metric in METRICS:
            for heads in ("all", "dynamic"):
                values = model.heads(metric, heads)[t]
                cells.append(_number(values.mean() if values.size else np.nan))
            cells.append(_number(model["reference"][metric][t]))
        cells += [_number(model["updates"][key][t]) for key in ("size", "change", "cosine")]
        rows.append(cells + lens(t + 1))
    return head, rows


def _number(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.3f}"


def _percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{100 * value:.1f} %"
