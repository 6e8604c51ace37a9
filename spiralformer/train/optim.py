"""Optimisers and schedules by name, and the update of a step.

To add one, write the function and enter it in `OPTIMIZERS` or `SCHEDULES`; `optim.name` and
`optim.schedule` of the recipe then take its name. PyTorch is imported when one is built: the recipe
needs the names alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from spiralformer.train.config import Optim

Parameters = dict[str, "nn.Parameter"]  # by name, a shared one once


def adamw(parameters: Parameters, config: Optim) -> list[torch.optim.Optimizer]:
    """Fused: a step is one pass over the weights. Weight decay is on parameters of two or more
    dimensions: linear maps, embedding and head, but not biases and norms."""
    import torch

    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)]


def muon(parameters: Parameters, config: Optim) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for all else: embedding, head, norms, biases, the
    operators and routers. Muon's updates are scaled to the size of AdamW's (Moonshot's rule), so
    that one learning rate and one weight decay serve both."""
    import torch

    hidden = {n: p for n, p in parameters.items() if ".blocks." in n and p.dim() == 2}
    others = {name: p for name, p in parameters.items() if name not in hidden}
    matrices = torch.optim.Muon(
        list(hidden.values()),
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return [matrices, *adamw(others, config)]


def cosine(done: int, steps: int, config: Optim) -> float:
    return (1 + math.cos(math.pi * done / steps)) / 2


def wsd(done: int, steps: int, config: Optim) -> float:
    """Stable, then a straight line down over the last `decay` of the steps."""
    decay = max(1, round(config.decay * steps))
    return min(1.0, (steps - done) / decay)


OPTIMIZERS: dict[str, Callable[[Parameters, Optim], list[torch.optim.Optimizer]]] = {
    "adamw": adamw,
    "muon": muon,
}
# Of the way from the peak (1) to `optim.final` of it (0), what is left after `done` of the `steps`
# that follow the warm-up.
SCHEDULES: dict[str, Callable[[int, int, Optim], float]] = {"cosine": cosine, "wsd": wsd}


def make_optimizers(model: nn.Module, config: Optim) -> list[torch.optim.Optimizer]:
    """One for each kind of parameters that the named optimiser tells apart."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return OPTIMIZERS[config.name](parameters, config)


def learning_rate(step: int, steps: int, config: Optim) -> float:
    """Of step 0 … steps-1: a linear rise to the peak, then the schedule down to `final` of it,
    which the last step has."""
    warmup = round(config.warmup * steps)
    done = step + 1
    if done <= warmup:
        return config.lr * done / warmup
    left = SCHEDULES[config.schedule](done - warmup, steps - warmup, config)
    return config.lr * (config.final + (1 - config.final) * left)


def update(optimizers: list[torch.optim.Optimizer], lr: float, clip: float, loss: float) -> float:
    """Clips the gradients, takes the step and clears them. Returns the norm before clipping.

    If the loss or the norm is not finite, the weights stay as they are."""
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [p for group in groups for p in group["params"]]
    total = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(total, DTensor):
        total = total.full_tensor()
    norm = total.item()
    if math.isfinite(loss) and math.isfinite(norm):
        if clip:
            clip_grads_with_norm_(parameters, clip, total)
        for group in groups:
            group["lr"] = lr
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return norm
