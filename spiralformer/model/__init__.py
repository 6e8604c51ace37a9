"""The model: blocks, operators, topologies, the loss, and Algorithm 1 over them."""

from spiralformer.model.spiralformer import SpiralFormer

__all__ = ["SpiralFormer"]
