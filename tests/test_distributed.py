"""Several processes learn what one does: DDP and FSDP2 over gloo."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spiralformer.data.windows import TokenDataset, open_split
from spiralformer.train import TrainConfig, train
from tests.training import (
    assert_close_weights,
    checkpoints,
    in_processes,
    make_data,
    repeatable,
    tiny,
)

KINDS = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def make(data, tmp_path_factory):
    def config(**changes) -> TrainConfig:
        return tiny(data, tmp_path_factory.mktemp("out") / "run", **{"micro_batch": 1, **changes})

    return config


@pytest.fixture(scope="module")
def alone(make) -> TrainConfig:
    """A run on one process: four micro-batches a step."""
    config = make()
    train(config, quiet=True)
    return config


@pytest.fixture(scope="module", params=KINDS)
def together(make, request) -> TrainConfig:
    """The same on two processes: two micro-batches a step each."""
    config = make(parallel=request.param)
    assert in_processes(config, 2) == ([0, 0], [])
    return config


def assert_close_runs(one: TrainConfig, other: TrainConfig, tolerance: float = 1e-4) -> None:
    assert_close_weights(one.out, other.out, rtol=tolerance, atol=tolerance)
    for a, b in zip(repeatable(one.out), repeatable(other.out), strict=True):
        assert a.keys() == b.keys()
        assert a["step"] == b["step"]
        for key in a.keys() & {"loss", "grad_norm", "lr", "valid_loss", "tokens", "valid_tokens"}:
            assert a[key] == pytest.approx(b[key], rel=tolerance)


def test_two_processes_are_one_with_twice_the_micro_batches(alone, together):
    assert_close_runs(alone, together)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_leave_out_the_same_iterations(make, kind):
    one, two = make(elastic=0.5), make(elastic=0.5, parallel=kind)
    train(one, quiet=True)
    assert in_processes(two, 2) == ([0, 0], [])
    assert_close_runs(one, two)


def test_muon_on_two_processes_is_muon_on_one(make):
    """At a tenth of the learning rate: PyTorch orthogonalises in bfloat16, which makes the
    rounding of a gradient's sum a part in 200 of an update."""
    muon = {"optim__name": "muon", "optim__lr": 1e-3}
    one, two = make(**muon), make(**muon)
    train(one, quiet=True)
    assert in_processes(two, 2) == ([0, 0], [])
    assert_close_runs(one, two)


def test_stopped_and_resumed_on_two_is_never_stopped(make, together):
    config = make(parallel=together.parallel)
    codes, _ = in_processes(config, 2, kill_at=6, with_signal=signal.SIGTERM)
    assert codes == [128 + signal.SIGTERM] * 2
    assert in_processes(config, 2) == ([0, 0], [])
    assert_close_runs(together, config, tolerance=1e-5)


def test_three_processes_validate_on_every_token_once(make):
    """Batches that do not divide by the processes, and sharded weights, which need everyone."""
    one = make(batch=3, valid__tokens=0, steps=2)
    three = make(batch=3, valid__tokens=0, steps=2, parallel="fsdp")
    train(one, quiet=True)
    assert in_processes(three, 3) == ([0, 0, 0], [])
    assert_close_runs(one, three)


@pytest.mark.parametrize(
    "changes",
    [
        {"model__tie_embeddings": True, "checkpointing": True, "sample__tokens": 4},
        {"model__layout": "1+1+1+1"},
    ],
    ids=["tied, recomputed, sampled", "untied cores"],
)
def test_sharding_holds_for_other_models(make, changes):
    one, two = make(steps=4, **changes), make(steps=4, parallel="fsdp", **changes)
    train(one, quiet=True)
    assert in_processes(two, 2) == ([0, 0], [])
    assert_close_runs(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_on_two_processes_and_resumed_on_one(make, alone, kind):
    """Only one of them is told to stop: they agree on the step."""
    config = make(parallel=kind)
    codes, _ = in_processes(config, 2, kill_at=3, with_signal=signal.SIGTERM)
    assert codes == [128 + signal.SIGTERM] * 2
    assert checkpoints(config)[-1].name == "step-00000003"
    train(config, quiet=True)
    assert_close_runs(alone, config)


def test_stopped_on_one_process_and_resumed_on_two(make, alone):
    config = make(parallel="fsdp")
    codes, _ = in_processes(config, 1, kill_at=6, with_signal=signal.SIGKILL)
    assert codes == [-signal.SIGKILL]
    assert in_processes(config, 2) == ([0, 0], [])
    assert_close_runs(alone, config)


def test_an_error_of_one_process_ends_all(make):
    config = make(batch=4, micro_batch=4)
    codes, errors = in_processes(config, 2)
    assert codes == [2, 2]
    assert "batch 4 cannot be divided among 2 processes in micro-batches of 4" in errors[0]
    train(make(out=config.out), quiet=True)
    codes, errors = in_processes(make(out=config.out, optim__lr=1.0), 2)  # found by the first only
    assert codes == [2, 2]
    assert all("optim.lr: 0.01 there, 1.0 here" in error for error in errors)


@pytest.mark.parametrize(
    ("limit", "file", "changes"),
    [
        (20_000, "step-00000004: the checkpoint", {}),
        (3_000, "metrics.jsonl:", {"log__every": 1, "save__every": 0, "steps": 40}),
    ],
    ids=["checkpoint", "metrics"],
)
def test_a_full_disk_ends_all(make, limit, file, changes):
    config = make(parallel="fsdp", **changes)
    codes, errors = in_processes(config, 2, file_limit=limit)
    assert codes == [2, 2]
    assert all(f"{file} cannot be written: File too large" in error for error in errors)
    assert not (Path(config.out) / "checkpoints").exists() or checkpoints(config) == []


def test_a_token_that_one_process_cannot_read_ends_all(make, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    # Shards without a manifest: there is no checksum that would tell before.
    shards = str(tmp_path / "data" / "train-00000")
    config = make(data__path=shards, data__valid="none", batch=2)
    stream = open_split(data).stream
    window = TokenDataset(stream, config.length, config.seed).window_of(1)  # the other has 0
    shard = np.memmap(tmp_path / "data" / "train-00000.bin", np.uint16, "r+")
    shard[window * config.length + 5] = 9999
    shard.flush()
    codes, errors = in_processes(config, 2)
    assert codes == [2, 2]
    assert all("the data has token 9999" in error for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_torchrun(make, alone, kind, tmp_path):
    config = make(parallel=kind)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = ["-m", "spiralformer.cli", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(
        [*torchrun, "--standalone", *command], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert f"2 processes ({kind})" in done.stderr
    assert done.stdout.count("bits per byte") == 1
    assert_close_runs(alone, config)
