"""Checkpoints that survive whatever stops the run.

    step-…/*.distcp, .metadata    tensors, as torch.distributed.checkpoint has them
    step-…/state.json             where the run stands, what it is, the code's version
    step-…/files.json             sizes and checksums of all these

They load on any number of processes. A checkpoint takes its name when it is complete and checked.
There is no random state: nothing is drawn between the initial weights and the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shutil
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from typing_extensions import TypedDict

from spiralformer.errors import UserError, first_line
from spiralformer.files import checked, digest, inside, new_folder, read_json, write_json
from spiralformer.model_folder import require_finite
from spiralformer.train.distributed import Processes
from spiralformer.train.metadata import METADATA, TensorReader, read_metadata

STATE, FILES = "state.json", "files.json"

Optimizers = list[torch.optim.Optimizer]


@dataclass
class TrainState:
    """Where a run stands: what a checkpoint holds beside tensors. The learning rate and the data of
    a step follow from the number of finished steps."""

    step: NonNegativeInt = 0
    tokens: NonNegativeInt = 0  # targets trained on
    seconds: NonNegativeFloat = 0.0  # spent in steps
    skipped: NonNegativeInt = 0  # steps without an update, their loss or gradient not being finite
    skipped_in_a_row: NonNegativeInt = 0
    # Since the last line of metrics.jsonl:
    line_tokens: NonNegativeInt = 0
    line_seconds: NonNegativeFloat = 0.0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TrainState:
        """From what `state.json` has, of this and else."""
        return cls(**{each.name: fields[each.name] for each in dataclasses.fields(cls)})

    def advance(self, loss: float, norm: float, targets: int, seconds: float) -> None:
        """By a step."""
        self.step += 1
        self.tokens += targets
        self.seconds += seconds
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped_in_a_row = 0
            self.losses.append(loss)
            self.norms.append(norm)
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1

    def line(self, flops_per_token: float) -> dict[str, Any]:
        """What metrics.jsonl says of the steps since its last line; skipped ones have no loss."""
        seconds, tokens = self.seconds - self.line_seconds, self.tokens - self.line_tokens
        speed = tokens / seconds if seconds else 0.0
        mean = lambda values: math.fsum(values) / len(values) if values else None
        line = {
            "loss": mean(self.losses),
            "grad_norm": mean(self.norms),
            "skipped": self.skipped,
            "seconds": self.seconds,
            "tokens_per_second": speed,
            "flops_per_second": speed * flops_per_token,
        }
        self.line_seconds, self.line_tokens = self.seconds, self.tokens
        self.losses, self.norms = [], []
        return line


@dataclass(frozen=True)
class Checkpoints:
    folder: Path
    keep: int
    processes: Processes

    def save(self, model: nn.Module, optimizers: Optimizers, state: dict) -> Path:
        """`state` is the run's own, as JSON, with the number of finished steps as "step"."""
        final = self.folder / f"step-{state['step']:08}"
        rank, main = self.processes.rank, self.processes.main
        with contextlib.ExitStack() as unnamed:
            part: Any = None
            with self._attempt(final):
                if main:
                    part = unnamed.enter_context(new_folder(final, replace=True))
            part = self.processes.from_main(part)
            own: dict[str, Any] = {}
            with self._attempt(final), _alone():
                weights, moments = get_state_dict(model, optimizers)
                require_finite({name: _own(weight) for name, weight in weights.items()}, "weights")
                dcp.save({"model": weights, "optimizer": moments["state"]}, checkpoint_id=part)
                own = {path.name: _describe(path) for path in part.glob(f"__{rank}_*.distcp")}
            described = self.processes.gather(own)
            with self._attempt(final):
                if main:
                    write_json(part / STATE, state)
                    described.append({name: _describe(part / name) for name in (METADATA, STATE)})
                    write_json(part / FILES, dict(ChainMap(*described)))
                    if problem := fault(part, checksums=False):
                        raise RuntimeError(problem)
                    unnamed.close()  # it takes its name
                    self._prune(final)
        return final

    def load(self, path: Path, model: nn.Module, optimizers: Optimizers) -> None:
        """The optimisers' settings are not the checkpoint's but the configuration's."""
        weights, moments = get_state_dict(model, optimizers)
        try:
            with _alone():
                dcp.load(
                    {"model": weights, "optimizer": moments["state"]},
                    storage_reader=TensorReader(path),
                )
        except CheckpointException as error:
            raise UserError(f"{path}: cannot be loaded: {_reason(error)}") from None
        set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=moments)

    def note(self) -> str:
        """For messages of what went wrong."""
        paths = saved(self.folder)
        return f"the last checkpoint is {paths[0]}" if paths else "there is no checkpoint yet"

    @contextlib.contextmanager
    def _attempt(self, path: Path) -> Iterator[None]:
        """A part of saving that all processes finish, or none."""
        note = self.note()
        with self.processes.together():
            try:
                yield
            except (OSError, RuntimeError, CheckpointException, UserError) as error:
                raise UserError(
                    f"{path}: the checkpoint cannot be written: {_reason(error)}; {note}"
                ) from None

    def _prune(self, newest: Path) -> None:
        kept = {newest, *saved(self.folder)[: self.keep]}
        for path in self.folder.iterdir():
            if path not in kept and "step-" in path.name:  # older ones, and torn ones
                shutil.rmtree(path, ignore_errors=True)


def saved(folder: Path) -> list[Path]:
    """The checkpoints that have their name, the newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if re.fullmatch(r"step-\d+", path.name)), reverse=True)


def newest_whole(folder: Path, notice: Callable[[str], None]) -> Path | None:
    """Damaged ones are named and passed over."""
    damaged = []
    for path in saved(folder):
        problem = fault(path)
        if problem is None:
            return path
        damaged.append(f"{path}: {problem}")
        notice(f"{path} is damaged and passed over: {problem}")
    if damaged:
        raise UserError(
            f"every checkpoint is damaged ({'; '.join(damaged)}); start anew with --fresh"
        )
    return None


def fault(checkpoint: Path, checksums: bool = True) -> str | None:
    """What is wrong with a checkpoint, if anything."""
    try:
        files = read_json(checkpoint / FILES)
        for name, expected in files.items():
            path = inside(checkpoint, name)
            if not path.is_file():  # a pipe would be waited for
                return f"{name} is missing"
            size = path.stat().st_size
            if size != expected["size"]:
                return f"{name} has {size:,} bytes in place of {expected['size']:,}"
            if checksums and digest(path) != expected["sha256"][:16]:
                return f"the checksum of {name} differs"
        read_state(checkpoint)
        read_metadata(checkpoint)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except Exception as error:  # whatever a damaged file leads to
        return f"cannot be read ({error})"
    return None


class RunIdentity(TypedDict):
    """What is asked of what a run was; it says more."""

    precision: Literal["float32", "bfloat16"]


def read_state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / STATE
    state = read_json(path)
    names = {"run", "code", *(each.name for each in dataclasses.fields(TrainState))}
    if missing := names - state.keys():
        raise UserError(f"{path}: {min(missing)} is missing")
    checked(state, TrainState, path)
    checked(state["run"], RunIdentity, f"{path}: run")
    return state


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A single process is what we mean; PyTorch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _own(weight: Any) -> torch.Tensor:
    """What this process has of it."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _describe(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": digest(path)}


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # one for all processes that failed
        error, _ = next(iter(error.failures.values()))
    cause: BaseException | None = error  # a full disk may lie behind an error of PyTorch's own
    while cause is not None and not getattr(cause, "strerror", None):
        cause = cause.__cause__ or cause.__context__
    return getattr(cause, "strerror", None) or first_line(error)
