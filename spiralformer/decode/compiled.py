"""Stacks and the head of a decode step through `torch.compile`, for GPUs above all.

Compilation is paid once per model and batch shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo

from spiralformer.decode.runner import Runner
from spiralformer.decode.state import CacheWrite
from spiralformer.model import SpiralFormer
from spiralformer.model.blocks import Stack, rotary

BUCKET = 64  # caches are attended to in multiples of this, so that few lengths are seen


class StackPass(nn.Module):
    """One token for every row of one or more groups, each group with its own keys and values."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    def forward(
        self,
        x: Tensor,  # P 1 D, the rows of all groups
        cos: Tensor,  # P 1 1 R/2
        sin: Tensor,
        keys: list[list[Tensor]],  # B H C K of each group and layer
        values: list[list[Tensor]],
        places: list[Tensor],  # B: where each row's new entry goes
        masks: list[Tensor],  # B 1 1 C: which entries it may see
    ) -> Tensor:
        sizes = [place.shape[0] for place in places]

        def attend(layer: int, attend: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outputs, start = [], 0
            for i, size in enumerate(sizes):
                rows = slice(start, start + size)
                at = torch.arange(size, device=x.device)
                keys[i][layer][at, :, places[i]] = k[rows, :, 0]
                values[i][layer][at, :, places[i]] = v[rows, :, 0]
                outputs.append(attend(q[rows], keys[i][layer], values[i][layer], masks[i]))
                start += size
            return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

        for layer, block in enumerate(self.stack.blocks):
            x = block(x, (cos, sin), lambda *args, layer=layer: attend(layer, *args))
        return x


class CompiledRunner(Runner):
    """Compiled where all rows of a batch take part in a pass, eager elsewhere.

    States should be made with its `capacity`: caches of another size compile anew."""

    name = "compile"

    def __init__(self, model: SpiralFormer, capacity: int, rows: int = 1) -> None:
        self.capacity = min(capacity, model.config.max_length)
        self.config, self.rows = model.config, rows
        # dynamo counts the compilations of all models of a process together
        dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
        options: dict[str, Any] = (
            {"freezing": True} if model.embedding.weight.device.type == "cpu" else {}
        )
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
        positions = torch.cat([write.positions for write in writes])
        cos, sin = rotary(positions[:, None], self.config)
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        masks = []
        for write in writes:
            end = min(-(-write.end // BUCKET) * BUCKET, write.cache.keys.shape[3])
            for parts, cache in ((keys, write.cache.keys), (values, write.cache.values)):
                # layers apart: writing into one must not copy the others
                layers = list(cache[:, :, :, :end].unbind(0))
                for layer in layers:
                    torch._dynamo.mark_dynamic(layer, 2)
                parts.append(layers)
            mask = (torch.arange(end, device=positions.device) <= write.positions)[:, None, None]
            torch._dynamo.mark_dynamic(mask, 3)
            masks.append(mask)
        places = [write.positions[:, 0] for write in writes]
        run = self.compiled[id(stack)]
        output = run(torch.cat(list(inputs)), cos, sin, keys, values, places, masks)
        return list(output.split([write.batch for write in writes]))

    def head(self, model: SpiralFormer, hidden: Tensor) -> Tensor:
        if hidden.shape[:-1].numel() != self.rows:
            return super().head(model, hidden)
        return self.fast_head(hidden)
