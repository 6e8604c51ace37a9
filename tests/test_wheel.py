"""The wheel has all that the commands need: installed alone, far from the checkout, they run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spiralformer.cli import COMMANDS

ROOT = Path(__file__).parent.parent
# What is not Python, by the end of its name.
DATA = {"py.typed", ".yaml", ".csv", ".html", ".svg", ".js", ".cpp", ".json", ".safetensors"}
MODEL = "spiralformer/assets/models/planted/config.json"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the checkout and nothing old gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "spiralformer", copy / "spiralformer", ignore=caches)
    (copy / MODEL).parent.mkdir(parents=True)
    (copy / MODEL).write_text("{}")  # a model that comes with the package
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, copy)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def spiralformer(wheel):
    """Runs the installed command in a folder of its own; gives what it printed."""
    folder = wheel.parent / "elsewhere"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", wheel.parent / "env"], check=True)
    bin = wheel.parent / "env" / ("Scripts" if os.name == "nt" else "bin")
    pip(bin / "python", "install", "-c", ROOT / "constraints.txt", f"{wheel}[eval]")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def run(*arguments: str) -> str:
        command = [bin / "spiralformer", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        print(f"$ spiralformer {' '.join(arguments)}\n{done.stdout}")
        return done.stdout

    run.folder = folder
    return run


def pip(python, *arguments) -> None:
    subprocess.run([python, "-m", "pip", "--quiet", *arguments], check=True)


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "spiralformer").rglob("*")
        if path.name.endswith((".py", *DATA))
    }
    assert here | {MODEL} <= set(zipfile.ZipFile(wheel).namelist())


def test_every_command_runs_from_the_wheel(spiralformer):
    for command in COMMANDS:
        assert "usage" in spiralformer(command, "--help")
    assert "66/66" in spiralformer("count", "--table1")
    for recipe in ("stdlib", "nano", "spiral-b-160m-mesh.yaml"):
        assert "model" in spiralformer("train", recipe, "--show")

    text = [{"text": f"def double_{n}(x):\n    return {n} * x + {n + 1}\n" * 8} for n in range(200)]
    corpus = spiralformer.folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(line) + "\n" for line in text))
    split = ("--valid-fraction", "0.2")
    spiralformer("data", "corpus.jsonl", "--train-bpe", "300", *split, "--out", "data")
    spiralformer("data", "--verify", "data")
    spiralformer(
        *("train", "spiral-b-nano-mesh", "data.path=data", "out=run", "model.hidden_size=32"),
        *("steps=2", "batch=2", "length=64", "sample.tokens=4", "valid.tokens=512"),
    )
    generated = spiralformer("generate", "run/model", "--prompt", "def ", "--max-new-tokens", "4")
    assert generated.startswith("def ")
    spiralformer("eval", "run/model", "--text-file", "corpus.jsonl", "--limit", "4")
    probe = ("--data", "corpus.jsonl", "--samples", "2", "--length", "64", "--out", "probe")
    spiralformer("probe", "run/model", *probe)
    assert list((spiralformer.folder / "probe").glob("*.html"))
    rows = ("--only", "^(baseline|spiral-b-mesh)$", "--seeds", "1", "--budget", "1k")
    spiralformer("study", "main", "--scale", "tiny", *rows, "--out", "study")
    assert list((spiralformer.folder / "study").glob("*.html"))
    spiralformer("export", "run/model", "exported")
    nano = ("--scale", "nano", "--length", "16", "--repeats", "1", "--dtypes", "float32")
    assert "hf gpt-neox" in spiralformer("bench", "train", *nano, "--out", "bench")
