"""AdamW as the paper uses it: what decays, the learning rate of a step, clipping, skipped steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spiralformer.train.config import Optim


def make_optimizer(model: nn.Module, config: Optim) -> torch.optim.AdamW:
    """Weight decay on parameters of two or more dimensions: linear maps, embedding and head, but
    not biases and norms. Fused, so that a step is one pass over the weights and can be skipped on
    the device (see `update`)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(step: int, steps: int, config: Optim) -> float:
    """Of step 0 … steps-1: a linear rise to the peak, then a cosine down to `final` of it, which
    the last step has."""
    warmup = round(config.warmup * steps)
    done = step + 1
    if done <= warmup:
        return config.lr * done / warmup
    cosine = (1 + math.cos(math.pi * (done - warmup) / (steps - warmup))) / 2
    return config.lr * (config.final + (1 - config.final) * cosine)


def update(optimizer: torch.optim.Optimizer, lr: float, clip: float, loss: Tensor) -> Tensor:
    """Clips the gradients, takes the step and clears them. Returns the norm before clipping.

    If the loss or the norm is not finite, nothing changes. The optimiser learns it as a gradient
    scaler would tell it, through `found_inf`, so that the host need not wait for the device."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if clip:
        clip_grads_with_norm_(parameters, clip, norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.found_inf = (~(norm.isfinite() & loss.isfinite())).to(torch.float32)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
