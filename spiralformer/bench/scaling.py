"""How time grows with length, beside how FLOPs grow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from spiralformer.accounting import decode_flops_per_token, training_flops_per_token
from spiralformer.bench.peers import build, family
from spiralformer.bench.prefill import make_case, prefill_flops
from spiralformer.bench.results import Bar, Results
from spiralformer.bench.timing import interleave, table
from spiralformer.bench.train import NAMES, make_step
from spiralformer.config import SpiralConfig
from spiralformer.decode import prefill, step
from spiralformer.decode.compiled import compile_for

DECODED = 16  # tokens, two of the longest chunks


def exponent(lengths: list[int], values: list[float]) -> float:
    """The slope of a line through the points on logarithmic axes."""
    x, y = [math.log(n) for n in lengths], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def run(scale: str, lengths: list[int], repeats: int) -> Results:
    results = Results("scaling", {"scale": scale, "lengths": lengths, "repeats": repeats})
    configs = {
        name: config.replace(max_length=max(*lengths, config.max_length) + (repeats + 1) * DECODED)
        for name, config in family(scale).items()
    }
    kinds: dict[str, tuple[Callable[..., Any], Callable[..., float]]] = {
        "prefill": (
            lambda name, n: torch.no_grad()(make_case(name, configs[name], "float32", n)),
            lambda name, n: prefill_flops(configs[name], n),
        ),
        "training step": (
            lambda name, n: make_step(name, scale, n, "float32"),
            lambda name, n: training_flops_per_token(configs[name], n) * n,
        ),
        "decoded token": (
            lambda name, n: torch.no_grad()(_decoding(configs[name], n)),
            lambda name, n: DECODED * decode_flops_per_token(configs[name], n),
        ),
    }
    for kind, (make, flops) in kinds.items():
        rows = []
        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        for n in lengths:
            cases = {name: make(name, n) for name in NAMES}
            for name, best in interleave(cases, repeats, f"{kind}, {n} tokens").items():
                seconds[name].append(best / (DECODED if kind == "decoded token" else 1))
            del cases
        for name in NAMES:
            counted = [flops(name, n) for n in lengths]
            time_slope, flops_slope = exponent(lengths, seconds[name]), exponent(lengths, counted)
            cells = [f"{s:.3f}" for s in seconds[name]]
            rows.append([name, *cells, f"{time_slope:.2f}", f"{flops_slope:.2f}"])
            results.measurements.append(
                {
                    "kind": kind,
                    "case": name,
                    "lengths": lengths,
                    "seconds": seconds[name],
                    "flops": counted,
                }
            )
            results.bars.append(
                Bar(
                    f"{kind}, {name}: exponent of time - exponent of FLOPs",
                    time_slope - flops_slope,
                    0.1,
                    False,
                )
            )
        print(f"\nseconds of a {kind}, {scale} shapes, float32")
        print(table(rows, ["", *map(str, lengths), "time ∝ L^", "FLOPs ∝ L^"]), flush=True)
    return results


def _decoding(config: SpiralConfig, context: int) -> Callable[[], None]:
    """Some tokens after a context, and some more each time."""
    model = build(config, torch.float32).eval()
    runner = compile_for(model)
    with torch.no_grad():
        _, state = prefill(
            model, torch.zeros(1, context, dtype=torch.long), capacity=config.max_length, last=True
        )
    ids = torch.zeros(1, dtype=torch.long)

    def case() -> None:
        for _ in range(DECODED):
            runner.head(model, step(model, state, ids, runner))

    return case
