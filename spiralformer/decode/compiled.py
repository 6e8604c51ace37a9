"""The decode step with its weights compiled in.

Decoding one token is bound by reading weights. On a CPU the step is that of `native`; elsewhere
inductor's freezing packs the weights. Compilation is paid once per machine there, and once per
model and batch shape here; the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo

from spiralformer.decode import native
from spiralformer.decode.algorithm import EAGER, Runner, step
from spiralformer.decode.state import Append, DecodeState
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
            found, start = [], 0
            for i, size in enumerate(sizes):
                rows = slice(start, start + size)
                at = torch.arange(size, device=x.device)
                keys[i][layer][at, :, places[i]] = k[rows, :, 0]
                values[i][layer][at, :, places[i]] = v[rows, :, 0]
                found.append(attend(q[rows], keys[i][layer], values[i][layer], masks[i]))
                start += size
            return torch.cat(found) if len(found) > 1 else found[0]

        for layer, block in enumerate(self.stack.blocks):
            x = block(x, (cos, sin), lambda *args, layer=layer: attend(layer, *args))
        return x


class CompiledRunner(Runner):
    """Runs the stacks and the head compiled wherever all rows of a batch take part.

    States should be made with its `capacity`: caches of another size compile anew.
    """

    def __init__(self, model: SpiralFormer, capacity: int, fallback: str, **options) -> None:
        self.capacity = min(capacity, model.config.max_length)
        self.config = model.config
        self.fallback = fallback  # why this is not a NativeRunner
        # dynamo counts the compilations of all models of a process together
        dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
        options = {"freezing": True, "max_autotune": True, **options}
        compile = lambda module: torch.compile(module, options=options, dynamic=None)
        self.fast_head = compile(model.head)
        self.compiled = {id(stack): compile(StackPass(stack)) for stack in model.stacks()}

    def stack(
        self, stack: Stack, inputs: Sequence[Tensor], appends: Sequence[Append]
    ) -> list[Tensor]:
        if any(append.rows is not None for append in appends) or not len(stack.blocks):
            return EAGER.stack(stack, inputs, appends)
        positions = torch.cat([append.positions for append in appends])
        cos, sin = rotary(positions[:, None], self.config)
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        places, masks = [], []
        for append in appends:
            capacity = append.cache.keys.shape[3]
            end = min(-(-append.end // BUCKET) * BUCKET, capacity)
            for found, cache in ((keys, append.cache.keys), (values, append.cache.values)):
                # layers apart: writing into one must not copy the others
                layers = list(cache[:, :, :, :end].unbind(0))
                for layer in layers:
                    torch._dynamo.mark_dynamic(layer, 2)
                found.append(layers)
            places.append(append.positions[:, 0])
            mask = torch.arange(end, device=positions.device) <= append.positions
            mask = mask[:, None, None]
            torch._dynamo.mark_dynamic(mask, 3)
            masks.append(mask)
        out = self.compiled[id(stack)](
            torch.cat(list(inputs)), cos, sin, keys, values, places, masks
        )
        return list(out.split([append.batch for append in appends]))

    def head(self, model: SpiralFormer, hidden: Tensor) -> Tensor:
        return self.fast_head(hidden)


@torch.no_grad()
def compile_for(
    model: SpiralFormer, batch: int = 1, capacity: int = 1024, warm: int = 16, **options
) -> native.NativeRunner | CompiledRunner:
    """A compiled runner, warmed up on every combination of passes that a token may need."""
    fallback = native.why_not(model)
    if fallback is None:
        return native.NativeRunner(model, capacity)
    runner = CompiledRunner(model, capacity, fallback, **options)
    state = DecodeState.empty(model, batch, runner.capacity)
    period = max([it.chunk for it in model.config.iterations], default=1)
    ids = torch.zeros(batch, dtype=torch.long, device=model.embedding.weight.device)
    for _ in range(max(warm, 2 * period)):
        runner.head(model, step(model, state, ids, runner))
    return runner
