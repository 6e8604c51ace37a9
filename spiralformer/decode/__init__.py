"""Exact, cached, chunk-triggered decoding of ragged batches."""

from spiralformer.decode.algorithm import extend, prefill, step
from spiralformer.decode.generate import GREEDY, RequestError, Sampling, generate, stream
from spiralformer.decode.state import DecodeState, StateError

__all__ = [
    "GREEDY",
    "DecodeState",
    "RequestError",
    "Sampling",
    "StateError",
    "extend",
    "generate",
    "prefill",
    "step",
    "stream",
]
