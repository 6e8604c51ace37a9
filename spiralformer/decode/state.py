"""What a decoder remembers, typed and shaped.

Shapes: B rows, N layers, H heads, K head size, C capacity, M new entries, D width, G chunk size,
R latents kept. Lengths live on the host as plain integers: which row triggers which iteration is
known without asking the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from spiralformer.config import Iteration, SpiralConfig
from spiralformer.errors import UserError
from spiralformer.model import SpiralFormer
from spiralformer.model.blocks import look_up

FLOOR = -1e30  # below every score: the running maximum of a chunk that has no member yet


class StateError(UserError, ValueError):
    """A decode state that cannot be used as asked."""


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


class Append:
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
        self.end = max(h + n for h, n in zip(held, new, strict=True))
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
        device = self.cache.keys.device
        steps = torch.arange(self.width, device=device)
        real = steps < torch.tensor(self.new, device=device)[:, None]
        row, step = real.nonzero(as_tuple=True)
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


def run_stack(
    stack, inputs: Sequence[Tensor], appends: Sequence[Append], at: Tensor | None = None
) -> list[Tensor]:
    """One pass of a stack over several groups of rows, each with a cache of its own.

    The groups go through the layers as one batch, so the weights are read once; only attention
    looks at them one by one. All groups must bring the same number of entries a row. `at` is the
    last entry of each row, if no other is wanted (of one group only).
    """
    if len(inputs) == 1:
        only = appends[0]
        caches = [partial(only, layer) for layer in range(len(stack.blocks))]
        return [stack(inputs[0], only.positions, caches, at)]
    sizes = [append.batch for append in appends]

    def attend_in_groups(layer: int, attend: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(appends, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([append(layer, attend, *qkv) for append, *qkv in parts])

    caches = [partial(attend_in_groups, layer) for layer in range(len(stack.blocks))]
    positions = torch.cat([append.positions for append in appends])
    return list(stack(torch.cat(list(inputs)), positions, caches).split(sizes))


# ---------------------------------------------------------------------------- one iteration


@dataclass
class IterationState:
    """One loop iteration: its keys and values, its unfinished chunk, and its finished latents.

    The unfinished chunk is an online softmax (running maximum, normaliser, weighted sum), so no
    G×D buffer exists. With a `history`, the states of the last tokens are kept too, which is what
    allows to truncate.
    """

    it: Iteration
    cache: StackCache
    total: Tensor  # B D: weighted sum over the members of the unfinished chunk; (B, 0) if G = 1
    peak: Tensor  # B: largest score so far; (0) with mean pooling
    weight: Tensor  # B: sum of exp(score - peak); (0) with mean pooling
    latents: Tensor  # B R D: finished latents, oldest first, the newest at the end
    allocations: Tensor  # B R G: λ·β of each
    recent: Tensor  # B W D: states of the last W tokens, the newest at the end

    @classmethod
    def empty(
        cls, model: SpiralFormer, it: Iteration, batch: int, capacity: int, history: int
    ) -> IterationState:
        weight = model.embedding.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        width, chunked = model.config.hidden_size, it.chunk > 1
        scored = chunked and model.config.downscale == "self_aggregation"
        kept = it.ring + -(-history // it.chunk)
        return cls(
            it=it,
            cache=StackCache.empty(it.layers, batch, it.chunks(capacity), model),
            total=weight.new_zeros((batch, width if chunked else 0), dtype=wide),
            peak=weight.new_full((batch if scored else 0,), FLOOR, dtype=wide),
            weight=weight.new_zeros((batch if scored else 0,), dtype=wide),
            latents=weight.new_zeros((batch, kept, width)),
            allocations=weight.new_zeros((batch, kept, it.chunk)),
            recent=weight.new_zeros(
                (batch, history + it.chunk - 1 if history and chunked else 0, width)
            ),
        )

    def small_tensors(self) -> list[str]:
        """The fields beside the cache whose first dimension is the row."""
        return [f.name for f in fields(self) if f.name not in ("it", "cache")]


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
    loop: list[IterationState] = field(default_factory=list)

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
                IterationState.empty(model, it, batch, capacity, history)
                for it in model.config.iterations
            ],
        )

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def tensors(self) -> list[Tensor]:
        found = [self.pre.keys, self.pre.values, self.post.keys, self.post.values]
        for part in self.loop:
            found += [part.cache.keys, part.cache.values]
            found += [getattr(part, name) for name in part.small_tensors()]
        return found

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

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
            part.cache.resize(part.it.chunks(capacity))

    # ------------------------------------------------------------------ rows

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Row k becomes what row `rows[k]` was: to follow beams, to drop or to repeat rows."""
        index = torch.as_tensor(rows, device=self.pre.keys.device)
        order = index.tolist()
        if any(not 0 <= row < self.batch for row in order):
            raise StateError(f"rows {order} do not all lie in 0…{self.batch - 1}")
        self.lengths = [self.lengths[row] for row in order]
        self.oldest = [self.oldest[row] for row in order]
        self.pre.reorder(index)
        self.post.reorder(index)
        for part in self.loop:
            part.cache.reorder(index)
            for name in part.small_tensors():
                value = getattr(part, name)
                if value.shape[0]:
                    setattr(part, name, value[index])

    def clone(self) -> DecodeState:
        """A copy that goes its own way."""
        return self.fork(1)

    def fork(self, times: int) -> DecodeState:
        """A new state with every row `times` over, side by side."""
        copy = DecodeState(
            config=self.config,
            lengths=list(self.lengths),
            capacity=self.capacity,
            fixed=self.fixed,
            history=self.history,
            oldest=list(self.oldest),
            pre=StackCache(self.pre.keys, self.pre.values),
            post=StackCache(self.post.keys, self.post.values),
            loop=[
                IterationState(
                    it=part.it,
                    cache=StackCache(part.cache.keys, part.cache.values),
                    **{name: getattr(part, name) for name in part.small_tensors()},
                )
                for part in self.loop
            ],
        )
        # indexing copies, so nothing stays shared; peak and weight may be empty and are never
        # changed in place
        copy.reorder([row for row in range(self.batch) for _ in range(times)])
        return copy

    def truncate(self, model: SpiralFormer, lengths: Sequence[int]) -> None:
        """Takes back the last tokens of each row, as if they had never been seen.

        Keys and values are simply forgotten. The unfinished chunks are aggregated anew from the
        recent states, and the latents move back into place: both reach `history` tokens back.
        """
        wanted = list(lengths)
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
        device = self.pre.keys.device
        for part in self.loop:
            it = part.it
            back = [it.chunks(a) - it.chunks(b) for a, b in zip(self.lengths, wanted, strict=True)]
            part.latents = _move_back(part.latents, torch.tensor(back, device=device))
            part.allocations = _move_back(part.allocations, torch.tensor(back, device=device))
            if it.chunk == 1:
                continue
            back = [a - b for a, b in zip(self.lengths, wanted, strict=True)]
            part.recent = _move_back(part.recent, torch.tensor(back, device=device))
            members = torch.tensor(
                [min(it.phase_of(n), n) for n in wanted], device=device
            )  # of the unfinished chunk
            width = it.chunk - 1
            states = part.recent[:, part.recent.shape[1] - width :]  # B G-1 D
            real = torch.arange(width, device=device) >= width - members[:, None]
            wide = part.total.dtype
            if part.peak.numel():
                scores = model.scalings[it.index].downscale.scorer(states).squeeze(-1).to(wide)
                scores = scores.masked_fill(~real, FLOOR)
                part.peak = scores.amax(1) if width else torch.full_like(part.peak, FLOOR)
                alpha = torch.exp(scores - part.peak[:, None]) * real
                part.weight = alpha.sum(1)
            else:
                alpha = real.to(wide)
            part.total = (alpha[:, None] @ states.to(wide)).squeeze(1)
        self.lengths = wanted
        self.oldest = [min(old, new) for old, new in zip(self.oldest, wanted, strict=True)]


def _move_back(x: Tensor, by: Tensor) -> Tensor:
    """Shifts each row of x (B, W, …) towards its end by `by` places; zeros come in at the front."""
    width = x.shape[1]
    source = torch.arange(width, device=x.device) - by[:, None]
    return look_up(x, source.clamp_min(0)) * (source >= 0)[:, :, None]
