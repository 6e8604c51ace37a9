"""`SpiralFormer` as a `transformers` model: Trainer, generate, pipelines, adapters.

Shapes: B batch, M new columns (padding included), D width, V vocabulary.
"""

# mypy: disable-error-code="misc, override, arg-type"
# (transformers types `self` of its mixins as a class of its own, which no model is)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple, logging

from spiralformer.config import SpiralConfig
from spiralformer.decode.runner import EAGER, runner_for
from spiralformer.hf.cache import SpiralCache
from spiralformer.hf.configuration_spiralformer import SpiralFormerConfig
from spiralformer.model.loss import IGNORE, linear_cross_entropy
from spiralformer.model.spiralformer import SpiralFormer

logger = logging.get_logger(__name__)

# Pipelines and the Trainer's label smoothing know causal language models by this table of names.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("spiralformer", "SpiralFormerForCausalLM")

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
        """Output states of the new tokens, their logits and, with labels, the loss.

        `logits_to_keep`: how many last positions (0: all) or which ones get logits. By default all
        do, except beside a training loss, which is computed a few tokens at a time: B·M·V logits
        would take more memory than everything else.
        `use_cache`: by default config.use_cache, except in training, beside a loss and for
        inputs_embeds. What comes through a cache carries no gradient.
        """
        loss_options = {k: kwargs.pop(k, None) for k in ("num_items_in_batch", "shift_labels")}
        position_ids = kwargs.pop("position_ids", None)
        kwargs.pop("cache_position", None)  # of older versions; the cache knows where it stands
        ignored = [
            name for name, value in kwargs.items() if value is not None and value is not False
        ]
        if ignored:
            raise ValueError(f"SpiralFormerForCausalLM does not support {', '.join(ignored)}")
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give either input_ids or inputs_embeds")
        cache = past_key_values
        if cache is not None and not isinstance(cache, SpiralCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; SpiralFormer has its own cache: "
                "pass a SpiralCache, or leave it out"
            )
        wants_loss = labels is not None or loss_options["shift_labels"] is not None
        if use_cache is None:
            use_cache = self.config.use_cache and not (
                self.training or wants_loss or inputs_embeds is not None
            )
        if use_cache and cache is None:
            cache = SpiralCache()
        if inputs_embeds is not None and cache is not None:
            raise ValueError("inputs_embeds cannot be used with a cache; pass use_cache=False")

        rows = None
        if attention_mask is not None:
            rows = find_rows(attention_mask.to(given.device), given.shape[1], cache)
        if position_ids is not None:
            check_positions(position_ids, given, rows, cache)
        given = given if rows is None else rows.align(given)
        if cache is None:
            hidden = self.model.hidden(self._embed(given))
        else:
            hidden = cache.extend(self.model, given, None if rows is None else rows.lengths)
        hidden = hidden if rows is None else rows.restore(hidden)

        loss, logits = None, None
        # what has come through a cache has lost its gradient: the head must not get one alone
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            if wants_loss:
                loss = self._loss(hidden, labels, rows, **loss_options)
            if logits_to_keep is None and not (wants_loss and self.training):
                logits_to_keep = 0
            if logits_to_keep is not None:
                if isinstance(logits_to_keep, int):
                    logits_to_keep = slice(-logits_to_keep, None)
                runner = EAGER if cache is None else cache.runner
                logits = runner.head(self.model, hidden[:, logits_to_keep])
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def _loss(
        self,
        hidden: Tensor,  # B M D
        labels: Any,  # B M
        rows: Rows | None,
        num_items_in_batch: Tensor | int | None,  # of all the batches whose gradients add up
        shift_labels: Tensor | None,  # B M, labels that a collator has shifted already
    ) -> Tensor:
        targets = shift_labels
        if targets is None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        targets = targets.to(hidden.device)
        if rows is not None:
            targets = targets.masked_fill(~rows.real, IGNORE)  # padding predicts nothing
        total = linear_cross_entropy(self.model.head, hidden, targets)
        count = (targets != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    def _embed(self, given: Tensor) -> Tensor:
        if given.dim() == 2:
            return self.model.embed(given)
        scale = math.sqrt(self.config.hidden_size) if self.config.scale_embeddings else 1.0
        return given * scale

    # ------------------------------------------------------------------ embeddings

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

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

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("every_n_layers", 1) != 1:
            raise ValueError("every_n_layers: SpiralFormer checkpoints every layer or none")
        self.model.set_checkpointing(enable)

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(stack.checkpointing for stack in self.model.stacks())

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
        self._require_mode(config.get_generation_mode())
        if config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation {config.cache_implementation!r} is not supported; leave it "
                "out: SpiralFormer builds a cache of its own"
            )
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError("generate needs input_ids; it cannot start from inputs_embeds")
        return config, model_kwargs

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        super()._validate_model_kwargs({k: v for k, v in model_kwargs.items() if k != "runner"})

    def _validate_generation_mode(self, generation_mode, *args: Any, **kwargs: Any) -> None:
        self._require_mode(generation_mode)
        super()._validate_generation_mode(generation_mode, *args, **kwargs)

    def _require_mode(self, mode: GenerationMode) -> None:
        if mode not in MODES:
            raise ValueError(
                f"generation mode {mode.value!r} is not supported; SpiralFormer has "
                f"{', '.join(m.value for m in MODES)}"
            )

    def _prepare_generated_length(
        self, *args: Any, input_ids_length: int, **kwargs: Any
    ) -> GenerationConfig:
        longest = self.config.max_length
        if input_ids_length == 0:
            raise ValueError("the prompt is empty; give at least one token")
        if input_ids_length >= longest:
            raise ValueError(
                f"a prompt of {input_ids_length} tokens leaves no room to generate: the model's "
                f"longest sequence is {longest}"
            )
        config = super()._prepare_generated_length(
            *args, input_ids_length=input_ids_length, **kwargs
        )
        if config.max_length > longest:
            logger.warning_once(
                f"Generation will stop at {longest} tokens, the model's longest sequence."
            )
            config.max_length = longest
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
        wanted = model_kwargs.pop("runner", "auto")
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


# ---------------------------------------------------------------------------- padding


class Rows(NamedTuple):
    """Where the real tokens of each row stand among the new columns."""

    starts: Tensor  # B: columns of padding before the first one
    lengths: list[int]  # how many
    real: Tensor  # B M

    def align(self, x: Tensor) -> Tensor:
        """Rolls each row to the left, so that all padding stands on the right, as our model likes
        it: no output depends on what follows."""
        return self._roll(x, self.starts)

    def restore(self, x: Tensor) -> Tensor:
        return self._roll(x, -self.starts)

    def _roll(self, x: Tensor, by: Tensor) -> Tensor:
        if not by.any():
            return x
        index = (torch.arange(x.shape[1], device=x.device) + by[:, None]) % x.shape[1]
        return x.gather(1, index if x.dim() == 2 else index[:, :, None].expand_as(x))


def find_rows(mask: Tensor, width: int, cache: SpiralCache | None) -> Rows | None:
    """Reads an attention mask over what the cache holds and `width` new columns."""
    if mask.dim() != 2:
        raise ValueError(f"attention_mask must be (batch, length), not {tuple(mask.shape)}")
    held = 0 if cache is None else cache.columns
    if mask.shape[1] != held + width:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} columns; {held} are in the cache and {width} "
            "are new"
        )
    real = mask != 0
    runs = real[:, 0].int() + (real[:, 1:] & ~real[:, :-1]).sum(1)  # of real tokens, per row
    if (runs > 1).any():
        raise ValueError(
            f"attention_mask has a hole in row {int((runs > 1).nonzero()[0])}: padding may stand "
            "only before or after a row's tokens, for they are read in chunks"
        )
    if cache is not None and cache.state is not None:
        before = real[:, :held].sum(1).tolist()
        if before != cache.lengths:
            raise ValueError(
                f"attention_mask says that {before} tokens came before; the cache holds "
                f"{cache.lengths}"
            )
    real = real[:, held:]
    if real.all():
        return None
    return Rows(real.int().argmax(1), real.sum(1).tolist(), real)


def check_positions(
    position_ids: Tensor, given: Tensor, rows: Rows | None, cache: SpiralCache | None
) -> None:
    """Refuses positions other than those that the tokens have anyway (packed sequences, say)."""
    batch, width = given.shape[:2]
    held = [] if cache is None else cache.lengths
    before = torch.tensor(held or [0] * batch, device=given.device)
    expected = torch.arange(width, device=given.device) + before[:, None]
    real = torch.ones_like(expected, dtype=torch.bool)
    if rows is not None:
        expected, real = expected - rows.starts[:, None], rows.real
    positions = position_ids.to(given.device).expand(batch, -1)
    if positions.shape != expected.shape or not ((positions == expected) | ~real).all():
        raise ValueError(
            "position_ids other than 0, 1, 2, … are not supported; sequences cannot be packed"
        )
