"""What is shown on a terminal: lines, bars, tables, durations. Nothing here is needed to compute.

Messages and progress go to stderr, results to stdout. On a terminal progress is a bar; elsewhere it
is a line every ten seconds. Colours are rich's: none where output is piped or NO_COLOR is set.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

PAUSE = 10.0  # seconds between two lines of progress where there is no terminal


def width() -> int:
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80


class OutputError(Exception):
    """Results cannot be written to stdout."""


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Inside, stderr can be closed, full or gone: nothing fails for want of a reader of messages.
    Where stdout is full, that is an OutputError; a reader who has gone is a BrokenPipeError.

    Where the caller closed a stream, its number is taken, so that no file of ours gets it and is
    then written to by whoever prints."""
    before = sys.stdin, sys.stdout, sys.stderr
    for name, stream in zip(("stdin", "stdout", "stderr"), before, strict=True):
        if stream is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.stdout = _Stream(sys.stdout, results=True)  # type: ignore[assignment]
    sys.stderr = _Stream(sys.stderr, results=False)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


class _Stream:
    def __init__(self, stream: TextIO, results: bool) -> None:
        self.stream, self.results = stream, results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, act: Callable[..., object], *arguments: str) -> None:
        try:
            act(*arguments)
        except BrokenPipeError:
            if self.results:
                raise
        except (OSError, ValueError) as error:  # ValueError: it was closed
            if self.results:
                raise OutputError(getattr(error, "strerror", None) or error) from None


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """What is printed inside may be lost."""
    try:
        yield
        sys.stdout.flush()
    except (OutputError, BrokenPipeError):
        forget_stdout()


def forget_stdout() -> None:
    """It cannot be written to; nobody shall try again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """A message, beside the results."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """How far a piece of work is.

    with Progress("reading", total=len(files), unit="files") as progress:
        for file in files:
            ...
            progress.advance(note=file.name)

    `total` None means that nobody knows; `shown=False` keeps quiet. A total may be set later.
    """

    def __init__(
        self, label: str, total: float | None = None, unit: str = "", *, shown: bool = True
    ) -> None:
        self.label, self.total, self.unit, self.shown = label, total, unit, shown
        self.done, self.note, self.begun = 0.0, "", 0.0
        self.live = shown and sys.stderr.isatty()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        self.started = self._said = time.monotonic()
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(None),
                TextColumn("{task.fields[at]}"),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self.label, total=self.total, at="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, total: float | None, done: float = 0) -> None:
        """Counting begins here, with `done` of it done at another time."""
        self.total, self.done, self.begun = total, done, done
        self.started = time.monotonic()

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        self.update(self.done + amount, note)

    def update(self, done: float, note: str | None = None) -> None:
        """`done` of the total; `note` (a loss, a name) stays until the next."""
        self.done, self.note = done, self.note if note is None else note
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self.total, at=self.describe(now))
        elif self.shown and now - self._said >= PAUSE:
            self._said = now
            say(f"{self.label}  {self.describe(now)}")

    def say(self, text: str) -> None:
        """A line that stays, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self.shown:
            say(text)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def describe(self, now: float) -> str:
        parts = [f"{self.done:,.0f}" + (f"/{self.total:,.0f}" if self.total else "")]
        parts[0] += f" {self.unit}" if self.unit else ""
        if self.note:
            parts.append(self.note)
        if self.total and self.done > self.begun:
            pace = (now - self.started) / (self.done - self.begun)
            left = pace * max(self.total - self.done, 0)
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, title: str = ""
) -> str:
    """Columns aligned, the first `left` ones to the left; an empty row is a thin line. Cells of a
    table that is wider than the terminal are folded."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    built = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for k, name in enumerate(header):
        built.add_column(name, justify="left" if k < left else "right", overflow="fold")
    for row in rows:
        if row:
            built.add_row(*row)
        else:
            built.add_section()
    out = io.StringIO()
    Console(
        file=out, width=max(width(), 80), markup=False, highlight=False, color_system=None
    ).print(built)
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines()) + "\n"


class Bold(str):
    """A cell of a Markdown table that is set off."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """The same for a document; what would be markup in a cell is escaped."""
    show = lambda cell: f"**{escape(cell)}**" if isinstance(cell, Bold) else escape(cell)
    escaped = [[show(cell) for cell in row] for row in (header, *(row for row in rows if row))]
    rule = ["---" if k < left else "---:" for k in range(len(header))]
    lines = [escaped[0], rule, *escaped[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def escape(text: str) -> str:
    """A name or a text of others as Markdown that shows it: no link, picture, code or HTML."""
    text = " ".join(text.splitlines()).replace("&", "&amp;").replace("<", "&lt;")
    text = re.sub(r"([\\`*\[\]|~])", r"\\\1", text.replace(">", "&gt;"))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\_", text)  # inside a word it means nothing


def duration(seconds: float) -> str:
    """1:02:03, or 2:03"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def si(value: float) -> str:
    """1.2 G, to be followed by a unit"""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.1f} {letter}"
    return f"{value:.1f} "


def count(number: int, noun: str, plural: str = "") -> str:
    """1 token, 2 tokens"""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def cpu_name() -> str:
    """As the system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())
