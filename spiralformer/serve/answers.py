"""What the server answers: tokens and scores as OpenAI's objects, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from spiralformer.accounting import passes_at
from spiralformer.config import SpiralConfig
from spiralformer.data.tokenizer import TextTokenizer
from spiralformer.decode.generate import TextStream
from spiralformer.serve.engine import Event, Job, Score
from spiralformer.serve.schema import ChatRequest, CompletionRequest

Scored = tuple[int, Score | None]
FINISH = {  # OpenAI's words for what ends a row
    "end_of_text": "stop",
    "stop": "stop",
    "max_new_tokens": "length",
    "max_length": "length",
}


class Choice:
    """One answer, as it grows: `push` takes what the engine delivers and gives what can be sent."""

    def __init__(
        self,
        job: Job,
        request: CompletionRequest | ChatRequest,
        tokenizer: TextTokenizer,
        config: SpiralConfig,
    ) -> None:
        self.job, self.request, self.tokenizer, self.config = job, request, tokenizer, config
        self.is_chat = isinstance(request, ChatRequest)
        self.echoed = isinstance(request, CompletionRequest) and bool(request.echo)
        self.text = TextStream(tokenizer.decode, request.stops)
        self.tokens: list[int] = []  # of the text
        self.count = 0  # tokens chosen, an end-of-text included
        self.offset = 0  # characters before the next token, for `text_offset`
        self.unfinished: list[int] = []  # tokens of a character that is not complete
        self.begun = False
        self.scored: list[Scored] = []  # not sent yet
        self.ran: list[Sequence[int]] = []  # loop iterations, not sent yet

    def push(self, event: Event) -> dict[str, Any] | None:
        """A choice of a chunk, if there is something to be sent."""
        piece = ""
        if not self.begun:
            if self.echoed:
                piece = self.tokenizer.decode(self.job.prompt)
                if event.prompt:
                    self.scored += zip(self.job.prompt, event.prompt, strict=True)
            self.begun = True
        if event.token is not None:
            self.count += 1
            self.ran.append(passes_at(self.config, len(self.job.prompt) + self.count - 2))
            if event.token not in self.job.stop_ids:
                self.tokens.append(event.token)
            if event.score:
                self.scored.append((event.token, event.score))
        piece += self.text.push(self.tokens, final=bool(event.ended))
        if not (piece or event.ended):
            return None
        choice: dict[str, Any] = {"index": self.job.index}
        if self.is_chat:
            choice["delta"] = {"content": piece}
        else:
            choice["text"] = piece
        choice["logprobs"] = self._logprobs()
        choice["finish_reason"] = FINISH.get(event.ended)
        if self.request.iterations:
            choice["iterations"], self.ran = self.ran, []
        return choice

    def _logprobs(self) -> dict[str, Any] | None:
        if self.job.top is None:
            return None
        scored, self.scored = self.scored, []
        return self._chat_logprobs(scored) if self.is_chat else self._completion_logprobs(scored)

    def _chat_logprobs(self, scored: list[Scored]) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text = self._name(token)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        return {
            "content": [
                {**entry(token, score.value), "top_logprobs": [entry(*top) for top in score.top]}
                for token, score in scored
                if score
            ]
        }

    def _completion_logprobs(self, scored: list[Scored]) -> dict[str, Any]:
        logprobs: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, score in scored:
            logprobs["tokens"].append(self._name(token))
            logprobs["token_logprobs"].append(score and score.value)
            # Tokens that are not whole characters share a name: the likeliest has it.
            top = {
                self._name(other): value for other, value in reversed(score.top if score else [])
            }
            logprobs["top_logprobs"].append(top if score else None)
            logprobs["text_offset"].append(self.offset)
            self.unfinished.append(token)
            text = self.tokenizer.decode(self.unfinished)
            if not text.endswith("�"):
                self.offset, self.unfinished = self.offset + len(text), []
        return logprobs

    def _name(self, token: int) -> str:
        return self.tokenizer.decode([token]) or self.tokenizer.backend.id_to_token(token) or ""


class Answer:
    """All choices of a request, with what stands around them."""

    def __init__(self, name: str, choices: list[Choice]) -> None:
        self.name, self.choices = name, choices
        self.is_chat = choices[0].is_chat
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def object(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.name,
            "choices": choices,
        }

    def whole(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        """One object from all that could have been sent in pieces."""
        choices: list[dict[str, Any]] = []
        for choice in self.choices:
            own = [piece for piece in pieces if piece["index"] == choice.job.index]
            merged = dict(own[-1])
            if self.is_chat:
                del merged["delta"]
                text = "".join(piece["delta"]["content"] for piece in own)
                merged["message"] = {"role": "assistant", "content": text}
            else:
                merged["text"] = "".join(piece["text"] for piece in own)
            if merged["logprobs"] is not None:
                merged["logprobs"] = {
                    key: [entry for piece in own for entry in piece["logprobs"][key]]
                    for key in merged["logprobs"]
                }
            if "iterations" in merged:
                merged["iterations"] = [ran for piece in own for ran in piece["iterations"]]
            choices.append(merged)
        return {**self.object(choices, chunk=False), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """A prompt counts once, however many answers it gets."""
        prompts = {id(choice.job.prompt): len(choice.job.prompt) for choice in self.choices}
        asked, answered = sum(prompts.values()), sum(choice.count for choice in self.choices)
        return {
            "prompt_tokens": asked,
            "completion_tokens": answered,
            "total_tokens": asked + answered,
        }
