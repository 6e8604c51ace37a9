"""Hugging Face: importing this registers the model with the Auto classes of `transformers`.

import spiralformer.hf
model = AutoModelForCausalLM.from_pretrained("a model folder of ours")
"""

from transformers import AutoConfig, AutoModelForCausalLM

from spiralformer.hf.cache import SpiralCache
from spiralformer.hf.configuration_spiralformer import SpiralFormerConfig
from spiralformer.hf.modeling_spiralformer import SpiralFormerForCausalLM

AutoConfig.register(SpiralFormerConfig.model_type, SpiralFormerConfig, exist_ok=True)
AutoModelForCausalLM.register(SpiralFormerConfig, SpiralFormerForCausalLM, exist_ok=True)

__all__ = ["SpiralCache", "SpiralFormerConfig", "SpiralFormerForCausalLM"]
