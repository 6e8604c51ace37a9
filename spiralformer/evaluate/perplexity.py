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
    """The loss of a text, and what it is divided by."""

    loss: float  # in nats, summed over tokens
    tokens: int
    words: int
    bytes: int
    documents: int
    loss_stderr: float | None  # of the loss per token, from the differences between documents

    @property
    def per_token(self) -> float:
        return _exp(self.loss / self.tokens)

    @property
    def per_word(self) -> float:
        return _exp(self.loss / self.words)

    @property
    def per_byte(self) -> float:
        return _exp(self.loss / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        return self.loss / self.bytes / math.log(2)

    def stderr(self, count: int) -> float | None:
        """Of the perplexity per token, word or byte: `count` is how many of them there are."""
        if self.loss_stderr is None:
            return None
        return _exp(self.loss / count) * self.loss_stderr * self.tokens / count

    def metrics(self) -> dict[str, Any]:
        """As the harness names them; it has no perplexity per token."""
        return {
            "sample_len": self.documents,
            "tokens": self.tokens,
            "loss": self.loss,
            "token_perplexity,none": self.per_token,
            "token_perplexity_stderr,none": self.stderr(self.tokens),
            "word_perplexity,none": self.per_word,
            "word_perplexity_stderr,none": self.stderr(self.words),
            "byte_perplexity,none": self.per_byte,
            "byte_perplexity_stderr,none": self.stderr(self.bytes),
            "bits_per_byte,none": self.bits_per_byte,
        }


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


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
        tokens=int(counts.sum()),
        words=sum(document.words for document in documents),
        bytes=sum(document.bytes for document in documents),
        documents=len(documents),
        loss_stderr=_ratio_stderr(losses, counts),
    )


def _ratio_stderr(losses: np.ndarray, counts: np.ndarray) -> float | None:
    """The standard error of Σ losses / Σ counts over documents that are drawn independently."""
    n = len(losses)
    if n < 2:
        return None
    residuals = losses - losses.sum() / counts.sum() * counts
    return float(np.sqrt(n / (n - 1) * np.square(residuals).sum()) / counts.sum())
