"""One HTML page with everything in it: verdict, diagram, figures, numbers. No network is needed."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np

from spiralformer import diagram, plots
from spiralformer.console import count
from spiralformer.files import write_text
from spiralformer.probes import figures, metrics, result
from spiralformer.probes.result import SYMBOLS, ModelResult, ProbeResult
from spiralformer.templates import render

PAGE = "report.html"


def write(probed: ProbeResult, folder: Path) -> Path:
    """The figures, the diagrams and the page; all from the numbers alone. Gives the page."""
    pictures = {}
    for drawing in figures.DRAWINGS:
        models = [model for model in probed.models if drawing.applies(model)]
        if models:
            figure = figures.render(drawing, models)
            path = folder / "figures" / drawing.name
            plots.save(figure, path.with_suffix(".png"))
            pictures[drawing.name] = plots.save(figure, path.with_suffix(".svg")).read_bytes()
    for k, model in enumerate(probed.models):
        name = "diagram.svg" if k == 0 else f"diagram-{k + 1}.svg"
        write_text(folder / "figures" / name, diagram.svg(model.config))
    write_text(folder / PAGE, html(probed, pictures))
    return folder / PAGE


def html(probed: ProbeResult, pictures: dict[str, bytes]) -> str:
    """The page; `pictures` are the SVG files of the drawings, by name."""
    return render(
        "probe.html",
        title="Probe of " + " and ".join(model.name for model in probed.models),
        probed=probed,
        notes=notes(probed),
        pictures={name: base64.b64encode(svg).decode() for name, svg in pictures.items()},
        drawings=figures.DRAWINGS,
        width=lambda drawing: round(
            132 * drawing.size[0] * sum(map(drawing.applies, probed.models))
        ),
        inapplicable=figures.inapplicable,
        diagram=diagram.svg,
        result=result,
        amount=amount,
        preferred=preferred,
        answers=answers,
        visible=_visible,
        table=table,
        count=count,
    )


def notes(probed: ProbeResult) -> list[str]:
    """What could not be done as asked."""
    skipped = [f"{model.name}: {line}" for model in probed.models for line in model.skipped]
    return [*probed.notes, *skipped]


def amount(model: ModelResult) -> str:
    """How much text a model was probed on."""
    shortest, longest = model.lengths
    tokens = count(longest, "token")
    if shortest < longest:
        tokens = f"{shortest:,} to {tokens}"
    return f"{count(model.sequences, 'sequence')} of {tokens}"


def preferred(model: ModelResult) -> list[tuple[str, Any, Any]]:
    """By iteration, the tokens that the aggregation prefers and those that it passes over, with
    their lift."""
    rows = []
    for iteration in model.iterations:
        profile = model.profile("aggregation", iteration)
        if profile and len(profile["tokens"]):
            ranked = [(_visible(text), lift) for text, lift, _ in profile["tokens"]]
            half = len(ranked) // 2
            rows.append((str(iteration.resolution), ranked[:half], ranked[half:][::-1]))
    return rows


def answers(model: ModelResult) -> list[tuple[str, list[tuple[str, float, bool]]]]:
    """Of a line, by the state at which the loop would have ended: what the model would have said in
    place of each token, the probability that it gave the token, and whether it is the same."""
    line = model["line"]
    names = ["before the loop", *(f"after {each.resolution}" for each in model.iterations)]
    if not model.iterations:
        names = ["the model"]
    return [
        (
            name,
            [
                (a, p, a == token)
                for a, p, token in zip(said, held, line["tokens"][1:], strict=True)
            ],
        )
        for name, said, held in zip(names, line["answers"], line["probability"], strict=True)
    ]


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"


def table(model: ModelResult, gamma: int) -> tuple[list[str], list[list[str]]]:
    """Head and rows: by iteration, or by layer where there is no loop."""
    if not model.iterations:
        attention = model["attention"]["pre"]
        means = {SYMBOLS[metric]: heads.mean(1) for metric, heads in attention.items()}
        return _cells({"layer": range(len(attention["entropy"])), **means})
    loop = model.iterations
    columns: dict[str, Any] = {
        "iteration": [f"{each.index} at {each.resolution}" for each in loop],
        "g": [each.chunk for each in loop],
        "ω": [each.offset for each in loop],
        "s": [each.shift for each in loop],
        "n": [each.chunks(model.lengths[1]) for each in loop],
        "window": [metrics.window(each.resolution, gamma) for each in loop],
    }
    for metric, symbol in SYMBOLS.items():
        for heads in ("all", "dynamic"):
            columns[f"{symbol}\n{heads}"] = metrics.mean(model.heads(metric, heads).T)
        columns[f"{symbol}\nuniform"] = model["reference"][metric]
    for name, key in (("update", "size"), ("change", "change"), ("cosine", "cosine")):
        columns[name] = model["updates"][key]
    before = dict.fromkeys(columns, "") | {"iteration": "before the loop"}
    columns = {name: [before[name], *values] for name, values in columns.items()}
    for name, key in (("loss", "loss"), ("right", "accuracy"), ("settles", "settled")):
        columns[f"lens\n{name}"] = model["lens"][key]
    return _cells(columns)


def _cells(columns: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    def text(value: Any) -> str:
        if not isinstance(value, float):  # as NumPy's are
            return str(value)
        return "–" if np.isnan(value) else f"{value:.3f}"

    rows = zip(*columns.values(), strict=True)
    return list(columns), [[text(value) for value in row] for row in rows]
