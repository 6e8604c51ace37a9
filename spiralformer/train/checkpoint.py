"""The folder of a run, and checkpoints in it that survive whatever stops the run.

    RUN/lock                    held by the process that trains here
    RUN/train.json              the configuration
    RUN/metrics.jsonl           a line for each record (see `report`)
    RUN/checkpoints/step-…      the last few checkpoints
    RUN/model                   the trained model, a Hugging Face folder
    RUN/result.json             written last: the run is finished

A checkpoint is a torch.distributed.checkpoint, to be loaded on any number of processes, with
`state.json` (where the run stands, its configuration, the code's version) and `files.json` (sizes
and checksums) beside it. It is written under another name, checked, and renamed when complete."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from spiralformer.errors import UserError
from spiralformer.train.distributed import Processes

STATE, FILES, METADATA = "state.json", "files.json", ".metadata"
PART = ".part"


# ---------------------------------------------------------------------------- the run's folder


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "train.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def curve(self) -> Path:
        return self.path / "loss.png"

    @property
    def samples(self) -> Path:
        return self.path / "samples.txt"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder and keeps other processes out. The system lets go when this one ends."""
        with writing(self.path):
            names = set(os.listdir(self.path)) if self.path.is_dir() else set()
            if names and not names & {"lock", self.config.name}:
                raise UserError(
                    f"{self.path}: exists and is not the folder of a run; choose another out"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / "lock", "a+")  # noqa: SIM115
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                holder = lock.read().strip() or "another process"
                raise UserError(
                    f"{self.path}: {holder} is training here; wait for it, stop it, or choose "
                    "another out"
                ) from None
            with writing(self.path):
                lock.truncate(0)
                lock.write(f"process {os.getpid()} on {socket.gethostname()}")
                lock.flush()
            yield

    def clear(self) -> None:
        """Removes what a run has written."""
        for path in (self.checkpoints, self.tensorboard, self.model):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.metrics, self.result, self.curve, self.samples, self.config):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path, note: str = "") -> Iterator[None]:
    """What the system says against writing becomes an error that the user can act on."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}"
            f"{note and '; ' + note}"
        ) from None


def write_json(path: Path, content: Any) -> None:
    """Beside its place, then renamed: the file is the old or the new one, never half of it."""
    beside = path.with_name(path.name + PART)
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


# ---------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class Checkpoints:
    folder: Path
    keep: int
    processes: Processes

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> Path:
        """`state` is the run's own, as JSON, with the number of finished steps as "step"."""
        final = self.folder / f"step-{state['step']:08}"
        part = self.folder / (final.name + PART)
        rank, main = self.processes.rank, self.processes.main
        try:
            with self._attempt(part):
                if main:
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir(parents=True)
            with self._attempt(part), _alone():
                dcp.save(
                    _tensors(model, optimizer, self.processes),
                    storage_writer=FileSystemWriter(part),
                    no_dist=self.processes.world == 1,
                )
            own: dict[str, Any] = {}
            with self._attempt(part):
                own = {path.name: _describe(path) for path in part.glob(f"__{rank}_*.distcp")}
            described = self.processes.gather(own)
            with self._attempt(part):
                if main:
                    write_json(part / STATE, state)
                    files = {name: about for found in described for name, about in found.items()}
                    files |= {name: _describe(part / name) for name in (METADATA, STATE)}
                    write_json(part / FILES, files)
                    if problem := fault(part, checksums=False):
                        raise RuntimeError(problem)
                    shutil.rmtree(final, ignore_errors=True)
                    os.rename(part, final)
                    _sync(self.folder)
                    self._prune(final)
        except BaseException:
            if main:
                shutil.rmtree(part, ignore_errors=True)
            raise
        return final

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        reader = FileSystemReader(path)
        stored = reader.read_metadata().state_dict_metadata
        tensors = _tensors(model, optimizer, self.processes)
        # Another number of processes: those that are new keep the random state they have.
        tensors["rng"] = {k: v for k, v in tensors["rng"].items() if f"rng.{k}" in stored}
        try:
            with _alone():
                dcp.load(tensors, storage_reader=reader, no_dist=self.processes.world == 1)
        except CheckpointException as error:
            raise UserError(f"{path}: cannot be loaded: {_reason(error)}") from None
        set_model_state_dict(model, tensors["model"])
        groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
        set_optimizer_state_dict(
            model, optimizer, {"state": tensors["optimizer"], "param_groups": groups}
        )
        for name, value in tensors["rng"].items():
            if name.startswith("cuda"):
                torch.cuda.set_rng_state(value, self.processes.device)
            else:
                torch.set_rng_state(value)

    def all(self) -> list[Path]:
        """Those that have their final name, the newest first."""
        names = re.compile(r"step-\d+")
        found = self.folder.glob("step-*") if self.folder.is_dir() else ()
        return sorted((p for p in found if names.fullmatch(p.name)), reverse=True)

    def newest(self, notice: Callable[[str], None]) -> Path | None:
        """The newest that is whole; damaged ones are named and passed over."""
        damaged = []
        for path in self.all():
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

    def note(self) -> str:
        """For messages of what went wrong."""
        found = self.all()
        return f"the last checkpoint is {found[0]}" if found else "there is no checkpoint yet"

    @contextlib.contextmanager
    def _attempt(self, part: Path) -> Iterator[None]:
        """A part of saving that all processes finish, or none."""
        note = self.note()
        with self.processes.together(), writing(part, note):
            try:
                yield
            except (CheckpointException, RuntimeError) as error:
                raise UserError(
                    f"{part}: the checkpoint cannot be written: {_reason(error)}; {note}"
                ) from None

    def _prune(self, newest: Path) -> None:
        for path in self.all()[self.keep :]:
            if path != newest:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"step-*{PART}"):  # of a run that was killed
            shutil.rmtree(path, ignore_errors=True)


def read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def fault(checkpoint: Path, checksums: bool = True) -> str | None:
    """What is wrong with a checkpoint, if anything."""
    try:
        files = json.loads((checkpoint / FILES).read_text(encoding="utf-8"))
        for name, expected in files.items():
            size = (checkpoint / name).stat().st_size
            if size != expected["size"]:
                return f"{name} has {size:,} bytes in place of {expected['size']:,}"
            if checksums and _describe(checkpoint / name) != expected:
                return f"the checksum of {name} differs"
        for item in FileSystemReader(checkpoint).read_metadata().storage_data.values():
            if item.offset + item.length > files[item.relative_path]["size"]:
                return f"{item.relative_path} is shorter than {METADATA} says"
        read_state(checkpoint)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except Exception as error:  # whatever a damaged file leads to
        return f"cannot be read ({error})"
    return None


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes
) -> dict[str, Any]:
    """Everything but `state.json`. The optimiser's settings are the configuration's."""
    rng = {f"cpu{processes.rank}": torch.get_rng_state()}
    if processes.device.type == "cuda":
        rng[f"cuda{processes.rank}"] = torch.cuda.get_rng_state(processes.device)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer)["state"],
        "rng": rng,
    }


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A single process is what we mean; PyTorch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _sync(folder: Path) -> None:
    """A rename lasts when the folder that holds the name is on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        return reason if len(error.failures) == 1 and rank == 0 else f"{reason} (process {rank})"
    return str(error).splitlines()[0]
