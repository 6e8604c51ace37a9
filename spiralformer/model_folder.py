"""Model folders: config.json, model.safetensors and a tokenizer, in Hugging Face's shape.

Whatever this project trains, it writes this way, and whatever it decodes, evaluates or probes, it
reads this way. The same folder opens with `transformers` (see `spiralformer.hf`).
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spiralformer.config import ConfigError, SpiralConfig
from spiralformer.errors import UserError
from spiralformer.files import new_folder, read_json, write_json
from spiralformer.model import SpiralFormer

MODEL_TYPE = "spiralformer"
ARCHITECTURE = "SpiralFormerForCausalLM"
PREFIX = "model."  # of the weights' names: the Hugging Face class holds our model under this name
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json")


class CheckpointError(UserError, ValueError):
    """A model folder that cannot be used. The message names the file and what is wrong with it."""


def load_config(folder: str | Path) -> SpiralConfig:
    """The configuration of a model folder; fields that other tools add are passed by."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    path = folder / "config.json"
    fields = read_json(path)
    if fields.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            f"{path}: model_type is {fields.get('model_type')!r}, not {MODEL_TYPE!r}"
            + ("; `spiralformer import` converts it" * (fields.get("model_type") == "gpt_neox"))
        )
    known = {f.name for f in dataclasses.fields(SpiralConfig)}
    try:
        return SpiralConfig.from_dict({k: v for k, v in fields.items() if k in known})
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> SpiralFormer:
    """The model of a folder, in evaluation mode; dtype None keeps the dtype it was saved in."""
    folder = Path(folder)
    config = load_config(folder)
    with torch.device("meta"):
        model = SpiralFormer(config)
    weights = load_weights(folder)
    if config.tie_embeddings:
        weights.setdefault("head.weight", weights.get("embedding.weight", torch.empty(0)))
    wanted = model.state_dict()
    missing, extra = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    wrong = [k for k in wanted.keys() & weights.keys() if wanted[k].shape != weights[k].shape]
    if missing or extra or wrong:
        parts = [
            f"{word} {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for word, names in (
                ("misses", missing),
                ("has unknown", extra),
                ("wrong shape of", wrong),
            )
            if names
        ]
        raise CheckpointError(f"{folder}: the weights do not fit config.json: {'; '.join(parts)}")
    weights = {k: v.to(device=device, dtype=dtype or v.dtype) for k, v in weights.items()}
    model.load_state_dict(weights, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model.requires_grad_(True).eval()


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, from one file or from several with an index, without the prefix."""
    index = folder / f"{WEIGHTS}.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else [WEIGHTS]
    weights = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; the folder has no weights")
        try:
            with safe_open(path, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (not a dict)
                    weights[key.removeprefix(PREFIX)] = tensors.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: damaged or not safetensors ({error})") from None
    return weights


def config_dict(model: SpiralFormer, **extra: Any) -> dict[str, Any]:
    """What config.json holds."""
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "dtype": dtype,
        **model.config.to_dict(),
        **extra,
    }


def save_model(
    model: SpiralFormer,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    **extra: Any,
) -> Path:
    """Writes a model folder, in place of the one there. `tokenizer` is a tokenizer.json or a folder
    with one; `extra` goes into config.json (for example eos_token_id)."""
    weights = {PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del weights[PREFIX + "head.weight"]
    with new_folder(folder, replace=True) as part:
        write_weights(weights, part)
        write_json(part / "config.json", config_dict(model, **extra))
        if tokenizer:
            copy_tokenizer(tokenizer, part)
    return Path(folder)


def write_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    try:
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot be written: {error}") from None


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    for path in tokenizer_files(source):
        # a lone file may have any name
        name = TOKENIZER if path == Path(source) else path.name
        shutil.copyfile(path, folder / name)


def tokenizer_of(folder: str | Path) -> Path | None:
    """The folder itself where it holds a tokenizer."""
    return Path(folder) if (Path(folder) / TOKENIZER).is_file() else None


def tokenizer_files(source: str | Path) -> list[Path]:
    source = Path(source)
    if source.is_file():
        return [source]
    if not (source / TOKENIZER).is_file():
        raise CheckpointError(f"{source}: has no {TOKENIZER}")
    return [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
