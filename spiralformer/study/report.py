"""What a study writes: table.md, table.csv, results.json, figures and one self-contained page."""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from spiralformer import paper
from spiralformer.evaluate.run import write as write_text
from spiralformer.study.conduct import Bench, Results
from spiralformer.study.figures import draw
from spiralformer.study.judge import NOISY, NOT_RUN, NOT_SEEN, RULE, SEEN, Found
from spiralformer.study.lab import Lab, data_identity
from spiralformer.templates import render

CHIPS = {SEEN: "yes", NOT_SEEN: "no", NOISY: "partly", NOT_RUN: "not"}
CSS = "\n.chip{min-width:9.5em}.about{font-size:1.05rem}figure img{max-width:1000px}"
FIGURE_TITLES = {
    "families": "Loss of the families, and the paper’s order",
    "ablation": "What each change costs, beside the paper’s",
    "recurrence": "Loss against recurrence ratio",
    "scaling": "Scaling, beside the paper’s",
    "schedule": "Loss against FLOPs of the schedules",
    "sweep": "Sweeps of the learning rate",
}


# ---------------------------------------------------------------------------- the table

Column = tuple[str, Callable[[Found], str]]


def columns(results: Results) -> list[Column]:
    """The columns that this study has something to say in."""
    base = _reference(results)
    found: list[Column] = [
        ("model", lambda f: f.row.label),
        ("layout", lambda f: f"{f.row.model.layout} {f.row.model.topology}".removesuffix(" none")),
    ]
    if any(f.row.label == g.row.label and f is not g for f in results.found for g in results.found):
        found.insert(0, ("row", lambda f: f.row.id))
    if any(f.row.core is not None for f in results.found):
        found.append(
            (
                "ratio",
                lambda f: f"{100 * float(f.row.core):.0f} %" if f.row.core is not None else "",
            )
        )
    if any("budget" in f.row.point for f in results.found):
        found.append(("training FLOPs", lambda f: _number(f.training_flops, ".3g")))
    found += [
        (
            "params (M) total / non-emb.",
            lambda f: f"{f.parameters / 1e6:.3f} / {f.non_embedding / 1e6:.3f}",
        ),
        (f"FLOPs (1e9, {results.study.scale.length} tokens)", lambda f: f"{f.flops / 1e9:.3g}"),
        ("FLOPs vs ref.", lambda f: _percent(f.flops, base(f), "flops")),
        ("LR", lambda f: _number(f.lr, ".2g")),
        ("validation loss", _loss),
        ("Δ loss vs ref.", lambda f: _number(_difference(f, base(f)), "+.4f")),
        ("perplexity", lambda f: _number(math.exp(f.loss) if f.losses else None, ".2f")),
        ("bits/byte", lambda f: _number(f.bits_per_byte, ".3f")),
    ]
    if any(paper_quality(f) for f in results.found):
        found.append(("Pile perplexity in the paper", _papers))
    tasks = dict.fromkeys(task for scores in results.tasks.values() for task in scores)
    return found + [(task, _score(results, task)) for task in tasks]


def _score(results: Results, task: str) -> Callable[[Found], str]:
    return lambda found: _number(results.tasks.get(found.row.id, {}).get(task), ".1f")


def _reference(results: Results) -> Callable[[Found], Found | None]:
    """The row that another is compared with: the study's reference at the same point."""

    def find(found: Found) -> Found | None:
        for other in results.found:
            if other.row.name == results.study.reference and other.row.point == found.row.point:
                return other
        return None

    return find


def _difference(found: Found, base: Found | None) -> float | None:
    """Mean over the seeds that both have."""
    common = [s for s in found.losses if base is not None and s in base.losses]
    if base is None or not common or found is base:
        return None
    return sum(found.losses[s] - base.losses[s] for s in common) / len(common)


def _loss(found: Found) -> str:
    if not found.losses:
        return (
            f"failed: {_short(next(iter(found.failures.values())))}"
            if found.failures
            else "not run"
        )
    text = f"{found.loss:.4f}"
    if not math.isnan(found.spread):
        text += f" ± {found.spread:.4f}"
    if found.failures:
        text += f" ({len(found.failures)} failed: {_short(next(iter(found.failures.values())))})"
    return text


def _short(reason: str) -> str:
    return " ".join(reason.split())[:80]


def _percent(value: float, base: Found | None, name: str) -> str:
    return "" if base is None else f"{100 * (value / base.quantity(name) - 1):+.1f} %"


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def paper_quality(found: Found) -> dict[str, float]:
    """Pile perplexity that the paper prints for this row, by size."""
    if not found.row.paper:
        return {}
    table = {name: row.quality.pile for name, row in paper.TABLE_1.items()}
    table |= {name: quality.pile for name, quality in paper.TABLE_2.items()}
    sizes = ("160m", "410m", "1b", "1.4b")
    names = {size: found.row.paper.format(size) for size in sizes}
    return {size: table[name] for size, name in names.items() if name in table}


def _papers(found: Found) -> str:
    return ", ".join(f"{value:g} ({size})" for size, value in paper_quality(found).items())


def cells(results: Results) -> tuple[list[str], list[list[str]]]:
    shown = columns(results)
    return [title for title, _ in shown], [[cell(f) for _, cell in shown] for f in results.found]


def markdown(results: Results) -> str:
    head, rows = cells(results)
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"# {results.study.title}", "", results.study.about, "", _setting(results), ""]
    lines += [_row(head), _row(["---"] * len(head)), *map(_row, escaped), ""]
    lines += [
        "± is one standard deviation over seeds. Ref. is the row "
        f"“{results.study.reference}”; differences are paired by seed.",
        "",
    ]
    lines += [
        "## Verdicts",
        "",
        _row(["claim", "source", "verdict", "measured"]),
        _row(["---"] * 4),
    ]
    lines += [_row([v.says, v.source, f"**{v.word}**", v.why]) for v in results.verdicts]
    lines += ["", f"Rule: {RULE}", "", f"Noise: {_noise(results)}.", "", "## Learning rates", ""]
    lines += [f"- {family}: {tuned.says()}" for family, tuned in results.tuned.items()]
    lines += ["", *(f"- {note}" for note in notes(results))]
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _noise(results: Results) -> str:
    return (
        results.noise.says()
        if results.noise
        else "unknown; main has no two seeds at this scale and budget"
    )


def _setting(results: Results) -> str:
    scale, study = results.study.scale, results.study
    matched = "tokens" if study.match == "tokens" else "training FLOPs"
    return (
        f"Scale {results.scale}: width {scale.hidden_size}, vocabulary {scale.vocab_size:,}, "
        f"{scale.length} tokens of context, batches of {scale.batch}, {scale.tokens:,} tokens a "
        f"run; {study.seeds} seed{'s' * (study.seeds > 1)}; rows matched by {matched}, data order "
        "and validation text (asserted from the runs’ records)."
    )


def notes(results: Results) -> list[str]:
    found = [
        f"{f.row.id}, seed {seed} failed: {_short(reason)}"
        for f in results.found
        for seed, reason in f.failures.items()
    ]
    if results.unfinished:
        found.append(f"{results.unfinished} runs are not finished")
    if len(results.versions) > 1:
        found.append(
            f"runs were made by different versions of the code: {'; '.join(results.versions)}"
        )
    return found


def for_terminal(results: Results) -> str:
    head, rows = cells(results)
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    line = lambda row: "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
    lines = [results.study.title, "", line(head), *map(line, rows), ""]
    lines += [f"{v.word:>17}  {v.says}: {v.why}" for v in results.verdicts]
    return "\n".join([*lines, "", f"Noise: {_noise(results)}.", *notes(results)])


# ---------------------------------------------------------------------------- files


def write(results: Results, out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    head, rows = cells(results)
    table = io.StringIO()
    csv.writer(table).writerows([head, *rows])
    figures = draw(results, paper_quality)
    contents = {
        "table.md": markdown(results),
        "table.csv": table.getvalue(),
        "results.json": json.dumps(to_json(results), indent=1, ensure_ascii=False) + "\n",
        "report.html": html(results, figures),
    }
    for name, content in contents.items():
        write_text(out / name, content)
    for name, png in figures.items():
        (out / f"{name}.png").write_bytes(png)
    return [out / name for name in (*contents, *(f"{name}.png" for name in figures))]


def to_json(results: Results) -> dict[str, Any]:
    rows = [
        {
            "row": f.row.id,
            "name": f.row.name,
            "point": f.row.point,
            "core": None if f.row.core is None else float(f.row.core),
            "model": f.row.model.to_dict(),
            "parameters": {"total": f.parameters, "non_embedding": f.non_embedding},
            "forward_flops": f.flops,
            "lr": f.lr,
            "loss": {str(seed): loss for seed, loss in f.losses.items()},
            "mean": None if not f.losses else f.loss,
            "sd": None if math.isnan(f.spread) else f.spread,
            "runs": {
                str(seed): {
                    k: record[k] for k in ("steps", "tokens", "valid", "order", "run", "code")
                }
                for seed, record in sorted(f.records.items())
            },
            "failures": {str(seed): reason for seed, reason in f.failures.items()},
            "paper_pile_perplexity": paper_quality(f),
            "tasks": results.tasks.get(f.row.id, {}),
        }
        for f in results.found
    ]
    return {
        "study": results.study.name,
        "scale": {"name": results.scale, **dataclasses.asdict(results.study.scale)},
        "seeds": results.study.seeds,
        "rows": rows,
        "sweeps": {
            family: {
                "tried": {
                    f"{lr:.6g}": loss if math.isfinite(loss) else None
                    for lr, loss in t.tried.items()
                },
                "chosen": t.chosen,
                "extended": t.extended,
                "at_edge": t.at_edge,
            }
            for family, t in results.tuned.items()
        },
        "noise": results.noise and dataclasses.asdict(results.noise),
        "rule": RULE,
        "verdicts": [dataclasses.asdict(v) for v in results.verdicts],
    }


def html(results: Results, figures: dict[str, bytes]) -> str:
    study = results.study
    head, rows = cells(results)
    counted = [sum(v.word == word for v in results.verdicts) for word in CHIPS]
    summary = ", ".join(f"{n} {word}" for n, word in zip(counted, CHIPS, strict=True) if n)
    items = "".join(
        f'<dt><span class="chip {CHIPS[v.word]}">{v.word}</span></dt><dd>{escape(v.says)} '
        f"<span class=dim>({escape(v.source)}): {escape(v.why)}</span></dd>"
        for v in results.verdicts
    )
    told = "".join(f"<li>{escape(note)}</li>" for note in notes(results))
    lrs = "".join(
        f"<li>{escape(family)}: {escape(tuned.says())}</li>"
        for family, tuned in results.tuned.items()
    )
    return render(
        "parts.html",
        title=study.title,
        parts=[
            f"<h1>{escape(study.title)}</h1><p class=about>{escape(study.about)}</p>",
            f"<p class=dim>{escape(_setting(results))}</p>",
            f"<div class=note><ul>{told}</ul></div>" if told else "",
            f"<h2>Verdicts</h2><p class=overall>{escape(summary)}</p><dl>{items}</dl>",
            f"<details><summary>The rule</summary><p>{escape(RULE)}</p></details>",
            f"<p class=dim>Noise: {escape(_noise(results))}.</p>",
            _html_table(head, rows),
            f"<p class=dim>± is one standard deviation over seeds; ref. is "
            f"“{escape(study.reference)}”, compared seed by seed.</p>",
            *(_figure(name, png) for name, png in figures.items()),
            f"<h2>Learning rates</h2><ul>{lrs}</ul>",
        ],
        css=CSS,
    )


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join("<th>" + escape(cell) + "</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<h3>Table</h3><div class=scroll><table><tr>{top}</tr>{body}</table></div>"


def _figure(name: str, png: bytes) -> str:
    title = escape(FIGURE_TITLES[name])
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<h2>{title}</h2><figure><img alt="{title}" src="{source}"></figure>'


# ---------------------------------------------------------------------------- tasks


def with_tasks(
    results: Results, lab: Lab, tasks: Sequence[str], data_dir: Path, out: Path
) -> Results:
    """The same with the accuracies of the models of seed 0, in %."""
    from spiralformer.evaluate.run import Options, evaluate_folders

    bench = Bench(results.study, results.data, data_identity(results.data))
    models = {
        row.id: folder
        for row, seed, run in bench.rows(results.tuned)
        if seed == 0 and (folder := lab.model(run)) is not None
    }
    options = Options(tasks=tasks, data_dir=data_dir, out=out)
    made = evaluate_folders(list(models.values()), options) if models else []
    scores = {}
    for row, evaluation in zip(models, made, strict=True):
        asked = [(t, k) for t in options.task_names for k in options.shots]
        found = {f"{t}, {k}-shot": evaluation.score(t, k) for t, k in asked}
        scores[row] = {
            name: 100 * score.value for name, score in found.items() if score is not None
        }
    return dataclasses.replace(results, tasks=scores)
