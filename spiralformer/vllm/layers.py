"""The caches of a served model: keys and values at each iteration's own resolution, and the states
of chunks. Everything in them is a function of the tokens up to a position, kept where vLLM keeps
that position; so paging, preemption, prefix caching and rejected drafts need no code here.

Shapes: N tokens of a step (those of its requests one after the other), M chunks that complete in
it, G chunk size, D width, H heads, K head size. A slot is a place of a cache: page · size + place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    subclass_attention_backend_with_overrides,
)
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from spiralformer.config import Iteration


class Chunks:
    """The chunks of one iteration that complete in a step: host arithmetic on lengths."""

    def __init__(self, common: CommonAttentionMetadata, chunk: int, offset: int) -> None:
        assert common.seq_lens_cpu_upper_bound is not None
        new = np.diff(common.query_start_loc_cpu.numpy())  # tokens of each request
        ends = common.seq_lens_cpu_upper_bound.numpy()[: len(new)].astype(np.int64)
        self.new, self.starts = new, ends - new
        self.held = (self.starts + offset) // chunk  # chunks completed before
        self.done = (ends + offset) // chunk - self.held  # and in this step

    def requests(self) -> np.ndarray:
        """(M): whose chunk each is"""
        return np.repeat(np.arange(len(self.done)), self.done)

    def indices(self) -> np.ndarray:
        """(M): which of its request's chunks each is"""
        return _count_from(self.held, self.done)


def _count_from(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, … counts[0] of them, then the same of 1, and so on"""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - before, counts)


def slots_of(block_table: Tensor, requests: Tensor, places: Tensor, size: int) -> Tensor:
    """Where requests keep their entries of these places, pages holding `size` of them."""
    return block_table[requests, places // size] * size + places % size


def backend_name(*geometry: int) -> str:
    """vLLM takes backends of one name for one: theirs tells chunk size, offset and shift."""
    return "Spiral_" + "".join(f"{number}_" for number in geometry)


# ---------------------------------------------------------------------------- keys and values


@lru_cache
def coarse_backend(base: type[AttentionBackend], chunk: int, offset: int) -> type[AttentionBackend]:
    """The platform's attention, over sequences of chunks."""

    class Builder(base.get_builder_cls()):  # type: ignore[misc]
        supports_update_block_table = False

        def __init__(
            self, spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
        ) -> None:
            self.states = spec.block_size // chunk
            spec = replace(spec, block_size=self.states, tokens_per_state=1)
            super().__init__(spec, layer_names, vllm_config, device)

        def build(
            self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
        ) -> Any:
            """The step as the compressed sequences see it, without the requests that complete no
            chunk; None if none does."""
            chunks = Chunks(common, chunk, offset)
            rows = chunks.done.nonzero()[0]
            if not len(rows):
                return None
            done, ends = chunks.done[rows], (chunks.held + chunks.done)[rows]
            starts = np.concatenate(([0], done.cumsum()))
            device, table = common.slot_mapping.device, common.block_table_tensor
            places = np.stack((chunks.requests(), chunks.indices()))
            requests, indices = async_tensor_h2d(places, device)
            lengths = torch.from_numpy(ends.astype(np.int32))
            query_start_loc = torch.from_numpy(starts.astype(np.int32))
            compressed = common.replace(
                query_start_loc=async_tensor_h2d(query_start_loc, device),
                query_start_loc_cpu=query_start_loc,
                seq_lens=async_tensor_h2d(lengths, device),
                seq_lens_cpu_upper_bound=lengths,
                num_reqs=len(rows),
                num_actual_tokens=int(starts[-1]),
                max_query_len=int(done.max()),
                max_seq_len=int(ends.max()),
                block_table_tensor=table[async_tensor_h2d(rows, device)],
                slot_mapping=slots_of(table, requests, indices, self.states),
                positions=indices,
                is_prefilling=None,
                _num_computed_tokens_cache=None,
                _token_to_req_indices_cache=None,
            )
            return super().build(common_prefix_len, compressed, fast_build)

    class Implementation(base.get_impl_cls()):  # type: ignore[misc]
        def forward(
            self,
            layer: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            **scales: Any,
        ) -> Tensor:
            if attn_metadata is not None and not base.forward_includes_kv_cache_update:
                slots = attn_metadata.slot_mapping  # of chunks; vLLM's own is of tokens
                self.do_kv_cache_update(layer, key, value, kv_cache, slots)
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, **scales
            )

    return subclass_attention_backend_with_overrides(
        backend_name(chunk, offset),
        base,
        {
            "get_builder_cls": lambda: Builder,
            "get_impl_cls": lambda: Implementation,
            "forward_includes_kv_cache_update": True,
        },
    )


class CoarseAttention(Attention):
    """Attention of a layer at a coarse iteration: an entry of its cache is a chunk."""

    def __init__(self, iteration: Iteration, heads: int, size: int, **options: Any) -> None:
        self.chunk = iteration.chunk
        cache = options["cache_config"]
        base = get_attn_backend(size, torch.get_default_dtype(), cache.cache_dtype)
        backend = coarse_backend(base, iteration.chunk, iteration.offset)
        super().__init__(heads, size, attn_backend=backend, **options)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return replace(super().get_kv_cache_spec(vllm_config), tokens_per_state=self.chunk)


class LayerAttention:
    """A vLLM attention layer as the `LayerCache` of a block of ours."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def __call__(self, attend: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """1 H N K each"""
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        return self.attention(q, k, v).view(q.shape).transpose(0, 1)[None]


# ---------------------------------------------------------------------------- states of chunks


@dataclass
class ChunkSteps:
    """What one iteration does in a step, on the device."""

    tokens: Tensor  # N: slots of the tokens
    ends: Tensor  # M: at which of the step's tokens chunks complete
    indices: Tensor  # M: which of their requests' chunks they are
    members: Tensor  # M G: slots of their members
    real: Tensor  # M G: whether a member is there; the first chunk has ω places before token 0
    read: Tensor  # N: the slot of the latent that each token reads
    place: Tensor  # N: and for which member of its chunk that token stands
    unread: Tensor  # N 1: whether there is none, as before token s


@lru_cache
def chunk_state_backend(chunk: int, offset: int, shift: int) -> type[AttentionBackend]:
    class Builder(AttentionMetadataBuilder):
        def __init__(
            self, spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
        ) -> None:
            super().__init__(spec, layer_names, vllm_config, device)

        def build(
            self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
        ) -> ChunkSteps:
            chunks, size = Chunks(common, chunk, offset), self.kv_cache_spec.block_size
            device, table = common.slot_mapping.device, common.block_table_tensor
            requests, indices = chunks.requests(), chunks.indices()
            first = indices * chunk - offset
            before = np.cumsum(chunks.new) - chunks.new
            ends = first + chunk - 1 - chunks.starts[requests] + before[requests]
            owners = np.repeat(np.arange(len(chunks.new)), chunks.new)
            source = _count_from(chunks.starts, chunks.new) - shift  # whose update a token reads
            held = np.maximum(source, 0) + offset
            completes = held // chunk * chunk - offset + chunk - 1
            of_chunks = np.stack((requests, indices, first, ends))
            of_tokens = np.stack((owners, completes, held % chunk, source < 0))
            requests, indices, first, ends = async_tensor_h2d(of_chunks, device)
            owners, completes, place, unread = async_tensor_h2d(of_tokens, device)
            members = first[:, None] + torch.arange(chunk, device=device)
            return ChunkSteps(
                tokens=common.slot_mapping[: len(owners)],
                ends=ends,
                indices=indices,
                members=slots_of(table, requests[:, None], members.clamp_min(0), size),
                real=members >= 0,
                read=slots_of(table, owners, completes, size),
                place=place,
                unread=unread[:, None].bool(),
            )

    class Backend(AttentionBackend):
        @staticmethod
        def get_name() -> str:
            return "SPIRALFORMER_CHUNK_STATE"

        @staticmethod
        def get_impl_cls() -> Any:
            raise NotImplementedError("it attends to nothing")

        @staticmethod
        def get_builder_cls() -> type[AttentionMetadataBuilder]:
            return Builder

    return type(backend_name(chunk, offset, shift), (Backend,), {})


class ChunkState(nn.Module, AttentionLayerBase):
    """What an iteration remembers of a token: its state h, until the chunk is complete. At the last
    token of a chunk, the latent and its shares (λ·β) stand in place of h. No accumulator: a chunk
    is pooled from its members when its last one comes."""

    kv_cache: Tensor  # pages, 1, places, D + G

    def __init__(self, iteration: Iteration, width: int, prefix: str) -> None:
        super().__init__()
        self.iteration, self.width, self.name = iteration, width, prefix
        self.dtype = torch.get_default_dtype()
        self.kv_cache = torch.tensor([])
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        iteration = self.iteration
        return chunk_state_backend(iteration.chunk, iteration.offset, iteration.shift)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.width + self.iteration.chunk,
            head_size_v=0,
            dtype=self.dtype,
        )

    def write(self, slots: Tensor, first: int, x: Tensor) -> None:
        """Numbers `first` … of these slots"""
        size = self.kv_cache.shape[2]
        self.kv_cache[slots // size, 0, slots % size, first : first + x.shape[-1]] = x

    def read(self, slots: Tensor, first: int, end: int) -> Tensor:
        size = self.kv_cache.shape[2]
        return self.kv_cache[slots // size, 0, slots % size, first:end]
