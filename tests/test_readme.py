"""The documents' commands, code, files and pictures are real."""

import contextlib
import gzip
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spiralformer.cli import main, parse

ROOT = Path(__file__).parent.parent
READ = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]  # their blocks are run
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
README = READ[0].read_text(encoding="utf-8")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(document: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    text = document.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    """The lines after a prompt, continued ones joined."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


# What changes the environment or needs vLLM, which this one does not have.
NOT_RUN = {"vllm.md", "server.md"}  # a server runs until it is stopped; their commands are parsed
ELSEWHERE = ("pip ", "python -m vllm", "lm_eval ", "… ")
COMMANDS = [
    (named(document), command)
    for document in READ
    for language, block in blocks(document)
    if language == "console"
    for command in commands(block)
]
SHOWN = {"text", "graph", "bibtex"}  # blocks that are no code


def test_every_block_says_what_it_is():
    languages = {language for document in READ for language, _ in blocks(document)}
    assert languages <= {"console", "bash", "python", *SHOWN}
    assert ("README.md", "make run") in COMMANDS
    assert len(COMMANDS) > 25


@pytest.mark.parametrize(
    "command", sorted({line for _, line in COMMANDS if not line.startswith(ELSEWHERE)})
)
def test_a_command_is_understood(command):
    for line in recipe(command):
        words = shlex.split(line, comments=True)
        if words[0] == "torchrun":
            words = words[words.index("-m") + 1 :]
        assert words[0] == "spiralformer"
        assert callable(parse(words[1:]).run)


def recipe(command: str) -> list[str]:
    """The commands that a make target runs, beside its set-up; or the command itself."""
    if not command.startswith("make "):
        return [command]
    told = subprocess.run(
        ["make", "-n", *shlex.split(command)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    script = told.stdout.replace("\\\n", " ").replace('"$(head -n 1 runs/sample.py)"', "def")
    lines = [line for line in script.splitlines() if not re.match(r"\s*(echo|printf|sed) ", line)]
    ours = re.findall(r"(?:^|\s)\.venv/bin/(spiralformer [^>&;|\n]*)", "\n".join(lines))
    assert ours, told.stdout
    return [command.strip() for command in ours]


# ---------------------------------------------------------------------------- run

# The same commands at a small scale: of two values of an option the last one counts.
LESS = {
    "data my": "--train-bpe 300",
    "train": "model.hidden_size=32 model.num_heads=2 steps=2 batch=2 micro_batch=1 length=64 "
    "precision=float32 valid.tokens=128 sample.tokens=4",
    "generate": "--max-new-tokens 4",
    "probe": "--samples 2 --length 48",
    "eval": "--limit 2 --batch-size 2",
    "study main": "--scale tiny --seeds 1 --only baseline$|spiral-b-mesh",
    "bench": "--scale nano --repeats 1 --tokens 2 --context 0 --length 16 --prompt 16 "
    "--lengths 16 32 --dtypes float32 --runners eager",
}
# What stands for machines, their names and their folders.
PLACES = {
    "data stdlib": "data my-corpus",
    "/data/pile": "runs/corpus",
    "/shared/": "",
    "--nnodes 4": "--nnodes 1",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "node0:29500": "localhost:PORT",
    "$head:29500": "localhost:PORT",
}
CLUSTER = {"scontrol": "echo localhost", "srun": 'exec "$@"'}


def test_what_is_made_smaller_is_there():
    text = "".join(path.read_text(encoding="utf-8") for path in (*READ, ROOT / "Makefile"))
    assert [place for place in PLACES if place not in text] == []
    assert [command for command in LESS if f"spiralformer {command}" not in text] == []


class Reader:
    """Does what a document says, block after block, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scope = folder, {}
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "SLURM_NNODES": "1",
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "localhost",
        }

    def follow(self, language: str, block: str) -> None:
        if language == "python":
            exec(block, self.scope)
        elif language == "bash":
            self.start(block)
        elif language == "console":
            for command in commands(block):
                for line in recipe(command) if not command.startswith(ELSEWHERE) else ():
                    self.run(line)

    def run(self, command: str) -> None:
        command = self.smaller(command)
        words = shlex.split(command, comments=True)
        if words[0] == "spiralformer":
            assert main(words[1:]) == 0, command
        else:
            self.start(command)
        for out in re.findall(r"\bout[= ](\S+)", command):
            assert Path(out).exists(), command

    def start(self, script: str) -> None:
        done = subprocess.run(
            ["bash", "-e", "-c", self.smaller(script)],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"

    def smaller(self, script: str) -> str:
        for place, stand_in in PLACES.items():
            script = script.replace(place, stand_in)
        if "PORT" in script:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                script = script.replace("PORT", str(free.getsockname()[1]))
        script = re.sub(r"\s#.*", "", script).rstrip()
        for command, less in LESS.items():
            if f"spiralformer {command}" in script:
                script += f" {' '.join(map(shlex.quote, less.split()))}"
        return script


@pytest.fixture
def reader(tmp_path, monkeypatch) -> Reader:
    """With everything that the documents take for granted."""
    from tests.test_evaluate import write_data  # takes seconds

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")  # slow
    for folder in ("my-corpus", "my-texts"):
        (tmp_path / folder).mkdir()
        for k, path in enumerate(sorted((ROOT / "spiralformer").rglob("*.py"))):
            shutil.copy(path, Path(folder) / f"{k}.py")
    text = READ[0].read_text(encoding="utf-8")
    (tmp_path / "held-out.txt").write_text(text, encoding="utf-8")
    with gzip.open("enwik8.gz", "wb") as file:
        file.write(40 * text.encode())
    (tmp_path / "DATA").mkdir()
    write_data(tmp_path / "DATA")
    (tmp_path / "bin").mkdir()
    for name, script in CLUSTER.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return Reader(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [path for path in READ if {k for k, _ in blocks(path)} - SHOWN and path.name not in NOT_RUN],
    ids=named,
)
def test_what_a_document_says_can_be_done(reader, document):
    if document.name == "distributed.md":  # it begins with data that are there
        reader.run(
            "spiralformer data my-corpus/ --train-bpe 300 --valid-fraction 0.1 --out runs/corpus"
        )
    with contextlib.chdir(reader.folder):
        for language, block in blocks(document):
            reader.follow(language, block)
    if document == READ[0]:
        assert reader.scope["logits"].shape == (2, 513, 4096)


# ---------------------------------------------------------------------------- named


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_the_files_that_a_document_names_exist(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (document.parent / target).exists(), target
    for name in re.findall(r"`([\w/]+\.(?:py|cpp))`", text):
        folders = (ROOT, ROOT / "spiralformer")
        assert any((folder / name).exists() for folder in folders), name


def test_make_targets_of_the_documents_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        for target in re.findall(r"(?:`|\$ )make ([\w-]+)", document.read_text(encoding="utf-8")):
            assert target in targets


def test_the_picture_of_the_architecture_is_what_the_command_draws(run_command):
    layout = re.search(r"!\[The layout (\S+):.*\]\(docs/architecture.svg\)", README)[1]
    drawn = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    remedy = f'spiralformer diagram "{layout}" --out docs/architecture.svg'
    assert run_command("diagram", layout)[1] == drawn, remedy


def test_an_unknown_command_ends_with_status_2(run_command):
    status, _, errors = run_command("trian")
    assert status == 2
    assert "train" in errors
