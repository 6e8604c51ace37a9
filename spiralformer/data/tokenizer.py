"""Tokenizers: any `tokenizer.json`, a byte-level BPE trained here, or plain bytes. All three are
`tokenizers` objects with an end-of-text token, and are saved as Hugging Face tokenizer folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spiralformer.errors import UserError, first_line
from spiralformer.files import read_record, write_text

EOT = "<|endoftext|>"
KNOWN_EOTS = (EOT, "<|end_of_text|>", "</s>", "<eos>", "<|eot|>")
SMALLEST_BPE = 256 + 1  # every byte, and end of text
LARGEST_BPE = 1 << 20
_LARGEST_UINT16_VOCAB = 65_500  # Megatron's limit, which leaves room for tokens added later


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and its end-of-text token. The token is written after each document; the same
    characters inside a text are encoded as ordinary text."""

    backend: Tokenizer
    eot: str
    origin: str  # said in summaries

    def __post_init__(self) -> None:
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.encode_special_tokens = True

    @cached_property
    def eot_id(self) -> int:
        eot_id = self.backend.token_to_id(self.eot)
        assert eot_id is not None
        return eot_id

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def dtype(self) -> np.dtype:
        """The type of a token in shards, by Megatron's rule."""
        return np.dtype(np.uint16 if self.vocab_size < _LARGEST_UINT16_VOCAB else np.int32)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def _is_bytes(self) -> bool:
        """Whether an id is a byte, so that encoding is a copy."""
        if self.vocab_size != 257:
            return False
        model = json.loads(self.to_json())["model"]
        return model.get("merges") == [] and model["vocab"] == _byte_vocabulary()

    def encode(self, text: str) -> list[int]:
        """Without an end-of-text token."""
        return self.tokens(text).tolist()

    def tokens(self, text: str) -> np.ndarray:
        """The same as shards hold it. Several threads can do this at once."""
        if self._is_bytes:
            return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)
        # `encode` would keep Python's lock, and a batch of many texts would take all cores.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """End-of-text tokens are left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def to_json(self) -> str:
        return self.backend.to_str(pretty=True)

    def files(self) -> dict[str, str]:
        """The files of a Hugging Face tokenizer folder, by name."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.eot,
            "eos_token": self.eot,
            "unk_token": self.eot,
            "clean_up_tokenization_spaces": False,
        }
        return {
            "tokenizer.json": self.to_json(),
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        }

    def save(self, folder: Path) -> None:
        for name, content in self.files().items():
            write_text(folder / name, content)


def load_tokenizer(path: str | Path, eot: str | None = None) -> TextTokenizer:
    """A `tokenizer.json`, a Hugging Face tokenizer folder or the name of one on the hub."""
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        try:
            backend = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exception
            raise UserError(f"{file}: not a tokenizer.json ({error})") from None
    else:
        backend = _from_transformers(path)
    return TextTokenizer(backend, _end_of_text(backend, path, eot), str(path))


def _from_transformers(path: Path) -> Tokenizer:
    """What has no `tokenizer.json` here: an older folder, which is converted, or a hub name."""
    if not path.is_dir() and (len(path.parts) > 2 or path.suffix == ".json"):
        raise UserError(f"{path}: no such tokenizer; give a tokenizer.json or a folder with one")
    from transformers import AutoTokenizer
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()  # what is wrong is said once, below
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{path}: the tokenizer brings code of its own, which is not run; give a "
                "tokenizer.json"
            ) from None
        raise UserError(f"{path}: cannot load a tokenizer from it: {first_line(error)}") from None
    if not tokenizer.is_fast:
        raise UserError(f"{path}: only tokenizers that convert to tokenizer.json can be used")
    return tokenizer.backend_tokenizer


@dataclass
class _Token:
    content: str


@dataclass
class _Config:
    """What is asked of a tokenizer_config.json."""

    eos_token: str | _Token | None = None


def _end_of_text(backend: Tokenizer, path: Path, eot: str | None) -> str:
    """The token that was asked for, else the folder's `eos_token`, else a usual one."""
    if eot is not None:
        if backend.token_to_id(eot) is None:
            raise UserError(f"{path}: no token {eot!r} for the end of text (--eot-token)")
        return eot
    candidates = list(KNOWN_EOTS)
    config = path / "tokenizer_config.json"
    if config.is_file():
        named = read_record(config, _Config).eos_token
        named = named.content if isinstance(named, _Token) else named
        candidates = [named, *candidates] if named else candidates
    for token in candidates:
        if backend.token_to_id(token) is not None:
            return token
    raise UserError(f"{path}: none of {', '.join(KNOWN_EOTS)} in it; name one with --eot-token")


def train_bpe(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """A byte-level BPE in GPT-2's manner. The same texts give the same tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(backend, EOT, "byte-level BPE")


def byte_tokenizer() -> TextTokenizer:
    """Ids 0–255 are the bytes, 256 is end of text."""
    backend = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOT])
    return TextTokenizer(backend, EOT, "bytes")


def _byte_vocabulary() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where it is printable, else the next
    unused one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: 256 + n for n, byte in enumerate(others)}
    return {chr(characters.get(byte, byte)): byte for byte in range(256)}
