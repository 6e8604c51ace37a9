"""What the paper printed: Tables 1, 2 and 3, by preset name, digit for digit (assets/table*.csv).

Nothing here is computed; `accounting` reproduces the counted columns of Table 1, `evaluate` prints
the measured ones next to ours. Two oddities of the paper are kept as they stand: Table 3 has no row
for spiral-l-1b-mesh, and its averages for pythia-1.4b-mesh (50.67, 53.23) are not those of Table 1
(50.21, 53.12).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
TASKS = ("LD-O", "LD-S", "HS", "PQ", "WG", "ARC-E", "ARC-C", "SciQ", "MMLU")  # order of Table 3


@dataclass(frozen=True)
class Quality:
    """The measured columns: perplexities and average accuracies in %."""

    pile: float
    wiki: float
    lambada_openai: float
    lambada_standard: float
    zero_shot: float
    five_shot: float


@dataclass(frozen=True)
class Table1Row:
    """One row of Table 1."""

    total_params: float  # millions
    non_embedding_params: float  # millions
    flops: float  # 1e12, of a prefill of 4096 tokens
    quality: Quality


@dataclass(frozen=True)
class Table3Row:
    """One row of Table 3: accuracies in %, one per entry of TASKS, and their printed average."""

    tasks: tuple[float, ...]
    average: float


def _rows(table: int) -> list[tuple[str, list[float]]]:
    with open(ASSETS / f"table{table}.csv", encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return [(name, [float(cell) for cell in cells]) for name, *cells in rows]


TABLE_1: dict[str, Table1Row] = {
    name: Table1Row(total, non_embedding, flops, Quality(*quality))
    for name, (total, non_embedding, flops, *quality) in _rows(1)
}
TABLE_2: dict[str, Quality] = {name: Quality(*cells) for name, cells in _rows(2)}
TABLE_3: dict[tuple[str, int], Table3Row] = {
    (name, int(shots)): Table3Row(tuple(accuracies), average)
    for name, (shots, *accuracies, average) in _rows(3)
}
