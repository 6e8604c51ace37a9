"""`SpiralConfig` in the shape that `transformers` expects of a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from spiralformer.config import SpiralConfig

FIELDS = tuple(field.name for field in dataclasses.fields(SpiralConfig))
# the paper's smallest SpiralFormer-B
DEFAULT = {"layout": "2+4x{1/8,1/4,1/2,1}+2", "hidden_size": 768, "num_heads": 12}
DEFAULT |= {"vocab_size": 50304}


class SpiralFormerConfig(PretrainedConfig):
    """Every field of `SpiralConfig`, flat; `spiral` is the validated `SpiralConfig` of them. Where
    none is given, they are those of `DEFAULT`.

    The fields are validated when the configuration is made and whenever `spiral` is asked for, so a
    field that is changed later (as `resize_token_embeddings` changes vocab_size) is checked too.
    """

    model_type = "spiralformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers' own form)
    has_no_defaults_at_init = True
    attribute_map = {  # noqa: RUF012
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_heads",
        "max_position_embeddings": "max_length",
        "tie_word_embeddings": "tie_embeddings",
        "initializer_range": "init_std",
    }

    def __init__(
        self,
        *,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = {self.attribute_map.get(name, name): value for name, value in kwargs.items()}
        given = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        for name, value in SpiralConfig.from_dict(given or DEFAULT).to_dict().items():
            setattr(self, name, value)
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        super().__init__(**kwargs)

    @classmethod
    def from_spiral(cls, spiral: SpiralConfig, **kwargs: Any) -> SpiralFormerConfig:
        return cls(**spiral.to_dict(), **kwargs)

    @property
    def spiral(self) -> SpiralConfig:
        return SpiralConfig.from_dict({name: getattr(self, name) for name in FIELDS})

    @property
    def num_hidden_layers(self) -> int:
        """Layers that own parameters."""
        return self.spiral.parsed_layout.unique_layers

    def _get_generation_parameters(self) -> dict[str, Any]:
        """`max_length` is a property of the model here, not a request to `generate`."""
        found = super()._get_generation_parameters()
        found.pop("max_length", None)
        return found
