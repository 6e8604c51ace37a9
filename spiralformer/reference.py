"""The oracle: the paper's equations, position by position, as plain loops.

Nothing is shared with the fast path but the Transformer blocks (and the parameters). MeSH keeps its
full slot buffer here, chunks are index sets, and every state is a list of vectors, one per token.
Slow on purpose; the tests hold the fast path to it, gradients included.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spiralformer.config import Iteration

if TYPE_CHECKING:
    from spiralformer.model import SpiralFormer

States = list[Tensor]  # one vector (D) per position


def logits(model: SpiralFormer, ids: Tensor) -> Tensor:
    """The logits of one sequence, ids (L) → (L, V)."""
    config = model.config
    factor = math.sqrt(config.hidden_size) if config.scale_embeddings else 1.0
    x = [model.embedding.weight[token] * factor for token in ids.tolist()]
    v = run_stack(model.pre, x)
    h, slots = start(model, x, v)
    for iteration in config.iterations:
        z = downscale(model, iteration, h)
        z_hat = run_stack(model.cores[0 if config.parsed_layout.tied else iteration.index], z)
        u = upscale(model, iteration, z_hat, h)
        shifted = [
            u[i - iteration.shift] if i >= iteration.shift else torch.zeros_like(x[0])
            for i in range(len(x))
        ]
        h, slots = fuse(model, iteration.index, shifted, h, slots)
    out = run_stack(model.post, h)
    return torch.stack([model.norm(state) @ model.head.weight.T for state in out])


def run_stack(stack, states: States) -> States:
    if not states:
        return []
    return list(stack(torch.stack(states)[None])[0])


def members(iteration: Iteration, j: int, length: int) -> list[int]:
    """I_{t,j}: the positions of chunk j (Eq. chunk-set)."""
    return [i for i in range(length) if (i + iteration.offset) // iteration.chunk == j]


def complete_chunks(iteration: Iteration, length: int) -> int:
    """Chunks whose last position exists."""
    return sum(
        (i + iteration.offset) % iteration.chunk == iteration.chunk - 1 for i in range(length)
    )


def downscale(model: SpiralFormer, iteration: Iteration, h: States) -> States:
    z = []
    for j in range(complete_chunks(iteration, len(h))):
        chunk = [h[i] for i in members(iteration, j, len(h))]
        if iteration.chunk == 1:
            weights = [torch.ones_like(chunk[0][0])]
        elif model.config.downscale == "mean":
            weights = [torch.full_like(state[0], 1 / iteration.chunk) for state in chunk]
        elif model.config.downscale == "attention":
            operator = model.scalings[iteration.index].downscale
            keys = [operator.key.weight @ state for state in chunk]
            root = math.sqrt(model.config.hidden_size)
            exps = [torch.exp(operator.query.weight[0] @ key / root) for key in keys]
            weights = [e / sum(exps) for e in exps]
            chunk = [operator.bring.weight @ state for state in chunk]
        else:
            scorer = model.scalings[iteration.index].downscale.scorer.weight[0]
            exps = [torch.exp(scorer @ state) for state in chunk]
            weights = [e / sum(exps) for e in exps]
        z.append(torch.stack([w * state for w, state in zip(weights, chunk, strict=True)]).sum(0))
    return z


def upscale(model: SpiralFormer, iteration: Iteration, z_hat: States, h: States) -> States:
    u = []
    for i in range(len(h)):
        j, rho = (i + iteration.offset) // iteration.chunk, (i + iteration.offset) % iteration.chunk
        if j >= len(z_hat):  # the last, incomplete chunk was dropped
            u.append(torch.zeros(model.config.hidden_size, dtype=model.head.weight.dtype))
        elif iteration.chunk == 1:
            u.append(z_hat[j])
        else:
            if model.config.upscale == "uniform":
                beta = torch.full_like(z_hat[j][0], 1 / iteration.chunk)
            elif model.config.upscale == "input_dependent":
                scorer = model.scalings[iteration.index].upscale.scorer.weight[0]
                chunk = members(iteration, j, len(h))
                beta = torch.exp(scorer @ h[i]) / sum(torch.exp(scorer @ h[k]) for k in chunk)
            else:
                router = model.scalings[iteration.index].upscale.router
                exps = torch.exp(router.weight @ z_hat[j] + router.bias)
                beta = exps[rho] / exps.sum()
            u.append(math.sqrt(iteration.chunk) * beta * z_hat[j])
    return u


def start(model: SpiralFormer, x: States, v: States):
    if model.config.topology != "mesh":
        return v, v
    slots = [[xi] + [torch.zeros_like(xi)] * (model.config.mesh_slots - 1) for xi in x]
    return write_and_read(model, 0, x, v, slots)


def fuse(model: SpiralFormer, t: int, update: States, h: States, carrier):
    if model.config.topology == "none":
        return update, carrier
    if model.config.topology == "anchor":
        return [u + anchor for u, anchor in zip(update, carrier, strict=True)], carrier
    return write_and_read(model, t + 1, h, update, carrier)


def write_and_read(model: SpiralFormer, index: int, seen: States, update: States, slots):
    """The B-slot buffer of Appendix MeSH: slots[i][b] is slot b of token i."""
    router = model.topology.routers[index]
    count = model.config.mesh_slots
    states, after = [], []
    for state, u, memory in zip(seen, update, slots, strict=True):
        scores = torch.exp(router.weight @ state + router.bias)
        write = scores[:count] / scores[:count].sum()
        read = scores[count:] / scores[count:].sum()
        memory = [m + write[b] * u for b, m in enumerate(memory)]
        states.append(sum(read[b] * m for b, m in enumerate(memory)))
        after.append(memory)
    return states, after
