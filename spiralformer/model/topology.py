"""How the update of an iteration enters the loop state: the operator U and InitTopo.

A topology acts on each token by itself, so the same two methods serve a sequence and a decoded
token: `start` gives the first state and a carrier, `update` the next ones. A new topology is a
class here, its name in the table below, and its cost in `spiralformer.costs`.

Shapes: B batch, L length, D width, M memory slots (the paper's B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spiralformer.config import SpiralConfig
from spiralformer.model.operators import softmax


class Topology(nn.Module):
    """A topology without parameters."""

    def __init__(self, config: SpiralConfig) -> None:
        super().__init__()

    def share(self, whole: Any, kept: Sequence[int]) -> None:
        """Takes the weights that belong to these iterations from a topology of the same kind."""


class Replace(Topology):
    """Topology "none", the plain loop: the update is the next state."""

    def start(self, x: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        return v, None

    def update(self, u: Tensor, h: Tensor, carrier: Any, t: int) -> tuple[Tensor, Any]:
        return u, None


class Anchor(Topology):
    """Eq. anchor-topology: every update is added to the pre-loop output."""

    def start(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return v, v

    def update(self, u: Tensor, h: Tensor, carrier: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return u + carrier, carrier


class Memory(NamedTuple):
    """What MeSH has written so far. The slots themselves are never formed (see MeSH)."""

    x: Tensor  # B L D, the embeddings, alone in slot 0 at the start
    updates: tuple[Tensor, ...]  # B L D each: v, then ũ of each iteration
    writes: tuple[Tensor, ...]  # B L M each: how much of the update went into which slot


class MeSH(Topology):
    """Eqs. mesh-*: a slot is a sum of weighted updates, so reading one is linear in them:

        h⁽ᵗ⁺¹⁾ = r₀·x + Σ_k ⟨w⁽ᵏ⁾, r⁽ᵗ⁾⟩·ũ⁽ᵏ⁾,   ũ⁽⁻¹⁾ = v

    with the write weights w⁽ᵏ⁾ and read weights r⁽ᵗ⁾ of each token. No M-slot buffer exists.
    """

    def __init__(self, config: SpiralConfig) -> None:
        super().__init__(config)
        self.slots = config.mesh_slots
        # Router 0 is the transitional one, router t+1 that of iteration t. The first M outputs are
        # the write logits, the last M the read logits.
        self.routers = nn.ModuleList(
            nn.Linear(config.hidden_size, 2 * self.slots) for _ in range(config.num_iterations + 1)
        )

    def share(self, whole: MeSH, kept: Sequence[int]) -> None:
        self.routers = nn.ModuleList(whole.routers[k] for k in (0, *(t + 1 for t in kept)))

    def start(self, x: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        return self._write_and_read(self.routers[0], x, v, Memory(x, (), ()))

    def update(self, u: Tensor, h: Tensor, carrier: Memory, t: int) -> tuple[Tensor, Memory]:
        return self._write_and_read(self.routers[t + 1], h, u, carrier)

    def _write_and_read(
        self, router: nn.Module, h: Tensor, u: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        write, read = self.route(router, h)
        memory = Memory(memory.x, (*memory.updates, u), (*memory.writes, write))
        h = read[..., :1] * memory.x
        for weight, update in zip(self.coefficients(memory, read), memory.updates, strict=True):
            h = torch.addcmul(h, weight, update)
        return h, memory

    def route(self, router: nn.Module, h: Tensor) -> tuple[Tensor, Tensor]:
        """Write and read weights over the slots, (B, L, M) each."""
        write, read = softmax(router(h).unflatten(-1, (2, self.slots))).to(h.dtype).unbind(-2)
        return write, read

    def coefficients(self, memory: Memory, read: Tensor) -> tuple[Tensor, ...]:
        """⟨w⁽ᵏ⁾, r⟩ for every update so far, (B, L, 1) each."""
        writes = torch.stack(memory.writes, -1)  # B L M K
        return (writes * read[..., None]).sum(-2).split(1, -1)


TOPOLOGY: dict[str, type[Topology]] = {"none": Replace, "anchor": Anchor, "mesh": MeSH}
