"""One HTML page with everything in it: verdict, diagram, figures, numbers. No network is needed."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from spiralformer.probes import diagram, verdict
from spiralformer.probes.collect import TOKENS_SEEN
from spiralformer.probes.figures import DRAWINGS, Drawing, panels, write_figures
from spiralformer.probes.findings import METRICS, NUMBERS, Findings, Numbers
from spiralformer.probes.metrics import window

REPORT = "report.html"
DIAGRAM = "diagram"  # .svg; of a control, diagram-2.svg
PAPERS = ("shift-dynamic", "shift-all", "heads")

CSS = """
:root{color-scheme:light;--line:#d9d9d9;--soft:#f5f6f7;--ink:#1a1a1a;--dim:#595959}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px clamp(12px,3vw,40px) 60px;max-width:1320px;color:var(--ink);
 background:#fff;font:15px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 4px}h2{font-size:1.2rem;margin:40px 0 4px}
h3{font-size:1rem;margin:26px 0 4px}p{margin:6px 0;max-width:75ch}
code{font:.92em ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.dim{color:var(--dim)}.overall{font-size:1.1rem;font-weight:600;margin:4px 0 10px}
.note{border-left:4px solid #D55E00;background:#fdf3ec;padding:8px 14px;margin:14px 0}
.note ul{margin:0;padding-left:18px}
.models{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:18px}
.gallery{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:0 40px}
.card{border:1px solid var(--line);border-radius:8px;padding:14px 16px;min-width:0}
.card h3{margin-top:0}
dl{display:grid;grid-template-columns:auto 1fr;gap:8px 12px;margin:8px 0}
dt{grid-column:1}dd{grid-column:2;margin:0}
.chip{display:inline-block;min-width:5.6em;text-align:center;border-radius:99px;padding:1px 10px;
 font-weight:600;border:1.5px solid}
.yes{color:#00573f;background:#e3f4ee;border-color:#009E73}
.partly{color:#6b4e00;background:#fdf5dc;border-color:#E69F00}
.opposite,.no{color:#8a3b00;background:#fdf0e6;border-color:#D55E00}
.not,.geometry{color:#555;background:#f1f1f1;border-color:#aaa}
figure{margin:0;min-width:0}figure img{display:block;width:100%;height:auto}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}.scroll svg{display:block}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88rem;margin:8px 0}
th,td{padding:3px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}th{font-weight:600;vertical-align:bottom}
.tokens td,.tokens th{text-align:left;white-space:normal;vertical-align:top}
.tokens code{background:var(--soft);border:1px solid var(--line);border-radius:4px;padding:0 4px;
 margin:0 2px;white-space:pre;display:inline-block}
details{margin:8px 0}summary{cursor:pointer}
.told{min-height:3em}
@media print{body{padding:0;max-width:none}.card,figure{break-inside:avoid}}
""".strip()

SCRIPT = """
for (const box of document.querySelectorAll('.diagram')) {
  const told = box.querySelector('.told');
  const choose = (i) => {
    for (const g of box.querySelectorAll('.link')) g.classList.toggle('on', g.dataset.i === i);
    told.textContent = box.querySelector(`.column[data-i="${i}"] title`).textContent;
  };
  for (const column of box.querySelectorAll('.column'))
    for (const event of ['pointerenter', 'click'])
      column.addEventListener(event, () => choose(column.dataset.i));
  choose(box.querySelector('.link.on').dataset.i);
}
""".strip()


def write(numbers: Numbers, folder: Path) -> list[Path]:
    """The figures, the diagrams and the page; all from the numbers alone."""
    figures = folder / "figures"
    written = write_figures(numbers.models, figures)
    for k, found in enumerate(numbers.models):
        path = figures / f"{DIAGRAM}{'' if k == 0 else f'-{k + 1}'}.svg"
        path.write_text(diagram.svg(found.config) + "\n", "utf-8")
        written.append(path)
    page = folder / REPORT
    page.write_text(html(numbers, figures), "utf-8")
    return [*written, page]


def html(numbers: Numbers, figures: Path) -> str:
    """The page; `figures` is where `write_figures` wrote."""
    models = numbers.models
    title = "Probe of " + " and ".join(found.name for found in models)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=dim>Text: {escape(numbers.data)}. Local windows of {numbers.gamma} tokens at "
        f"full resolution.</p>",
        _notes(numbers),
        "<h2>Verdict</h2>",
        f"<div class=models>{''.join(map(_verdict_card, models))}</div>",
        "".join(
            f"<p>{escape(line)}</p>"
            for control in models[1:]
            for line in verdict.against_control(models[0], control)
        ),
        f"<details><summary>The rule</summary><p>{escape(verdict.RULE)}</p></details>",
        "<h2>The model as a diagram</h2>",
        "<p>Tokens run from left to right. At each iteration the upper row shows the chunks and "
        "the lower row, in the same shades, the chunk whose latent each token reads (– none yet). "
        "A dot marks the token that completes a chunk: there decoding runs the core; at full "
        "resolution it does so at every token. Point at a token to trace what it reads.</p>",
        "".join(_diagram(found) for found in models),
        "<h2>The paper’s figures</h2>",
        _figures([d for d in DRAWINGS if d.name in PAPERS], models, figures),
        "<h2>Beyond the paper</h2>",
        _figures([d for d in DRAWINGS if d.name not in PAPERS], models, figures),
        _tokens(models),
        "<h2>The numbers</h2>",
        *map(_table, models, [numbers.gamma] * len(models)),
        _inapplicable(models),
        f"<p class=dim>All numbers are in <code>{NUMBERS}</code> beside this page; "
        "<code>spiralformer probe --redraw DIR</code> draws everything again from it.</p>",
    ]
    return page(title, [*parts, f"<script>{SCRIPT}</script>"])


def page(title: str, parts: Sequence[str], css: str = "") -> str:
    """A whole page of these parts."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}{css}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _notes(numbers: Numbers) -> str:
    notes = list(numbers.notes)
    for found in numbers.models:
        notes += [f"{found.name}: {line}" for line in found.skipped]
    if not notes:
        return ""
    return f"<div class=note><ul>{''.join(f'<li>{escape(n)}</li>' for n in notes)}</ul></div>"


def _verdict_card(found: Findings) -> str:
    low, high = found.lengths
    tokens = f"{high:,}" if low == high else f"{low:,} to {high:,}"
    rows = []
    for judged in verdict.verdicts(found) if found.iterations else ():
        label = f"{verdict.TITLES[judged.metric]}, {judged.heads} heads"
        kind = judged.word.split()[0]
        rows.append(
            f'<dt><span class="chip {kind}">{judged.word}</span></dt>'
            f"<dd><b>{label}.</b> {escape(judged.sentence)}</dd>"
        )
    return (
        f"<section class=card><h3>{escape(found.name)}</h3>"
        f"<p class=dim><code>{escape(found.config.layout)}</code>, topology "
        f"{found.config.topology}, {found.parameters / 1e6:.3g} M parameters; "
        f"{found.sequences} sequence{'s' * (found.sequences != 1)} of {tokens} tokens; "
        f"loss {found.loss['mean']:.3f} ± {found.loss['error']:.3f}</p>"
        f"<p class=overall>{escape(verdict.overall(found))}</p>"
        f"<dl>{''.join(rows)}</dl></section>"
    )


def _diagram(found: Findings) -> str:
    return (
        f"<h3>{escape(found.name)} <code>{escape(found.config.layout)}</code></h3>"
        f"<div class=diagram><div class=scroll>{diagram.svg(found.config)}</div>"
        "<p class='told dim'></p></div>"
    )


def _figures(drawings: Sequence[Drawing], models: list[Findings], figures: Path) -> str:
    """Of one model, two figures to a row where there is room; of two models, one drawing."""
    kind = "gallery" if len(models) == 1 else ""
    shown = (_figure(drawing, models, figures) for drawing in drawings)
    return f'<div class="{kind}">{"".join(shown)}</div>'


def _figure(drawing: Drawing, models: list[Findings], figures: Path) -> str:
    """The drawing of each model in a figure of its own: side by side if wide, stacked if narrow."""
    shown = []
    for found, svg in panels(drawing, models, figures):
        alt = escape(f"{drawing.title}: {found.name}", quote=True)
        data = base64.b64encode(svg).decode()
        width = f'style="max-width:{132 * drawing.size[0]:.0f}px"'
        source = f"data:image/svg+xml;base64,{data}"
        shown.append(f'<figure><img {width} alt="{alt}" src="{source}"></figure>')
    if not shown:
        return ""
    return (
        f"<section><h3>{escape(drawing.title)}</h3><p class=dim>{escape(drawing.caption)}</p>"
        f"<div class=models>{''.join(shown)}</div></section>"
    )


def _tokens(models: list[Findings]) -> str:
    """The tokens that self-aggregation prefers and those it passes over."""
    blocks = []
    for found in models:
        rows = []
        for it, profile in zip(found.iterations, found.aggregation, strict=True):
            if profile is None or not profile["tokens"]:
                continue
            ranked = profile["tokens"]
            half = len(ranked) // 2
            high, low = (
                " ".join(
                    f"<code>{escape(_visible(text))}</code>{lift:.2f}" for text, lift, _ in part
                )
                for part in (ranked[:half], ranked[half:][::-1])
            )
            rows.append(f"<tr><td>{it.resolution}</td><td>{high}</td><td>{low}</td></tr>")
        if rows:
            blocks.append(
                f"<h3>What self-aggregation prefers: {escape(found.name)}</h3>"
                "<p class=dim>Tokens with the highest and the lowest mean weight in their chunk, "
                "as a multiple of an even share; of those that occurred at least "
                f"{TOKENS_SEEN} times.</p>"
                "<div class=scroll><table class=tokens><tr><th>at</th><th>most</th><th>least</th>"
                f"</tr>{''.join(rows)}</table></div>"
            )
    return "".join(blocks)


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"


def _table(found: Findings, gamma: int) -> str:
    if not found.iterations:
        return _plain_table(found)
    assert found.updates is not None
    assert found.lens is not None
    head = ["iteration", "g", "ω", "s", "n", "window"]
    head += [f"{s}\n{w}" for s in verdict.SYMBOLS.values() for w in ("all", "dynamic", "uniform")]
    head += ["update", "change", "cosine", "lens\nloss", "lens\nright", "settles\nhere"]
    rows = []
    for it in found.iterations:
        cells: list[str] = [f"{it.index} at {it.resolution}"]
        cells += map(str, (it.chunk, it.offset, it.shift, it.chunks(found.lengths[1])))
        cells.append(str(window(it.resolution, gamma)))
        for metric in METRICS:
            for heads in ("all", "dynamic"):
                values = found.heads(metric, heads)[it.index]
                cells.append(_number(values.mean() if values.size else np.nan))
            cells.append(_number(found.reference[metric][it.index]))
        cells += [_number(found.updates[k][it.index]) for k in ("size", "change", "cosine")]
        cells.append(_number(found.lens["loss"][it.index + 1]))
        cells += [_percent(found.lens[k][it.index + 1]) for k in ("accuracy", "settled")]
        rows.append(cells)
    before = [""] * len(head)
    before[0] = "before the loop"
    before[-3:] = [_number(found.lens["loss"][0])] + [
        _percent(found.lens[k][0]) for k in ("accuracy", "settled")
    ]
    return html_table(found.name, head, [before, *rows])


def _plain_table(found: Findings) -> str:
    rows = [
        [str(layer), *(_number(found.attention["pre"][m][layer].mean()) for m in METRICS)]
        for layer in range(len(found.attention["pre"][METRICS[0]]))
    ]
    return html_table(found.name, ["layer", *verdict.SYMBOLS.values()], rows)


def html_table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join("<th>" + escape(cell).replace("\n", "<br>") + "</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<h3>{escape(name)}</h3><div class=scroll><table><tr>{top}</tr>{body}</table></div>"


def _number(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.3f}"


def _percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{100 * value:.1f} %"


def inapplicable(found: Findings) -> list[str]:
    """Which figures this model has not, and what they would need."""
    return [
        f"{drawing.title}: needs {drawing.needs}"
        for drawing in DRAWINGS
        if not drawing.applies(found)
    ]


def _inapplicable(models: list[Findings]) -> str:
    blocks = []
    for found in models:
        lines = inapplicable(found)
        if lines:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            blocks.append(f"<h3>What does not apply to {escape(found.name)}</h3><ul>{items}</ul>")
    return "".join(blocks)
