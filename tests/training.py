"""Tiny runs for the tests of the trainer, in this process and in others."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import socket
import sys
from pathlib import Path

import torch

from spiralformer.data.prepare import Recipe, prepare
from spiralformer.data.sources import find_sources
from spiralformer.errors import UserError
from spiralformer.model_folder import load_model
from spiralformer.train import Interrupted, TrainConfig, read_metrics, train
from spiralformer.train.log import TIMING

MODEL = {
    "layout": "1+1x{1/4,1/2,1}+1",
    "hidden_size": 16,
    "num_heads": 2,
    "vocab_size": 264,
    "max_length": 32,
    "rotary_fraction": 0.5,
}
SMALL = {
    "model": MODEL,
    "batch": 4,
    "micro_batch": 2,
    "steps": 12,
    "precision": "float32",
    "optim": {"lr": 1e-2},
    "valid": {"every": 5, "tokens": 128},
    "save": {"every": 4, "minutes": 0},
    "sample": {"tokens": 0},
    "log": {"every": 3, "tensorboard": False},
}


def write_text(path: Path, documents: int = 40) -> Path:
    rng = random.Random(0)
    words = ["spiral", "loop", "coarse", "fine", "chunk", "token", "state", "core"]
    with open(path, "w") as file:
        for _ in range(documents):
            text = " ".join(rng.choice(words) for _ in range(rng.randint(5, 20)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def make_data(folder: Path, documents: int = 40) -> Path:
    """A folder of byte tokens, with a last window that is not full."""
    source = write_text(folder / "text.jsonl", documents)
    prepare(find_sources([str(source)]), folder / "bytes", Recipe(bytes=True, valid_fraction=0.2))
    return folder / "bytes"


def tiny(data: Path, out: Path, /, **changes) -> TrainConfig:
    """A run of a second."""
    config = TrainConfig.from_dict({**SMALL, "data": {"path": str(data)}, "out": str(out)})
    return config.override({name.replace("__", "."): value for name, value in changes.items()})


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.training"])


def in_processes(config: TrainConfig, world: int = 1, **orders) -> tuple[list[int], list[str]]:
    """Runs `train` in processes of their own; gives their exit codes and what they ended with.

    `orders`: kill_at and with_signal (each sends itself this signal at the first record of that
    step), file_limit (bytes of the largest file that they can write)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = FORKS.SimpleQueue()
    processes = [
        FORKS.Process(target=_train, args=(told, config.to_dict(), rank, world, port, orders))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode is not None
    codes = [process.exitcode for process in processes]
    return codes, [told.get() for code in codes if code == 2]


def in_process(config: TrainConfig, **orders) -> tuple[int, str | None]:
    """The same for one process."""
    (code,), errors = in_processes(config, **orders)
    return code, errors[0] if errors else None


def _train(told, fields: dict, rank: int, world: int, port: int, orders: dict) -> None:
    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if limit := orders.get("file_limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    def watch(record):
        if record["step"] == orders.get("kill_at"):
            os.kill(os.getpid(), orders["with_signal"])

    try:
        train(TrainConfig.from_dict(fields), quiet=True, watch=watch)
    except Interrupted as stop:
        os._exit(128 + stop.signal)
    except UserError as error:
        told.put(str(error))
        sys.exit(2)


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_model(Path(folder) / "model").state_dict()


def assert_close_weights(one: str | Path, other: str | Path, rtol: float, atol: float) -> None:
    """But for the bias of the keys: attention does not change with it, so its gradient is nothing
    but rounding, which Adam makes as large as any other."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        pair = first[name], second[name]
        if name.endswith("qkv.bias"):
            pair = tuple(torch.cat((b.chunk(3)[0], b.chunk(3)[2])) for b in pair)
        torch.testing.assert_close(*pair, rtol=rtol, atol=atol)


def repeatable(folder: str | Path) -> list[dict]:
    """The metrics of a run without what depends on the clock."""
    records = read_metrics(Path(folder) / "metrics.jsonl")
    return [{k: v for k, v in record.items() if k not in TIMING} for record in records]


def assert_same_run(one: str | Path, other: str | Path) -> None:
    """Bit by bit."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert repeatable(one) == repeatable(other)


def checkpoints(config: TrainConfig) -> list[Path]:
    return sorted((Path(config.out) / "checkpoints").iterdir())
