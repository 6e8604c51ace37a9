"""Linear layers for the few rows of a decode step on a CPU.

A step reads every weight once and does almost nothing with it. The general matrix product of a CPU
reads them at half the speed of the memory, and a second row costs it a second reading; `few_rows`
(few_rows.cpp, built once per machine) reads them at nearly full speed for one to four rows alike.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16)
MOST_ROWS = 16  # above these, the general product does better

M = TypeVar("M", bound=nn.Module)


@functools.cache
def build() -> str | None:
    """Builds the operator, or loads what an earlier process built. Returns why it cannot."""
    from torch.utils import cpp_extension

    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), before))  # for ninja
    try:
        cpp_extension.load(
            f"spiralformer_few_rows_{capability}",
            [str(Path(__file__).with_suffix(".cpp"))],
            # parallel_for is OpenMP in a header: without the flag it is silently serial
            extra_cflags=["-O3", "-march=native", "-fopenmp"],
            is_python_module=False,
        )
    except (RuntimeError, OSError, ImportError) as error:
        return str(error).splitlines()[0]
    finally:
        os.environ["PATH"] = before
    torch.library.register_fake("spiralformer::few_rows", _shape)
    return None


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class FewRows(nn.Module):
    """A linear layer that shares another's weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > MOST_ROWS * x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.spiralformer.few_rows(x, self.weight, self.bias)


def why_not(module: nn.Module) -> str | None:
    """Why `for_few_rows` does not serve these weights on this machine, if it does not."""
    for p in module.parameters():
        if p.device.type != "cpu":
            return f"the weights are on {p.device.type}"
        if p.dtype not in DTYPES:
            return f"the weights are {str(p.dtype).removeprefix('torch.')}"
        if not p.is_contiguous():
            return "a weight is not contiguous"
    return build()


def for_few_rows(module: M) -> M:
    """The same module with the same weights, its linear layers replaced."""
    if isinstance(module, nn.Linear):
        return FewRows(module)  # type: ignore[return-value]
    twin = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, FewRows(child))
    return twin
