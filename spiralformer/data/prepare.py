"""From sources to a folder of token shards: tokenize in parallel, split, write, record.

All is written to `OUT.partial`, which becomes `OUT` when it is complete: a folder named `OUT` is
never half-finished. In between, `progress.json` says up to which document everything is on disk;
the next run with the same settings goes on from there and ends with the same bytes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from spiralformer.data.shards import Shard, ShardWriter, find_shards, finish_shards
from spiralformer.data.sources import ReadOptions, Source, parse_cut, read_documents
from spiralformer.data.tokenizer import TextTokenizer, byte_tokenizer, load_tokenizer, train_bpe
from spiralformer.errors import UserError

SPLITS = ("train", "valid")
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
BATCH_BYTES = 1 << 18  # text that a worker takes at a time
COMMIT_BYTES = 1 << 24  # text between two commits


@dataclass(frozen=True)
class Recipe:
    """What decides the bytes that are written."""

    tokenizer: str | Path | None = None  # a path; else `bpe` or `bytes` holds
    bpe: int | None = None  # vocabulary of a BPE to train
    bytes: bool = False
    bpe_sample: int = 256 << 20  # bytes of training text that the BPE is trained on, from the first
    eot: str | None = None
    valid_fraction: float = 0.005
    seed: int = 0
    text_field: str = "text"
    split_documents: str = "auto"
    shard_tokens: int = 1 << 30

    def __post_init__(self) -> None:
        if (self.tokenizer is not None) + (self.bpe is not None) + self.bytes != 1:
            raise UserError("choose one of --tokenizer PATH, --train-bpe VOCAB and --bytes")
        if not 0 <= self.valid_fraction < 1:
            raise UserError(f"--valid-fraction {self.valid_fraction} is not in 0 … 1 (1 excluded)")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed} is not in 0 … 2^63 - 1")
        if self.shard_tokens < 1 or self.bpe_sample < 1:
            raise UserError("--shard-tokens and --bpe-sample must be at least 1")
        parse_cut(self.split_documents)


class Progress(NamedTuple):
    """Told after each batch."""

    documents: int
    text_bytes: int
    tokens: int
    read: int  # bytes of the sources
    total: int | None  # bytes of all sources, where known


@dataclass
class State:
    """Up to where everything is on disk: the contents of `progress.json`."""

    source: int = 0  # sources before this one are finished
    document: int = 0  # and so many documents of this one
    empty: int = 0
    skipped: int = 0
    shards: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {split: [] for split in SPLITS}
    )

    def total(self, count: str) -> int:
        return sum(shard[count] for split in SPLITS for shard in self.shards[split])


def in_validation(text: bytes, fraction: float, seed: int) -> bool:
    """By the content, so that a document and its copies are on the same side."""
    digest = hashlib.blake2b(text, digest_size=8, salt=seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") < fraction * 2**64


def prepare(
    sources: list[Source],
    out: str | Path,
    recipe: Recipe,
    *,
    workers: int = 1,
    skip_bad: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
    notice: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Writes the shards of all documents of the sources and returns the manifest."""
    out = Path(out)
    tokenizer = None if recipe.bpe else _given_tokenizer(recipe)
    settings = _settings(sources, recipe, tokenizer)
    finished = _finished(out, settings)
    if finished:
        notice(f"{out} is already done: nothing to do")
        return finished

    partial = out.with_name(out.name + ".partial")
    options = ReadOptions(recipe.text_field, recipe.split_documents, skip_bad, notice)
    with _writing(partial), _locked(partial):
        state = _resumed(partial, settings, notice)
        try:
            if tokenizer is None:
                tokenizer = _trained_tokenizer(partial, sources, options, recipe, notice)
            for name, content in tokenizer.files().items():
                _write_atomically(partial / name, content)
            _tokenize(
                partial, sources, options, recipe, tokenizer, state, settings, workers, report
            )
            _refuse_empty(state)
        except UserError:
            if not state.shards["train"]:  # nothing worth keeping
                shutil.rmtree(partial)
            raise
        manifest = _manifest(partial, tokenizer, state, settings)
        _write_atomically(partial / MANIFEST, _manifest_text(manifest))
        os.rename(partial, out)  # replaces an empty folder, and no other
        _tidy(out)
    return manifest


# ---------------------------------------------------------------- tokenizing


class Batch(NamedTuple):
    """Documents to tokenize, and where the sources stand after them."""

    texts: list[str]
    source: int
    document: int
    empty: int
    skipped: int
    read: int  # bytes of the sources before this point


def _batches(sources: list[Source], options: ReadOptions, state: State) -> Iterator[Batch]:
    """All documents after `state`. Batches are the same whether or not the run was interrupted,
    because it is taken up again at the end of a batch."""
    texts: list[str] = []
    size = empty = skipped = 0
    first, done = state.source, state.document  # the state moves on while this reads ahead
    before = sum(source.size or 0 for source in sources[:first])
    for number, source in enumerate(sources[first:], first):
        for index, (text, consumed) in enumerate(read_documents(source, options), 1):
            if number == first and index <= done:
                continue
            if text:
                texts.append(text)
                size += len(text)
            empty += text == ""
            skipped += text is None
            if size >= BATCH_BYTES:
                yield Batch(texts, number, index, empty, skipped, before + consumed)
                texts, size, empty, skipped = [], 0, 0, 0
        before += source.size or 0
    yield Batch(texts, len(sources), 0, empty, skipped, before)


class Tokens(NamedTuple):
    """Tokenized documents of one split."""

    ids: np.ndarray
    sizes: np.ndarray  # tokens of each document
    text_bytes: int


class Encoder:
    """Tokenizes and splits a batch. Each worker has one."""

    def __init__(self, backend: str, eot: str, valid_fraction: float, seed: int):
        self.tokenizer = TextTokenizer(Tokenizer.from_str(backend), eot, "")
        self.valid_fraction, self.seed = valid_fraction, seed

    def __call__(self, texts: list[str]) -> dict[str, Tokens]:
        eot = np.array([self.tokenizer.eot_id], self.tokenizer.dtype)
        ids: dict[str, list[np.ndarray]] = {split: [eot[:0]] for split in SPLITS}
        sizes: dict[str, list[int]] = {split: [] for split in SPLITS}
        text_bytes = dict.fromkeys(SPLITS, 0)
        for text, tokens in zip(texts, self.tokenizer.encode_batch(texts), strict=True):
            data = text.encode()
            split = SPLITS[in_validation(data, self.valid_fraction, self.seed)]
            ids[split] += [tokens, eot]
            sizes[split].append(len(tokens) + 1)
            text_bytes[split] += len(data)
        return {
            split: Tokens(
                np.concatenate(ids[split]), np.array(sizes[split], np.int32), text_bytes[split]
            )
            for split in SPLITS
        }


_worker_encoder: Encoder


def _start_worker(*arguments: Any) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the work in good order
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_encoder = Encoder(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(texts: list[str]) -> dict[str, Tokens]:
    return _worker_encoder(texts)


def _encoded(
    batches: Iterator[Batch], arguments: tuple, workers: int
) -> Generator[tuple[Batch, dict[str, Tokens]], None, None]:
    """The batches in their order, tokenized by `workers` processes (by this one, if it is 1)."""
    if workers == 1:
        encoder = Encoder(*arguments)
        for batch in batches:
            yield batch, encoder(batch.texts)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, arguments)
    waiting: deque[tuple[Batch, Future]] = deque()
    try:
        for batch in batches:
            waiting.append((batch._replace(texts=[]), pool.submit(_encode_in_worker, batch.texts)))
            if len(waiting) > 2 * workers:  # no more text in memory than keeps them busy
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool:
        raise UserError(
            "a tokenizing process was killed, perhaps for lack of memory; run the same command "
            "again, with fewer --workers, to go on"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _tokenize(
    partial: Path,
    sources: list[Source],
    options: ReadOptions,
    recipe: Recipe,
    tokenizer: TextTokenizer,
    state: State,
    settings: dict[str, Any],
    workers: int,
    report: Callable[[Progress], None],
) -> None:
    writers = {
        split: ShardWriter(
            partial, split, tokenizer.dtype, recipe.shard_tokens, state.shards[split]
        )
        for split in SPLITS
    }

    def commit() -> None:
        for writer in writers.values():
            writer.commit()
        record = {"settings": settings, "state": vars(state)}
        _write_atomically(partial / PROGRESS, json.dumps(record))

    known = [source.size for source in sources if source.size is not None]
    total = sum(known) if len(known) == len(sources) else None
    uncommitted, whole = 0, True  # whole: writers and state agree
    arguments = (tokenizer.to_json(), tokenizer.eot, recipe.valid_fraction, recipe.seed)
    try:
        with closing(_encoded(_batches(sources, options, state), arguments, workers)) as results:
            for batch, encoded in results:
                whole = False
                for split, tokens in encoded.items():
                    writers[split].append(*tokens)
                    uncommitted += tokens.text_bytes
                state.source, state.document = batch.source, batch.document
                state.empty += batch.empty
                state.skipped += batch.skipped
                whole = True
                if uncommitted >= COMMIT_BYTES:
                    commit()
                    uncommitted = 0
                report(
                    Progress(
                        state.total("documents"),
                        state.total("bytes"),
                        state.total("tokens"),
                        batch.read,
                        total,
                    )
                )
        commit()
    except (UserError, KeyboardInterrupt):
        if whole:
            commit()
        raise
    finally:
        for writer in writers.values():
            with suppress(OSError):  # of a full disk, which has been reported
                writer.close()


def _refuse_empty(state: State) -> None:
    if state.shards["train"]:
        return
    if state.shards["valid"]:
        raise UserError("every document fell into validation; take another --seed")
    raise UserError(
        f"the sources hold no text ({state.empty} documents are empty, {state.skipped} unreadable)"
    )


# ---------------------------------------------------------------- the tokenizer


def _given_tokenizer(recipe: Recipe) -> TextTokenizer:
    if recipe.bytes:
        return byte_tokenizer()
    assert recipe.tokenizer is not None
    return load_tokenizer(recipe.tokenizer, recipe.eot)


def _trained_tokenizer(
    partial: Path,
    sources: list[Source],
    options: ReadOptions,
    recipe: Recipe,
    notice: Callable[[str], None],
) -> TextTokenizer:
    """The tokenizer that an interrupted run has trained, or a new one."""
    assert recipe.bpe is not None
    if (partial / "tokenizer.json").exists():
        return replace(load_tokenizer(partial), origin="byte-level BPE")
    notice(f"training a byte-level BPE of {recipe.bpe} tokens")
    return train_bpe(_training_texts(sources, options, recipe), recipe.bpe)


def _training_texts(sources: list[Source], options: ReadOptions, recipe: Recipe) -> Iterator[str]:
    """Text of training documents only: the first `bpe_sample` bytes of it."""
    left = recipe.bpe_sample
    for source in sources:
        for text, _ in read_documents(source, options):
            if not text or in_validation(data := text.encode(), recipe.valid_fraction, recipe.seed):
                continue
            yield text
            left -= len(data)
            if left <= 0:
                return


# ---------------------------------------------------------------- the folder


def _settings(
    sources: list[Source], recipe: Recipe, tokenizer: TextTokenizer | None
) -> dict[str, Any]:
    """What two runs must share to write the same bytes, as JSON."""
    settings = {
        "tokenizer": {"bpe": recipe.bpe, "sample": recipe.bpe_sample}
        if tokenizer is None
        else {"sha256": tokenizer.sha256, "eot": tokenizer.eot},
        "valid_fraction": recipe.valid_fraction,
        "seed": recipe.seed,
        "text_field": recipe.text_field,
        "split_documents": recipe.split_documents,
        "shard_tokens": recipe.shard_tokens,
        "sources": [source.identity for source in sources],
    }
    return json.loads(json.dumps(settings))


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of what is at `out` already; anything else there is never touched."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / MANIFEST).is_file():
        raise UserError(f"{out} exists and is not a folder of token shards; choose another --out")
    manifest = read_manifest(out)
    if manifest["settings"] != settings:
        raise UserError(
            f"{out} holds shards made otherwise ({_differences(manifest['settings'], settings)}); "
            "choose another --out, or remove it"
        )
    _tidy(out)
    return manifest


def _resumed(partial: Path, settings: dict[str, Any], notice: Callable[[str], None]) -> State:
    if not (partial / PROGRESS).exists():
        record = {"settings": settings, "state": vars(State())}
        _write_atomically(partial / PROGRESS, json.dumps(record))
        return State()
    record = json.loads((partial / PROGRESS).read_text(encoding="utf-8"))
    if record["settings"] != settings:
        raise UserError(
            f"{partial} is an unfinished run made otherwise "
            f"({_differences(record['settings'], settings)}); finish it or remove it"
        )
    state = State(**record["state"])
    notice(f"going on from {partial}: {state.total('documents'):,} documents are done")
    return state


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    keys = [key for key in new if old.get(key) != new[key]]
    shown = [
        f"{key} differ" if isinstance(new[key], (list, dict)) else f"{key} {old.get(key)}"
        for key in keys
    ]
    return ", ".join(shown) or "by another version"


def _manifest(
    partial: Path, tokenizer: TextTokenizer, state: State, settings: dict[str, Any]
) -> dict[str, Any]:
    """Finishes the shards and describes them. Nothing in it depends on when or how fast."""
    files = [partial / name for name in tokenizer.files()]
    splits = {}
    for split in SPLITS:
        shards = state.shards[split]
        files += finish_shards(partial, tokenizer.dtype, shards)
        counts = ("documents", "tokens", "bytes")
        totals = {count: sum(shard[count] for shard in shards) for count in counts}
        splits[split] = {**totals, "shards": shards}
    return {
        "format": "spiralformer token shards",
        "version": 1,
        "tokenizer": {
            "origin": tokenizer.origin,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "eot": tokenizer.eot,
            "eot_id": tokenizer.eot_id,
        },
        "dtype": tokenizer.dtype.name,
        "splits": splits,
        "empty_documents": state.empty,
        "skipped_documents": state.skipped,
        "settings": settings,
        "files": {
            path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for path in files
        },
    }


def _tidy(out: Path) -> None:
    """Removes what only an unfinished folder needs."""
    for path in [*out.glob("*.sizes"), out / PROGRESS]:
        path.unlink(missing_ok=True)


@contextmanager
def _writing(partial: Path) -> Iterator[None]:
    try:
        partial.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space and run the same command again: it goes on from here"
        raise UserError(
            f"{partial}: cannot be written: {error.strerror or error}; "
            + (remedy if full else "choose another --out")
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Against a second process in the same folder. The system lets go when this one ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is writing here") from None
        yield
    finally:
        os.close(descriptor)


def _write_atomically(path: Path, content: str) -> None:
    beside = path.with_name(path.name + ".new")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


# ---------------------------------------------------------------- the manifest


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_text(manifest: dict[str, Any]) -> str:
    """With a checksum of itself, so that a flipped byte in the manifest shows as well."""
    body = json.dumps(manifest, indent=1)
    return json.dumps({**manifest, "checksum": hashlib.sha256(body.encode()).hexdigest()}, indent=1)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder of shards, checked against its own checksum."""
    path = Path(folder) / MANIFEST
    try:
        text = path.read_bytes().decode()
        manifest = json.loads(text)
        manifest.pop("checksum")
        intact = _manifest_text(manifest) == text
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make the folder with spiralformer data") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError):
        intact = False
    if not intact:
        raise UserError(f"{path}: damaged (its checksum does not hold); prepare the data anew")
    return manifest


def verify(path: str | Path) -> list[Path]:
    """Checks every file of a folder that `prepare` wrote against the manifest; shards that have no
    manifest are checked for consistency only. Returns the files, or raises at the first fault."""
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        shards = find_shards(folder)
        for shard in shards:
            shard.check()
        return [file for shard in shards for file in (*shard.bins, shard.idx)]
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file}: missing; prepare the data anew")
        size = file.stat().st_size
        if size != expected["size"]:
            raise UserError(f"{file}: {size:,} bytes in place of {expected['size']:,}")
        if file_sha256(file) != expected["sha256"]:
            raise UserError(f"{file}: damaged (its checksum differs); prepare the data anew")
    for split in manifest["splits"].values():
        for described in split["shards"]:
            Shard(folder / described["name"]).check()
    return [folder / name for name in manifest["files"]]
