"""The models that are compared: ours by preset name, and Hugging Face's GPT-NeoX of one shape."""

from __future__ import annotations

import torch
from torch import nn

from spiralformer.config import SpiralConfig
from spiralformer.model import SpiralFormer
from spiralformer.presets import preset

PEER = "hugging face"
BLOCKS = ("Block", "GPTNeoXLayer")


def family(scale: str) -> dict[str, SpiralConfig]:
    """The compared members at a scale of the paper (160m, 410m, 1b, 1.4b) or nano."""
    spiral = preset(f"spiral-b-{scale}-mesh")
    return {
        "baseline": preset(f"pythia-{scale}"),
        "looped": preset(f"looped-{scale}-mesh"),
        "spiral-b": spiral,
        "spiral-b parallel": spiral.replace(shift="parallel"),
        "spiral-l": preset(f"spiral-l-{scale}-mesh"),
    }


def build(config: SpiralConfig, dtype: torch.dtype, seed: int = 0) -> SpiralFormer:
    torch.manual_seed(seed)
    return SpiralFormer(config).to(dtype)


def hugging_face(config: SpiralConfig, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """GPTNeoXForCausalLM of the baseline's shape, as a user would load it."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from spiralformer.hf.neox import write_config

    torch.manual_seed(seed)
    fields = write_config(config.replace(norm="layernorm", scale_embeddings=False))
    shape = GPTNeoXConfig(**fields, bos_token_id=None, eos_token_id=None)
    model: nn.Module = GPTNeoXForCausalLM(shape)
    return model.to(dtype)


def layers(model: nn.Module) -> list[nn.Module]:
    """The Transformer blocks of a model, ours or theirs."""
    return [module for module in model.modules() if type(module).__name__ in BLOCKS]


def parts(model: nn.Module) -> list[nn.Module]:
    """The modules inside its blocks that hold no others."""
    inside = [module for layer in layers(model) for module in layer.modules()]
    return [module for module in inside if not list(module.children())]
