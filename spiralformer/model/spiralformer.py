"""SpiralFormer: Algorithm 1 of the paper, and with other layouts its whole family.

Shapes: B batch, L length, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spiralformer.config import SpiralConfig
from spiralformer.model.blocks import MLP, NORM, Attention, Stack, make_norm
from spiralformer.model.loss import IGNORE, linear_cross_entropy
from spiralformer.model.operators import Scaling, causal_shift
from spiralformer.model.topology import TOPOLOGY

CHECKPOINT = partial(checkpoint, use_reentrant=False)


class SpiralFormer(nn.Module):
    """`model(ids)` gives logits (B, L, V), `model(ids, targets)` the mean loss: see `forward`."""

    pre: Stack
    post: Stack
    cores: Any  # a Stack, or one per iteration when the layout is untied
    scalings: Any  # a Scaling per iteration
    topology: Any  # Replace, Anchor or MeSH

    def __init__(self, config: SpiralConfig) -> None:
        super().__init__()
        self.config = config
        layout = config.parsed_layout
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.pre = Stack(config, layout.pre)
        self.cores = nn.ModuleList(Stack(config, layers) for layers in layout.core_stacks)
        self.scalings = nn.ModuleList(Scaling(config, iteration) for iteration in config.iterations)
        self.topology = TOPOLOGY[config.topology](config)
        self.post = Stack(config, layout.post)
        self.norm = make_norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, kept: Sequence[int] | None = None
    ) -> Tensor:
        """Logits (B, L, V) of the token after each of `ids` (B, L), L at most config.max_length; no
        logit depends on a later token. With `targets` (B, L), the tokens that follow, instead the
        mean of their cross-entropy in nats; targets of -100 do not count. `kept`: only these
        iterations of the loop, as `with_iterations` has them."""
        hidden = self.hidden(self.embed(ids), kept)
        if targets is None:
            return self.head(hidden)
        total = linear_cross_entropy(self.head, hidden, targets)
        return total / (targets != IGNORE).sum()

    def hidden(self, x: Tensor, kept: Sequence[int] | None = None) -> Tensor:
        """Algorithm 1: from token embeddings x (B, L, D) to the normalised output states.

        `kept`: only these iterations of the loop, as `with_iterations` has them."""
        length = x.shape[1]
        if length > self.config.max_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_length {self.config.max_length}"
            )
        v = self.pre(x)
        h, carrier = self.topology.start(x, v)
        for iteration, scaling in zip(self.config.iterations, self.scalings, strict=True):
            if kept is not None and iteration.index not in kept:
                continue
            z = scaling.downscale(h)
            z = self.core(iteration.index)(z)
            u = scaling.upscale(z, h)
            u = causal_shift(u, iteration.shift, length)
            h, carrier = self.topology.update(u, h, carrier, iteration.index)
        return self.norm(self.post(h))

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x * math.sqrt(self.config.hidden_size) if self.config.scale_embeddings else x

    def core(self, t: int) -> Stack:
        """The core that iteration t runs: the shared one, or its own when the layout is untied."""
        return self.cores[0 if self.config.parsed_layout.tied else t]

    def with_iterations(self, kept: Sequence[int]) -> SpiralFormer:
        """The model that runs only these iterations of the loop, on the same weights. It is one of
        the family: it decodes, counts and saves as any other."""
        with torch.device("meta"):
            part = SpiralFormer(self.config.with_iterations(kept))
        part.embedding, part.pre, part.post = self.embedding, self.pre, self.post
        part.norm, part.head = self.norm, self.head
        if self.config.parsed_layout.tied:
            part.cores = self.cores
        else:
            part.cores = nn.ModuleList(self.cores[t] for t in kept)
        part.scalings = nn.ModuleList(self.scalings[t] for t in kept)
        part.topology.share(self.topology, kept)
        return part.train(self.training)

    def stacks(self) -> list[Stack]:
        return [self.pre, *self.cores, self.post]

    def set_checkpointing(
        self,
        enabled: bool = True,
        run: Callable[..., Tensor] = CHECKPOINT,
    ) -> None:
        """Recompute each block's activations in the backward pass instead of keeping them."""
        for stack in self.stacks():
            stack.checkpoint = run if enabled else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """N(0, std); output projections scaled down by the depth of the unrolled computation."""
        std = self.config.init_std
        module: Any
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif type(module) in NORM.values():
                module.reset_parameters()
        if self.config.init_depth_scaled:
            scale = 1 / math.sqrt(2 * self.config.parsed_layout.compute_layers)
            for module in self.modules():
                if isinstance(module, Attention):
                    module.out.weight *= scale
                elif isinstance(module, MLP):
                    module.down.weight *= scale
