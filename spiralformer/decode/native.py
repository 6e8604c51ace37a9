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

from spiralformer.decode.state import FLOOR, Append, IterationState
from spiralformer.decode.step import Bank, Plan, Runner, place, read
from spiralformer.model import SpiralFormer
from spiralformer.model.layers import Stack, frequencies
from spiralformer.model.scaling import OutputDependentAllocation
from spiralformer.model.topology import Memory, MeSH

DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def build() -> str | None:
    """Builds the operators, or loads what an earlier process built. Returns why it cannot."""
    from torch.utils import cpp_extension

    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), before))  # for ninja
    try:
        cpp_extension.load(
            f"spiralformer_native_{capability}",
            [str(Path(__file__).with_suffix(".cpp"))],
            # parallel_for is OpenMP in a header: without the flag it is silently serial
            extra_cflags=["-O3", "-march=native", "-fopenmp"],
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
        self.capacity = min(capacity, model.config.max_length)
        self.config = model.config
        self.frequencies = frequencies(model.config, model.embedding.weight.device)
        self.weights = {id(stack): list(_weights(stack)) for stack in model.stacks()}

    def stack(
        self, stack: Stack, inputs: Sequence[Tensor], appends: Sequence[Append]
    ) -> list[Tensor]:
        weights = self.weights[id(stack)]
        if not weights:
            return list(inputs)
        places: list[int] = []
        for group, append in enumerate(appends):
            rows = range(append.batch) if append.rows is None else append.rows
            for row, held in zip(rows, append.held, strict=True):
                places += (group, row, held)
        out = torch.ops.spiralformer.stack(
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

    def head(self, model: SpiralFormer, hidden: Tensor) -> Tensor:
        return torch.ops.spiralformer.few_rows(hidden, model.head.weight, model.head.bias)

    def start(self, model: SpiralFormer, x: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        if isinstance(model.topology, MeSH):
            return _mesh(model.topology.routers[0], x, v, Memory(x, (), ()))
        return super().start(model, x, v)

    def fold(
        self,
        model: SpiralFormer,
        part: IterationState,
        plan: Plan,
        bank: Bank,
        h: Tensor,
        carrier: Any,
    ) -> tuple[Tensor, Any]:
        if not isinstance(model.topology, MeSH):
            return super().fold(model, part, plan, bank, h, carrier)
        router: Any = model.topology.routers[part.it.index + 1]
        whole = part.it.chunk == 1 and part.it.shift == 0
        found = place(plan, bank) if not whole and len(set(plan.starts)) == 1 else None
        if found is None:
            return _mesh(router, h, read(part, plan, 1, bank), carrier)
        u, state, write = torch.ops.spiralformer.fold(
            bank.latents,
            bank.allocations,
            *found,
            h,
            carrier.x,
            carrier.updates,
            carrier.writes,
            router.weight,
            router.bias,
        )
        return state, Memory(carrier.x, (*carrier.updates, u), (*carrier.writes, write))

    def join(self, part: IterationState, scorer: Any, h: Tensor, ended: list[int]) -> Tensor:
        if scorer is None:
            return super().join(part, scorer, h, ended)
        return torch.ops.spiralformer.join(
            h, scorer.weight, part.total, part.peak, part.weight, ended, FLOOR
        )

    def allocate(self, upscale: Any, latents: Tensor) -> Tensor:
        if not isinstance(upscale, OutputDependentAllocation):
            return super().allocate(upscale, latents)
        router, gain = upscale.router, math.sqrt(upscale.it.chunk)
        return torch.ops.spiralformer.allocate(latents, router.weight, router.bias, gain)


def _weights(stack: Stack) -> Iterator[Tensor | None]:
    block: Any
    for block in stack.blocks:
        attention, mlp = block.attention, block.mlp
        modules = (block.attention_norm, attention.qkv, attention.out)
        for module in (*modules, block.mlp_norm, mlp.up, mlp.down):
            yield module.weight
            yield getattr(module, "bias", None)


def _mesh(router: Any, h: Tensor, u: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    state, write = torch.ops.spiralformer.mesh(
        h, u, memory.x, memory.updates, memory.writes, router.weight, router.bias
    )
    return state, Memory(memory.x, (*memory.updates, u), (*memory.writes, write))
