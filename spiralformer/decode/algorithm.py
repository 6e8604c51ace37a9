"""A token's way through the loop, from a state: `extend` by many tokens at once, `step` by one.

Both are exact: their outputs equal the model's forward pass over the whole text, for every row,
whatever the other rows are (in exact arithmetic; in bfloat16 a matrix product may round a row
differently in a batch of another size). Shapes as in `state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    fixed: bool = False,
    history: int = 0,
    last: bool = False,
) -> tuple[Tensor, DecodeState]:
    """One forward pass over right-padded prompts (B, M): output states (B, M, D) and the state.
    With `last`, only the output of each row's last token, (B, 1, D)."""
    batch, width = ids.shape
    state = DecodeState.empty(model, batch, max(capacity, width), fixed=fixed, history=history)
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
    """Advances row b by the first `lengths[b]` of its tokens ids (B, M); default all of them.

    Returns the normalised output states (B, M, D); apply `runner.head` where logits are wanted.
    What stands at padded places means nothing. With `last`, only that of each row's last new token
    comes out, (B, 1, D): the last layer is not run for the others.
    """
    new = [ids.shape[1]] * ids.shape[0] if lengths is None else [int(n) for n in lengths]
    _check(model, state, ids, new)
    width = max(new, default=0)
    ids, padding = ids[:, :width], ids.shape[1] - width
    if not width:
        return F.pad(model.embed(ids), (0, 0, 0, padding))
    state.reserve(max(map(sum, zip(state.lengths, new, strict=True))))
    at = None
    if last and width > 1:
        at = torch.tensor([max(n - 1, 0) for n in new], device=ids.device)
    hidden = _advance(model, state, model.embed(ids), new, runner, at)
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
    only = None if state.loop or model.post.blocks else at  # f_pre is all there is
    v = runner.stack(model.pre, [x], everywhere(state.pre), only)[0]
    x, at = (x, at) if only is None else (pick(x, only), None)
    h, carrier = model.topology.start(x, v)
    single = width == 1
    groups = model.config.pass_groups if single else [(t,) for t in range(len(state.loop))]
    for group in groups:
        passes = [CorePass(model.scalings[t], state.loop[t], starts, new) for t in group]
        for t, each in zip(group, passes, strict=True):
            each.pool(h)
            if single and each.iteration.reads_only_past:
                h, carrier = model.topology.update(each.read(width), h, carrier, t)
        due = [each for each in passes if each.rows]
        if due:
            inputs, writes = [each.z for each in due], [each.write() for each in due]
            outputs = runner.stack(model.core(group[0]), inputs, writes)
            for each, output in zip(due, outputs, strict=True):
                each.store(output)
        for t, each in zip(group, passes, strict=True):
            if not (single and each.iteration.reads_only_past):
                h, carrier = model.topology.update(each.read(width), h, carrier, t)
    h = runner.stack(model.post, [h], everywhere(state.post), at)[0]
    state.advance(new)
    return model.norm(h)


class LatentWindow(NamedTuple):
    """Latents that tokens may read, oldest first, and how each is shared out over its chunk."""

    latents: Tensor  # B W D
    allocations: Tensor  # B W G
    ends: list[int]  # the number of the chunk after the last one, per row


class CorePass:
    """One iteration over the new tokens: into the chunks, through the core, and back to tokens."""

    z: Tensor  # rows, chunks, D: what enters the core
    window: LatentWindow

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
        self.window = LatentWindow(part.latents, part.allocations, self.held)

    def write(self) -> CacheWrite:
        held, done = ([counts[row] for row in self.rows] for counts in (self.held, self.done))
        return CacheWrite(self.part.cache, held, done, None if self.every else self.rows)

    # ------------------------------------------------------------------ down

    def pool(self, h: Tensor) -> None:
        """Takes the new states h (B, M, D) into the chunks; those that complete make `z`."""
        part = self.part
        if self.iteration.chunk == 1:
            self.z, self.shares_from = self._of_rows(h), ()
            return
        if part.recent.shape[1]:
            part.recent = _last(part.recent, h, self.new)
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
            ended = torch.tensor([bool(done) for done in self.done], device=h.device)
            fresh_down = choose_rows(ended, fresh_down, part.down)
            fresh_up = choose_rows(ended, fresh_up, part.up)
        part.down, part.up = fresh_down, fresh_up

    def _pool_many(self, h: Tensor) -> None:
        """Each row is laid out on its chunk grid, (B, N, G); the first chunk goes on from the
        state, and the one left unfinished becomes it."""
        iteration, part, batch = self.iteration, self.part, len(self.new)
        phases = [iteration.phase_of(start) for start in self.starts]
        count = max(
            -(-(phase + n) // iteration.chunk) for phase, n in zip(phases, self.new, strict=True)
        )
        offsets = torch.tensor([phases, self.new, self.done], device=h.device)[:, :, None]
        place = torch.arange(count * iteration.chunk, device=h.device) - offsets[0]  # B N·G
        real = ((place >= 0) & (place < offsets[1])).unflatten(1, (count, iteration.chunk))
        members = gather_rows(h, place.clamp(0, h.shape[1] - 1))
        members = members.unflatten(1, (count, iteration.chunk))
        unfinished = offsets[2, :, 0]
        in_row, over = unfinished.clamp_max(count - 1), unfinished >= count
        rows = torch.arange(batch, device=h.device)

        def push(operator, state: ChunkState) -> tuple[ChunkState, ChunkState]:
            fresh = operator.start((batch, count), h)
            chunks = map_state(state, lambda a, b: torch.cat((a[:, None], b[:, 1:]), 1), fresh)
            chunks = operator.push(chunks, members, real)
            left = map_state(chunks, lambda x: x[rows, in_row])
            return chunks, choose_rows(over, operator.start((batch,), h), left)

        down, part.down = push(self.scaling.downscale, part.down)
        up, part.up = push(self.scaling.upscale, part.up)
        width = max(self.done)
        z = self.scaling.downscale.latent(map_state(down, lambda x: x[:, :width]))
        self.z = self._of_rows(z.to(h.dtype))
        self.shares_from = map_state(up, lambda x: self._of_rows(x[:, :width]))

    # ------------------------------------------------------------------ up

    def store(self, output: Tensor) -> None:
        """Keeps the newest of the core's latents (rows, chunks, D). The window becomes all that
        the new tokens may read: those kept before, then these."""
        part, kept = self.part, self.part.latents.shape[1]
        ends = [held + output.shape[1] for held in self.held]
        if not kept and self.every:  # read at once, none is kept
            self.window = LatentWindow(output, part.allocations, ends)
            return
        if self.iteration.chunk == 1:
            shares = output.new_ones((*output.shape[:2], 1))
        else:
            shares = self.scaling.upscale.allocation(output, self.shares_from).to(output.dtype)
        output, shares = self._to_all_rows(output), self._to_all_rows(shares)
        old = part.latents, part.allocations
        part.latents = _last(part.latents, output, self.done)
        part.allocations = _last(part.allocations, shares, self.done)
        if kept and max(self.new) == 1:  # one token reads nothing older than what is kept
            ends = [held + done for held, done in zip(self.held, self.done, strict=True)]
            self.window = LatentWindow(part.latents, part.allocations, ends)
        else:
            latents, allocations = torch.cat((old[0], output), 1), torch.cat((old[1], shares), 1)
            self.window = LatentWindow(latents, allocations, ends)

    def read(self, width: int) -> Tensor:
        """ũ of the new tokens (B, M, D): token i reads chunk π(i-s), by index; zero where i < s."""
        iteration, (latents, allocations, ends) = self.iteration, self.window
        if iteration.chunk == 1 and iteration.shift == 0:
            return latents[:, latents.shape[1] - width :]
        if not latents.shape[1]:
            return latents.new_zeros((len(self.new), width, latents.shape[2]))
        if width == 1 and len(set(self.starts)) == len(set(ends)) == 1:  # rows alike: plain slices
            token = self.starts[0] - iteration.shift
            at = iteration.chunk_of(token) - ends[0] + latents.shape[1]
            if token < 0 or at < 0:
                return latents.new_zeros((latents.shape[0], 1, latents.shape[2]))
            return (
                latents[:, at : at + 1] * allocations[:, at, iteration.phase_of(token), None, None]
            )
        device = latents.device
        starts, first = torch.tensor(
            [self.starts, [end - latents.shape[1] for end in ends]], device=device
        )[:, :, None]
        token = starts + torch.arange(width, device=device) - iteration.shift  # B M
        index = (token + iteration.offset).div(iteration.chunk, rounding_mode="floor") - first
        legal = (token >= 0) & (index >= 0) & (index < latents.shape[1])
        index = index.clamp(0, latents.shape[1] - 1)
        phase = (token + iteration.offset).remainder(iteration.chunk)
        share = allocations.flatten(1).gather(1, index * iteration.chunk + phase) * legal
        return gather_rows(latents, index) * share[:, :, None]

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


def _last(old: Tensor, new: Tensor, counts: Sequence[int]) -> Tensor:
    """The last W entries of: `old` (B, W, D), then the first `counts[b]` of `new` (B, M, D)."""
    width = old.shape[1]
    if min(counts) == max(counts) >= width:
        return new[:, counts[0] - width : counts[0]].clone()
    both = torch.cat((old, new), 1)
    if len(set(counts)) == 1:
        return both[:, counts[0] : counts[0] + width].clone()
    first = torch.tensor(counts, device=old.device)
    return gather_rows(both, first[:, None] + torch.arange(width, device=old.device))


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
