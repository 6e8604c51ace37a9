"""Attacks that must fail, and damage that must be seen."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from html import unescape
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file
from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.utils.tensorboard import SummaryWriter

from spiralformer import console
from spiralformer.bench import report
from spiralformer.bench.timing import Measurement
from spiralformer.data.windows import open_split
from spiralformer.errors import UserError
from spiralformer.evaluate.run import Evaluation, Options
from spiralformer.evaluate.tables import render
from spiralformer.files import digest
from spiralformer.model_folder import load_model, save_model
from spiralformer.study import page
from spiralformer.study.records import Records
from spiralformer.train import log, loop
from tests.training import assert_same_run, in_process, make_data, repeatable, tiny, train

FIXTURES = Path(__file__).parent / "fixtures"


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
    described = {
        p.name: {"size": p.stat().st_size, "sha256": digest(p) if p.is_file() else ""}
        for p in files
    }
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


def plant_a_pipe(checkpoint: Path, canary: Path) -> None:
    """Who reads it waits for ever."""
    (checkpoint / "__0_0.distcp").unlink()
    os.mkfifo(checkpoint / "__0_0.distcp")


ATTACKS = [plant_pickle, plant_in_a_field, plant_bytes, plant_a_path, plant_a_link, plant_a_pipe]


@pytest.mark.parametrize("plant", ATTACKS)
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


# ---------------------------------------------------------------------------- model folders


@pytest.fixture
def model(tmp_path) -> Path:
    """A model folder with an index of its weights."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "model-0.1", folder)
    shutil.copy(FIXTURES / "data-0.1" / "tokenizer.json", folder)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    with safetensors.safe_open(folder / "part.safetensors", "pt") as file:
        names = list(file.keys())
    index = {"weight_map": dict.fromkeys(names, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def rename_weights(folder: Path, name: str) -> None:
    """The index names another file, which is there."""
    place = folder / name
    (folder / "part.safetensors").rename(place)
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, name)}))


def link(folder: Path, name: str) -> None:
    """A file of the folder is a link to one outside."""
    secret = folder.parent / f"secret-{name}"
    if (folder / name).exists():
        (folder / name).rename(secret)
    else:
        secret.write_text("{}")
    (folder / name).symlink_to(secret)


ESCAPES = {
    "a path upwards": lambda folder: rename_weights(folder, "../outside.safetensors"),
    "an absolute path": lambda folder: rename_weights(folder, f"{folder.parent}/out.safetensors"),
    "linked weights": lambda folder: link(folder, "part.safetensors"),
    "a linked index": lambda folder: link(folder, "model.safetensors.index.json"),
    "a linked config": lambda folder: link(folder, "config.json"),
    "linked settings": lambda folder: link(folder, "generation_config.json"),
    "a linked tokenizer": lambda folder: link(folder, "tokenizer.json"),
    "linked settings of it": lambda folder: link(folder, "tokenizer_config.json"),
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_model_folder_is_read_and_copied_from_inside_only(escape, model, tmp_path, run_command):
    assert run_command("export", model, tmp_path / "fine")[0] == 0
    ESCAPES[escape](model)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status, _, error = run_command("export", model, tmp_path / "out")
    assert (status, one_line(error)) == (2, True), error
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_the_hubs_own_cache_is_a_model_folder(model, tmp_path, run_command):
    """Its files are links to `blobs`."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "revision"
    shutil.copytree(model, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert run_command("export", snapshot, tmp_path / "out")[0] == 0


# ---------------------------------------------------------------------------- code of others

EVIL = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
TOKENIZERS = {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}
FOREIGN = {
    "a model": ({"model_type": "evil", "auto_map": EVIL}, {}),
    "a tokenizer": ({"model_type": "gpt2"}, {"tokenizer_class": "Evil", "auto_map": TOKENIZERS}),
    "both": ({"model_type": "evil", "auto_map": {**EVIL, **TOKENIZERS}}, {"auto_map": TOKENIZERS}),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("command", ["eval", "data", "generate", "import", "export"])
def test_code_of_a_folder_is_not_run_and_nobody_is_asked(
    kind, command, tmp_path, run_command, monkeypatch
):
    folder, text, out = tmp_path / "evil", tmp_path / "a.txt", tmp_path / "out"
    folder.mkdir()
    text.write_text("some text")
    for name, fields in zip(("config", "tokenizer_config"), FOREIGN[kind], strict=True):
        (folder / f"{name}.json").write_text(json.dumps(fields))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'canary')!r})\n")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    arguments = {
        "eval": (folder, "--text-file", text, "--out", out),
        "data": (text, "--tokenizer", folder, "--out", out),
        "generate": (folder, "--prompt", "x"),
        "import": (folder, out),
        "export": (folder, out),
    }
    status, _, error = run_command(command, *arguments[command])
    assert not (tmp_path / "canary").exists()
    assert not asked
    assert (status, one_line(error)) == (2, True), error


# ---------------------------------------------------------------------------- the native build

BUILD = "from spiralformer.decode import native; native.PATIENCE = 2.0; print(native.load())"


@pytest.fixture
def build(tmp_path):
    """Builds with a compiler that never ends while the file `slow` is there, and fails else."""
    compiler, slow = tmp_path / "compiler", tmp_path / "slow"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\n'
        f"touch {tmp_path}/begun\n[ -e {slow} ] && exec sleep 30\nexit 1\n"
    )
    compiler.chmod(0o755)
    slow.touch()
    env = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(patience: float = 2.0) -> subprocess.Popen:
        code = BUILD.replace("2.0", str(patience))
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=pipe, text=True)

    return start


def test_a_build_waits_for_another_no_longer_than_its_patience_and_never_for_a_dead_one(
    build, tmp_path
):
    other = build(100)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    assert f"process {other.pid} on " in (said := build().communicate(timeout=60)[0])
    assert "is building here; wait, or choose the runner 'eager'\n" in said
    other.kill()
    other.communicate()
    assert "compiler took longer than 2 seconds" in build().communicate(timeout=60)[0]
    (tmp_path / "slow").unlink()
    assert "compiler failed" in build().communicate(timeout=60)[0]
    assert (tmp_path / "cache" / "spiralformer").stat().st_mode & 0o777 == 0o700


def test_nothing_is_built_or_loaded_where_others_can_write(build, tmp_path):
    folder = tmp_path / "cache" / "spiralformer"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert f"{folder}: others can write there" in build().communicate(timeout=60)[0]
    assert not list(folder.iterdir())


# ---------------------------------------------------------------------------- names and texts

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
HOSTILE = "a_b [c](http://x) ![d](http://y) `e` **f** __g__ <script>h()</script> | &amp; ```\nj"
SHOWN = HOSTILE.replace("\n", " ")


@given(st.text("ab_*`[]()!<>&|\\~\n:/. ").map(str.strip))
def test_a_text_of_others_in_markdown_shows_as_it_is(text):
    [inline] = MARKDOWN.parseInline(console.escape(f"x{text}x"))
    assert "".join(child.content for child in inline.children) == " ".join(f"x{text}x".splitlines())
    assert {child.type for child in inline.children} == {"text"}


def visible(markdown: str) -> str:
    """What a reader sees of a document."""
    html = MARKDOWN.render(markdown)
    assert "<script" not in html
    return unescape(re.sub(r"<[^>]+>", "", html))


def test_names_and_texts_are_escaped_in_tables_and_pages(tmp_path):
    records = Records.read(Path("docs/results/power"))
    row = records.rows[0].model_copy(update={"label": HOSTILE, "failures": {0: HOSTILE}})
    fields = dict.fromkeys(("title", "about", "setting", "machine", "command"), HOSTILE)
    records = records.model_copy(update={**fields, "rows": [row, *records.rows[1:]]})
    text = visible(page.markdown(records))
    assert text.count(SHOWN) == 7
    assert "<script" not in page.html(records, {"power.png": b""})

    results = {"texts": {"results": {HOSTILE: {"word_perplexity,none": 2.0}}}}
    evaluation = Evaluation(HOSTILE, tmp_path, 8, results=results)
    table = render([evaluation], Options(["pile"], text_files=[tmp_path]))
    assert visible(table).count(SHOWN) == 2
    assert visible(bench_tables(tmp_path)).count(SHOWN) == 3


def bench_tables(folder: Path) -> str:
    one = Measurement(HOSTILE, "float32", report.PEER, HOSTILE, tokens=1, seconds=(1.0,))
    report.save(folder, "x", HOSTILE, [one])
    return report.write_tables(folder).read_text()


@pytest.mark.filterwarnings("ignore:html5lib")
def test_samples_are_shown_in_tensorboard_as_they_are(tmp_path, monkeypatch):
    from tensorboard.plugin_util import markdown_to_safe_html

    shown = []
    monkeypatch.setattr(SummaryWriter, "add_text", lambda self, tag, text, step: shown.append(text))
    text = f"{HOSTILE}\n```\n<b>[x](http://x)"
    with log.tensorboard(tmp_path, 0) as sink:
        sink({"kind": "sample", "step": 1, "texts": [text]})
    html = markdown_to_safe_html(shown[0])
    assert unescape(re.sub(r"</?(pre|code)>", "", html)).strip() == text


# ---------------------------------------------------------------------------- divergence


@pytest.fixture
def diverging(monkeypatch):
    """Step 6 leaves NaN in the weights, and nothing tells."""
    update, steps = loop.update, itertools.count(1)

    def diverge(optimizer, *arguments):
        norm = update(optimizer, *arguments)
        if next(steps) == 6:
            optimizer.param_groups[0]["params"][0].data.fill_(math.nan)
        return norm

    monkeypatch.setattr(loop, "update", diverge)


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} in a JSON file")


def test_a_run_that_ends_on_skipped_steps_fails_and_says_so(diverging, data, tmp_path, capsys):
    config = tiny(data, tmp_path / "run", sample__tokens=4, sample__every=7, log__every=1)
    with pytest.raises(
        UserError, match=r"not finite in 6 steps in a row, first in step 7 .*step-0+4"
    ):
        train(config)
    assert "step 7: no sample: the model's logits are not finite" in capsys.readouterr().err
    assert not (tmp_path / "run/model").exists()
    assert not (tmp_path / "run/result.json").exists()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=no_constants) for line in lines]
    losses = [record["valid_loss"] for record in records if record["kind"] == "valid"]
    assert [loss is None for loss in losses] == [False, True], "after steps 5 and 10"


def test_a_checkpoint_of_weights_that_are_not_finite_is_refused(diverging, data, tmp_path):
    config = tiny(data, tmp_path / "run", save__every=3, save__keep=1)
    message = r"step-00000006: .*weights: embedding.weight has values that are not finite; .*00003$"
    with pytest.raises(UserError, match=message):
        train(config, quiet=True)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000003"]


def test_weights_that_are_not_finite_are_refused_by_name(model, tmp_path, run_command):
    weights = load_file(model / "part.safetensors")
    name = max(weights)
    weights[name].view(-1)[-1] = math.nan
    save_file(weights, model / "part.safetensors")
    (tmp_path / "text").write_text("some text")
    for command in (
        ("export", model, tmp_path / "out"),
        ("generate", model, "--prompt", "x"),
        ("eval", model, "--text-file", tmp_path / "text", "--out", tmp_path / "eval"),
    ):
        status, _, error = run_command(*command)
        assert (status, one_line(error)) == (2, True), error
        assert f"{name} has values that are not finite" in error
    assert not (tmp_path / "out").exists()
    spiral = load_model(FIXTURES / "model-0.1")
    with torch.no_grad():
        spiral.norm.weight[0] = math.inf
    with pytest.raises(UserError, match=r"model\.norm\.weight has values that are not finite"):
        save_model(spiral, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# ---------------------------------------------------------------------------- damage


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def zero(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    begin = int(at * (len(content) - 1))
    content[begin : begin + 16] = bytes(16)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, zero])
@pytest.mark.parametrize("file", ["train-00000.bin", "train-00000.idx", "valid-00000.bin"])
@pytest.mark.parametrize("at", [0.4, 0.6, 0.9])
def test_a_damaged_shard_is_not_trained_on(damage, file, at, data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "data")
    train(tiny(folder, tmp_path / "fine", steps=1), quiet=True)
    damage(folder / file, at)
    with pytest.raises(UserError, match=r"-00000.(bin|idx): (damaged|too long)"):
        train(tiny(folder, tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("at", [0.5, 0.7, 0.9])  # sizes, pointers, documents
def test_shards_of_others_have_a_consistent_index(at, data, tmp_path):
    for kind in ("bin", "idx"):
        shutil.copy(data / f"train-00000.{kind}", tmp_path)
    open_split(tmp_path)
    flip(tmp_path / "train-00000.idx", at)
    with pytest.raises(UserError, match=r"train-00000.idx: (sizes and|the document)"):
        open_split(tmp_path)


def test_a_flipped_weight_is_seen(whole, tmp_path, run_command):
    folder = shutil.copytree(whole / "model", tmp_path / "model")
    assert run_command("generate", folder, "--prompt", "a", "--max-new-tokens", 1)[0] == 0
    flip(folder / "model.safetensors", 0.9)
    status, _, error = run_command("generate", folder, "--prompt", "a", "--max-new-tokens", 1)
    assert (status, one_line(error)) == (2, True), error
    assert "model.safetensors: damaged (its checksum differs)" in error
    load_model(folder, check=False)


# ---------------------------------------------------------------------------- nobody listens

STREAMS = ["2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full", ">/dev/full", "2>&1 | head -1"]


@pytest.mark.parametrize("streams", STREAMS)
def test_training_needs_nobody_who_listens(streams, data, whole, tmp_path):
    """Nor does anything that is printed get into a file."""
    (tmp_path / "train.json").write_text(
        json.dumps(tiny(data, tmp_path / "run", log__tensorboard=True).to_dict())
    )
    command = f"{sys.executable} -m spiralformer train {tmp_path}/train.json {streams}"
    script = f"set -o pipefail; {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode in (0, 141 if "head" in streams else 0), done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "Exception ignored" not in done.stderr
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("python", [sys.executable, f"{sys.executable} -u"])
@pytest.mark.parametrize(
    ("streams", "codes", "said"),
    [
        (
            ">/dev/full",
            {2},
            "spiralformer: error: standard output cannot be written: No space left ",
        ),
        ("| true", {0, 141}, ""),
        ("2>&-", {0}, ""),
    ],
)
def test_what_cannot_be_printed_is_told_in_a_line(python, streams, codes, said):
    script = f"set -o pipefail; {python} -m spiralformer count spiral-b-nano-mesh {streams}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode in codes
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == bool(said)


def test_a_terminal_that_goes_away_saves_the_run(data, whole, tmp_path):
    config = tiny(data, tmp_path / "run")
    code, _ = in_process(config, kill_at=6, with_signal=signal.SIGHUP)
    assert code == 128 + signal.SIGHUP
    assert (tmp_path / "run/checkpoints/step-00000006").is_dir()
    assert in_process(config) == (0, None)
    assert_same_run(whole, tmp_path / "run")


def test_a_run_under_nohup_goes_on(data, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        watch = lambda record: os.kill(os.getpid(), signal.SIGHUP)
        train(tiny(data, tmp_path / "run"), quiet=True, watch=watch)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_leftovers_of_killed_processes_are_removed_by_the_next(data, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    before = sorted(run.rglob("*"))
    for name in (".model.old", ".model.part", "checkpoints/.step-00000003.part", ".model.4711"):
        (run / name / "inside").mkdir(parents=True)
    for name in (".metrics.jsonl.4711", ".result.json.part"):
        (run / name).touch()
    assert train(tiny(data, run), quiet=True).again
    assert sorted(run.rglob("*")) == before


def test_a_full_disk_is_called_a_full_disk(data, tmp_path, monkeypatch, capfd):
    """Whoever meets it first: PyTorch while it saves, TensorBoard in its thread."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    config = tiny(data, tmp_path / "run", log__tensorboard=True)

    def refuse(*_):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "append", refuse)
        with pytest.raises(UserError, match="cannot be written: No space left on device"):
            train(config, quiet=True)

    def save(*_, **__):
        try:
            raise full
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos")

    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem.torch.save", save)
        message = (
            "the checkpoint cannot be written: No space left on device; there is no checkpoint"
        )
        with pytest.raises(UserError, match=message):
            train(config, quiet=True)
    assert "Traceback" not in capfd.readouterr().err


# ---------------------------------------------------------------------------- records


def test_a_study_that_cannot_be_written_is_refused_before_it_trains(tmp_path, run_command):
    (tmp_path / "file").touch()
    where = ("--out", tmp_path / "file" / "out", "--cache", tmp_path / "cache")
    status, _, error = run_command("study", "main", "--scale", "tiny", "--jobs", 1, *where)
    assert status == 2
    assert error.splitlines()[-1].endswith("Not a directory; choose another --out")
    assert not list(tmp_path.glob("cache/*/*/train.json"))


DAMAGED_LINES = ["", '{"kind": "tr', "7", '{"kind": "train"}', "\x00\xff", "[" * 100_000]


@pytest.mark.parametrize("damaged", DAMAGED_LINES)
def test_a_broken_line_of_metrics_costs_that_line(damaged, data, whole, tmp_path, capsys):
    config = tiny(data, tmp_path / "run")
    in_process(config, kill_at=9, with_signal=signal.SIGKILL)
    metrics = tmp_path / "run/metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([lines[0], damaged, *lines[2:]]) + "\n")
    train(config)
    assert f"{metrics}:2: not a record of a run; left out" in capsys.readouterr().err
    kept = repeatable(whole)
    assert repeatable(tmp_path / "run") == [kept[0], *kept[2:]]
