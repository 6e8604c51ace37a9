"""The README's commands and code are real."""

import re
import shlex
from pathlib import Path

import pytest

from spiralformer.cli import main, parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
SPIRALFORMER = [c for c in COMMANDS if c.startswith("spiralformer ")]


def test_the_readme_has_commands():
    assert "make run" in COMMANDS
    assert len(SPIRALFORMER) >= 7


@pytest.mark.parametrize("command", SPIRALFORMER)
def test_a_command_of_the_readme_is_understood(command):
    args = parse(shlex.split(command, comments=True)[1:])
    assert callable(args.run)


def test_the_python_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope: dict = {}
    exec(blocks[0], scope)  # the others need a trained folder
    assert scope["logits"].shape == (2, 513, 4096)
    assert [len(row) for row in scope["new"]] == [20, 20]


def test_the_files_that_the_readme_points_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([\w-]+)`", README):
        assert target in targets


def test_an_unknown_command_ends_with_status_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["trian"])
    assert stop.value.code == 2
    assert "train" in capsys.readouterr().err
