"""What is measured, as functions of numbers: no hooks, no files, no models.

Shapes: H heads, Q queries, N keys (an iteration's own length n_t), T iterations, S states.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from spiralformer.probes import GAMMA

DYNAMIC_SHARE = Fraction(2, 5)
NEGLIGIBLE = 1e-12  # a spread that is numerically nothing
CKA_POSITIONS = 1024  # of a sequence that enter the similarity of states
LENS_POSITIONS = 512  # of a sequence at which the logit lens looks


# ---------------------------------------------------------------------------- attention


def window(resolution: Fraction, gamma: int = GAMMA) -> int:
    """M_t = ⌈γ·r_t⌉, from exact fractions."""
    return math.ceil(gamma * resolution)


class AttentionSums:
    """The two attention metrics of one layer and sequence, from rows given a few at a time.

    Both are sums over queries, so no attention matrix is ever whole. Sums are in float64.
    """

    def __init__(self, heads: int, length: int, window: int, device: torch.device | str = "cpu"):
        self.length, self.window = length, window
        self.keys = torch.zeros(heads, length, dtype=torch.float64, device=device)
        self.local = torch.zeros(heads, dtype=torch.float64, device=device)

    def add(self, rows: Tensor, start: int) -> None:
        """Rows of queries start, start+1, …: (H, Q, K), whose keys from K on have no weight."""
        queries, keys = rows.shape[1:]
        self.keys[:, :keys] += rows.sum(1, dtype=torch.float64)
        first = max(start - self.window, 0)
        q = torch.arange(start, start + queries, device=rows.device)[:, None]
        k = torch.arange(first, keys, device=rows.device)
        near = (q - self.window <= k) & (k < q)  # the query itself is not its own neighbourhood
        self.local += (rows[:, :, first:] * near).sum((1, 2), dtype=torch.float64)

    def entropy(self) -> Tensor:
        """H, (heads): entropy of the key-marginal over log n; undefined for fewer than 2 keys."""
        if self.length < 2:
            return torch.full_like(self.local, torch.nan)
        p = self.keys / self.keys.sum(1, keepdim=True)
        return torch.special.entr(p).sum(1) / math.log(self.length)

    def local_mass(self) -> Tensor:
        """LAM, (heads): the mean weight of the `window` keys before each query."""
        if self.length < 1:
            return torch.full_like(self.local, torch.nan)
        return self.local / self.length


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
    return values[present].max(0) - values[present].min(0)


def dynamic_heads(delta: np.ndarray, share: Fraction = DYNAMIC_SHARE) -> np.ndarray:
    """The heads with the largest ranges: `share` of those that have one, rounded, at least one.

    None at all where no head moves. Ties go to the lower layer, then the lower head.
    """
    flat = delta.ravel()
    known = np.flatnonzero(~np.isnan(flat))
    chosen = np.zeros(flat.shape, bool)
    if known.size and flat[known].max() > NEGLIGIBLE:
        count = max(1, math.floor(share * known.size + Fraction(1, 2)))
        chosen[known[np.argsort(-flat[known], kind="stable")[:count]]] = True
    return chosen.reshape(delta.shape)


def min_max(delta: np.ndarray) -> np.ndarray:
    """To [0, 1]; all zero if the spread is negligible or a value not finite (the paper's rule)."""
    if not delta.size or not np.isfinite(delta).all():
        return np.zeros(delta.shape)
    low, high = delta.min(), delta.max()
    return (delta - low) / (high - low) if high - low > NEGLIGIBLE else np.zeros(delta.shape)


# ---------------------------------------------------------------------------- states and answers


def positions(length: int, most: int) -> Tensor:
    """All of 0 … length-1, or a fixed draw of `most` of them, in order. Not every k-th: that would
    be always the same places of a chunk."""
    if length <= most:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(0))[:most].sort()[0]


def hsic(states: list[Tensor]) -> np.ndarray:
    """Unbiased HSIC with linear kernels of every pair of states (n, D) → (S, S).

    The estimator of Song et al. (2012): unlike the plain one it can be averaged over sequences and
    does not call any two states alike when a sequence has fewer tokens than the width.
    """
    n = states[0].shape[0]
    count = len(states)
    if n < 4:
        return np.full((count, count), np.nan)
    grams = []
    for state in states:
        x = state.double()
        x = x - x.mean(0)
        grams.append((x @ x.T).fill_diagonal_(0))
    sums = torch.stack([gram.sum(1) for gram in grams])  # S n
    totals = sums.sum(1)
    found = torch.stack([torch.stack([(a * b).sum() for b in grams]) for a in grams])
    found += totals[:, None] * totals / ((n - 1) * (n - 2))
    found -= 2 / (n - 2) * (sums @ sums.T)
    return (found / (n * (n - 3))).cpu().numpy()


def cka(mean_hsic: np.ndarray) -> np.ndarray:
    """Similarity of states: HSIC, averaged over sequences, over its geometric mean with itself."""
    own = np.sqrt(np.where(np.diag(mean_hsic) > 0, np.diag(mean_hsic), np.nan))
    return mean_hsic / own[:, None] / own


def settled(predictions: Tensor) -> Tensor:
    """(S, L) → (L): from which state on a prediction is, and stays, the last state's."""
    differs = predictions != predictions[-1]
    index = torch.arange(1, len(predictions) + 1, device=predictions.device)[:, None]
    return (differs * index).amax(0)


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
        variance = mean((values - mean(values)) ** 2) * count / (count - 1)
        return np.sqrt(variance / count)
