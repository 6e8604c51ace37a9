"""Our decode state behind the face that `generate` expects of a cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from spiralformer.decode.algorithm import extend
from spiralformer.decode.runner import EAGER, Runner
from spiralformer.decode.state import DecodeState
from spiralformer.model.spiralformer import SpiralFormer

HISTORY = 256  # tokens that `crop` can take back: more than an assistant guesses at once


class SpiralCache(Cache):
    """What `past_key_values` is. `SpiralCache()` is empty and takes the shape of its first batch.

    `columns` counts what it was shown, padding included; the state holds real tokens only.
    """

    def __init__(self, capacity: int = 64, runner: Runner = EAGER) -> None:
        super().__init__(layers=[])
        self.capacity, self.runner = capacity, runner
        self.model: SpiralFormer | None = None
        self.state: DecodeState | None = None
        self.history = 0
        self.columns = 0

    def extend(self, model: SpiralFormer, ids: Tensor, lengths: Sequence[int] | None) -> Tensor:
        """Takes in right-padded new tokens (B, M); returns the output states (B, M, D)."""
        if self.state is None:
            capacity = max(self.capacity, self.runner.capacity, ids.shape[1])
            self.state = DecodeState.empty(model, len(ids), capacity, history=self.history)
        self.model = model
        hidden = extend(model, self.state, ids, lengths, runner=self.runner)
        self.columns += ids.shape[1]
        return hidden

    def __deepcopy__(self, memo: dict) -> SpiralCache:
        """A prompt that was read once, to go on from several times; the model is not copied."""
        other = copy.copy(self)
        other.state = None if self.state is None else self.state.clone()
        return other

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

    def activate_past_recording(self) -> None:
        """From here on, `crop` can take tokens back."""
        self.history = HISTORY
        if self.state is not None:
            self.state.keep_history(HISTORY)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last -tokens_to_remove columns, all of them tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give minus the number of tokens to remove")
        if self.state is not None and self.model is not None and tokens_to_remove:
            self.state.truncate(self.model, [n + tokens_to_remove for n in self.lengths])
            self.columns += tokens_to_remove

    is_compileable = False
    is_croppable = property(lambda self: self.history > 0)
    is_initialized = property(lambda self: self.state is not None)

    def __repr__(self) -> str:
        return f"SpiralCache(lengths={self.lengths})"
