"""Advancing a state: `extend` by many tokens in one parallel pass, `step` by one.

Both are exact: their outputs equal the model's forward pass over the whole text, for every row,
whatever the other rows are. Shapes as in `state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spiralformer.config import Iteration
from spiralformer.decode.state import (
    FLOOR,
    Append,
    DecodeState,
    IterationState,
    StateError,
    run_stack,
)
from spiralformer.model import SpiralFormer
from spiralformer.model.blocks import Stack, look_up, pick
from spiralformer.model.precision import used_again


@dataclass
class Plan:
    """How M new tokens of each row fall into the chunks of one iteration."""

    it: Iteration
    starts: list[int]  # tokens seen before, per row
    new: list[int]  # new tokens, per row

    def __post_init__(self) -> None:
        it = self.it
        self.held = [it.chunks(start) for start in self.starts]
        self.done = [
            it.chunks(start + new) - held
            for start, new, held in zip(self.starts, self.new, self.held, strict=True)
        ]  # chunks completed by the new tokens
        self.rows = [row for row, done in enumerate(self.done) if done]

    def append(self, part: IterationState) -> Append:
        every = len(self.rows) == len(self.done)
        return Append(
            part.cache,
            [self.held[row] for row in self.rows],
            [self.done[row] for row in self.rows],
            None if every else self.rows,
        )


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
) -> Tensor:
    """Advances row b by the first `lengths[b]` of its tokens ids (B, M); default all of them.

    Returns the normalised output states (B, M, D); apply `model.head` where logits are wanted.
    What stands at padded places means nothing. With `last`, only that of each row's last new token
    comes out, (B, 1, D): the last layer is not run for the others.
    """
    new = [ids.shape[1]] * ids.shape[0] if lengths is None else [int(n) for n in lengths]
    _check(model, state, ids, new)
    starts, padding = list(state.lengths), ids.shape[1] - max(new, default=0)
    ids = ids[:, : ids.shape[1] - padding]
    padding = 0 if last and ids.shape[1] else padding
    if not ids.shape[1]:
        return F.pad(model.embed(ids), (0, 0, 0, padding))
    if ids.shape[1] == 1 and all(new):
        return F.pad(step(model, state, ids[:, 0])[:, None], (0, 0, 0, padding))
    state.reserve(max(start + n for start, n in zip(starts, new, strict=True)))
    at = None
    if last:
        at = torch.tensor([max(n - 1, 0) for n in new], device=ids.device)

    def run(stack, cache, x: Tensor, at: Tensor | None = None) -> Tensor:
        append = Append(cache, starts, new)
        return run_stack(stack, [x], [append], at)[0]

    x = model.embed(ids)
    if at is not None and not state.loop and not model.post.blocks:
        x, v = pick(x, at), run(model.pre, state.pre, x, at)
        at = None
    else:
        v = run(model.pre, state.pre, x)
    h, carrier = model.topology.start(x, v)
    with used_again():
        for part in state.loop:
            plan = Plan(part.it, starts, new)
            z = absorb(model, part, plan, h)
            found = None
            if plan.rows:
                found = run_stack(model.core(part.it.index), [z], [plan.append(part)])[0]
            u = read(part, plan, ids.shape[1], keep(model, part, plan, found))
            h, carrier = model.topology.update(u, h, carrier, part.it.index)
    h = run(model.post, state.post, h, at)
    _advance(state, new)
    return F.pad(model.norm(h), (0, 0, 0, padding))


class Runner:
    """How a step is run: eagerly here, its stacks compiled in `compiled`, in C++ in `native`."""

    capacity = 0  # tokens that a state should have room for from the start

    def token(self, model: SpiralFormer, state: DecodeState, ids: Tensor) -> Tensor:
        """The output states (B, D) of one new token of every row, ids (B)."""
        starts, new = state.lengths, [1] * state.batch
        x = model.embed(ids[:, None])
        v = self.stack(model.pre, [x], [Append(state.pre, starts, new)])[0]
        h, carrier = model.topology.start(x, v)
        for group in passes(state):
            plans = [Plan(part.it, starts, new) for part in group]
            due: list[tuple[IterationState, Plan, Tensor]] = []
            for part, plan in zip(group, plans, strict=True):
                z = absorb(model, part, plan, h)
                if plan.rows:
                    due.append((part, plan, z))
                if part.it.lags:
                    u = read(part, plan, 1, kept(part, plan.held))
                    h, carrier = model.topology.update(u, h, carrier, part.it.index)
            results = {}
            if due:
                core = model.core(group[0].it.index)
                outputs = self.stack(core, [z for *_, z in due], [p.append(s) for s, p, _ in due])
                results = {p.it.index: out for (_, p, _), out in zip(due, outputs, strict=True)}
            for part, plan in zip(group, plans, strict=True):
                bank = keep(model, part, plan, results.get(part.it.index))
                if not part.it.lags:
                    u = read(part, plan, 1, bank)
                    h, carrier = model.topology.update(u, h, carrier, part.it.index)
        h = self.stack(model.post, [h], [Append(state.post, starts, new)])[0]
        return model.norm(h[:, 0])

    def stack(
        self, stack: Stack, inputs: Sequence[Tensor], appends: Sequence[Append]
    ) -> list[Tensor]:
        return run_stack(stack, inputs, appends)

    def head(self, model: SpiralFormer, hidden: Tensor) -> Tensor:
        return model.head(hidden)


EAGER = Runner()


@torch.no_grad()
def step(model: SpiralFormer, state: DecodeState, ids: Tensor, runner: Runner = EAGER) -> Tensor:
    """Advances every row by one token, ids (B); returns the output states (B, D).

    Coarse passes run only for the rows whose chunk completes. Where an iteration lags (s ≥ g), no
    later one at this token waits for its pass, so all passes that are due go through the shared
    core as one batch: the weights are read once per token.
    """
    new = [1] * ids.shape[0]
    _check(model, state, ids[:, None], new)
    state.reserve(max(state.lengths) + 1)
    hidden = runner.token(model, state, ids)
    _advance(state, new)
    return hidden


def passes(state: DecodeState) -> list[list[IterationState]]:
    """The iterations in groups whose core passes at one token do not wait for each other."""
    groups: list[list[IterationState]] = []
    for part in state.loop:
        if groups and groups[-1][-1].it.lags and state.config.parsed_layout.tied:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


# ---------------------------------------------------------------------------- down-scaling


def absorb(model: SpiralFormer, part: IterationState, plan: Plan, h: Tensor) -> Tensor:
    """Takes the new states h (B, M, D) into the unfinished chunks.

    Returns the latents of the chunks that complete, for the rows where any does: (rows, chunks, D).
    """
    it = plan.it
    if it.chunk == 1:
        return h if len(plan.rows) == len(plan.new) else h[plan.rows]
    if part.recent.shape[1]:
        part.recent = _last(part.recent, h, plan.new)
    if h.shape[1] == 1 and all(plan.new):
        return join(model, part, h, plan.rows)
    scorer, wide, device = scorer_of(model, part), part.total.dtype, h.device

    # many tokens: lay each row out on its chunk grid, the first chunk going on from the state
    phase = torch.tensor([it.phase_of(start) for start in plan.starts], device=device)
    new = torch.tensor(plan.new, device=device)
    count = max(
        -(-(it.phase_of(start) + n) // it.chunk)
        for start, n in zip(plan.starts, plan.new, strict=True)
    )
    source = torch.arange(count * it.chunk, device=device) - phase[:, None]  # B places
    real = ((source >= 0) & (source < new[:, None])).unflatten(1, (count, it.chunk))
    source = source.clamp(0, h.shape[1] - 1)

    def to_grid(x: Tensor) -> Tensor:  # B M . → B N G .
        return look_up(x, source).unflatten(1, (count, it.chunk)).to(wide)

    members = to_grid(h)
    if scorer is not None:
        scores = to_grid(scorer(h)).squeeze(-1).masked_fill(~real, FLOOR)  # B N G
        peak = scores.amax(-1)
        peak[:, 0] = torch.maximum(peak[:, 0], part.peak)
        alpha = torch.exp(scores - peak[:, :, None]) * real
        weight = alpha.sum(-1)
        fade = torch.exp(part.peak - peak[:, 0])
        weight[:, 0] += part.weight * fade
    else:
        alpha, fade = real.to(wide), torch.ones_like(part.total[:, 0])
    total = (alpha[:, :, None] @ members).squeeze(2)  # B N D
    total[:, 0] += part.total * fade[:, None]
    width = max(plan.done, default=0)
    # the largest member weighs exp(0), so only the padding of shorter rows weighs less than 1
    z = total[:, :width] / (weight[:, :width, None].clamp_min(1) if scorer else it.chunk)

    done = torch.tensor(plan.done, device=device)
    last = done.clamp_max(count - 1)[:, None]  # the chunk left unfinished, if there is one
    part.total = look_up(total, last).squeeze(1)
    if scorer is not None:
        part.peak = peak.gather(1, last).squeeze(1)
        part.weight = weight.gather(1, last).squeeze(1)
    _clear(part, done >= count)
    return z[plan.rows].to(h.dtype)


def join(model: SpiralFormer, part: IterationState, h: Tensor, ended: list[int]) -> Tensor:
    """One state of every row, h (B, 1, D), joins its unfinished chunk: a step of the online
    softmax, or of the sum where nothing is scored. Returns the latents of the rows whose chunk
    `ended`, which start anew."""
    state, scorer = h[:, 0].to(part.total.dtype), scorer_of(model, part)
    if scorer is None:
        part.total = part.total + state
    else:
        score = scorer(h)[:, 0, 0].to(part.total.dtype)
        peak = torch.maximum(part.peak, score)
        fade, share = torch.exp(part.peak - peak), torch.exp(score - peak)
        part.peak, part.weight = peak, part.weight * fade + share
        part.total = part.total * fade[:, None] + share[:, None] * state
    if not ended:
        return h[:0]
    z = part.total / (part.it.chunk if scorer is None else part.weight[:, None])
    if len(ended) == h.shape[0]:
        rows = torch.ones(h.shape[0], dtype=torch.bool, device=h.device)
    else:
        rows = torch.tensor([row in ended for row in range(h.shape[0])], device=h.device)
        z = z[torch.tensor(ended, device=h.device)]
    _clear(part, rows)
    return z[:, None].to(h.dtype)


def scorer_of(model: SpiralFormer, part: IterationState) -> nn.Module | None:
    return model.scalings[part.it.index].downscale.scorer if part.peak.numel() else None


def _clear(part: IterationState, rows: Tensor) -> None:
    """Starts a new chunk in the rows of the mask."""
    part.total = part.total.masked_fill(rows[:, None], 0)
    if part.peak.numel():
        part.peak = part.peak.masked_fill(rows, FLOOR)
        part.weight = part.weight.masked_fill(rows, 0)


# ---------------------------------------------------------------------------- up-scaling


class Bank(NamedTuple):
    """Latents that tokens may read, oldest first, and how each is spread over its chunk."""

    latents: Tensor  # B W D
    allocations: Tensor  # B W G
    ends: list[int]  # the number of the chunk after the last one, per row


def kept(part: IterationState, ends: list[int]) -> Bank:
    return Bank(part.latents, part.allocations, ends)


def keep(model: SpiralFormer, part: IterationState, plan: Plan, found: Tensor | None) -> Bank:
    """Keeps the newest latents. Returns the bank of all that the new tokens may read: those kept
    before, then those just `found` (rows, chunks, D)."""
    if found is None:
        return kept(part, plan.held)
    ends = [held + found.shape[1] for held in plan.held]
    if not part.latents.shape[1] and len(plan.rows) == len(plan.new):  # read at once, none is kept
        return Bank(found, part.allocations, ends)
    if min(plan.new) == max(plan.new) == 1:  # one token reads nothing older than what is kept
        hold(model, part, plan, found)
        return kept(part, [held + done for held, done in zip(plan.held, plan.done, strict=True)])
    old = kept(part, plan.held)
    found, allocation = hold(model, part, plan, found)
    return Bank(
        torch.cat((old.latents, found), 1), torch.cat((old.allocations, allocation), 1), ends
    )


def hold(
    model: SpiralFormer, part: IterationState, plan: Plan, found: Tensor
) -> tuple[Tensor, Tensor]:
    """The newest latents (rows, chunks, D) enter the ring. Returns them and how each is spread
    over its chunk, for all rows."""
    if part.it.chunk == 1:
        allocation = found.new_ones((*found.shape[:2], 1))
    else:
        allocation = model.scalings[part.it.index].upscale.allocation(found)
        allocation = allocation.expand(*found.shape[:2], -1)
    if len(plan.rows) < len(plan.new):
        found, allocation = (
            x.new_zeros((len(plan.new), *x.shape[1:])).index_copy_(
                0, torch.tensor(plan.rows, device=x.device), x
            )
            for x in (found, allocation)
        )
    part.latents = _last(part.latents, found, plan.done)
    part.allocations = _last(part.allocations, allocation, plan.done)
    return found, allocation


def read(part: IterationState, plan: Plan, width: int, bank: Bank) -> Tensor:
    """ũ of the new tokens (B, M, D): token i reads chunk π(i-s), by index, and zero where i < s."""
    it, (latents, allocations, ends) = plan.it, bank
    if it.chunk == 1 and it.shift == 0:
        return latents[:, latents.shape[1] - width :]
    if width == 1 and len(set(plan.starts)) == 1:
        token = plan.starts[0] - it.shift
        at = it.chunk_of(token) - ends[0] + latents.shape[1]
        if token < 0 or at < 0:
            return latents.new_zeros((latents.shape[0], 1, latents.shape[2]))
        return latents[:, at : at + 1] * allocations[:, at, it.phase_of(token), None, None]
    if not latents.shape[1]:
        return latents.new_zeros((len(plan.new), width, latents.shape[2]))
    device = latents.device
    starts = torch.tensor(plan.starts, device=device)
    source = starts[:, None] + torch.arange(width, device=device) - it.shift  # B M
    chunk = (source + it.offset).div(it.chunk, rounding_mode="floor")
    phases = (source + it.offset).remainder(it.chunk)
    first = torch.tensor(ends, device=device) - latents.shape[1]
    index = chunk - first[:, None]
    legal = (source >= 0) & (index >= 0) & (index < latents.shape[1])
    index = index.clamp(0, latents.shape[1] - 1)
    share = allocations.flatten(1).gather(1, index * it.chunk + phases) * legal
    return look_up(latents, index) * share[:, :, None]


# ---------------------------------------------------------------------------- small helpers


def _last(old: Tensor, new: Tensor, counts: Sequence[int]) -> Tensor:
    """The last W entries of: `old` (B, W, D), then the first `counts[b]` of `new` (B, M, D)."""
    width = old.shape[1]
    if min(counts) == max(counts) >= width:
        return new[:, counts[0] - width : counts[0]].clone()
    both = torch.cat((old, new), 1)
    if len(set(counts)) == 1:
        return both[:, counts[0] : counts[0] + width].clone()
    first = torch.tensor(counts, device=old.device)
    index = first[:, None] + torch.arange(width, device=old.device)
    return look_up(both, index)


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


def _advance(state: DecodeState, new: list[int]) -> None:
    state.lengths = [length + n for length, n in zip(state.lengths, new, strict=True)]
    state.oldest = [
        max(oldest, length - state.history)
        for oldest, length in zip(state.oldest, state.lengths, strict=True)
    ]
