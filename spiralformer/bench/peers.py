"""The models that are compared: ours by preset name, and Hugging Face's GPT-NeoX of one shape."""

from __future__ import annotations

import torch
from torch import nn

from spiralformer.config import SpiralConfig
from spiralformer.model import SpiralFormer
from spiralformer.presets import preset


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

    torch.manual_seed(seed)
    shape = GPTNeoXConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.parsed_layout.compute_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_length,
        rotary_pct=config.rotary_fraction,
        use_parallel_residual=config.parallel_residual,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPTNeoXForCausalLM(shape).to(dtype)
