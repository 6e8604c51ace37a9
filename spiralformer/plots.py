"""One style for every picture: colours, sizes, and files that are the same each time."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spiralformer.files import write_bytes

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
PURPLE, SKY, YELLOW, BLACK = "#CC79A7", "#56B4E9", "#E69F00", "#222222"
FAMILIES = {  # colour and marker: told apart in grey too
    "baseline": (BLACK, "o"),
    "baseline-mesh": (GREY, "D"),
    "looped-anchor": (SKY, "v"),
    "looped-mesh": (BLUE, "s"),
    "spiral-b-anchor": (YELLOW, "P"),
    "spiral-b-mesh": (ORANGE, "^"),
    "spiral-l-anchor": (PURPLE, "X"),
    "spiral-l-mesh": (GREEN, "*"),
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.edgecolor": "#444444",
    "legend.frameon": False,
    "svg.hashsalt": "spiralformer",
    "svg.fonttype": "path",
}
DPI = 200


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Inside, matplotlib draws our way, whatever the user's own settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(width: float, height: float) -> Figure:
    """Inches. Make and fill it inside `style()`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def shades(count: int) -> list[Any]:
    """A colour for each iteration of a loop, coarse to fine."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0.08, 0.82, max(count, 2))))[:count]


def to_bytes(figure: Figure, kind: str) -> bytes:
    """A PNG or SVG file."""
    with style():
        buffer = io.BytesIO()
        nothing = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=nothing)
    return _renumber(buffer.getvalue()) if kind == "svg" else buffer.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    write_bytes(path, to_bytes(figure, path.suffix.removeprefix(".")))
    return path


def _renumber(svg: bytes) -> bytes:
    """Clip paths numbered as they come. Matplotlib names them by a hash of every bit of their
    place, and the last bits of a layout are not always the same."""
    names: dict[bytes, bytes] = {}
    return re.sub(
        rb"\bp[0-9a-f]{10}\b",
        lambda match: names.setdefault(match[0], b"clip%d" % len(names)),
        svg,
    )
