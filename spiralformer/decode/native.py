"""The decode step in C++, for CPUs.

A step reads every weight once and does almost nothing with it. The general matrix product of a CPU
reads weights at half the speed of the memory, a second row costs it a second reading, and a hundred
small operators wait for Python; native.cpp, built once per machine, reads them at nearly full speed
for one to four rows alike and has a whole stack of layers as one operator.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spiralformer.config import Iteration
from spiralformer.decode.state import FLOOR, Append, IterationState
from spiralformer.decode.step import Bank, Plan, Runner, places, read
from spiralformer.model import SpiralFormer
from spiralformer.model.layers import Stack, frequencies
from spiralformer.model.scaling import OutputDependentAllocation, SelfAggregation
from spiralformer.model.topology import Memory, MeSH

DTYPES = (torch.float32, torch.bfloat16)
OPS = torch.ops.spiralformer
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
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            return f"{name} is wrapped by an adapter; merge it first"
    return build()


class NativeRunner(Runner):
    """Runs a step by the operators of native.cpp, for any rows."""

    fallback: str | None = None

    def __init__(self, model: SpiralFormer, capacity: int = 0) -> None:
        config = model.config
        self.capacity = min(capacity, config.max_length)
        self.config = config
        # looking a module up takes as long as a small operator, so all is found once
        self.frequencies = frequencies(config, model.embedding.weight.device)
        self.embedding = model.embedding.weight
        self.scale = math.sqrt(config.hidden_size) if config.scale_embeddings else 1
        self.weights = {id(stack): list(_weights(stack)) for stack in model.stacks()}
        mesh = model.topology if isinstance(model.topology, MeSH) else None
        self.routers = [_parameters(router) for router in mesh.routers] if mesh else []
        self.scorers = [_scorer(model, it) for it in config.iterations]
        self.spreads = [_spread(model, it) for it in config.iterations]
        self.last_norm = _parameters(model.norm)

    def embed(self, model: SpiralFormer, ids: Tensor) -> Tensor:
        x = torch.embedding(self.embedding, ids)
        return x * self.scale if self.scale != 1 else x

    def stack(
        self, stack: Stack, inputs: Sequence[Tensor], appends: Sequence[Append]
    ) -> list[Tensor]:
        weights = self.weights[id(stack)]
        if not weights:
            return list(inputs)
        if sum(append.batch for append in appends) > MOST_ROWS:
            return super().stack(stack, inputs, appends)
        places: list[int] = []
        for group, append in enumerate(appends):
            rows = range(append.batch) if append.rows is None else append.rows
            for row, held in zip(rows, append.held, strict=True):
                places += (group, row, held)
        out = OPS.stack(
            torch.cat(list(inputs)) if len(inputs) > 1 else inputs[0],
            weights,
            self.config.norm_eps,
            self.config.parallel_residual,
            self.frequencies,
            [append.cache.keys for append in appends],
            [append.cache.values for append in appends],
            places,
        )
        return list(out.split([append.batch for append in appends])) if len(inputs) > 1 else [out]

    def norm(self, model: SpiralFormer, hidden: Tensor) -> Tensor:
        return OPS.norm(hidden, *self.last_norm, self.config.norm_eps)

    def head(self, model: SpiralFormer, hidden: Tensor) -> Tensor:
        if hidden.shape[0] > MOST_ROWS:
            return super().head(model, hidden)
        return OPS.few_rows(hidden, model.head.weight, model.head.bias)

    def start(self, model: SpiralFormer, x: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        if not self.routers:
            return super().start(model, x, v)
        return self._mesh(0, x, v, Memory(x, (), ()))

    def fold(
        self,
        model: SpiralFormer,
        part: IterationState,
        plan: Plan,
        bank: Bank,
        h: Tensor,
        carrier: Any,
    ) -> tuple[Tensor, Any]:
        if not self.routers:
            return super().fold(model, part, plan, bank, h, carrier)
        it = part.it
        if it.chunk == 1 and it.shift == 0:
            return self._mesh(it.index + 1, h, read(part, plan, 1, bank), carrier)
        x, updates, writes = carrier.x, carrier.updates, carrier.writes
        u, state, write = OPS.fold(
            bank.latents,
            bank.allocations,
            *places(plan, bank),
            h,
            x,
            updates,
            writes,
            *self.routers[it.index + 1],
        )
        return state, Memory(x, (*updates, u), (*writes, write))

    def _mesh(self, router: int, h: Tensor, u: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        x, updates, writes = memory.x, memory.updates, memory.writes
        state, write = OPS.mesh(h, u, x, updates, writes, *self.routers[router])
        return state, Memory(x, (*updates, u), (*writes, write))

    def join(
        self, model: SpiralFormer, part: IterationState, h: Tensor, ended: list[int]
    ) -> Tensor:
        scorer = self.scorers[part.it.index]
        if scorer is None:
            return super().join(model, part, h, ended)
        return OPS.join(h, scorer, part.total, part.peak, part.weight, ended, FLOOR)

    def hold(
        self, model: SpiralFormer, part: IterationState, plan: Plan, found: Tensor
    ) -> tuple[Tensor, Tensor]:
        spread, latents, allocations = self.spreads[part.it.index], part.latents, part.allocations
        if spread is None:
            return super().hold(model, part, plan, found)
        OPS.hold(found, latents, allocations, plan.rows, *spread)
        return latents[:, -1:], allocations[:, -1:]


def _parameters(module: nn.Module) -> tuple[Any, Any]:
    return module.weight, getattr(module, "bias", None)


def _scorer(model: SpiralFormer, it: Iteration) -> Tensor | None:
    downscale: Any = model.scalings[it.index].downscale
    return downscale.scorer.weight if isinstance(downscale, SelfAggregation) else None


def _spread(model: SpiralFormer, it: Iteration) -> tuple[Tensor, Tensor, float] | None:
    upscale: Any = model.scalings[it.index].upscale
    if not isinstance(upscale, OutputDependentAllocation):
        return None
    return (*_parameters(upscale.router), math.sqrt(it.chunk))


def _weights(stack: Stack) -> Iterator[Tensor | None]:
    block: Any
    for block in stack.blocks:
        attention, mlp = block.attention, block.mlp
        modules = (block.attention_norm, attention.qkv, attention.out)
        for module in (*modules, block.mlp_norm, mlp.up, mlp.down):
            yield from _parameters(module)
