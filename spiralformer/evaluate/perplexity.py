"""Perplexity of documents: every token is scored exactly once, and all tokens weigh the same.

Windowing. A document of n tokens, with the end-of-text token before it, is scored in windows of at
most `context` tokens. The first window scores its first `context` tokens. Each later window ends
`stride` tokens after the one before (or at the end of the document), reaches back as far as
`context` allows and scores only the tokens that are new. With stride = context, the default, these
are the harness's rolling windows; a smaller stride gives every token of later windows at least
`context - stride` tokens of context, at a proportional cost. Documents never see each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Document(NamedTuple):
    """A text to score. Where it was made from another one, words and bytes are those of that."""

    text: str
    original: str = ""

    @property
    def words(self) -> int:
        """Counted as the harness does."""
        return len(re.split(r"\s+", self.original or self.text))

    @property
    def bytes(self) -> int:
        return len((self.original or self.text).encode())


def windows(targets: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, scored_from, end) of the windows of a document with this many targets. Inputs are
    tokens start … end-1 of the prefixed document; targets follow them by one."""
    end = min(context, targets)
    if end:
        yield 0, 0, end
    while end < targets:
        scored_from, end = end, min(end + stride, targets)
        yield max(0, end - context), scored_from, end


def perplexity(lm: Any, documents: Sequence[Document]) -> dict[str, Any]:
    """Metrics of documents by one of our harness models, or its cached form; named as the harness
    names them, which has none per token."""
    import numpy as np
    from lm_eval.api.instance import Instance

    requests = [
        Instance("loglikelihood_rolling", {}, (document.text,), k)
        for k, document in enumerate(documents)
    ]
    losses = -np.array(lm.loglikelihood_rolling(requests))
    tokens = np.array([len(lm.tok_encode(document.text)) for document in documents])
    loss, stderr = float(losses.sum()), _stderr(losses, tokens)
    counts = {
        "token": int(tokens.sum()),
        "word": sum(document.words for document in documents),
        "byte": sum(document.bytes for document in documents),
    }
    metrics: dict[str, Any] = {"sample_len": len(documents), "tokens": counts["token"]}
    for unit, count in counts.items():
        value = math.exp(loss / count) if loss / count < 700 else math.inf
        metrics[f"{unit}_perplexity,none"] = value
        metrics[f"{unit}_perplexity_stderr,none"] = stderr and value * stderr / count
    return metrics | {"loss": loss, "bits_per_byte,none": loss / counts["byte"] / math.log(2)}


def _stderr(losses: np.ndarray, tokens: np.ndarray) -> float | None:
    """Of the sum of the losses, if documents are drawn independently: that of a ratio."""
    n = len(losses)
    if n < 2:
        return None
    residuals = losses - losses.sum() / tokens.sum() * tokens
    return math.sqrt(n / (n - 1) * float((residuals**2).sum()))
