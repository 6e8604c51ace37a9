"""What a run is: its data opened, and what follows from a recipe and the processes at hand."""

from __future__ import annotations

import functools
import gzip
import itertools
import lzma
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spiralformer.accounting import parameters, training_bytes, training_flops_per_token
from spiralformer.console import count
from spiralformer.data.shards import MANIFEST, read_manifest
from spiralformer.data.tokenizer import TextTokenizer, load_tokenizer
from spiralformer.data.windows import Split, TokenDataset, open_split, read_texts
from spiralformer.errors import UserError
from spiralformer.machine import require_memory
from spiralformer.train import log
from spiralformer.train.config import Data, TrainConfig, default_of
from spiralformer.train.distributed import Processes, bfloat16_is_fast

Identity = dict[str, Any]  # two runs with the same one learn the same
LARGEST_MICRO_BATCH = 8  # where the recipe does not say
COMPRESSED_TEXT = 1 << 26  # bytes of validation text that gzip and xz are tried on, at most


@dataclass(frozen=True)
class Corpus:
    """The data of a run, opened."""

    train_split: Split
    train: TokenDataset
    valid_split: Split | None
    valid: TokenDataset | None
    tokenizer: TextTokenizer | None  # shards from elsewhere have none

    @classmethod
    def open(cls, config: TrainConfig) -> Corpus:
        data, vocab = config.data, config.model.vocab_size
        train = open_split(data.path, "train", holdout=data.holdout)
        valid = None if data.valid == "none" else _open_valid(data)
        if train.vocab_size is not None and train.vocab_size > vocab:
            raise UserError(
                f"model.vocab_size {vocab} is too small: the tokenizer of {data.path} has "
                f"{train.vocab_size} tokens; set model.vocab_size={-(-train.vocab_size // 64) * 64}"
            )
        has_tokenizer = (Path(data.path) / "tokenizer.json").is_file()
        return cls(
            train,
            TokenDataset(train.stream, config.length, config.seed, vocab),
            valid,
            TokenDataset(valid.stream, config.length, config.seed, vocab) if valid else None,
            load_tokenizer(data.path) if has_tokenizer else None,
        )

    def compressors(self, config: TrainConfig) -> dict[str, float]:
        """Bits per byte of gzip and xz on the validation text, where the text is at hand."""
        size = self.valid_split.text_bytes if self.valid_split else None
        if config.data.valid or not size or size > COMPRESSED_TEXT:
            return {}
        text = "".join(read_texts(config.data.path, "valid")).encode()
        sizes = {
            "gzip -9": len(gzip.compress(text, 9)),
            "xz -9": len(lzma.compress(text, preset=9)),
        }
        return {name: 8 * size / len(text) for name, size in sizes.items()}


def _open_valid(data: Data) -> Split:
    """A folder of its own serves with its validation split if it has one, else with all of it."""
    if not data.valid:
        return open_split(data.path, "valid", holdout=data.holdout)
    prepared = (Path(data.valid) / MANIFEST).is_file()
    has_split = prepared and read_manifest(Path(data.valid))["splits"]["valid"]["tokens"]
    return open_split(data.valid, "valid" if has_split else "train")


@dataclass(frozen=True)
class RunPlan:
    """What follows from a recipe, its data and the processes at hand."""

    config: TrainConfig
    corpus: Corpus
    processes: Processes
    steps: int
    micro_batch: int
    precision: str
    identity: Identity

    @classmethod
    def of(
        cls, config: TrainConfig, corpus: Corpus, processes: Processes, stored: Identity | None
    ) -> RunPlan:
        """Refused where it cannot be carried out, or is not the run that the folder has stored."""
        precision = processes.from_main(_precision(config.precision, processes.device, stored))
        if config.log.wandb:
            log.import_wandb(config.log.wandb)
        tokens = config.tokens or math.ceil(config.epochs * corpus.train_split.tokens)
        steps = config.steps or max(1, math.ceil(tokens / (config.batch * config.length)))
        identity = {
            **config.deciding(),
            "steps": steps,  # in place of `tokens` and `epochs`
            "precision": precision,
            "training data": corpus.train_split.identity,
            "validation data": corpus.valid_split.identity if corpus.valid_split else None,
        }
        del identity["tokens"], identity["epochs"]
        if stored is not None:
            _refuse_another(config.out, stored, identity)
        micro_batch = _micro_batch(config, processes.world)
        _require_memory(config, processes, micro_batch)
        return cls(config, corpus, processes, steps, micro_batch, precision, identity)

    @property
    def valid_every(self) -> int:
        return self.config.valid.every or max(1, self.steps // 20)

    def kept(self, step: int) -> tuple[int, ...] | None:
        """The iterations that a step of an elastic run has; None: all, as ever."""
        elastic = self.config.elastic
        if not elastic:
            return None
        draw = random.Random(f"{self.config.seed} {step}").random
        return (*(t for t, chance in enumerate(elastic) if draw() >= chance), len(elastic))

    @functools.cached_property
    def flops_per_token(self) -> float:
        """Of a step; of an elastic run in the mean over what may be kept."""
        config, mean = self.config, 0.0
        for drops in itertools.product((False, True), repeat=len(config.elastic)):
            chances = zip(config.elastic, drops, strict=True)
            chance = math.prod(p if dropped else 1 - p for p, dropped in chances)
            model = config.model
            if any(drops):
                kept = [t for t, dropped in enumerate(drops) if not dropped]
                model = model.with_iterations([*kept, len(drops)])
            mean += chance * training_flops_per_token(model, config.length)
        return mean

    def due(self, step: int, every: int) -> bool:
        """After so many steps: what comes every so often, and at the end."""
        return step == self.steps or (every > 0 and step % every == 0)

    def samples(self, step: int) -> range:
        """The numbers of the sequences of a global batch."""
        return range(step * self.config.batch, (step + 1) * self.config.batch)

    def micro_batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets [B, L] that this process sees of a step."""
        return list(
            self.corpus.train.micro_batches(
                step,
                global_batch=self.config.batch,
                micro_batch=self.micro_batch,
                rank=self.processes.rank,
                world=self.processes.world,
            )
        )

    def describe(self) -> Iterator[str]:
        config, world, device = self.config, self.processes.world, self.processes.device
        counts = parameters(config.model)
        data, valid = self.corpus.train_split.tokens, self.corpus.valid_split
        tokens = self.steps * config.batch * config.length
        yield (
            f"model: {config.model.layout} {config.model.topology}, {counts.total:,} parameters "
            f"({counts.non_embedding:,} without embeddings)"
        )
        yield f"data: {config.data.path}, {data:,} tokens" + (
            f" and {valid.tokens:,} for validation" if valid else ", no validation"
        )
        yield (
            f"plan: {count(self.steps, 'step')} of {config.batch} × {config.length} tokens, "
            f"{tokens:,} in all ({tokens / data:.2f} epochs)"
        )
        yield (
            f"run: {config.out}, {self.precision}, {device}, "
            + (f"{world} processes ({config.parallel})" if world > 1 else "1 process")
            + f", micro-batches of {self.micro_batch}"
        )
        if self.precision == "bfloat16" and not bfloat16_is_fast(device):
            yield "note: bfloat16 is slower than float32 on this device, so this will take longer"


def _precision(asked: str, device: torch.device, stored: Identity | None) -> str:
    """With `auto`, a run goes on as it began."""
    if asked != "auto":
        return asked
    if stored is not None:
        return stored["precision"]
    return "bfloat16" if bfloat16_is_fast(device) else "float32"


def _micro_batch(config: TrainConfig, world: int) -> int:
    share = max(1, config.batch // world)
    sizes = range(LARGEST_MICRO_BATCH, 0, -1)
    micro_batch = config.micro_batch or next(size for size in sizes if share % size == 0)
    if config.batch % (world * micro_batch):
        raise UserError(
            f"batch {config.batch} cannot be divided among {world} processes in micro-batches of "
            f"{micro_batch}: make it a multiple of {world * micro_batch}"
        )
    return micro_batch


def _require_memory(config: TrainConfig, processes: Processes, micro_batch: int) -> None:
    """Before the model is built: it, and the tokens of a step, must fit."""
    held = training_bytes(config.model, config.length, micro_batch)
    shares = processes.world if config.parallel == "fsdp" else 1
    require_memory(held / shares, "training this model with these batches", processes.device)
    tokens = config.batch // processes.world * config.length
    require_memory(2 * 8 * tokens, f"batch {config.batch} of {config.length} tokens")


def _refuse_another(folder: str, stored: Identity, identity: Identity) -> None:
    """A folder holds one run. A field that it was written without had its default."""
    differences = []
    for name, here in identity.items():
        there = stored.get(name, default_of(name))
        if there != here:
            differences.append(f"{name}: {there} there, {here} here")
    if differences:
        raise UserError(
            f"{folder} holds another run ({'; '.join(differences)}); choose another out, or start "
            "anew with --fresh"
        )
