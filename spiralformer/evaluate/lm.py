"""Our model as the harness sees it: log-likelihoods of continuations, in this process."""

from __future__ import annotations

import itertools
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
        # The answers to one question share a context: it is read once for all of them.
        sharing: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            sharing.setdefault(self._fit(context, continuation), []).append(i)
        longest = lambda group: max(len(requests[i][2]) for i in group[1])
        # The longest first: what would not fit in memory fails at once.
        groups = sorted(sharing.items(), key=lambda group: -len(group[0]) - longest(group))
        while groups:
            rows = itertools.accumulate(len(numbers) for _, numbers in groups)
            count = max(1, sum(1 for _ in itertools.takewhile(self.batch_size.__ge__, rows)))
            batch, groups = groups[:count], groups[count:]
            numbers = [i for _, members in batch for i in members]
            continuations = [[requests[i][2] for i in members] for _, members in batch]
            found = self._score([list(context) for context, _ in batch], continuations)
            for i, answer in zip(numbers, found, strict=True):
                answers[i] = answer
                self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return answers

    def _score(
        self, contexts: list[list[int]], continuations: list[list[list[int]]]
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each context's continuations, one after the other, and whether each
        token of it is the likeliest."""
        states = self.scorer.continuation_states(contexts, continuations)
        rows = [continuation for some in continuations for continuation in some]
        targets = torch.tensor([token for row in rows for token in row])
        losses, hits = [], []
        for h, target in zip(states.split(CHUNK), targets.split(CHUNK), strict=True):
            logits, target = self.scorer.model.head(h), target.to(h.device)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses.append(F.cross_entropy(logits, target, reduction="none"))
            hits.append(logits.argmax(-1) == target)
        lengths = [len(row) for row in rows]
        return [
            (-float(loss.double().sum()), bool(hit.all()))
            for loss, hit in zip(
                torch.cat(losses).split(lengths), torch.cat(hits).split(lengths), strict=True
            )
        ]

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """The context; what is too long for the model loses its beginning. The continuation's last
        token is no input."""
        if len(continuation) > self.max_length:
            raise UserError(
                f"a continuation of {len(continuation)} tokens is longer than the model's "
                f"max_length {self.max_length}"
            )
        room = self.max_length + 1 - len(continuation)
        if len(context) > room:
            log.warning("Combined length of context and continuation exceeds max_length")
        return tuple(context[-room:])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            (text,) = request.args
            result = perplexity(self.scorer, [Document.of(text)], batch_size=self.batch_size)
            found.append(-result.loss)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), -result.loss)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise UserError(
            "tasks that generate text are not among the paper's; load the folder with the "
            "harness's own `hf` model (import spiralformer.hf) to run them"
        )
