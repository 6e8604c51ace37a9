"""Our model as the harness sees it: log-likelihoods of continuations, in this process."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM

from spiralformer.errors import UserError
from spiralformer.evaluate.models import SpiralScorer
from spiralformer.evaluate.perplexity import perplexity
from spiralformer.evaluate.tasks import Document
from spiralformer.model.loss import CHUNK

log = logging.getLogger("lm_eval.spiralformer")
Request = tuple[Any, list[int], list[int]]  # texts, tokens of the context, of the continuation


class SpiralLM(TemplateLM):
    """Tokenizes, truncates and scores as the harness's own HFLM does."""

    def __init__(self, scorer: SpiralScorer, batch_size: int) -> None:
        super().__init__()
        self.scorer, self.batch_size = scorer, batch_size
        self.tokenizer = scorer.tokenizer
        self.max_length = scorer.max_length
        self._device = scorer.device

    @property
    def eot_token_id(self) -> int:
        if self.scorer.prefix is None:
            raise UserError("the tokenizer has no end-of-text token to stand before a text")
        return self.scorer.prefix

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        if add_special_tokens is None:
            prefix = self.scorer.prefix
            begins = prefix is not None and string.startswith(self.tokenizer.decode([prefix]))
            add_special_tokens = not begins
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        # The longest first: what would not fit in memory fails at once.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        for first in range(0, len(order), self.batch_size):
            numbers = order[first : first + self.batch_size]
            batch = [requests[i] for i in numbers]
            for i, (texts, _, _), answer in zip(numbers, batch, self._score(batch), strict=True):
                answers[i] = answer
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _score(self, batch: list[Request]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether each of its tokens is the likeliest."""
        rows = [self._fit(context, continuation) for _, context, continuation in batch]
        longest = max(map(len, rows)) - 1
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        scored = torch.zeros(len(rows), longest, dtype=torch.bool)
        for row, (tokens, (_, _, continuation)) in enumerate(zip(rows, batch, strict=True)):
            ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            scored[row, len(tokens) - 1 - len(continuation) : len(tokens) - 1] = True
        states = self.scorer.scored_states(ids, scored)  # N D, continuation after continuation
        targets = torch.tensor([t for *_, continuation in batch for t in continuation])
        losses, hits = [], []
        for h, target in zip(states.split(CHUNK), targets.split(CHUNK), strict=True):
            logits, target = self.scorer.model.head(h), target.to(h.device)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses.append(F.cross_entropy(logits, target, reduction="none"))
            hits.append(logits.argmax(-1) == target)
        lengths = [len(continuation) for *_, continuation in batch]
        return [
            (-float(loss.double().sum()), bool(hit.all()))
            for loss, hit in zip(
                torch.cat(losses).split(lengths), torch.cat(hits).split(lengths), strict=True
            )
        ]

    def _fit(self, context: list[int], continuation: list[int]) -> list[int]:
        """Both together; too long a context loses its beginning. The last token is no input."""
        if len(continuation) > self.max_length:
            raise UserError(
                f"a continuation of {len(continuation)} tokens is longer than the model's "
                f"max_length {self.max_length}"
            )
        tokens = context + continuation
        if len(tokens) > self.max_length + 1:
            log.warning("Combined length of context and continuation exceeds max_length")
        return tokens[-(self.max_length + 1) :]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            (text,) = request.args
            result = perplexity(self.scorer, [Document.of(text)], batch_size=self.batch_size)
            found.append(-result.loss)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), -result.loss)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError(
            "tasks that generate text are not among the paper's; load the folder with the "
            "harness's own `hf` model (import spiralformer.hf) to run them"
        )
