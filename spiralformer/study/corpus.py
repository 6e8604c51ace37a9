"""The data of a study: a folder of shards, the bytes of a file, or the embedded corpus."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spiralformer.errors import UserError
from spiralformer.files import digest, locked, new_folder

SPLITS = {"train": 0.9, "valid": 0.05, "test": 0.05}  # of a file; those of enwik8
VALID_FRACTION = 0.05  # of the embedded corpus


@dataclass(frozen=True)
class Corpus:
    name: str
    train: str  # folders of shards
    valid: str

    @property
    def vocab_size(self) -> int | None:
        """Of a model, which likes multiples of 64; None where no tokenizer is known."""
        from spiralformer.data.tokenizer import byte_tokenizer
        from spiralformer.data.windows import open_split

        known = open_split(self.train, "train").vocab_size
        if tokens_are_bytes(self.train):
            known = byte_tokenizer().vocab_size
        return None if known is None else -(-known // 64) * 64


def open_corpus(folder: str, file: str, cache: Path) -> Corpus:
    """The shards of `folder`, of the bytes of `file`, or of the embedded corpus."""
    if folder:
        if not Path(folder).is_dir():
            raise UserError(f"--data {folder}: no such folder; `spiralformer data` makes one")
        return Corpus(Path(folder).resolve().name, folder, folder)
    with locked(cache / "data" / "lock", "preparing the data", "wait for it", timeout=600):
        return _of_file(Path(file), cache / "data") if file else _embedded(cache / "data")


def _embedded(cache: Path) -> Corpus:
    from spiralformer.data.prepare import Recipe, prepare
    from spiralformer.data.sources import find_sources

    sources = find_sources(["stdlib"])
    name = f"stdlib-{digest(sources[0].identity)[:6]}"  # another Python has another
    folder = str(cache / name)
    prepare(sources, folder, Recipe(bytes=True, valid_fraction=VALID_FRACTION))
    return Corpus(name, folder, folder)


def _of_file(file: Path, cache: Path) -> Corpus:
    """Files of one name are told apart by their content."""
    if not file.is_file():
        raise UserError(f"--corpus {file}: no such file")
    name = f"{file.name.removesuffix('.gz')}-{digest(file)[:6]}"
    if not (cache / name).exists():
        _split_file(file, cache / name)
    return Corpus(name, str(cache / name / "train"), str(cache / name / "valid"))


def _split_file(file: Path, folder: Path) -> None:
    """The bytes of a file in order, a folder of shards for each split: a token is a byte."""
    from spiralformer.data.shards import write_index
    from spiralformer.data.tokenizer import byte_tokenizer

    try:
        content = file.read_bytes()
        content = gzip.decompress(content) if file.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"--corpus {file}: cannot be read: {error}") from None
    ends = np.round(np.cumsum(list(SPLITS.values())) * len(content)).astype(int)
    with new_folder(folder) as part:
        for split, end, start in zip(SPLITS, ends, [0, *ends], strict=False):
            byte_tokenizer().save(part / split)
            (part / split / f"{split}.bin").write_bytes(content[start:end])
            write_index(part / split / f"{split}.idx", np.array([end - start]), np.dtype(np.uint8))


def tokens_are_bytes(folder: str) -> bool:
    """Shards that `_split_file` wrote have no manifest that could say so."""
    from spiralformer.data.windows import open_split

    return all(array.dtype == np.uint8 for array in open_split(folder, "train").stream.arrays)
