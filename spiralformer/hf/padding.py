"""Padded batches: where the tokens of each row stand, as an attention mask says it.

Shapes: B batch, M new columns (padding included).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spiralformer.hf.cache import SpiralCache


def roll(x: Tensor, by: Tensor, dim: int = 1) -> Tensor:
    """Rolls row b of x towards its start by `by[b]` places of dimension `dim`."""
    width = x.shape[dim]
    index = (torch.arange(width, device=x.device) + by[:, None]) % width
    shape = [x.shape[0], *[1] * (x.dim() - 1)]
    shape[dim] = width
    return x.gather(dim, index.view(shape).expand_as(x))


class Rows(NamedTuple):
    """Where the tokens of each row stand among the new columns."""

    starts: Tensor  # B: columns of padding before the first one
    real: Tensor  # B M

    @property
    def lengths(self) -> list[int]:
        return self.real.sum(1).tolist()

    def align(self, x: Tensor) -> Tensor:
        """Rolls each row (B, M, …) so that all padding stands on the right, as our model likes it:
        no output depends on what follows."""
        return roll(x, self.starts) if is_tracing() or self.starts.any() else x

    def restore(self, x: Tensor, dim: int = 1) -> Tensor:
        return roll(x, -self.starts, dim) if is_tracing() or self.starts.any() else x


def is_tracing() -> bool:
    """Whether values are unknown: `torch.export` and `torch.compile` cannot ask for them."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def find_rows(mask: Tensor, width: int, cache: SpiralCache | None) -> Rows | None:
    """Reads an attention mask over what the cache holds and `width` new columns. None if all of
    them are tokens."""
    if mask.dim() != 2:
        raise ValueError(f"attention_mask must be (batch, length), not {tuple(mask.shape)}")
    held = 0 if cache is None else cache.columns
    if mask.shape[1] != held + width:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} columns; {held} are in the cache and {width} "
            "are new"
        )
    real = mask != 0
    if not is_tracing():
        check_mask(real, held, cache)
        if real[:, held:].all():
            return None
    real = real[:, held:]
    return Rows(real.int().argmax(1), real)


def check_mask(real: Tensor, held: int, cache: SpiralCache | None) -> None:
    runs = real[:, 0].int() + (real[:, 1:] & ~real[:, :-1]).sum(1)  # of tokens, per row
    if (runs > 1).any():
        raise ValueError(
            f"attention_mask has a hole in row {int((runs > 1).nonzero()[0])}: padding may stand "
            "only before or after a row's tokens, for they are read in chunks"
        )
    if cache is not None and cache.state is not None:
        before = real[:, :held].sum(1).tolist()
        if before != cache.lengths:
            raise ValueError(
                f"attention_mask says that {before} tokens came before; the cache holds "
                f"{cache.lengths}"
            )


def check_positions(
    position_ids: Tensor, given: Tensor, rows: Rows | None, cache: SpiralCache | None
) -> None:
    """Refuses positions other than those that the tokens have anyway (packed sequences, say)."""
    batch, width = given.shape[:2]
    held = [] if cache is None else cache.lengths
    before = torch.tensor(held or [0] * batch, device=given.device)
    expected = torch.arange(width, device=given.device) + before[:, None]
    real = torch.ones_like(expected, dtype=torch.bool)
    if rows is not None:
        expected, real = expected - rows.starts[:, None], rows.real
    positions = position_ids.to(given.device).expand(batch, -1)
    if positions.shape != expected.shape or not ((positions == expected) | ~real).all():
        raise ValueError(
            "position_ids other than 0, 1, 2, … are not supported; sequences cannot be packed"
        )
