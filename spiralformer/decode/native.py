"""The decode step in C++, for CPUs.

A step reads every weight once and does almost nothing with it. The general matrix product of a CPU
reads weights at half the speed of the memory, a second row costs it a second reading, and a hundred
small operators wait for Python; native.cpp, built once per machine, reads them at nearly full speed
for one to four rows alike and does a whole token in one call.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spiralformer.decode.algorithm import Runner
from spiralformer.decode.state import FLOOR, DecodeState
from spiralformer.model import SpiralFormer
from spiralformer.model.blocks import Stack, frequencies
from spiralformer.model.topology import MeSH

DTYPES = (torch.float32, torch.bfloat16)
MOST_ROWS = 16  # above these, the general matrix product does better


@functools.cache
def build() -> str | None:
    """Builds the operators, or loads what an earlier process built. Returns why it cannot."""
    from torch.utils import cpp_extension

    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "_")
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), before))  # for ninja
    try:
        cpp_extension.load(
            f"spiralformer_native_{capability.lower()}",
            [str(Path(__file__).with_suffix(".cpp"))],
            extra_cflags=["-O3", "-march=native", "-fopenmp", f"-DCPU_CAPABILITY_{capability}"],
            is_python_module=False,
        )
    except (RuntimeError, OSError, ImportError) as error:
        return str(error).splitlines()[0]
    finally:
        os.environ["PATH"] = before
    return None


def why_not(model: nn.Module) -> str | None:
    """Why the operators do not serve this model on this machine, if they do not."""
    for p in model.parameters():
        if p.device.type != "cpu":
            return f"the weights are on {p.device.type}"
        if p.dtype not in DTYPES:
            return f"the weights are {str(p.dtype).removeprefix('torch.')}"
        if not p.is_contiguous():
            return "a weight is not contiguous"
    if len({p.dtype for p in model.parameters()}) > 1:
        return "the weights are of several types"
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            return f"{name} is wrapped by an adapter; merge it first"
    return build()


class NativeRunner(Runner):
    """Runs a step by native.cpp, for any rows."""

    fallback: str | None = None

    def __init__(self, model: SpiralFormer, capacity: int = 0) -> None:
        config = model.config
        self.capacity = min(capacity, config.max_length)
        stacks, mesh = model.stacks(), model.topology
        tied = config.parsed_layout.tied
        self.decoder = torch.classes.spiralformer.Decoder(
            model.embedding.weight,
            math.sqrt(config.hidden_size) if config.scale_embeddings else 1.0,
            frequencies(config, model.embedding.weight.device),
            config.num_heads,
            config.norm_eps,
            config.parallel_residual,
            config.topology == "anchor",
            FLOOR,
            [len(stack.blocks) for stack in stacks],
            [
                number
                for it in config.iterations
                for number in (it.chunk, it.offset, it.shift, 0 if tied else it.index)
            ],
            _weights(layer for stack in stacks for layer in _layers(stack)),
            _weights(mesh.routers if isinstance(mesh, MeSH) else ()),
            _weights(getattr(part.downscale, "scorer", None) for part in model.scalings),
            _weights(getattr(part.upscale, "router", None) for part in model.scalings),
            _weights([model.norm]),
        )

    def token(self, model: SpiralFormer, state: DecodeState, ids: Tensor) -> Tensor:
        if state.batch > MOST_ROWS:
            return super().token(model, state, ids)
        caches = [state.pre, *(part.cache for part in state.loop), state.post]
        return self.decoder.token(
            ids,
            [cache.keys for cache in caches],
            [cache.values for cache in caches],
            [
                tensor
                for p in state.loop
                for tensor in (p.total, p.peak, p.weight, p.latents, p.allocations, p.recent)
            ],
            state.lengths,
        )

    def head(self, model: SpiralFormer, hidden: Tensor) -> Tensor:
        if hidden.shape[0] > MOST_ROWS:
            return super().head(model, hidden)
        return torch.ops.spiralformer.few_rows(hidden, model.head.weight, model.head.bias)


def _layers(stack: Stack) -> Iterator[nn.Module]:
    block: Any
    for block in stack.blocks:
        attention, mlp = block.attention, block.mlp
        yield from (block.attention_norm, attention.qkv, attention.out)
        yield from (block.mlp_norm, mlp.up, mlp.down)


def _weights(modules: Iterable[nn.Module | None]) -> list[Tensor | None]:
    """Weight and bias of each, None where there is none."""
    return [getattr(module, name, None) for module in modules for name in ("weight", "bias")]
