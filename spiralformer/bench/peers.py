"""The models that are compared: ours by preset, and Hugging Face's GPT-NeoX of the same shape."""

from __future__ import annotations

from typing import Any

import torch

from spiralformer.config import SpiralConfig
from spiralformer.model import SpiralFormer
from spiralformer.presets import preset

PEER = "hf gpt-neox"


def family(scale: str, length: int = 0) -> dict[str, SpiralConfig]:
    """The compared members at a scale of the paper (160m, 410m, 1b, 1.4b) or nano, with room for
    sequences of this length. The peer has the baseline's shape."""
    spiral = preset(f"spiral-b-{scale}-mesh")
    members = {
        PEER: preset(f"pythia-{scale}"),
        "baseline": preset(f"pythia-{scale}"),
        "looped": preset(f"looped-{scale}-mesh"),
        "spiral-b": spiral,
        "spiral-b parallel": spiral.replace(shift="parallel"),
        "spiral-l": preset(f"spiral-l-{scale}-mesh"),
    }
    return {
        name: config.replace(max_length=max(length, config.max_length))
        for name, config in members.items()
    }


def build(name: str, config: SpiralConfig, dtype: torch.dtype) -> Any:
    """The model of a member: a SpiralFormer, or a GPTNeoXForCausalLM as a user would load it."""
    torch.manual_seed(0)
    if name != PEER:
        return SpiralFormer(config).to(dtype)
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from spiralformer.hf.neox import write_config

    fields = write_config(config.replace(norm="layernorm", scale_embeddings=False))
    shape = GPTNeoXConfig(**fields, bos_token_id=None, eos_token_id=None)
    peer: Any = GPTNeoXForCausalLM(shape)
    return peer.to(dtype)


def wrap(model: SpiralFormer) -> Any:
    """One of ours as a `transformers` model, with the same weights."""
    from spiralformer.hf import SpiralFormerConfig, SpiralFormerForCausalLM

    with torch.device("meta"):
        wrapper = SpiralFormerForCausalLM(SpiralFormerConfig.from_spiral(model.config))
    wrapper.model = model
    return wrapper.eval()
