"""Stacks and the head of a decode step through `torch.compile`, for GPUs above all.

Compilation is paid once per model and batch shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo

from spiralformer.decode.runner import Runner
from spiralformer.decode.state import CacheWrite
from spiralformer.model import SpiralFormer
from spiralformer.model.blocks import Stack

BUCKET = 64  # caches are attended to in multiples of this, so that few lengths are seen


class StackPass(nn.Module):
    """One token for every row of one or more groups, each group with its own keys and values."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    def forward(
        self,
        x: Tensor,  # P 1 D, the rows of all groups
        positions: Tensor,  # P 1: where each row's new entry goes
        caches: list[list[Tensor]],  # 2 B H C K of each group and layer
        masks: list[Tensor],  # B 1 1 C: which entries each row may see
    ) -> Tensor:
        sizes = [mask.shape[0] for mask in masks]

        def attend_in_groups(layer: int, attend: nn.Module, *qkv: Tensor) -> Tensor:
            outputs = []
            parts = [x.split(sizes) for x in (positions, *qkv)]
            for cache, mask, place, q, k, v in zip(caches, masks, *parts, strict=True):
                keys, values = cache[layer]
                rows = torch.arange(len(mask), device=mask.device)
                keys[rows, :, place[:, 0]] = k[:, :, 0]
                values[rows, :, place[:, 0]] = v[:, :, 0]
                outputs.append(attend(q, keys, values, mask))
            return torch.cat(outputs)

        layers = range(len(self.stack.blocks))
        return self.stack(x, positions, [partial(attend_in_groups, layer) for layer in layers])


class CompiledRunner(Runner):
    """Compiled where all rows of a batch take part in a pass, eager elsewhere.

    States should be made with its `capacity`: caches of another size compile anew."""

    name = "compile"

    def __init__(self, model: SpiralFormer, capacity: int, rows: int = 1) -> None:
        self.capacity, self.rows = min(capacity, model.config.max_length), rows
        # dynamo counts the compilations of all models of a process together
        dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
        on_cpu = model.embedding.weight.device.type == "cpu"
        options: dict[str, Any] = {"freezing": True} if on_cpu else {}
        compile = lambda module: torch.compile(module, options=options)
        self.fast_head = compile(model.head)
        self.compiled = {id(stack): compile(StackPass(stack)) for stack in model.stacks()}

    def stack(
        self,
        stack: Stack,
        inputs: Sequence[Tensor],
        writes: Sequence[CacheWrite],
        at: Tensor | None = None,
    ) -> list[Tensor]:
        whole = all(write.rows is None and all(write.new) for write in writes)
        if not whole or inputs[0].shape[1] > 1 or not stack.blocks:
            return super().stack(stack, inputs, writes, at)
        caches, masks = [], []
        for write in writes:
            end = min(-(-write.end // BUCKET) * BUCKET, write.cache.shape[4])
            # layers apart: writing into one must not copy the others
            caches.append(list(write.cache[..., :end, :].unbind(1)))
            for layer in caches[-1]:
                torch._dynamo.mark_dynamic(layer, 3)
            places = torch.arange(end, device=write.cache.device)
            masks.append((places <= write.positions)[:, None, None])
            torch._dynamo.mark_dynamic(masks[-1], 3)
        positions = torch.cat([write.positions for write in writes])
        output = self.compiled[id(stack)](torch.cat(list(inputs)), positions, caches, masks)
        return list(output.split([write.batch for write in writes]))

    def head(self, model: SpiralFormer, hidden: Tensor) -> Tensor:
        if hidden.shape[:-1].numel() != self.rows:
            return super().head(model, hidden)
        return self.fast_head(hidden)
