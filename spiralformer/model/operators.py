"""From tokens to chunks and back: down-scaling, up-scaling and the causal right-shift.

An operator is one class: `forward` for a whole sequence; `start` and `push` for a chunk whose
members come one after the other, as decoding sees them, with the state between them. `forward` is
written by `push`, so both are the same thing. A new operator is a class here, its name in the table
below it, and its cost in `spiralformer.costs`.

Shapes: B batch, L tokens, N chunks, G chunk size, D width, M members. With offset ω the chunk grid
starts ω places before the first token: token i sits at grid place i + ω.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spiralformer.config import Iteration, SpiralConfig

FLOOR = -1e30  # below every score: that of a place without a member


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax in at least float32, returned in the input's dtype."""
    return x.softmax(dim, dtype=at_least_float32(x)).to(x.dtype)


def at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def pad(x: Tensor, front: int, back: int) -> Tensor:
    """Zeros before and after the entries of x, (B, L, D); a negative number takes some away."""
    return F.pad(x, (0, 0, front, back)) if front or back else x


def to_grid(x: Tensor, iteration: Iteration) -> tuple[Tensor, Tensor | None]:
    """(B, L, D) → (B, N, G, D), the members of the complete chunks, and which of them are real,
    (N, G): the first chunk has ω places before token 0. None if all are."""
    chunks, size = iteration.chunks(x.shape[1]), iteration.chunk
    if not chunks:
        return x[:, :0].unflatten(1, (0, size)), None
    x = pad(x, iteration.offset, chunks * size - iteration.offset - x.shape[1])
    real = None
    if iteration.offset:
        places = torch.arange(chunks * size, device=x.device)
        real = (places >= iteration.offset).unflatten(0, (chunks, size))
    return x.unflatten(1, (chunks, size)), real


# ---------------------------------------------------------------------------- down-scaling


class Downscale(nn.Module, ABC):
    """S↓ of one iteration. The state of chunks under way is a tuple of tensors."""

    def __init__(self, config: SpiralConfig, iteration: Iteration) -> None:
        super().__init__()
        self.iteration = iteration

    def forward(self, h: Tensor) -> Tensor:
        """(B, L, D) → (B, N, D): the latents of all complete chunks."""
        members, real = to_grid(h, self.iteration)
        return self.latent(self.push(None, members, real)).to(h.dtype)

    @abstractmethod
    def start(self, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, ...]:
        """Chunks without members; `like` has the width, the dtype and the device of the states."""

    @abstractmethod
    def push(self, state: Any, h: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
        """The state (None: no member yet) after the members h (…, M, D), those that are real."""

    @abstractmethod
    def latent(self, state: Any) -> Tensor:
        """(…, D): what a chunk becomes, when it is complete."""


class MeanState(NamedTuple):
    total: Tensor  # … D: the sum of the members so far


class MeanPooling(Downscale):
    """Eq. mean-pooling, with its literal 1/g also for the shorter first chunk."""

    def start(self, shape: tuple[int, ...], like: Tensor) -> MeanState:
        return MeanState(like.new_zeros((*shape, like.shape[-1]), dtype=at_least_float32(like)))

    def push(self, state: MeanState | None, h: Tensor, real: Tensor | None = None) -> MeanState:
        h = h if real is None else h * real[..., None]
        total = h.sum(-2, dtype=at_least_float32(h))
        return MeanState(total if state is None else state.total + total)

    def latent(self, state: MeanState) -> Tensor:
        return state.total / self.iteration.chunk


class SoftmaxState(NamedTuple):
    total: Tensor  # … D: Σ exp(score - peak)·value over the members so far
    weight: Tensor  # …: Σ exp(score - peak)
    peak: Tensor  # …: the largest score


class SoftmaxPooling(Downscale):
    """A convex combination of what the members bring, by the softmax of their scores.

    The softmax runs over the real members only. It streams: no G×D buffer of members exists.
    """

    @abstractmethod
    def score(self, h: Tensor) -> Tensor:
        """(…, M, D) → (…, M)"""

    def value(self, h: Tensor) -> Tensor:
        """(…, M, D) → (…, M, D)"""
        return h

    def start(self, shape: tuple[int, ...], like: Tensor) -> SoftmaxState:
        zeros = like.new_zeros((*shape, like.shape[-1] + 1), dtype=at_least_float32(like))
        return SoftmaxState(zeros[..., 1:], zeros[..., 0], zeros[..., 0] + FLOOR)

    def push(
        self, state: SoftmaxState | None, h: Tensor, real: Tensor | None = None
    ) -> SoftmaxState:
        score = self.score(h).to(at_least_float32(h))
        if real is not None:
            score = score.masked_fill(~real, FLOOR)
        peak = score.detach().amax(-1)  # the result does not depend on it
        if state is not None:
            peak = torch.maximum(peak, state.peak)
        share = torch.exp(score - peak[..., None])
        if real is not None:
            share = share * real
        total = (share[..., None, :] @ self.value(h).to(share.dtype)).squeeze(-2)
        weight = share.sum(-1)
        if state is not None:
            fade = torch.exp(state.peak - peak)
            total = total + state.total * fade[..., None]
            weight = weight + state.weight * fade
        return SoftmaxState(total, weight, peak)

    def latent(self, state: SoftmaxState) -> Tensor:
        # the largest member weighs exp(0): below 1 is only a chunk without any, which is padding
        return state.total / state.weight[..., None].clamp_min(1)

    def weights(self, h: Tensor) -> Tensor:
        """α, (B, N, G): how much each member of each complete chunk counts."""
        members, real = to_grid(h, self.iteration)
        score = self.score(members)
        return softmax(score if real is None else score.masked_fill(~real, FLOOR))


class SelfAggregation(SoftmaxPooling):
    """Eq. self-agg: a learned score of each member's state. It has no bias: the softmax is
    invariant to one."""

    def __init__(self, config: SpiralConfig, iteration: Iteration) -> None:
        super().__init__(config, iteration)
        self.scorer = nn.Linear(config.hidden_size, 1, bias=False)

    def score(self, h: Tensor) -> Tensor:
        return self.scorer(h).squeeze(-1)


class AttentionPooling(SoftmaxPooling):
    """A learned query attends to keys of the members; their values are what they bring."""

    def __init__(self, config: SpiralConfig, iteration: Iteration) -> None:
        super().__init__(config, iteration)
        width = config.hidden_size
        self.key = nn.Linear(width, width, bias=False)
        self.bring = nn.Linear(width, width, bias=False)
        self.query = nn.Linear(width, 1, bias=False)

    def score(self, h: Tensor) -> Tensor:
        return self.query(self.key(h)).squeeze(-1) / math.sqrt(h.shape[-1])

    def value(self, h: Tensor) -> Tensor:
        return self.bring(h)


DOWNSCALE: dict[str, type[Downscale]] = {
    "self_aggregation": SelfAggregation,
    "mean": MeanPooling,
    "attention": AttentionPooling,
}


# ---------------------------------------------------------------------------- up-scaling


class Upscale(nn.Module, ABC):
    """S↑ of one iteration: how a latent is shared out over the members of its chunk.

    `start` and `push` are those of `Downscale`; most operators need nothing of the members and
    keep nothing.
    """

    def __init__(self, config: SpiralConfig, iteration: Iteration) -> None:
        super().__init__()
        self.iteration = iteration
        self.gain = math.sqrt(iteration.chunk)  # λ

    def forward(self, z: Tensor, h: Tensor) -> Tensor:
        """Latents (B, N, D) and the states h (B, L, D) that they came from → the updates
        (B, N·G-ω, D) of the tokens that lie in a complete chunk."""
        members, real = to_grid(h, self.iteration)
        shares = self.allocation(z, self.push(None, members, real))
        u = shares[..., None] * z[:, :, None]
        return u.flatten(1, 2)[:, self.iteration.offset :]

    def start(self, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, ...]:
        return ()

    def push(self, state: Any, h: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
        return ()

    @abstractmethod
    def allocation(self, z: Tensor, state: Any) -> Tensor:
        """λ·β, (…, G), of the latents (…, D) whose chunks ended in `state`"""


class UniformBroadcast(Upscale):
    """Eq. upscale-uniform: β = 1/g."""

    def allocation(self, z: Tensor, state: Any) -> Tensor:
        return z.new_full((*z.shape[:-1], self.iteration.chunk), self.gain / self.iteration.chunk)


class OutputDependentAllocation(Upscale):
    """Eq. upscale-router: each latent says how its update is spread over its chunk."""

    def __init__(self, config: SpiralConfig, iteration: Iteration) -> None:
        super().__init__(config, iteration)
        self.router = nn.Linear(config.hidden_size, iteration.chunk)

    def allocation(self, z: Tensor, state: Any) -> Tensor:
        return softmax(self.router(z)) * self.gain


class ScoreState(NamedTuple):
    scores: Tensor  # … G: of the members so far, the newest at the end; FLOOR before them


class InputDependentAllocation(Upscale):
    """Each member says by its own state how much of the update it takes."""

    def __init__(self, config: SpiralConfig, iteration: Iteration) -> None:
        super().__init__(config, iteration)
        self.scorer = nn.Linear(config.hidden_size, 1, bias=False)

    def start(self, shape: tuple[int, ...], like: Tensor) -> ScoreState:
        shape = (*shape, self.iteration.chunk)
        return ScoreState(like.new_full(shape, FLOOR, dtype=at_least_float32(like)))

    def push(self, state: Any, h: Tensor, real: Tensor | None = None) -> ScoreState:
        """`real` members stand side by side."""
        new = self.scorer(h).squeeze(-1).to(at_least_float32(h))
        if state is None:  # all of them, each at its place
            return ScoreState(new if real is None else new.masked_fill(~real, FLOOR))
        both, size = torch.cat((state.scores, new), -1), self.iteration.chunk
        if real is None:
            return ScoreState(both[..., -size:])
        first = real.int().argmax(-1, keepdim=True)
        place = torch.arange(size, device=h.device) + real.sum(-1, keepdim=True)
        return ScoreState(both.gather(-1, place + first * (place >= size)))

    def allocation(self, z: Tensor, state: ScoreState) -> Tensor:
        return state.scores.softmax(-1).to(z.dtype) * self.gain


UPSCALE: dict[str, type[Upscale]] = {
    "output_dependent": OutputDependentAllocation,
    "uniform": UniformBroadcast,
    "input_dependent": InputDependentAllocation,
}


# ---------------------------------------------------------------------------- one iteration


class Identity(nn.Module):
    """What both operators are at full resolution."""

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        return x


class Scaling(nn.Module):
    """The pair S↓ and S↑ of one iteration."""

    downscale: Any  # a Downscale, or Identity
    upscale: Any  # an Upscale, or Identity

    def __init__(self, config: SpiralConfig, iteration: Iteration) -> None:
        super().__init__()
        full = iteration.chunk == 1
        self.downscale = Identity() if full else DOWNSCALE[config.downscale](config, iteration)
        self.upscale = Identity() if full else UPSCALE[config.upscale](config, iteration)


def causal_shift(u: Tensor, shift: int, length: int) -> Tensor:
    """Eq. right-shift: ũ[i] = u[i-s], and zero where i < s."""
    front = min(shift, length)
    return pad(u, front, length - front - u.shape[1])
