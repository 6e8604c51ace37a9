"""What a newcomer types: any name of a model is understood by every command and in Python."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import spiralformer
from spiralformer import SpiralConfig, SpiralFormer, UserError, decode, model_folder
from spiralformer.data.tokenizer import byte_tokenizer
from spiralformer.model_folder import find_model, save_model
from tests.strategies import build, tokens

ROOT = Path(__file__).parent.parent
CONFIG = SpiralConfig(
    layout="1+1x{1/4,1}+1", hidden_size=16, num_heads=2, vocab_size=257, max_length=64
)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A finished run, one under way, a model that comes with the package, and a text."""
    monkeypatch.chdir(tmp_path)
    folder = save_model(build(CONFIG, dtype=torch.float32), tmp_path / "runs" / "done" / "model")
    byte_tokenizer().save(folder)
    (tmp_path / "runs" / "begun").mkdir()
    for run in ("done", "begun"):
        (tmp_path / "runs" / run / "train.json").write_text("{}")
    monkeypatch.setattr(model_folder, "MODELS", tmp_path / "assets")
    shutil.copytree(folder, tmp_path / "assets" / "spiral-bytes")
    (tmp_path / "text.txt").write_text("the cat sat on a mat\n" * 40)
    return tmp_path


# ---------------------------------------------------------------------------- names of models

NAMES = ("runs/done/model", "runs/done", "spiral-bytes")


def test_a_model_a_run_and_a_packaged_name_are_found(place):
    places = ["runs/done/model", "runs/done/model", place / "assets" / "spiral-bytes"]
    assert [find_model(name) for name in NAMES] == [Path(found) for found in places]
    shutil.copytree("runs/done", "spiral-bytes")  # what lies here goes before what comes with us
    assert find_model("spiral-bytes") == Path("spiral-bytes/model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere: no such folder; models that come with the package: spiral-bytes"),
        ("runs/begun", "not finished and has no model yet; `spiralformer train runs/begun/train"),
        ("runs", "runs: no model folder: it has no config.json"),
        ("../spiral-bytes", "../spiral-bytes: no such folder"),
        ("pythia-nano", "`spiralformer train pythia-nano data.path=DATA out=runs/pythia-nano`"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        "generate {} --prompt x",
        "eval {} --text-file text.txt --out out",
        "probe {} --out out",
        "probe runs/done --compare {} --out out",
        "export {} out",
    ],
)
def test_what_is_no_trained_model_is_refused_by_every_command(
    place, run_command, command, name, message
):
    status, out, err = run_command(*command.format(name).split())
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "command",
    [
        "generate {} --prompt x --max-new-tokens 9",
        "eval {} --text-file text.txt --out out",
        "probe {} --data text.txt --samples 2 --out out",
        "export {} out",
        "count {} --json",
    ],
)
def test_every_command_takes_every_name_of_a_model(place, run_command, command, monkeypatch):
    monkeypatch.setattr("spiralformer.probes.figures.DRAWINGS", [])  # they take a while
    outcomes = []
    for name in NAMES:
        shutil.rmtree("out", ignore_errors=True)
        status, out, err = run_command(*command.format(name).split())
        assert status == 0, err
        outcomes.append(
            re.sub(r"\b(runs/done/model|runs/done|model|done|spiral-bytes)\b", "M", out)
        )
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_device_that_is_not_there_is_one_line_everywhere(place, run_command):
    for command in (
        "generate runs/done --prompt x --device cuda:99",
        "eval runs/done --text-file text.txt --out out --device cuda:99",
        "probe runs/done --out out --device cuda:99",
        "train pythia-nano data.path=text.txt out=out device=cuda:99",
    ):
        status, out, err = run_command(*command.split())
        assert (status, out) == (2, ""), command
        assert len(err.splitlines()) == 1, command
        assert "cuda" in err


def test_count_reads_the_trained_model(place, run_command):
    _, out, _ = run_command("count", "runs/done", "--json", "--set", "max_length=32")
    report = json.loads(out)
    assert SpiralConfig.from_dict(report["config"]) == CONFIG.replace(max_length=32)
    assert run_command("count", "runs/begun")[2].startswith(
        "spiralformer count: error: runs/begun:"
    )
    weights = sum(p.numel() for p in build(CONFIG).parameters())
    assert report["parameters"]["ours"]["total"] == weights


def test_a_reader_that_has_gone_is_no_error():
    command = [sys.executable, "-m", "spiralformer", "count", "--table1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == b""
    assert process.returncode == 141


# ---------------------------------------------------------------------------- in Python


def test_text_goes_in_and_out_as_the_command_has_it(place, run_command):
    settings = {"max_new_tokens": 20, "temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    settings |= {"repetition_penalty": 1.1, "seed": 7}
    model = spiralformer.load("runs/done")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    text = model.generate("né", **settings)
    for stop in ([], [text[7]], [text[9], text[5:7]]):
        stops = [f"--stop={each}" for each in stop]
        _, out, _ = run_command("generate", "runs/done", "--prompt", "né", *options, *stops)
        assert model.generate("né", **settings, stop=stop) == out.removesuffix("\n")
        assert (out.removesuffix("\n") == text) == (not stop)
    _, out, _ = run_command("generate", "runs/done", "--prompt", "né")
    assert model.generate("né") == out.removesuffix("\n")  # the defaults are the same


def test_a_model_saved_and_loaded_is_the_same_model(place):
    model = spiralformer.load("spiral-bytes")
    model.save_pretrained("copy")
    copy = SpiralFormer.from_pretrained("copy")
    ids = tokens(2, 30)
    assert torch.equal(model(ids), copy(ids))
    assert copy.tokenizer.sha256 == model.tokenizer.sha256
    assert type(copy) is SpiralFormer
    assert not copy.training
    fields = json.loads(Path("copy/config.json").read_text())
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (256, 256)
    half = spiralformer.load("copy", dtype=torch.bfloat16)
    assert half.head.weight.dtype == torch.bfloat16
    SpiralFormer(CONFIG).save_pretrained("bare")
    with pytest.raises(UserError, match="the model has no tokenizer"):
        spiralformer.load("bare").generate("x")
    with pytest.raises(UserError, match="device nowhere: cannot be used here"):
        spiralformer.load("copy", device="nowhere")


def test_the_door_shows_what_it_opens_onto_and_opens_late():
    code = "import spiralformer, sys; print(*dir(spiralformer)); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.split() == sorted(spiralformer.__all__) == dir(spiralformer)
    assert all(getattr(spiralformer, name) for name in dir(spiralformer))
    with pytest.raises(AttributeError, match="no attribute 'SpiralFormr'"):
        spiralformer.SpiralFormr  # noqa: B018


PUBLIC = [
    spiralformer.load,
    SpiralFormer,
    SpiralFormer.from_pretrained,
    SpiralFormer.save_pretrained,
    SpiralFormer.forward,
    SpiralFormer.generate,
    decode.generate,
    decode.stream,
]


@pytest.mark.parametrize("door", PUBLIC, ids=lambda door: door.__qualname__)
def test_signatures_are_spelled_out_and_documented(door):
    parameters = inspect.signature(door).parameters.values()
    assert not [p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert all(p.annotation is not p.empty for p in parameters if p.name != "self")
    assert door.__doc__


def test_a_notebook_shows_the_layout_of_a_model():
    for layout in ("1+1x{1/4,1/2,1}+1", "3"):
        picture = SpiralFormer(CONFIG.replace(layout=layout))._repr_svg_()
        assert ElementTree.fromstring(picture).tag.endswith("svg")


@pytest.mark.slow
def test_the_tutorial_notebook_runs_from_text_to_probe(tmp_path, monkeypatch):
    """Its cells, one after the other; what a cell ends with is what a notebook would show."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))
    scope: dict = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"])).body
            last = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), "tutorial", "exec"), scope)
            if last is not None:
                shown.append(eval(compile(ast.Expression(last.value), "tutorial", "eval"), scope))
    assert "<svg" in next(each for each in shown if hasattr(each, "_repr_svg_"))._repr_svg_()
    assert scope["result"].record["valid"]["bits_per_byte"] < 4  # of 8; before training, 8 and more
    assert shown[-1] == 0  # the probe's status
    assert (tmp_path / "runs" / "tutorial" / "probe" / "report.html").is_file()
