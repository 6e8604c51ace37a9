"""What is measured, as functions of numbers: no hooks, no files, no models.

Shapes: B batch, H heads, Q queries, N keys (an iteration's own length n_t), T iterations, S states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spiralformer.probes import GAMMA

METRICS = ("entropy", "local_mass")  # of the attention of a head
DYNAMIC_SHARE = Fraction(2, 5)
NEGLIGIBLE = 1e-12  # a spread that is numerically nothing
CKA_POSITIONS = 1024  # of a sequence that enter the similarity of states
LENS_POSITIONS = 512  # of a sequence at which the logit lens looks


# ---------------------------------------------------------------------------- attention


def window(resolution: Fraction, gamma: int = GAMMA) -> int:
    """M_t = ⌈γ·r_t⌉, from exact fractions."""
    return math.ceil(gamma * resolution)


def attention_metrics(blocks: Iterable[Tensor], length: int, window: int) -> Tensor:
    """(2, H): the entropy of the key-marginal over log n, which needs two keys, and LAM, the mean
    weight of the `window` keys before each query.

    Each block (H, Q, K) has the rows of the next Q queries, whose keys from K on have no weight.
    Both metrics are sums over queries, so no attention matrix is ever whole; sums are in float64.
    """
    marginal = local = torch.zeros(())
    start = 0
    for rows in blocks:
        queries, keys = rows.shape[1:]
        total = rows.sum(1, dtype=torch.float64)
        marginal = marginal.to(total) + F.pad(total, (0, length - keys))
        first = max(start - window, 0)
        q = torch.arange(start, start + queries, device=rows.device)[:, None]
        k = torch.arange(first, keys, device=rows.device)
        near = (q - window <= k) & (k < q)  # the query itself is not its own neighbourhood
        local = local.to(total) + (rows[:, :, first:] * near).sum((1, 2), dtype=torch.float64)
        start += queries
    p = marginal / marginal.sum(1, keepdim=True)
    entropy = torch.special.entr(p).sum(1) / (math.log(length) or math.nan)
    return torch.stack([entropy, local / length])


def uniform_reference(length: int, window: int) -> tuple[float, float]:
    """Entropy and LAM of a head that attends to all earlier keys alike.

    What the geometry of an iteration gives by itself: neither is the same at every resolution.
    """
    if length < 2:
        return math.nan, math.nan if length < 1 else 0.0
    q = np.arange(length)
    share = 1 / (q + 1)
    p = share[::-1].cumsum()[::-1] / length
    entropy = -(p * np.log(p)).sum() / math.log(length)
    return float(entropy), float((np.minimum(window, q) * share).mean())


# ---------------------------------------------------------------------------- heads across loops


def cross_loop_range(values: np.ndarray) -> np.ndarray:
    """Δm: (T, layers, H) → (layers, H), max over iterations less min.

    An iteration without any value (too short a sequence) does not count; a head that some other
    iteration lacks (untied cores of different depth) has no range.
    """
    present = ~np.isnan(values).all(axis=(1, 2)) if values.size else np.zeros(0, bool)
    if not present.any():
        return np.full(values.shape[1:], np.nan)
    return np.ptp(values[present], axis=0)


def dynamic_heads(delta: np.ndarray) -> np.ndarray:
    """The heads with the largest ranges: 40 % of those that have one, rounded, at least one.

    None at all where no head moves. Ties go to the lower layer, then the lower head.
    """
    flat = delta.ravel()
    known = np.flatnonzero(~np.isnan(flat))
    chosen = np.zeros(flat.shape, bool)
    if known.size and flat[known].max() > NEGLIGIBLE:
        count = max(1, math.floor(DYNAMIC_SHARE * known.size + Fraction(1, 2)))
        chosen[known[np.argsort(-flat[known], kind="stable")[:count]]] = True
    return chosen.reshape(delta.shape)


def min_max(delta: np.ndarray) -> np.ndarray:
    """To [0, 1]; all zero if the spread is negligible or a value not finite (the paper's rule)."""
    if not delta.size or not np.isfinite(delta).all() or np.ptp(delta) <= NEGLIGIBLE:
        return np.zeros(delta.shape)
    return (delta - delta.min()) / np.ptp(delta)


# ---------------------------------------------------------------------------- states and answers


def positions(length: int, most: int) -> Tensor:
    """All of 0 … length-1, or a fixed draw of `most` of them, in order. Not every k-th: that would
    be always the same places of a chunk."""
    if length <= most:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(0))[:most].sort()[0]


def hsic(states: Tensor) -> Tensor:
    """Unbiased HSIC with linear kernels of every pair of states: (S, n, D) → (S, S).

    The estimator of Song et al. (2012): unlike the plain one it can be averaged over sequences and
    does not call any two states alike when a sequence has fewer tokens than the width.
    """
    count, n = states.shape[:2]
    if n < 4:
        return torch.full((count, count), torch.nan)
    x = states.double()
    x = x - x.mean(1, keepdim=True)
    grams = x @ x.mT
    grams.diagonal(dim1=1, dim2=2).zero_()
    sums = grams.sum(2)  # S n
    totals = sums.sum(1)
    values = grams.flatten(1) @ grams.flatten(1).T
    values += totals[:, None] * totals / ((n - 1) * (n - 2)) - 2 / (n - 2) * (sums @ sums.T)
    return values / (n * (n - 3))


def cka(mean_hsic: np.ndarray) -> np.ndarray:
    """Similarity of states: HSIC, averaged over sequences, over its geometric mean with itself."""
    own = np.sqrt(np.where(np.diag(mean_hsic) > 0, np.diag(mean_hsic), np.nan))
    return mean_hsic / own[:, None] / own


def settled(predictions: Tensor) -> Tensor:
    """(S, …) → (…): from which state on a prediction is, and stays, the last state's."""
    same = (predictions == predictions[-1]).flip(0)
    return len(predictions) - same.long().cumprod(0).sum(0)


# ---------------------------------------------------------------------------- over sequences


def mean(values: np.ndarray) -> np.ndarray:
    """Mean over axis 0 of what is not NaN. Sorting first makes it the same bits in any order."""
    ordered = np.sort(values, axis=0)
    count = (~np.isnan(ordered)).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nansum(ordered, axis=0) / count


def standard_error(values: np.ndarray) -> np.ndarray:
    """Of that mean."""
    count = (~np.isnan(values)).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt(mean((values - mean(values)) ** 2) / (count - 1))
