"""Attacks that must fail, and damage that must be seen."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from spiralformer.files import digest
from tests.training import assert_same_run, in_process, make_data, tiny, train


class Attack:
    """Unpickled, it leaves a file behind."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """The folder of a run that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(data, out), quiet=True)
    return out


def one_line(error: str) -> bool:
    return error.startswith("spiralformer ") and error.count("\n") == 1


# ---------------------------------------------------------------------------- checkpoints


def rehash(checkpoint: Path) -> None:
    """Whoever plants a file can describe it."""
    files = [path for path in checkpoint.iterdir() if path.name != "files.json"]
    described = {p.name: {"size": p.stat().st_size, "sha256": digest(p)} for p in files}
    (checkpoint / "files.json").write_text(json.dumps(described))


def plant_pickle(checkpoint: Path, canary: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Attack(canary)))


def plant_in_a_field(checkpoint: Path, canary: Path) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = Attack(canary)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_bytes(checkpoint: Path, canary: Path) -> None:
    """PyTorch's own classes only: an entry that it opens with torch.load(weights_only=False)."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    name = "model.embedding.weight"
    torch.save(Attack(canary), checkpoint / "__1_0.distcp")
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    size = (checkpoint / "__1_0.distcp").stat().st_size
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("__1_0.distcp", 0, size)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_a_path(checkpoint: Path, canary: Path) -> None:
    """Tensors of a file elsewhere."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    outside = checkpoint.parent.parent / "outside.distcp"
    shutil.copy(checkpoint / "__0_0.distcp", outside)
    for place in metadata.storage_data.values():
        place.relative_path = f"../../{outside.name}"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_a_link(checkpoint: Path, canary: Path) -> None:
    outside = checkpoint.parent.parent / "outside.distcp"
    (checkpoint / "__0_0.distcp").rename(outside)
    (checkpoint / "__0_0.distcp").symlink_to(outside)


@pytest.mark.parametrize(
    "plant", [plant_pickle, plant_in_a_field, plant_bytes, plant_a_path, plant_a_link]
)
def test_resuming_runs_no_code_of_a_checkpoint_and_reads_nothing_outside_it(
    plant, data, whole, tmp_path, run_command
):
    config = tiny(data, tmp_path / "run")
    in_process(config, kill_at=9, with_signal=signal.SIGKILL)
    newest, before = (tmp_path / "run/checkpoints" / f"step-0000000{n}" for n in (8, 4))
    shutil.copy(tmp_path / "run/train.json", tmp_path)
    plant(newest, tmp_path / "canary")
    rehash(newest)
    aside = before.rename(tmp_path / "aside")
    status, _, error = run_command("train", tmp_path / "train.json", "--quiet")
    assert not (tmp_path / "canary").exists()
    assert (status, one_line(error)) == (2, True), error
    assert "every checkpoint is damaged" in error

    aside.rename(before)  # with a whole one before it, it goes on as if never stopped
    assert run_command("train", tmp_path / "train.json")[0] == 0
    assert not (tmp_path / "canary").exists()
    assert_same_run(whole, tmp_path / "run")
