"""Token shards as batches.

The tokens of all shards are one stream, cut into windows of L targets each. Window i has the
targets `stream[i·L : (i+1)·L]`; its inputs are the tokens one place before them. The stream is a
ring: before its first token comes its last, which ends a document. So in an epoch every token is a
target exactly once; the last window is filled up with targets of −100, which the loss leaves out.

Which window a sample is depends on the seed and the sample's number alone. A run is resumed by its
sample counter, and any number of processes sees the same batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spiralformer.data.shards import (
    MANIFEST,
    Shard,
    TokenStream,
    check_opened,
    find_shards,
    read_manifest,
)
from spiralformer.errors import UserError
from spiralformer.files import digest, inside
from spiralformer.model.loss import IGNORE as IGNORED

# ---------------------------------------------------------------- opening


@dataclass(frozen=True)
class Split:
    """The training or the validation tokens of a folder."""

    stream: TokenStream
    identity: str  # changes with the data
    text_bytes: int | None  # of UTF-8 text; not known for shards without a manifest
    vocab_size: int | None  # the tokenizer's; likewise

    @property
    def tokens(self) -> int:
        return len(self.stream)

    @property
    def bytes_per_token(self) -> float | None:
        """Bits per byte are the mean loss in nats, over ln 2, over this."""
        return None if self.text_bytes is None else self.text_bytes / self.tokens


def open_split(path: str | Path, split: str = "train", *, holdout: float = 0.0) -> Split:
    """Opens what `spiralformer data` wrote, or any Megatron shards (a folder or a common name).

    The latter have no validation split: `holdout` is the fraction of their tokens, at the end and
    beginning with a document, that is kept from training for it."""
    if (Path(path) / MANIFEST).is_file():
        return _open_prepared(Path(path), split)
    shards = find_shards(path)
    check_opened(shards)
    stream = TokenStream([array for shard in shards for array in shard.stream.arrays])
    names = [
        (file.name, file.stat().st_size) for shard in shards for file in (*shard.bins, shard.idx)
    ]
    cut = _document_start(shards, int(len(stream) * (1 - holdout))) if holdout else len(stream)
    if split == "train":
        part = stream.section(0, cut)
    elif cut < len(stream):
        part = stream.section(cut, len(stream))
    else:
        raise UserError(
            f"{path}: shards without a manifest have no validation split; hold out a fraction of "
            "them, or give validation shards of their own"
        )
    if not len(part):
        raise UserError(f"{path}: no tokens in the {split} split")
    return Split(part, _identity([split, holdout, names]), None, None)


def _open_prepared(folder: Path, split: str) -> Split:
    manifest = read_manifest(folder)
    described = manifest["splits"][split]
    if not described["tokens"]:
        raise UserError(
            f"{folder}: no document fell into the {split} split; prepare the data anew with "
            "another --valid-fraction or --seed"
        )
    shards = [Shard(inside(folder, shard["name"])) for shard in described["shards"]]
    check_opened(shards, manifest["files"])
    return Split(
        TokenStream([array for shard in shards for array in shard.stream.arrays]),
        _identity([split, manifest["files"]]),
        described["bytes"],
        manifest["tokenizer"]["vocab_size"],
    )


def _document_start(shards: list[Shard], token: int) -> int:
    """Where the document begins that holds a token of the shards."""
    begin = 0
    for shard in shards:
        if token < begin + len(shard.stream):
            offset = (token - begin) * shard.dtype.itemsize
            sequence = int(np.searchsorted(shard.pointers, offset, side="right")) - 1
            return begin + int(shard.pointers[sequence]) // shard.dtype.itemsize
        begin += len(shard.stream)
    return begin


def _identity(content: list[Any]) -> str:
    return digest(json.dumps(content).encode())


def read_texts(folder: str | Path, split: str) -> Iterator[str]:
    """The documents of a prepared folder, decoded."""
    from spiralformer.data.tokenizer import load_tokenizer  # not needed to train

    tokenizer = load_tokenizer(folder)
    for described in read_manifest(folder)["splits"][split]["shards"]:
        shard = Shard(Path(folder) / described["name"])
        for i in range(len(shard)):
            yield tokenizer.decode(shard[i][:-1])


# ---------------------------------------------------------------- windows and batches


class TokenDataset:
    """Windows of `length` targets from a stream of tokens."""

    def __init__(
        self, stream: TokenStream, length: int, seed: int = 0, vocab_size: int | None = None
    ):
        if length < 1 or not len(stream):
            raise UserError(f"cannot cut {len(stream)} tokens into windows of {length}")
        self.stream, self.length, self.seed = stream, length, seed
        self.vocab_size = vocab_size  # of the model: a larger id is refused by name
        self._last = stream.read(len(stream) - 1, len(stream))

    def __len__(self) -> int:
        """Windows in an epoch."""
        return -(-len(self.stream) // self.length)

    def window(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets [L] of window i, in the order of the text."""
        start, stop = i * self.length, min((i + 1) * self.length, len(self.stream))
        tokens = self.stream.read(max(start - 1, 0), stop)
        if start == 0:
            tokens = np.concatenate([self._last, tokens])
        if self.vocab_size is not None and tokens.max() >= self.vocab_size:
            raise UserError(
                f"the data has token {tokens.max()}, but the model's vocabulary is "
                f"{self.vocab_size}: they need the same tokenizer"
            )
        ids, targets = tokens[:-1], tokens[1:]
        missing = self.length - len(targets)
        if missing:
            ids = np.concatenate([ids, np.repeat(self._last, missing)])
            targets = np.concatenate([targets, np.full(missing, IGNORED)])
        return ids, targets

    def window_of(self, sample: int) -> int:
        """The window that is the sample-th of the run; sample // len(self) is the epoch."""
        epoch, position = divmod(sample, len(self))
        return permute(position, len(self), self.seed, epoch)

    def batch(self, samples: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, L] of samples of the run."""
        return self._stack(self.window_of(sample) for sample in samples)

    def micro_batches(
        self, step: int, *, global_batch: int, micro_batch: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What process `rank` of `world` sees in a step. Together the processes see samples
        step·G … (step+1)·G − 1, and micro-batch m of rank r is number m·world + r of them: more
        processes are fewer micro-batches each, and the same samples in the same micro-batches."""
        if global_batch % (micro_batch * world):
            raise UserError(
                f"a global batch of {global_batch} is not a multiple of micro-batch {micro_batch} "
                f"× {world} processes"
            )
        first = step * global_batch
        for start in range(rank * micro_batch, global_batch, world * micro_batch):
            yield self.batch(range(first + start, first + start + micro_batch))

    def targets_in(self, samples: Sequence[int]) -> int:
        """Targets of these samples, those that are left out not counted."""
        short = len(self) * self.length - len(self.stream)
        shorter = sum(self.window_of(i) == len(self) - 1 for i in samples) if short else 0
        return len(samples) * self.length - shorter * short

    def in_order(
        self, batch_size: int, windows: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of all windows (or the first so many) as they come in the text: validation."""
        count = len(self) if windows is None else min(windows, len(self))
        for start in range(0, count, batch_size):
            yield self._stack(range(start, min(start + batch_size, count)))

    def _stack(self, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
        ids, targets = zip(*(self.window(i) for i in windows), strict=True)
        return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(targets))


# ---------------------------------------------------------------- the order of an epoch

_ROUNDS = 8
_MASK = (1 << 64) - 1


def permute(i: int, n: int, seed: int, epoch: int) -> int:
    """The i-th of 0 … n−1 in an order drawn by (seed, epoch), without a table of it: a Feistel
    network permutes the smallest 4^k ≥ n, and is applied again until the result is below n."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for key in _round_keys(seed, epoch):
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        i = left << half | right
        if i < n:
            return i


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    state = _mixed(_mixed(seed & _MASK) ^ epoch)
    return tuple(_mixed(state + (r + 1) * 0x9E3779B97F4A7C15) for r in range(_ROUNDS))


def _mixed(x: int) -> int:
    """SplitMix64's finaliser."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
