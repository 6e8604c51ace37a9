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
SOME_ROWS = 256  # up to here, weight @ x.T is the faster order for MKL, by a quarter at 64 rows


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


class _Sum:
    """The gradient of a weight that is used several times, added up in place."""

    def __init__(self) -> None:
        self.pass_id = -1  # of the backward pass that it belongs to
        self.total: Tensor | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        """Adds a @ b."""
        if self.total is None or self.pass_id != torch._C._current_graph_task_id():
            self.pass_id, self.total = torch._C._current_graph_task_id(), a @ b
        else:
            self.total = self.total.addmm_(a, b)

    def take(self) -> Tensor | None:
        total, self.total = self.total, None
        return total


class _Shared(torch.autograd.Function):
    """A weight whose users put their gradients into a sum. Autograd comes back here, as to any
    node, when all users that take part in this backward pass are done."""

    @staticmethod
    def forward(ctx, weight: Tensor, found: _Sum) -> Tensor:
        ctx.found = found
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: None):  # type: ignore[override]
        return ctx.found.take(), None


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.float().flatten(0, -2)
    if bias is None or torch.compiler.is_compiling() or len(rows) > SOME_ROWS:
        y = F.linear(rows, weight, bias).to(torch.bfloat16)
    else:
        y = torch.addmm(bias[:, None], weight, rows.T).to(torch.bfloat16).T.contiguous()
    return y.unflatten(0, x.shape[:-1])


class _WideLinear(torch.autograd.Function):
    """F.linear with float32 products of a bfloat16 x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, found: _Sum | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.found = found
        return _wide_linear(x, weight.float(), None if bias is None else bias.float())

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        want_x, want_weight, want_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        with torch.autocast("cpu", enabled=False):
            grad, rows = grad.float().flatten(0, -2), x.float().flatten(0, -2)
            if want_x:
                grad_x = (grad @ weight.float()).view(x.shape).to(x.dtype)
            if want_weight and ctx.found is not None:
                ctx.found.add(grad.T, rows)
            elif want_weight:
                grad_weight = (grad.T @ rows).to(weight.dtype)
            if want_bias:
                grad_bias = grad.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias, None


Operands = tuple[Tensor, Tensor | None, _Sum | None]  # weight, bias, where the gradient goes

_kept: contextvars.ContextVar[dict[tuple[nn.Module, bool], Operands] | None]
_kept = contextvars.ContextVar("kept", default=None)


@contextlib.contextmanager
def used_again() -> Iterator[None]:
    """Inside, layers are used several times and do not change: without gradients each is widened
    once, and with gradients those of all its uses are added up in one place."""
    if torch.compiler.is_compiling():
        yield
        return
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
                return _WideLinear.apply(x.to(torch.bfloat16), *self._operands())
        return F.linear(x, self.weight, self.bias)

    def _operands(self) -> Operands:
        kept = None if torch.compiler.is_compiling() else _kept.get()
        if kept is None:
            return self.weight, self.bias, None
        key = self, torch.is_grad_enabled()
        if key not in kept:
            kept[key] = self._shared() if torch.is_grad_enabled() else self._widened()
        return kept[key]

    def _widened(self) -> Operands:
        return self.weight.float(), None if self.bias is None else self.bias.float(), None

    def _shared(self) -> Operands:
        found = _Sum()
        return _Shared.apply(self.weight, found), self.bias, found


class Narrow(Linear):
    """A linear layer with few outputs (scores, logits of a router). Where it is widened, these stay
    in float32: rounding the input and its gradient would take longer than the products."""

    def forward(self, x: Tensor) -> Tensor:
        if not should_widen(x):
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the dtype of a, or widened where a CPU cannot multiply bfloat16."""
    if not should_widen(a):
        return a @ b.to(a.dtype)
    with torch.autocast("cpu", enabled=False):
        return a.float() @ b.float()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Σ_d a·b in the dtype of a and b, whatever autocast says; without an intermediate on CPUs."""
    if a.device.type != "cpu":
        return (a * b).sum(-1)
    with torch.autocast("cpu", enabled=False):
        return torch.einsum("...d,...d->...", a, b.to(a.dtype))
