"""Stacks and the head of a decode step in C++, for CPUs.

A step reads every weight once and does almost nothing with it. The general matrix product of a CPU
reads weights at half the speed of the memory, and a second row costs it a second reading;
native.cpp reads them at nearly full speed for one to four rows alike, a whole stack in one call.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spiralformer.config import SpiralConfig
from spiralformer.console import say
from spiralformer.decode.runner import Runner
from spiralformer.decode.state import CacheWrite
from spiralformer.errors import UserError
from spiralformer.files import cache_folder, digest, locked, replacing
from spiralformer.model import SpiralFormer
from spiralformer.model.blocks import Stack, frequencies

SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = (torch.float32, torch.bfloat16)
MOST_ROWS = 16  # above these, the general matrix product does better
PATIENCE = 300.0  # seconds for a build, our own or another process's


# ---------------------------------------------------------------------------- the library


@functools.cache
def command() -> list[str]:
    """The compiler's call without the files."""
    from torch.utils import cpp_extension

    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if not SOURCE.is_file():
        raise UserError("its C++ source is not here")
    if compiler is None:
        raise UserError("there is no C++ compiler")
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "_")
    flags = ["-std=c++20", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    flags += [
        f"-DCPU_CAPABILITY_{capability}",
        f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}",
    ]
    return [compiler, *flags, *(f"-isystem{path}" for path in cpp_extension.include_paths())]


@functools.cache
def library() -> Path:
    """Where the built library is, or will be: in this user's own cache, under a name that stands
    for its source, the compiler and its flags, PyTorch, and the instruction sets of this CPU."""
    call = command()
    version = subprocess.run([call[0], "--version"], capture_output=True, text=True).stdout
    machine = platform.machine() + platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        machine = "".join(
            sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
        )
    key = digest([SOURCE.read_text(), call, version, torch.__version__, machine])
    return cache_folder() / f"native-{key}.so"


def is_built() -> bool:
    try:
        return library().is_file()
    except UserError:
        return False


@functools.cache
def load() -> str | None:
    """Loads the library, built first if need be. Returns why it cannot."""
    try:
        if not library().is_file():
            _build(library())
        torch.ops.load_library(library())
    except subprocess.TimeoutExpired:
        return f"{command()[0]} took longer than {PATIENCE:.0f} seconds"
    except (UserError, OSError) as error:
        return str(error).splitlines()[0]
    return None


say_once = functools.cache(say)


def _build(path: Path) -> None:
    lock = path.with_suffix(".lock")
    with locked(lock, "building", "wait, or choose the runner 'eager'", timeout=PATIENCE):
        if path.is_file():  # another process was first
            return
        say("building the native decode step, once for this machine (up to a minute) …")
        libraries = Path(torch.__file__).parent / "lib"
        with replacing(path) as part:
            built = subprocess.run(
                [
                    *command(),
                    str(SOURCE),
                    "-o",
                    str(part),
                    f"-L{libraries}",
                    "-ltorch_cpu",
                    "-lc10",
                ],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            if built.returncode:
                errors = [line for line in built.stderr.splitlines() if "error" in line]
                raise UserError(f"{command()[0]} failed: {(errors or ['no reason given'])[0]}")


# ---------------------------------------------------------------------------- the runner


def unfit(model: nn.Module) -> str | None:
    """Why the library could not serve this model, if it could not."""
    for p in model.parameters():
        if p.device.type != "cpu":
            return f"the weights are on {p.device.type}"
        if p.dtype not in DTYPES:
            return f"the weights are {str(p.dtype).removeprefix('torch.')}"
        if not p.is_contiguous():
            return "a weight is not contiguous"
    if len({p.dtype for p in model.parameters()}) > 1:
        return "the weights are of several types"
    norms = {type(module) for name, module in model.named_modules() if name.endswith("norm")}
    if other := norms - {nn.RMSNorm, nn.LayerNorm}:
        return f"the norm is {other.pop().__name__}"
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            return f"{name} is wrapped by an adapter; merge it first"
    return None


class NativeRunner(Runner):
    """Single tokens of a few rows by native.cpp; whatever else comes, eagerly.

    Holds the weights' memory as it is when made: make another when a model gets other weights."""

    name = "native"

    def __init__(self, model: SpiralFormer) -> None:
        self.stacks = {
            id(stack): native_stack(stack, model.config) for stack in model.stacks() if stack.blocks
        }

    def stack(
        self,
        stack: Stack,
        inputs: Sequence[Tensor],
        writes: Sequence[CacheWrite],
        at: Tensor | None = None,
    ) -> list[Tensor]:
        if not stack.blocks:
            return list(inputs)
        sizes = [write.batch for write in writes]
        if inputs[0].shape[1] > 1 or sum(sizes) > MOST_ROWS or not all(all(w.new) for w in writes):
            return super().stack(stack, inputs, writes, at)
        output = self.stacks[id(stack)].run(
            inputs[0] if len(inputs) == 1 else torch.cat(list(inputs)),
            [write.cache for write in writes],
            sizes,
            [row for write in writes for row in write.rows or range(write.batch)],
            [position for write in writes for position in write.held],
        )
        return [output] if len(inputs) == 1 else list(output.split(sizes))

    def head(self, model: SpiralFormer, hidden: Tensor) -> Tensor:
        if hidden.numel() > MOST_ROWS * hidden.shape[-1]:
            return super().head(model, hidden)
        return torch.ops.spiralformer.skinny_linear(hidden, model.head.weight, model.head.bias)


def native_stack(stack: Stack, config: SpiralConfig) -> Any:
    modules: list[nn.Module] = []
    block: Any
    for block in stack.blocks:
        modules += [block.attention_norm, block.attention.qkv, block.attention.out]
        modules += [block.mlp_norm, block.mlp.up, block.mlp.down]
    return torch.classes.spiralformer.Stack(
        [getattr(module, name, None) for module in modules for name in ("weight", "bias")],
        frequencies(config, torch.device("cpu")),
        config.num_heads,
        config.norm_eps,
        config.parallel_residual,
    )
