"""Our decode state behind the face that `generate` expects of a cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from spiralformer.decode.algorithm import extend
from spiralformer.decode.runner import EAGER, Runner
from spiralformer.decode.state import DecodeState
from spiralformer.model.spiralformer import SpiralFormer

HISTORY = 256  # tokens that `crop` can take back: more than an assistant guesses at once


class SpiralCache(Cache):
    """What `past_key_values` is. `SpiralCache()` is empty and takes the shape of its first batch.

    `columns` counts what it was shown, padding included; the state holds real tokens only.
    """

    offloading = False
    is_compileable = False

    def __init__(self, capacity: int = 64, runner: Runner = EAGER) -> None:
        # not the parent's: `layers` follow from the state
        self.capacity, self.runner = capacity, runner
        self.model: SpiralFormer | None = None
        self.state: DecodeState | None = None
        self.history = 0
        self.columns = 0

    def extend(
        self, model: SpiralFormer, x: Tensor, lengths: Sequence[int] | None, runner: Runner
    ) -> Tensor:
        """Takes in the embeddings x (B, M, D) of new tokens, padded on the right; returns their
        output states (B, M, D)."""
        if self.state is None:
            capacity = max(self.capacity, self.runner.capacity, x.shape[1])
            self.state = DecodeState.empty(model, len(x), capacity, history=self.history)
        self.model = model
        hidden = extend(model, self.state, x, lengths, runner=runner)
        self.columns += x.shape[1]
        return hidden

    @property
    def layers(self) -> list[DynamicLayer]:  # type: ignore[override]
        """Keys and values of each layer of the unrolled computation, (B, H, L, K), to look at. In
        an iteration at a lower resolution L counts chunks. A row begins with its first token or
        chunk; what stands behind its last one means nothing."""
        if self.state is None:
            return []
        longest = max(self.lengths)
        runs = [(self.state.pre, longest)]
        runs += [(part.cache, part.iteration.chunks(longest)) for part in self.state.loop]
        runs += [(self.state.post, longest)]
        layers = []
        for cache, length in runs:
            for keys, values in cache[..., :length, :].transpose(0, 1):
                layer = DynamicLayer()
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
                layers.append(layer)
        return layers

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a SpiralCache is filled by SpiralFormerForCausalLM alone")

    def __deepcopy__(self, memo: dict) -> SpiralCache:
        """A prompt that was read once, to go on from several times; the model is not copied."""
        other = copy.copy(self)
        other.state = None if self.state is None else self.state.fork()
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
        if self.state is None or self.model is None or not tokens_to_remove:
            return
        if not self.is_croppable:
            raise ValueError(
                "this cache cannot be cropped: it keeps nothing of the chunks that are complete; "
                "call activate_past_recording() before the tokens that are to be taken back"
            )
        self.state.truncate(self.model, [n + tokens_to_remove for n in self.lengths])
        self.columns += tokens_to_remove

    @property
    def is_croppable(self) -> bool:
        return self.history > 0 or (self.state is not None and not self.state.needs_history)

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    def __repr__(self) -> str:
        return f"SpiralCache(lengths={self.lengths})"
