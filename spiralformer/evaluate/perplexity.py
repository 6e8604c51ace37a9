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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spiralformer.evaluate.tasks import Document


class Score(NamedTuple):
    value: float
    stderr: float | None = None


class Window(NamedTuple):
    """Inputs are tokens start … end-1 of the prefixed document; targets follow them by one."""

    start: int
    scored_from: int
    end: int


def windows(targets: int, context: int, stride: int) -> Iterator[Window]:
    """The windows of a document with this many targets."""
    end = min(context, targets)
    if end:
        yield Window(0, 0, end)
    while end < targets:
        scored_from, end = end, min(end + stride, targets)
        yield Window(max(0, end - context), scored_from, end)


@dataclass(frozen=True)
class Perplexity:
    """The loss of a text in nats, summed over tokens, and what it is divided by."""

    loss: float
    loss_stderr: float | None  # from the differences between documents
    tokens: int
    words: int
    bytes: int
    documents: int

    def per(self, unit: str) -> Score:
        """Perplexity per token, word or byte."""
        count = {"token": self.tokens, "word": self.words, "byte": self.bytes}[unit]
        nats = self.loss / count
        value = math.exp(nats) if nats < 700 else math.inf
        return Score(value, None if self.loss_stderr is None else value * self.loss_stderr / count)

    @property
    def bits_per_byte(self) -> float:
        return self.loss / self.bytes / math.log(2)

    def metrics(self) -> dict[str, Any]:
        """As the harness names them; it has no perplexity per token."""
        metrics: dict[str, Any] = {
            "sample_len": self.documents,
            "tokens": self.tokens,
            "loss": self.loss,
            "bits_per_byte,none": self.bits_per_byte,
        }
        for unit in ("token", "word", "byte"):
            score = self.per(unit)
            metrics[f"{unit}_perplexity,none"] = score.value
            metrics[f"{unit}_perplexity_stderr,none"] = score.stderr
        return metrics


def perplexity(lm: Any, documents: Sequence[Document]) -> Perplexity:
    """Scores documents with one of our harness models, or its cached form."""
    from lm_eval.api.instance import Instance

    requests = [
        Instance("loglikelihood_rolling", {}, (document.text,), k)
        for k, document in enumerate(documents)
    ]
    losses = -np.array(lm.loglikelihood_rolling(requests))
    counts = np.array([len(lm.tok_encode(document.text)) for document in documents])
    return Perplexity(
        loss=float(losses.sum()),
        loss_stderr=_stderr(losses, counts),
        tokens=int(counts.sum()),
        words=sum(document.words for document in documents),
        bytes=sum(document.bytes for document in documents),
        documents=len(documents),
    )


def _stderr(losses: np.ndarray, counts: np.ndarray) -> float | None:
    """Of the loss of so many tokens, if documents are drawn independently: that of a ratio."""
    n = len(losses)
    if n < 2:
        return None
    residuals = losses - losses.sum() / counts.sum() * counts
    return float(np.sqrt(n / (n - 1) * np.square(residuals).sum()))
