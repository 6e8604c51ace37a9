"""Model folders, ours and any causal language model of Hugging Face, as scorers of tokens.

`inspect` finds what is wrong with a folder before any long work; `load_scorer` loads its weights.
Shapes: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spiralformer.config import SpiralConfig
from spiralformer.decode import extend, prefill
from spiralformer.errors import UserError
from spiralformer.evaluate.progress import quiet
from spiralformer.model import SpiralFormer
from spiralformer.model.loss import CHUNK, IGNORE, token_losses
from spiralformer.model_folder import (
    MODEL_TYPE,
    CheckpointError,
    load_config,
    load_model,
    read_json,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx")
DEFAULT_LENGTH = 2048
LOGITS = 1 << 27  # most logits of a Hugging Face model that exist at once, unless one row has more


# ---------------------------------------------------------------------------- before loading


@dataclass(frozen=True)
class Candidate:
    """A folder that has passed the checks."""

    folder: Path
    config: dict[str, Any]  # config.json
    tokenizer: Any  # a transformers tokenizer
    max_length: int
    fingerprint: str  # of weights, configuration and tokenizer

    @property
    def is_ours(self) -> bool:
        return self.config.get("model_type") == MODEL_TYPE

    @property
    def spiral_config(self) -> SpiralConfig | None:
        return load_config(self.folder) if self.is_ours else None


def inspect(folder: str | Path) -> Candidate:
    """Checks a model folder: its configuration, its tokenizer and the files of its weights."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give one with config.json and weights")
    if not (folder / "config.json").is_file():
        inside = sorted(path.parent for path in folder.glob("*/config.json"))
        hint = f"; did you mean {inside[-1]}?" if inside else ""
        raise CheckpointError(f"{folder}: no config.json in it, so it is no model folder{hint}")
    config = read_json(folder / "config.json")
    if config.get("model_type") == MODEL_TYPE:
        ours = load_config(folder)
        tokenizer, vocab_size, max_length = load_tokenizer(folder), ours.vocab_size, ours.max_length
    else:
        tokenizer, vocab_size, max_length = _inspect_foreign(folder)
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer does not fit the model: its largest id is {largest}, the "
            f"model's vocabulary has {vocab_size}; put the tokenizer it was trained with there"
        )
    candidate = Candidate(folder, config, tokenizer, max_length, fingerprint(folder))
    if candidate.is_ours:
        load_model(folder, device="meta")  # do the weights fit the configuration?
    return candidate


def _inspect_foreign(folder: Path) -> tuple[Any, int, int]:
    """Tokenizer, vocabulary and context of a folder that transformers knows how to open."""
    with quiet():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(folder)
        except Exception as error:
            raise CheckpointError(f"{folder}/config.json: {_first_line(error)}") from None
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise CheckpointError(
                f"{folder}/config.json: model_type {config.model_type!r} is no causal language "
                "model that transformers knows"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:
            raise CheckpointError(f"{folder}: no usable tokenizer ({_first_line(error)})") from None
        text = config.get_text_config()
        lengths = (getattr(text, name, None) for name in LENGTH_FIELDS)
        max_length = next((length for length in lengths if length), DEFAULT_LENGTH)
        return tokenizer, text.vocab_size, max_length


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of one of our folders, as transformers opens it."""
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json in it; put the one it was trained with")
    with quiet():
        from transformers import PreTrainedTokenizerFast

        try:
            return PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception as error:
            raise CheckpointError(f"{folder}/tokenizer.json: {_first_line(error)}") from None


def fingerprint(folder: Path) -> str:
    """Of everything in a folder that decides a model's outputs; opens each safetensors file, so
    that a damaged one is found here."""
    endings = (".safetensors", ".bin", ".json", ".model", ".txt")
    files = [path for path in sorted(folder.iterdir()) if path.suffix in endings]
    weights = [path for path in files if path.suffix in (".safetensors", ".bin")]
    if not weights:
        raise CheckpointError(f"{folder}: no weights in it (model.safetensors)")
    state = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
            with path.open("rb") as file:
                content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: damaged or not safetensors ({error})") from None
        state.update(path.name.encode() + b"\0" + content.digest())
    return state.hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---------------------------------------------------------------------------- scorers


class Scorer(Protocol):
    """What perplexity needs of a model."""

    max_length: int
    prefix: int | None  # the token that stands before a document

    def encode(self, text: str) -> list[int]: ...

    def losses(self, ids: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """Cross-entropies (B, L) of targets; zero where a target is IGNORE. Rows are padded on the
        right beyond their lengths."""
        ...

    def harness_lm(self, batch_size: int) -> Any:
        """The model as the harness sees it."""
        ...


@dataclass
class SpiralScorer:
    """A model of ours, in this process. It is causal, so right padding needs no mask."""

    model: SpiralFormer
    tokenizer: Any

    def __post_init__(self) -> None:
        self.max_length = self.model.config.max_length
        self.device = self.model.embedding.weight.device
        self.prefix = _prefix(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def scored_states(self, ids: Tensor, scored: Tensor) -> Tensor:
        """The output states (N, D) of the positions where `scored` (B, L) is true."""
        return self.model.hidden(self.model.embed(ids.to(self.device)))[scored.to(self.device)]

    @torch.inference_mode()
    def continuation_states(
        self, contexts: list[list[int]], continuations: list[list[list[int]]]
    ) -> Tensor:
        """The output states (N, D) that predict each token of each continuation, one continuation
        after the other. Continuations of one context go on from one state that has read it."""
        rows = [row for some in continuations for row in some]
        if len(rows) == len(contexts):  # nothing is shared: one pass over both together
            texts = [context + row[:-1] for context, row in zip(contexts, rows, strict=True)]
            ids = self._padded(texts)
            scored = torch.zeros(ids.shape, dtype=torch.bool)
            for i, (context, text) in enumerate(zip(contexts, texts, strict=True)):
                scored[i, len(context) - 1 : len(text)] = True
            return self.scored_states(ids, scored)
        ids, lengths = self._padded(contexts), [len(context) for context in contexts]
        longest = max(
            len(context) + len(row)
            for context, some in zip(contexts, continuations, strict=True)
            for row in some
        )
        out, state = prefill(self.model, ids, lengths, capacity=longest - 1)
        owners = [i for i, some in enumerate(continuations) for _ in some]
        first = out[owners, [lengths[i] - 1 for i in owners]][:, None]  # R 1 D
        state.reorder(owners)
        inputs = [row[:-1] for row in rows]
        more = extend(self.model, state, self._padded(inputs), [len(row) for row in inputs])
        states = torch.cat((first, more), 1)
        kept = (
            torch.arange(states.shape[1])[None] < torch.tensor([len(row) for row in rows])[:, None]
        )
        return states[kept.to(self.device)]

    def _padded(self, rows: list[list[int]]) -> Tensor:
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, dtype=torch.long)
        return ids.to(self.device)

    @torch.inference_mode()
    def losses(self, ids: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        scored = targets != IGNORE
        wanted = targets[scored].to(self.device)
        found = token_losses(self.model.head, self.scored_states(ids, scored), wanted)
        return torch.zeros(targets.shape, dtype=found.dtype).masked_scatter_(scored, found.cpu())

    def harness_lm(self, batch_size: int) -> Any:
        from spiralformer.evaluate.lm import SpiralLM

        return SpiralLM(self, batch_size)


@dataclass
class HFScorer:
    """Any other folder: the harness loads it, and perplexity uses the same model."""

    lm: Any  # lm_eval's HFLM

    def __post_init__(self) -> None:
        self.max_length = self.lm.max_length
        self.prefix = self.lm.prefix_token_id

    def encode(self, text: str) -> list[int]:
        return self.lm.tok_encode(text)

    @torch.inference_mode()
    def losses(self, ids: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        device = self.lm.device
        vocab_size = self.lm.model.config.get_text_config().vocab_size
        rows = max(1, LOGITS // (ids.shape[1] * vocab_size))
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        found = torch.zeros(targets.shape, dtype=torch.float64)
        for start in range(0, len(ids), rows):
            part = slice(start, start + rows)
            out = self.lm.model(
                ids[part].to(device), attention_mask=mask[part].to(device), use_cache=False
            )
            scored = targets[part] != IGNORE
            logits = out.logits[scored.to(device)]  # N V
            wanted = targets[part][scored].to(device)
            losses = [
                F.cross_entropy(some.to(_wide(some)), target, reduction="none")
                for some, target in zip(logits.split(CHUNK), wanted.split(CHUNK), strict=True)
            ]
            found[part].masked_scatter_(scored, torch.cat(losses).cpu().double())
        return found

    def harness_lm(self, batch_size: int) -> Any:
        self.lm.batch_size_per_gpu = batch_size
        return self.lm


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _prefix(tokenizer: Any) -> int | None:
    """As the harness chooses it; a bare tokenizer.json does not say which token it is."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    vocabulary = tokenizer.get_vocab()
    return next((vocabulary[token] for token in END_OF_TEXT if token in vocabulary), None)


def load_scorer(candidate: Candidate, *, device: str, dtype: str = "auto") -> Scorer:
    """Loads the weights; dtype `auto` is the one they were saved in."""
    if candidate.is_ours:
        model = load_model(candidate.folder, dtype=DTYPES.get(dtype), device=device)
        return SpiralScorer(model.requires_grad_(False), candidate.tokenizer)
    with quiet():
        from lm_eval.models.huggingface import HFLM

        try:
            lm = HFLM(
                pretrained=str(candidate.folder),
                tokenizer=candidate.tokenizer,
                device=device,
                dtype=dtype,
                softmax_dtype="float32",
                max_length=candidate.max_length,
                prefix_token_id=_prefix(candidate.tokenizer),
            )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{candidate.folder}: {_first_line(error)}") from None
    return HFScorer(lm)


def choose_device(asked: str | None) -> str:
    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=asked)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {asked}: not usable here ({_first_line(error)})") from None
    return asked
