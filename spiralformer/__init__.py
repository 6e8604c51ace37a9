"""SpiralFormer: a looped Transformer whose iterations run at different sequence resolutions."""

from typing import TYPE_CHECKING, Any

from spiralformer.config import ConfigError, SpiralConfig

if TYPE_CHECKING:
    from spiralformer.model import SpiralFormer

__version__ = "0.1.0"

__all__ = ["ConfigError", "SpiralConfig", "SpiralFormer", "__version__"]


def __getattr__(name: str) -> Any:
    """The model is imported when first asked for, so that counting needs no PyTorch."""
    if name == "SpiralFormer":
        from spiralformer.model import SpiralFormer

        return SpiralFormer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
