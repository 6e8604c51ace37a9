"""The model as a user of the package has it: with its folder, its tokenizer and its picture."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from spiralformer import model
from spiralformer.config import SpiralConfig
from spiralformer.errors import UserError
from spiralformer.model_folder import (
    find_model,
    load_model,
    save_model,
    tokenizer_of,
    usable_device,
)

if TYPE_CHECKING:
    from spiralformer.data.tokenizer import TextTokenizer
    from spiralformer.decode.runner import RunnerName


class SpiralFormer(model.SpiralFormer):
    """A model of the family; `SpiralFormer(config)` has random weights and no tokenizer.

    `model(ids)` gives logits (B, L, V), `model(ids, targets)` the mean loss: see `forward`.
    `spiralformer.decode.generate` continues batches of token ids.
    """

    tokenizer: TextTokenizer | None

    def __init__(self, config: SpiralConfig) -> None:
        super().__init__(config)
        self.tokenizer = None

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> Self:
        """The model of a model folder, of a run's folder or of this name in the package, in
        evaluation mode and with its tokenizer, if it has one. dtype None is the one it was saved
        in."""
        from spiralformer.data.tokenizer import load_tokenizer

        folder = find_model(name)
        loaded = load_model(folder, dtype=dtype, device=usable_device(device, "device"), kind=cls)
        assert isinstance(loaded, cls)
        if tokenizer_of(folder) is not None:
            loaded.tokenizer = load_tokenizer(folder)
        return loaded

    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes a model folder, with the tokenizer if there is one, in place of the one there."""
        if self.tokenizer is None:
            return save_model(self, folder)
        eot = self.tokenizer.eot_id
        with tempfile.TemporaryDirectory() as files:
            self.tokenizer.save(Path(files))
            return save_model(self, folder, tokenizer=files, bos_token_id=eot, eos_token_id=eot)

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        runner: RunnerName = "auto",
    ) -> str:
        """The prompt and what the model continues it with, up to the end of the text, to one of the
        texts in `stop`, to `max_new_tokens` or to the model's longest sequence. Temperature 0 is
        greedy; see `spiralformer.decode.Sampling` and `spiralformer.decode.runner_for`."""
        from spiralformer.decode import Sampling, generate
        from spiralformer.decode.generate import TextStream

        if self.tokenizer is None:
            raise UserError(
                "the model has no tokenizer; set model.tokenizer, or continue token ids with "
                "spiralformer.decode.generate"
            )
        eot, text = self.tokenizer.eot_id, TextStream(self.tokenizer.decode, stop)
        [new] = generate(
            self,
            [self.tokenizer.encode(prompt)],
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed),
            stop_ids=[eot],
            stop=text.stopped if stop else None,
            runner=runner,
        )
        return prompt + text.text([token for token in new if token != eot])

    def _repr_svg_(self) -> str:
        """What a notebook shows: which token reads which chunk."""
        from spiralformer.diagram import svg

        return svg(self.config)
