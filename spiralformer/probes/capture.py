"""Watching a forward pass: hooks that see what the model computed and change none of it.

Attention weights are not kept: each layer's are formed from the queries and keys that the model
really used, a few queries at a time, and reduced to two numbers per head on the spot.

All that a probe knows of the inside of the model's operators is in this file.

Shapes: B batch, L tokens, N chunks, G chunk size, D width, H heads, K head size, M memory slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spiralformer.model import SpiralFormer
from spiralformer.model.operators import causal_shift
from spiralformer.probes import GAMMA
from spiralformer.probes.metrics import AttentionSums, window

BLOCK = 1 << 23  # attention weights that exist at once


@dataclass
class Trace:
    """What one forward pass did."""

    x: Tensor = field(default_factory=lambda: torch.empty(0))  # B L D, the embeddings
    v: Tensor = field(default_factory=lambda: torch.empty(0))  # B L D, f_pre(x)
    states: list[Tensor] = field(default_factory=list)  # B L D each: h⁽⁰⁾ … h⁽ᵀ⁾
    latents: list[Tensor] = field(default_factory=list)  # B N D each: ẑ of every iteration
    updates: list[Tensor] = field(default_factory=list)  # B L D each: ũ, after the shift
    out: Tensor = field(default_factory=lambda: torch.empty(0))  # B L D, normalised
    attention: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(stage, layer) → entropy and LAM, (B, H) each; absent where nothing was attended to. A stage
    is "pre", the number of an iteration, or "post"."""


@contextmanager
def watching(model: SpiralFormer, gamma: int = GAMMA) -> Iterator[Trace]:
    """Fills a trace from the forward pass made inside. The model's own output stays as it is."""
    trace, config = Trace(), model.config
    stage = "pre"

    def before_pre(module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal stage
        stage, trace.x = "pre", args[0]

    def after_pre(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        trace.v = output

    def before_state(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal stage
        stage = name
        trace.states.append(args[0])

    def after_upscale(shift: int, module: nn.Module, args: Any, output: Tensor) -> None:
        trace.latents.append(args[0])
        trace.updates.append(causal_shift(output, shift, trace.x.shape[1]))

    def after_norm(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        trace.out = output

    def before_attend(layer: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        resolution = config.iterations[int(stage)].resolution if stage.isdigit() else Fraction(1)
        q, k = args[:2]  # B H N K
        rows = [reduce_attention(q[b], k[b], window(resolution, gamma)) for b in range(len(q))]
        entropies, masses = zip(*rows, strict=True)
        trace.attention[stage, layer] = torch.stack(entropies), torch.stack(masses)

    handles = [
        model.pre.register_forward_pre_hook(before_pre),
        model.pre.register_forward_hook(after_pre),
        model.post.register_forward_pre_hook(partial(before_state, "post")),
        model.norm.register_forward_hook(after_norm),
    ]
    for iteration, scaling in zip(config.iterations, model.scalings, strict=True):
        entered = partial(before_state, str(iteration.index))
        handles.append(scaling.downscale.register_forward_pre_hook(entered))
        left = partial(after_upscale, iteration.shift)
        handles.append(scaling.upscale.register_forward_hook(left))
    for stack in model.stacks():
        for layer, block in enumerate(stack.blocks):
            attend = block.get_submodule("attention.attend")
            handles.append(attend.register_forward_pre_hook(partial(before_attend, layer)))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def reduce_attention(q: Tensor, k: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Entropy and LAM, (H) each, of the attention of one sequence; q and k are (H, N, K)."""
    heads, length = q.shape[:2]
    sums = AttentionSums(heads, length, span, q.device)
    block = max(1, BLOCK // (heads * length))
    for start in range(0, length, block):
        sums.add(attention_rows(q, k, start, min(start + block, length)), start)
    return sums.entropy(), sums.local_mass()


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
    """α of iteration t, (B, N, G), zero at the places before token 0; None where none is learned."""
    downscale = model.scalings[t].downscale
    return downscale.weights(trace.states[t]) if _is_learned(downscale) else None


def allocation_weights(model: SpiralFormer, trace: Trace, t: int) -> Tensor | None:
    """β of iteration t, (B, N, G); None where none is learned."""
    upscale = model.scalings[t].upscale
    if not _is_learned(upscale):
        return None
    gain = math.sqrt(model.config.iterations[t].chunk)
    return upscale.allocation(trace.latents[t]) / gain


def _is_learned(operator: nn.Module) -> bool:
    return next(operator.parameters(), None) is not None


@dataclass
class Routing:
    """How MeSH made one state: h = r₀·x + Σ_k ⟨w⁽ᵏ⁾, r⟩·ũ⁽ᵏ⁾, ũ⁽⁻¹⁾ = v."""

    write: Tensor  # B L M
    read: Tensor  # B L M
    coefficients: Tensor  # B L k: of x, of v, of each update so far


def mesh_routing(model: SpiralFormer, trace: Trace) -> list[Routing]:
    """Of h⁽⁰⁾, h⁽¹⁾, …: the routers' own weights, on the states that they saw."""
    routes: list[Routing] = []
    for router, h in zip(model.topology.routers, [trace.x, *trace.states[:-1]], strict=True):
        write, read = model.topology.route(router, h)
        written = [*(route.write for route in routes), write]
        products = [(w * read).sum(-1) for w in written]
        routes.append(Routing(write, read, torch.stack([read[..., 0], *products], -1)))
    return routes
