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


# ---------------------------------------------------------------------------- keys and values


@dataclass
class StackCache:
    """Keys and values of one run of a stack: of f_pre, of f_post, or of f_loop at one iteration."""

    keys: Tensor  # N B H C K
    values: Tensor  # N B H C K

    @classmethod
    def empty(cls, layers: int, batch: int, capacity: int, like: SpiralFormer) -> StackCache:
        config, weight = like.config, like.embedding.weight
        shape = (layers, batch, config.num_heads, capacity, config.head_size)
        return cls(weight.new_zeros(shape), weight.new_zeros(shape))

    def resize(self, capacity: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((*old.shape[:3], capacity, old.shape[4]))
            kept = min(capacity, old.shape[3])
            new[:, :, :, :kept] = old[:, :, :, :kept]
            setattr(self, name, new)

    def reorder(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


class CacheWrite:
    """New entries for some rows of a StackCache: stored, then attended to with all before them."""

    def __init__(
        self,
        cache: StackCache,
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
        device = self.cache.keys.device
        starts = torch.tensor(self.held, device=device)
        return starts[:, None] + torch.arange(self.width, device=device)

    @cached_property
    def index(self) -> Tensor | None:
        """B: the rows of the cache"""
        return None if self.rows is None else torch.tensor(self.rows, device=self.cache.keys.device)

    @cached_property
    def mask(self) -> Tensor | None:
        """B 1 M end: what each new entry may see; None if all"""
        if self.fresh or (self.aligned and self.width == 1):
            return None
        ends = torch.arange(self.end, device=self.positions.device)
        return (ends <= self.positions[:, :, None])[:, None]

    @cached_property
    def last_mask(self) -> Tensor | None:
        """B 1 1 end: what the last new entry of each row may see; None if all"""
        if self.aligned:
            return None
        device = self.cache.keys.device
        seen = [held + new for held, new in zip(self.held, self.new, strict=True)]
        ends = torch.arange(self.end, device=device)
        # a row without new entries sees something too: softmax over nothing is NaN
        return (ends < torch.tensor(seen, device=device).clamp_min(1)[:, None])[:, None, None]

    @cached_property
    def moves(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """From which (row, step) to which (row, place): real entries only, never padding"""
        real = torch.arange(self.width) < torch.tensor(self.new)[:, None]  # on the host: no waiting
        row, step = real.nonzero().to(self.cache.keys.device).unbind(1)
        target = row if self.index is None else self.index[row]
        return (row, step), (target, self.positions[row, step])

    def __call__(self, layer: int, attend: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]  # B H C K
        for store, new in ((keys, k), (values, v)):
            if not self.aligned:
                (row, step), (to_row, to_place) = self.moves
                store[to_row, :, to_place] = new[row, :, step]
            elif self.index is None:
                store[:, :, self.end - self.width : self.end] = new
            else:
                store[self.index, :, self.end - self.width : self.end] = new
        last = q.shape[2] < self.width  # the query of each row's last new entry, alone
        if self.fresh and not (last and not self.aligned):
            return attend(q, k, v)
        keys, values = keys[:, :, : self.end], values[:, :, : self.end]
        if self.index is not None:
            keys, values = keys[self.index], values[self.index]
        return attend(q, keys, values, self.last_mask if last else self.mask)


# ---------------------------------------------------------------------------- one iteration


@dataclass
class IterationState:
    """One loop iteration: its keys and values, its chunks under way, and its finished latents.

    With a `history`, the states of the last tokens are kept too, which is what allows to truncate.
    """

    iteration: Iteration
    cache: StackCache
    down: ChunkState  # of the down-scaling operator, for the chunk under way of each row
    up: ChunkState  # of the up-scaling operator
    latents: Tensor  # B R D: finished latents, oldest first, the newest at the end
    allocations: Tensor  # B R G: λ·β of each
    recent: Tensor  # B W D: states of the last W tokens, the newest at the end

    @classmethod
    def empty(
        cls, model: SpiralFormer, iteration: Iteration, batch: int, capacity: int, history: int
    ) -> IterationState:
        weight, size = model.embedding.weight, iteration.chunk
        width, chunked = model.config.hidden_size, size > 1
        kept, recent = cls.windows(iteration, history)
        scaling = model.scalings[iteration.index]
        return cls(
            iteration=iteration,
            cache=StackCache.empty(iteration.layers, batch, iteration.chunks(capacity), model),
            down=scaling.downscale.start((batch,), weight) if chunked else (),
            up=scaling.upscale.start((batch,), weight) if chunked else (),
            latents=weight.new_zeros((batch, kept, width)),
            allocations=weight.new_zeros((batch, kept, size)),
            recent=weight.new_zeros((batch, recent, width)),
        )

    @staticmethod
    def windows(iteration: Iteration, history: int) -> tuple[int, int]:
        """How many latents and how many states are kept."""
        size = iteration.chunk
        states = history + size - 1 if history and size > 1 else 0
        return iteration.latents_kept + -(-history // size), states

    def keep_history(self, history: int) -> None:
        """Makes room for more of the past; what came before is not known."""
        kept, states = self.windows(self.iteration, history)
        self.latents, self.allocations, self.recent = (
            F.pad(x, (0, 0, max(0, width - x.shape[1]), 0))
            for x, width in (
                (self.latents, kept),
                (self.allocations, kept),
                (self.recent, states),
            )
        )

    def tensors(self) -> list[Tensor]:
        small = [*self.down, *self.up, self.latents, self.allocations, self.recent]
        return [self.cache.keys, self.cache.values, *small]

    def reorder(self, rows: Tensor) -> None:
        self.cache.reorder(rows)
        self.down, self.up = (map_state(s, lambda x: x[rows]) for s in (self.down, self.up))
        for name in ("latents", "allocations", "recent"):
            setattr(self, name, getattr(self, name)[rows])

    def truncate(self, model: SpiralFormer, lengths: Sequence[int], wanted: Sequence[int]) -> None:
        """The chunks under way are pooled anew from the recent states, and the latents move back
        into place. Rows that lose nothing keep what they have."""
        iteration, device = self.iteration, self.latents.device
        pairs = list(zip(lengths, wanted, strict=True))
        back = [iteration.chunks(old) - iteration.chunks(new) for old, new in pairs]
        self.latents = _move_back(self.latents, torch.tensor(back, device=device))
        self.allocations = _move_back(self.allocations, torch.tensor(back, device=device))
        if iteration.chunk == 1:
            return
        back = [old - new for old, new in pairs]
        self.recent = _move_back(self.recent, torch.tensor(back, device=device))
        members = torch.tensor([min(iteration.phase_of(n), n) for n in wanted], device=device)
        states = self.recent[:, -min(iteration.chunk - 1, self.recent.shape[1]) :]  # B G-1 D
        width = states.shape[1]
        real = torch.arange(width, device=device) >= width - members[:, None]
        changed = torch.tensor([bool(n) for n in back], device=device)
        scaling = model.scalings[iteration.index]
        for name, operator in (("down", scaling.downscale), ("up", scaling.upscale)):
            again = operator.start((len(back),), states)
            if width:
                again = operator.push(again, states, real)
            setattr(self, name, choose_rows(changed, again, getattr(self, name)))


def choose_rows(rows: Tensor, one: ChunkState, other: ChunkState) -> ChunkState:
    """The state `one` in the rows of the mask (B), and `other` elsewhere."""
    return map_state(
        one, lambda a, b: torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b), other
    )


def _move_back(x: Tensor, by: Tensor) -> Tensor:
    """Shifts each row of x (B, W, …) towards its end by `by` places; zeros come in at the front."""
    if not x.shape[1]:
        return x
    source = torch.arange(x.shape[1], device=x.device) - by[:, None]
    return gather_rows(x, source.clamp_min(0)) * (source >= 0)[:, :, None]


# ---------------------------------------------------------------------------- the whole state


@dataclass
class DecodeState:
    """Everything needed to go on from `lengths[b]` tokens of each row b."""

    config: SpiralConfig
    lengths: list[int]  # tokens seen, per row
    capacity: int  # tokens that fit before the caches grow
    fixed: bool  # refuse to grow
    history: int  # how many tokens `truncate` may take back
    oldest: list[int]  # the shortest length each row can still be truncated to
    pre: StackCache
    post: StackCache
    loop: list[IterationState]

    @classmethod
    def empty(
        cls,
        model: SpiralFormer,
        batch: int,
        capacity: int = 64,
        *,
        fixed: bool = False,
        history: int = 0,
    ) -> DecodeState:
        """A state that has seen nothing. The caches double when full, unless `fixed`."""
        capacity = max(1, min(capacity, model.config.max_length))
        layout = model.config.parsed_layout
        return cls(
            config=model.config,
            lengths=[0] * batch,
            capacity=capacity,
            fixed=fixed,
            history=history,
            oldest=[0] * batch,
            pre=StackCache.empty(layout.pre, batch, capacity, model),
            post=StackCache.empty(layout.post, batch, capacity, model),
            loop=[
                IterationState.empty(model, iteration, batch, capacity, history)
                for iteration in model.config.iterations
            ],
        )

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def tensors(self) -> list[Tensor]:
        ends = [self.pre.keys, self.pre.values, self.post.keys, self.post.values]
        return ends + [tensor for part in self.loop for tensor in part.tensors()]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

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
        if length > self.config.max_length:
            raise StateError(
                f"{length} tokens are more than the model's max_length {self.config.max_length}"
            )
        if length <= self.capacity:
            return
        if self.fixed:
            raise StateError(
                f"{length} tokens do not fit the fixed capacity of {self.capacity}; "
                "make the state with a larger capacity or with fixed=False"
            )
        self.resize(min(max(length, 2 * self.capacity), self.config.max_length))

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.pre.resize(capacity)
        self.post.resize(capacity)
        for part in self.loop:
            part.cache.resize(part.iteration.chunks(capacity))

    def keep_history(self, history: int) -> None:
        """From here on, `truncate` can take back so many tokens."""
        if history > self.history:
            self.history, self.oldest = history, list(self.lengths)
            for part in self.loop:
                part.keep_history(history)

    # ------------------------------------------------------------------ rows

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Row k becomes what row `rows[k]` was: to follow beams, to drop or to repeat rows."""
        index = torch.as_tensor(rows, device=self.pre.keys.device)
        order = index.tolist()
        if any(not 0 <= row < self.batch for row in order):
            raise StateError(f"rows {order} do not all lie in 0…{self.batch - 1}")
        self.lengths = [self.lengths[row] for row in order]
        self.oldest = [self.oldest[row] for row in order]
        parts: list[StackCache | IterationState] = [self.pre, self.post, *self.loop]
        for part in parts:
            part.reorder(index)

    def clone(self) -> DecodeState:
        """A copy that goes its own way."""
        return self.fork(1)

    def fork(self, times: int) -> DecodeState:
        """A new state with every row `times` over, side by side."""
        copy = replace(
            self,
            pre=replace(self.pre),
            post=replace(self.post),
            loop=[replace(part, cache=replace(part.cache)) for part in self.loop],
        )
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
            if not 0 <= new <= now or (new < oldest and new != 0):
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
