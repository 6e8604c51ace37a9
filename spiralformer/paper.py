"""What the paper printed: Tables 1, 2 and 3, by preset name, digit for digit.

Nothing here is computed; `accounting` reproduces the counted columns of Table 1, `evaluate` prints
the measured ones next to ours. Two oddities of the paper are kept as they stand: Table 3 has no row
for spiral-l-1b-mesh, and its averages for pythia-1.4b-mesh (50.67, 53.23) are not those of Table 1
(50.21, 53.12).
"""

from __future__ import annotations

from dataclasses import dataclass

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


_TABLE_1 = """
#                      total non-emb  FLOPs    Pile   Wiki   LD-O    LD-S  0-shot 5-shot
pythia-160m            163.5    85.1   1.65   11.31  30.32  42.86  175.62   39.88  40.54
looped-160m-anchor     135.2    56.7   1.65   11.63  31.69  50.38  195.11   38.81  40.15
looped-160m-mesh       135.2    56.7   1.65   11.37  30.43  46.60  178.77   39.41  40.60
spiral-b-160m-mesh     135.2    56.8   1.48   11.29  30.27  43.27  155.78   39.73  41.02
spiral-l-160m-mesh     163.6    85.1   1.49   10.94  28.85  41.24  147.52   39.30  41.37
pythia-410m            407.4   302.3   4.59    9.07  21.79  19.48   65.86   43.87  45.31
looped-410m-anchor     306.7   201.5   4.59    9.19  22.12  20.37   52.55   43.70  45.68
looped-410m-mesh       306.7   201.6   4.59    9.09  21.84  19.63   42.51   44.12  45.56
spiral-b-410m-anchor   306.7   201.6   4.10    9.13  22.04  21.96   47.33   43.87  46.30
spiral-b-410m-mesh     306.8   201.6   4.11    9.00  21.48  19.11   39.78   44.31  46.75
spiral-l-410m-mesh     407.5   302.4   4.16    8.73  20.55  20.38   47.89   44.97  47.06
pythia-1b             1020.2   805.7   9.67    7.96  17.66  13.53   33.65   46.95  49.07
looped-1b-anchor       768.4   553.9   9.67    8.10  18.15  13.32   32.34   46.73  48.83
looped-1b-mesh         768.4   554.0   9.67    7.90  17.54  12.19   26.71   47.53  49.51
spiral-b-1b-mesh       768.6   554.1   8.95    7.80  17.21  11.96   25.55   48.14  50.25
spiral-l-1b-mesh      1020.4   805.9   8.96    7.64  16.73  11.94   23.90   48.97  51.83
pythia-1.4b           1423.0  1208.6  14.08    7.44  15.97  10.51   22.81   49.50  51.93
pythia-1.4b-mesh      1423.1  1208.7  14.08    7.26  15.25   9.46   16.31   50.21  53.12
looped-1.4b-anchor    1020.2   805.7  14.08    7.51  16.25  10.71   19.37   49.39  51.27
looped-1.4b-mesh      1020.2   805.8  14.08    7.39  15.84   9.72   19.39   50.56  52.79
spiral-b-1.4b-mesh    1020.4   805.9  12.92    7.30  15.61   9.06   15.30   51.48  53.22
spiral-l-1.4b-mesh    1423.2  1208.8  13.13    7.14  15.03   9.73   14.42   51.75  54.37
"""

_TABLE_2 = """
#                                   Pile   Wiki   LD-O   LD-S  0-shot 5-shot
spiral-b-410m-mesh                  9.00  21.48  19.11  39.78   44.31  46.75
spiral-b-410m-anchor                9.13  22.04  21.96  47.33   43.87  46.30
spiral-b-410m-mesh-fine-to-coarse   9.24  22.38  21.56  55.36   43.61  46.01
spiral-b-410m-mesh-parallel         9.10  21.86  20.91  52.37   43.53  45.70
spiral-b-410m-mesh-zero-offset      9.01  21.57  18.69  41.29   44.63  46.66
spiral-b-410m-mesh-mean             9.01  21.65  20.37  48.45   44.33  46.44
spiral-b-410m-mesh-uniform          9.03  21.73  19.88  44.25   44.22  46.14
spiral-b-410m-mesh-mean-uniform     9.03  21.64  20.13  48.86   43.97  45.40
"""

_TABLE_3 = """
#                    shot   LD-O  LD-S    HS    PQ    WG ARC-E ARC-C  SciQ  MMLU   Avg
pythia-160m             0  32.31 23.64 31.14 62.46 50.59 39.56 23.21 70.30 25.69 39.88
pythia-160m             5  27.11 24.22 31.38 62.95 50.67 42.21 22.53 78.20 25.55 40.54
looped-160m-anchor      0  30.04 21.11 30.93 60.39 51.14 38.13 23.81 68.30 25.40 38.81
looped-160m-anchor      5  26.16 21.23 31.44 61.15 50.75 41.71 23.04 80.20 25.70 40.15
looped-160m-mesh        0  31.32 21.48 31.02 60.66 53.43 39.06 22.27 69.70 25.73 39.41
looped-160m-mesh        5  26.43 21.00 31.48 60.72 51.93 42.93 23.04 81.90 26.00 40.60
spiral-b-160m-mesh      0  32.93 23.50 31.51 61.32 50.99 39.02 23.98 69.10 25.27 39.73
spiral-b-160m-mesh      5  27.07 22.65 31.87 62.19 52.25 42.51 23.46 81.10 26.07 41.02
spiral-l-160m-mesh      0  32.78 22.76 32.65 60.72 48.93 40.28 23.04 67.10 25.42 39.30
spiral-l-160m-mesh      5  27.52 22.34 32.81 61.70 51.07 44.36 23.72 82.70 26.09 41.37
pythia-410m             0  41.74 29.65 37.65 64.80 51.93 43.60 25.68 73.10 26.68 43.87
pythia-410m             5  35.59 28.92 38.01 67.19 50.36 50.08 25.43 85.20 27.03 45.31
looped-410m-anchor      0  41.45 31.24 36.82 64.09 52.80 43.14 23.72 73.60 26.39 43.70
looped-410m-anchor      5  36.56 30.06 37.13 65.62 51.30 49.24 25.43 88.80 26.94 45.68
looped-410m-mesh        0  41.92 32.33 37.27 64.20 53.83 42.30 25.09 73.50 26.66 44.12
looped-410m-mesh        5  36.25 31.71 38.00 65.40 51.22 49.37 24.49 87.00 26.93 45.56
spiral-b-410m-anchor    0  41.03 33.55 37.33 64.09 53.04 42.51 24.23 72.40 26.64 43.87
spiral-b-410m-anchor    5  36.13 32.74 38.07 65.72 52.09 50.46 26.11 88.10 27.30 46.30
spiral-b-410m-mesh      0  43.02 33.69 37.98 65.83 52.49 42.72 23.64 72.70 26.72 44.31
spiral-b-410m-mesh      5  38.95 35.94 39.00 65.56 52.96 49.50 23.46 88.10 27.29 46.75
spiral-l-410m-mesh      0  41.61 32.45 39.63 66.59 53.91 44.91 24.57 74.00 27.10 44.97
spiral-l-410m-mesh      5  37.28 32.89 40.00 66.05 51.14 52.65 26.11 89.80 27.63 47.06
pythia-1b               0  46.73 34.02 43.61 66.87 52.01 48.53 26.28 76.60 27.86 46.95
pythia-1b               5  40.60 34.41 43.98 68.44 52.33 54.46 28.75 89.90 28.71 49.07
looped-1b-anchor        0  46.17 34.68 42.62 67.68 53.51 46.80 25.26 75.90 27.99 46.73
looped-1b-anchor        5  39.92 32.89 43.26 69.15 53.12 55.05 27.22 90.00 28.83 48.83
looped-1b-mesh          0  48.40 36.95 44.36 67.03 52.01 46.93 26.54 77.60 27.91 47.53
looped-1b-mesh          5  42.62 34.87 44.68 67.95 52.96 55.14 27.22 91.40 28.71 49.51
spiral-b-1b-mesh        0  49.51 37.86 44.85 68.01 55.80 47.48 23.46 78.10 28.22 48.14
spiral-b-1b-mesh        5  44.32 37.09 45.71 68.83 53.83 55.18 26.71 91.60 28.96 50.25
pythia-1.4b             0  51.08 39.82 47.74 68.83 55.41 50.04 26.11 77.30 29.18 49.50
pythia-1.4b             5  46.17 39.69 48.01 69.64 54.22 59.22 29.27 91.20 29.95 51.93
pythia-1.4b-mesh        0  53.35 42.50 49.52 69.80 53.67 51.77 27.90 78.50 29.05 50.67
pythia-1.4b-mesh        5  47.99 40.37 49.74 69.86 56.51 61.28 30.29 93.00 30.02 53.23
looped-1.4b-anchor      0  50.75 40.93 47.65 69.75 53.75 48.40 26.62 78.00 28.62 49.39
looped-1.4b-anchor      5  45.99 40.95 47.85 69.37 52.96 56.82 26.79 91.00 29.65 51.27
looped-1.4b-mesh        0  53.46 41.84 48.58 69.53 54.85 49.75 27.82 80.30 28.89 50.56
looped-1.4b-mesh        5  49.14 42.69 49.21 69.70 54.78 57.79 29.35 92.70 29.76 52.79
spiral-b-1.4b-mesh      0  54.03 45.29 49.57 70.35 56.35 50.08 29.10 79.50 29.01 51.48
spiral-b-1.4b-mesh      5  46.61 43.82 50.51 70.08 54.30 59.68 31.49 92.30 30.15 53.22
spiral-l-1.4b-mesh      0  52.86 46.69 50.88 69.64 56.43 50.59 28.75 80.70 29.24 51.75
spiral-l-1.4b-mesh      5  46.32 45.29 51.66 70.51 59.51 60.61 31.91 93.20 30.35 54.37
"""


def _rows(table: str) -> list[tuple[str, list[float]]]:
    lines = [line.split() for line in table.strip().splitlines() if not line.startswith("#")]
    return [(name, [float(cell) for cell in cells]) for name, *cells in lines]


TABLE_1: dict[str, Table1Row] = {
    name: Table1Row(total, non_embedding, flops, Quality(*quality))
    for name, (total, non_embedding, flops, *quality) in _rows(_TABLE_1)
}
TABLE_2: dict[str, Quality] = {name: Quality(*cells) for name, cells in _rows(_TABLE_2)}
TABLE_3: dict[tuple[str, int], Table3Row] = {
    (name, int(shots)): Table3Row(tuple(accuracies), average)
    for name, (shots, *accuracies, average) in _rows(_TABLE_3)
}
