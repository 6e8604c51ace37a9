"""Probes: what a trained loop does, seen from outside.

`capture` hooks a forward pass, `metrics` are the numbers, `collect` averages them over sequences
into `findings`; `verdict`, `figures`, `diagram` and `report` draw from those alone.
"""

from spiralformer.probes.collect import probe
from spiralformer.probes.findings import Findings, Numbers

__all__ = ["Findings", "Numbers", "probe"]
