"""Time to read a long prompt and fill the caches, beside Hugging Face's GPT-NeoX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from spiralformer.accounting import forward_flops
from spiralformer.bench.peers import PEER, build, family, hugging_face, parts
from spiralformer.bench.results import Bar, Results
from spiralformer.bench.timing import Laps, interleave, table
from spiralformer.config import SpiralConfig
from spiralformer.decode import prefill

NAMES = ("baseline", "looped", "spiral-b", "spiral-l")


def make_case(name: str, config: SpiralConfig, dtype: str, length: int) -> Callable[[], float]:
    """Reads a prompt; the next token's logits are wanted, and the caches."""
    config = config.replace(max_length=max(length, config.max_length))
    ids = torch.randint(0, config.vocab_size, (1, length))
    if name == PEER:
        peer: Any = hugging_face(config, getattr(torch, dtype)).eval()
        read = lambda: peer(ids, use_cache=True, logits_to_keep=1)
        return partial(Laps(parts(peer)).time, read)
    model = build(config, getattr(torch, dtype)).eval()

    def case() -> None:
        out, _ = prefill(model, ids, last=True)
        model.head(out[:, 0])

    return partial(Laps(parts(model)).time, case)


def prefill_flops(config: SpiralConfig, length: int) -> float:
    """Logits of the last token only."""
    whole = forward_flops(config, length)
    return whole.total - 2 * config.hidden_size * config.vocab_size * (length - 1)


@torch.no_grad()
def run(scale: str, length: int, dtypes: tuple[str, ...], repeats: int) -> Results:
    results = Results("prefill", {"scale": scale, "length": length, "repeats": repeats})
    configs = family(scale)
    configs[PEER] = configs["baseline"]
    for dtype in dtypes:
        cases = {name: make_case(name, configs[name], dtype, length) for name in (PEER, *NAMES)}
        best = interleave(cases, 3 * repeats, dtype)
        del cases
        base, rows = best["baseline"], []
        for name, seconds in best.items():
            share = prefill_flops(configs[name], length) / prefill_flops(configs[PEER], length)
            ratios = [f"{length / seconds:.0f}", f"{seconds / base:.3f}", f"{share:.3f}"]
            rows.append([name, *ratios])
            results.measurements.append(
                {"dtype": dtype, "case": name, "seconds": seconds, "flops_ratio": share}
            )
        print(f"\nprefill of {length} tokens, {scale} shapes, {dtype}")
        print(table(rows, ["", "tokens/s", "time ÷ base", "FLOPs ÷ base"]), flush=True)
        for name in ("spiral-b", "spiral-l"):
            results.bars.append(
                Bar(f"{dtype}: {name}'s time ÷ baseline's", best[name] / base, 0.93, False)
            )
        results.bars.append(
            Bar(f"{dtype}: baseline's time ÷ Hugging Face's", base / best[PEER], 1.0, False)
        )
    return results
