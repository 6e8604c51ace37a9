"""One thread that continues every request's rows together, a token at a time.

Between two tokens, rows whose request has ended or gone leave the batch, and rows whose prompt has
been read join it. A long prompt is read in pieces, so that the others' tokens go on coming.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spiralformer.console import say
from spiralformer.decode import EAGER, Batch, DecodeState, Row, Runner, extend
from spiralformer.model import SpiralFormer

PIECE = 512  # tokens of prompts that are read between two steps of the batch

# Why a row ends, beside what `decode.generate.ending` knows
GONE, LATE, CLOSED, FAILED = "gone", "late", "closed", "failed"


class Busy(Exception):
    """No more requests are taken for the moment."""


class Score(NamedTuple):
    """The log-probability of a token, and of the likeliest ones."""

    value: float
    top: list[tuple[int, float]]


class Event(NamedTuple):
    """What has come of a row: a token, the scores of its prompt, its end, or several of these."""

    choice: int
    token: int | None = None
    score: Score | None = None
    prompt: list[Score | None] | None = None  # of each token; the first has none
    ended: str = ""


@dataclass(eq=False, kw_only=True)
class Job(Row):
    """A row of a request. `deliver` is called in the engine's thread."""

    index: int = 0  # of the answer in its request
    deliver: Callable[[Event], None]
    deadline: float  # by `time.monotonic`
    top: int | None = None  # scores are wanted, with so many of the likeliest tokens
    scored_prompt: bool = False  # of the prompt too

    def score(self, logits: Tensor, targets: Sequence[int]) -> list[Score]:
        """Of one token of each row of logits (M, V)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.log_softmax(-1)
        values = scores[range(len(targets)), list(targets)].tolist()
        best = scores.topk(min(self.top or 0, scores.shape[-1]))
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [
            Score(value, list(zip(*top, strict=True)))
            for value, top in zip(values, tops, strict=True)
        ]


def say_failure(error: BaseException) -> None:
    """Where it happened, and no more: its message might quote what a client has sent."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    say(f"failed: {type(error).__name__} at {where.filename}:{where.lineno}")


class Reading:
    """Prompts on their way into a state of their own."""

    def __init__(self, model: SpiralFormer, jobs: list[Job]) -> None:
        self.model, self.jobs = model, jobs
        self.lengths = [len(job.prompt) for job in jobs]
        prompts = [torch.tensor(job.prompt) for job in jobs]
        device = model.embedding.weight.device
        self.ids = pad_sequence(prompts, batch_first=True).to(device)  # B L
        new = max(min(job.max_new_tokens, 256) for job in jobs)
        self.state = DecodeState.empty(model, len(jobs), max(self.ids.shape[1] + new, 1))
        self.hidden = model.embedding.weight.new_zeros((len(jobs), model.config.hidden_size))
        self.scores: list[list[Score | None]] = [[None] for _ in jobs]
        self.at = 0

    @torch.no_grad()
    def advance(self) -> bool:
        """Reads one piece more. Returns whether that was the last."""
        width = max(PIECE // len(self.jobs), 1)
        ids = self.ids[:, self.at : self.at + width]
        new = [min(max(length - self.at, 0), width) for length in self.lengths]
        scored = any(job.scored_prompt for job in self.jobs)
        out = extend(self.model, self.state, ids, new, last=not scored)  # B M D, or B 1 D
        for b, (job, count) in enumerate(zip(self.jobs, new, strict=True)):
            if count:
                self.hidden[b] = out[b, count - 1 if scored else 0]
            targets = job.prompt[self.at + 1 : self.at + 1 + count]
            if job.scored_prompt and targets:
                logits = self.model.head(out[b, : len(targets)])
                self.scores[b] += job.score(logits, targets)
        self.at += width
        return self.at >= self.ids.shape[1]


class Engine:
    """Takes jobs from any thread; `close` ends it."""

    def __init__(
        self,
        model: SpiralFormer,
        runner: Runner = EAGER,
        *,
        max_rows: int = 32,
        max_waiting: int = 256,
    ) -> None:
        self.model, self.runner = model, runner
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.batch = Batch(model, runner)
        self.reading: Reading | None = None
        self.closing: float | None = None  # when the last row must be gone
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    # ------------------------------------------------------------------ from other threads

    def submit(self, jobs: Sequence[Job]) -> None:
        """All of them, or `Busy`."""
        with self.changed:
            if self.closing is not None:
                raise Busy("the server is shutting down")
            if len(self.waiting) + len(jobs) > self.max_waiting:
                raise Busy(f"{len(self.waiting)} requests are waiting already; try again later")
            self.waiting.extend(jobs)
            self.changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody wants them any more: their rows are free before the next token."""
        with self.changed:
            for job in jobs:
                job.ended = job.ended or GONE

    def close(self, grace: float = 0) -> None:
        """Takes no more requests. What waits is refused, what runs has so many seconds left."""
        with self.changed:
            self.closing = time.monotonic() + grace
            self.changed.notify()

    @property
    def rows(self) -> int:
        """In the batch, or about to join it."""
        return len(self.batch.rows) + (len(self.reading.jobs) if self.reading else 0)

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.rows or self.closing is not None)
                if not (self.waiting or self.rows):
                    return
                self._end_late()
                newcomers = [] if self.reading else self._admitted()
            try:
                if newcomers:
                    self.reading = Reading(self.model, newcomers)
                self._step()
            except Exception as error:  # a bug, or no memory: those rows end, the server goes on
                say_failure(error)
                for job in self._running():
                    self._end(job, FAILED)
                self.batch, self.reading = Batch(self.model, self.runner), None

    def _step(self) -> None:
        self.batch.advance()
        reading = self.reading
        if reading and all(job.ended for job in reading.jobs):
            self.reading = None
        elif reading and reading.advance():
            self.batch.join(reading.jobs, reading.state, reading.hidden)
            self.reading = None
            for job, scores in zip(reading.jobs, reading.scores, strict=True):
                if not job.max_new_tokens:
                    job.ended = job.ended or "max_new_tokens"
                if job.scored_prompt or job.ended:
                    prompt = scores if job.scored_prompt else None
                    job.deliver(Event(job.index, prompt=prompt, ended=job.ended))
        for row, token, logits in self.batch.choose():
            assert isinstance(row, Job)
            score = None if row.top is None else row.score(logits[None], [token])[0]
            row.deliver(Event(row.index, token, score, ended=row.ended))

    def _admitted(self) -> list[Job]:
        """The next that are read together: as many as there is room for, if they are short."""
        chosen: list[Job] = []
        while self.waiting and len(self.batch.rows) + len(chosen) < self.max_rows:
            longest = max(len(job.prompt) for job in (*chosen, self.waiting[0]))
            if chosen and longest * (len(chosen) + 1) > 4 * PIECE:
                break
            chosen.append(self.waiting.popleft())
        return chosen

    def _end_late(self) -> None:
        now = time.monotonic()
        closed = self.closing is not None and now > self.closing
        for job in self._running():
            if closed or now > job.deadline:
                self._end(job, CLOSED if closed else LATE)
        for job in self.waiting:
            if self.closing is not None or now > job.deadline:
                self._end(job, LATE if self.closing is None else CLOSED)
        self.waiting = deque(job for job in self.waiting if not job.ended)

    def _running(self) -> Iterator[Job]:
        for row in (*self.batch.rows, *(self.reading.jobs if self.reading else ())):
            assert isinstance(row, Job)
            yield row

    def _end(self, job: Job, why: str) -> None:
        if not job.ended:
            job.ended = why
            job.deliver(Event(job.index, ended=why))
