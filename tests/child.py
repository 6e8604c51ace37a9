"""The command line in a forked child: its own memory and time, and killed where a test says."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spiralformer.cli import main

PAGE = os.sysconf("SC_PAGE_SIZE")
# What CPython tells of a program that changes files, before it does.
CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}


@dataclass(frozen=True)
class Outcome:
    status: int  # a signal's number, negative, where one ended it
    out: str
    err: str
    seconds: float  # of the processor
    wall: float  # seconds of the clock
    memory: int  # bytes beyond what the parent had

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if ": error: " in line]


def run_command(
    arguments: list[str],
    folder: Path,
    *,
    seconds: float = 60,
    memory: int = 4 << 30,
    patience: float = 600,
    begin: Callable[[], object] = lambda: None,
    kill_after: float | None = None,
) -> Outcome:
    """`seconds` of the processor and `memory` bytes are the most that it may take; `patience` is
    for one that sleeps. `begin` is called in the child. After `kill_after` seconds it is killed."""
    logs = [folder.parent / f"{folder.name}.{name}" for name in ("out", "err")]
    for log in logs:
        log.touch()  # it may be killed before it opens them
    own = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    begun = time.monotonic()
    pid = os.fork()
    if not pid:
        _child(arguments, folder, logs, memory, begin)
    deadline = begun + (patience if kill_after is None else kill_after)
    while True:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline or _spent(pid) > seconds:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    out, err = (log.read_text(errors="replace") for log in logs)
    for log in logs:
        log.unlink()
    peak = used.ru_maxrss * 1024 - own
    code = os.waitstatus_to_exitcode(status)
    wall, spent = time.monotonic() - begun, used.ru_utime + used.ru_stime
    return Outcome(code, out, err, spent, wall, max(0, peak))


def _spent(pid: int) -> float:
    """Seconds of the processor so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _child(
    arguments: list[str],
    folder: Path,
    logs: list[Path],
    memory: int,
    begin: Callable[[], object],
) -> None:
    code = 70
    try:
        for number, log in enumerate(logs, 1):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
        os.chdir(folder)
        begin()
        code = main(arguments)
    except SystemExit as stop:  # argparse's own refusals
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def kill_at_change(number: int, below: Path) -> Callable[[], None]:
    """To be called in the child: it is killed before its change `number` to a file below a folder;
    0 only counts, and prints how many there were."""

    def begin() -> None:
        changes = 0

        def hook(event: str, details: tuple) -> None:
            nonlocal changes
            if event not in CHANGES or not isinstance(details[0], (str, bytes, os.PathLike)):
                return
            if event == "open" and not (details[2] or 0) & (os.O_WRONLY | os.O_RDWR):
                return
            if not os.path.abspath(os.fsdecode(details[0])).startswith(str(below)):
                return
            changes += 1
            if changes == number:
                os.kill(os.getpid(), signal.SIGKILL)
            if not number:
                os.write(1, b"change\n")

        sys.addaudithook(hook)

    return begin
