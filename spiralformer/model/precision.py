"""bfloat16 on CPUs that cannot multiply it.

Without bfloat16 units, its products are emulated at a tenth of the speed of float32. There the
operands are widened instead: what is stored between layers is still bfloat16, products of such
numbers are exact in float32, and sums are kept in float32, as hardware does. Under autocast the
float32 weights are used as they are, so nothing is cast again for each iteration of a loop.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CPU_HAS_BFLOAT16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
FEW_ROWS = 16  # reading bfloat16 weights costs more than multiplying them for so few


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are the hardware's own rather than emulated."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and CPU_HAS_BFLOAT16


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype that a product of x is asked for in: its own, or that of autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def should_widen(x: Tensor) -> bool:
    """Whether a product of x is asked for in bfloat16 on a CPU that cannot do it."""
    return x.device.type == "cpu" and not CPU_HAS_BFLOAT16 and computed_in(x) == torch.bfloat16


class _WideLinear(torch.autograd.Function):
    """F.linear with float32 products of a bfloat16 x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return y.to(torch.bfloat16)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grad.float().flatten(0, -2)
        want_x, want_weight, want_bias = ctx.needs_input_grad
        return (
            (grad @ weight.float()).view(x.shape).to(x.dtype) if want_x else None,
            (grad.T @ x.float().flatten(0, -2)).to(weight.dtype) if want_weight else None,
            grad.sum(0).to(weight.dtype) if want_bias else None,
        )


_kept: contextvars.ContextVar[dict[nn.Module, tuple[Tensor, Tensor | None]] | None]
_kept = contextvars.ContextVar("kept", default=None)


@contextlib.contextmanager
def widening_once() -> Iterator[None]:
    """Inside, and without gradients, a layer that is used several times is widened once."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


class Linear(nn.Linear):
    """A linear layer that widens bfloat16 where a CPU cannot multiply it."""

    def forward(self, x: Tensor) -> Tensor:
        if should_widen(x) and x.numel() > FEW_ROWS * x.shape[-1]:
            with torch.autocast("cpu", enabled=False):
                return _WideLinear.apply(x.to(torch.bfloat16), *self.wide())
        return F.linear(x, self.weight, self.bias)

    def wide(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, widened if it pays to do it here."""
        kept = None if torch.compiler.is_compiling() else _kept.get()
        if kept is None or torch.is_grad_enabled():
            return self.weight, self.bias
        if self not in kept:
            kept[self] = self.weight.float(), None if self.bias is None else self.bias.float()
        return kept[self]
