"""Our decode state behind the face that `generate` expects of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from spiralformer.decode.algorithm import extend
from spiralformer.decode.state import DecodeState
from spiralformer.model.spiralformer import SpiralFormer


class SpiralCache(Cache):
    """What `past_key_values` is. `SpiralCache()` is empty and takes the shape of its first batch.

    `columns` counts what it was shown, padding included; the state holds real tokens only.
    """

    def __init__(self, capacity: int = 64) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.state: DecodeState | None = None
        self.columns = 0

    def extend(self, model: SpiralFormer, ids: Tensor, lengths: Sequence[int] | None) -> Tensor:
        """Takes in right-padded new tokens (B, M); returns the output states (B, M, D)."""
        if self.state is None:
            self.state = DecodeState.empty(model, len(ids), max(self.capacity, ids.shape[1]))
        hidden = extend(model, self.state, ids, lengths)
        self.columns += ids.shape[1]
        return hidden

    @property
    def lengths(self) -> list[int]:
        """Real tokens held, per row."""
        return [] if self.state is None else self.state.lengths

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.batch

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.columns = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state.reorder(beam_idx.long())

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.arange(self.batch_size, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError("a SpiralCache cannot take back tokens")

    is_compileable = False
    is_croppable = False
    is_initialized = property(lambda self: self.state is not None)

    def __repr__(self) -> str:
        return f"SpiralCache(lengths={self.lengths})"
