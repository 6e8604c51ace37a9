"""What the machine can do: products of large matrices, and reading weights for a few rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from spiralformer.bench.results import Results
from spiralformer.bench.timing import interleave, table
from spiralformer.config import SpiralConfig
from spiralformer.decode import native
from spiralformer.model.precision import Linear

ROWS = (1, 2, 4)


def shapes(config: SpiralConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of the linear layers of a block."""
    d, f = config.hidden_size, config.intermediate_size
    return [(3 * d, d), (d, d), (f, d), (d, f)]


def gemm_peak(precision: str, config: SpiralConfig, rows: int, repeats: int = 5) -> float:
    """FLOP/s of the fastest of the products that a training step is made of."""
    dtype, best = getattr(torch, precision), 0.0
    for outputs, inputs in shapes(config):
        x, layer = torch.randn(rows, inputs).to(dtype), Linear(inputs, outputs).to(dtype)
        with torch.no_grad():  # the layer has its own way where a product in dtype is emulated
            ways = {"mm": partial(torch.mm, x, layer.weight.T), "layer": partial(layer, x)}
            seconds = min(interleave(ways, repeats).values())
        best = max(best, 2 * rows * inputs * outputs / seconds)
    return best


@torch.no_grad()
def read_rates(dtype: str, config: SpiralConfig, repeats: int = 5) -> dict[str, dict[int, float]]:
    """Bytes of weights per second that a bare chain of the baseline's linear layers reaches."""
    weights = [
        torch.randn(shape).to(getattr(torch, dtype))
        for _ in range(config.parsed_layout.compute_layers)
        for shape in shapes(config)
    ]
    size = sum(w.numel() * w.element_size() for w in weights)
    modes: dict[str, Callable[..., Any]] = {"general product": F.linear}
    if native.build() is None:
        modes["few rows"] = lambda x, w: torch.ops.spiralformer.few_rows(x, w, None)
    found: dict[str, dict[int, float]] = {mode: {} for mode in modes}
    for rows in ROWS:
        inputs = {k: torch.randn(rows, k).to(weights[0].dtype) for _, k in shapes(config)}

        def chain(product: Callable[..., Any], inputs: dict[int, Any] = inputs) -> None:
            for w in weights:
                product(inputs[w.shape[1]], w)

        cases = {mode: partial(chain, product) for mode, product in modes.items()}
        for mode, seconds in interleave(cases, repeats).items():
            found[mode][rows] = size / seconds
    return found


def run(configs: dict[str, SpiralConfig], dtypes: tuple[str, ...], repeats: int) -> Results:
    results, rows = Results("limits"), []
    config = configs["baseline"]
    for dtype in dtypes:
        peak = gemm_peak(dtype, config, 1024, repeats)
        rates = read_rates(dtype, config, repeats)
        results.measurements.append({"dtype": dtype, "gemm_flops": peak, "read_bytes": rates})
        for mode, found in rates.items():
            cells = [f"{found[r] / 1e9:.1f}" for r in ROWS]
            rows.append([f"{dtype}, {mode}", f"{peak / 1e9:.0f}", *cells])
    print("\nwhat this machine can do")
    print(table(rows, ["", "GEMM GFLOP/s", *(f"{r} row{'s' * (r > 1)} GB/s" for r in ROWS)]))
    return results
