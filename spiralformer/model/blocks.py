"""GPT-NeoX Transformer blocks.

Shapes: B batch, L length, D width, H heads, K head size, R rotated dimensions of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spiralformer.config import SpiralConfig

Rope = tuple[Tensor, Tensor]  # cos and sin, (L, R/2) or (B, 1, L, R/2)


class LayerCache(Protocol):
    """Where one layer's keys and values live between calls (see `spiralformer.decode`)."""

    def __call__(self, attend: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores the new keys and values and attends to all that the new queries may see."""


NORM: dict[str, Any] = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}


def make_norm(config: SpiralConfig) -> nn.Module:
    return NORM[config.norm](config.hidden_size, eps=config.norm_eps)


def frequencies(config: SpiralConfig, device: torch.device) -> Tensor:
    """Radians per position of each rotated pair, (R/2)."""
    size = config.rotary_size
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    return config.rotary_base**-exponents


def rotary(positions: Tensor, config: SpiralConfig) -> Rope:
    """Angles of the given positions. Always computed in float32, whatever the model's dtype."""
    angles = positions.float()[..., None] * frequencies(config, positions.device)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotates the first R dimensions of each head, half against half as GPT-NeoX does."""
    cos, sin = (part.to(x.dtype) for part in rope)
    half = cos.shape[-1]
    # one split: the backward pass of slices would fill a whole gradient with zeros for each
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def pick(x: Tensor, at: Tensor) -> Tensor:
    """Entry `at[b]` of each row b: (B, L, …) → (B, 1, …)"""
    return x[torch.arange(x.shape[0], device=x.device), at][:, None]


def gather_rows(x: Tensor, at: Tensor) -> Tensor:
    """Entries `at[b]` of each row b: (B, L, D), (B, M) → (B, M, D). Copies whole entries, which
    `gather` does number by number."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return F.embedding(rows * x.shape[1] + at, x.flatten(0, 1))


def trains_in_blocks(q: Tensor) -> bool:
    """Whether plain products are the fastest way to a gradient: PyTorch's fused kernel has a slow
    backward pass on CPUs, but keeps no weights, which grow with the square of the length."""
    on_host = q.device.type == "cpu" and not torch.compiler.is_compiling()
    return on_host and q.requires_grad and 1 < q.shape[-2] <= 1024


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, size: int = 128) -> Tensor:
    """Causal attention, B H L K. A block of queries is multiplied by the keys up to its end."""
    rows, out = q.shape[:2], []
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    for start in range(0, q.shape[1], size):
        end = min(start + size, q.shape[1])
        future = q.new_full((end - start, end), -math.inf).triu(start + 1)
        scores = torch.baddbmm(future, q[:, start:end], k[:, :end].mT, alpha=q.shape[-1] ** -0.5)
        out.append(scores.softmax(-1) @ v[:, :end])
    return torch.cat(out, 1).unflatten(0, rows)


class Attend(nn.Module):
    """softmax(q·kᵀ/√K)·v. A module of its own so that a probe can hook what was really attended.

    Without a mask, many queries attend causally, and a single query attends to all keys.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None and trains_in_blocks(q):
            return attend_in_blocks(q, k, v)
        how: dict[str, Any] = {"attn_mask": mask}
        if mask is None and q.shape[-2] > 1:  # not is_causal=…: a traced comparison is no bool
            how = {"is_causal": True}
        return F.scaled_dot_product_attention(q, k, v, **how)


class Attention(nn.Module):
    def __init__(self, config: SpiralConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.attend = Attend()
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, rope: Rope, cache: LayerCache | None = None, at: Tensor | None = None
    ) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # B L 3 H K
        qk, v = qkv.split((2, 1), 2)
        q, k = rotate(qk.permute(2, 0, 3, 1, 4), rope).unbind(0)  # B H L K
        v = v.squeeze(2).transpose(1, 2)
        if at is not None:
            q = pick(q.transpose(1, 2), at).transpose(1, 2)
        y = self.attend(q, k, v) if cache is None else cache(self.attend, q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: SpiralConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: SpiralConfig) -> None:
        super().__init__()
        self.parallel = config.parallel_residual
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: Rope, cache: LayerCache | None = None, at: Tensor | None = None
    ) -> Tensor:
        """With `at`, only that entry of each row comes out; the cache knows which it attends."""
        attended = self.attention(self.attention_norm(x), rope, cache, at)
        x = x if at is None else pick(x, at)
        if self.parallel:
            return x + attended + self.mlp(self.mlp_norm(x))
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """f_pre, f_loop or f_post: layers run one after the other on a sequence of any resolution."""

    def __init__(self, config: SpiralConfig, layers: int) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(layers))
        # runs a block so that its activations are recomputed in the backward pass
        self.checkpoint: Callable[..., Tensor] | None = None

    def forward(
        self,
        x: Tensor,  # B L D
        positions: Tensor | None = None,  # (L) or (B, L); default 0 … L-1
        caches: Sequence[LayerCache] | None = None,  # one per layer
        at: Tensor | None = None,  # (B): the only entries that are wanted
    ) -> Tensor:
        if x.shape[1] == 0 or not self.blocks:
            return x if at is None else pick(x, at)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        rope = rotary(positions if positions.dim() == 1 else positions[:, None], self.config)
        for i, block in enumerate(self.blocks):
            if self.checkpoint and self.training and caches is None:
                x = self.checkpoint(block, x, rope)
            else:
                last = at if i == len(self.blocks) - 1 else None
                x = block(x, rope, None if caches is None else caches[i], last)
        return x
