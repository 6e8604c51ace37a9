"""From sources to a folder of token shards: tokenize in parallel, split, write, record.

All is written to `OUT.partial`, which becomes `OUT` when it is complete: a folder named `OUT` is
never half-finished. In between, `progress.json` says up to which document everything is on disk;
the next run with the same settings goes on from there and ends with the same bytes."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import NonNegativeInt

from spiralformer.data.shards import (
    LARGEST_MANIFEST,
    MANIFEST,
    ShardRecord,
    append_documents,
    file_record,
    finish_shards,
    manifest_text,
    read_manifest,
)
from spiralformer.data.sources import (
    LONGEST_DOCUMENT,
    Document,
    ReadOptions,
    Source,
    cut,
    document_size,
    read_documents,
)
from spiralformer.data.tokenizer import (
    LARGEST_BPE,
    SMALLEST_BPE,
    TextTokenizer,
    byte_tokenizer,
    load_tokenizer,
    train_bpe,
)
from spiralformer.errors import UserError
from spiralformer.files import locked, read_record, write_json, write_text, writing

SPLITS = ("train", "valid")
PROGRESS = "progress.json"
LOCK = ".lock"
BATCH_BYTES = 1 << 18  # text that a worker takes at a time
COMMIT_BYTES = 1 << 24  # text between two commits: what an interruption costs
BPE_BYTES = 256_000_000  # of training text that a BPE is trained on, from the first
PIECES = 16  # into about so many each document is cut where there are fewer documents than that


@dataclass(frozen=True)
class Recipe:
    """What decides the bytes that are written."""

    tokenizer: str | Path | None = None  # a path; else `bpe` or `bytes` holds
    bpe: int | None = None  # vocabulary of a BPE to train
    bytes: bool = False
    eot: str | None = None
    valid_fraction: float = 0.005
    seed: int = 0
    text_field: str = "text"
    split_documents: str = "auto"

    def __post_init__(self) -> None:
        if (self.tokenizer is not None) + (self.bpe is not None) + self.bytes != 1:
            raise UserError("choose one of --tokenizer PATH, --train-bpe VOCAB and --bytes")
        if not 0 <= self.valid_fraction < 1:
            raise UserError(f"--valid-fraction {self.valid_fraction} is not in 0 … 1 (1 excluded)")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed} is not in 0 … 2^63 - 1")
        document_size(self.split_documents)
        if self.bpe is not None and not SMALLEST_BPE <= self.bpe <= LARGEST_BPE:
            raise UserError(
                f"--train-bpe {self.bpe}: a vocabulary is in {SMALLEST_BPE} … {LARGEST_BPE:,}"
            )


@dataclass
class State:
    """Up to where everything is on disk."""

    source: NonNegativeInt = 0  # sources before this one are finished
    document: NonNegativeInt = 0  # and so many documents of this one
    empty: NonNegativeInt = 0
    skipped: NonNegativeInt = 0
    shards: dict[str, list[ShardRecord]] = field(
        default_factory=lambda: {split: [] for split in SPLITS}
    )

    def __post_init__(self) -> None:
        if set(self.shards) != set(SPLITS):
            raise ValueError(f"shards must be of {' and '.join(SPLITS)}")


@dataclass
class Unfinished:
    """The contents of `progress.json`."""

    settings: dict[str, Any]
    state: State


@dataclass(frozen=True)
class Choice:
    """Which documents are for validation: those of the lowest hashes. By the content, so that a
    document and its copies are on the same side."""

    seed: int
    below: int  # 0 … 2^64: a hash under it is for validation
    pieces: bool = False  # there are so few documents that each is cut

    @classmethod
    def of(
        cls,
        sources: list[Source],
        options: ReadOptions,
        recipe: Recipe,
        notice: Callable[[str], None],
    ) -> Choice:
        """As many as the recipe says. Where that would be none, one: of the documents, or of their
        pieces where the documents are few. Reads until there is a document for either side."""
        asked = cls(recipe.seed, round(recipe.valid_fraction * 2**64))
        if not asked.below:
            return asked
        none = f"no document falls into validation at --valid-fraction {recipe.valid_fraction:g}"
        lowest, highest, number = 2**64, -1, 0
        for hashed in asked.hashes(sources, options):
            lowest, highest, number = min(lowest, hashed), max(highest, hashed), number + 1
            if lowest < min(highest, asked.below):
                return asked
        if number >= PIECES and lowest < highest:
            notice(f"{none}: one is taken for it")
            return replace(asked, below=lowest + 1)
        cut = replace(asked, pieces=True)
        hashes = set(cut.hashes(sources, options))
        if len(hashes) < 2:
            return replace(asked, below=0)  # then at least to train on
        notice(f"{none}: they are cut into {len(hashes)}, and one is taken for it")
        return replace(cut, below=max(asked.below, min(hashes) + 1))

    def hashes(self, sources: list[Source], options: ReadOptions) -> Iterator[int]:
        for source in sources:
            for text, _ in self.documents(source, options):
                if text:
                    yield self.hash(text.encode())

    def hash(self, text: bytes) -> int:
        salt = self.seed.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=salt).digest(), "little")

    def in_validation(self, text: bytes) -> bool:
        return self.hash(text) < self.below

    def documents(self, source: Source, options: ReadOptions) -> Iterator[Document]:
        for document in read_documents(source, options):
            if not self.pieces or not document.text:
                yield document
                continue
            data = document.text.encode()
            for piece in filter(None, cut(io.BytesIO(data), max(1, len(data) // PIECES))):
                yield Document(piece.decode(), document.consumed)


def prepare(
    sources: list[Source],
    out: str | Path,
    recipe: Recipe,
    *,
    workers: int = 1,
    skip_bad: bool = False,
    report: Callable[[int, int], None] = lambda read, tokens: None,
    notice: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Writes the shards of all documents of the sources and returns the manifest. `report` is told
    the bytes of the sources that are read, and the tokens of this run."""
    out = Path(out)
    tokenizer = _given_tokenizer(recipe)
    settings = _settings(sources, recipe, tokenizer)
    finished = _finished(out, settings)
    if finished:
        notice(f"{out} is already done: nothing to do")
        return finished

    partial = out.with_name(out.name + ".partial")
    options = ReadOptions(recipe.text_field, recipe.split_documents, skip_bad, LONGEST_DOCUMENT)
    with (
        writing(partial, "run the same command again to go on, or choose another --out"),
        locked(partial / LOCK, "writing", "wait for it, or choose another --out"),
    ):
        state = _resumed(partial, settings, notice)
        try:
            choice = Choice.of(sources, options, recipe, notice)
            if tokenizer is None:
                texts = _training_texts(sources, options, choice)
                tokenizer = _trained_tokenizer(partial, texts, recipe, notice)
            tokenizer.save(partial)
            batches = _batches(sources, replace(options, notice=notice), choice, state)
            with closing(_encoded(batches, tokenizer, choice, workers)) as encoded:
                _write(partial, settings, state, encoded, report)
            if not state.shards["train"]:
                raise UserError(
                    f"the sources have no text to train on: {state.empty} documents are empty, "
                    f"{state.skipped} unreadable; all others fell into validation (--seed)"
                )
        except UserError:
            if not state.shards["train"]:  # nothing worth keeping
                shutil.rmtree(partial)
            raise
        manifest = _manifest(partial, tokenizer, state, settings)
        write_text(partial / MANIFEST, manifest_text(manifest))
        os.rename(partial, out)  # replaces an empty folder, and no other
        _tidy(out)
    return manifest


def _write(
    partial: Path,
    settings: dict[str, Any],
    state: State,
    encoded: Iterator[tuple[Batch, list[Encoded]]],
    report: Callable[[int, int], None],
) -> None:
    pending: list[Encoded] = []

    def commit() -> None:
        for split in SPLITS:
            documents = [document for document in pending if document.split == split]
            append_documents(
                partial,
                split,
                state.shards[split],
                [document.tokens for document in documents],
                sum(document.text_bytes for document in documents),
            )
        pending.clear()
        write_json(partial / PROGRESS, {"settings": settings, "state": vars(state)})

    uncommitted = tokens = 0
    for batch, documents in encoded:
        pending += documents
        uncommitted += sum(document.text_bytes for document in documents)
        tokens += sum(len(document.tokens) for document in documents)
        state.source, state.document = batch.source, batch.document
        state.empty += batch.empty
        state.skipped += batch.skipped
        if uncommitted >= COMMIT_BYTES:
            commit()
            uncommitted = 0
        report(batch.read, tokens)
    commit()


# ---------------------------------------------------------------- tokenizing


class Batch(NamedTuple):
    """Documents to tokenize, and where the sources stand after them."""

    texts: list[str]
    source: int
    document: int
    empty: int
    skipped: int
    read: int  # bytes of the sources before this point


def _batches(
    sources: list[Source], options: ReadOptions, choice: Choice, state: State
) -> Iterator[Batch]:
    """All documents after `state`. Batches are the same whether or not the run was interrupted,
    because it is taken up again at the end of a batch."""
    texts: list[str] = []
    size = empty = skipped = 0
    first, done = state.source, state.document  # the state moves on while this reads ahead
    before = sum(source.size or 0 for source in sources[:first])
    for number, source in enumerate(sources[first:], first):
        for index, (text, consumed) in enumerate(choice.documents(source, options), 1):
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


class Encoded(NamedTuple):
    split: str
    tokens: np.ndarray  # and the end of text
    text_bytes: int


def _encode(texts: list[str], tokenizer: TextTokenizer, choice: Choice) -> list[Encoded]:
    eot = np.array([tokenizer.eot_id], tokenizer.dtype)
    documents = []
    for text in texts:
        data, tokens = text.encode(), np.append(tokenizer.tokens(text), eot)
        split = SPLITS[choice.in_validation(data)]
        documents.append(Encoded(split, tokens, len(data)))
    return documents


def _encoded(
    batches: Iterator[Batch], tokenizer: TextTokenizer, choice: Choice, workers: int
) -> Generator[tuple[Batch, list[Encoded]], None, None]:
    """The batches in their order, tokenized by threads: a tokenizer works without Python's lock."""
    waiting: deque[tuple[Batch, Future[list[Encoded]]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for batch in batches:
            waiting.append((batch, pool.submit(_encode, batch.texts, tokenizer, choice)))
            if len(waiting) > 2 * workers:  # no more text in memory than keeps them busy
                first, future = waiting.popleft()
                yield first, future.result()
        for last, future in waiting:
            yield last, future.result()


# ---------------------------------------------------------------- the tokenizer


def _given_tokenizer(recipe: Recipe) -> TextTokenizer | None:
    """None where one is to be trained."""
    if recipe.bytes:
        return byte_tokenizer()
    return load_tokenizer(recipe.tokenizer, recipe.eot) if recipe.tokenizer is not None else None


def _trained_tokenizer(
    partial: Path, texts: Iterator[str], recipe: Recipe, notice: Callable[[str], None]
) -> TextTokenizer:
    """The tokenizer that an interrupted run has trained, or else another."""
    assert recipe.bpe is not None
    if (partial / "tokenizer.json").exists():
        return replace(load_tokenizer(partial), origin="byte-level BPE")
    notice(f"training a byte-level BPE of {recipe.bpe:,} tokens")
    return train_bpe(texts, recipe.bpe)


def _training_texts(sources: list[Source], options: ReadOptions, choice: Choice) -> Iterator[str]:
    """Text of training documents only: the first `BPE_BYTES` of it."""
    left = BPE_BYTES
    for source in sources:
        for text, _ in choice.documents(source, options):
            if not text or choice.in_validation(data := text.encode()):
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
    return {
        "tokenizer": {"sha256": tokenizer.sha256, "eot": tokenizer.eot}
        if tokenizer
        else {"bpe": recipe.bpe},
        "valid_fraction": recipe.valid_fraction,
        "seed": recipe.seed,
        "text_field": recipe.text_field,
        "split_documents": recipe.split_documents,
        "sources": [source.identity for source in sources],
    }


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The settings that differ; those that only an earlier version had are not asked."""
    described = []
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            before = {k: v for k, v in before.items() if k in value}
        if before != value:
            plain = not isinstance(value, (list, dict))
            described.append(f"{key} {before}" if plain else f"{key} differ")
    return ", ".join(described)


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of what is at `out` already; anything else there is never touched."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / MANIFEST).is_file():
        raise UserError(f"{out} exists and is not a folder of token shards; choose another --out")
    manifest = read_manifest(out)
    if differences := _differences(manifest["settings"], settings):
        raise UserError(
            f"{out} holds shards made otherwise ({differences}); choose another --out, or remove it"
        )
    _tidy(out)
    return manifest


def _resumed(partial: Path, settings: dict[str, Any], notice: Callable[[str], None]) -> State:
    if not (partial / PROGRESS).exists():
        write_json(partial / PROGRESS, {"settings": settings, "state": vars(State())})
        return State()
    record = read_record(partial / PROGRESS, Unfinished, LARGEST_MANIFEST)
    if differences := _differences(record.settings, settings):
        raise UserError(
            f"{partial} is an unfinished run made otherwise ({differences}); finish it or remove it"
        )
    state = record.state
    done = sum(shard["documents"] for split in SPLITS for shard in state.shards[split])
    notice(f"going on from {partial}: {done:,} documents are done")
    return state


def _manifest(
    partial: Path, tokenizer: TextTokenizer, state: State, settings: dict[str, Any]
) -> dict[str, Any]:
    """Finishes the shards and describes them. Nothing in it depends on when or how fast."""
    files = [partial / name for name in tokenizer.files()]
    splits = {}
    for split in SPLITS:
        shards = state.shards[split]
        files += finish_shards(partial, tokenizer.dtype, shards)
        splits[split] = {
            "documents": sum(shard["documents"] for shard in shards),
            "tokens": sum(shard["tokens"] for shard in shards),
            "bytes": sum(shard["bytes"] for shard in shards),
            "shards": shards,
        }
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
        "files": {path.name: file_record(path) for path in files},
    }


def _tidy(out: Path) -> None:
    """Removes what only an unfinished folder needs."""
    for path in [*out.glob("*.sizes"), out / PROGRESS, out / LOCK]:
        path.unlink(missing_ok=True)
