"""Measurements as a record, tables and a picture."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from spiralformer.bench.peers import PEER
from spiralformer.bench.timing import Measurement
from spiralformer.console import cpu_name, escape, markdown_table
from spiralformer.errors import UserError
from spiralformer.files import read_record, write_json, write_text

Group = Sequence[Measurement]
COLOURS = {
    PEER: "GREY",
    "baseline": "BLACK",
    "looped": "BLUE",
    "spiral-b": "ORANGE",
    "spiral-b parallel": "YELLOW",
    "spiral-l": "GREEN",
}


# ---------------------------------------------------------------------------- the record


def save(folder: Path, benchmark: str, command: str, measurements: Group) -> Path:
    """What was measured, by what command, on what machine; every run is kept."""
    path = folder / f"bench-{benchmark}.json"
    record = {"command": command, **machine(), "measurements": [asdict(m) for m in measurements]}
    write_json(path, record)
    return path


class BenchRecord(TypedDict):
    """The contents of a record."""

    command: str
    cpu: str
    cpu_capability: str
    threads: int
    python: str
    torch: str
    transformers: str
    measurements: list[Measurement]


def read(folder: Path) -> dict[str, BenchRecord]:
    """The records of a folder, by benchmark."""
    records = {}
    for path in sorted(folder.glob("bench-*.json")):
        try:
            record = read_record(path, BenchRecord)
            _require_whole(record["measurements"], path)
        except UserError as error:
            raise UserError(f"{error}; remove it, or choose another --out") from None
        records[path.stem.removeprefix("bench-")] = record
    return records


def _require_whole(measurements: Group, path: Path) -> None:
    """Each measured in one of two ways, and beside the peer where one is measured against it."""
    for group in groups(measurements):
        models, kinds = {m.model for m in group}, {bool(m.seconds) for m in group}
        if not models <= COLOURS.keys() or not (PEER in models or by_length(group)):
            raise UserError(f"{path}: {group[0].setting}: unknown models, or none of {PEER}")
        if len(kinds) > 1 or any(not m.tokens if m.seconds else not m.bytes for m in group):
            raise UserError(f"{path}: {group[0].setting}: times or bytes are missing")
        if by_length(group) and len({(m.label, m.length) for m in group}) != len(
            {m.label for m in group}
        ) * len({m.length for m in group}):
            raise UserError(f"{path}: {group[0].setting}: lengths are missing")


def machine() -> dict[str, Any]:
    import torch
    import transformers

    return {
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


# ---------------------------------------------------------------------------- tables


def groups(measurements: Iterable[Measurement]) -> list[list[Measurement]]:
    """Those that were measured beside each other."""
    beside: dict[tuple[str, str], list[Measurement]] = {}
    for m in measurements:
        beside.setdefault((m.setting, m.dtype), []).append(m)
    return list(beside.values())


def by_length(group: Group) -> bool:
    return len({m.length for m in group}) > 1


def rows(group: Group) -> tuple[list[str], list[list[str]]]:
    """The header and rows of a group's table: memory, speeds by length, or speeds."""
    peer = next((m for m in group if m.model == PEER), group[0])
    if group[0].bytes:
        return ["", "MiB", "÷ hf"], [
            [m.label, f"{m.bytes / 2**20:,.1f}", f"{m.bytes / peer.bytes:.2f}"] for m in group
        ]
    if by_length(group):
        lengths = sorted({m.length for m in group})
        speeds = {(m.label, m.length): f"{m.median:,.1f}" for m in group}
        return ["tokens/s", *(f"{length:,}" for length in lengths)], [
            [label, *(speeds[label, length] for length in lengths)]
            for label in dict.fromkeys(m.label for m in group)
        ]
    return ["tokens/s", "median", "best", "÷ hf", "runs"], [
        [
            m.label,
            f"{m.median:,.1f}",
            f"{m.best:,.1f}",
            f"{m.median / peer.median:.2f}",
            str(len(m.seconds)),
        ]
        for m in group
    ]


def write_tables(folder: Path) -> Path:
    """All records of a folder as one document."""
    parts = []
    for benchmark, record in read(folder).items():
        made = (
            f"{record['command']} on {record['cpu']}, {record['threads']} threads, "
            f"PyTorch {record['torch']}, transformers {record['transformers']}"
        )
        parts.append(f"## {escape(benchmark)}\n\n{escape(made)}\n")
        for group in groups(record["measurements"]):
            setting = escape(f"{group[0].setting}, {group[0].dtype}")
            parts.append(f"{setting}\n\n{markdown_table(*rows(group))}")
    path = folder / "table.md"
    write_text(path, "\n".join(parts))
    return path


# ---------------------------------------------------------------------------- the picture


def draw(folder: Path) -> Path | None:
    """Speeds: bars to the median with a dot at the best; by length, lines."""
    from spiralformer import plots

    records = read(folder).values()
    timed = [g for r in records for g in groups(m for m in r["measurements"] if m.seconds)]
    if not timed:
        return None
    colours = {model: getattr(plots, name) for model, name in COLOURS.items()}

    def bars(axes: Any, group: Group) -> None:
        places, inks = range(len(group)), [colours[m.model] for m in group]
        axes.barh(places, [m.median for m in group], color=inks, height=0.7)
        axes.scatter([m.best for m in group], places, color=inks, s=9)
        axes.set_yticks(places, [m.label for m in group])
        axes.invert_yaxis()
        axes.set_xlabel("tokens/s")

    def lines(axes: Any, group: Group) -> None:
        for label in dict.fromkeys(m.label for m in group):
            points = [m for m in group if m.label == label]
            lengths, speeds = [m.length for m in points], [m.median for m in points]
            ink = colours[points[0].model]
            axes.loglog(lengths, speeds, "o-", color=ink, label=label, markersize=3)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens")
        axes.set_ylabel("tokens/s")
        axes.legend()

    with plots.style():
        height = -(-len(timed) // 2)
        figure = plots.new_figure(9, 2.6 * height)
        panels = list(figure.subplots(height, 2, squeeze=False).flat)
        for axes, group in zip(panels, timed, strict=False):
            (lines if by_length(group) else bars)(axes, group)
            axes.set_title(f"{group[0].setting}, {group[0].dtype}")
        for axes in panels[len(timed) :]:
            axes.set_axis_off()
        return plots.save(figure, folder / "bench.png")
