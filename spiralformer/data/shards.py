"""Token shards: Megatron's and GPT-NeoX's memory-mapped `.bin` and `.idx` pair.

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

import os
import re
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spiralformer.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


class TokenStream:
    """Arrays of tokens, read as if they were one. Nothing is copied before it is asked for."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = list(arrays)
        self.ends = np.cumsum([len(array) for array in self.arrays], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.arrays else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop−1 as int64."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        pieces = []
        first = int(np.searchsorted(self.ends, start, side="right"))
        for array, end in zip(self.arrays[first:], self.ends[first:], strict=True):
            begin = int(end) - len(array)
            pieces.append(array[max(start - begin, 0) : stop - begin])
            if end >= stop:
                break
        return np.concatenate([np.empty(0, np.int64), *pieces]).astype(np.int64, copy=False)

    def section(self, start: int, stop: int) -> TokenStream:
        """The part of the stream from `start` to before `stop`."""
        begins = [int(end) - len(array) for array, end in zip(self.arrays, self.ends, strict=True)]
        cut = [
            array[max(start - begin, 0) : max(stop - begin, 0)]
            for array, begin in zip(self.arrays, begins, strict=True)
        ]
        return TokenStream([array for array in cut if len(array)])


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
        self.dtype = np.dtype(DTYPES[code])
        expected = HEADER.size + sequences * (4 + 8) + documents * 8
        if size != expected:
            problem = "truncated" if size < expected else "too long"
            raise UserError(f"{self.idx}: {problem}: {size:,} bytes in place of {expected:,}")

        index = np.memmap(self.idx, np.uint8, "r")
        pointers_at = HEADER.size + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        self.sizes = index[HEADER.size : pointers_at].view("<i4")
        self.pointers = index[pointers_at:documents_at].view("<i8")
        self.document_starts = index[documents_at:].view("<i8")

    def _map_tokens(self) -> None:
        present = [path.stat().st_size for path in self.bins]
        expected = 0
        if len(self):
            expected = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize
        if sum(present) != expected:
            problem = "truncated" if sum(present) < expected else "too long"
            raise UserError(
                f"{self.bins[0]}: {problem}: {sum(present):,} bytes in {len(self.bins)} file(s), "
                f"but {self.idx.name} describes {expected:,}; fetch or write it anew"
            )
        for path, size in zip(self.bins, present, strict=True):
            if size % self.dtype.itemsize:
                raise UserError(f"{path}: ends inside a token; join the pieces with cat")
        little_endian = self.dtype.newbyteorder("<")
        self.stream = TokenStream(
            [
                np.memmap(path, little_endian, "r")
                for path, size in zip(self.bins, present, strict=True)
                if size
            ]
        )

    @cached_property
    def documents(self) -> int:
        return max(len(self.document_starts) - 1, 0)


def find_shards(path: str | Path) -> list[Shard]:
    """The shards that a path names: a pair's common name, either file of it, or a folder."""
    path = Path(path)
    if not path.is_dir():
        return [Shard(path)]
    indices = sorted(path.glob("*.idx"))
    if not indices:
        raise UserError(f"{path}: no token shards (.bin and .idx) in this folder")
    return [Shard(index) for index in indices]


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


class ShardWriter:
    """Writes the shards of one split, `train-00000` and so on, in a way that can be taken up again:
    tokens and sizes are appended to two files, and `state` says how much of them counts. When all
    is written, `finish_shards` makes the indices."""

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype,
        shard_tokens: int,
        state: list[dict[str, Any]] | None = None,
    ):
        self.folder, self.split, self.dtype = folder, split, dtype
        self.shard_tokens = shard_tokens
        self.state = [] if state is None else state  # the caller's list, kept up to date
        self._open_files: list[Any] = []
        for shard in self.state:
            self._cut_back(f"{shard['name']}.bin", shard["tokens"] * dtype.itemsize)
            self._cut_back(f"{shard['name']}.sizes", shard["documents"] * 4)
        if self.state:
            self._open(self.state[-1]["name"], "ab")

    def append(self, tokens: np.ndarray, sizes: np.ndarray, text_bytes: int) -> None:
        """Whole documents: their tokens, the number of tokens of each, and their bytes of text."""
        if not len(sizes):
            return
        if not self.state or self.state[-1]["tokens"] >= self.shard_tokens:
            name = f"{self.split}-{len(self.state):05}"
            self.commit()
            self._open(name, "wb")
            self.state.append({"name": name, "documents": 0, "tokens": 0, "bytes": 0})
        for file, array in zip(self._open_files, (tokens, sizes), strict=True):
            file.write(array.tobytes())
        self.state[-1]["documents"] += len(sizes)
        self.state[-1]["tokens"] += len(tokens)
        self.state[-1]["bytes"] += text_bytes

    def commit(self) -> None:
        """All that was appended is on disk."""
        for file in self._open_files:
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._open_files:
            file.close()
        self._open_files = []

    def _cut_back(self, name: str, size: int) -> None:
        """Drops what an interrupted run wrote after its last commit."""
        path = self.folder / name
        present = path.stat().st_size if path.exists() else 0
        if present < size:
            raise UserError(
                f"{path}: {present:,} bytes in place of {size:,}: the unfinished run cannot be "
                f"taken up again; remove {self.folder} and start anew"
            )
        os.truncate(path, size)

    def _open(self, name: str, mode: str) -> None:
        self.close()
        self._open_files = [
            open(self.folder / f"{name}{suffix}", mode)  # noqa: SIM115
            for suffix in (".bin", ".sizes")
        ]


def finish_shards(folder: Path, dtype: np.dtype, state: list[dict[str, Any]]) -> Iterator[Path]:
    """Writes the index of each shard of a `ShardWriter`; yields the files of the shards."""
    for shard in state:
        sizes = np.fromfile(folder / f"{shard['name']}.sizes", "<i4")
        index = folder / f"{shard['name']}.idx"
        write_index(index, sizes, dtype)
        yield from (folder / f"{shard['name']}.bin", index)
