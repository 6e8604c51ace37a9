"""From tokens to chunks and back: down-scaling, up-scaling and the causal right-shift.

Shapes: B batch, L tokens, N chunks, G chunk size, D width. With offset ω the chunk grid starts ω
places before the first token: token i sits at grid place i + ω.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spiralformer.config import Iteration, SpiralConfig
from spiralformer.model.precision import Narrow, matmul, should_widen


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax in at least float32, returned in the input's dtype."""
    return x.softmax(dim, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def pad(x: Tensor, front: int, back: int, fill: float = 0.0) -> Tensor:
    """Entries before and after those of x, (B, L, D); a negative number takes some away."""
    return F.pad(x, (0, 0, front, back), value=fill) if front or back else x


def to_grid(x: Tensor, it: Iteration, fill: float = 0.0) -> Tensor:
    """(B, L, D) → (B, N, G, D): complete chunks only; the ω places before token 0 hold `fill`."""
    chunks = it.chunks(x.shape[1])
    if not chunks:
        return x[:, :0].unflatten(1, (0, it.chunk))
    x = pad(x, it.offset, chunks * it.chunk - it.offset - x.shape[1], fill)
    return x.unflatten(1, (chunks, it.chunk))


class MeanPooling(nn.Module):
    """Eq. mean-pooling, with its literal 1/g also for the shorter first chunk."""

    def __init__(self, config: SpiralConfig, it: Iteration) -> None:
        super().__init__()
        self.it = it

    def forward(self, h: Tensor) -> Tensor:
        return to_grid(h, self.it).sum(2) / self.it.chunk


class SelfAggregation(nn.Module):
    """Eq. self-agg: a learned convex combination of the members of each chunk.

    The scorer has no bias: the softmax is invariant to it.
    """

    def __init__(self, config: SpiralConfig, it: Iteration) -> None:
        super().__init__()
        self.it = it
        self.scorer = Narrow(config.hidden_size, 1, bias=False)

    def weights(self, h: Tensor) -> Tensor:
        """α, (B, N, G): zero at the places before token 0."""
        return softmax(to_grid(self.scorer(h), self.it, fill=-torch.inf).squeeze(-1))

    def forward(self, h: Tensor) -> Tensor:
        alpha = self.weights(h)
        return matmul(alpha[:, :, None], to_grid(h, self.it)).squeeze(2).to(h.dtype)


class UniformBroadcast(nn.Module):
    """Eq. upscale-uniform: β = 1/g."""

    def __init__(self, config: SpiralConfig, it: Iteration) -> None:
        super().__init__()
        self.it = it

    def allocation(self, z: Tensor) -> Tensor:
        """λ·β, (B, N, G)"""
        return z.new_full((1, 1, self.it.chunk), 1 / math.sqrt(self.it.chunk))

    def forward(self, z: Tensor) -> Tensor:
        return spread(self.allocation(z), z, self.it)


class OutputDependentAllocation(nn.Module):
    """Eq. upscale-router: each latent says how its update is spread over its chunk."""

    def __init__(self, config: SpiralConfig, it: Iteration) -> None:
        super().__init__()
        self.it = it
        self.router = Narrow(config.hidden_size, it.chunk)

    def allocation(self, z: Tensor) -> Tensor:
        """λ·β, (B, N, G), with the gain λ = √g"""
        return softmax(self.router(z)).to(z.dtype) * math.sqrt(self.it.chunk)

    def forward(self, z: Tensor) -> Tensor:
        return spread(self.allocation(z), z, self.it)


def spread(allocation: Tensor, z: Tensor, it: Iteration) -> Tensor:
    """The updates (B, N·G-ω, D) of the tokens that lie in a complete chunk."""
    shares, z = allocation[..., None], z[:, :, None]
    # widened, an outer product: going back through it needs no (B, N, G, D) intermediates
    u = matmul(shares, z).to(z.dtype) if should_widen(z) else shares * z
    return u.flatten(1, 2)[:, it.offset :]


def causal_shift(u: Tensor, shift: int, length: int) -> Tensor:
    """Eq. right-shift: ũ[i] = u[i-s], and zero where i < s."""
    front = min(shift, length)
    return pad(u, front, length - front - u.shape[1])


DOWNSCALE: dict[str, type[nn.Module]] = {
    "self_aggregation": SelfAggregation,
    "mean": MeanPooling,
}
UPSCALE: dict[str, type[nn.Module]] = {
    "output_dependent": OutputDependentAllocation,
    "uniform": UniformBroadcast,
}


class Scaling(nn.Module):
    """The pair S↓ and S↑ of one iteration. At full resolution both are the identity."""

    def __init__(self, config: SpiralConfig, it: Iteration) -> None:
        super().__init__()
        full = it.chunk == 1
        self.downscale = nn.Identity() if full else DOWNSCALE[config.downscale](config, it)
        self.upscale = nn.Identity() if full else UPSCALE[config.upscale](config, it)
