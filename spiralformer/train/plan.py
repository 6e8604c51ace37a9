"""What a run is: its data opened, and what follows from a recipe and the processes at hand."""

from __future__ import annotations

import contextlib
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
from spiralformer.data.windows import Split, TokenDataset, open_split
from spiralformer.errors import UserError
from spiralformer.machine import require_memory
from spiralformer.train import log
from spiralformer.train.config import TrainConfig, default_of, vocabulary
from spiralformer.train.distributed import Processes, bfloat16_is_fast
from spiralformer.train.optim import learning_rate

Identity = dict[str, Any]  # two runs with the same one learn the same
LARGEST_MICRO_BATCH = 8  # where the recipe does not say
DECODED_TOKENS = 1 << 26  # of validation that are turned into text for gzip and xz, at most
FEW_STEPS = 50  # too few for a schedule to rise and fall


@dataclass(frozen=True)
class Corpus:
    """The data of a run, opened."""

    train_split: Split
    train: TokenDataset
    valid: ValidationText | None
    tokenizer: TextTokenizer | None  # shards from elsewhere have none

    @classmethod
    def open(cls, config: TrainConfig) -> Corpus:
        data, vocab = config.data, config.model.vocab_size
        with _naming("data.path", data.path):
            train = open_split(data.path, "train", holdout=data.holdout)
            has_tokenizer = (Path(data.path) / "tokenizer.json").is_file()
            tokenizer = load_tokenizer(data.path) if has_tokenizer else None
        if train.vocab_size is not None and train.vocab_size > vocab:
            raise UserError(
                f"model.vocab_size {vocab} is too small: the tokenizer of {data.path} has "
                f"{train.vocab_size} tokens; set model.vocab_size={vocabulary(train.vocab_size)}"
            )
        return cls(
            train,
            TokenDataset(train.stream, config.length, config.seed, vocab),
            None if data.valid == "none" else ValidationText.open(config),
            tokenizer,
        )


@dataclass(frozen=True)
class ValidationText:
    """The first windows of the validation data: what the model is scored on."""

    split: Split
    data: TokenDataset
    windows: int
    folder: Path

    @classmethod
    def open(cls, config: TrainConfig) -> ValidationText:
        """A folder of its own serves with its validation split if it has one, else with all."""
        data, name = config.data, "valid"
        field, folder = ("data.valid", data.valid) if data.valid else ("data.path", data.path)
        with _naming(field, folder):
            if data.valid and not _has_validation(Path(folder)):
                name = "train"
            split = open_split(folder, name, holdout=0.0 if data.valid else data.holdout)
        tokens = TokenDataset(split.stream, config.length, config.seed, config.model.vocab_size)
        asked = math.ceil(config.valid.tokens / config.length) or len(tokens)
        return cls(split, tokens, min(asked, len(tokens)), Path(folder))

    @property
    def tokens(self) -> int:
        return min(self.windows * self.data.length, self.split.tokens)

    @functools.cached_property
    def text(self) -> bytes | None:
        """Where it is at hand, and not too much."""
        if self.split.text_bytes is None or self.tokens > DECODED_TOKENS:
            return None
        return load_tokenizer(self.folder).decode(self.split.stream.read(0, self.tokens)).encode()

    @property
    def text_bytes(self) -> float | None:
        """Of the tokens that are scored; of too many of them, by the mean of the split."""
        known = self.split.text_bytes
        if known is None or self.tokens == self.split.tokens:
            return known
        return known * self.tokens / self.split.tokens if self.text is None else len(self.text)

    def compressors(self) -> dict[str, float]:
        """Bits per byte of gzip and xz on the very text that the model is scored on."""
        if not self.text:
            return {}
        sizes = {
            "gzip -9": len(gzip.compress(self.text, 9)),
            "xz -9": len(lzma.compress(self.text, preset=9)),
        }
        return {name: 8 * size / len(self.text) for name, size in sizes.items()}


def _has_validation(folder: Path) -> bool:
    prepared = (folder / MANIFEST).is_file()
    return prepared and bool(read_manifest(folder)["splits"]["valid"]["tokens"])


@contextlib.contextmanager
def _naming(field: str, path: str) -> Iterator[None]:
    """An error about a path says which field it was given in."""
    try:
        yield
    except UserError as error:
        said = str(error).removeprefix(f"{path}: ")
        raise UserError(f"{field}={path}: {said}") from None


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
    extends: int | None = None  # steps that the run was to have before it was given more

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        corpus: Corpus,
        processes: Processes,
        stored: Identity | None,
        done: int,
    ) -> RunPlan:
        """Refused where it cannot be carried out, or is not the run of which the folder has
        `done` steps stored, nor more steps of it."""
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
            "validation data": corpus.valid.split.identity if corpus.valid else None,
        }
        del identity["tokens"], identity["epochs"]
        extends = None
        if stored is not None:
            # Each time that the run was given more steps: which step it had reached.
            extended = stored.get("extended", [])
            if steps > stored["steps"]:
                extends, extended = stored["steps"], [*extended, done]
            if extended:
                identity["extended"] = extended
            _refuse_another(config.out, {**stored, "extended": extended}, identity, extends)
        micro_batch = _micro_batch(config, processes.world)
        _require_memory(config, processes, micro_batch)
        return cls(config, corpus, processes, steps, micro_batch, precision, identity, extends)

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
        data, valid = self.corpus.train_split.tokens, self.corpus.valid
        tokens = self.steps * config.batch * config.length
        yield (
            f"model: {config.model.layout} {config.model.topology}, {counts.total:,} parameters "
            f"({counts.non_embedding:,} without embeddings)"
        )
        yield f"data: {config.data.path}, {data:,} tokens" + (
            f" and {valid.split.tokens:,} for validation" if valid else ", no validation"
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
        if self.extends is not None:
            done = self.identity["extended"][-1]
            before, after = (
                f"{learning_rate(max(done - 1, 0), steps, config.optim):.2g}"
                for steps in (self.extends, self.steps)
            )
            yield (
                f"extended: {self.extends:,} steps become {self.steps:,}; after step {done:,} the "
                f"learning rate is that of the longer run (there {after}, in the shorter {before})"
            )
        if self.steps < FEW_STEPS:
            wish = max(1, self.steps * config.batch // (4 * FEW_STEPS))
            yield (
                f"note: {count(self.steps, 'step')} are few to learn from; smaller batches "
                f"(batch={wish}) or more passes over the data (epochs=…, steps=…) make more"
            )
        known = self.corpus.train_split.vocab_size
        if known is not None and vocabulary(known) != config.model.vocab_size:
            yield (
                f"note: the model has {config.model.vocab_size:,} tokens, the data's tokenizer "
                f"{known:,}; model.vocab_size={vocabulary(known)} would fit it"
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


def _refuse_another(folder: str, stored: Identity, identity: Identity, extends: int | None) -> None:
    """A folder holds one run. A field that it was written without had its default."""
    differences = []
    for name, here in identity.items():
        there = stored.get(name, default_of(name))
        if there != here and not (name == "steps" and extends is not None):
            differences.append(f"{name}: {there} there, {here} here")
    if differences:
        raise UserError(
            f"{folder} holds another run ({'; '.join(differences)}); choose another out, or start "
            "anew with --fresh"
        )
