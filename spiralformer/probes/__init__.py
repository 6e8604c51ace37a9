"""Probes: what a trained loop does, seen from outside.

`capture` hooks a forward pass; `measure` holds the probes, each of which turns what was seen into
numbers (by the formulas of `metrics`) and averages them over `sequences` into a `result`. The
verdict, `figures` and `page` are made from the result alone.
"""

GAMMA = 32  # tokens in the local window, at full resolution
NUMBERS = "numbers.json"  # the file that a result is kept in
