"""Whatever a file or a flag holds: success, or one line and status 2, soon and in little memory,
and nothing that was there is changed.

`python -m tests.test_fuzz 20` tries new cases for so many minutes and says what came of them; with
names of targets after the number, cases of those."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from spiralformer.cli import COMMANDS
from spiralformer.files import LARGEST
from tests.child import Outcome, run_command

SECONDS = 20  # of the processor, on any machine
MEMORY = 1 << 30
WALL = 300

# ---------------------------------------------------------------------------- what is tried

DATA = ["data", "text", "--bytes", "--valid-fraction", "0.2"]
PROBE = ["probe", "R/model", "--data", "text/b.txt", "--samples", "2", "--length", "16"]
NANO = ["--scale", "nano", "--repeats", "1", "--dtypes", "float32", "--prompt", "8"]


@dataclass(frozen=True)
class Target:
    """A command that reads files, those that are damaged, and the folders it may change."""

    command: list[str]
    files: str
    writes: str = "new"


TARGETS = {
    "text": Target([*DATA, "--out", "new"], "text/*"),
    "data finished": Target([*DATA, "--out", "D"], "D/*", "D"),
    "data unfinished": Target([*DATA, "--out", "P"], "P.partial/*", "P"),
    "data tokenizer": Target(
        ["data", "text/b.txt", "--tokenizer", "R/model", "--out", "new"], "R/model/tokenizer*"
    ),
    "data verified": Target(["data", "--verify", "D"], "D/*", ""),
    "recipe": Target(["train", "recipe.yaml", "--show"], "recipe.yaml", ""),
    "train": Target(["train", "recipe.yaml", "steps=1", "out=new"], "D/*"),
    "train unfinished": Target(["train", "recipe.yaml", "out=U"], "U/**/*", "U"),
    "train finished": Target(["train", "recipe.yaml", "out=R"], "R/*", "R"),
    "generate": Target(
        [
            "generate",
            "R/model",
            "--prompt",
            "a",
            "--max-new-tokens",
            "3",
            "--prompt-file",
            "prompt",
        ],
        "{R/model/*,prompt}",
    ),
    "probe": Target([*PROBE, "--out", "new"], "{R/model/*,text/b.txt}"),
    "probe redrawn": Target(["probe", "--redraw", "N"], "N/numbers.json", "N"),
    "export": Target(["export", "R/model", "new"], "R/model/*"),
    "import": Target(["import", "X", "new"], "X/*"),
    "count": Target(["count", "config.json"], "config.json", ""),
    "study": Target(
        ["study", "study.yaml", "--scale", "tiny", "--data", "D", "--cache", "C", "--dry-run"],
        "{study.yaml,D/*}",
        "C",
    ),
    "compare": Target(["study", "compare", "R", "R2", "--out", "new"], "R/*"),
    "study redrawn": Target(["study", "compare", "--redraw", "--out", "S"], "S/records.json", "S"),
    "bench": Target(["bench", "prefill", *NANO, "--out", "B"], "B/*.json", "B"),
}

# Base commands whose flags are changed, one or two at a time.
FLAGS = {
    "data": [*DATA, "--out", "new"],
    "train": ["train", "recipe.yaml", "steps=1", "out=new"],
    "generate": ["generate", "R/model", "--prompt", "a", "--max-new-tokens", "3"],
    "probe": [*PROBE, "--out", "new"],
    "study": ["study", "study.yaml", "--scale", "tiny", "--data", "D", "--cache", "new"],
    "count": ["count", "spiral-b-nano-mesh"],
    "bench": ["bench", "prefill", *NANO, "--out", "new"],
    "import": ["import", "X", "new"],
    "export": ["export", "R/model", "new"],
}
ALWAYS = {"study": ["--dry-run"]}
LEFT_OUT = {"--help", "--version", "--compile", "--runner", "--jobs", "--threads"}
# A great number of these is a long time, and a right one.
LONG = {"--repeats", "--tokens", "--length", "--prompt", "--context", "--lengths", "--seeds"}
STEPS = {"steps", "tokens", "epochs", "compile"}

ABSURD = ["-1", "0", "1e9", "abc", "", " ", "9" * 25, "9" * 5000, "nan", "inf", "1e400", "-0.0"]
LARGE = ["1000000007", "1000000000000", str(2**62), "1e30"]
NAMES = [
    "x" * 5000,
    "a/" * 3000,
    "../x",
    "/dev/zero",
    "/dev/null",
    "fifo",
    "loop",
    "\udcff",
    "{}",
    "~",
]
TEXTS = ["(a+)+$", "[", "\x1b[2J", "'", "%s%n", "a=b=c", "☃" * 100, "null", "[[[[", "1,2,3", "true"]


def train_settings() -> st.SearchStrategy[str]:
    from spiralformer.train.config import FIELDS

    fields = ["model.hidden_size", "model.layout", "model.vocab_size", "model.max_length"]
    fields += ["model.shift", "model.norm_eps", "model.x", *FIELDS]
    layouts = [
        "1+1x{" + ",".join(["1/2"] * 1000) + "}+1",
        "1+" * 999 + "1",
        "9" * 4000,
        "1+1x{1/0}+1",
    ]
    return st.builds(
        lambda field, value: f"{field}={value}",
        st.sampled_from([field for field in fields if field not in STEPS]),
        st.sampled_from([*ABSURD, *LARGE, *NAMES, *TEXTS, *layouts, "cuda", "meta", "mps"]),
    )


def flag_cases() -> st.SearchStrategy[Case]:
    choices = []
    for command, base in FLAGS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(f"spiralformer.commands.{command}").add_arguments(parser)
        for action in parser._actions:
            flags = [flag for flag in action.option_strings if flag not in LEFT_OUT]
            if not flags or len(flags) < len(action.option_strings) or action.nargs == 0:
                continue
            values = [*ABSURD, *NAMES, *TEXTS, "cuda", "meta"]
            if flags[0] not in LONG:
                values += LARGE
            extra = st.sampled_from(values).map(lambda value, flag=flags[0]: [flag, value])
            choices.append(extra.map(lambda extra, base=base: [*base, *extra]))
        if command == "train":
            settings = st.lists(train_settings(), min_size=1, max_size=2)
            choices += 10 * [settings.map(lambda extra, base=base: [*base, *extra])]
    arguments = st.one_of(choices)
    return arguments.map(lambda command: Case([*command, *ALWAYS.get(command[0], [])]))


# ---------------------------------------------------------------------------- damage

DEEP = "[" * 200 + "]" * 200
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2, 7, 10**9, 10**18, 2**63, 10**30, 1.5, -0.5, 1e308, 1e-300),
    *(float("nan"), float("inf"), "", "x", "../../x", "/etc/passwd", "\0", "x" * 100_000, "1e400"),
    *([], {}, [1], ["x"], {"x": 1}, [[]], [None], json.loads(DEEP), list(range(3000))),
]
WHOLE = [
    *(b"", b"\xff\xfe\x00", b"\xef\xbb\xbf{}", b"null", b"[]", b"{}", b'"x"', b"0", b"NaN"),
    *(b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6000, b'{"a":' + b"9" * 6000 + b"}", b"\0" * 4096),
    *(b'{"text": "' + b"a" * 1_000_000 + b'"}', b"- " * 20_000, b"a: &a [*a]\n"),
    b"a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 10)) for c in b"bcdefghi"),
    b"a: &a {x: 1}\n"
    + b"".join(
        b"%c: &%c {<<: [%s]}\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 10)) for c in b"bcdefghi"
    ),
]
KINDS = ["missing", "folder", "fifo", "loop", "device", "huge"]


@dataclass(frozen=True)
class Damage:
    """To one of the files that a target reads."""

    file: int
    how: str  # json, drop, whole, cut, flip, zero, insert, or one of KINDS
    place: int = 0
    value: Any = None

    def apply(self, files: list[Path]) -> None:
        path = files[self.file % len(files)]
        content = path.read_bytes()
        if self.how in ("json", "drop"):
            try:
                parsed = json.loads(content)
            except ValueError:
                lines = content.splitlines() or [b""]
                parsed = lines[self.place % len(lines)].decode(errors="replace")
            places = list(_places(parsed))
            if not places:
                path.write_bytes(json.dumps(self.value).encode())
                return
            holder, key = places[self.place % len(places)]
            if self.how == "drop":
                del holder[key]
            else:
                holder[key] = self.value
            path.write_bytes(json.dumps(parsed).encode())
            return
        at = self.place % (len(content) + 1)
        if self.how == "whole":
            path.write_bytes(self.value)
        elif self.how == "cut":
            path.write_bytes(content[:at])
        elif self.how == "flip":
            path.write_bytes(
                content[:at]
                + bytes([255 - byte for byte in content[at : at + 1]])
                + content[at + 1 :]
            )
        elif self.how == "zero":
            path.write_bytes(content[:at] + bytes(len(content[at : at + 64])) + content[at + 64 :])
        elif self.how == "insert":
            path.write_bytes(content[:at] + self.value + content[at:])
        elif self.how == "huge":
            os.truncate(path, LARGEST + 1)  # of zeros
        else:
            path.unlink()
            if self.how == "folder":
                path.mkdir()
            elif self.how == "fifo":
                os.mkfifo(path)
            elif self.how == "loop":
                path.symlink_to(path.name)
            elif self.how == "device":
                path.symlink_to("/dev/zero")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in a value: what holds it, and where."""
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in entries:
        yield value, key
        yield from _places(inner)


def damages() -> st.SearchStrategy[Damage]:
    number = st.integers(0, 1 << 16)
    rules = [
        *4 * [st.builds(Damage, number, st.just("json"), number, st.sampled_from(VALUES))],
        *2 * [st.builds(Damage, number, st.just("drop"), number)],
        st.builds(Damage, number, st.just("whole"), value=st.sampled_from(WHOLE)),
        st.builds(Damage, number, st.sampled_from(["cut", "flip", "zero"]), number),
        st.builds(Damage, number, st.just("insert"), number, st.binary(min_size=1, max_size=8)),
        st.builds(Damage, number, st.sampled_from(KINDS)),
    ]
    return st.one_of(rules)


@dataclass(frozen=True)
class Case:
    command: list[str]
    target: str = ""
    damage: Damage | None = None

    @property
    def kind(self) -> str:
        return self.target or f"flags of {self.command[0]}"


def file_cases(names: list[str]) -> st.SearchStrategy[Case]:
    return st.builds(
        lambda name, damage: Case(TARGETS[name].command, name, damage),
        st.sampled_from(names),
        damages(),
    )


# ---------------------------------------------------------------------------- the world

MODEL = {
    "layout": "1+1x{1/4,1/2,1}+1",
    "hidden_size": 16,
    "num_heads": 2,
    "vocab_size": 264,
    "max_length": 32,
    "rotary_fraction": 0.5,
}
RECIPE = {
    "model": MODEL,
    "data": {"path": "D"},
    "batch": 4,
    "steps": 6,
    "precision": "float32",
    "save": {"every": 2, "minutes": 0},
    "sample": {"tokens": 4},
    "log": {"every": 1, "tensorboard": False},
}
STUDY = {
    "title": "a study",
    "rows": ["baseline", {"family": "spiral-b-mesh", "set": {"shift": "parallel"}}],
    "claims": [{"says": "x", "source": "y", "less": ["baseline", "spiral-b-mesh"]}],
}


def make_world(folder: Path) -> Path:
    """Small files of every kind that a command reads, written by the commands themselves."""
    text = folder / "text"
    text.mkdir(parents=True)
    words = ["spiral", "loop", "coarse", "fine", "chunk", "token", "state", "core"]
    sentences = [" ".join(words[(i * k) % 8] for k in range(1, 12)) for i in range(40)]
    (text / "a.jsonl").write_text("".join(json.dumps({"text": s}) + "\n" for s in sentences))
    (text / "b.txt").write_text("\n\n".join(sentences))
    (text / "c.json").write_text(json.dumps([{"text": s} for s in sentences[:5]]))
    (text / "d.txt.gz").write_bytes(gzip.compress("\n".join(sentences).encode()))
    (folder / "prompt").write_text("a spiral")
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    (folder / "study.yaml").write_text(json.dumps(STUDY))
    (folder / "config.json").write_text(json.dumps(MODEL))
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")

    def run(*arguments: str, **options: Any) -> Outcome:
        outcome = run_command(list(arguments), folder, **options)
        assert outcome.status in (0, -9), outcome
        return outcome

    run(*DATA, "--out", "D")
    run(*DATA, "--out", "P", begin=_before_rename(folder / "P.partial"))
    run("train", "recipe.yaml", "out=R")
    run("train", "recipe.yaml", "out=R2", "seed=1")
    run(
        "train",
        "recipe.yaml",
        "out=U",
        begin=_before_rename(folder / "U/checkpoints/.step-00000006.part"),
    )
    run("study", "compare", "R", "R2", "--out", "S")
    run(*PROBE, "--out", "N")
    run("bench", "prefill", *NANO, "--out", "B")
    _write_neox(folder / "X")
    assert (folder / "P.partial/progress.json").exists()
    assert (folder / "U/checkpoints/step-00000004").exists()
    return folder


def _before_rename(path: Path):
    """In the child: killed before this is renamed."""
    import signal

    def begin() -> None:
        def hook(event: str, details: tuple) -> None:
            if event == "os.rename" and os.path.abspath(os.fsdecode(details[0])) == str(path):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)

    return begin


def _write_neox(folder: Path) -> None:
    import torch

    from spiralformer import SpiralConfig, SpiralFormer
    from spiralformer.hf import neox

    torch.manual_seed(0)
    config = {**MODEL, "layout": "2", "norm": "layernorm", "scale_embeddings": False}
    neox.to_gpt_neox(SpiralFormer(SpiralConfig(**config)), folder)


def files_of(world: Path, pattern: str) -> list[Path]:
    patterns = pattern.strip("{}").split(",")
    chosen = [path for each in patterns for path in sorted(world.glob(each))]
    return [path for path in chosen if path.is_file() and path.name != "lock"]


def snapshot(world: Path) -> dict[str, str]:
    """What every file holds. Locks say who holds them, and are made anew."""
    found = {}
    for path in world.rglob("*"):
        if path.name in ("lock", ".lock"):
            continue
        if path.is_symlink():
            found[str(path.relative_to(world))] = os.readlink(path)
        elif path.is_file() and path.stat().st_size < 1 << 24:
            found[str(path.relative_to(world))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


# ---------------------------------------------------------------------------- the law


def attempt(case: Case, world: Path) -> tuple[Outcome, list[str]]:
    """What came of a case, and what is wrong with that."""
    with tempfile.TemporaryDirectory(dir=world.parent) as temporary:
        copy = Path(temporary) / "world"
        shutil.copytree(world, copy, symlinks=True, ignore=lambda *_: ["fifo"])
        os.mkfifo(copy / "fifo")
        if case.damage:
            case.damage.apply(files_of(copy, TARGETS[case.target].files))
        before = snapshot(copy)
        outcome = run_command(case.command, copy, seconds=SECONDS, memory=2 * MEMORY, patience=WALL)
        after = snapshot(copy)
    wrong = []
    if outcome.status not in (0, 2):
        wrong.append(f"status {outcome.status}")
    if "Traceback" in outcome.err:
        wrong.append("a traceback")
    if outcome.status == 2 and len(outcome.error_lines) != 1:
        wrong.append(f"{len(outcome.error_lines)} lines of error")
    if any(len(line) > 12_000 for line in outcome.err.splitlines()):
        wrong.append("a line without end")
    if outcome.memory > MEMORY:
        wrong.append(f"{outcome.memory / 1e9:.1f} GB of memory")
    writes = TARGETS[case.target].writes if case.target else "new"
    allowed = (writes,) if outcome.status == 0 and writes else ()
    for name, content in before.items():
        if after.get(name) != content and not name.startswith(allowed or "/"):
            wrong.append(f"{name} was changed")
    return outcome, wrong


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    warm()
    return make_world(tmp_path_factory.mktemp("fuzz") / "world")


def warm() -> None:
    """What children would else import, each again."""
    for name in COMMANDS:
        importlib.import_module(f"spiralformer.commands.{name}")
    for name in (
        *("bench.cases", "bench.report", "data.prepare", "decode.generate", "decode.native"),
        *("hf.export", "hf.neox", "probes.page", "probes.measure", "study.page", "study.compare"),
        *("train.loop", "train.log", "study.run"),
    ):
        importlib.import_module(f"spiralformer.{name}")
    importlib.import_module("matplotlib.backends.backend_agg")
    importlib.import_module("transformers.models.gpt_neox.modeling_gpt_neox")


LIMITS = settings(
    max_examples=90, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


@pytest.mark.slow
@LIMITS
@given(case=file_cases(list(TARGETS)))
def test_a_damaged_file_is_one_line_and_nothing_else_changes(world, case):
    outcome, wrong = attempt(case, world)
    assert not wrong, outcome


@pytest.mark.slow
@LIMITS
@given(case=flag_cases())
def test_a_bad_flag_is_one_line_and_nothing_else_changes(world, case):
    outcome, wrong = attempt(case, world)
    assert not wrong, outcome


# ---------------------------------------------------------------------------- a survey


def survey(minutes: float, only: list[str]) -> None:
    tally: dict[str, Counter[str]] = {}
    faults: dict[str, list[str]] = {}
    longest: list[tuple[float, str]] = []
    largest: list[tuple[int, str]] = []
    names = [name for name in TARGETS if not only or name in only]
    files, flags = file_cases(names), flag_cases()
    cases = files if only else st.booleans().flatmap(lambda file: files if file else flags)
    warm()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        world = make_world(Path(temporary) / "world")
        print(f"the world is made after {time.monotonic() - begun:.0f} s", flush=True)

        @settings(
            max_examples=100_000,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def one(case: Case) -> None:
            if time.monotonic() > begun + 60 * minutes:
                return
            outcome, wrong = attempt(case, world)
            tally.setdefault(case.kind, Counter())[f"status {outcome.status}"] += 1
            longest.append((outcome.seconds, case.kind))
            largest.append((outcome.memory, case.kind))
            if wrong:
                last = (outcome.err.strip().splitlines() or [""])[-1][:200]
                key = f"{case.kind}: {last}"
                if key not in faults:
                    print(f"FAULT {wrong} {str(case)[:600]}\n{outcome.err[-1500:]}\n", flush=True)
                faults.setdefault(key, []).append(str(case))

        one()
    for kind, outcomes in sorted(tally.items()):
        print(f"{kind:22} {dict(outcomes)}")
    print(
        f"{sum(sum(c.values()) for c in tally.values())} cases in {time.monotonic() - begun:.0f} s"
    )
    print("longest", [(round(s, 1), kind) for s, kind in sorted(longest)[-3:]])
    print("largest", [(f"{m / 1e6:.0f} MB", kind) for m, kind in sorted(largest)[-3:]])
    print(f"{sum(map(len, faults.values()))} faults of {len(faults)} kinds")


if __name__ == "__main__":
    survey(float(sys.argv[1]), sys.argv[2:])
