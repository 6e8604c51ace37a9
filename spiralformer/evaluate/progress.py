"""A line of progress with the time that is left, and silence for libraries that talk too much."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import TextIO


class Progress:
    """On a terminal a line that is redrawn; elsewhere a line now and then."""

    def __init__(self, label: str, total: int = 0, stream: TextIO | None = None) -> None:
        self.label, self.total, self.done = label, total, 0
        self.stream = stream or sys.stderr
        self.tty = self.stream.isatty()
        self.started = time.monotonic()
        self._shown = self.started if not self.tty else 0.0

    def tick(self, count: int = 1) -> None:
        self.done += count
        now = time.monotonic()
        if now - self._shown >= (0.2 if self.tty else 30.0):
            self._shown = now
            self._write(f"{self.label}  {self._fraction()}  {self._left(now)}")

    def close(self, summary: str | None = None) -> float:
        """Replaces the line by the summary; gives the seconds that passed."""
        seconds = time.monotonic() - self.started
        if self.tty:
            self.stream.write("\r\x1b[K")
        if summary is not None:
            self.stream.write(f"{self.label}  {summary}  ({clock(seconds)})\n")
        self.stream.flush()
        return seconds

    def _fraction(self) -> str:
        if not self.total:
            return f"{self.done:,}"
        return f"{self.done:,}/{self.total:,}  {100 * self.done / self.total:.0f} %"

    def _left(self, now: float) -> str:
        if not self.total or not self.done:
            return ""
        left = (now - self.started) / self.done * (self.total - self.done)
        return f"{clock(left)} left"

    def _write(self, line: str) -> None:
        self.stream.write(f"\r\x1b[K{line}" if self.tty else f"{line}\n")
        self.stream.flush()


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Truncations(logging.Handler):
    """Counts the harness's warnings that a prompt was cut to the model's longest sequence."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += str(record.msg).startswith("Combined length of context")


@contextlib.contextmanager
def quiet() -> Iterator[Truncations]:
    """Inside, nothing that a library prints or logs is seen. Errors are raised as ever."""
    counter = Truncations()
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    before = [(log.level, log.propagate, log.handlers) for log in loggers]
    for log in loggers:
        log.setLevel(logging.WARNING)
        log.propagate = False
        log.handlers = [counter]
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            yield counter
    finally:
        for log, (level, propagate, handlers) in zip(loggers, before, strict=True):
            log.level, log.propagate, log.handlers = level, propagate, handlers
            log.manager._clear_cache()  # type: ignore[attr-defined]
