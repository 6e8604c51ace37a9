"""Sequences to probe: windows of a text or of token shards, drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spiralformer.console import count
from spiralformer.data.shards import MANIFEST, TokenStream
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


def draw(data: str, folder: Path, vocab_size: int, wanted: int, length: int, seed: int) -> Sample:
    """`wanted` windows of `length` tokens: of a text, by the model's tokenizer; of shards."""
    notes: list[str] = []
    if _is_shards(data):
        stream, source = _open_shards(data, folder, notes)
    else:
        limit = max(CHARACTERS, 8 * wanted * length)
        stream, source = _read_text(data, folder, limit, notes), data
    tokens = len(stream)
    if tokens < 2:
        raise UserError(f"{data}: {count(tokens, 'token')} in all; a probe needs two")
    size = min(length, tokens)
    total = tokens // size
    if tokens < length:
        notes.append(
            f"{source} has only {count(tokens, 'token')}: one sequence of all of them was used in "
            f"place of {wanted} of {length}"
        )
    elif total < wanted:
        notes.append(
            f"{wanted:,} sequences were asked for; {source} has only {total:,} of {length} tokens"
        )
    chosen = sorted(random.Random(seed).sample(range(total), min(wanted, total)))
    windows = [stream.read(i * size, (i + 1) * size) for i in chosen]
    largest = max(int(window.max()) for window in windows)
    if largest >= vocab_size:
        raise UserError(
            f"{data}: has token {largest}, but the model's vocabulary is {vocab_size}; tokenize "
            "the data with the model's tokenizer"
        )
    return Sample([torch.from_numpy(window) for window in windows], source, notes)


def _is_shards(data: str) -> bool:
    path = Path(data)
    if path.is_dir():
        return (path / MANIFEST).is_file() or any(path.glob("*.idx"))
    return path.suffix in (".bin", ".idx") or path.with_name(path.name + ".idx").is_file()


def _open_shards(data: str, folder: Path, notes: list[str]) -> tuple[TokenStream, str]:
    """The validation split where there is one."""
    if not (Path(data) / MANIFEST).is_file():
        return open_split(data, "train").stream, f"{data} (all tokens)"
    files = [place / "tokenizer.json" for place in (Path(data), folder)]
    if all(file.is_file() for file in files):
        ours, theirs = (load_tokenizer(file.parent).sha256 for file in files)
        if ours != theirs:
            notes.append(f"the tokenizer of {data} is not the one of {folder}")
    try:
        return open_split(data, "valid").stream, f"{data} (validation tokens)"
    except UserError:  # every document fell into the other one
        notes.append(f"{data} has no validation split: the training split was used")
        return open_split(data, "train").stream, f"{data} (all tokens)"


def _read_text(data: str, folder: Path, limit: int, notes: list[str]) -> TokenStream:
    """Documents, each ended by the end-of-text token, up to about `limit` characters."""
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder}: has no tokenizer.json to read text with; copy it there, or give token "
            "shards as --data"
        )
    tokenizer = load_tokenizer(folder)
    end = np.array([tokenizer.eot_id], tokenizer.dtype)
    arrays: list[np.ndarray] = []
    read = 0
    documents = (
        document.text
        for source in find_sources([data])
        for document in read_documents(source, ReadOptions())
    )
    for text in filter(None, documents):
        read += len(text)
        arrays += [tokenizer.tokens(text), end]
        if read >= limit:
            notes.append(f"only the first {read:,} characters of {data} were looked at")
            break
    if not read:
        raise UserError(f"{data}: there is no text in it")
    return TokenStream([np.concatenate(arrays)])
