"""Cross-entropy of a large vocabulary, a few tokens at a time.

At V = 50,304 the logits of a long batch in float32 would dwarf everything else in memory. Here only
`CHUNK` rows of logits exist at once, in the forward and in the backward pass, and the gradient is
exact: it is formed where the logits are, so they are computed once.

Shapes: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORE = -100
CHUNK = 1024


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of `hidden @ weight.T` against `targets`."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, compute: torch.dtype):
        wide = torch.promote_types(compute, torch.float32)
        w = weight.to(compute)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight: Tensor | None = None
        total = hidden.new_zeros((), dtype=wide)
        for start in range(0, hidden.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            h, target = hidden[rows].to(compute), targets[rows, None]
            kept, target = target != IGNORE, target.clamp_min(0)
            # in place from here on: at V = 50,304 every new N×V tensor costs more than its use
            grad = (h @ w.T).to(wide)
            grad -= grad.amax(-1, keepdim=True)
            chosen = grad.gather(1, target)
            weight_of_all = grad.exp_().sum(-1, keepdim=True)
            total += ((weight_of_all.log() - chosen) * kept).sum()
            if not (want_hidden or want_weight):
                continue
            grad *= kept / weight_of_all  # the softmax, minus one at the target
            grad.scatter_add_(1, target, -kept.to(wide))
            grad = grad.to(compute)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ w).to(hidden.dtype)
            if not want_weight:
                continue
            if grad_weight is None:
                grad_weight = (grad.T @ h).to(wide)
            elif compute == wide:
                grad_weight.addmm_(grad.T, h)
            else:
                grad_weight += grad.T @ h
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        # in place, since V×D is large: going back twice through one loss is an error
        scale = lambda g: None if g is None else g.mul_(grad)
        return *(scale(g) for g in ctx.saved_tensors), None, None


def linear_cross_entropy(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Sum over the targets that are not IGNORE, in at least float32."""
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if type(head) is nn.Linear and head.bias is None:
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        compute = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
        with torch.autocast(kind, enabled=False):
            return _LinearCrossEntropy.apply(hidden, head.weight, targets, compute)
    # A head that something else has wrapped (an adapter, say): the same, through the module.
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for h, target in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
        total = total + checkpoint(_chunk_loss, head, h, target, use_reentrant=False)
    return total


def _chunk_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets, ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def token_losses(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each token, shaped as `targets`; zero where the target is IGNORE."""
    rows = hidden.flatten(0, -2).split(CHUNK)
    losses = []
    for h, target in zip(rows, targets.flatten().split(CHUNK), strict=True):
        logits = head(h)
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses.append(
            F.cross_entropy(logits.to(wide), target, ignore_index=IGNORE, reduction="none")
        )
    return torch.cat(losses).view_as(targets)
