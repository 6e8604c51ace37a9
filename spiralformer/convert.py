"""A dense model becomes a looped one that begins close to it.

The first and the last layers become `pre` and `post`, the ones between them the core. The loop
begins open: every iteration at full resolution takes the state further as its layers did in the
dense model, and the update of a coarse one, a mean over its chunk, is written but hardly read.
With one iteration at full resolution and no layer left out this is the dense model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spiralformer.config import ConfigError, Layout, SpiralConfig
from spiralformer.model import SpiralFormer
from spiralformer.model.topology import MeSH

SHARPNESS = 16.0  # bias of a router towards its slot: the others get e⁻¹⁶ of the weight each


def step(layers: int, wanted: int) -> list[list[int]]:
    """Layers at equal distances, the first and the last among them."""
    last = layers - 1
    return [[round(k * last / max(1, wanted - 1))] for k in range(wanted)]


def average(layers: int, wanted: int) -> list[list[int]]:
    """Each the mean of its share of neighbours."""
    bounds = [round(k * layers / wanted) for k in range(wanted + 1)]
    return [list(range(*pair)) for pair in itertools.pairwise(bounds)]


# Which of the middle layers make a layer of the core.
MAPPINGS: dict[str, Callable[[int, int], list[list[int]]]] = {
    "step": step,
    "average": average,
}


@torch.no_grad()
def convert(
    dense: SpiralFormer, layout: str, *, layers: str = "step", **changes: Any
) -> SpiralFormer:
    """A model of this layout from the weights of a dense one; `changes` are other fields of its
    configuration. The dense model stays as it is."""
    config = dense.config.replace(layout=layout, **changes)
    picked = _layers(dense.config, config.parsed_layout, layers)
    model = SpiralFormer(config).to(dense.embedding.weight)
    if (
        config.vocab_size != dense.config.vocab_size
        or config.hidden_size != dense.config.hidden_size
    ):
        raise ConfigError("convert changes the layout, not hidden_size or vocab_size")
    blocks = [block for stack in model.stacks() for block in stack.blocks]
    sources = dense.pre.blocks
    for block, numbers in zip(blocks, picked, strict=True):
        states = [sources[k].state_dict() for k in numbers]
        mean = {name: sum(state[name] for state in states) / len(states) for name in states[0]}
        block.load_state_dict(mean)
    model.embedding.load_state_dict(dense.embedding.state_dict())
    model.norm.load_state_dict(dense.norm.state_dict())
    model.head.load_state_dict(dense.head.state_dict())
    for scaling in model.scalings:
        _begin_even(scaling)
    if isinstance(model.topology, MeSH):
        _begin_open(model.topology, config)
    return model.train(dense.training)


def _layers(dense: SpiralConfig, layout: Layout, mapping: str) -> list[list[int]]:
    """For each layer of the new model, those of the dense one that it is the mean of."""
    if mapping not in MAPPINGS:
        raise ConfigError(f"layers {mapping!r} is unknown; choose one of {', '.join(MAPPINGS)}")
    if dense.num_iterations:
        raise ConfigError(f"layout {dense.layout!r} has a loop already; convert a dense model")
    total, core = dense.parsed_layout.pre, sum(layout.core_stacks)
    middle = total - layout.pre - layout.post
    if not core or middle < core:
        raise ConfigError(
            f"layout {str(layout)!r} asks for {layout.unique_layers} layers around and in a loop, "
            f"and the dense model has {total}"
        )
    inner = MAPPINGS[mapping](middle, core)
    return [
        *([k] for k in range(layout.pre)),
        *([layout.pre + k for k in numbers] for numbers in inner),
        *([total - layout.post + k] for k in range(layout.post)),
    ]


def _begin_even(scaling: nn.Module) -> None:
    """Every member of a chunk counts alike: scores and logits of zero. What a member brings to
    attention pooling is its state."""
    for name, module in scaling.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            if name.endswith("bring"):
                nn.init.eye_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _begin_open(mesh: MeSH, config: SpiralConfig) -> None:
    """v is written to slot 1, the update of iteration t to slot t + 2, and read is what was last
    written at full resolution."""
    if mesh.slots < config.num_iterations + 2:
        raise ConfigError(
            f"mesh_slots {mesh.slots}: a slot for each of {config.num_iterations + 1} updates and "
            f"the embeddings is needed, {config.num_iterations + 2} in all"
        )
    read = 1
    router: Any
    for t, router in enumerate(mesh.routers):  # router 0 is the transitional one
        written = t + 1
        if t == 0 or config.iterations[t - 1].chunk == 1:
            read = written
        nn.init.zeros_(router.weight)
        nn.init.zeros_(router.bias)
        router.bias[written] = router.bias[mesh.slots + read] = SHARPNESS
