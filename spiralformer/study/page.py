"""What a study writes from its records: table.md, table.csv, figures and one page. Every one of
them opens with the finding; the same records give the same bytes."""

from __future__ import annotations

import base64
import csv
import io
import math
from collections.abc import Callable
from pathlib import Path

from spiralformer.console import count, markdown_table, table
from spiralformer.files import write_bytes
from spiralformer.study.figures import draw, paper_quality
from spiralformer.study.records import Records, RowRecord
from spiralformer.study.stats import RULE, finding, noise_of, paired, power, verdicts

CAPTIONS = {
    "families": "Loss against training compute, and the difference to the reference",
    "recurrence": "Loss against recurrence ratio",
    "scaling": "Scaling, beside the paper’s",
    "schedule": "Loss of the schedules",
    "power": "The gap of each budget",
    "curves": "The runs by what they saw, what they cost and how long they took",
    "sweep": "Sweeps of the learning rate",
}
Column = tuple[str, Callable[[RowRecord], str]]


# ---------------------------------------------------------------------------- the table


def _columns(records: Records) -> list[Column]:
    """The columns that this study has something to say in."""
    rows, base = records.rows, records.reference_of
    labels = [row.label for row in rows]
    columns: list[Column] = [
        ("model", lambda r: r.label),
        ("layout", lambda r: f"{r.layout} {r.topology}".removesuffix(" none")),
    ]
    if len(set(labels)) < len(labels):
        columns.insert(0, ("row", lambda r: r.id))
    if any(row.core is not None for row in rows):
        columns.append(("ratio", lambda r: "" if r.core is None else f"{100 * r.core:.0f} %"))
    columns += [
        ("params (M)", lambda r: f"{r.parameters / 1e6:.3f}"),
        ("non-emb.", lambda r: f"{r.non_embedding / 1e6:.3f}"),
        ("training FLOPs", lambda r: _number(r.spent, ".3g")),
        ("FLOPs vs ref.", lambda r: _percent(r.flops, base(r))),
        ("LR", lambda r: f"{r.runs[0].lr:.2g}" if r.runs else ""),
        ("seeds", lambda r: str(len(r.runs))),
        (records.unit, _loss),
        ("Δ vs ref.", lambda r: _number(_difference(r, base(r)), "+.4f")),
    ]
    if any(map(paper_quality, rows)):
        columns.append(("Pile perplexity in the paper", _papers))
    return columns


def _difference(row: RowRecord, base: RowRecord | None) -> float:
    differences = paired([(row, base)]) if base else []
    return sum(differences) / len(differences) if differences else math.nan


def _loss(row: RowRecord) -> str:
    failed = next(iter(row.failures.values()), "")
    if not row.runs:
        return f"failed: {failed}" if failed else "not run"
    spread = "" if math.isnan(row.spread) else f" ± {row.spread:.4f}"
    return f"{row.mean:.4f}{spread}" + (f" ({len(row.failures)} failed)" if failed else "")


def _percent(value: float, base: RowRecord | None) -> str:
    return "" if base is None else f"{100 * (value / base.flops - 1):+.1f} %"


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def _papers(row: RowRecord) -> str:
    return ", ".join(f"{value:g} ({size})" for size, value in paper_quality(row).items())


def cells(records: Records) -> tuple[list[str], list[list[str]]]:
    columns = _columns(records)
    return [head for head, _ in columns], [[cell(r) for _, cell in columns] for r in records.rows]


def verdict_cells(records: Records) -> tuple[list[str], list[list[str]]]:
    head = ["claim", "source", "verdict", "measured", "seed by seed"]
    return head, [
        [
            verdict.says,
            verdict.claim.source,
            verdict.word,
            verdict.why,
            ", ".join(f"{d:+.4f}" for d in verdict.differences),
        ]
        for verdict in verdicts(records)
    ]


def power_cells(records: Records) -> tuple[list[str], list[list[str]]]:
    head = ["tokens", "gap", "spread of pairs", "standard error", "gap ÷ error", "seeds needed"]
    return head, [
        [
            f"{budget.row.runs[0].tokens:,}",
            f"{budget.gap:+.4f}",
            f"{budget.spread:.4f}",
            f"{budget.error:.4f}",
            f"{abs(budget.gap) / budget.error:.1f}" if budget.error else "",
            str(budget.seeds_needed),
        ]
        for budget in power(records)
    ]


def notes(records: Records) -> list[str]:
    """What a reader must know beside the table."""
    noise = noise_of(records.rows)
    made = [
        f"{row.id}, seed {seed} failed: {reason}"
        for row in records.rows
        for seed, reason in row.failures.items()
    ]
    if records.unfinished:
        made.append(f"{count(records.unfinished, 'run')} not finished")
    versions = sorted({run.code for row in records.rows for run in row.runs})
    made.append(f"made by {'; '.join(versions)}")
    made.append(f"on {records.machine}, {records.hours:.2f} hours of training")
    if noise:
        freedom = count(noise.freedom, "degree of freedom", "degrees of freedom")
        made.append(f"noise of a run: σ = {noise.sigma:.4f} {records.unit}, {freedom}")
    made += [f"learning rate of {f}: {sweep.says()}" for f, sweep in records.sweeps.items()]
    return made


UNDER = "± is one standard deviation over seeds. Ref. is “{}”, compared seed by seed."


def markdown(records: Records, figures: list[str]) -> str:
    picture = lambda name: f"![{CAPTIONS[name.removesuffix('.png')]}]({name})\n"
    parts = [
        f"# {records.title}\n",
        f"**{finding(records)}**\n",
        picture(figures[0]),
        markdown_table(*cells(records), left=2),
        UNDER.format(records.reference) + "\n",
        f"{records.about}\n\n{records.setting}\n",
    ]
    if records.figure == "power":
        parts += ["## Budgets\n", markdown_table(*power_cells(records), left=0)]
    if records.claims:
        parts += ["## Verdicts\n", markdown_table(*verdict_cells(records), left=5), RULE + "\n"]
    parts += ["## Notes\n", "\n".join(f"- {note}" for note in notes(records)) + "\n"]
    return "\n".join([*parts, *map(picture, figures[1:])])


def for_terminal(records: Records) -> str:
    head, rows = cells(records)
    wanted = [k for k, name in enumerate(head) if name not in ("layout", "non-emb.")]
    wanted = [k for k in wanted if "paper" not in head[k]]
    shown = [[row[k] for k in wanted] for row in rows]
    lines = [finding(records), "", table([head[k] for k in wanted], shown)]
    if records.figure == "power":
        lines.append(table(*power_cells(records), left=0))
    lines += [f"{v.word:>10}  {v.says}: {v.why}" for v in verdicts(records)]
    return "\n".join(lines)


# ---------------------------------------------------------------------------- files


def write(records: Records, out: Path) -> list[Path]:
    """The records and all that is drawn from them."""
    return [records.write(out), *redraw(records, out)]


def redraw(records: Records, out: Path) -> list[Path]:
    figures = draw(records)
    rows = io.StringIO()
    head, body = cells(records)
    csv.writer(rows, lineterminator="\n").writerows([head, *body])
    contents = {
        "table.md": markdown(records, list(figures)).encode(),
        "table.csv": rows.getvalue().encode(),
        "report.html": html(records, figures).encode(),
        **figures,
    }
    for name, content in contents.items():
        write_bytes(out / name, content)
    return [out / name for name in contents]


def html(records: Records, figures: dict[str, bytes]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("spiralformer"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("study.html").render(
        records=records,
        finding=finding(records),
        figures=[
            (CAPTIONS[name.removesuffix(".png")], base64.b64encode(png).decode())
            for name, png in figures.items()
        ],
        table=cells(records),
        under=UNDER.format(records.reference),
        budgets=power_cells(records) if records.figure == "power" else None,
        verdicts=verdict_cells(records) if records.claims else None,
        rule=RULE,
        notes=notes(records),
    )
