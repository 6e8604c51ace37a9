"""Token shards: Megatron's and GPT-NeoX's memory-mapped `.bin` and `.idx` pair; folders of them,
with a manifest and checksums.

`NAME.bin` holds the tokens of all sequences, one after another. `NAME.idx`, little-endian:

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    1, the version
    uint8     type of a token, a code of `DTYPES`
    uint64    S, the number of sequences
    uint64    D, the number of entries of the document index (documents + 1)
    int32[S]  tokens of each sequence
    int64[S]  byte at which each begins in the .bin
    int64[D]  sequence at which each document begins, and S

A document written here is one sequence."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt
from typing_extensions import TypedDict

from spiralformer.errors import UserError
from spiralformer.files import checked, inside, parse_json, read_text

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 30  # bytes: it has a line for each source
SHARD_TOKENS = 1 << 30  # after so many a new shard is begun
CHECKED = 1 << 32  # bytes: so much data is checked in full when it is opened


# ---------------------------------------------------------------- reading shards


class TokenStream:
    """Arrays of tokens, read as if they were one. Nothing is copied before it is asked for."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = list(arrays)
        self.ends = np.cumsum([len(array) for array in self.arrays], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.arrays else 0

    def section(self, start: int, stop: int) -> TokenStream:
        """The part of the stream from `start` to before `stop`."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.ends, stop))
        pieces = []
        for array, end in zip(self.arrays[first : last + 1], self.ends[first:], strict=False):
            begin = int(end) - len(array)
            pieces.append(array[max(start - begin, 0) : stop - begin])
        return TokenStream(pieces)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop−1 as int64."""
        return np.concatenate([np.empty(0, np.int64), *self.section(start, stop).arrays])


class Shard:
    """A `.bin`/`.idx` pair, opened for reading. Also reads a `.bin` that was published in pieces,
    `NAME-00000-of-00020.bin` and so on, as EleutherAI's pre-tokenized Pile is."""

    def __init__(self, prefix: str | Path):
        self.prefix = Path(re.sub(r"(-\d{5}-of-\d{5}\.bin|\.bin|\.idx)$", "", str(prefix)))
        self.idx = self.prefix.with_name(self.prefix.name + ".idx")
        self.bins = self._find_bins()
        self._read_index()
        self._map_tokens()

    def __len__(self) -> int:
        """Sequences; in shards written here, documents."""
        return len(self.sizes)

    def __getitem__(self, i: int) -> np.ndarray:
        start = int(self.pointers[i]) // self.dtype.itemsize
        return self.stream.read(start, start + int(self.sizes[i]))

    def check(self) -> None:
        """Every entry of the index, where opening looks only at its ends."""
        spans = self.sizes.astype(np.int64) * self.dtype.itemsize
        if (self.sizes < 0).any() or (self.pointers != np.cumsum(spans) - spans).any():
            raise UserError(f"{self.idx}: sizes and pointers of the sequences disagree")
        starts = self.document_starts
        if (np.diff(starts) < 0).any() or (starts < 0).any() or (starts > len(self)).any():
            raise UserError(f"{self.idx}: the document index is not in order")

    def _find_bins(self) -> list[Path]:
        whole = self.prefix.with_name(self.prefix.name + ".bin")
        if whole.is_file():
            return [whole]
        pieces = sorted(self.prefix.parent.glob(self.prefix.name + "-?????-of-?????.bin"))
        if not pieces:
            raise UserError(f"{whole}: no such token file")
        return pieces

    def _read_index(self) -> None:
        try:
            size = self.idx.stat().st_size
            with open(self.idx, "rb") as file:
                header = file.read(HEADER.size)
        except OSError as error:
            raise UserError(f"{self.idx}: cannot be read: {error.strerror}") from None
        if not header.startswith(MAGIC):
            raise UserError(f"{self.idx}: not a Megatron index (its first bytes are not MMIDIDX)")
        if len(header) < HEADER.size:
            raise UserError(f"{self.idx}: truncated: {size} bytes, shorter than its header")
        _, version, code, sequences, documents = HEADER.unpack(header)
        if version != 1:
            raise UserError(f"{self.idx}: version {version} of the index; this reads version 1")
        if code not in DTYPES:
            raise UserError(f"{self.idx}: type code {code} is not one of integer tokens")
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        expected = HEADER.size + sequences * (4 + 8) + documents * 8
        _require_size(self.idx, size, expected)
        index = np.memmap(self.idx, np.uint8, "r")
        pointers_at = HEADER.size + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        self.sizes = index[HEADER.size : pointers_at].view("<i4")
        self.pointers = index[pointers_at:documents_at].view("<i8")
        self.document_starts = index[documents_at:].view("<i8")

    def _map_tokens(self) -> None:
        sizes = [path.stat().st_size for path in self.bins]
        expected = 0
        if len(self):
            expected = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize
        _require_size(self.bins[0], sum(sizes), expected)
        arrays = []
        for path, size in zip(self.bins, sizes, strict=True):
            if size % self.dtype.itemsize:
                raise UserError(f"{path}: ends inside a token; join the pieces with cat")
            if size:
                arrays.append(np.memmap(path, self.dtype, "r"))
        self.stream = TokenStream(arrays)


def _require_size(path: Path, size: int, expected: int) -> None:
    if size != expected:
        problem = "truncated" if size < expected else "too long"
        raise UserError(
            f"{path}: {problem}: {size:,} bytes in place of {expected:,}; fetch or write it anew"
        )


def find_shards(path: str | Path) -> list[Shard]:
    """The shards that a path names: a pair's common name, either file of it, or a folder."""
    path = Path(path)
    if not path.is_dir():
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        if not any(file.name.startswith(path.name) for file in beside):
            raise UserError(f"{path}: no such folder or shards; make them with spiralformer data")
        return [Shard(path)]
    indices = sorted(path.glob("*.idx"))
    if not indices:
        raise UserError(f"{path}: no token shards (.bin and .idx) in this folder")
    return [Shard(index) for index in indices]


# ---------------------------------------------------------------- folders with a manifest


class ShardRecord(TypedDict):
    """How much of a shard counts."""

    name: Annotated[str, Field(pattern=r"^(train|valid)-[0-9]{5,9}$")]
    documents: NonNegativeInt
    tokens: NonNegativeInt
    bytes: NonNegativeInt


class SplitRecord(TypedDict):
    documents: NonNegativeInt
    tokens: NonNegativeInt
    bytes: NonNegativeInt
    shards: list[ShardRecord]


class SplitRecords(TypedDict):
    train: SplitRecord
    valid: SplitRecord


class TokenizerRecord(TypedDict):
    origin: str
    vocab_size: NonNegativeInt
    eot: str
    eot_id: NonNegativeInt


class FileRecord(TypedDict):
    size: NonNegativeInt
    sha256: str


FileName = Annotated[str, Field(pattern=r"^[^/\\]+$", max_length=255)]


class Manifest(TypedDict):
    """What is asked of a manifest; it says more."""

    tokenizer: TokenizerRecord
    dtype: str
    splits: SplitRecords
    empty_documents: NonNegativeInt
    skipped_documents: NonNegativeInt
    settings: dict[str, Any]
    files: dict[FileName, FileRecord]


def manifest_text(manifest: dict[str, Any]) -> str:
    """With a checksum of itself, so that a flipped byte in the manifest shows as well."""
    body = json.dumps(manifest, indent=1)
    return json.dumps({**manifest, "checksum": hashlib.sha256(body.encode()).hexdigest()}, indent=1)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder of shards, checked against its own checksum."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise UserError(f"{path}: no such file; make the folder with spiralformer data")
    text = read_text(path, LARGEST_MANIFEST)
    try:
        manifest = parse_json(text, path)
        intact = manifest.pop("checksum") and manifest_text(manifest) == text
    except (UserError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise UserError(f"{path}: damaged (its checksum does not hold); prepare the data anew")
    checked(manifest, Manifest, path)
    return manifest


def file_record(path: Path) -> FileRecord:
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": sha256}


@functools.lru_cache(maxsize=1024)
def _is_intact(path: Path, size: int, changed: int, sha256: str) -> bool:
    """Remembered for a file that has this size and was changed at this time."""
    return file_record(path) == {"size": size, "sha256": sha256}


def require_intact(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise UserError(f"{path}: missing; prepare the data anew")
    about = path.stat()
    size, sha256 = expected["size"], expected["sha256"]
    if about.st_size != size or not _is_intact(path, size, about.st_mtime_ns, sha256):
        raise UserError(f"{path}: damaged (its checksum differs); prepare the data anew")


def check_opened(shards: Sequence[Shard], files: dict[str, Any] | None = None) -> None:
    """Damage would be trained on in silence. Every byte is read where that takes seconds; of more
    data the sizes alone are known to be right, and `verify` is there for the rest."""
    tokens, indices = [path for shard in shards for path in shard.bins], [s.idx for s in shards]
    for paths in (tokens, indices):
        if files is not None and _size(paths) <= CHECKED:
            for path in paths:
                require_intact(path, files[path.name])
    if _size(indices) <= CHECKED:
        for shard in shards:
            shard.check()


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def verify(path: str | Path) -> list[Path]:
    """Checks every file of a prepared folder against the manifest; shards that have no manifest are
    checked for consistency only. Returns the files, or raises at the first fault."""
    folder = Path(path)
    _is_intact.cache_clear()
    if not (folder / MANIFEST).is_file():
        shards = find_shards(folder)
        files = [file for shard in shards for file in (*shard.bins, shard.idx)]
    else:
        manifest = read_manifest(folder)
        for name, expected in manifest["files"].items():
            require_intact(inside(folder, name), expected)
        described = [shard for split in manifest["splits"].values() for shard in split["shards"]]
        shards = [Shard(folder / shard["name"]) for shard in described]
        files = [folder / name for name in manifest["files"]]
    for shard in shards:
        shard.check()
    return files


# ---------------------------------------------------------------- writing shards


def write_index(path: Path, sizes: np.ndarray, dtype: np.dtype) -> None:
    """The `.idx` of a `.bin` whose documents are one sequence each."""
    sizes = np.asarray(sizes, "<i4")
    spans = sizes.astype("<i8") * dtype.itemsize
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, CODES[dtype], len(sizes), len(sizes) + 1))
        file.write(sizes.tobytes())
        file.write((np.cumsum(spans) - spans).astype("<i8").tobytes())
        file.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())


def append_documents(
    folder: Path,
    split: str,
    shards: list[ShardRecord],
    documents: list[np.ndarray],
    text_bytes: int,
) -> None:
    """Puts tokenized documents behind those that `shards` describes, the caller's record of how
    much of each file counts: a run that was stopped at any time is taken up from its record. Until
    `finish_shards` makes the index, the sizes of the documents are in a file of their own."""
    if not documents:
        return
    if not shards or shards[-1]["tokens"] >= SHARD_TOKENS:
        name = f"{split}-{len(shards):05}"
        shards.append({"name": name, "documents": 0, "tokens": 0, "bytes": 0})
    shard = shards[-1]
    tokens = np.concatenate(documents)
    sizes = np.array([len(document) for document in documents], "<i4")
    path = folder / shard["name"]
    _write_from(path.with_suffix(".bin"), shard["tokens"], tokens)
    _write_from(path.with_suffix(".sizes"), shard["documents"], sizes)
    shard["documents"] += len(sizes)
    shard["tokens"] += len(tokens)
    shard["bytes"] += text_bytes


def _write_from(path: Path, count: int, array: np.ndarray) -> None:
    """Puts an array behind the first `count` numbers of a file, in place of what follows them."""
    start = count * array.itemsize
    with open(path, "ab") as file:
        if file.tell() < start:
            raise UserError(
                f"{path}: {file.tell():,} bytes in place of {start:,}: the unfinished run cannot "
                f"be taken up again; remove {path.parent} and start anew"
            )
        file.truncate(start)
        file.write(array.tobytes())
        file.flush()
        os.fsync(file.fileno())


def finish_shards(folder: Path, dtype: np.dtype, shards: list[ShardRecord]) -> Iterator[Path]:
    """Writes the index of each shard; yields the files of the shards."""
    for shard in shards:
        tokens, index = (folder / f"{shard['name']}{suffix}" for suffix in (".bin", ".idx"))
        write_index(index, np.fromfile(index.with_suffix(".sizes"), "<i4"), dtype)
        yield from (tokens, index)
