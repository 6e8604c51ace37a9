"""Watching a forward pass: hooks that see what the model computed and change none of it.

Attention weights are not kept: each layer's are formed from the queries and keys that the model
really used, a few queries at a time, and reduced to two numbers per head on the spot.

All that a probe knows of the inside of the model's operators is in this file.

Shapes: B batch, L tokens, N chunks, G chunk size, D width, H heads, K head size, M memory slots.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spiralformer.config import Iteration, SpiralConfig
from spiralformer.model import SpiralFormer
from spiralformer.model.operators import causal_shift, to_grid
from spiralformer.probes import GAMMA
from spiralformer.probes.metrics import attention_metrics, window

BLOCK = 1 << 23  # attention weights that exist at once


@dataclass
class Trace:
    """What one forward pass did."""

    x: Tensor = field(init=False)  # B L D, the embeddings
    v: Tensor = field(init=False)  # B L D, f_pre(x)
    states: list[Tensor] = field(default_factory=list)  # B L D each: h⁽⁰⁾ … h⁽ᵀ⁾
    updates: list[Tensor] = field(default_factory=list)  # B L D each: ũ, after the shift
    out: Tensor = field(init=False)  # B L D, normalised
    attention: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """stage → (2, B, H) of each layer: entropy and LAM. Absent where nothing was attended to."""
    latents: list[Tensor] = field(default_factory=list)  # B N D each: z, as S↑ was given it


def stages(config: SpiralConfig) -> dict[str, int]:
    """Where layers run, in order, and how many: "pre", the number of each iteration, "post"."""
    layout = config.parsed_layout
    depths = {"pre": layout.pre, **{str(t): depth for t, depth in enumerate(layout.cores)}}
    return {stage: depth for stage, depth in {**depths, "post": layout.post}.items() if depth}


@contextmanager
def watching(model: SpiralFormer, gamma: int = GAMMA) -> Iterator[Trace]:
    """Fills a trace from the forward pass made inside. The model's own output stays as it is."""
    trace, stage = Trace(), "pre"

    def enter(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal stage
        stage = name
        if name == "pre":
            trace.x = args[0]
        else:
            trace.states.append(args[0])

    def attend(module: nn.Module, args: tuple[Any, ...]) -> None:
        resolution = Fraction(1)
        if stage.isdigit():
            resolution = model.config.iterations[int(stage)].resolution
        pairs = zip(*args[:2], strict=True)  # queries and keys of each sequence, (H, N, K)
        values = [_reduce_attention(q, k, window(resolution, gamma)) for q, k in pairs]
        trace.attention[stage].append(torch.stack(values, 1))

    def leave(iteration: Iteration, module: nn.Module, args: Any, output: Tensor) -> None:
        trace.latents.append(args[0])
        trace.updates.append(causal_shift(output, iteration.shift, trace.x.shape[1]))

    def keep(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        setattr(trace, name, output)

    handles = [
        model.pre.register_forward_pre_hook(partial(enter, "pre")),
        model.pre.register_forward_hook(partial(keep, "v")),
        model.post.register_forward_pre_hook(partial(enter, "post")),
        model.norm.register_forward_hook(partial(keep, "out")),
    ]
    for iteration, scaling in zip(model.config.iterations, model.scalings, strict=True):
        entered, left = partial(enter, str(iteration.index)), partial(leave, iteration)
        handles.append(scaling.downscale.register_forward_pre_hook(entered))
        handles.append(scaling.upscale.register_forward_hook(left))
    for block in (block for stack in model.stacks() for block in stack.blocks):
        attention = block.get_submodule("attention.attend")
        handles.append(attention.register_forward_pre_hook(attend))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _reduce_attention(q: Tensor, k: Tensor, span: int) -> Tensor:
    """Entropy and LAM, (2, H), of the attention of one sequence; q and k are (H, N, K)."""
    heads, length = q.shape[:2]
    size = max(1, BLOCK // (heads * length))
    blocks = (
        attention_rows(q, k, start, min(start + size, length)) for start in range(0, length, size)
    )
    return attention_metrics(blocks, length, span)


def attention_rows(q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
    """softmax(q·kᵀ/√K) under the causal mask: rows start … stop-1 over keys 0 … stop-1.

    In at least float32, as the fused kernel does it.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q[:, start:stop].to(wide) @ k[:, :stop].to(wide).mT / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(start + 1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


# ---------------------------------------------------------------------------- inside the operators


def aggregation_weights(model: SpiralFormer, trace: Trace, t: int) -> Tensor | None:
    """α of iteration t, (B, N, G); None where none is learned."""
    downscale = model.scalings[t].downscale
    return downscale.weights(trace.states[t]) if _says(downscale, "weights") else None


def allocation_weights(model: SpiralFormer, trace: Trace, t: int) -> Tensor | None:
    """β of iteration t, (B, N, G), whatever the operator's gain; None where none is learned."""
    upscale = model.scalings[t].upscale
    if not _says(upscale, "allocation"):
        return None
    members, real = to_grid(trace.states[t], model.config.iterations[t])
    shares = upscale.allocation(trace.latents[t], upscale.push(None, members, real))
    return shares / shares.sum(-1, keepdim=True)


def _says(operator: nn.Module, method: str) -> bool:
    """Whether an operator learns anything and can tell it."""
    return hasattr(operator, method) and any(True for _ in operator.parameters())


def has_routing(model: SpiralFormer) -> bool:
    return hasattr(model.topology, "route")


def mesh_routing(model: SpiralFormer, trace: Trace) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each state h = r₀·x + Σ_k ⟨w⁽ᵏ⁾, r⟩·ũ⁽ᵏ⁾: the routers' own w and r, (B, L, M), on the
    state that they saw, and the coefficients (B, L, k) of x, of v = ũ⁽⁻¹⁾ and of each update."""
    routes, writes = [], []
    for router, h in zip(model.topology.routers, [trace.x, *trace.states[:-1]], strict=True):
        write, read = model.topology.route(router, h)
        writes.append(write)
        products = [(w * read).sum(-1) for w in writes]
        routes.append((write, read, torch.stack([read[..., 0], *products], -1)))
    return routes
