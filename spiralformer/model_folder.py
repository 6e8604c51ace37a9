"""Model folders: config.json, model.safetensors and a tokenizer, in Hugging Face's shape.

Whatever this project trains, it writes this way, and whatever it decodes, evaluates or probes, it
reads this way. The same folder opens with `transformers` (see `spiralformer.hf`). Finding a folder
and reading its configuration need no PyTorch, so that a mistake is said at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spiralformer.accounting import parameters
from spiralformer.config import ConfigError, SpiralConfig
from spiralformer.errors import UserError, first_line
from spiralformer.files import inside, new_folder, read_json, write_json
from spiralformer.machine import require_memory
from spiralformer.presets import PRESETS

if TYPE_CHECKING:
    import torch

    from spiralformer.model import SpiralFormer

MODELS = Path(__file__).parent / "assets" / "models"  # those that come with the package
CONFIG = "config.json"
MODEL_TYPE = "spiralformer"
ARCHITECTURE = "SpiralFormerForCausalLM"
PREFIX = "model."  # of the weights' names: the Hugging Face class holds our model under this name
WEIGHTS = "model.safetensors"
CHECKSUM = "spiralformer.sha256"  # of the tensors, in the header of files that we write
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json")


class CheckpointError(UserError, ValueError):
    """A model folder that cannot be used. The message names the file and what is wrong with it."""


# ---------------------------------------------------------------------------- finding


def find_model(named: str | Path) -> Path:
    """The model folder that is meant: this one, the model of this run, or the one of this name that
    comes with the package."""
    folder = Path(named)
    for place in (folder, folder / "model"):
        if (place / CONFIG).is_file():
            return place
    if folder.is_dir():
        raise CheckpointError(f"{folder}: {_why_no_model(folder)}")
    if str(named) in packaged_models():
        return MODELS / named
    if str(named) in PRESETS:
        raise CheckpointError(
            f"{named}: a preset has no trained weights; train it first: "
            f"`spiralformer train {named} data.path=DATA out=runs/{named}`"
        )
    known = ", ".join(packaged_models())
    hint = f"; models that come with the package: {known}" if known else ""
    raise CheckpointError(f"{named}: no such folder{hint}")


def _why_no_model(folder: Path) -> str:
    if (folder / "train.json").is_file():
        return (
            "this run is not finished and has no model yet; "
            f"`spiralformer train {folder / 'train.json'}` goes on with it"
        )
    below = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    hint = f"; did you mean {below[-1]}?" if below else ""
    return f"no model folder: it has no {CONFIG}{hint}"


def packaged_models() -> list[str]:
    """The names of the models that come with the package."""
    return sorted(path.parent.name for path in MODELS.glob(f"*/{CONFIG}"))


# ---------------------------------------------------------------------------- reading


def load_config(folder: str | Path) -> SpiralConfig:
    """The configuration of a model folder; fields that other tools add are passed by."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    path = inside(folder, CONFIG)
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


def usable_device(name: str | torch.device, field: str = "--device") -> torch.device:
    """The device of this name, if this machine has it."""
    import torch

    try:
        device = torch.device(name)
        torch.ones(1, device=device).sum().item()  # "meta" is there, and computes nothing
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = first_line(error).rstrip(".")
        raise UserError(f"{field} {name}: cannot be used here ({reason}); choose cpu") from None
    return device


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    kind: type[SpiralFormer] | None = None,
    check: bool = True,
) -> SpiralFormer:
    """The model of a folder, in evaluation mode; dtype None keeps the dtype it was saved in. `kind`
    is a class derived from SpiralFormer, to have an object of. `check`: that the weights are finite
    and, in folders of ours, those that were saved."""
    folder = Path(folder)
    config = load_config(folder)
    stored = sum(path.stat().st_size for path in weight_files(folder))
    cast = parameters(config).total * dtype.itemsize if dtype else 0
    require_memory(max(stored, cast), f"{folder}: the model")
    model = assemble(config, load_weights(folder, check), folder, kind=kind)
    return model.to(device=device, dtype=dtype)


def assemble(
    config: SpiralConfig,
    weights: dict[str, torch.Tensor],
    folder: Path,
    named: Callable[[str], str] = str,
    kind: type[SpiralFormer] | None = None,
) -> SpiralFormer:
    """The model of these weights, in evaluation mode; `named` is their name of each of ours."""
    import torch

    from spiralformer.model import SpiralFormer

    with torch.device("meta"):
        model = (kind or SpiralFormer)(config)
    wanted = {named(name): (name, tensor.shape) for name, tensor in model.state_dict().items()}
    embedding = named("embedding.weight")
    if config.tie_embeddings and embedding in weights:
        weights = {**weights, named("head.weight"): weights[embedding]}
    shared = wanted.keys() & weights.keys()
    misfits = {
        "they lack": wanted.keys() - shared,
        "unknown are": weights.keys() - shared,
        "of another shape are": {k for k in shared if weights[k].shape != wanted[k][1]},
    }
    if any(misfits.values()):
        parts = [
            f"{what} {min(names)!r}" + f" and {len(names) - 1} more" * (len(names) > 1)
            for what, names in misfits.items()
            if names
        ]
        raise CheckpointError(f"{folder}: the weights do not fit config.json: {'; '.join(parts)}")
    model.load_state_dict({wanted[k][0]: v for k, v in weights.items()}, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model.requires_grad_(True).eval()


def weight_files(folder: Path, name: str = WEIGHTS) -> list[Path]:
    """The files of a folder's weights: this one, or those that its index lists."""
    index = inside(folder, f"{name}.index.json")
    paths = [inside(folder, name)]
    if index.exists():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise CheckpointError(f"{index}: has no weight_map")
        paths = sorted({inside(folder, file) for file in places.values()})
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; the folder has no weights")
    return paths


def load_weights(folder: Path, check: bool = True) -> dict[str, torch.Tensor]:
    """All tensors of a folder, without the prefix."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            tensors = load_file(path)
            with safe_open(path, framework="pt") as file:
                expected = (file.metadata() or {}).get(CHECKSUM)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: damaged or not safetensors ({error})") from None
        if check and expected and _checksum(tensors) != expected:
            raise CheckpointError(f"{path}: damaged (its checksum differs); fetch or save it anew")
        weights |= tensors
    if check:
        require_finite(weights, folder)
    return {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    import torch

    made = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        made.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def require_finite(tensors: Mapping[str, torch.Tensor], where: str | Path) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.is_meta and not tensor.isfinite().all():
            raise CheckpointError(f"{where}: {name} has values that are not finite")


# ---------------------------------------------------------------------------- writing


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
        fields = {
            "model_type": MODEL_TYPE,
            "architectures": [ARCHITECTURE],
            "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
            **model.config.to_dict(),
            **extra,
        }
        write_json(part / CONFIG, fields)
        if tokenizer:
            copy_tokenizer(tokenizer, part)
    return Path(folder)


def write_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    require_finite(weights, folder / WEIGHTS)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    try:
        metadata = {"format": "pt", CHECKSUM: _checksum(weights)}
        save_file(weights, folder / WEIGHTS, metadata=metadata)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot be written: {error}") from None


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    for path in tokenizer_files(source):
        # a lone file may have any name
        name = TOKENIZER if path == Path(source) else path.name
        shutil.copyfile(path, folder / name)


def tokenizer_of(folder: str | Path) -> Path | None:
    """The folder itself where it holds a tokenizer."""
    return Path(folder) if inside(folder, TOKENIZER).is_file() else None


def tokenizer_files(source: str | Path) -> list[Path]:
    source = Path(source)
    if source.is_file():
        return [source]
    if not (source / TOKENIZER).is_file():
        raise CheckpointError(f"{source}: has no {TOKENIZER}")
    return [path for path in (inside(source, name) for name in TOKENIZER_FILES) if path.is_file()]
