"""What a study writes from its records: table.md, table.csv, figures and one page. Every one of
them opens with the finding; the same records give the same bytes."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from spiralformer import paper, presets
from spiralformer.console import count, escape, markdown_table, table
from spiralformer.files import read_text, write_bytes, write_text
from spiralformer.study.figures import CAPTIONS, draw
from spiralformer.study.records import FILE, Records, RowRecord
from spiralformer.study.stats import RULE, finding, measured, noise_of, paired, power, verdicts

Column = tuple[str, Callable[[RowRecord], str]]
Cells = tuple[list[str], list[list[str]]]
UNDER = "± is one standard deviation over seeds. Ref. is “{}”, compared seed by seed."


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
        ("training FLOPs", lambda r: f"{r.spent:.3g}" if r.runs else ""),
        ("FLOPs vs ref.", lambda r: _flops_against(r, base(r))),
        ("LR", lambda r: f"{r.runs[0].lr:.2g}" if r.runs else ""),
        ("seeds", lambda r: str(len(r.runs))),
        (records.unit, _loss),
        ("Δ vs ref.", lambda r: _loss_against(r, base(r))),
    ]
    if any(map(_in_the_paper, rows)):
        columns.append(("Pile perplexity in the paper", _in_the_paper))
    return columns


def _loss(row: RowRecord) -> str:
    failed = f"{len(row.failures)} failed" if row.failures else ""
    if not row.runs:
        return failed or "not run"
    spread = f" ± {row.spread:.4f}" if len(row.runs) > 1 else ""
    return f"{row.mean:.4f}{spread}" + (f" ({failed})" if failed else "")


def _flops_against(row: RowRecord, base: RowRecord | None) -> str:
    return f"{100 * (row.flops / base.flops - 1):+.1f} %" if base else ""


def _loss_against(row: RowRecord, base: RowRecord | None) -> str:
    differences = paired([(row, base)]) if base else []
    return f"{sum(differences) / len(differences):+.4f}" if differences else ""


def _in_the_paper(row: RowRecord) -> str:
    names = {size: row.paper.format(size) for size in presets.SIZES}
    qualities = {name: printed.quality for name, printed in paper.TABLE_1.items()} | paper.TABLE_2
    known = {size: qualities[name].pile for size, name in names.items() if name in qualities}
    return ", ".join(f"{value:g} ({size})" for size, value in known.items())


def cells(records: Records) -> Cells:
    columns = _columns(records)
    return [head for head, _ in columns], [[cell(r) for _, cell in columns] for r in records.rows]


def verdict_cells(records: Records) -> Cells:
    head = ["claim", "source", "verdict", f"difference, {records.unit}", "95 % interval"]
    head += ["detectable", "seed by seed"]
    rows = []
    for verdict in verdicts(records):
        word = f"{verdict.word}: {verdict.why}" if verdict.why else verdict.word
        numbers = verdict.estimate.in_words() if verdict.estimate else ("", "", "")
        seeds = ", ".join(f"{difference:+.4f}" for difference in verdict.differences)
        rows.append([verdict.says, verdict.claim.source, word, *numbers, seeds])
    return head, rows


def power_cells(records: Records) -> Cells:
    head = [records.seen, "gap", "spread of pairs", "standard error", "gap ÷ error", "seeds needed"]
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


def sweep_cells(records: Records) -> Cells:
    """Validation losses in nats by family and learning rate."""
    rates = sorted({lr for sweep in records.sweeps.values() for lr, _ in sweep.tried})
    rows = []
    for family, sweep in records.sweeps.items():
        losses = {lr: "failed" if loss is None else f"{loss:.4f}" for lr, loss in sweep.tried}
        chosen = "" if sweep.chosen is None else f"{sweep.chosen:.3g}"
        chosen += "" if sweep.bracketed else " (not bracketed)"
        rows.append([family, *(losses.get(lr, "") for lr in rates), chosen.strip()])
    return ["nats/token at", *(f"{lr:.3g}" for lr in rates), "chosen"], rows


def sections(records: Records) -> dict[str, Cells]:
    """The tables below the first, by heading."""
    made = {"Budgets": power_cells(records)} if records.figure == "power" else {}
    made |= {"Verdicts": verdict_cells(records)} if records.claims else {}
    return {**made, "Learning rates": sweep_cells(records)}


def notes(records: Records) -> list[str]:
    """What a reader must know beside the tables."""
    noise = noise_of(records.rows)
    made = [
        f"{row.id}, seed {seed} failed: {reason}"
        for row in records.rows
        for seed, reason in row.failures.items()
    ]
    if records.unfinished:
        made.append(f"{count(records.unfinished, 'run')} not finished")
    hours = sum(run.seconds for run in records.runs) / 3600
    made += [
        *([f"command: {records.command}"] if records.command else []),
        f"code: {'; '.join(sorted({run.code for run in records.runs}))}",
        f"machine: {records.machine}; the runs of the table took {hours:.2f} hours",
    ]
    if noise:
        freedom = count(noise.freedom, "degree of freedom", "degrees of freedom")
        made.append(f"noise of a run: σ = {noise.sigma:.4f} {records.unit}, {freedom}")
    return [*made, f"the rule: {RULE}"] if records.claims else made


def markdown(records: Records) -> str:
    pictures = [f"![{CAPTIONS[name]}]({name}.png)\n" for name in (records.figure, "curves")]
    parts = [
        f"# {escape(records.title)}\n",
        f"**{escape(finding(records))}**\n",
        pictures[0],
        markdown_table(*cells(records), left=2),
        escape(UNDER.format(records.reference)) + "\n",
        f"{escape(records.about)}\n\n{escape(records.setting)}\n",
    ]
    for heading, content in sections(records).items():
        parts += [f"## {heading}\n", markdown_table(*content, left=3)]
    parts += [
        "## Notes\n",
        "\n".join(f"- {escape(note)}" for note in notes(records)) + "\n",
        pictures[1],
    ]
    return "\n".join(parts)


def for_terminal(records: Records) -> str:
    head, rows = cells(records)
    wanted = ("training FLOPs", "LR", "seeds", records.unit, "Δ vs ref.")
    shown = [k for k, name in enumerate(head) if k == 0 or name in wanted]
    content = [[row[k] for k in shown] for row in rows]
    lines = [finding(records), "", table([head[k] for k in shown], content)]
    if records.figure == "power":
        lines.append(table(*power_cells(records), left=0))
    lines += [f"{v.word:>10}  {v.says}: {measured(v, records.unit)}" for v in verdicts(records)]
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
        "table.md": markdown(records).encode(),
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
        sections=sections(records),
        notes=notes(records),
    )


# ---------------------------------------------------------------------------- the README

MARKS = "<!-- results -->\n", "<!-- /results -->\n"


def findings(results: Path) -> str:
    """What the studies found whose records lie in `results`: the main one with its picture, the
    others in a line each."""
    parts = list[str]()
    for file in sorted(results.glob(f"*/{FILE}")):
        records, folder = Records.read(file.parent), quote(file.parent.as_posix())
        line = f"[{escape(records.title)}]({folder}/table.md): {escape(finding(records))}\n"
        if file.parent.name == "main":
            figure = records.figure
            parts.insert(0, f"{line}\n![{CAPTIONS[figure]}]({folder}/{figure}.png)\n\n")
        else:
            parts.append(f"- {line}")
    return "".join(parts)


def update_readme(readme: Path, results: Path) -> bool:
    """Writes the findings between the marks; whether there are any."""
    before, begin, rest = read_text(readme).partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        return False
    write_text(readme, f"{before}{begin}{findings(results)}{end}{after}")
    return True
