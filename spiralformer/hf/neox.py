"""GPT-NeoX (Pythia) checkpoints ⇄ our baseline, weight for weight.

With LayerNorm and unscaled embeddings the plain layout "24" *is* GPT-NeoX. Only the names differ,
and the order of the packed projection: GPT-NeoX keeps q, k and v of a head together, we keep all
heads of q, then of k, then of v. Dropout, which changes nothing in a trained model, is left out.

Shapes: H heads, K head size.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spiralformer.config import ConfigError, SpiralConfig
from spiralformer.files import inside, new_folder, read_json, write_json
from spiralformer.model import SpiralFormer
from spiralformer.model_folder import (
    WEIGHTS,
    CheckpointError,
    assemble,
    copy_tokenizer,
    load_weights,
    weight_files,
    write_weights,
)

MODEL_TYPE = "gpt_neox"
TORCH_WEIGHTS = "pytorch_model.bin"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# ours: theirs
NAMES = {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"}
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
BUFFERS = re.compile(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")  # of old checkpoints


# ---------------------------------------------------------------------------- configuration


def read_config(fields: dict[str, Any], path: Path) -> SpiralConfig:
    """Our configuration of a GPT-NeoX config.json; what we cannot represent is refused."""

    def refuse(field: str, value: Any, why: str) -> CheckpointError:
        return CheckpointError(f"{path}: {field} is {value!r}; {why}")

    if fields.get("model_type") != MODEL_TYPE:
        raise refuse("model_type", fields.get("model_type"), f"only {MODEL_TYPE!r} can be imported")
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(fields.get(field), int):
            raise refuse(field, fields.get(field), "a whole number is needed")
    fixed = {"hidden_act": "gelu", "attention_bias": True, "quantization_config": None}
    for field, wanted in fixed.items():
        if fields.get(field, wanted) != wanted:
            raise refuse(field, fields[field], f"only {wanted!r} can be represented")

    # the rotary fields have moved: rotary_pct and rotary_emb_base, then rope_parameters
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else rope
    if kind not in (None, "default"):
        name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
        raise refuse(name, rope, "scaled rotary positions cannot be represented")
    base = rope.get("rope_theta", fields.get("rotary_emb_base", fields.get("rope_theta", 10000)))
    fraction = rope.get("partial_rotary_factor", fields.get("rotary_pct", 0.25))
    try:
        return SpiralConfig(
            layout=str(fields["num_hidden_layers"]),
            hidden_size=fields["hidden_size"],
            num_heads=fields["num_attention_heads"],
            vocab_size=fields["vocab_size"],
            intermediate_size=fields.get("intermediate_size", 24576),
            max_length=fields.get("max_position_embeddings", 2048),
            norm="layernorm",
            norm_eps=fields.get("layer_norm_eps", 1e-5),
            parallel_residual=fields.get("use_parallel_residual", True),
            rotary_fraction=fraction,
            rotary_base=base,
            tie_embeddings=fields.get("tie_word_embeddings", False),
            init_std=fields.get("initializer_range", 0.02),
            scale_embeddings=False,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def write_config(config: SpiralConfig) -> dict[str, Any]:
    """The GPT-NeoX fields, with the older rotary names, which every version reads."""
    if config.num_iterations:
        raise CheckpointError(
            f"layout {config.layout!r} has a loop; GPT-NeoX has only plain layers, as in "
            'the layout "24"'
        )
    for field, wanted in (("norm", "layernorm"), ("scale_embeddings", False)):
        if getattr(config, field) != wanted:
            raise CheckpointError(
                f"{field} is {getattr(config, field)!r}; GPT-NeoX has only {wanted!r}"
            )
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": MODEL_TYPE,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout": 0.0,
        "hidden_size": config.hidden_size,
        "initializer_range": config.init_std,
        "intermediate_size": config.intermediate_size,
        "layer_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.parsed_layout.pre,
        "rotary_emb_base": config.rotary_base,
        "rotary_pct": config.rotary_fraction,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "use_parallel_residual": config.parallel_residual,
        "vocab_size": config.vocab_size,
    }


# ---------------------------------------------------------------------------- weights


def their_name(name: str) -> str:
    """pre.blocks.3.mlp.up.bias → gpt_neox.layers.3.mlp.dense_h_to_4h.bias"""
    module, kind = name.rsplit(".", 1)
    layer = re.fullmatch(r"pre\.blocks\.(\d+)\.(.+)", module)
    if layer:
        return f"gpt_neox.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def repack(packed: Tensor, heads: int, *, ours: bool) -> Tensor:
    """The rows of a packed projection, (H, 3, K) → (3, H, K) if they shall be ours, else back."""
    rows = packed.unflatten(0, (heads, 3, -1) if ours else (3, heads, -1))
    return rows.transpose(0, 1).flatten(0, 2).contiguous()


def load_any_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder in safetensors or in PyTorch's own format."""
    if (folder / WEIGHTS).exists() or (folder / f"{WEIGHTS}.index.json").exists():
        return load_weights(folder)
    weights: dict[str, Tensor] = {}
    for path in weight_files(folder, TORCH_WEIGHTS):
        try:
            weights |= torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
            first = str(error).split("\n")[0]
            raise CheckpointError(f"{path}: damaged or not weights ({first})") from None
    return weights


def from_gpt_neox(folder: str | Path) -> SpiralFormer:
    """The baseline that computes what a GPT-NeoX folder does, in evaluation mode and its dtype."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; a model of the Hub is fetched first, for example with "
            "`hf download EleutherAI/pythia-160m --local-dir pythia-160m`"
        )
    path = inside(folder, "config.json")
    config = read_config(read_json(path), path)
    theirs = {k: v for k, v in load_any_weights(folder).items() if not BUFFERS.search(k)}
    if "lm_head.weight" in theirs:
        theirs["embed_out.weight"] = theirs.pop("lm_head.weight")
    model = assemble(config, theirs, folder, their_name)
    for name, parameter in model.named_parameters():
        if ".attention.qkv." in name:
            parameter.data = repack(parameter.data, config.num_heads, ours=True)
    return model


def to_gpt_neox(
    model: SpiralFormer, folder: str | Path, *, tokenizer: str | Path | None = None, **extra: Any
) -> Path:
    """Writes a plain model as a GPT-NeoX folder. `extra` goes into config.json."""
    fields = {**write_config(model.config), **extra}
    fields["dtype"] = str(model.embedding.weight.dtype).removeprefix("torch.")
    weights = {}
    for name, tensor in model.state_dict().items():
        if ".attention.qkv." in name:
            tensor = repack(tensor, model.config.num_heads, ours=False)
        weights[their_name(name)] = tensor
    if model.config.tie_embeddings:
        del weights["embed_out.weight"]
    with new_folder(folder) as part:
        write_weights(weights, part)
        write_json(part / "config.json", fields)
        if tokenizer:
            copy_tokenizer(tokenizer, part)
    return Path(folder)
