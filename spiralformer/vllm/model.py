"""A model of the family as vLLM runs it: our modules on the tokens of a step, over paged caches.

Shapes: N tokens of a step (those of its requests one after the other), M chunks that complete in
it, G chunk size, D width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import AutoWeightsLoader

from spiralformer.config import Iteration
from spiralformer.model import SpiralFormer
from spiralformer.model.blocks import Stack
from spiralformer.model_folder import PREFIX
from spiralformer.vllm.config import spiral_config
from spiralformer.vllm.layers import ChunkState, ChunkSteps, CoarseAttention, LayerAttention


class SpiralFormerForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = spiral_config(vllm_config.model_config.hf_config)
        self.model = SpiralFormer(self.config)
        self.cache_config = vllm_config.cache_config
        self.cached = nn.ModuleDict()  # every layer that has a cache, in the order of a token's way
        layout = self.config.parsed_layout
        self.pre = self._caches(layout.pre)
        self.loop = [self._caches(i.layers, i) for i in self.config.iterations]
        self.states = [self._state(iteration) for iteration in self.config.iterations]
        self.post = self._caches(layout.post)

    def _prefix(self) -> str:
        return f"cached.{len(self.cached)}"  # vLLM wants exactly one number in it, and orders by it

    def _caches(self, layers: int, iteration: Iteration | None = None) -> list[LayerAttention]:
        """Caches of one run of a stack: of f_pre, of f_post, or of f_loop at one iteration."""
        caches = []
        for _ in range(layers):
            prefix, heads, size = self._prefix(), self.config.num_heads, self.config.head_size
            options = {
                "scale": size**-0.5,
                "cache_config": self.cache_config,
                "prefix": prefix,
            }
            if iteration is None or iteration.chunk == 1:
                attention = Attention(heads, size, **options)
            else:
                attention = CoarseAttention(iteration, heads, size, **options)
            self.cached[prefix.replace(".", "_")] = attention
            caches.append(LayerAttention(attention))
        return caches

    def _state(self, iteration: Iteration) -> ChunkState | None:
        if iteration.chunk == 1 and not iteration.shift:
            return None  # a token reads what it made itself
        prefix = self._prefix()
        state = ChunkState(iteration, self.config.hidden_size, prefix)
        self.cached[prefix.replace(".", "_")] = state
        return state

    # ------------------------------------------------------------------ what vLLM calls

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        named = ((PREFIX + name.removeprefix(PREFIX), tensor) for name, tensor in weights)
        return AutoWeightsLoader(self).load_weights(named)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed(input_ids)

    def forward(
        self,
        input_ids: Tensor,  # N; None beside inputs_embeds
        positions: Tensor,  # N
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,  # N D
    ) -> Tensor:
        """Algorithm 1 for the tokens of a step: their normalised output states, (N, D)."""
        model, x = self.model, inputs_embeds
        x = (model.embed(input_ids) if x is None else x)[None]
        v = model.pre(x, positions, self.pre)
        h, carrier = model.topology.start(x, v)
        for iteration in self.config.iterations:
            u = self.update(iteration, h, positions)
            h, carrier = model.topology.update(u, h, carrier, iteration.index)
        return model.norm(model.post(h, positions, self.post))[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.model.head(hidden_states)

    # ------------------------------------------------------------------ one iteration

    def update(self, iteration: Iteration, h: Tensor, positions: Tensor) -> Tensor:
        """ũ of the step's tokens, from their states h (1, N, D)."""
        state = self.states[iteration.index]
        if state is None:
            return self.run_core(iteration, h, positions)
        steps = self._steps(state)
        if steps is None:  # a rehearsal, without caches: as many chunks as there may be
            self.run_core(iteration, h[:, : iteration.chunks(h.shape[1])], positions)
            return h
        width, scaling = self.config.hidden_size, self.model.scalings[iteration.index]
        if iteration.chunk == 1:
            state.write(steps.tokens, 0, self.run_core(iteration, h, positions)[0])
            return state.read(steps.read, 0, width).masked_fill(steps.unread, 0)[None]
        state.write(steps.tokens, 0, h[0])
        if len(steps.ends):
            members = state.read(steps.members, 0, width)[None]  # 1 M G D
            real = steps.real[None]
            z = scaling.downscale.latent(scaling.downscale.push(None, members, real)).to(h.dtype)
            z = self.run_core(iteration, z, steps.indices)
            shares = scaling.upscale.allocation(z, scaling.upscale.push(None, members, real))
            last = steps.tokens[steps.ends]
            state.write(last, 0, torch.cat((z, shares.to(z.dtype)), -1)[0])
        latents = state.read(steps.read, 0, width + iteration.chunk)
        shares = latents[:, width:].gather(1, steps.place[:, None])
        return (latents[:, :width] * shares).masked_fill(steps.unread, 0)[None]

    def run_core(self, iteration: Iteration, z: Tensor, positions: Tensor) -> Tensor:
        core: Stack = self.model.core(iteration.index)
        return core(z, positions[: z.shape[1]], self.loop[iteration.index])

    def _steps(self, state: ChunkState) -> ChunkSteps | None:
        metadata = get_forward_context().attn_metadata
        return None if metadata is None else metadata[state.name]
