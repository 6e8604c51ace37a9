"""SpiralFormer: a looped Transformer whose iterations run at different sequence resolutions.

import spiralformer

model = spiralformer.load("runs/x")  # a run, a model folder or a model of the package
print(model.generate("def "))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spiralformer.config import ConfigError, SpiralConfig
from spiralformer.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from spiralformer.pretrained import SpiralFormer

__version__ = "0.1.0"

__all__ = ["ConfigError", "SpiralConfig", "SpiralFormer", "UserError", "__version__", "load"]


def load(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> SpiralFormer:
    """The trained model of a run's folder, of a model folder or of this name in the package, with
    its tokenizer: `SpiralFormer.from_pretrained`."""
    from spiralformer.pretrained import SpiralFormer

    return SpiralFormer.from_pretrained(name, dtype=dtype, device=device)


def __getattr__(name: str) -> Any:
    """The model is imported when first asked for, so that counting needs no PyTorch."""
    if name == "SpiralFormer":
        from spiralformer.pretrained import SpiralFormer

        return SpiralFormer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
