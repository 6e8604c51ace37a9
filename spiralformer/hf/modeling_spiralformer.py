"""`SpiralFormer` as a `transformers` model: Trainer, generate, pipelines, adapters.

Shapes: B batch, M new columns (padding included), D width, V vocabulary.
"""

# mypy: disable-error-code="misc, override, arg-type"
# (transformers types `self` of its mixins as a class of its own, which no model is)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple, logging

from spiralformer.config import SpiralConfig
from spiralformer.decode.runner import EAGER, Runner, runner_for
from spiralformer.hf.cache import SpiralCache
from spiralformer.hf.configuration_spiralformer import SpiralFormerConfig
from spiralformer.hf.outputs import EagerAttend, recording
from spiralformer.hf.padding import Rows, check_positions, find_rows
from spiralformer.model.blocks import Attend, Attention
from spiralformer.model.loss import IGNORE, linear_cross_entropy
from spiralformer.model.spiralformer import SpiralFormer

logger = logging.get_logger(__name__)

# Pipelines and the Trainer's label smoothing know causal language models by this table of names.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("spiralformer", "SpiralFormerForCausalLM")

ATTENTION = {"eager": EagerAttend, "sdpa": Attend}
MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)


class SpiralFormerForCausalLM(PreTrainedModel, GenerationMixin):
    """A model of the family under the name `model`, with the methods that `transformers` calls.

    `generate` takes `runner="auto"`, "eager", "compile", "native" or a runner, as ours does
    (see `spiralformer.decode.runner_for`).
    """

    config_class = SpiralFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # the loss is divided by the Trainer's num_items_in_batch
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers' own form)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: SpiralFormerConfig) -> None:
        super().__init__(config)
        self._forget_model_length()
        self.model = SpiralFormer(config.spiral)
        self._choose_attention()
        if not self.model.embedding.weight.is_meta:
            for module in self.model.modules():
                module._is_hf_initialized = True  # the model has initialised itself
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,  # B M
        attention_mask: Tensor | None = None,  # B M, or B (columns in the cache + M)
        past_key_values: SpiralCache | None = None,
        inputs_embeds: Tensor | None = None,  # B M D, as `get_input_embeddings()` gives them
        labels: Tensor | None = None,  # B M, not shifted; -100 does not count
        use_cache: bool | None = None,
        logits_to_keep: int | slice | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the new tokens and, with labels, the loss; the rest as `body`.

        `logits_to_keep`: how many last positions (0: all) or which ones get logits. By default all
        do, except beside a training loss, which is computed a few tokens at a time: B·M·V logits
        would take more memory than everything else.
        The Trainer gives `num_items_in_batch`, labels of all the batches whose gradients add up,
        and `shift_labels`, which a collator has shifted already.
        """
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        targets = kwargs.pop("shift_labels", None)
        if targets is None and labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        wants_loss = targets is not None
        if use_cache is None and wants_loss:
            use_cache = False
        out = self.body(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden, cache = out.last_hidden_state, out.past_key_values
        loss, logits = None, None
        # what has come through a cache has lost its gradient: the head must not get one alone
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            if wants_loss:
                if attention_mask is not None:  # padding predicts nothing
                    padding = attention_mask[:, -targets.shape[1] :] == 0
                    targets = targets.masked_fill(padding.to(targets.device), IGNORE)
                loss = self._loss(hidden, targets.to(hidden.device), num_items_in_batch)
            if logits_to_keep is None and not (wants_loss and self.training):
                logits_to_keep = 0
            if logits_to_keep is not None:
                if isinstance(logits_to_keep, int):
                    logits_to_keep = slice(-logits_to_keep, None)
                runner = EAGER if cache is None else cache.runner
                logits = runner.head(self.model, hidden[:, logits_to_keep])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def _loss(
        self, hidden: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        total = linear_cross_entropy(self.model.head, hidden, targets)
        count = (targets != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    @can_return_tuple
    def body(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: SpiralCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Output states of the new tokens, which the head reads.

        `use_cache`: by default config.use_cache, except in training, in `torch.export`, beside a
        loss and for inputs_embeds that want a gradient. What comes through a cache carries none.
        `output_hidden_states`: the embeddings, the states after each layer of the unrolled
        computation (f_pre, the core of each iteration, f_post), the last of them normalised as the
        head reads it. An iteration at resolution 1/g gives its own states, (B, chunks, D), of the
        chunks that the new tokens complete, which may be none.
        `output_attentions`: as many tensors (B, H, M, columns so far), less the embeddings; of an
        iteration at resolution 1/g, (B, H, new chunks, chunks so far). They are computed eagerly
        whatever `attn_implementation` is. Chunks are counted from a row's first token; what stands
        at padding, or behind a row's last complete chunk, means nothing.
        """
        cache = past_key_values
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if cache is not None and not isinstance(cache, SpiralCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; SpiralFormer has its own cache: "
                "pass a SpiralCache, or leave it out"
            )
        kwargs.pop("cache_position", None)  # of older versions; the cache knows where it stands
        ignored = [
            name for name in kwargs if kwargs[name] is not None and kwargs[name] is not False
        ]
        if ignored:
            raise ValueError(f"SpiralFormerForCausalLM does not support {', '.join(ignored)}")
        if use_cache is None:
            wants_gradient = inputs_embeds is not None and inputs_embeds.requires_grad
            use_cache = self.config.use_cache and not (
                self.training or wants_gradient or torch.compiler.is_exporting()
            )
        if use_cache and cache is None:
            cache = SpiralCache()
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        x = self._embed(input_ids, inputs_embeds)
        rows = None
        if attention_mask is not None:
            attention_mask = attention_mask.to(x.device)
            rows = find_rows(attention_mask, x.shape[1], cache)
        if position_ids is not None:
            check_positions(position_ids, x, rows, cache)
        if not (output_attentions or output_hidden_states):
            runner = EAGER if cache is None else cache.runner
            return BaseModelOutputWithPast(self._run(x, rows, cache, runner), cache)
        with recording(self.model, bool(output_attentions)) as recorder:
            hidden = self._run(x, rows, cache, recorder)
        states, weights = recorder.collect(
            x,
            columns=x.shape[1] if cache is None else cache.columns,
            rows=rows,
            first=None if attention_mask is None else (attention_mask != 0).int().argmax(1),
            state=None if cache is None else cache.state,
        )
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=(x, *states[:-1], hidden) if output_hidden_states else None,
            attentions=tuple(weights) if output_attentions else None,
        )

    @property
    def base_model(self) -> Callable[..., BaseModelOutputWithPast]:
        """What tools call for the states without the head; `model` is ours and gives logits."""
        return self.body

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if inputs_embeds is None:
            return self.model.embed(input_ids)
        scale = math.sqrt(self.config.hidden_size) if self.config.scale_embeddings else 1.0
        return inputs_embeds * scale

    def _run(
        self, x: Tensor, rows: Rows | None, cache: SpiralCache | None, runner: Runner
    ) -> Tensor:
        """Output states of the embeddings x, (B, M, D)."""
        aligned = x if rows is None else rows.align(x)
        if cache is None:
            hidden = self.model.hidden(aligned)
            return hidden if rows is None else rows.restore(hidden)
        if rows is None:
            return cache.extend(self.model, aligned, None, runner)
        hidden = rows.restore(cache.extend(self.model, aligned, rows.lengths, runner))
        return hidden * rows.real[..., None]  # else padding would depend on the other rows

    # ------------------------------------------------------------------ attention

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn_implementation(*args, **kwargs)
        self._choose_attention()

    def _choose_attention(self) -> None:
        wanted = self.config._attn_implementation
        if wanted not in ATTENTION:
            raise ValueError(
                f"attn_implementation {wanted!r} is not supported; choose {' or '.join(ATTENTION)}"
            )
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.attend = ATTENTION[wanted]()

    # ------------------------------------------------------------------ embeddings

    _input_embed_layer = "embedding"

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        spiral = self.config.spiral
        for module in self.model.modules():
            if isinstance(getattr(module, "config", None), SpiralConfig):
                module.config = spiral
        return embeddings

    # ------------------------------------------------------------------ gradient checkpointing

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Tensor] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        if every_n_layers != 1:
            raise ValueError("every_n_layers: SpiralFormer checkpoints every layer or none")
        self.model.set_checkpointing(enable, gradient_checkpointing_func)

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(stack.checkpoint for stack in self.model.stacks())

    # ------------------------------------------------------------------ generation

    def _forget_model_length(self) -> None:
        """A generation config made from config.json takes the model's max_length, the longest
        sequence it can read, for a request to generate that much."""
        config = self.generation_config
        if config._from_model_config and config.max_length == self.config.max_length:
            config.max_length = GenerationConfig().max_length

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        super().adjust_generation_fn(*args, **kwargs)
        self._forget_model_length()

    def _prepare_generation_config(
        self, *args: Any, **kwargs: Any
    ) -> tuple[GenerationConfig, dict]:
        config, model_kwargs = super()._prepare_generation_config(*args, **kwargs)
        mode = config.get_generation_mode()
        if mode not in MODES:
            raise ValueError(
                f"generation mode {mode.value!r} is not supported; SpiralFormer has "
                f"{', '.join(m.value for m in MODES)}"
            )
        if config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation {config.cache_implementation!r} is not supported; leave it "
                "out: SpiralFormer builds a cache of its own"
            )
        return config, model_kwargs

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        super()._validate_model_kwargs({k: v for k, v in model_kwargs.items() if k != "runner"})

    def _prepare_generated_length(
        self, *args: Any, input_ids_length: int, inputs_tensor: Tensor, **kwargs: Any
    ) -> GenerationConfig:
        longest, prompt = self.config.max_length, inputs_tensor.shape[1]
        if prompt == 0:
            raise ValueError("the prompt is empty; give at least one token")
        if prompt >= longest:
            raise ValueError(
                f"a prompt of {prompt} tokens leaves no room to generate: the model's longest "
                f"sequence is {longest}"
            )
        config = super()._prepare_generated_length(
            *args, input_ids_length=input_ids_length, inputs_tensor=inputs_tensor, **kwargs
        )
        room = longest - (prompt - input_ids_length)  # inputs_embeds do not count as generated
        if config.max_length > room:
            logger.warning_once(
                f"Generation will stop at {longest} tokens, the model's longest sequence."
            )
            config.max_length = room
        return config

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
    ) -> None:
        outputs = generation_config.output_attentions or generation_config.output_hidden_states
        coarse = any(iteration.chunk > 1 for iteration in self.model.config.iterations)
        if generation_mode == GenerationMode.ASSISTED_GENERATION and outputs and coarse:
            raise ValueError(
                "assisted generation cuts output_attentions and output_hidden_states into tokens, "
                "and an iteration at a lower resolution gives chunks; leave out one or the other"
            )
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            if not mask.any(1).all():
                empty = int((~mask.any(1)).nonzero()[0])
                raise ValueError(f"row {empty} of the batch is empty; give at least one token")
            if not mask[:, -1].all():
                raise ValueError(
                    "the batch is padded on the right, where the new tokens go; set the "
                    "tokenizer's padding_side to 'left'"
                )
        # the other runners have an attention of their own
        default = "eager" if self.config._attn_implementation == "eager" else "auto"
        wanted = model_kwargs.pop("runner", default)
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache:
            model_kwargs["past_key_values"] = cache = SpiralCache(max_cache_length)
            if generation_config.is_assistant:  # its guesses are taken back
                cache.activate_past_recording()
        if cache is not None:
            cache.runner = runner_for(
                self.model,
                wanted,
                rows=batch_size * max(generation_config.num_beams, 1),
                tokens=max_cache_length - cache.get_seq_length(),
                capacity=max_cache_length,
            )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("continuous batching (a paged cache) is not supported")
