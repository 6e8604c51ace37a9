"""Exact, cached, chunk-triggered decoding of ragged batches."""

from spiralformer.decode.state import DecodeState, StateError
from spiralformer.decode.step import extend, prefill, step

__all__ = ["DecodeState", "StateError", "extend", "prefill", "step"]
