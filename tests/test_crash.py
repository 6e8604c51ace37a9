"""kill -9 at any moment, and at every kind of change to a file: the same command goes on, and what
it makes is what it would have made."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spiralformer.train import read_metrics
from spiralformer.train.log import TIMING
from tests.child import kill_at_change, run_command
from tests.test_fuzz import RECIPE, STUDY, warm

TIMES = {"seconds", "tokens_per_second", "flops_per_second", "curve", "machine"}


def bytes_of(folder: Path) -> dict[str, str]:
    """Every file, hidden ones too: nothing is left over."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def timeless(content: Any) -> Any:
    """Without what depends on when it was made."""
    if isinstance(content, dict):
        return {key: timeless(value) for key, value in content.items() if key not in TIMES}
    return [timeless(each) for each in content] if isinstance(content, list) else content


def of_run(folder: Path) -> Any:
    lines = [
        {key: value for key, value in record.items() if key not in TIMING}
        for record in read_metrics(folder / "metrics.jsonl")
    ]
    result = timeless(json.loads((folder / "result.json").read_text()))
    del result["config"]  # it names the folder
    return bytes_of(folder / "model"), lines, result


def of_study(folder: Path) -> Any:
    return timeless(json.loads((folder / "records.json").read_text()))


@dataclass(frozen=True)
class Work:
    """A command that makes `new`, and what of it must be the same."""

    command: list[str]
    compared: Callable[[Path], Any]
    kills: int  # half at changes of files, half at any time


WORK = {
    "data": Work(
        ["data", "text", "--train-bpe", "300", "--valid-fraction", "0.2", "--out", "new"],
        bytes_of,
        12,
    ),
    "train": Work(["train", "recipe.yaml", "out=new"], of_run, 8),
    "export": Work(["export", "model", "new"], bytes_of, 12),
    "study": Work(
        [
            "study",
            "study.yaml",
            "--scale",
            "tiny",
            "--data",
            "D",
            "--cache",
            "cache",
            "--jobs",
            "1",
            "--out",
            "new",
            "--quiet",
        ],
        of_study,
        4,
    ),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """What the commands read."""
    warm()
    folder = tmp_path_factory.mktemp("crash") / "start"
    (folder / "text").mkdir(parents=True)
    words = ["spiral", "loop", "coarse", "fine", "chunk", "token", "state", "core"]
    rng = random.Random(0)
    for k in range(3):
        text = "\n\n".join(" ".join(rng.choices(words, k=12)) for _ in range(60))
        (folder / "text" / f"{k}.txt").write_text(text)
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    (folder / "study.yaml").write_text(json.dumps(STUDY))
    for command in (
        [
            "data",
            "text",
            "--bytes",
            "--split-documents",
            "64",
            "--valid-fraction",
            "0.2",
            "--out",
            "D",
        ],
        ["train", "recipe.yaml", "out=R"],
    ):
        outcome = run_command(command, folder)
        assert outcome.status == 0, outcome
    (folder / "R" / "model").rename(folder / "model")
    shutil.rmtree(folder / "R")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_killed_at_any_time_a_command_goes_on_as_if_it_never_had_been(name, start, tmp_path):
    work, seed = WORK[name], random.randrange(1 << 32)
    print(f"the same kills again: random.Random({seed})")
    rng = random.Random(seed)
    place = tmp_path / "place"

    def again() -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(start, place)

    again()
    whole = run_command(work.command, place, begin=kill_at_change(0, place))
    assert whole.status == 0, whole
    expected, changes = work.compared(place / "new"), whole.out.count("change\n")
    begun = sorted(path.name for path in place.iterdir())

    for kill in range(work.kills):
        again()
        for _ in range(rng.randint(1, 3)):  # what goes on is killed, too
            if kill % 2:
                limits: dict[str, Any] = {"kill_after": rng.uniform(0, 1.2 * whole.wall)}
            else:
                limits = {"begin": kill_at_change(rng.randint(1, changes), place)}
            outcome = run_command(work.command, place, **limits)
            if outcome.status != -9:  # the moment had passed
                break
        if outcome.status == -9 and not (name == "export" and (place / "new").exists()):
            outcome = run_command(work.command, place)  # a whole export is not made again
        assert outcome.status in (0, -9), outcome
        assert work.compared(place / "new") == expected, (kill, limits)
        assert sorted(path.name for path in place.iterdir()) == begun  # no leftovers beside it
