"""What a decoder remembers, typed and shaped.

Shapes: B rows, N layers, H heads, K head size, C capacity, M new entries, D width, G chunk size,
R latents kept, W states kept. Lengths live on the host as plain integers: which row triggers which
iteration is known without asking the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spiralformer.config import Iteration, SpiralConfig
from spiralformer.errors import UserError
from spiralformer.model import SpiralFormer
from spiralformer.model.blocks import gather_rows

ChunkState = Any  # a named tuple of tensors, an operator's own (see `model.operators`)


class StateError(UserError, ValueError):
    """A decode state that cannot be used as asked."""


def map_state(state: ChunkState, f: Callable[..., Tensor], *others: ChunkState) -> ChunkState:
    """`f` of each tensor of a chunk state, and of the same one of the others."""
    mapped = [f(*tensors) for tensors in zip(state, *others, strict=True)]
    return type(state)(*mapped) if mapped else state


def choose_rows(rows: Tensor, one: ChunkState, other: ChunkState) -> ChunkState:
    """The state `one` in the rows of the mask (B), and `other` elsewhere."""
    return map_state(
        one, lambda a, b: torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b), other
    )


def take(x: Tensor, first: Sequence[int], width: int) -> Tensor:
    """Entries first[b] … first[b]+width-1 of each row b: (B, L, D) → (B, width, D)"""
    if len(set(first)) == 1:
        return x[:, first[0] : first[0] + width]
    index = torch.tensor(first, device=x.device)[:, None] + torch.arange(width, device=x.device)
    return gather_rows(x, index.clamp_max(x.shape[1] - 1))


# ---------------------------------------------------------------------------- keys and values


def empty_cache(model: SpiralFormer, layers: int, batch: int, capacity: int) -> Tensor:
    """Keys and values, (2, N, B, H, C, K), of one run of a stack: of f_pre, of f_post, or of f_loop
    at one iteration."""
    config = model.config
    shape = (2, layers, batch, config.num_heads, capacity, config.head_size)
    return model.embedding.weight.new_zeros(shape)


class CacheWrite:
    """New entries for some rows of a cache: stored, then attended to with all before them."""

    def __init__(
        self,
        cache: Tensor,  # 2 N B H C K
        held: Sequence[int],  # entries that each row has
        new: Sequence[int],  # and gets
        rows: Sequence[int] | None = None,  # None: all the cache's rows, in order
    ) -> None:
        self.cache, self.held, self.new, self.rows = cache, held, new, rows
        self.batch = len(held)
        self.width = max(new)
        self.end = max(map(sum, zip(held, new, strict=True)))
        self.fresh = not any(held)
        self.aligned = len(set(held)) == 1 and len(set(new)) == 1

    # on the device, where they are needed

    @cached_property
    def positions(self) -> Tensor:
        """B M"""
        device = self.cache.device
        return torch.tensor(self.held, device=device)[:, None] + torch.arange(
            self.width, device=device
        )

    @cached_property
    def index(self) -> Tensor | slice:
        """B: the rows of the cache"""
        return (
            slice(None) if self.rows is None else torch.tensor(self.rows, device=self.cache.device)
        )

    @cached_property
    def mask(self) -> Tensor | None:
        """B 1 M end: what each new entry may see; None if all"""
        return None if self.aligned and self.width == 1 else self._before(self.positions)

    @cached_property
    def last_mask(self) -> Tensor | None:
        """B 1 1 end: what the last new entry of each row may see; None if all"""
        if self.aligned:
            return None
        # a row without new entries sees something too: softmax over nothing is NaN
        steps = torch.tensor([max(n - 1, 0) for n in self.new], device=self.cache.device)
        return self._before(self.positions[:, :1] + steps[:, None])

    def _before(self, positions: Tensor) -> Tensor:
        return (torch.arange(self.end, device=positions.device) <= positions[:, :, None])[:, None]

    @cached_property
    def moves(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """From which (row, step) to which (row, place): real entries only, never padding"""
        real = torch.arange(self.width) < torch.tensor(self.new)[:, None]  # on the host: no waiting
        row, step = real.nonzero().to(self.cache.device).unbind(1)
        target = row if isinstance(self.index, slice) else self.index[row]
        return (row, step), (target, self.positions[row, step])

    def __call__(self, layer: int, attend: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache[:, layer]  # B H C K
        for store, new in ((keys, k), (values, v)):
            if self.aligned:
                store[self.index, :, self.end - self.width : self.end] = new
            else:
                (row, step), (to_row, to_place) = self.moves
                store[to_row, :, to_place] = new[row, :, step]
        last = q.shape[2] < self.width  # the query of each row's last new entry, alone
        if self.fresh and (self.aligned or not last):
            return attend(q, k, v)
        keys, values = (x[:, :, : self.end][self.index] for x in (keys, values))
        return attend(q, keys, values, self.last_mask if last else self.mask)


# ---------------------------------------------------------------------------- one iteration


@dataclass
class IterationState:
    """One loop iteration: its keys and values, its chunks under way, and its finished latents.

    With a `history`, the states of the last tokens are kept too, which is what allows to truncate.
    """

    iteration: Iteration
    cache: Tensor  # 2 N B H C K
    down: ChunkState  # of the down-scaling operator, for the chunk under way of each row
    up: ChunkState  # of the up-scaling operator
    latents: Tensor  # B R D: finished latents, oldest first, the newest at the end
    allocations: Tensor  # B R G: λ·β of each
    recent: Tensor  # B W D: states of the last W tokens, the newest at the end

    @classmethod
    def empty(
        cls, model: SpiralFormer, iteration: Iteration, batch: int, capacity: int
    ) -> IterationState:
        weight, size = model.embedding.weight, iteration.chunk
        width, kept = model.config.hidden_size, iteration.latents_kept
        scaling = model.scalings[iteration.index]
        return cls(
            iteration=iteration,
            cache=empty_cache(model, iteration.layers, batch, iteration.chunks(capacity)),
            down=scaling.downscale.start((batch,), weight) if size > 1 else (),
            up=scaling.upscale.start((batch,), weight) if size > 1 else (),
            latents=weight.new_zeros((batch, kept, width)),
            allocations=weight.new_zeros((batch, kept, size)),
            recent=weight.new_zeros((batch, 0, width)),
        )

    def keep_history(self, history: int) -> None:
        """Makes room for more of the past; what came before is not known."""
        size, kept = self.iteration.chunk, self.iteration.latents_kept
        longer = lambda x, width: F.pad(x, (0, 0, width - x.shape[1], 0))
        if kept:
            kept += -(-history // size)
        self.latents, self.allocations = longer(self.latents, kept), longer(self.allocations, kept)
        if size > 1:
            self.recent = longer(self.recent, history + size - 1)

    def tensors(self) -> list[Tensor]:
        return [self.cache, *self.down, *self.up, self.latents, self.allocations, self.recent]

    def reorder(self, rows: Tensor) -> None:
        self.cache = self.cache[:, :, rows]
        self.down, self.up = (map_state(s, lambda x: x[rows]) for s in (self.down, self.up))
        for name in ("latents", "allocations", "recent"):
            setattr(self, name, getattr(self, name)[rows])

    def join(self, other: IterationState) -> None:
        behind = lambda one, more: torch.cat((one, more))
        self.cache = torch.cat((self.cache, other.cache), 2)
        self.down = map_state(self.down, behind, other.down)
        self.up = map_state(self.up, behind, other.up)
        for name in ("latents", "allocations", "recent"):
            setattr(self, name, behind(getattr(self, name), getattr(other, name)))

    def truncate(self, model: SpiralFormer, lengths: Sequence[int], wanted: Sequence[int]) -> None:
        """The chunks under way are pooled anew from the recent states, and the latents move back
        into place. Rows that lose nothing keep what they have."""
        iteration, device = self.iteration, self.latents.device
        pairs = list(zip(lengths, wanted, strict=True))
        back = [iteration.chunks(old) - iteration.chunks(new) for old, new in pairs]
        self.latents, self.allocations = (
            _move_back(x, back) for x in (self.latents, self.allocations)
        )
        if iteration.chunk == 1:
            return
        back = [old - new for old, new in pairs]
        self.recent = _move_back(self.recent, back)
        states = self.recent[:, -min(iteration.chunk - 1, self.recent.shape[1]) :]  # B G-1 D
        width = states.shape[1]
        members = torch.tensor([min(iteration.phase_of(n), n) for n in wanted], device=device)
        real = torch.arange(width, device=device) >= width - members[:, None]
        changed = torch.tensor(back, device=device) > 0
        scaling = model.scalings[iteration.index]
        for name, operator in (("down", scaling.downscale), ("up", scaling.upscale)):
            again = operator.start((len(back),), states)
            if width:
                again = operator.push(again, states, real)
            setattr(self, name, choose_rows(changed, again, getattr(self, name)))


def _move_back(x: Tensor, by: Sequence[int]) -> Tensor:
    """Shifts each row of x (B, W, …) towards its end by `by` places; zeros come in at the front."""
    most = max(by)
    return take(F.pad(x, (0, 0, most, 0)), [most - n for n in by], x.shape[1])


# ---------------------------------------------------------------------------- the whole state


@dataclass
class DecodeState:
    """Everything needed to go on from `lengths[b]` tokens of each row b."""

    config: SpiralConfig
    lengths: list[int]  # tokens seen, per row
    capacity: int  # tokens that fit before the caches grow
    history: int  # how many tokens `truncate` may take back
    oldest: list[int]  # the shortest length each row can still be truncated to
    pre: Tensor  # 2 N B H C K
    post: Tensor
    loop: list[IterationState]

    @classmethod
    def empty(
        cls, model: SpiralFormer, batch: int, capacity: int = 64, *, history: int = 0
    ) -> DecodeState:
        """A state that has seen nothing. The caches double when full."""
        capacity = max(1, min(capacity, model.config.max_length))
        layout = model.config.parsed_layout
        state = cls(
            config=model.config,
            lengths=[0] * batch,
            capacity=capacity,
            history=0,
            oldest=[0] * batch,
            pre=empty_cache(model, layout.pre, batch, capacity),
            post=empty_cache(model, layout.post, batch, capacity),
            loop=[
                IterationState.empty(model, iteration, batch, capacity)
                for iteration in model.config.iterations
            ],
        )
        state.keep_history(history)
        return state

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def tensors(self) -> list[Tensor]:
        return [self.pre, self.post, *(x for part in self.loop for x in part.tensors())]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    @property
    def needs_history(self) -> bool:
        """Whether anything but keys and values is kept of the past."""
        return any(part.iteration.chunk > 1 or part.iteration.latents_kept for part in self.loop)

    def advance(self, new: Sequence[int]) -> None:
        """Row b has seen `new[b]` tokens more."""
        self.lengths = [length + n for length, n in zip(self.lengths, new, strict=True)]
        self.oldest = [
            max(oldest, length - self.history)
            for oldest, length in zip(self.oldest, self.lengths, strict=True)
        ]

    # ------------------------------------------------------------------ room

    def reserve(self, length: int) -> None:
        """Makes room for rows of `length` tokens."""
        longest = self.config.max_length
        if length > longest:
            raise StateError(f"{length} tokens are more than the model's max_length {longest}")
        if length <= self.capacity:
            return
        self._widen(min(max(length, 2 * self.capacity), longest))

    def _widen(self, capacity: int) -> None:
        self.capacity = capacity
        wider = lambda cache, places: F.pad(cache, (0, 0, 0, places - cache.shape[4]))
        self.pre, self.post = wider(self.pre, self.capacity), wider(self.post, self.capacity)
        for part in self.loop:
            part.cache = wider(part.cache, part.iteration.chunks(self.capacity))

    def keep_history(self, history: int) -> None:
        """From here on, `truncate` can take back so many tokens."""
        if history > self.history:
            self.history, self.oldest = history, list(self.lengths)
            for part in self.loop:
                part.keep_history(history)

    # ------------------------------------------------------------------ rows

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Row k becomes what row `rows[k]` was: to follow beams, to drop or to repeat rows."""
        index = torch.as_tensor(rows, device=self.pre.device)
        order = index.tolist()
        if any(not 0 <= row < self.batch for row in order):
            raise StateError(f"rows {order} do not all lie in 0…{self.batch - 1}")
        self.lengths = [self.lengths[row] for row in order]
        self.oldest = [self.oldest[row] for row in order]
        self.pre, self.post = self.pre[:, :, index], self.post[:, :, index]
        for part in self.loop:
            part.reorder(index)

    def join(self, other: DecodeState) -> None:
        """Takes the rows of another state of this model in, behind its own; the other is used up.
        Rows may be anywhere in their chunks."""
        if other.config != self.config:
            raise StateError("a state of another model cannot join")
        for state, peer in ((self, other), (other, self)):
            state.keep_history(peer.history)
            state._widen(max(state.capacity, peer.capacity))
        self.lengths, self.oldest = self.lengths + other.lengths, self.oldest + other.oldest
        self.pre = torch.cat((self.pre, other.pre), 2)
        self.post = torch.cat((self.post, other.post), 2)
        for part, more in zip(self.loop, other.loop, strict=True):
            part.join(more)

    def fork(self, times: int = 1) -> DecodeState:
        """A copy that goes its own way, with every row `times` over, side by side."""
        copy = replace(self, loop=[replace(part) for part in self.loop])
        copy.reorder([row for row in range(self.batch) for _ in range(times)])  # indexing copies
        return copy

    def truncate(self, model: SpiralFormer, lengths: Sequence[int]) -> None:
        """Takes back the last tokens of each row, as if they had never been seen.

        Keys and values are simply forgotten; the rest reaches `history` tokens back."""
        wanted = list(lengths)
        if len(wanted) != self.batch:
            raise StateError(f"{len(wanted)} lengths for a state of {self.batch} rows")
        for row, (new, now, oldest) in enumerate(
            zip(wanted, self.lengths, self.oldest, strict=True)
        ):
            known = new >= oldest or new == 0 or not self.needs_history
            if not 0 <= new <= now or not known:
                raise StateError(
                    f"row {row} of {now} tokens cannot be truncated to {new}: only lengths "
                    f"{oldest}…{now} are within its history; make the state with history="
                    f"{max(now - new, 1)} or more"
                )
        if wanted == self.lengths:
            return
        for part in self.loop:
            part.truncate(model, self.lengths, wanted)
        self.lengths = wanted
        self.oldest = [min(old, new) for old, new in zip(self.oldest, wanted, strict=True)]
