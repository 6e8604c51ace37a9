"""Generation: ragged batches of prompts, one token at a time, each row by itself.

A row's tokens depend on its prompt, the sampling settings and its seed only: never on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spiralformer.decode.algorithm import extend, step
from spiralformer.decode.runner import EAGER, Runner, RunnerName, runner_for
from spiralformer.decode.state import DecodeState
from spiralformer.errors import UserError
from spiralformer.model import SpiralFormer


class RequestError(UserError, ValueError):
    """A generation request that cannot be served."""


class NotFiniteError(RequestError):
    """The model computes no probabilities."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy; the defaults cut nothing off."""

    temperature: float = 1.0
    top_k: int = 0  # keep the k likeliest; 0 keeps all
    top_p: float = 1.0  # keep the likeliest until their probabilities sum to p
    min_p: float = 0.0  # keep what is at least min_p times as likely as the likeliest
    repetition_penalty: float = 1.0  # divides (or multiplies, if negative) logits of seen tokens
    seed: int = 0  # row b draws from the generator of seed + b

    def __post_init__(self) -> None:
        rules = {
            "temperature": (0 <= self.temperature < math.inf, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps all)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0"),
        }
        for name, (legal, rule) in rules.items():
            if not legal:
                raise RequestError(f"{name} {getattr(self, name)} must be {rule}")


GREEDY = Sampling(temperature=0)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution of one row's next token after temperature and the cuts, (V) → (V)."""
    logits = logits.double() / sampling.temperature
    if sampling.top_k and sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    p = logits.softmax(-1)
    if sampling.min_p:
        p = p.masked_fill(p < sampling.min_p * p.max(), 0)
    if sampling.top_p < 1:
        ordered, index = (p / p.sum()).sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of all likelier tokens
        p[index[before >= sampling.top_p]] = 0
    return p / p.sum()


def penalise(logits: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Makes the tokens seen so far less likely (Keskar et al., 2019)."""
    if penalty == 1 or not seen:
        return logits
    index = torch.tensor(sorted(set(seen)), device=logits.device)
    old = logits[index]
    return logits.index_copy(0, index, torch.where(old > 0, old / penalty, old * penalty))


def choose(logits: Tensor, seen: Sequence[int], sampling: Sampling, rng: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise NotFiniteError("the model's logits are not finite: there is nothing to choose from")
    logits = penalise(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits.cpu(), sampling), 1, generator=rng))


# ---------------------------------------------------------------------------- rows


Ending = Literal["end_of_text", "stop", "max_new_tokens", "max_length"]


def ending(
    longest: int,
    prompt_length: int,
    new: list[int],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
) -> Ending | None:
    """What ends a row with these new tokens, if anything does: a token of `stop_ids`, `stop` of the
    new tokens, their number, or that the model's longest sequence is full."""
    if new[-1] in stop_ids:
        return "end_of_text"
    if stop is not None and stop(new):
        return "stop"
    if len(new) >= max_new_tokens:
        return "max_new_tokens"
    read = prompt_length + len(new) - 1  # the newest token is not read yet
    return "max_length" if read >= longest else None


@dataclass(eq=False)
class Row:
    """A sequence to be continued: what was asked for, and what has come of it."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop_ids: Sequence[int] = ()
    stop: Callable[[list[int]], bool] | None = None
    new: list[int] = field(default_factory=list)
    ended: str = ""  # why: an `Ending`, or what another says who ends it

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.sampling.seed)

    def push(self, logits: Tensor, most: int) -> int:
        """Chooses its next token from the logits (V); `most` is the longest sequence."""
        text = [*self.prompt, *self.new]
        token = choose(logits, text, self.sampling, self.rng)
        self.new.append(token)
        limits = self.max_new_tokens, self.stop_ids, self.stop
        self.ended = ending(most, len(self.prompt), self.new, *limits) or ""
        return token


class Batch:
    """Rows that are continued together, and join and leave between tokens: `advance`, `join`,
    `choose`, and again. What a row gets never depends on the others."""

    def __init__(self, model: SpiralFormer, runner: Runner = EAGER) -> None:
        self.model, self.runner = model, runner
        self.rows: list[Row] = []
        self.state: DecodeState | None = None
        self.hidden: Tensor | None = None  # R D: the output at each row's last token

    def join(self, rows: Sequence[Row], state: DecodeState, hidden: Tensor) -> None:
        """Takes in rows whose prompts a state has read, with the outputs (R, D) at their ends."""
        if self.state is None or self.hidden is None:
            self.rows, self.state, self.hidden = list(rows), state, hidden
            return
        self.state.join(state)
        self.rows, self.hidden = [*self.rows, *rows], torch.cat((self.hidden, hidden))

    @torch.no_grad()
    def choose(self) -> Iterator[tuple[Row, int, Tensor]]:
        """The next token of each row, and the logits (V) that it was chosen from."""
        if self.hidden is not None:
            logits = self.runner.head(self.model, self.hidden)  # R V
            for row, each in zip(self.rows, logits, strict=True):
                if row.ended:  # by another, since the last token
                    continue
                yield row, row.push(each, self.model.config.max_length), each

    @torch.no_grad()
    def advance(self) -> None:
        """Lets go of the rows that have ended, and reads the newest token of each other."""
        going = [k for k, row in enumerate(self.rows) if not row.ended]
        if not going or self.state is None:
            self.rows, self.state, self.hidden = [], None, None
            return
        if len(going) < len(self.rows):
            self.state.reorder(going)
            self.rows = [self.rows[k] for k in going]
        newest = torch.tensor([row.new[-1] for row in self.rows], device=self.state.pre.device)
        self.hidden = step(self.model, self.state, newest, self.runner)


# ---------------------------------------------------------------------------- whole batches


@torch.no_grad()
def stream(
    model: SpiralFormer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_ids: Sequence[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
    runner: Runner | RunnerName = "auto",
) -> Iterator[tuple[int, int]]:
    """Yields (row, token) as the tokens are found.

    Rows end as `ending` says, each by itself; ended rows cost nothing more. `runner` is what runs
    the stacks (see `runner_for`).
    """
    check_prompts(model, prompts, max_new_tokens)
    rows = [
        Row(prompt, max_new_tokens, replace(sampling, seed=sampling.seed + b), stop_ids, stop)
        for b, prompt in enumerate(prompts)
    ]
    lengths = [len(prompt) for prompt in prompts]
    room = min(max(lengths) + max_new_tokens, model.config.max_length)
    runner = runner_for(model, runner, rows=len(rows), tokens=max_new_tokens, capacity=room)
    capacity = max(min(room, 2 * max(lengths) + 256), runner.capacity)
    state = DecodeState.empty(model, len(rows), capacity)
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    hidden = extend(model, state, ids.to(state.pre.device), lengths, last=True)[:, 0]  # B D
    batch, number = Batch(model, runner), {row: b for b, row in enumerate(rows)}
    batch.join(rows, state, hidden)
    while batch.rows:
        yield from ((number[row], token) for row, token, _ in batch.choose())
        batch.advance()


def generate(
    model: SpiralFormer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_ids: Sequence[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
    runner: Runner | RunnerName = "auto",
) -> list[list[int]]:
    """The new tokens of each prompt, as `stream` yields them."""
    new: list[list[int]] = [[] for _ in prompts]
    for row, token in stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        stop=stop,
        runner=runner,
    ):
        new[row].append(token)
    return new


def check_prompts(
    model: SpiralFormer, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    config = model.config
    if not prompts:
        raise RequestError("no prompt was given")
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens {max_new_tokens} must be at least 1")
    for b, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError(f"prompt {b} is empty; give at least one token")
        if len(prompt) > config.max_length:
            raise RequestError(
                f"prompt {b} has {len(prompt)} tokens, and the model's max_length is "
                f"{config.max_length}; shorten it"
            )
        wrong = next((token for token in prompt if not 0 <= token < config.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"prompt {b} has token {wrong}, outside 0…{config.vocab_size - 1}; "
                "was it made with another model's tokenizer?"
            )


class TextStream:
    """Turns a growing list of tokens into text that can be printed as it comes.

    Holds back what may still change: an unfinished UTF-8 character shows as U+FFFD, and a stop
    string may be under way.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self.decode, self.stops = decode, [s for s in stops if s]
        self.printed = 0

    def text(self, tokens: list[int]) -> str:
        """All the text, cut before the first stop string."""
        text = self.decode(tokens)
        ends = [at for s in self.stops if (at := text.find(s)) >= 0]
        return text[: min(ends)] if ends else text

    def stopped(self, tokens: list[int]) -> bool:
        text = self.decode(tokens)
        return any(s in text for s in self.stops)

    def push(self, tokens: list[int], *, final: bool = False) -> str:
        """What may be printed now and was not printed before."""
        text = self.text(tokens)
        if not final and not self.stopped(tokens):
            text = text.rstrip("�")
            held = max(
                (n for s in self.stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0
            )
            text = text[: len(text) - held]
        piece, self.printed = text[self.printed :], max(self.printed, len(text))
        return piece
