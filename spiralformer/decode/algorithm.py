"""A token's way through the loop, from a state: `extend` by many tokens at once, `step` by one.

Both are exact: their outputs equal the model's forward pass over the whole text, for every row,
whatever the other rows are (in exact arithmetic; in bfloat16 a matrix product may round a row
differently in a batch of another size). Shapes as in `state`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from spiralformer.config import Iteration
from spiralformer.decode.runner import EAGER, Runner
from spiralformer.decode.state import (
    CacheWrite,
    ChunkState,
    DecodeState,
    IterationState,
    StateError,
    choose_rows,
    map_state,
    take,
)
from spiralformer.model import SpiralFormer
from spiralformer.model.blocks import gather_rows, pick
from spiralformer.model.operators import Scaling


@torch.no_grad()
def prefill(
    model: SpiralFormer,
    ids: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    capacity: int = 0,
    history: int = 0,
    last: bool = False,
) -> tuple[Tensor, DecodeState]:
    """One forward pass over right-padded prompts (B, M): output states (B, M, D) and the state.
    With `last`, only the output of each row's last token, (B, 1, D)."""
    batch, width = ids.shape
    state = DecodeState.empty(model, batch, max(capacity, width), history=history)
    return extend(model, state, ids, lengths, last=last), state


@torch.no_grad()
def extend(
    model: SpiralFormer,
    state: DecodeState,
    ids: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    last: bool = False,
    runner: Runner = EAGER,
) -> Tensor:
    """Advances row b by the first `lengths[b]` of its tokens ids (B, M); default all of them. Their
    embeddings (B, M, D), as `model.embed` gives them, can stand in their place.

    Returns the normalised output states (B, M, D); apply `runner.head` where logits are wanted.
    What stands at padded places means nothing. With `last`, only that of each row's last new token
    comes out, (B, 1, D): the last layer is not run for the others.
    """
    new = [ids.shape[1]] * ids.shape[0] if lengths is None else [int(n) for n in lengths]
    _check(model, state, ids, new)
    width = max(new, default=0)
    padding = ids.shape[1] - width
    x = ids[:, :width] if ids.dim() == 3 else model.embed(ids[:, :width])
    if not width:
        return F.pad(x, (0, 0, 0, padding))
    state.reserve(max(map(sum, zip(state.lengths, new, strict=True))))
    at = None
    if last and width > 1:
        at = torch.tensor([max(n - 1, 0) for n in new], device=ids.device)
    hidden = _advance(model, state, x, new, runner, at)
    return F.pad(hidden, (0, 0, 0, padding)) if padding and not last else hidden


@torch.no_grad()
def step(model: SpiralFormer, state: DecodeState, ids: Tensor, runner: Runner = EAGER) -> Tensor:
    """Advances every row by one token, ids (B); returns the output states (B, D)."""
    return extend(model, state, ids[:, None], runner=runner)[:, 0]


def _advance(
    model: SpiralFormer,
    state: DecodeState,
    x: Tensor,  # B M D, embeddings
    new: list[int],
    runner: Runner,
    at: Tensor | None,
) -> Tensor:
    """Algorithm 1 for the new tokens only. Coarse passes run only for the rows whose chunk
    completes; at a single token, those of a group go through the core as one batch."""
    starts, width = state.lengths, x.shape[1]
    everywhere = lambda cache: [CacheWrite(cache, starts, new)]
    plain = not state.loop  # f_pre is all there is
    v = runner.stack(model.pre, [x], everywhere(state.pre), at if plain else None)[0]
    h, carrier = model.topology.start(x, v)
    groups = model.config.pass_groups if width == 1 else [(t,) for t in range(len(state.loop))]
    for group in groups:
        passes = [CorePass(model.scalings[t], state.loop[t], starts, new) for t in group]
        for t, each in zip(group, passes, strict=True):
            each.pool(h)
            if t != group[-1]:  # it reads only the past
                h, carrier = model.topology.update(each.read(width), h, carrier, t)
        due = [each for each in passes if each.rows]
        if due:
            inputs, writes = [each.z for each in due], [each.write() for each in due]
            outputs = runner.stack(model.core(group[0]), inputs, writes)
            for each, output in zip(due, outputs, strict=True):
                each.store(output)
        h, carrier = model.topology.update(passes[-1].read(width), h, carrier, group[-1])
    h = runner.stack(model.post, [h], everywhere(state.post), None if plain else at)[0]
    state.advance(new)
    return model.norm(h)


class CorePass:
    """One iteration over the new tokens: into the chunks, through the core, and back to tokens."""

    z: Tensor  # rows, chunks, D: what enters the core

    def __init__(
        self, scaling: Scaling, part: IterationState, starts: list[int], new: list[int]
    ) -> None:
        self.scaling, self.part, self.starts, self.new = scaling, part, starts, new
        self.iteration: Iteration = part.iteration
        chunks = self.iteration.chunks
        self.held = [chunks(start) for start in starts]  # chunks completed before, per row
        self.done = [
            chunks(start + n) - held for start, n, held in zip(starts, new, self.held, strict=True)
        ]  # chunks completed by the new tokens
        self.rows = [row for row, done in enumerate(self.done) if done]
        self.every = len(self.rows) == len(new)
        # What the new tokens may read: the latents kept before, then, once stored, those of now.
        self.latents, self.allocations = part.latents, part.allocations

    def write(self) -> CacheWrite:
        held, done = ([counts[row] for row in self.rows] for counts in (self.held, self.done))
        return CacheWrite(self.part.cache, held, done, None if self.every else self.rows)

    # ------------------------------------------------------------------ down

    def pool(self, h: Tensor) -> None:
        """Takes the new states h (B, M, D) into the chunks; those that complete make `z`."""
        part = self.part
        if self.iteration.chunk == 1:
            self.z = self._of_rows(h)
            return
        if part.recent.shape[1]:
            _, part.recent = _append(part.recent, h, self.new)
        if h.shape[1] == 1 and all(self.new):
            self._pool_one(h)
        else:
            self._pool_many(h)

    def _pool_one(self, h: Tensor) -> None:
        part, down, up = self.part, self.scaling.downscale, self.scaling.upscale
        part.down, part.up = down.push(part.down, h), up.push(part.up, h)
        if not self.rows:
            return
        self.z = self._of_rows(down.latent(part.down).to(h.dtype))[:, None]
        self.shares_from = map_state(part.up, lambda x: self._of_rows(x)[:, None])
        fresh_down, fresh_up = (operator.start((len(self.new),), h) for operator in (down, up))
        if not self.every:
            ended = torch.tensor(self.done, device=h.device) > 0
            fresh_down = choose_rows(ended, fresh_down, part.down)
            fresh_up = choose_rows(ended, fresh_up, part.up)
        part.down, part.up = fresh_down, fresh_up

    def _pool_many(self, h: Tensor) -> None:
        """Each row is laid out on its chunk grid, (B, N, G): the first chunk goes on from the
        state, and the one after those that complete becomes it."""
        iteration, part = self.iteration, self.part
        shape = (len(self.new), max(self.done) + 1)
        counts = [[iteration.phase_of(start) for start in self.starts], self.new, self.done]
        phase, new, done = torch.tensor(counts, device=h.device)[:, :, None]
        place = torch.arange(shape[1] * iteration.chunk, device=h.device) - phase  # B N·G
        members = gather_rows(h, place.clamp(0, h.shape[1] - 1)).unflatten(1, (shape[1], -1))
        real = ((place >= 0) & (place < new)).unflatten(1, (shape[1], -1))

        def push(operator, state: ChunkState) -> tuple[ChunkState, ChunkState]:
            fresh = operator.start(shape, h)
            chunks = map_state(state, lambda a, b: torch.cat((a[:, None], b[:, 1:]), 1), fresh)
            chunks = operator.push(chunks, members, real)
            complete = map_state(chunks, lambda x: self._of_rows(x[:, :-1]))
            return complete, map_state(chunks, lambda x: pick(x, done[:, 0])[:, 0])

        down, part.down = push(self.scaling.downscale, part.down)
        self.shares_from, part.up = push(self.scaling.upscale, part.up)
        self.z = self.scaling.downscale.latent(down).to(h.dtype)

    # ------------------------------------------------------------------ up

    def store(self, output: Tensor) -> None:
        """Takes the core's latents (rows, chunks, D), and keeps the newest."""
        part = self.part
        if not self.iteration.shift:  # read at once
            self.latents = self._to_all_rows(output)
            return
        if self.iteration.chunk == 1:
            shares = output.new_ones((*output.shape[:2], 1))
        else:
            shares = self.scaling.upscale.allocation(output, self.shares_from).to(output.dtype)
        output, shares = self._to_all_rows(output), self._to_all_rows(shares)
        self.latents, part.latents = _append(part.latents, output, self.done)
        self.allocations, part.allocations = _append(part.allocations, shares, self.done)

    def read(self, width: int) -> Tensor:
        """ũ of the new tokens (B, M, D): token i reads what place i-s of the chunks got, by index;
        zero where i < s."""
        iteration, kept = self.iteration, self.part.latents.shape[1]
        if not iteration.shift:
            return self.latents
        u = (self.latents[:, :, None] * self.allocations[..., None]).flatten(1, 2)
        past = iteration.shift - iteration.offset
        u = take(
            u,
            [
                start - past - (held - kept) * iteration.chunk
                for start, held in zip(self.starts, self.held, strict=True)
            ],
            width,
        )
        if min(self.starts) >= iteration.shift:
            return u
        starts = torch.tensor(self.starts, device=u.device)
        tokens = starts[:, None] + torch.arange(width, device=u.device)
        return u * (tokens >= iteration.shift)[..., None]

    # ------------------------------------------------------------------ rows

    def _of_rows(self, x: Tensor) -> Tensor:
        """Those rows of x in which a chunk completes."""
        return x if self.every else x[torch.tensor(self.rows, dtype=torch.long, device=x.device)]

    def _to_all_rows(self, x: Tensor) -> Tensor:
        """The inverse; zeros in the other rows."""
        if self.every:
            return x
        rows = torch.tensor(self.rows, device=x.device)
        return x.new_zeros((len(self.new), *x.shape[1:])).index_copy_(0, rows, x)


def _append(kept: Tensor, new: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`kept` (B, W, D) with `new` (B, M, D) behind, and its newest W entries, where only the first
    `counts[b]` of the new ones are real."""
    both = torch.cat((kept, new), 1)
    return both, take(both, counts, kept.shape[1]).clone()  # a view would hold on to the rest


def _check(model: SpiralFormer, state: DecodeState, ids: Tensor, new: list[int]) -> None:
    if state.config is not model.config and state.config != model.config:
        raise StateError(
            f"the state is of another model: layout {state.config.layout} of width "
            f"{state.config.hidden_size}, not {model.config.layout} of {model.config.hidden_size}"
        )
    if ids.shape[0] != state.batch or len(new) != state.batch:
        raise StateError(f"{ids.shape[0]} rows of tokens for a state of {state.batch} rows")
    if any(not 0 <= n <= ids.shape[1] for n in new):
        raise StateError(f"lengths {new} do not all lie in 0…{ids.shape[1]}")
