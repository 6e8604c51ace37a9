"""Watching a forward pass: hooks that see what the model computed and change none of it.

Attention weights are not kept: each layer's are formed from the queries and keys that the model
really used, a few queries at a time, and reduced to two numbers per head on the spot.

Shapes: B batch, L tokens, N chunks, D width, H heads, K head size, M memory slots.
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
from spiralformer.model.topology import Memory, MeSH
from spiralformer.probes.metrics import GAMMA, AttentionSums, window

BLOCK = 1 << 23  # attention weights that exist at once

Stage = str | int  # "pre", an iteration's number, or "post"


@dataclass
class Trace:
    """What one forward pass did."""

    x: Tensor = field(default_factory=lambda: torch.empty(0))  # B L D, the embeddings
    v: Tensor = field(default_factory=lambda: torch.empty(0))  # B L D, f_pre(x)
    states: list[Tensor] = field(default_factory=list)  # B L D each: h⁽⁰⁾ … h⁽ᵀ⁾
    latents: list[Tensor] = field(default_factory=list)  # B N D each: ẑ of every iteration
    updates: list[Tensor] = field(default_factory=list)  # B L D each: ũ, after the shift
    out: Tensor = field(default_factory=lambda: torch.empty(0))  # B L D, normalised
    attention: dict[tuple[Stage, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(stage, layer) → entropy and LAM, (B, H) each; absent where nothing was attended to."""


def attention_rows(q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
    """softmax(q·kᵀ/√K) under the causal mask: rows start … stop-1 over keys 0 … stop-1.

    q and k are (H, N, K), one sequence; in at least float32, as the fused kernel does it.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q[:, start:stop].to(wide) @ k[:, :stop].to(wide).mT / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(start + 1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


@contextmanager
def watching(model: SpiralFormer, gamma: int = GAMMA) -> Iterator[Trace]:
    """Fills a trace from the forward pass made inside. The model's own output stays as it is."""
    trace, config = Trace(), model.config
    stage: Stage = "pre"
    handles = []

    def before_pre(module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal stage
        stage, trace.x = "pre", args[0]

    def after_pre(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        trace.v = output

    def before_iteration(t: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal stage
        stage = t
        trace.states.append(args[0])

    def after_upscale(t: int, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        trace.latents.append(args[0])
        trace.updates.append(causal_shift(output, config.iterations[t].shift, trace.x.shape[1]))

    def before_post(module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal stage
        stage = "post"
        trace.states.append(args[0])

    def after_norm(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        trace.out = output

    def before_attend(layer: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        q, k = args[:2]  # B H N K
        full = isinstance(stage, str)
        span = window(Fraction(1) if full else config.iterations[int(stage)].resolution, gamma)
        rows = [reduce_attention(q[b], k[b], span) for b in range(len(q))]
        entropies, masses = zip(*rows, strict=True)
        trace.attention[stage, layer] = torch.stack(entropies), torch.stack(masses)

    handles.append(model.pre.register_forward_pre_hook(before_pre))
    handles.append(model.pre.register_forward_hook(after_pre))
    for t, scaling in enumerate(model.scalings):
        handles.append(scaling.downscale.register_forward_pre_hook(partial(before_iteration, t)))
        handles.append(scaling.upscale.register_forward_hook(partial(after_upscale, t)))
    handles.append(model.post.register_forward_pre_hook(before_post))
    handles.append(model.norm.register_forward_hook(after_norm))
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


@dataclass
class Routing:
    """How MeSH made one state: h = r₀·x + Σ_k ⟨w⁽ᵏ⁾, r⟩·ũ⁽ᵏ⁾."""

    write: Tensor  # B L M
    read: Tensor  # B L M
    coefficients: Tensor  # B L k: of x, of v, of each update so far


def mesh_routing(mesh: MeSH, trace: Trace) -> list[Routing]:
    """Of h⁽⁰⁾, h⁽¹⁾, …: the routers' own weights, on the states that they saw."""
    found, memory = [], Memory(trace.x, (), ())
    seen = [trace.x, *trace.states[:-1]]
    written = [trace.v, *trace.updates]
    for router, h, u in zip(mesh.routers, seen, written, strict=True):
        write, read = mesh.route(router, h)
        memory = Memory(memory.x, (*memory.updates, u), (*memory.writes, write))
        coefficients = torch.cat([read[..., :1], *mesh.coefficients(memory, read)], dim=-1)
        found.append(Routing(write, read, coefficients))
    return found
