"""Time and memory of a training step: ours beside Hugging Face's GPT-NeoX of the same shape."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from spiralformer.accounting import training_flops_per_token
from spiralformer.bench.peers import build, family, hugging_face
from spiralformer.bench.results import Bar, Results
from spiralformer.bench.timing import interleave, table

NAMES = ("baseline", "looped", "spiral-b", "spiral-l")
PEER = "hugging face"


def make_step(name: str, scale: str, length: int, precision: str) -> Callable[[], None]:
    """One forward and backward pass of one sequence, float32 weights, autocast if bf16."""
    configs = family(scale)
    ids = torch.randint(0, configs["baseline"].vocab_size, (1, length + 1))
    model: nn.Module
    if name == PEER:
        model = hugging_face(configs["baseline"], torch.float32)
        loss = lambda: model(ids[:, :-1], labels=ids[:, :-1], use_cache=False).loss
    else:
        model = build(configs[name], torch.float32)
        loss = lambda: model(ids[:, :-1], ids[:, 1:])
    model.train()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            found = loss()
        found.backward()
        for p in model.parameters():
            p.grad = None

    return step


def run(
    scale: str = "160m",
    length: int = 1024,
    precisions: tuple[str, ...] = ("float32", "bfloat16"),
    repeats: int = 3,
    memory: bool = True,
) -> Results:
    settings = {"scale": scale, "length": length, "batch": 1, "repeats": repeats}
    results = Results("train", settings)
    configs = family(scale)
    flops = {name: training_flops_per_token(configs[name], length) * length for name in NAMES}
    flops[PEER] = flops["baseline"]
    for precision in precisions:
        peak = gemm_peak(precision, configs["baseline"].hidden_size, length)
        steps = {name: make_step(name, scale, length, precision) for name in (PEER, *NAMES)}
        for step in steps.values():
            step()
        best = interleave(steps, repeats, precision)
        del steps
        memories = (
            {name: peak_memory(name, scale, length, precision) for name in best} if memory else {}
        )
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
                    f"{memories[name] / 2**20:.0f}" if memories else "",
                ]
            )
            results.measurements.append(
                {
                    "precision": precision,
                    "case": name,
                    "seconds": seconds,
                    "tokens_per_second": length / seconds,
                    "flops": flops[name],
                    "peak_bytes": memories.get(name),
                }
            )
        print(f"\ntraining step, {scale} shapes, {precision}, 1 × {length} tokens")
        heads = ["", "tokens/s", "speed ÷ HF", "time ÷ base", "FLOPs ÷ base", "GFLOP/s", "peak MiB"]
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
        if memories:
            ratio = memories["spiral-b"] / memories["baseline"]
            bar("spiral-b: peak memory ÷ baseline", ratio, 1.0, False)
    return results


def gemm_peak(precision: str, width: int, rows: int) -> float:
    """FLOP/s of the fastest of the shapes a step is made of."""
    dtype = getattr(torch, precision)
    best = 0.0
    for inner, outer in ((width, 4 * width), (4 * width, width), (width, 3 * width)):
        x, w = torch.randn(rows, inner, dtype=dtype), torch.randn(outer, inner, dtype=dtype)
        seconds = interleave({"": partial(torch.mm, x, w.T)}, 5)[""]
        best = max(best, 2 * rows * inner * outer / seconds)
    return best


def peak_memory(name: str, scale: str, length: int, precision: str) -> int:
    """Peak resident bytes of a process that makes two steps, above what it held before them."""
    code = (
        "import json, resource, sys, torch\n"
        "from spiralformer.bench.train import make_step\n"
        "name, scale, length, precision = json.loads(sys.argv[1])\n"
        "make_step(name, 'nano', 64, precision)()  # imports what a first step imports\n"
        "step = make_step(name, scale, length, precision)\n"
        "rss = lambda: int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()\n"
        "before = rss()\n"
        "step(); step()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, before)\n"
    )
    arguments = json.dumps([name, scale, length, precision])
    out = subprocess.run(
        [sys.executable, "-c", code, arguments], capture_output=True, text=True, check=True
    )
    return int(out.stdout.split()[0])
