"""Time of a training step: ours beside Hugging Face's GPT-NeoX of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from spiralformer.accounting import training_flops_per_token
from spiralformer.bench.limits import gemm_peak
from spiralformer.bench.peers import PEER, build, family, hugging_face, layers
from spiralformer.bench.results import Bar, Results
from spiralformer.bench.timing import Laps, interleave, table
from spiralformer.config import SpiralConfig

NAMES = ("baseline", "looped", "spiral-b", "spiral-l")


def make_step(name: str, scale: str, length: int, precision: str) -> Callable[[], float]:
    """Forward, backward and AdamW on one sequence; float32 weights, autocast if bfloat16."""
    config = family(scale)["baseline" if name == PEER else name]
    config = config.replace(max_length=max(length, config.max_length))
    ids = torch.randint(0, config.vocab_size, (1, length + 1))
    model: nn.Module
    if name == PEER:
        model = hugging_face(config, torch.float32)
        loss = lambda: model(ids[:, :-1], labels=ids[:, :-1], use_cache=False).loss
    else:
        model = build(config, torch.float32)
        loss = lambda: model(ids[:, :-1], ids[:, 1:])
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    laps = Laps(layers(model))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            found = loss()
        laps.mark()
        found.backward()
        laps.mark()
        optimizer.step()
        optimizer.zero_grad()

    return partial(laps.time, step)


def run(
    scale: str = "160m",
    length: int = 1024,
    precisions: tuple[str, ...] = ("float32", "bfloat16"),
    repeats: int = 3,
) -> Results:
    settings = {"scale": scale, "length": length, "batch": 1, "repeats": repeats}
    results = Results("train", settings)
    configs = family(scale)
    flops = {name: training_flops_per_token(configs[name], length) * length for name in NAMES}
    flops[PEER] = flops["baseline"]
    for precision in precisions:
        peak = gemm_peak(precision, configs["baseline"], length)
        steps = {name: make_step(name, scale, length, precision) for name in (PEER, *NAMES)}
        best = interleave(steps, 4 * repeats, precision)
        del steps
        rows = []
        for name, seconds in best.items():
            rows.append(
                [
                    name,
                    f"{length / seconds:.1f}",
                    f"{best[PEER] / seconds:.2f}×",
                    f"{seconds / best['baseline']:.3f}",
                    f"{flops[name] / flops['baseline']:.3f}",
                    f"{flops[name] / seconds / 1e9:.1f}",
                ]
            )
            results.measurements.append(
                {
                    "precision": precision,
                    "case": name,
                    "seconds": seconds,
                    "tokens_per_second": length / seconds,
                    "flops": flops[name],
                }
            )
        print(f"\ntraining step, {scale} shapes, {precision}, 1 × {length} tokens")
        heads = ["", "tokens/s", "speed ÷ HF", "time ÷ base", "FLOPs ÷ base", "GFLOP/s"]
        print(table(rows, heads))
        print(f"measured {precision} GEMM peak: {peak / 1e9:.0f} GFLOP/s", flush=True)

        def bar(name: str, figure: float, limit: float, at_least: bool, p=precision) -> None:
            results.bars.append(Bar(f"{p}: {name}", figure, limit, at_least))

        bar("our baseline's speed ÷ Hugging Face's", best[PEER] / best["baseline"], 1.15, True)
        for name in ("spiral-b", "spiral-l"):
            time_ratio = best[name] / best["baseline"]
            flops_ratio = flops[name] / flops["baseline"]
            bar(
                f"{name}: (time ÷ baseline) ÷ (FLOPs ÷ baseline)",
                time_ratio / flops_ratio,
                1.03,
                False,
            )
        bar("spiral-b: FLOP/s ÷ GEMM peak", flops["spiral-b"] / best["spiral-b"] / peak, 0.6, True)
        operators = operator_seconds(configs["spiral-b"], length, precision, repeats)
        share = operators / best["spiral-b"]
        bar("spiral-b: operators around the core ÷ step", share, 0.04, False)
    return results


def operator_seconds(config: SpiralConfig, length: int, precision: str, repeats: int) -> float:
    """Down- and up-scaling, shift and topology, forward and backward, without the layers."""
    model = build(config, torch.float32)
    for stack in model.stacks():
        stack.blocks = nn.ModuleList()
    x = torch.randn(1, length, config.hidden_size, requires_grad=True)

    def case() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            out = model.hidden(x)
        out.sum().backward()

    return interleave({"": case}, repeats)[""]
