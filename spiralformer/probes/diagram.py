"""The configuration as a picture: which token reads which chunk, and where decoding runs the core.

An SVG that stands by itself; in the report a few lines of script let the reader choose the token
whose readings are traced.
"""

from __future__ import annotations

from html import escape

import matplotlib
from matplotlib.colors import to_rgb

from spiralformer.config import Iteration, SpiralConfig

LEFT = 178  # for the names of the rows
ROW, GAP, BAR = 20, 20, 22  # heights
STYLE = """
text{font:11px system-ui,'DejaVu Sans',sans-serif;fill:#1a1a1a}
.name{font-weight:600}.small{fill:#555}.c{text-anchor:middle}
.link{display:none}.link.on{display:inline}
.link path{fill:none;stroke:#111;stroke-width:1.4}.link rect{fill:none;stroke:#111;stroke-width:1.6}
.column{fill:transparent;cursor:pointer}
""".strip()


def columns(config: SpiralConfig) -> int:
    """How many tokens are shown: enough for the coarsest chunks to be written and read."""
    coarsest = max((it.chunk for it in config.iterations), default=1)
    return min(max(16, 3 * coarsest + 8), 64)


def reads(it: Iteration, i: int) -> int | None:
    """The chunk whose latent token i reads, if any."""
    return it.chunk_of(i - it.shift) if i >= it.shift else None


def describe(config: SpiralConfig, i: int) -> str:
    """What token i reads, in words."""
    if not config.iterations:
        return f"Token {i} passes through every layer once."
    said = []
    for it in config.iterations:
        j = reads(it, i)
        if j is None:
            read = "nothing yet"
        elif _members(it, j) == (i, i):
            read = "itself"
        else:
            first, last = _members(it, j)
            span = f"token {last}" if first == last else f"tokens {first}–{last}"
            read = f"chunk {j} ({span})"
        said.append(f"{read} at iteration {it.index}")
    passes = [str(it.index) for it in config.iterations if it.triggers(i)]
    words = f"of iteration{'s' * (len(passes) > 1)} {', '.join(passes)}" if passes else "not at all"
    return f"Token {i} reads {', '.join(said)}. Decoding it runs the core {words}."


def svg(config: SpiralConfig) -> str:
    """The whole diagram."""
    shown = columns(config)
    cell = 26 if shown <= 32 else max(13, 832 // shown)
    width = LEFT + shown * cell + 12
    parts: list[str] = []
    y = 16
    for i in range(0, shown, 1 if cell >= 20 else 4):
        parts.append(_text(LEFT + (i + 0.5) * cell, y, str(i), "c small"))
    parts.append(_text(0, y, "token", "name"))
    y += 10
    layout = config.parsed_layout
    if layout.pre:
        word = "pre" if config.iterations else "no loop"
        y = _bar(parts, y, width, word, f"{_layers(layout.pre)} on every token")
    example = min(shown - 1, shown * 11 // 16)
    links: dict[int, list[str]] = {i: [] for i in range(shown)}
    count = max(config.num_iterations, 2)
    for it in config.iterations:
        colour = to_rgb(matplotlib.colormaps["viridis"](0.08 + 0.74 * it.index / (count - 1)))
        y = _iteration(parts, links, y, it, shown, cell, colour)
    if config.iterations:
        y = _topology(parts, y, config)
        if layout.post:
            y = _bar(parts, y, width, "post", f"{_layers(layout.post)} on every token")
        y = _passes(parts, y, config, shown, cell)
    height = y + 6
    for i, drawn in links.items():
        outline = f'<rect x="{LEFT + i * cell}" y="22" width="{cell}" height="{height - 26}"/>'
        on = " on" * (i == example)
        parts.append(f'<g class="link{on}" data-i="{i}">{outline}{"".join(drawn)}</g>')
    for i in range(shown):
        spot = f'x="{LEFT + i * cell}" y="0" width="{cell}" height="{height}"'
        said = escape(describe(config, i))
        parts.append(f'<rect class="column" data-i="{i}" {spot}><title>{said}</title></rect>')
    title = escape(f"Layout {config.layout}: which token reads which chunk at which iteration")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{title}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>"
    )


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def _members(it: Iteration, j: int) -> tuple[int, int]:
    return max(j * it.chunk - it.offset, 0), (j + 1) * it.chunk - it.offset - 1


def _iteration(
    parts: list[str],
    links: dict[int, list[str]],
    y: int,
    it: Iteration,
    shown: int,
    cell: int,
    colour: tuple[float, float, float],
) -> int:
    """Chunks above, what each token reads below; a dot marks where a chunk completes."""
    y += 12
    below = y + ROW + GAP
    parts.append(_text(0, y + 14, f"iteration {it.index} at {it.resolution}", "name"))
    parts.append(_text(LEFT - 10, y + 14, "chunks", "small", "end"))
    parts.append(_text(0, y + 29, f"g={it.chunk}  ω={it.offset}  s={it.shift}", "small"))
    parts.append(_text(0, below + 14, f"core: {_layers(it.layers)}", "small"))
    parts.append(_text(LEFT - 10, below + 14, "reads", "small", "end"))
    for j in range(it.chunk_of(shown - 1) + 1):
        first, last = _members(it, j)
        x, span = LEFT + first * cell, min(last + 1, shown) - first
        parts.append(_cell(x, y, span * cell, _shade(colour, j), whole=last < shown))
        middle = x + span * cell / 2 - (5 if it.chunk > 1 else 0)
        if last < shown and (span > 1 or it.chunk == 1):
            parts.append(_text(middle, y + 14, str(j), "c"))
        if it.triggers(last) and last < shown and it.chunk > 1:
            parts.append(f'<circle cx="{LEFT + (last + 0.5) * cell}" cy="{y + 10}" r="3.6"/>')
    for i in range(shown):
        source = reads(it, i)
        x = LEFT + i * cell
        if source is None:
            parts.append(_text(x + cell / 2, below + 14, "–", "c small"))
            continue
        parts.append(_cell(x, below, cell, _shade(colour, source)))
        if cell >= 13:
            parts.append(_text(x + cell / 2, below + 14, str(source), "c"))
        first, last = _members(it, source)
        start, end = LEFT + (first + last + 1) / 2 * cell, x + cell / 2
        bend = f"C{start} {y + ROW + 14} {end} {below - 14} {end} {below}"
        box = f'<rect x="{LEFT + first * cell}" y="{y}" width="{(last - first + 1) * cell}"'
        links[i].append(f'{box} height="{ROW}"/><path d="M{start} {y + ROW}{bend}"/>')
    return below + ROW


def _topology(parts: list[str], y: int, config: SpiralConfig) -> int:
    words = {
        "none": "each update replaces the state",
        "anchor": "each update is added to the pre-loop state",
        "mesh": f"MeSH: updates are written to and read from {config.mesh_slots} slots",
    }
    parts.append(_text(0, y + 22, words[config.topology], "small"))
    return y + 26


def _passes(parts: list[str], y: int, config: SpiralConfig, shown: int, cell: int) -> int:
    """Core passes that decoding makes at each token."""
    y += 12
    parts.append(_text(0, y + 14, "core passes", "name"))
    parts.append(_text(0, y + 29, "when decoding this token", "small"))
    for i in range(shown):
        count = sum(it.triggers(i) for it in config.iterations)
        for k in range(count):
            spot = f'cx="{LEFT + (i + 0.5) * cell}" cy="{y + 8 + 9 * k}"'
            parts.append(f'<circle {spot} r="3.6"/>')
    most = max(sum(it.triggers(i) for it in config.iterations) for i in range(shown))
    return y + max(32, 9 * most + 8)


def _bar(parts: list[str], y: int, width: int, name: str, words: str) -> int:
    y += 8
    parts.append(_text(0, y + 15, name, "name"))
    spot = f'x="{LEFT}" y="{y}" width="{width - LEFT - 12}" height="{BAR}"'
    parts.append(f'<rect {spot} rx="3" fill="#e4e4e4"/>')
    parts.append(_text(LEFT + 8, y + 15, words))
    return y + BAR


def _cell(x: float, y: float, width: float, fill: str, whole: bool = True) -> str:
    dashes = "" if whole else ' stroke-dasharray="3 2"'
    fill = fill if whole else "none"
    spot = f'x="{x + 0.5}" y="{y}" width="{width - 1}" height="{ROW}"'
    return f'<rect {spot} rx="2" fill="{fill}" stroke="#777" stroke-width="0.6"{dashes}/>'


def _shade(colour: tuple[float, float, float], j: int) -> str:
    """The iteration's colour, light enough for black text, in two shades by turns."""
    strength = 0.26 if j % 2 else 0.5
    mixed = [round(255 * (1 - strength + strength * part)) for part in colour]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    extra = f' class="{kind}"' * bool(kind) + f' text-anchor="{anchor}"' * bool(anchor)
    return f'<text x="{x:g}" y="{y:g}"{extra}>{escape(words)}</text>'
