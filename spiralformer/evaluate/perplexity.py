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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spiralformer.evaluate.models import Scorer
from spiralformer.evaluate.tasks import Document
from spiralformer.model.loss import IGNORE

SORTED_BATCHES = 64  # windows of so many batches are sorted by length, to save padding


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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Perplexity:
        return cls(**fields)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def perplexity(
    scorer: Scorer,
    documents: Iterable[Document],
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    on_total: Callable[[int], None] = lambda tokens: None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Perplexity:
    """Scores documents. `on_total` hears how many tokens there are, `on_tokens` of each batch."""
    context = min(context or scorer.max_length, scorer.max_length)
    stride = min(stride or context, context)
    documents = list(documents)
    encoded = [_encode(scorer, document.text) for document in documents]
    on_total(sum(len(tokens) - 1 for tokens in encoded))

    losses = np.zeros(len(documents))
    for batch in _batches(encoded, context, stride, batch_size):
        ids, targets, lengths = _pad([(encoded[number], window) for number, window in batch])
        found = scorer.losses(ids, targets, lengths).double().sum(1)
        np.add.at(losses, [number for number, _ in batch], found.numpy())
        on_tokens(sum(window.end - window.scored_from for _, window in batch))

    counts = np.array([len(tokens) - 1 for tokens in encoded])
    return Perplexity(
        loss=float(losses.sum()),
        tokens=int(counts.sum()),
        words=sum(document.words for document in documents),
        bytes=sum(document.bytes for document in documents),
        documents=len(documents),
        loss_stderr=_ratio_stderr(losses, counts),
    )


def _encode(scorer: Scorer, text: str) -> np.ndarray:
    """The tokens with the prefix before them. Without one, the first token is not scored."""
    tokens = scorer.encode(text)
    if scorer.prefix is not None:
        tokens = [scorer.prefix, *tokens]
    return np.array(tokens, np.int32)


def _batches(
    encoded: Sequence[np.ndarray], context: int, stride: int, batch_size: int
) -> Iterator[list[tuple[int, Window]]]:
    pending: list[tuple[int, Window]] = []

    def flush() -> Iterator[list[tuple[int, Window]]]:
        pending.sort(key=lambda item: item[1].start - item[1].end)
        for first in range(0, len(pending), batch_size):
            yield pending[first : first + batch_size]
        pending.clear()

    for number, tokens in enumerate(encoded):
        for window in windows(len(tokens) - 1, context, stride):
            pending.append((number, window))
            if len(pending) == batch_size * SORTED_BATCHES:
                yield from flush()
    yield from flush()


def _pad(rows: list[tuple[np.ndarray, Window]]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and targets (B, L) and lengths (B); what is not to be scored is IGNORE."""
    lengths = torch.tensor([window.end - window.start for _, window in rows])
    longest = int(lengths.max())
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    targets = torch.full((len(rows), longest), IGNORE)
    for row, (tokens, (start, scored_from, end)) in enumerate(rows):
        ids[row, : end - start] = torch.from_numpy(tokens[start:end])
        targets[row, scored_from - start : end - start] = torch.from_numpy(
            tokens[scored_from + 1 : end + 1]
        )
    return ids, targets, lengths


def _ratio_stderr(losses: np.ndarray, counts: np.ndarray) -> float | None:
    """The standard error of Σ losses / Σ counts over documents that are drawn independently."""
    n = len(losses)
    if n < 2:
        return None
    residuals = losses - losses.sum() / counts.sum() * counts
    return float(np.sqrt(n / (n - 1) * np.square(residuals).sum()) / counts.sum())
