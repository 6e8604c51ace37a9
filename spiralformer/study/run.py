"""The runs of a study: calls of `train`, which is locked, resumable and idempotent by itself.

    CACHE/data/CORPUS    token shards
    CACHE/CORPUS/RUN     the folder of a run, named after what the study chose for it

Studies share a cache: a run that another study has finished is read, not made again."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from spiralformer.accounting import training_flops_per_token
from spiralformer.config import SpiralConfig
from spiralformer.console import Progress, count, cpu_name, duration, say
from spiralformer.errors import UserError
from spiralformer.study import spec
from spiralformer.study.corpus import Corpus, tokens_are_bytes
from spiralformer.study.records import Records, RowRecord, RunRecord, SweepRecord, check_matched
from spiralformer.study.spec import Row, Study
from spiralformer.train import TrainConfig, read_metrics, read_result

FORKS = multiprocessing.get_context("forkserver")
STARTUP = 3.0  # seconds of a run that are not training: its process, its model, its files
GUESSED_RATE = 120e9  # FLOP/s of a machine, for a model that is too large to try
POINTS = 8  # validations of a run

say_once = functools.cache(say)


# ---------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Run:
    """What is given to `train`, and what it is called in progress lines."""

    label: str
    config: TrainConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.out)

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def flops(self) -> float:
        """Training, and validations, each a third of it for a token."""
        config = self.config
        checks = math.ceil(config.steps / config.valid.every)
        tokens = config.steps * config.batch * config.length + checks * config.valid.tokens / 3
        return tokens * training_flops_per_token(config.model, config.length)

    def carry_out(self) -> dict[str, Any]:
        """The contents of result.json, trained for where it is not there, by us or by another
        study."""
        from spiralformer.train import train

        return train(self.config, quiet=True, wait=True).record

    @property
    def loss(self) -> float:
        """Of validation, in nats, of a finished run."""
        return self.carry_out()["valid"]["loss"]

    def record(self) -> RunRecord:
        """Of a finished run; a UserError where it cannot be used."""
        result, metrics = self.carry_out(), read_metrics(self.folder / "metrics.jsonl", say_once)
        if result["valid"]["loss"] is None:
            raise UserError(f"{self.folder}/result.json: the validation loss is not finite")
        record = RunRecord.of(result, metrics)
        if record.bits_per_byte is None and tokens_are_bytes(self.config.data.path):
            return record.model_copy(update={"bits_per_byte": record.loss / math.log(2)})
        return record

    def last_line(self) -> dict[str, Any] | None:
        lines = read_metrics(self.folder / "metrics.jsonl")
        return next((line for line in reversed(lines) if line["kind"] == "train"), None)


# ---------------------------------------------------------------------------- many runs


def unusable(run: Run) -> str:
    """Why what a finished run left cannot be used, if it cannot."""
    try:
        run.record()
    except UserError as error:
        return str(error)
    return ""


class Child:
    """A run in a process of its own."""

    def __init__(self, run: Run, threads: int) -> None:
        self.run = run
        self.reasons, told = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(target=_carry_out, args=(run, threads, told))
        self.process.start()
        told.close()

    def failure(self) -> str:
        """Why it ended without a result; "" where there is one."""
        with self.reasons:
            if self.run.finished:
                return unusable(self.run)
            try:
                return " ".join(self.reasons.recv().split())
            except EOFError:  # it did not live to tell
                return f"its process ended with code {self.process.exitcode}"


def _carry_out(run: Run, threads: int, reasons: Connection) -> None:
    """In the child. Ctrl-C reaches the parent alone, which then asks for an end in good order."""
    import torch

    from spiralformer.train import Interrupted

    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        run.carry_out()
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # of no use any more
    except Interrupted as stop:
        sys.exit(128 + stop.signal)
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        reasons.send(f"{kind}{error}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # the trainer saves first


@dataclass
class RunPool:
    """Carries out runs, `jobs` side by side, each in a process and with its share of the cores."""

    jobs: int = 1
    quiet: bool = False
    failures: dict[Path, str] = field(default_factory=dict)  # by folder

    def run(
        self, runs: Sequence[Run], label: str, after: Callable[[], object] = lambda: None
    ) -> None:
        """All that are not finished; `after` each. One that fails is noted, and others go on."""
        due = list({run.folder: run for run in runs if not run.finished}.values())
        if not due:
            return
        total, over = sum(run.flops for run in due) / 1e12, list[Run]()
        with Progress(label, total, "TFLOP", shown=not self.quiet) as progress:
            for ended, active in self._carried_out(due):
                if ended is not None:
                    over.append(ended)
                    failed = self.failures.get(ended.folder)
                    outcome = f"failed: {failed}" if failed else f"loss {ended.loss:.4f}"
                    progress.say(f"{ended.label}: {outcome}")
                    after()
                done = sum(run.flops for run in over)
                notes = [f"{len(over)}/{count(len(due), 'run')}"]
                for run in active:
                    if line := run.last_line():
                        done += run.flops * line["step"] / run.config.steps
                        notes.append(f"{run.label} {line['loss'] or math.nan:.3f}")
                progress.update(done / 1e12, "  ".join(notes))

    def _carried_out(self, due: Sequence[Run]) -> Iterator[tuple[Run | None, list[Run]]]:
        """The run that has come to an end, or None every second, and those that are under way."""
        FORKS.set_forkserver_preload(["spiralformer.train.loop"])
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        waiting, active = deque(due), list[Child]()
        try:
            while waiting or active:
                while waiting and len(active) < self.jobs:
                    active.append(Child(waiting.popleft(), threads))
                wait([child.process.sentinel for child in active], timeout=1)
                ended = next((child for child in active if not child.process.is_alive()), None)
                if ended is not None:
                    active.remove(ended)
                    self.failures.pop(ended.run.folder, None)
                    if failure := ended.failure():
                        self.failures[ended.run.folder] = failure
                yield ended.run if ended else None, [child.run for child in active]
        finally:
            if active:
                say("stopping: the runs finish their steps and save")
            for child in active:
                child.process.terminate()
            for child in active:
                child.process.join()


# ---------------------------------------------------------------------------- a study's runs


@dataclass
class StudyRuns:
    """Rows and sweeps as runs on one corpus."""

    study: Study
    corpus: Corpus
    cache: Path
    pool: RunPool
    command: str = ""  # that starts it

    def run(self, name: str, model: SpiralConfig, steps: int, lr: float, seed: int) -> Run:
        scale, every = self.study.scale, max(1, steps // POINTS)
        lr = float(f"{lr:.4g}")
        title = f"{name}-d{model.hidden_size}-{steps}x{scale.batch}x{scale.length}"
        folder = f"{quote(title, safe=',+')}-lr{lr:g}-seed{seed}"
        config = TrainConfig.from_dict(
            {
                "model": model.to_dict(),
                "data": {"path": self.corpus.train, "valid": self.corpus.valid},
                "out": str(self.cache / self.corpus.name / folder),
                "length": scale.length,
                "batch": scale.batch,
                "steps": steps,
                "seed": seed,
                "precision": scale.precision,
                "optim": {"lr": lr, "warmup": scale.warmup},
                "valid": {"every": every, "tokens": scale.valid_tokens},
                "save": {"every": 0, "minutes": 2, "keep": 1},
                "sample": {"tokens": 0},
                "log": {"every": max(1, every // 5), "tensorboard": False},
            }
        )
        return Run(f"{name}, lr {lr:g}, seed {seed}", config)

    def sweep_run(self, family: str, lr: float) -> Run:
        scale = self.study.scale
        steps = max(1, round(scale.tokens * scale.sweep / (scale.batch * scale.length)))
        return self.run(family, spec.family_config(family, scale), steps, lr, seed=0)

    def row_run(self, row: Row, lr: float, seed: int) -> Run:
        """A rate was found at the scale's width; a wider model takes a lower one."""
        factor = self.study.scale.hidden_size / row.model.hidden_size
        return self.run(row.name, row.model, row.steps, lr * factor, seed)

    def finished(self, run: Run) -> bool:
        """With a result that can be used; one that cannot is said, and counts as failed."""
        if run.finished and run.folder not in self.pool.failures and (why := unusable(run)):
            say(f"{run.label}: {why}")
            self.pool.failures[run.folder] = why
        return run.finished and run.folder not in self.pool.failures

    # ------------------------------------------------------------------ sweeps

    def next_rates(self, sweep: SweepRecord) -> list[float]:
        """The study's rates; then, while the best lies at an edge, one beyond it."""
        first, tried = self.study.rates, [lr for lr, _ in sweep.tried]
        if missing := [lr for lr in first if lr not in tried]:
            return missing
        more = len(tried) - len(first) < self.study.file.sweep.extensions
        if sweep.chosen is None or sweep.bracketed or not more:
            return []
        return [2 * sweep.chosen if sweep.chosen == max(tried) else sweep.chosen / 2]

    def swept(self, family: str) -> SweepRecord:
        """The sweep as far as it has come."""
        sweep, losses = SweepRecord(tried=[]), dict[float, float | None]()
        while rates := self.next_rates(sweep):
            for lr in rates:
                run = self.sweep_run(family, lr)
                usable = self.finished(run)
                if usable or run.folder in self.pool.failures:
                    losses[lr] = run.loss if usable else None
            sweep = SweepRecord(tried=sorted(losses.items()))
            if not losses.keys() >= set(rates):
                break
        return sweep

    def sweeps(self) -> dict[str, SweepRecord]:
        return {family: self.swept(family) for family in self.study.families}

    # ------------------------------------------------------------------ rows

    def rows(self, sweeps: Mapping[str, SweepRecord]) -> Iterator[tuple[Row, Run]]:
        """Seed by seed, so that an unfinished study has whole ones."""
        for seed in range(self.study.seeds):
            for row in self.study.rows:
                if (lr := sweeps[row.family].chosen) is not None:
                    yield row, self.row_run(row, lr, seed)

    def conduct(self, after: Callable[[], object] = lambda: None) -> None:
        """Carries out what is missing; `after` is called each time that a row has one run more."""
        for _ in range(1 + self.study.file.sweep.extensions):
            rates = {family: self.next_rates(sweep) for family, sweep in self.sweeps().items()}
            runs = [self.sweep_run(family, lr) for family in rates for lr in rates[family]]
            self.pool.run(runs, "sweeps")
        self.pool.run([run for _, run in self.rows(self.sweeps())], self.study.name, after)

    def records(self) -> Records:
        """Of what is finished."""
        study, sweeps = self.study, self.sweeps()
        runs: dict[str, list[RunRecord]] = {row.id: [] for row in study.rows}
        failures: dict[str, dict[int, str]] = {row.id: {} for row in study.rows}
        for row, run in self.rows(sweeps):
            if self.finished(run):
                runs[row.id].append(run.record())
            elif reason := self.pool.failures.get(run.folder):
                failures[row.id][run.config.seed] = reason
        made = Records(
            study=study.name,
            title=study.file.title,
            about=study.file.about.strip(),
            setting=self.setting(),
            machine=machine(),
            command=self.command,
            figure=study.file.figure,
            match=study.file.match,
            reference=study.file.reference or study.file.rows[0].called,
            seeds=study.seeds,
            rows=[
                RowRecord.of(row, study.scale.length, runs[row.id], failures[row.id])
                for row in study.rows
            ],
            sweeps=sweeps,
            claims=study.claims,
        )
        check_matched(made)
        return made

    def setting(self) -> str:
        study, scale = self.study, self.study.scale
        matched = "tokens" if study.file.match == "tokens" else "training FLOPs"
        what = "bytes" if scale.vocab_size == spec.BYTES else "tokens"
        return (
            f"Scale {study.scale_name} on {self.corpus.name}: width {scale.hidden_size}, context "
            f"{scale.length}, {scale.tokens:,} {what} a run in batches of {scale.batch}, "
            f"{scale.precision}; {count(study.seeds, 'seed')}. Rows are matched by {matched}, by "
            "the order of the data and by the validation text."
        )

    # ------------------------------------------------------------------ before it starts

    def plan(self) -> list[Run]:
        """All runs that are foreseen. Until a sweep has begun, the scale's rate stands for the one
        that it will give."""
        guess = SweepRecord(tried=[(self.study.scale.lr, 0.0)])
        sweeps = {f: guess if sweep.chosen is None else sweep for f, sweep in self.sweeps().items()}
        runs = [self.sweep_run(family, lr) for family in sweeps for lr in self.study.rates]
        runs += [run for _, run in self.rows(sweeps)]
        return list({run.folder: run for run in runs}.values())

    def announce(self) -> None:
        runs = self.plan()
        due = [run for run in runs if not run.finished]
        say(f"{self.study.file.title}. {self.setting()}")
        say(
            f"{len(due)} of {count(len(runs), 'run')} to do, "
            f"{sum(run.flops for run in due):.3g} FLOPs: about {duration(self.estimate(due))} "
            f"with {count(self.pool.jobs, 'run')} at a time; where a sweep's best lies at "
            "its edge, more"
        )

    def estimate(self, due: Sequence[Run]) -> float:
        """Seconds, starting included, at the speed of runs in the cache or of a short trial."""
        if not due:
            return 0.0
        rates = []
        for path in (self.cache / self.corpus.name).glob("*/result.json"):
            with contextlib.suppress(UserError):  # said where the run is needed
                result = read_result(path)
                rates += [result["flops_per_second"]] if result["steps"] > 50 else []
        rate = float(np.median(rates)) if rates else _tried_rate(due[0].config) / self.pool.jobs
        seconds = [run.flops / rate + STARTUP for run in due]
        return max(sum(seconds) / self.pool.jobs, *seconds) + STARTUP


def _tried_rate(config: TrainConfig) -> float:
    """FLOP/s of all cores on two sequences of a model."""
    import torch

    from spiralformer.model import SpiralFormer

    if config.model.hidden_size > 1024:
        return GUESSED_RATE
    length = min(config.length, 512)
    model, ids = SpiralFormer(config.model), torch.zeros(2, length, dtype=torch.long)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
            loss = model(ids, ids)
        loss.backward()
        seconds.append(time.perf_counter() - start)
    return 2 * length * training_flops_per_token(config.model, length) / min(seconds)


def machine() -> str:
    """CPU and cores, as the system calls them."""
    return f"{cpu_name()}, {count(os.cpu_count() or 1, 'core')}"
