"""Sequences to probe: windows of a text or of token shards, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spiralformer.data.shards import MANIFEST
from spiralformer.data.sources import ReadOptions, find_sources, read_documents
from spiralformer.data.tokenizer import load_tokenizer
from spiralformer.data.windows import open_split
from spiralformer.errors import UserError

CHARACTERS = 16 << 20  # of a text that are looked at, unless more are needed


@dataclass(frozen=True)
class Sample:
    sequences: list[Tensor]
    source: str
    notes: list[str]  # what differs from what was asked for


def draw(data: str, folder: Path, vocab_size: int, count: int, length: int, seed: int) -> Sample:
    """`count` windows of `length` tokens: of a text, by the model folder's tokenizer; of shards."""
    notes: list[str] = []
    if _is_shards(data):
        windows, source, total = _from_shards(data, folder, count, length, seed, notes)
    else:
        windows, source, total = _from_text(data, folder, count, length, seed, notes)
    for window in windows:
        if int(window.max()) >= vocab_size:
            raise UserError(
                f"{data}: has token {int(window.max())}, but the model's vocabulary is "
                f"{vocab_size}; tokenize the data with the model's tokenizer"
            )
    if len(windows) == 1 and len(windows[0]) < length:
        if len(windows[0]) < 2:
            raise UserError(f"{data}: {len(windows[0])} token in all; a probe needs two or more")
        notes.append(
            f"{source} has only {len(windows[0])} tokens: one sequence of all of them was used in "
            f"place of {count} of {length}"
        )
    elif len(windows) < count:
        notes.append(
            f"{count} sequences were asked for; {source} has {total} of {length} tokens, and all "
            "were used"
        )
    return Sample([torch.from_numpy(w.astype(np.int64)) for w in windows], source, notes)


# ---------------------------------------------------------------------------- shards


def _is_shards(data: str) -> bool:
    path = Path(data)
    if path.is_dir():
        return (path / MANIFEST).is_file() or any(path.glob("*.idx"))
    return path.suffix in (".bin", ".idx") or path.with_name(path.name + ".idx").is_file()


def _from_shards(
    data: str, folder: Path, count: int, length: int, seed: int, notes: list[str]
) -> tuple[list[np.ndarray], str, int]:
    """From the validation split where there is one."""
    split = "train"
    if (Path(data) / MANIFEST).is_file():
        split = "valid"
        try:
            stream = open_split(data, split).stream
        except UserError:  # every document fell into the other one
            split = "train"
            notes.append(f"{data} has no validation split: the training split was used")
        _compare_tokenizers(Path(data), folder, notes)
    if split == "train":
        stream = open_split(data, split).stream
    source = f"{data} ({'validation' if split == 'valid' else 'all'} tokens)"
    total = len(stream) // length
    if total == 0:
        return [stream.read(0, len(stream))], source, 0
    chosen = sorted(random.Random(seed).sample(range(total), min(count, total)))
    return [stream.read(i * length, (i + 1) * length) for i in chosen], source, total


def _compare_tokenizers(data: Path, folder: Path, notes: list[str]) -> None:
    files = [place / "tokenizer.json" for place in (data, folder)]
    if all(file.is_file() for file in files):
        ours, theirs = (load_tokenizer(file.parent).sha256 for file in files)
        if ours != theirs:
            notes.append(f"the tokenizer of {data} is not the one of {folder}")


# ---------------------------------------------------------------------------- text


def _from_text(
    data: str, folder: Path, count: int, length: int, seed: int, notes: list[str]
) -> tuple[list[np.ndarray], str, int]:
    """Documents, each ended by the end-of-text token, cut into windows; a fair draw of them."""
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder}: has no tokenizer.json to read text with; copy it there, or give token "
            "shards as --data"
        )
    limit = max(CHARACTERS, 8 * count * length)
    stopped: list[int] = []
    rng = random.Random(seed)
    kept: list[tuple[int, np.ndarray]] = []
    held, total = np.empty(0, np.int64), 0
    for tokens in _documents(data, folder, limit, stopped):
        held = np.concatenate([held, tokens])
        whole = len(held) // length
        for window in held[: whole * length].reshape(whole, length):
            total += 1
            place = rng.randrange(total)  # reservoir sampling: every window is as likely
            if len(kept) < count:
                kept.append((total, window))
            elif place < count:
                kept[place] = (total, window)
        held = held[whole * length :]
    if stopped:
        notes.append(f"only the first {stopped[0]:,} characters of {data} were looked at")
    if total == 0:
        return [held], data, 0
    return [window for _, window in sorted(kept, key=lambda pair: pair[0])], data, total


def _documents(data: str, folder: Path, limit: int, stopped: list[int]) -> Iterator[np.ndarray]:
    tokenizer = load_tokenizer(folder)
    read = 0
    for source in find_sources([data]):
        for document in read_documents(source, ReadOptions()):
            text = document.text or ""
            if not text:
                continue
            read += len(text)
            yield np.array([*tokenizer.encode(text), tokenizer.eot_id], np.int64)
            if read >= limit:
                stopped.append(read)
                return
    if not read:
        raise UserError(f"{data}: there is no text in it")
