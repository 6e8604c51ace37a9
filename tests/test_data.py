"""Laws of the data: what is written is what is read, and every token is seen once an epoch."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from spiralformer import cli
from spiralformer.data import prepare, shards
from spiralformer.data import sources as corpus
from spiralformer.data.shards import (
    Shard,
    TokenStream,
    append_documents,
    finish_shards,
    read_manifest,
    verify,
)
from spiralformer.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe
from spiralformer.data.windows import IGNORED, TokenDataset, open_split, permute, read_texts
from spiralformer.errors import UserError

DOCUMENTS = [
    "The first document.\n\nIt has two paragraphs.\n",
    "naïve café — 日本語 🌀\r\n\ttabs, and no line end",
    "an end of text <|endoftext|> that is only spelled out",
    "  leading and trailing spaces  \n\n\n",
    "x" * 3000,
]


def write_source(folder: Path, form: str, documents: list[str] = DOCUMENTS) -> str:
    """Documents in a file format; what to call them on the command line."""
    folder.mkdir(parents=True, exist_ok=True)
    form, _, compression = form.partition(".")
    if form == "parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": documents, "id": list(range(len(documents)))})
        pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=2)
        return str(folder)
    if form == "txt":
        files = {f"{i}.txt": document.encode() for i, document in enumerate(documents)}
    elif form == "json":
        records = [{"id": i, "text": text} for i, text in enumerate(documents)]
        files = {"a.json": json.dumps(records, indent=1).encode()}
    else:
        lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(documents)]
        files = {"a.jsonl": ("\n".join(lines) + "\n\n").encode()}
    for name, data in files.items():
        if compression == "gz":
            (folder / f"{name}.gz").write_bytes(gzip.compress(data))
        elif compression == "zst":
            import zstandard

            half = len(data) // 2  # two frames, as `cat a.zst b.zst` makes
            frames = [zstandard.compress(data[:half]), zstandard.compress(data[half:])]
            (folder / f"{name}.zst").write_bytes(b"".join(frames))
        else:
            (folder / name).write_bytes(data)
    return f"hf:{folder}" if form == "hf" else str(folder)


def make(source: str, out: Path, **settings) -> dict:
    """`prepare` with bytes as tokens and no validation, unless told otherwise."""
    how = {key: settings.pop(key) for key in ("workers", "report", "skip_bad") if key in settings}
    if not {"tokenizer", "bpe"} & set(settings):
        settings["bytes"] = True
    recipe = prepare.Recipe(**{"valid_fraction": 0.0, **settings})
    return prepare.prepare(corpus.find_sources([source]), out, recipe, **how)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ---------------------------------------------------------------- written = read


@pytest.mark.parametrize(
    "form",
    ["txt", "txt.gz", "txt.zst", "json", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "hf"],
)
def test_what_is_written_is_what_is_read(tmp_path, form):
    manifest = make(write_source(tmp_path / "in", form), tmp_path / "out", bpe=400)
    assert list(read_texts(tmp_path / "out", "train")) == DOCUMENTS
    train = manifest["splits"]["train"]
    assert train["documents"] == len(DOCUMENTS)
    assert train["bytes"] == sum(len(text.encode()) for text in DOCUMENTS)
    assert train["tokens"] == open_split(tmp_path / "out").tokens
    assert manifest == shards.read_manifest(tmp_path / "out")


def test_documents_end_with_the_end_of_text_and_hold_no_other(tmp_path):
    manifest = make(write_source(tmp_path / "in", "jsonl"), tmp_path / "out", bpe=400)
    eot = manifest["tokenizer"]["eot_id"]
    shard = Shard(tmp_path / "out" / "train-00000")
    assert len(shard) == len(shard.document_starts) - 1 == len(DOCUMENTS)
    for i in range(len(shard)):
        assert (shard[i] == eot).tolist() == [False] * (len(shard[i]) - 1) + [True]


def test_any_tokenizer_json_or_folder_can_be_used(tmp_path):
    train_bpe(DOCUMENTS, 300).save(tmp_path / "tokenizer")
    source = write_source(tmp_path / "in", "jsonl")
    for name, path in (("a", "tokenizer"), ("b", "tokenizer/tokenizer.json")):
        make(source, tmp_path / name, tokenizer=tmp_path / path)
        assert list(read_texts(tmp_path / name, "train")) == DOCUMENTS
    data_files = {"train-00000.bin", "train-00000.idx", "tokenizer.json"}
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert all(a[name] == b[name] for name in data_files)


def test_byte_tokens_are_the_bytes(tmp_path):
    tokenizer = byte_tokenizer()
    for text in DOCUMENTS[:2]:
        slow = tokenizer.backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == slow == list(text.encode())
        assert tokenizer.decode([*slow, tokenizer.eot_id]) == text
    assert (tokenizer.eot_id, tokenizer.vocab_size) == (256, 257)


def test_a_trained_bpe_reads_and_writes_text_it_never_saw():
    tokenizer = train_bpe(["aaa " * 50], 260)
    for text in DOCUMENTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_saved_tokenizers_are_hugging_face_folders(tmp_path):
    from transformers import AutoTokenizer

    trained = train_bpe(DOCUMENTS, 300)
    trained.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.eos_token_id == trained.eot_id == load_tokenizer(tmp_path).eot_id
    assert loaded(DOCUMENTS[1])["input_ids"] == trained.encode(DOCUMENTS[1])


@pytest.mark.parametrize("rule", ["file", "1", "40", "2k", "auto"])
def test_cutting_into_documents_loses_nothing(tmp_path, monkeypatch, rule):
    monkeypatch.setattr(corpus, "WHOLE_FILE_LIMIT", 500)
    monkeypatch.setattr(corpus, "AUTO_DOCUMENT_SIZE", 100)
    text = "\n\none\nä line\n\n\nanother 日本語\r\n\r\ntwo\n" + "é" * 600 + "\n\nthe end"
    (tmp_path / "a.txt").write_bytes(text.encode())
    [source] = corpus.find_sources([str(tmp_path)])
    options = corpus.ReadOptions(split_documents=rule)
    pieces = [document.text or "" for document in corpus.read_documents(source, options)]
    assert "".join(pieces) == text
    assert (len(pieces) == 1) == (rule in ("file", "2k"))


def test_a_folder_gives_all_its_text_and_names_what_it_leaves_out(tmp_path):
    texts = {
        "README": "no extension",
        "a.md": "# markdown",
        "b.rst": "title\n=====",
        "c.py": "print()",
        "d.html": "<p>日本",
        "lines.json": '{"text": "one"}\n{"text": "two"}\n',
        "one.json": '{"text": "a record"}',
        "settings.json": '{"tabs": [1]}',
        "sub/list.json": '[\n {"text": "three"},\n {"text": "four"}]',
    }
    others = {
        "image.png": b"\x89PNG\r\n\0",
        "latin.tex": "é".encode("latin-1"),
        "sub/b.PNG": b"\0",
        "sub/c.tar.gz": gzip.compress(b"\0" * 512),
        ".git/config": b"hidden",
        "damaged.gz": b"no gzip",
    }
    for name, content in (
        *((name, text.encode()) for name, text in texts.items()),
        *others.items(),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "sub/loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    notices: list[str] = []
    sources = corpus.find_sources([str(tmp_path)], notices.append)
    assert [source.identity["file"] for source in sources] == list(texts)
    [notice] = notices
    assert notice == f"{tmp_path}: left out 2 links or devices, 2 .gz, 2 .png, 1 hidden, 1 .tex"
    options = corpus.ReadOptions()
    read = [
        document.text for source in sources for document in corpus.read_documents(source, options)
    ]
    expected = [texts[name] for name in ("README", "a.md", "b.rst", "c.py", "d.html")]
    records = ["one", "two", "a record", texts["settings.json"], "three", "four"]
    assert read == [*expected, *records]


def test_stdlib_is_deterministic_and_leaves_tests_and_vendored_packages_out():
    [source], [again] = corpus.find_sources(["stdlib"]), corpus.find_sources(["stdlib"])
    assert source == again
    names = [path.as_posix() for path in corpus.stdlib_files()]
    assert names == sorted(names)
    assert any(name.endswith("/argparse.py") for name in names)
    left_out = "/tests?/|idle_test|site-packages|_bundled|/encodings/|pydoc_data|stringprep"
    assert not any(re.search(left_out, name) for name in names)
    texts = [document.text for document in corpus.read_documents(source, corpus.ReadOptions())]
    assert len(texts) == len(names) > 300
    assert sum(len(text or "") for text in texts) > 5_000_000


# ---------------------------------------------------------------- some text for validation


@pytest.mark.parametrize("number", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("seed", range(3))
def test_a_small_corpus_has_text_to_validate_on_and_to_train_on(tmp_path, number, seed):
    """All of the text is on one side or the other, and the smaller part is for validation."""
    texts = ["".join(f"line {k} of {i}\n" for k in range(20 + i)) for i in range(number)]
    source = write_source(tmp_path / "in", "jsonl", texts)
    said = []
    recipe = prepare.Recipe(bpe=260, valid_fraction=1e-6, seed=seed)
    sources = corpus.find_sources([source])
    manifest = prepare.prepare(sources, tmp_path / "out", recipe, notice=said.append)
    train, valid = (list(read_texts(tmp_path / "out", split)) for split in prepare.SPLITS)
    assert train
    assert valid
    assert sum(map(len, valid)) < sum(map(len, train)) / 4
    assert Counter("".join(train + valid)) == Counter("".join(texts))
    assert any("no document falls into validation at --valid-fraction 1e-06" in s for s in said)
    if number >= prepare.PIECES:
        assert sorted(train + valid) == sorted(texts)  # whole documents
    again = prepare.prepare(sources, tmp_path / "again", recipe, workers=3)
    assert again["files"] == manifest["files"]


def test_no_validation_is_to_be_had_where_none_is_wanted_or_there_is_no_text(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("a")
    for name, fraction in (("a", "0"), ("b", "0.5")):
        source, out = str(tmp_path / f"{name}.txt"), str(tmp_path / name)
        cli.main(["data", source, "--bytes", "--valid-fraction", fraction, "--out", out])
        assert not read_manifest(out)["splits"]["valid"]["documents"]
    assert capsys.readouterr().out.count("no validation: there is too little text") == 1


# ---------------------------------------------------------------- Megatron's format


def megatron_index(sizes: list[int], code: int, width: int, starts: list[int]) -> bytes:
    """The public format, written out independently of `shards`."""
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(starts))
    index += b"".join(struct.pack("<i", size) for size in sizes)
    index += b"".join(struct.pack("<q", sum(sizes[:i]) * width) for i in range(len(sizes)))
    return index + b"".join(struct.pack("<q", start) for start in starts)


@pytest.mark.parametrize(("dtype", "code", "letter"), [("uint16", 8, "H"), ("int32", 4, "i")])
def test_shards_are_megatrons_byte_for_byte(tmp_path, dtype, code, letter):
    documents = [[1, 2, 3], [60_000], [7] * 11]
    state: list[dict] = []
    for part in (documents[:2], documents[2:]):
        arrays = [np.array(document, dtype) for document in part]
        append_documents(tmp_path, "train", state, arrays, 0)
    list(finish_shards(tmp_path, np.dtype(dtype), state))

    flat = [token for document in documents for token in document]
    expected = struct.pack(f"<{len(flat)}{letter}", *flat)
    assert (tmp_path / "train-00000.bin").read_bytes() == expected
    index = megatron_index([3, 1, 11], code, struct.calcsize(letter), [0, 1, 2, 3])
    assert (tmp_path / "train-00000.idx").read_bytes() == index


def foreign_shard(prefix: Path, pieces: int = 1) -> list[int]:
    """A shard of another program: several sequences to a document, its .bin in pieces."""
    tokens = list(range(100, 130))
    data = struct.pack("<30i", *tokens)
    if pieces == 1:
        prefix.with_suffix(".bin").write_bytes(data)
    for i in range(pieces if pieces > 1 else 0):
        piece = data[i * 40 : (i + 1) * 40 if i < pieces - 1 else None]
        Path(f"{prefix}-{i:05}-of-{pieces - 1:05}.bin").write_bytes(piece)
    prefix.with_suffix(".idx").write_bytes(megatron_index([10, 4, 16], 4, 4, [0, 2, 3]))
    return tokens


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("named", ["pile", "pile.idx", "."])
def test_shards_of_megatron_train_as_they_are(tmp_path, pieces, named):
    tokens = foreign_shard(tmp_path / "pile", pieces)
    split = open_split(tmp_path / named)
    assert split.stream.read(0, 30).tolist() == tokens
    assert split.text_bytes is None
    assert Shard(tmp_path / "pile")[1].tolist() == tokens[10:14]
    assert len(verify(tmp_path / named)) == pieces + 1

    held_out = open_split(tmp_path / named, "valid", holdout=0.1)  # token 27, in the last document
    assert held_out.stream.read(0, held_out.tokens).tolist() == tokens[14:]
    assert open_split(tmp_path / named, "train", holdout=0.1).tokens == 14
    with pytest.raises(UserError, match="no validation split"):
        open_split(tmp_path / named, "valid")


def test_a_piece_that_ends_inside_a_token_is_refused(tmp_path):
    foreign_shard(tmp_path / "pile", pieces=2)
    first, second = sorted(tmp_path.glob("*.bin"))
    data = first.read_bytes() + second.read_bytes()
    first.write_bytes(data[:41])
    second.write_bytes(data[41:])
    with pytest.raises(UserError, match=r"00000-of-00001\.bin: ends inside a token"):
        Shard(tmp_path / "pile")


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("pile.bin", lambda data: data[:-1], "truncated"),
        ("pile.bin", lambda data: data + b"\0" * 4, "too long"),
        ("pile.idx", lambda data: data[:-1], "truncated.*fetch or write it anew"),
        ("pile.idx", lambda data: data[:20], "truncated"),
        ("pile.idx", lambda data: b"TNTIDX\0\0" + data, "not a Megatron index"),
        ("pile.idx", lambda data: data[:9] + b"\2" + data[10:], "version 2"),
        ("pile.idx", lambda data: data[:17] + b"\6" + data[18:], "type code 6"),
        ("pile.idx", lambda data: data[:34] + b"\11" + data[35:], "disagree"),
    ],
)
def test_a_damaged_shard_is_refused_by_name(tmp_path, file, damage, message):
    foreign_shard(tmp_path / "pile")
    (tmp_path / file).write_bytes(damage((tmp_path / file).read_bytes()))
    with pytest.raises(UserError, match=f"{file}.*{message}"):
        verify(tmp_path)


# ---------------------------------------------------------------- the folder


def test_a_flipped_byte_is_detected_in_every_file(tmp_path):
    source = write_source(tmp_path / "in", "jsonl", DOCUMENTS * 4)
    out = tmp_path / "out"
    make(source, out, valid_fraction=0.4)
    files = contents(out)
    assert set(files) == {
        *("manifest.json", "tokenizer.json", "tokenizer_config.json"),
        *(f"{split}-00000.{suffix}" for split in prepare.SPLITS for suffix in ("bin", "idx")),
    }
    verify(out)
    for name, data in files.items():
        for position in (*range(0, len(data), max(1, len(data) // 50)), len(data) - 1):
            flipped = bytearray(data)
            flipped[position] ^= 1
            (out / name).write_bytes(flipped)
            with pytest.raises(UserError, match=f"{name}: damaged.*prepare the data anew"):
                verify(out)
        (out / name).write_bytes(data)
    verify(out)


def test_the_split_is_by_content(tmp_path):
    documents = [f"document {i % 1000}" for i in range(2000)]
    manifest = make(
        write_source(tmp_path / "in", "jsonl", documents), tmp_path / "out", valid_fraction=0.1
    )
    train, valid = (list(read_texts(tmp_path / "out", split)) for split in prepare.SPLITS)
    assert sorted(train + valid) == sorted(documents)
    assert not set(train) & set(valid)
    assert 140 < len(valid) < 260
    assert manifest["splits"]["valid"]["bytes"] == sum(map(len, valid))
    make(str(tmp_path / "in"), tmp_path / "other", valid_fraction=0.1, seed=1)
    assert set(read_texts(tmp_path / "other", "valid")) != set(valid)


def test_a_bpe_is_trained_on_training_documents_only(tmp_path):
    documents = [f"document {i} " + "abcdefgh"[i % 8] * 9 for i in range(200)]
    make(write_source(tmp_path / "in", "jsonl", documents), tmp_path / "a", bpe=300)
    make(str(tmp_path / "in"), tmp_path / "b", bpe=300, valid_fraction=0.5)
    train = list(read_texts(tmp_path / "b", "train"))
    trained = load_tokenizer(tmp_path / "b").to_json()
    assert trained == train_bpe(train, 300).to_json() != load_tokenizer(tmp_path / "a").to_json()


def test_the_number_of_workers_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_BYTES", 1000)
    monkeypatch.setattr(prepare, "COMMIT_BYTES", 3000)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 500)
    source = write_source(
        tmp_path / "in", "jsonl", [f"{i} {text}" for i in range(20) for text in DOCUMENTS]
    )
    for workers in (1, 2):
        make(source, tmp_path / f"{workers}", bpe=400, valid_fraction=0.2, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert "train-00001.bin" in contents(tmp_path / "1")  # several shards


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from spiralformer.data import prepare, shards, sources as corpus
source, out, when = sys.argv[1:]
prepare.BATCH_BYTES, prepare.COMMIT_BYTES, shards.SHARD_TOKENS = 1000, 3000, 2000
calls = 0
def killing(function):
    def wrapped(*arguments):
        global calls
        calls += 1
        if calls == int(when):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return wrapped
prepare.append_documents = killing(prepare.append_documents)
os.fsync, os.replace, os.rename = killing(os.fsync), killing(os.replace), killing(os.rename)
recipe = prepare.Recipe(bpe=300, valid_fraction=0.2)
prepare.prepare(corpus.find_sources([source]), out, recipe)
print(calls)
"""


def test_killed_and_resumed_is_never_interrupted(tmp_path):
    documents = [f"{i} {text}" for i in range(12) for text in DOCUMENTS]
    source = write_source(tmp_path / "in", "txt", documents)

    def attempt(out: Path, when: int) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", KILLED_AT, source, str(out), str(when)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    whole = attempt(tmp_path / "whole", 0)
    assert whole.returncode == 0, whole.stderr
    calls = int(whole.stdout)  # of everything that touches the disk
    again_and_again = (9, calls // 4, calls // 4, calls // 4)
    while_finishing = ((calls - 6,), (calls,))
    for number, kills in enumerate((again_and_again, *while_finishing)):
        out = tmp_path / str(number)
        for when in kills:  # each goes on from the one before
            assert attempt(out, when).returncode == -signal.SIGKILL
            assert not out.exists()
        finished = attempt(out, 0)
        assert finished.returncode == 0, finished.stderr
        assert int(finished.stdout) < calls * 2 / 3  # finished parts are not tokenized anew
        assert contents(out) == contents(tmp_path / "whole")


def test_interrupted_in_any_batch_and_resumed_is_never_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_BYTES", 1000)
    monkeypatch.setattr(prepare, "COMMIT_BYTES", 3000)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 5000)
    documents = [f"{i} {text}" for i in range(5) for text in DOCUMENTS]
    source = write_source(tmp_path / "in", "jsonl", documents)
    make(source, tmp_path / "whole", valid_fraction=0.2)

    class Interrupt:
        def __init__(self, batches: int):
            self.left = batches

        def __call__(self, read, tokens):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

    for batches in range(1, 6):
        out = tmp_path / str(batches)
        for again in (batches, 1):  # the second goes on, and is interrupted as well
            with pytest.raises(KeyboardInterrupt):
                make(source, out, report=Interrupt(again), valid_fraction=0.2)
        make(source, out, valid_fraction=0.2)
        assert contents(out) == contents(tmp_path / "whole")


def test_finished_work_is_kept_and_other_settings_are_refused(tmp_path, capsys):
    source = write_source(tmp_path / "in", "jsonl")
    command = ["data", source, "--bytes", "--out", str(tmp_path / "out"), "--valid-fraction", "0"]
    assert cli.main(command) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert cli.main(command) == 0
    assert "already done" in capsys.readouterr().err
    assert cli.main([*command, "--text-field", "id"]) == 2
    assert "text_field text" in capsys.readouterr().err
    write_source(tmp_path / "in", "jsonl", [DOCUMENTS[0].upper(), *DOCUMENTS[1:]])  # as long
    os.utime(tmp_path / "in/a.jsonl", (0, 0))
    assert cli.main(command) == 2
    assert "sources differ" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_second_process_is_refused(tmp_path):
    source = write_source(tmp_path / "in", "jsonl")

    def second(read, tokens):
        with pytest.raises(
            UserError, match=rf"out.partial: process {os.getpid()} on .* is writing"
        ):
            make(source, tmp_path / "out")

    make(source, tmp_path / "out", report=second)


# ---------------------------------------------------------------- folders of version 0.1

VERSION_01 = Path(__file__).parent / "fixtures" / "data-0.1"


@pytest.mark.parametrize(
    ("split", "identity", "sha256"),
    [
        (
            "train",
            "8bd53f347e2f821a",
            "90e48bf875e9047bb7ed83a0d4b1d92ebbc3571da542f991daad1b867be3e2ff",
        ),
        (
            "valid",
            "1975479ec1b64fc3",
            "b2c8ab66bb495c9d91cc8deca2a847d288d559ad5cc04081c326b19f37b2cfee",
        ),
    ],
)
def test_an_older_folder_gives_the_batches_it_always_gave(split, identity, sha256):
    """Computed by version 0.1. The identity is what a run to be resumed asks for."""
    opened = open_split(VERSION_01, split)
    data = TokenDataset(opened.stream, 24, seed=5)
    seen = hashlib.sha256()
    steps = (data.micro_batches(step, global_batch=8, micro_batch=4) for step in range(12))
    for batches in (*steps, data.in_order(4)):
        for ids, targets in batches:
            seen.update(ids.numpy().tobytes())
            seen.update(targets.numpy().tobytes())
    assert (opened.identity, seen.hexdigest()) == (identity, sha256)


def test_an_older_shard_holds_out_what_it_always_held_out():
    split = open_split(VERSION_01 / "train-00001", "valid", holdout=0.3)
    held_out = hashlib.sha256(split.stream.read(0, split.tokens).tobytes()).hexdigest()
    assert (split.identity, held_out[:16]) == ("da405349c312ba37", "e770e380bc67f27b")


def test_an_older_folder_is_whole_and_known_as_done(tmp_path, capsys):
    out = shutil.copytree(VERSION_01, tmp_path / "out")
    assert len(verify(out)) == 12
    source = tmp_path / "a.jsonl"
    source.write_bytes(b" " * shards.read_manifest(out)["settings"]["sources"][0]["size"])
    os.utime(source, ns=(10**18, 10**18))  # that is how a source is known
    command = ["data", str(source), "--valid-fraction", "0.2", "--out", str(out), "--train-bpe"]
    assert cli.main([*command, "290"]) == 0
    assert "already done" in capsys.readouterr().err
    assert cli.main([*command, "300"]) == 2
    assert "tokenizer differ" in capsys.readouterr().err


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("shards", ("torch", "transformers", "tokenizers", "pyarrow", "datasets")),
        ("windows", ("transformers", "tokenizers", "pyarrow", "datasets")),
    ],
)
def test_the_reader_does_not_import_the_writer(module, absent):
    code = f"import sys, spiralformer.data.{module}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    writer = {f"spiralformer.data.{name}" for name in ("prepare", "sources", "tokenizer")}
    assert not {*writer, *absent} & set(result.stdout.split())


def stream_of(n: int, parts: int = 3) -> TokenStream:
    return TokenStream(np.array_split(np.arange(1000, 1000 + n, dtype=np.uint16), parts))


@pytest.mark.parametrize(
    ("n", "length"), [(1, 1), (1, 7), (20, 5), (21, 5), (24, 5), (3, 8), (500, 7)]
)
def test_every_token_is_a_target_exactly_once_per_epoch(n, length):
    dataset = TokenDataset(stream_of(n), length, seed=3)
    for epoch in range(3):
        samples = range(epoch * len(dataset), (epoch + 1) * len(dataset))
        ids, targets = dataset.batch(samples)
        assert ids.shape == targets.shape == (len(dataset), length)
        real = targets != IGNORED
        assert sorted(targets[real].tolist()) == list(range(1000, 1000 + n))
        assert dataset.targets_in(samples) == n
        before = (targets[real] - 1001) % n + 1000  # the stream is a ring
        assert ids[real].tolist() == before.tolist()


def test_the_order_depends_on_seed_and_epoch_alone():
    n = len(TokenDataset(stream_of(600), 4))

    def order(seed: int, epoch: int) -> list[int]:
        dataset = TokenDataset(stream_of(600, parts=1 + seed), 4, seed)
        return [dataset.window_of(sample) for sample in range(epoch * n, (epoch + 1) * n)]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(sorted(one) == list(range(n)) for one in orders)
    assert len({tuple(one) for one in orders}) == 9
    assert order(1, 2) == orders[5]


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_the_number_of_processes_changes_no_batch(world):
    dataset = TokenDataset(stream_of(101), 4, seed=1)
    for step in range(5):  # beyond one epoch
        alone = list(dataset.micro_batches(step, global_batch=12, micro_batch=2))
        ranks = [
            list(
                dataset.micro_batches(step, global_batch=12, micro_batch=2, rank=rank, world=world)
            )
            for rank in range(world)
        ]
        together = [ranks[m % world][m // world] for m in range(6)]
        assert sum(map(len, ranks)) == len(alone) == 6
        for (ids, targets), (other_ids, other_targets) in zip(alone, together, strict=True):
            assert ids.equal(other_ids)
            assert targets.equal(other_targets)
    with pytest.raises(UserError, match="global batch of 12"):
        next(dataset.micro_batches(0, global_batch=12, micro_batch=5))


def test_the_order_of_an_epoch_is_a_permutation_and_well_mixed():
    for n in (*range(1, 40), 255, 256, 257, 1021):
        assert sorted(permute(i, n, 5, 0) for i in range(n)) == list(range(n))
    order = np.array([permute(i, 5000, 0, 0) for i in range(5000)])
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    assert permute(10**12, 10**13, 0, 0) < 10**13  # without a table


def test_validation_covers_the_text_in_order():
    dataset = TokenDataset(stream_of(23), 4)
    batches = list(dataset.in_order(4))
    assert [len(ids) for ids, _ in batches] == [4, 2]
    flat = [token for _, targets in batches for token in targets.flatten().tolist()]
    assert flat == [*range(1000, 1023), IGNORED]
    assert sum(len(ids) for ids, _ in dataset.in_order(4, windows=3)) == 3


def test_a_stream_reads_and_cuts_like_one_array():
    whole, stream = np.arange(1000, 1040), stream_of(40, parts=7)
    for start in range(41):
        for stop in range(start, 41):
            assert stream.read(start, stop).tolist() == whole[start:stop].tolist()
            section = stream.section(start, stop)
            assert section.read(0, len(section)).tolist() == whole[start:stop].tolist()
    with pytest.raises(IndexError):
        stream.read(0, 41)


def test_a_token_beyond_the_models_vocabulary_is_refused():
    dataset = TokenDataset(stream_of(20), 4, vocab_size=1019)
    with pytest.raises(UserError, match="token 1019"):
        list(dataset.in_order(8))


# ---------------------------------------------------------------- bad input


def truncated(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


def parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), file)
    return file.getvalue()


LINES = b"".join(b'{"text": "%d and more"}\n' % (i * i * 7919) for i in range(500))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a.jsonl:2: not valid JSON .*--skip-bad"),
        ("a.jsonl", b'\n{"text": "a"}\n[1]\n', "a.jsonl:3: not a JSON object"),
        ("a.jsonl", b'{"body": "a"}\n', "a.jsonl:1: no field 'text' .fields here: body"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: field 'text' is int, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: .*surrogate"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl:1: not UTF-8"),
        ("a.json", b'[{"text": "a"}, {"body": "b"}]', "a.json, record 1: no field 'text'"),
        ("a.json", b'[{"text": "a"}, {"te', "a.json, record 0: not valid JSON"),
        ("a.txt", b"abc\xff", "a.txt: not UTF-8 at byte 3"),
        ("a.txt", b"", "no text to train on"),
        ("a.jsonl", b'{"text": ""}\n', "no text to train on: 1 documents are empty"),
        ("a.jsonl.gz", truncated(gzip.compress(LINES)), "a.jsonl.gz: truncated or damaged"),
        ("a.jsonl.gz", LINES, "a.jsonl.gz: truncated or damaged"),
        ("a.jsonl.zst", truncated(zstd(LINES)), "a.jsonl.zst: truncated or damaged"),
        ("a.jsonl.zst", LINES, "a.jsonl.zst: truncated or damaged"),
        ("a.parquet", parquet(), "a.parquet: no column 'text' .columns here: body"),
        ("a.parquet", truncated(parquet()), "a.parquet: not a complete Parquet file"),
    ],
)
def test_bad_sources_are_refused_by_name(tmp_path, capsys, name, data, message):
    (tmp_path / name).write_bytes(data)
    out = tmp_path / "out"
    assert cli.main(["data", str(tmp_path / name), "--bytes", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert len(error.splitlines()) <= 2
    assert os.listdir(tmp_path) == [name]  # nothing left behind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt", "--bytes"], "nowhere.txt: no such file"),
        (["empty", "--bytes"], "empty: no text in this folder"),
        (["a.txt"], "choose one of --tokenizer"),
        (["a.txt", "--tokenizer", "b/c/d"], "b/c/d: no such tokenizer"),
        (["a.txt", "--tokenizer", "a.txt"], "a.txt: not a tokenizer.json"),
        (["a.txt", "--train-bpe", "100"], "--train-bpe 100: a vocabulary is in 257"),
        (["a.txt", "--bytes", "--valid-fraction", "1"], "--valid-fraction 1.0"),
        (["a.txt", "--bytes", "--split-documents", "some"], "not one of auto, file"),
        (["a.txt", "--bytes", "--workers", "0"], "--workers 0"),
        (["a.txt", "--bytes", "--seed", "-1"], "--seed -1"),
        (["hf:a:b:c", "--bytes"], "not of the form hf:NAME"),
        (["a.txt", "--bytes", "--out", "a.txt/out"], "a.txt/out.partial: cannot be written"),
        (["a.txt", "--bytes", "--out", "full"], "full exists and is not a folder of token shards"),
        (["a.txt", "--bytes", "--out", "a.txt"], "a.txt exists and is not a folder"),
    ],
)
def test_bad_arguments_are_refused_by_name(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "full"):
        Path(folder).mkdir()
    Path("a.txt").write_text("text")
    Path("full/precious").write_text("keep me")
    assert cli.main(["data", "--out", "out", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(os.listdir()) == ["a.txt", "empty", "full"]
    assert (Path("a.txt").read_text(), Path("full/precious").read_text()) == ("text", "keep me")


def test_empty_documents_are_left_out_and_bad_ones_where_asked(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "a"}\n{"text": ""}\n{"text": \n{}\n{"text": "b"}\n'
    )
    manifest = make(str(tmp_path / "a.jsonl"), tmp_path / "out", skip_bad=True)
    assert list(read_texts(tmp_path / "out", "train")) == ["a", "b"]
    assert (manifest["empty_documents"], manifest["skipped_documents"]) == (1, 2)


FULL_DISK = """
import resource, sys
from spiralformer import cli
from spiralformer.data import prepare
prepare.BATCH_BYTES, prepare.COMMIT_BYTES = 1000, 3000
if "full" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
source, out = sys.argv[1:3]
sys.exit(cli.main(["data", source, "--bytes", "--valid-fraction", "0", "--out", out]))
"""


def test_a_full_disk_is_reported_and_the_work_goes_on_afterwards(tmp_path):
    source = write_source(tmp_path / "in", "jsonl", [f"{i} {DOCUMENTS[4]}" for i in range(9)])

    def attempt(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", FULL_DISK, source, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    full = attempt(str(tmp_path / "out"), "full")
    assert full.returncode == 2
    assert "out.partial: cannot be written: File too large; run the same command" in full.stderr
    assert "Traceback" not in full.stderr
    again = attempt(str(tmp_path / "out"))
    assert again.returncode == 0, again.stderr
    assert "going on from" in again.stderr
    assert attempt(str(tmp_path / "whole")).returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
