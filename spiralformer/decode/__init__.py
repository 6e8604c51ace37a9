"""Exact, cached, chunk-triggered decoding of ragged batches."""

from spiralformer.decode.generate import GREEDY, RequestError, Sampling, generate, stream
from spiralformer.decode.state import DecodeState, StateError
from spiralformer.decode.step import extend, prefill, step

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
