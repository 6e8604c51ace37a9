"""A run: its folder, how it is taken up, saved, stopped and finished.

RUN/lock             held by the process that trains here
RUN/train.json       the recipe
RUN/metrics.jsonl    a line for each record (see `log`)
RUN/checkpoints/     the last few (see `checkpoint`)
RUN/model/           the trained model, a Hugging Face folder
RUN/result.json      written last: the run is finished
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

import spiralformer
from spiralformer import files
from spiralformer.accounting import parameters
from spiralformer.console import Progress, count
from spiralformer.errors import UserError
from spiralformer.model import SpiralFormer
from spiralformer.model_folder import save_model
from spiralformer.train import log
from spiralformer.train.checkpoint import (
    Checkpoints,
    RunIdentity,
    TrainState,
    newest_whole,
    read_state,
)
from spiralformer.train.config import TrainConfig
from spiralformer.train.distributed import SharedError, parallelize, whole_model
from spiralformer.train.log import Record, Sink
from spiralformer.train.optim import make_optimizers
from spiralformer.train.plan import Identity, RunPlan

# ---------------------------------------------------------------------------- the folder


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "train.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.model = self.path / "model"
        self.losses = self.path / "loss.png"
        self.samples = self.path / "samples.txt"
        self.result = self.path / "result.json"

    @contextlib.contextmanager
    def locked(self, wait: bool = False) -> Iterator[None]:
        """Makes the folder and keeps other processes out; waits for one, if asked to."""
        with files.writing(self.path):
            names = set(os.listdir(self.path)) if self.path.is_dir() else set()
        if names and not names & {"lock", self.config.name}:
            raise UserError(
                f"{self.path}: exists and is not the folder of a run; choose another out"
            )
        remedy = "wait for it, stop it, or choose another out"
        with files.locked(self.path / "lock", "training", remedy, timeout=-1 if wait else 0):
            files.remove_leftovers(self.path)
            files.remove_leftovers(self.checkpoints)
            yield

    def clear(self) -> None:
        """Removes what a run has written."""
        for path in set(vars(self).values()) - {self.path}:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class TrainResult:
    """A finished run."""

    folder: Path
    record: Record  # the contents of result.json
    again: bool  # whether it was finished before this call

    @property
    def model(self) -> Path:
        return RunFolder(self.folder).model

    @property
    def valid_loss(self) -> float | None:
        return self.record["valid"]["loss"]

    def metrics(self) -> list[Record]:
        return log.read_metrics(RunFolder(self.folder).metrics)


class ValidResult(TypedDict):
    loss: float | None
    perplexity: float | None
    bits_per_byte: float | None
    tokens: int | None


class ParameterCounts(TypedDict):
    total: int
    non_embedding: int


class StoredResult(TypedDict):
    """What is asked of a result.json; it says more."""

    layout: str
    topology: str
    width: int
    parameters: ParameterCounts
    steps: int
    tokens: int
    train_loss: float | None
    valid: ValidResult
    compressors: dict[str, float]
    skipped: int
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    samples: list[str]
    run: RunIdentity
    config: dict[str, Any]
    code: str


def read_result(path: Path) -> Record:
    result = files.read_json(path)
    files.checked(result, StoredResult, path)
    return result


class Earlier(NamedTuple):
    """What earlier calls left in the folder: a result, else a checkpoint, else nothing."""

    result: Record | None = None
    checkpoint: Path | None = None
    identity: Identity | None = None
    step: int = 0

    @classmethod
    def of(cls, folder: RunFolder, say: Callable[[str], None]) -> Earlier:
        if folder.result.exists():
            result = read_result(folder.result)
            return cls(result=result, identity=result["run"], step=result["steps"])
        path = newest_whole(folder.checkpoints, say)
        if path is None:
            return cls()
        state = read_state(path)
        return cls(checkpoint=path, identity=state["run"], step=state["step"])

    def to_go_on(self, folder: RunFolder, say: Callable[[str], None]) -> Earlier:
        """The same with the checkpoint that a finished run is extended from."""
        path = newest_whole(folder.checkpoints, say)
        if path is None or read_state(path)["step"] != self.step:
            raise UserError(
                f"{folder.checkpoints}: the checkpoint of step {self.step:,} is gone, and the run "
                "cannot be given more steps; choose another out, or start anew with --fresh"
            )
        return self._replace(result=None, checkpoint=path)


# ---------------------------------------------------------------------------- carried out


@dataclass
class Run:
    """A run that is being carried out."""

    folder: RunFolder
    plan: RunPlan
    model: nn.Module  # as this process trains it
    optimizers: list[torch.optim.Optimizer]
    checkpoints: Checkpoints
    state: TrainState
    progress: Progress
    signals: Signals
    sinks: list[Sink] = field(default_factory=list)  # of records, on the main process
    saved_at: float = field(default_factory=time.monotonic)

    def mean_loss(
        self, ids: Tensor, targets: Tensor, kept: tuple[int, ...] | None = None
    ) -> Tensor:
        """Of a micro-batch. Under autocast a weight is cast once in a forward pass, however often
        the loop uses it: autocast keeps the cast copy until the pass ends."""
        device, bfloat16 = self.plan.processes.device, self.plan.precision == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            return self.model(ids.to(device), targets.to(device), kept)

    def record(self, kind: str, **values: Any) -> Record:
        """Written wherever records are to be seen."""
        record = {"kind": kind, "step": self.state.step, "tokens": self.state.tokens, **values}
        note = self.checkpoints.note()
        with self.plan.processes.together(), files.writing(self.folder.metrics, note):
            for sink in self.sinks:
                sink(record)
        return record

    def save_or_stop(self) -> None:
        """A checkpoint if one is due; if someone asked for an end, that too."""
        plan, settings = self.plan, self.plan.config.save
        late = 0 < 60 * settings.minutes < time.monotonic() - self.saved_at
        due = any(plan.processes.gather(late)) or plan.due(self.state.step, settings.every)
        last = self.state.step == plan.steps
        if not last:
            self.stop_if_asked()
        if last or (due and not self.state.skipped_in_a_row):
            self.save()

    def save(self) -> Path:
        state = {"run": self.plan.identity, "code": code_version()}
        state |= dataclasses.asdict(self.state)
        path = self.checkpoints.save(self.model, self.optimizers, state)
        self.saved_at = time.monotonic()
        return path

    def stop_if_asked(self) -> None:
        """Between two micro-batches or steps. What is finished of a step is dropped, not saved."""
        number = max(self.plan.processes.gather(self.signals.received))
        if not number:
            return
        end = f"stopped by {signal.Signals(number).name}"
        if not self.state.step:
            raise Interrupted(f"{end} in the first step: there is nothing to save", number)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        raise Interrupted(
            f"{end} after step {self.state.step:,} of {self.plan.steps:,}, saved as {self.save()}; "
            "the same command goes on from there",
            number,
        )

    def stop_if_diverged(self) -> None:
        state, plan = self.state, self.plan
        limit = 1 if state.step == plan.steps else plan.config.nonfinite_limit
        if state.skipped_in_a_row < limit:
            return
        first = state.step - state.skipped_in_a_row  # steps finished before it
        samples = plan.samples(first)
        windows = [plan.corpus.train.window_of(sample) for sample in samples]
        shown = ", ".join(map(str, windows[:8])) + (", …" if len(windows) > 8 else "")
        raise SharedError(
            f"loss or gradient was not finite in {count(state.skipped_in_a_row, 'step')} in a row, "
            f"first in step {first + 1:,} (samples {samples[0]}–{samples[-1]}, windows {shown} of "
            f"{plan.config.data.path}); {self.checkpoints.note()}; lower optim.lr or look at these "
            "windows"
        )

    def finish(self) -> Record:
        """Writes the model's folder, the picture and, last of all, the result."""
        result: Record = {}
        whole = whole_model(self.model, self.plan.processes)
        with self.plan.processes.together(), files.writing(self.folder.path):
            if whole is not None:
                result = self._write_result(whole)
        return self.plan.processes.from_main(result)

    def _write_result(self, model: SpiralFormer) -> Record:
        plan, config, folder, state = self.plan, self.plan.config, self.folder, self.state
        records = log.read_metrics(folder.metrics)
        last = {record["kind"]: record for record in records}
        valid, texts = last.get("valid", {}), last.get("sample", {}).get("texts", [])
        counts, tokenizer, ends = parameters(config.model), plan.corpus.tokenizer, {}
        if tokenizer is not None:
            ends = {"bos_token_id": tokenizer.eot_id, "eos_token_id": tokenizer.eot_id}
        save_model(model, folder.model, tokenizer=config.data.path if tokenizer else None, **ends)
        title = f"{config.model.layout} {config.model.topology}, {counts.total / 1e6:.1f} M"
        log.draw_losses(records, folder.losses, title)
        files.write_text(folder.samples, log.sample_lines(texts) + "\n")
        speed = state.tokens / state.seconds if state.seconds else 0.0
        result = {
            "layout": config.model.layout,
            "topology": config.model.topology,
            "width": config.model.hidden_size,
            "parameters": {"total": counts.total, "non_embedding": counts.non_embedding},
            "steps": plan.steps,
            "tokens": state.tokens,
            "train_loss": last["train"]["loss"],
            "valid": {
                "loss": valid.get("valid_loss"),
                "perplexity": valid.get("perplexity"),
                "bits_per_byte": valid.get("bits_per_byte"),
                "tokens": valid.get("valid_tokens"),
                "bytes": plan.corpus.valid.text_bytes if plan.corpus.valid else None,
            },
            "compressors": plan.corpus.valid.compressors() if plan.corpus.valid else {},
            "skipped": state.skipped,
            "seconds": state.seconds,
            "tokens_per_second": speed,
            "flops_per_second": speed * plan.flops_per_token,
            "flops_per_token": plan.flops_per_token,
            "samples": texts,
            "run": plan.identity,
            "config": config.to_dict(),
            "code": code_version(),
        }
        files.write_json(folder.result, result)
        return result


@contextlib.contextmanager
def open_run(
    folder: RunFolder,
    plan: RunPlan,
    checkpoint: Path | None,
    progress: Progress,
    watch: Sink | None,
) -> Iterator[Run]:
    """The model and the optimisers as the checkpoint has them, or as they begin."""
    config, processes = plan.config, plan.processes
    whole = _initial_model(config, processes.device)
    model = parallelize(whole, config.parallel, processes, elastic=bool(config.elastic))
    optimizers = make_optimizers(model, config.optim)
    checkpoints = Checkpoints(folder.checkpoints, config.save.keep, processes)
    state = TrainState()
    if checkpoint is not None:
        progress.say(f"resuming from {checkpoint}")
        checkpoints.load(checkpoint, model, optimizers)
        stored = read_state(checkpoint)
        state = TrainState.from_dict(stored)
        if stored["code"] != code_version():
            progress.say(f"note: it was written by {stored['code']}")
    progress.start(plan.steps, state.step)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals(progress.say))
        run = Run(folder, plan, model, optimizers, checkpoints, state, progress, signals)
        with processes.together(), files.writing(folder.path):
            if processes.main:
                if checkpoint is None:
                    folder.clear()
                folder.result.unlink(missing_ok=True)
                files.write_json(folder.config, config.to_dict())
                metrics = log.metrics_file(folder.metrics, state.step, progress.say)
                run.sinks = [stack.enter_context(metrics)]
                if config.log.tensorboard:
                    board = log.tensorboard(folder.tensorboard, state.step)
                    run.sinks.append(stack.enter_context(board))
                if config.log.wandb:
                    project = log.weights_and_biases(config, folder.path)
                    run.sinks.append(stack.enter_context(project))
                if watch is not None:
                    run.sinks.append(watch)
        yield run


def _initial_model(config: TrainConfig, device: torch.device) -> SpiralFormer:
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(config.seed)
        model = SpiralFormer(config.model).to(device).train()
    model.set_checkpointing(config.checkpointing)
    if config.compile:
        for layers in model.stacks():
            for block in layers.blocks:
                block.compile()  # in place, so that names and hooks stay what they are
    return model


@functools.cache
def code_version() -> str:
    """spiralformer 0.1.0 (commit …), torch …, Python …"""
    root = Path(spiralformer.__file__).parent.parent
    commit = ""
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
            done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
            commit = f" ({done.stdout.strip()})"
    return (
        f"spiralformer {spiralformer.__version__}{commit}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


# ---------------------------------------------------------------------------- stopped


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run, and its finished steps were saved."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


STOPPING = [signal.SIGINT, signal.SIGTERM, *filter(None, [getattr(signal, "SIGHUP", None)])]


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP so that a run can be saved; the second stops at once.

    Launchers signal a process and its group, or twice in a row: within a second that is one."""

    SAME = 1.0

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.received, self.at = say, 0, 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.received and now - self.at < self.SAME:
            return
        if self.received:
            raise KeyboardInterrupt
        self.received, self.at = number, now
        self.say("stopping after this micro-batch; a second signal stops at once, without saving")
