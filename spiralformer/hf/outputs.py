"""What `output_attentions` and `output_hidden_states` give: each layer of the unrolled computation,
at its own resolution.

Shapes: B batch, M new columns (padding included), L columns so far, D width, H heads, K head size.
In an iteration at a lower resolution chunks stand in place of columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spiralformer.config import Iteration
from spiralformer.decode.runner import Runner
from spiralformer.decode.state import CacheWrite, DecodeState
from spiralformer.hf.padding import Rows, roll
from spiralformer.model.blocks import Attend, Stack
from spiralformer.model.operators import softmax
from spiralformer.model.spiralformer import SpiralFormer


class Weights(nn.Module):
    """softmax(q·kᵀ/√K), (B, H, M, L). A module of its own so that a hook sees what is attended."""

    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is None and q.shape[-2] > 1:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return softmax(scores)


class EagerAttend(Attend):
    """`Attend` by plain products."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = Weights()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.weights(q, k, mask) @ v


@dataclass
class Pass:
    """A stack that has run over some rows."""

    states: list[Tensor] = field(default_factory=list)  # rows M D, of each layer
    weights: list[Tensor] = field(default_factory=list)  # rows H M L
    write: CacheWrite | None = None  # which rows, and where; None: all of them


class Recorder(Runner):
    """Keeps what the layers give, in a forward pass or as the runner of a cached one."""

    def __init__(self, model: SpiralFormer, attentions: bool) -> None:
        self.config, self.attentions = model.config, attentions
        self.passes: list[Pass] = []  # as they ran

    def stack(
        self,
        stack: Stack,
        inputs: Sequence[Tensor],
        writes: Sequence[CacheWrite],
        at: Tensor | None = None,
    ) -> list[Tensor]:
        """Each pass by itself, to tell them apart."""
        outputs = []
        for x, write in zip(inputs, writes, strict=True):
            outputs += super().stack(stack, [x], [write], at)
            self.passes[-1].write = write
        return outputs

    def collect(
        self,
        x: Tensor,  # B M D, the embeddings
        columns: int,  # L
        rows: Rows | None,
        first: Tensor | None,  # B: the column of each row's first token; None: 0
        state: DecodeState | None,  # of the cache, after the pass
    ) -> tuple[list[Tensor], list[Tensor]]:
        """States and attention weights of all layers, as `SpiralFormerForCausalLM` describes."""
        batch, width, size = x.shape
        passes, layout = self.passes, self.config.parsed_layout
        if state is not None:  # only iterations in which a chunk completed have run
            caches = [state.pre, *(part.cache for part in state.loop), state.post]
            ran = {id(each.write.cache): each for each in passes if each.write is not None}
            passes = [ran.get(id(cache), Pass()) for cache in caches]
        iterations: list[Iteration | None] = [None, *self.config.iterations, None]
        all_states, all_weights = [], []
        for run, iteration, layers in zip(
            passes, iterations, (layout.pre, *layout.cores, layout.post), strict=True
        ):
            states = run.states or [x.new_zeros(batch, 0, size)] * layers
            weights = run.weights
            if self.attentions and not weights:
                weights = [x.new_zeros(batch, self.config.num_heads, 0, 0)] * layers
            states = [to_all_rows(s, run.write, batch, 1) for s in states]
            weights = [to_all_rows(w, run.write, batch, 2) for w in weights]
            if iteration is not None and iteration.chunk > 1:
                seen = 0 if state is None else max(map(iteration.chunks, state.lengths))
                weights = [fill(w, 3, seen) for w in weights]
            else:
                states = [fill(s, 1, width) for s in states]
                weights = [fill(fill(w, 2, width), 3, columns) for w in weights]
                if rows is not None:
                    states = [rows.restore(s) for s in states]
                    weights = [rows.restore(w, 2) for w in weights]
                if first is not None and first.any():
                    weights = [roll(w, -first, 3) for w in weights]
            all_states += states
            all_weights += weights
        return all_states, all_weights


def fill(x: Tensor, dim: int, width: int) -> Tensor:
    """x with zeros behind, so that dimension `dim` has at least `width` places."""
    missing = width - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing > 0 else x


def to_all_rows(x: Tensor, write: CacheWrite | None, batch: int, dim: int) -> Tensor:
    """Zeros in the rows that were not run, and behind the new entries, along `dim`, of a row."""
    if write is None:
        return x
    place = torch.arange(x.shape[dim], device=x.device)
    real = place < torch.tensor(write.new, device=x.device)[:, None]
    x = x * real.view(len(x), *[1] * (dim - 1), -1, *[1] * (x.dim() - 1 - dim))
    return x.new_zeros(batch, *x.shape[1:]).index_copy_(
        0, torch.arange(batch, device=x.device)[write.index], x
    )


@contextmanager
def recording(model: SpiralFormer, attentions: bool) -> Iterator[Recorder]:
    """Inside, a forward pass of the model leaves its layers' states, and with `attentions` their
    weights, in the recorder. Nothing is recomputed later: what is recorded has a gradient."""
    recorder = Recorder(model, attentions)
    with ExitStack() as after:
        for stack in model.stacks():
            after.callback(setattr, stack, "checkpoint", stack.checkpoint)
            stack.checkpoint = None
            begin = lambda *_: recorder.passes.append(Pass())
            after.enter_context(stack.register_forward_pre_hook(begin))
            for block in stack.blocks:
                keep_state = lambda _, inputs, output: recorder.passes[-1].states.append(output)
                after.enter_context(block.register_forward_hook(keep_state))
                if attentions:
                    attention: Any = block.attention
                    after.callback(setattr, attention, "attend", attention.attend)
                    attention.attend = EagerAttend()
                    keep = lambda _, inputs, output: recorder.passes[-1].weights.append(output)
                    attention.attend.weights.register_forward_hook(keep)
        yield recorder
