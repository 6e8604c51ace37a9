"""Tokens per second of decoding: ours beside Hugging Face's, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from spiralformer.accounting import weights_read_per_token
from spiralformer.bench.limits import read_rates
from spiralformer.bench.peers import PEER, build, family, hugging_face
from spiralformer.bench.results import Bar, Results
from spiralformer.bench.timing import Laps, interleave, table
from spiralformer.decode.algorithm import EAGER, Runner
from spiralformer.decode.compiled import compile_for
from spiralformer.decode.generate import stream
from spiralformer.model import SpiralFormer

NAMES = ("baseline", "looped", "spiral-b", "spiral-b parallel")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@torch.no_grad()
def run(
    scale: str = "160m",
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    tokens: int = 16,
    repeats: int = 3,
    context: int = 2048,
    compiled: bool = True,
) -> Results:
    results = Results("decode", {"scale": scale, "tokens": tokens, "repeats": repeats})
    shapes = {
        "batch 1": [[7] * 8],
        "batch 8, ragged": [[7] * (8 + 5 * row) for row in range(8)],
    }
    if context:
        shapes[f"batch 1 after {context} tokens"] = [[7] * context]
    for dtype in dtypes:
        for shape, prompts in shapes.items():
            # the bars are of batch 1: many short rounds, since a quiet moment is enough
            rounds = repeats * (10 if shape == "batch 1" else 1)
            speeds = measure(scale, dtype, prompts, tokens, rounds, compiled)
            show(results, scale, dtype, shape, speeds)
            if shape == "batch 1":
                add_bars(results, scale, dtype, speeds, repeats)
    return results


def measure(
    scale: str, dtype: str, prompts: list[list[int]], tokens: int, repeats: int, compiled: bool
) -> dict[str, float]:
    """Tokens per second of each case, after the prompts have been read."""
    configs = family(scale)
    cases: dict[str, Callable[[], float]] = {}
    peer: Any = hugging_face(configs["baseline"], DTYPES[dtype]).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])

    def decode_peer(watch: Watch) -> float:
        peer.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens + 1,
            do_sample=False,
            pad_token_id=0,
            streamer=watch,
        )
        return watch.total()

    def decode(model: SpiralFormer, runner: Runner, watch: Watch) -> float:
        for row, _ in stream(model, prompts, max_new_tokens=tokens + 1, runner=runner):
            if row == len(prompts) - 1:
                watch.mark()
        return watch.total()

    cases[PEER] = partial(decode_peer, Watch())
    for name in NAMES:
        model = build(configs[name], DTYPES[dtype]).eval()
        cases[f"{name}, eager"] = partial(decode, model, EAGER, Watch())
        if compiled:
            runner = compile_for(model, batch=len(prompts), capacity=longest + 256)
            cases[f"{name}, compiled"] = partial(decode, model, runner, Watch())
    best = interleave(cases, repeats, dtype)
    return {name: len(prompts) * tokens / seconds for name, seconds in best.items()}


class Watch(Laps):
    """A lap from each new token of a batch to the next; a streamer for Hugging Face's generate."""

    def put(self, value: Any) -> None:
        if value.dim() == 1:  # not the prompts, which generate puts first
            self.mark()

    def end(self) -> None:
        pass


def show(results: Results, scale: str, dtype: str, shape: str, speeds: dict[str, float]) -> None:
    size = DTYPES[dtype].itemsize
    configs, rows = family(scale), []
    for name, speed in speeds.items():
        config = configs[name.split(",")[0] if "," in name else "baseline"]
        # rows of a batch share what is read, but not how much of it depends on their phases
        rate = weights_read_per_token(config) * size * speed / 1e9
        read = f"{rate:.1f}" if shape.startswith("batch 1") else ""
        ratio = speed / speeds[PEER]
        rows.append([name, f"{speed:.1f}", f"{ratio:.2f}×", read])
        results.measurements.append(
            {"dtype": dtype, "shape": shape, "case": name, "tokens_per_second": speed}
        )
    print(f"\ndecode, {scale} shapes, {dtype}, {shape}")
    print(table(rows, ["", "tokens/s", "÷ HF", "weights GB/s"]), flush=True)


def add_bars(
    results: Results, scale: str, dtype: str, speeds: dict[str, float], repeats: int
) -> None:
    best = {name: max(v for k, v in speeds.items() if k.startswith(f"{name},")) for name in NAMES}
    baseline, parallel = best["baseline"], best["spiral-b parallel"]

    def bar(name: str, figure: float, limit: float) -> None:
        results.bars.append(Bar(f"{dtype}: {name}", figure, limit, at_least=True))

    bar("our baseline ÷ Hugging Face", baseline / speeds[PEER], 2.0)
    bar("SpiralFormer-B overlap ÷ LoopedFormer", best["spiral-b"] / best["looped"], 1.0)
    if dtype == "float32":
        bar("SpiralFormer-B parallel ÷ our baseline", parallel / baseline, 1.2)
    else:
        bar("SpiralFormer-B parallel ÷ overlap", parallel / best["spiral-b"], 1.0)
    config = family(scale)["baseline"]
    reached = weights_read_per_token(config) * DTYPES[dtype].itemsize * baseline
    chain = max(rates[1] for rates in read_rates(dtype, config, repeats).values())
    bar("our baseline's weight bytes/s ÷ a bare chain of its linears'", reached / chain, 0.7)
