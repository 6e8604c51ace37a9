"""Runs carried out, each at most once.

    CACHE/data/…            token shards of the embedded corpus
    CACHE/KEY/              the trainer's folder of a run (metrics.jsonl, result.json, …)
    CACHE/KEY.json          the record: written last, the run is finished
    CACHE/KEY.failed.json   why the last attempt failed
    CACHE/KEY.lock          held by the process that is at it

KEY is a hash of all that decides the result and knows nothing of studies, so studies share runs.
What a run may cost in disk while it trains (checkpoints) is removed when it is finished."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from spiralformer.accounting import training_flops_per_token
from spiralformer.console import duration
from spiralformer.data.windows import open_split
from spiralformer.errors import UserError
from spiralformer.files import write_json, writing
from spiralformer.model_folder import read_json
from spiralformer.train.config import TrainConfig
from spiralformer.train.log import read_metrics
from spiralformer.train.run import RunFolder

GUESSED_RATE = 35e9  # FLOP/s of a core, before anything is measured
MARKS = 1024  # steps over which the order of the data is recorded
FORKS = multiprocessing.get_context("forkserver")
BUSY = 75  # exit code: another process is at this run

Record = dict[str, Any]


class Console:
    """Lines to stderr. On a terminal the last one is rewritten; elsewhere progress is a new line
    every ten seconds."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.live = not quiet and sys.stderr.isatty()
        self.interval = 0.1 if self.live else 10.0
        self.shown_at = -math.inf
        self.open = False  # whether a line is being rewritten

    def progress(self, text: str, *, always: bool = False) -> None:
        now = time.monotonic()
        if self.quiet or (now - self.shown_at < self.interval and not always):
            return
        self.shown_at = now
        if self.live:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print(f"\r{text[: width - 1]}\x1b[K", end="", file=sys.stderr, flush=True)
            self.open = True
        else:
            print(text, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        if self.quiet:
            return
        self.close()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.open = False


@dataclass(frozen=True)
class Run:
    """A training run and what it is called in progress lines."""

    label: str
    config: TrainConfig
    data: str  # identity of the training and validation tokens
    keep_model: bool = field(default=False, compare=False)

    @cached_property
    def key(self) -> str:
        """Of everything that decides the result."""
        deciding = {
            **self.config.deciding(),
            "data": self.data,
            "valid.tokens": self.config.valid.tokens,
            "micro_batch": self.config.micro_batch,
        }
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:20]

    @cached_property
    def flops(self) -> float:
        """Training, and validation at the end."""
        config = self.config
        tokens = config.steps * config.batch * config.length + config.valid.tokens / 3
        return tokens * training_flops_per_token(config.model, config.length)


def data_identity(path: str | Path) -> str:
    return " ".join(open_split(path, split).identity for split in ("train", "valid"))


# ---------------------------------------------------------------------------- one run


def carry_out(cache: Path, run: Run) -> Record:
    """Trains to the end, from a checkpoint if there is one; the record is the last thing written.
    In the process that calls it."""
    from spiralformer.train import train

    folder = RunFolder(cache / run.key)
    config = run.config.override({"out": str(folder.path)})
    failed = cache / f"{run.key}.failed.json"
    try:
        result = train(config, quiet=True)
        record = {
            **{k: v for k, v in result.record.items() if k not in ("samples", "config")},
            "order": data_order(config),
            "config": config.to_dict(),
        }
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        write_json(failed, {"reason": reason, "trace": traceback.format_exc()})
        raise
    write_json(cache / f"{run.key}.json", record)
    failed.unlink(missing_ok=True)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    if not run.keep_model:
        shutil.rmtree(folder.model, ignore_errors=True)
    return record


def data_order(config: TrainConfig) -> dict[str, str]:
    """Digests of the windows trained on: of all those up to steps 1, 2, 4, …, and of the last
    step's. Two runs whose common entries agree saw the same data in the same order."""
    from spiralformer.train.run import Corpus

    data, marks, seen = Corpus.open(config).train, {}, hashlib.sha256()
    for step in range(min(config.steps, MARKS)):
        seen.update(_windows(data, config, step))
        if (step + 1) & step == 0:
            marks[f"to {step + 1}"] = seen.hexdigest()[:12]
    last = hashlib.sha256(_windows(data, config, config.steps - 1)).hexdigest()[:12]
    return {**marks, f"in {config.steps}": last}


def _windows(data: Any, config: TrainConfig, step: int) -> bytes:
    samples = range(step * config.batch, (step + 1) * config.batch)
    return json.dumps([data.window_of(sample) for sample in samples]).encode()


@contextmanager
def claimed(cache: Path, run: Run) -> Iterator[bool]:
    """Whether this process may carry out the run: one at a time, over all studies. The system lets
    go when the process ends."""
    with open(cache / f"{run.key}.lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def _child(cache: Path, run: Run, threads: int) -> None:
    """A run in a process of its own, with a core of its own. Ctrl-C reaches the parent alone, which
    then asks for an end in good order."""
    import torch

    from spiralformer.train import Interrupted

    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with claimed(cache, run) as mine:
        if not mine:
            os._exit(BUSY)
        if (cache / f"{run.key}.json").exists():
            return
        try:
            carry_out(cache, run)
        except Interrupted as stop:
            os._exit(128 + stop.signal)
        except Exception:
            os._exit(1)  # the reason is recorded


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # the trainer saves first


# ---------------------------------------------------------------------------- many runs


@dataclass
class Lab:
    """Carries out runs, several side by side, and knows what is finished.

    jobs: processes side by side; 0 trains in this one."""

    cache: Path
    jobs: int = 1
    console: Console = field(default_factory=lambda: Console(quiet=False))
    execute: Callable[[Path, Run], Record] = carry_out  # where jobs is 0
    later: float = 0.0  # FLOPs of runs that will be asked for after these

    def __post_init__(self) -> None:
        with writing(self.cache):
            self.cache.mkdir(parents=True, exist_ok=True)
        self.measured: list[tuple[float, float]] = []  # FLOPs and seconds of runs finished here

    def result(self, run: Run) -> Record | None:
        path = self.cache / f"{run.key}.json"
        return read_json(path) if path.exists() else None

    def failure(self, run: Run) -> str | None:
        """Why the last attempt failed; None for a run that is finished or was never tried."""
        path = self.cache / f"{run.key}.failed.json"
        if self.result(run) is not None or not path.exists():
            return None
        return read_json(path)["reason"]

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        unique = {run.key: run for run in runs}
        return [run for run in unique.values() if self.result(run) is None]

    def model(self, run: Run) -> Path | None:
        folder = RunFolder(self.cache / run.key).model
        return folder if folder.is_dir() else None

    # ------------------------------------------------------------------ carrying out

    def run(self, runs: Sequence[Run]) -> None:
        """All that are not finished. One that fails is recorded, and the others go on."""
        due = self.missing(runs)
        count = len({run.key for run in runs})
        if due:
            self._here(due, count) if self.jobs == 0 else self._beside(due, count)

    def _here(self, due: list[Run], count: int) -> None:
        for run in due:
            with claimed(self.cache, run) as mine:
                started = time.monotonic()
                if mine and self.result(run) is None:
                    try:
                        self.execute(self.cache, run)
                    except Exception as error:
                        self.console.say(f"{run.label}: failed: {error}")
                        continue
                self._said(run, time.monotonic() - started, due, count)

    def _beside(self, due: list[Run], count: int) -> None:
        FORKS.set_forkserver_preload(["spiralformer.train.loop"])
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        waiting = deque(due)
        active: list[tuple[BaseProcess, Run, float]] = []
        not_before: dict[str, float] = {}  # a run that another process is at is looked at again
        try:
            while waiting or active:
                for _ in range(len(waiting)):
                    run, now = waiting.popleft(), time.monotonic()
                    if self.result(run) is not None:
                        continue
                    if len(active) >= self.jobs or not_before.get(run.key, 0) > now:
                        waiting.append(run)
                        continue
                    child = FORKS.Process(target=_child, args=(self.cache, run, threads))
                    child.start()
                    active.append((child, run, now))
                if active:
                    multiprocessing.connection.wait([p.sentinel for p, _, _ in active], timeout=1)
                elif waiting:
                    time.sleep(0.2)
                ended = [entry for entry in active if not entry[0].is_alive()]
                active = [entry for entry in active if entry not in ended]
                for process, run, started in ended:
                    if process.exitcode == BUSY:
                        not_before[run.key] = time.monotonic() + 5
                        waiting.append(run)
                    else:
                        self._ended(run, process.exitcode or 0, started, due, count)
                self._progress(active, waiting)
        except BaseException:
            self._stop([process for process, _, _ in active])
            raise

    def _ended(self, run: Run, code: int, started: float, due: list[Run], count: int) -> None:
        if self.result(run) is None:
            reason = self.failure(run) if code > 0 else None
            if reason is None:
                reason = f"its process ended with {f'signal {-code}' if code < 0 else code}"
                write_json(self.cache / f"{run.key}.failed.json", {"reason": reason, "trace": ""})
            self.console.say(f"{run.label}: failed: {reason}")
            return
        self._said(run, time.monotonic() - started, due, count)

    def _stop(self, processes: list[BaseProcess]) -> None:
        """Each finishes its step and saves; whoever asks again waits for no one."""
        self.console.say("stopping: the runs finish their steps and save")
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()

    # ------------------------------------------------------------------ telling

    def rate(self) -> tuple[float, bool]:
        """FLOP/s of one run, and whether that was measured."""
        seconds = sum(seconds for _, seconds in self.measured)
        if seconds:
            return sum(flops for flops, _ in self.measured) / seconds, True
        return GUESSED_RATE, False

    def left(self, flops: float) -> str:
        rate, measured = self.rate()
        time_left = duration((flops + self.later) / rate / max(1, self.jobs))
        return f"{time_left} left" if measured else f"about {time_left} left (guessed)"

    def _said(self, run: Run, seconds: float, due: list[Run], count: int) -> None:
        record = self.result(run)
        if record is None:
            return
        self.measured.append((run.flops, seconds))
        missing = self.missing(due)
        loss = record["valid"]["loss"]
        self.console.say(
            f"[{count - len(missing)}/{count}] {run.label}: validation loss {loss:.4f} in "
            f"{duration(seconds)}; {self.left(sum(other.flops for other in missing))}"
        )

    def _progress(
        self, active: list[tuple[BaseProcess, Run, float]], waiting: Iterable[Run]
    ) -> None:
        flops, lines = sum(run.flops for run in waiting), []
        if time.monotonic() - self.console.shown_at < self.console.interval:
            return
        for _, run, _ in active:
            records = read_metrics(RunFolder(self.cache / run.key).metrics)
            trained = [record for record in records if record["kind"] == "train"]
            step = trained[-1]["step"] if trained else 0
            flops += run.flops * (1 - step / run.config.steps)
            loss = trained[-1]["loss"] if trained else None
            lines.append(
                f"{run.label} {step}/{run.config.steps}" + (f" loss {loss:.3f}" if loss else "")
            )
        if lines:
            self.console.progress(f"{' | '.join(lines)} | {self.left(flops)}")
