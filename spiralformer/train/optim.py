"""Optimisers and schedules by name, and the update of a step.

To add one, write the function and enter it in `OPTIMIZERS` or `SCHEDULES`; `optim.name` and
`optim.schedule` of the recipe then take its name. PyTorch is imported when one is built: the recipe
needs the names alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from spiralformer.train.config import Optim

Groups = list[dict[str, Any]]  # parameters with a weight decay, as torch.optim takes them


def adamw(groups: Groups, config: Optim) -> torch.optim.Optimizer:
    """Fused: a step is one pass over the weights."""
    import torch

    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def cosine(done: int, steps: int) -> float:
    return (1 + math.cos(math.pi * done / steps)) / 2


OPTIMIZERS: dict[str, Callable[[Groups, Optim], torch.optim.Optimizer]] = {"adamw": adamw}
# Of the way from the peak (1) to `optim.final` of it (0), what is left after `done` of the `steps`
# that follow the warm-up.
SCHEDULES: dict[str, Callable[[int, int], float]] = {"cosine": cosine}


def make_optimizer(model: nn.Module, config: Optim) -> torch.optim.Optimizer:
    """Weight decay is on parameters of two or more dimensions: linear maps, embedding and head, but
    not biases and norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: Groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return OPTIMIZERS[config.name]([group for group in groups if group["params"]], config)


def learning_rate(step: int, steps: int, config: Optim) -> float:
    """Of step 0 … steps-1: a linear rise to the peak, then the schedule down to `final` of it,
    which the last step has."""
    warmup = round(config.warmup * steps)
    done = step + 1
    if done <= warmup:
        return config.lr * done / warmup
    left = SCHEDULES[config.schedule](done - warmup, steps - warmup)
    return config.lr * (config.final + (1 - config.final) * left)


def update(optimizer: torch.optim.Optimizer, lr: float, clip: float, loss: float) -> float:
    """Clips the gradients, takes the step and clears them. Returns the norm before clipping.

    If the loss or the norm is not finite, the weights stay as they are."""
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    total = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(total, DTensor):
        total = total.full_tensor()
    norm = total.item()
    if math.isfinite(loss) and math.isfinite(norm):
        if clip:
            clip_grads_with_norm_(parameters, clip, total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
