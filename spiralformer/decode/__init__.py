"""Exact, cached, chunk-triggered decoding of ragged batches."""

from spiralformer.decode.algorithm import extend, prefill, step
from spiralformer.decode.generate import (
    GREEDY,
    Batch,
    RequestError,
    Row,
    Sampling,
    generate,
    stream,
)
from spiralformer.decode.runner import EAGER, Runner, runner_for
from spiralformer.decode.state import DecodeState, StateError

__all__ = [
    "EAGER",
    "GREEDY",
    "Batch",
    "DecodeState",
    "RequestError",
    "Row",
    "Runner",
    "Sampling",
    "StateError",
    "extend",
    "generate",
    "prefill",
    "runner_for",
    "step",
    "stream",
]
