"""What a benchmark found: measurements, and bars that hold or do not."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from spiralformer.bench.peers import PEER
from spiralformer.files import write_json, writing
from spiralformer.model_folder import read_json

TITLES = {
    PEER: "Hugging Face GPT-NeoX",
    "baseline": "our baseline",
    "looped": "LoopedFormer",
    "spiral-b": "SpiralFormer-B",
    "spiral-b parallel": "SpiralFormer-B, parallel",
    "spiral-l": "SpiralFormer-L",
}


@dataclass
class Bar:
    """A promise about a ratio, and what was measured."""

    name: str
    figure: float
    limit: float
    at_least: bool  # or at most

    @property
    def holds(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        return f"{verdict:<13} {self.figure:6.3f} {sign} {self.limit:.3f}  {self.name}"


@dataclass
class Results:
    benchmark: str
    settings: dict[str, Any] = field(default_factory=dict)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def summary(self) -> str:
        if not self.bars:
            return f"{self.benchmark}: measured"
        lines = [str(bar) for bar in self.bars]
        held = sum(bar.holds for bar in self.bars)
        return "\n".join([*lines, f"{self.benchmark}: {held} of {len(self.bars)} bars hold"])

    def save(self, folder: Path) -> Path:
        path = folder / f"bench-{self.benchmark}.json"
        bars = [{**asdict(bar), "holds": bar.holds} for bar in self.bars]
        found = {
            "benchmark": self.benchmark,
            "machine": machine(),
            "settings": self.settings,
            "measurements": self.measurements,
            "bars": bars,
        }
        with writing(path):
            write_json(path, found)
        return path


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The files that `save` wrote, by benchmark."""
    return {
        path.stem.removeprefix("bench-"): read_json(path)
        for path in sorted(folder.glob("bench-*.json"))
    }


def write_table(folder: Path) -> Path:
    """Speeds and all bars of a folder as two tables."""
    found = read(folder)
    lines = [
        *speeds(found),
        "",
        "| benchmark | bar | measured | wanted | |",
        "|---|---|---|---|---|",
    ]
    for name, one in found.items():
        for bar in one["bars"]:
            sign = "≥" if bar["at_least"] else "≤"
            verdict = "holds" if bar["holds"] else "**does not hold**"
            cells = (name, bar["name"], f"{bar['figure']:.3f}", f"{sign} {bar['limit']}", verdict)
            lines.append(f"| {' | '.join(cells)} |")
    path = folder / "table.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def speeds(found: dict[str, dict[str, Any]]) -> list[str]:
    """A Markdown table of speeds, each as a ratio to the peer's in the same run: the README's."""
    columns: dict[str, dict[str, float]] = {}
    for dtype in ("float32", "bfloat16"):
        rates: dict[str, float] = {}
        for m in found.get("decode", {}).get("measurements", ()):
            if m["dtype"] == dtype and m["shape"] == "batch 1":
                case = m["case"].split(",")[0]  # the better of eager and compiled
                rates[case] = max(rates.get(case, 0), m["tokens_per_second"])
        columns[f"decoding, {dtype}"] = rates
    for kind, name in (("train", "training step, float32"), ("prefill", "prompt, float32")):
        columns[name] = {
            m["case"]: 1 / m["seconds"]
            for m in found.get(kind, {}).get("measurements", ())
            if m.get("precision", m.get("dtype")) == "float32"
        }
    columns = {name: rates for name, rates in columns.items() if PEER in rates}
    cases = dict.fromkeys(case for rates in columns.values() for case in rates)
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for case in sorted(cases, key=list(TITLES).index):
        ratios = [
            f"{rates[case] / rates[PEER]:.2f}×" if case in rates else ""
            for rates in columns.values()
        ]
        lines.append(f"| {TITLES[case]} | {' | '.join(ratios)} |")
    return lines


def machine() -> dict[str, Any]:
    return {
        "device": _cpu_name(),  # benchmarks are of the CPU, whatever else there is
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
        return next(
            line.split(":", 1)[1].strip()
            for line in text.splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
