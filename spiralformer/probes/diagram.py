"""The configuration as a picture: which token reads which chunk, and where decoding runs the core.

An SVG that stands by itself; in the report a few lines of script let the reader choose the token
whose readings are traced.
"""

from __future__ import annotations

from typing import Any

from matplotlib.colors import to_hex, to_rgb

from spiralformer import plots
from spiralformer.config import Iteration, SpiralConfig
from spiralformer.console import count
from spiralformer.templates import render

TOPOLOGIES = {
    "none": "each update replaces the state",
    "anchor": "each update is added to the pre-loop state",
    "mesh": "MeSH: updates are written to and read from memory slots",
}


def svg(config: SpiralConfig) -> str:
    """The whole diagram."""
    coarsest = max((each.chunk for each in config.iterations), default=1)
    shown = min(max(16, 3 * coarsest + 8), 64)  # the coarsest chunks are written and read
    return render(
        "diagram.svg",
        config=config,
        layout=config.parsed_layout,
        topology=TOPOLOGIES.get(config.topology, f"topology {config.topology}"),
        tokens=range(shown),
        cell=26 if shown <= 32 else max(13, 832 // shown),
        traced=min(shown - 1, shown * 11 // 16),
        shades=[two_shades(colour) for colour in plots.shades(config.num_iterations)],
        reads=reads,
        members=members,
        passes=passes,
        describe=describe,
        count=count,
    )


def reads(iteration: Iteration, i: int) -> int | None:
    """The chunk whose latent token i reads, if any."""
    return iteration.chunk_of(i - iteration.shift) if i >= iteration.shift else None


def members(iteration: Iteration, j: int) -> tuple[int, int]:
    """The first and the last token of chunk j."""
    end = (j + 1) * iteration.chunk - iteration.offset
    return max(end - iteration.chunk, 0), end - 1


def passes(config: SpiralConfig, i: int) -> list[str]:
    """The iterations whose core runs when token i is decoded."""
    return [str(each.index) for each in config.iterations if each.triggers(i)]


def describe(config: SpiralConfig, i: int) -> str:
    """What token i reads, in words."""
    if not config.iterations:
        return f"Token {i} passes through every layer once."
    said = []
    for iteration in config.iterations:
        j = reads(iteration, i)
        if j is None:
            read = "nothing yet"
        elif members(iteration, j) == (i, i):
            read = "itself"
        else:
            first, last = members(iteration, j)
            span = f"token {last}" if first == last else f"tokens {first}–{last}"
            read = f"chunk {j} ({span})"
        said.append(f"{read} at iteration {iteration.index}")
    runs = passes(config, i)
    words = f"of iteration{'s' * (len(runs) > 1)} {', '.join(runs)}" if runs else "not at all"
    return f"Token {i} reads {', '.join(said)}. Decoding it runs the core {words}."


def two_shades(colour: Any) -> list[str]:
    """An iteration's colour, light enough for black text: chunks have them by turns."""
    red, green, blue = to_rgb(colour)
    return [to_hex((1 - k + k * red, 1 - k + k * green, 1 - k + k * blue)) for k in (0.5, 0.26)]
