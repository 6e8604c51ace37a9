"""What operators, norms and topologies cost: one entry a name.

These are the names that a configuration may use; the modules of the same names are in
`spiralformer.model`. Nothing here needs PyTorch, so that counting and validating do not.

Letters: d width, g chunk size, L tokens, n chunks, M memory slots (the paper's B), T iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    matmul: int = 0  # linear maps, and the weighted sums of pooling
    attention: int = 0  # q·kᵀ and the product with v
    elementwise: int = 0  # everything else

    @property
    def total(self) -> int:
        return self.matmul + self.attention + self.elementwise

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
        )

    def __mul__(self, times: int) -> Flops:
        return Flops(self.matmul * times, self.attention * times, self.elementwise * times)


SOFTMAX = 5  # FLOPs per value: maximum, subtract, exp, sum, divide


# ---------------------------------------------------------------------------- operators


@dataclass(frozen=True)
class OperatorCost:
    """Of one iteration with g > 1. What the paper counts otherwise stands beside ours."""

    parameters: Callable[[int, int], int]  # d, g
    flops: Callable[[int, int, int], Flops]  # d, g, n
    state: Callable[[int, int], int]  # d, g: numbers kept of a chunk under way
    paper_parameters: Callable[[int, int], int] | None = None  # d, g
    paper_flops: Callable[[int, int, int, int], Flops] | None = None  # d, g, n, L


DOWNSCALE: dict[str, OperatorCost] = {
    "self_aggregation": OperatorCost(
        parameters=lambda d, g: d,
        flops=lambda d, g, n: Flops(2 * d * g * n + 2 * d * g * n, 0, (SOFTMAX * g + d) * n),
        state=lambda d, g: d + 2,  # the weighted sum, the largest score, the normaliser
        paper_parameters=lambda d, g: d + 1,
        paper_flops=lambda d, g, n, L: Flops(matmul=2 * d * L + 2 * d * L),
    ),
    "mean": OperatorCost(
        parameters=lambda d, g: 0,
        flops=lambda d, g, n: Flops(elementwise=d * (n * g + n)),
        state=lambda d, g: d,
    ),
    "attention": OperatorCost(
        parameters=lambda d, g: 2 * d * d + d,
        # keys and values, the query's scores and the weighted sum
        flops=lambda d, g, n: Flops(
            (2 * 2 * d * d + 2 * d + 2 * d) * g * n, 0, ((SOFTMAX + 1) * g + d) * n
        ),
        state=lambda d, g: d + 2,
    ),
}

UPSCALE: dict[str, OperatorCost] = {
    "output_dependent": OperatorCost(
        parameters=lambda d, g: (d + 1) * g,
        # the bias, the softmax and the gain of each share, then the share of each latent
        flops=lambda d, g, n: Flops(2 * d * g * n, 0, (1 + SOFTMAX + 1 + d) * g * n),
        state=lambda d, g: 0,
        paper_flops=lambda d, g, n, L: Flops(2 * d * g * n, 0, d * L),
    ),
    "uniform": OperatorCost(
        parameters=lambda d, g: 0,
        flops=lambda d, g, n: Flops(elementwise=d * g * n),
        state=lambda d, g: 0,
        paper_flops=lambda d, g, n, L: Flops(elementwise=d * L),
    ),
    "input_dependent": OperatorCost(
        parameters=lambda d, g: d,
        flops=lambda d, g, n: Flops(2 * d * g * n, 0, (SOFTMAX + 1 + d) * g * n),
        state=lambda d, g: g,  # a score of each member
    ),
}


# ---------------------------------------------------------------------------- norms


@dataclass(frozen=True)
class NormCost:
    parameters: int  # per value of the width
    flops: int  # per value of an entry


NORM = {
    "rmsnorm": NormCost(1, 4),  # square, sum, scale, weight
    "layernorm": NormCost(2, 7),  # centres, too, and adds a bias
}


# ---------------------------------------------------------------------------- topologies


@dataclass(frozen=True)
class TopologyCost:
    parameters: Callable[[int, int, int], int]  # d, M, T
    # Of one token: d, M, and the updates that the state is made of (0: before the first iteration)
    flops: Callable[[int, int, int], Flops]
    paper_flops: Callable[[int, int, int], Flops]


def _mesh(d: int, slots: int, updates: int) -> Flops:
    route = (1 + SOFTMAX) * 2 * slots  # bias, softmax
    read = d + (updates + 1) * (2 * slots + 2 * d)  # r₀·x, then ⟨w, r⟩ and a scaled add for each
    return Flops(2 * d * 2 * slots, 0, route + read)


TOPOLOGY: dict[str, TopologyCost] = {
    "none": TopologyCost(
        parameters=lambda d, M, T: 0,
        flops=lambda d, M, updates: Flops(),
        paper_flops=lambda d, M, updates: Flops(),
    ),
    "anchor": TopologyCost(
        parameters=lambda d, M, T: 0,
        flops=lambda d, M, updates: Flops(elementwise=d if updates else 0),
        paper_flops=lambda d, M, updates: Flops(),
    ),
    "mesh": TopologyCost(
        parameters=lambda d, M, T: (T + 1) * (d + 1) * 2 * M,
        flops=_mesh,
        paper_flops=lambda d, M, updates: Flops(2 * d * 2 * M, 0, 2 * (2 * d * M)),
    ),
}
