"""The runs of a study: calls of `train`, which is locked, resumable and idempotent by itself.

    CACHE/data/NAME      token shards
    CACHE/NAME/RUN       the folder of a run, named after what the study chose for it

Studies share a cache: a run that another study has finished is read, not made again."""

from __future__ import annotations

import gzip
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import shutil
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from spiralformer.accounting import training_flops_per_token
from spiralformer.config import SpiralConfig
from spiralformer.console import Progress, count, duration, say
from spiralformer.errors import UserError
from spiralformer.files import new_folder, read_json, writing
from spiralformer.study import spec
from spiralformer.study.records import Records, RowRecord, RunRecord, SweepRecord, check_matched
from spiralformer.study.spec import Row, Study
from spiralformer.train.config import TrainConfig

SPLITS = {"train": 0.9, "valid": 0.05, "test": 0.05}  # of a file; those of enwik8
VALID_FRACTION = 0.05  # of the embedded corpus
FORKS = multiprocessing.get_context("forkserver")
STARTUP = 3.0  # seconds of a run that are not training: its process, its model, its files
GUESSED_RATE = 60e9  # FLOP/s of a core, where none was measured


# ---------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Data:
    """Shards of tokens, and the folder's name in the cache."""

    name: str
    train: str
    valid: str

    @cached_property
    def vocab_size(self) -> int | None:
        from spiralformer.data.windows import open_split

        if tokens_are_bytes(self.train):
            return spec.BYTES
        known = open_split(self.train, "train").vocab_size
        return None if known is None else -(-known // 64) * 64


def open_data(folder: str, corpus: str, cache: Path) -> Data:
    """The shards of `folder`, of the bytes of the file `corpus`, or of the embedded corpus."""
    if folder:
        if not Path(folder).is_dir():
            raise UserError(f"--data {folder}: no such folder; `spiralformer data` makes one")
        return Data(Path(folder).resolve().name, folder, folder)
    if corpus:
        name = Path(corpus).name.removesuffix(".gz")
        made = cache / "data" / name
        if not made.exists():
            _split_file(Path(corpus), made)
        return Data(name, str(made / "train"), str(made / "valid"))
    from spiralformer.data.prepare import Recipe, prepare
    from spiralformer.data.sources import find_sources

    made = cache / "data" / "stdlib"
    made.parent.mkdir(parents=True, exist_ok=True)
    prepare(find_sources(["stdlib"]), made, Recipe(bytes=True, valid_fraction=VALID_FRACTION))
    return Data("stdlib", str(made), str(made))


def _split_file(file: Path, folder: Path) -> None:
    """The bytes of a file in order, a folder of shards for each split: a token is a byte."""
    from spiralformer.data.shards import write_index
    from spiralformer.data.tokenizer import byte_tokenizer

    try:
        content = gzip.open(file).read() if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"--corpus {file}: cannot be read: {error}") from None
    ends = np.round(np.cumsum(list(SPLITS.values())) * len(content)).astype(int)
    with new_folder(folder) as part:
        for split, end, start in zip(SPLITS, ends, [0, *ends], strict=False):
            byte_tokenizer().save(part / split)
            (part / split / f"{split}.bin").write_bytes(content[start:end])
            write_index(part / split / f"{split}.idx", np.array([end - start]), np.dtype(np.uint8))


def tokens_are_bytes(folder: str) -> bool:
    from spiralformer.data.windows import open_split

    return all(array.dtype == np.uint8 for array in open_split(folder, "train").stream.arrays)


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
    def flops(self) -> float:
        """Training, and validations, each a third of it for a token."""
        config = self.config
        checks = math.ceil(config.steps / config.valid.every)
        tokens = config.steps * config.batch * config.length + checks * config.valid.tokens / 3
        return tokens * training_flops_per_token(config.model, config.length)

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def failure(self) -> str:
        """Why the last attempt failed."""
        path = self.folder / "failed.txt"
        return path.read_text(encoding="utf-8") if path.exists() and not self.finished else ""

    def carry_out(self) -> dict[str, Any]:
        """The contents of result.json, trained for where it is not there."""
        from spiralformer.train.loop import train

        try:
            result = train(self.config, quiet=True).record
        except Exception as error:
            reason = (
                str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            )
            if self.folder.is_dir() and not self.finished:
                (self.folder / "failed.txt").write_text(reason, encoding="utf-8")
            raise
        (self.folder / "failed.txt").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)  # of no use any more
        return result

    def metrics(self) -> Iterator[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # the last line, while it is written
                return


def record_of(run: Run) -> RunRecord:
    result = run.carry_out()
    record = RunRecord.of(result, run.metrics())
    if record.bits_per_byte is None and tokens_are_bytes(run.config.data.path):
        return record.model_copy(update={"bits_per_byte": record.loss / math.log(2)})
    return record


# ---------------------------------------------------------------------------- many runs


@dataclass
class RunPool:
    """Carries out runs, `jobs` side by side, each in a process and with its share of the cores.
    Without jobs they are trained in this process, one by one."""

    jobs: int = 1
    quiet: bool = False
    failures: dict[Path, str] = field(default_factory=dict)  # of this process's attempts

    def run(self, runs: Sequence[Run], label: str) -> None:
        """All that are not finished. One that fails is noted, and the others go on."""
        due = list({run.folder: run for run in runs if not run.finished}.values())
        if not due:
            return
        total = sum(run.flops for run in due) / 1e12
        with Progress(label, total, "TFLOP", shown=not self.quiet) as progress:
            self._here(due, progress) if self.jobs == 0 else self._beside(due, progress)

    def failure(self, run: Run) -> str:
        return self.failures.get(run.folder, "") or run.failure

    def _here(self, due: list[Run], progress: Progress) -> None:
        for run in due:
            try:
                run.carry_out()
            except Exception as error:
                self.failures[run.folder] = str(error)
            self._told(run, due, [], progress)

    def _beside(self, due: list[Run], progress: Progress) -> None:
        FORKS.set_forkserver_preload(["spiralformer.train.loop"])
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        waiting, active = deque(due), dict[BaseProcess, Run]()
        try:
            while waiting or active:
                while waiting and len(active) < self.jobs:
                    run = waiting.popleft()
                    child = FORKS.Process(target=_child, args=(run, threads))
                    child.start()
                    active[child] = run
                multiprocessing.connection.wait([p.sentinel for p in active], timeout=1)
                for process in [p for p in active if not p.is_alive()]:
                    run = active.pop(process)
                    if not run.finished:
                        ended = f"its process ended with code {process.exitcode}"
                        self.failures[run.folder] = run.failure or ended
                    self._told(run, due, list(active.values()), progress)
                self._told(None, due, list(active.values()), progress)
        except BaseException:
            progress.say("stopping: the runs finish their steps and save")
            for process in active:
                process.terminate()
            for process in active:
                process.join()
            raise

    def _told(self, run: Run | None, due: list[Run], active: list[Run], progress: Progress) -> None:
        over = [r for r in due if r.finished or r.folder in self.failures]
        done, notes = sum(r.flops for r in over), [f"{len(over)}/{count(len(due), 'run')}"]
        for other in active:
            if other not in over:
                lines = [line for line in other.metrics() if line["kind"] == "train"]
                if lines:
                    done += other.flops * lines[-1]["step"] / other.config.steps
                    notes.append(f"{other.label} {lines[-1]['loss'] or math.nan:.3f}")
        if run is not None:
            reason = self.failures.get(run.folder)
            loss = "" if reason else f"{read_json(run.folder / 'result.json')['valid']['loss']:.4f}"
            progress.say(f"{run.label}: {f'failed: {reason}' if reason else f'loss {loss}'}")
        progress.update(done / 1e12, "  ".join(notes))


def _child(run: Run, threads: int) -> None:
    """Ctrl-C reaches the parent alone, which then asks for an end in good order."""
    import torch

    from spiralformer.train.loop import Interrupted

    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        run.carry_out()
    except Interrupted as stop:
        os._exit(128 + stop.signal)
    except Exception:
        os._exit(1)  # the reason is in the run's folder


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # the trainer saves first


# ---------------------------------------------------------------------------- a study's runs


@dataclass
class StudyRuns:
    """Rows and sweeps as runs on one corpus."""

    study: Study
    data: Data
    cache: Path
    pool: RunPool

    @classmethod
    def of(
        cls, study: Study, cache: Path, pool: RunPool, *, folder: str = "", corpus: str = ""
    ) -> StudyRuns:
        with writing(cache):
            cache.mkdir(parents=True, exist_ok=True)
        data = open_data(folder, corpus, cache)
        return cls(study.at(data.vocab_size or study.scale.vocab_size), data, cache, pool)

    def run(self, name: str, model: SpiralConfig, steps: int, lr: float, seed: int) -> Run:
        scale, every = self.study.scale, max(1, steps // 30)
        lr = float(f"{lr:.4g}")
        title = f"{name}-d{model.hidden_size}-{steps}x{scale.batch}x{scale.length}"
        folder = f"{quote(title, safe=',+')}-lr{lr:g}-seed{seed}"
        config = TrainConfig.from_dict(
            {
                "model": model.to_dict(),
                "data": {"path": self.data.train, "valid": self.data.valid},
                "out": str(self.cache / self.data.name / folder),
                "length": scale.length,
                "batch": scale.batch,
                "steps": steps,
                "seed": seed,
                "precision": scale.precision,
                "optim": {"lr": lr, "warmup": scale.warmup},
                "valid": {"every": 5 * every, "tokens": scale.valid_tokens},
                "save": {"every": 0, "minutes": 2, "keep": 1},
                "sample": {"tokens": 0},
                "log": {"every": every, "tensorboard": False},
            }
        )
        return Run(f"{name}, lr {lr:g}, seed {seed}", config)

    def sweep_run(self, family: str, lr: float) -> Run:
        scale = self.study.scale
        steps = max(1, round(scale.tokens * scale.sweep / (scale.batch * scale.length)))
        return self.run(family, spec.family_config(family, scale), steps, lr, seed=0)

    def row_run(self, row: Row, lr: float, seed: int) -> Run:
        return self.run(row.name, row.model, row.steps, lr * row.lr_factor, seed)

    # ------------------------------------------------------------------ sweeps

    def grid(self) -> list[float]:
        return sorted(self.study.scale.lr * factor for factor in self.study.file.sweep.lrs)

    def swept(self, family: str) -> SweepRecord:
        """The sweep as far as it has come, extensions included."""
        rates, losses = self.grid(), dict[float, float | None]()
        while rates:
            for lr in rates:
                run = self.sweep_run(family, lr)
                if run.finished:
                    losses[lr] = run.carry_out()["valid"]["loss"]
                elif self.pool.failure(run):
                    losses[lr] = None
                else:
                    return SweepRecord(tried=sorted(losses.items()))
            rates = self.extension(SweepRecord(tried=sorted(losses.items())))
        return SweepRecord(tried=sorted(losses.items()))

    def extension(self, sweep: SweepRecord) -> list[float]:
        """The rate to try beyond these, where the best lies at an edge and the study allows it."""
        rates, allowed = [lr for lr, _ in sweep.tried], self.study.file.sweep.extensions
        if sweep.chosen is None or sweep.bracketed or len(rates) - len(self.grid()) >= allowed:
            return []
        return [2 * sweep.chosen if sweep.chosen == max(rates) else sweep.chosen / 2]

    def sweep(self) -> None:
        families = self.study.families
        first = [self.sweep_run(family, lr) for family in families for lr in self.grid()]
        self.pool.run(first, "sweeps")
        for _ in range(self.study.file.sweep.extensions):
            more = {family: self.extension(self.swept(family)) for family in families}
            runs = [self.sweep_run(family, lr) for family in more for lr in more[family]]
            self.pool.run(runs, "sweeps, beyond their edges")

    # ------------------------------------------------------------------ rows

    def rows(self, sweeps: dict[str, SweepRecord]) -> Iterator[tuple[Row, Run]]:
        """Seed by seed, so that an unfinished study has whole ones."""
        for seed in range(self.study.seeds):
            for row in self.study.rows:
                if (lr := sweeps[row.tuned].chosen) is not None:
                    yield row, self.row_run(row, lr, seed)

    def conduct(self) -> None:
        """Carries out what is missing."""
        self.sweep()
        sweeps = {family: self.swept(family) for family in self.study.families}
        self.pool.run([run for _, run in self.rows(sweeps)], self.study.name)

    def records(self) -> Records:
        """Of what is finished."""
        study, scale = self.study, self.study.scale
        sweeps = {family: self.swept(family) for family in study.families}
        runs: dict[str, list[RunRecord]] = {row.id: [] for row in study.rows}
        failures: dict[str, dict[int, str]] = {row.id: {} for row in study.rows}
        for row in study.rows:
            if sweeps[row.tuned].chosen is None:
                failures[row.id][0] = f"no learning rate: no sweep of {row.tuned} is finished"
        for row, run in self.rows(sweeps):
            if run.finished:
                runs[row.id].append(record_of(run))
            elif reason := self.pool.failure(run):
                failures[row.id][run.config.seed] = " ".join(reason.split())[:120]
        if not any(runs.values()):
            reasons = [text for row in failures.values() for text in row.values()]
            raise UserError(f"no run of {study.name} is finished in {self.cache}: {reasons[:1]}")
        made = Records(
            study=study.name,
            title=study.file.title,
            about=study.file.about.strip(),
            setting=self.setting(),
            machine=machine(),
            figure=study.file.figure,
            match=study.file.match,
            reference=study.reference,
            seeds=study.seeds,
            rows=[
                RowRecord(
                    name=row.name,
                    id=row.id,
                    label=row.label,
                    family=row.tuned,
                    point=dict(row.point),
                    core=row.core,
                    paper=row.paper,
                    runs=runs[row.id],
                    failures=failures[row.id],
                    **RowRecord.counts(row.model, scale.length),
                )
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
            f"Scale {study.scale_name} on {self.data.name}: width {scale.hidden_size}, context "
            f"{scale.length}, {scale.tokens:,} {what} a run in batches of {scale.batch}, "
            f"{scale.precision}; {count(study.seeds, 'seed')}. Rows are matched by {matched}, by "
            "the order of the data and by the validation text."
        )

    # ------------------------------------------------------------------ before it starts

    def plan(self) -> tuple[list[Run], list[Run]]:
        """All runs that are foreseen, and those of them that are to be made. Where a sweep is not
        finished its middle stands for the rate that it will give."""
        sweeps = {family: self.swept(family) for family in self.study.families}
        middle = SweepRecord(tried=[(self.study.scale.lr, 0.0)])
        known = {f: s if len(s.tried) >= len(self.grid()) else middle for f, s in sweeps.items()}
        runs = [self.sweep_run(f, lr) for f in self.study.families for lr in self.grid()]
        runs += [run for _, run in self.rows(known)]
        runs = list({run.folder: run for run in runs}.values())
        return runs, [run for run in runs if not run.finished]

    def estimate(self, due: Sequence[Run]) -> float:
        """Seconds, starting included, at the speed of runs in the cache or of a short trial."""
        if not due:
            return 0.0
        results = [read_json(p) for p in (self.cache / self.data.name).glob("*/result.json")]
        rates = [result["flops_per_second"] for result in results if result["steps"] > 50]
        rate = float(np.median(rates)) if rates else _tried_rate(due[0].config, self.pool.jobs)
        work = sum(run.flops / rate + STARTUP for run in due)
        longest = max(run.flops / rate + STARTUP for run in due)
        return max(work / max(1, self.pool.jobs), longest) + STARTUP

    def announce(self) -> None:
        study, (runs, due) = self.study, self.plan()
        say(f"{study.file.title}. {self.setting()}")
        say(
            f"{len(due)} of {count(len(runs), 'run')} to do, "
            f"{sum(run.flops for run in due):.3g} FLOPs: about {duration(self.estimate(due))} "
            f"with {count(max(1, self.pool.jobs), 'run')} at a time; where a sweep's best lies at "
            "its edge, more"
        )


def _tried_rate(config: TrainConfig, jobs: int) -> float:
    """FLOP/s of a run that has its share of the cores: of two sequences of its model."""
    import torch

    from spiralformer.model import SpiralFormer

    if config.model.hidden_size > 1024:
        return GUESSED_RATE
    length, threads = min(config.length, 512), torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, jobs)))
    try:
        model, ids = SpiralFormer(config.model), torch.zeros(2, length, dtype=torch.long)
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
                loss = model(ids, ids)
            loss.backward()
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 2 * length * training_flops_per_token(config.model, length) / best


def machine() -> str:
    """CPU and cores, as the system calls them."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {count(os.cpu_count() or 1, 'core')}"
