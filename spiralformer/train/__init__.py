"""Pretraining: the recipe, the loop, and a run's folder with its checkpoints.

    from spiralformer.train import TrainConfig, train

    result = train(TrainConfig.load("configs/nano.yaml", ["steps=500"]))

`train` is locked, resumable and idempotent (see its docstring). What is named here is imported when
first asked for, so that a recipe is checked without PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spiralformer.train.config import TrainConfig
    from spiralformer.train.log import read_metrics
    from spiralformer.train.loop import train
    from spiralformer.train.run import Interrupted, RunFolder, TrainResult, read_result

__all__ = [
    "Interrupted",
    "RunFolder",
    "TrainConfig",
    "TrainResult",
    "read_metrics",
    "read_result",
    "train",
]

HOMES = {
    "Interrupted": "run",
    "RunFolder": "run",
    "TrainConfig": "config",
    "TrainResult": "run",
    "read_metrics": "log",
    "read_result": "run",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
