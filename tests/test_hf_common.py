"""What Hugging Face's common suites promise of every model, for each family: a SpiralFormer in both
regimes, a LoopedFormer and a plain Transformer."""

import json
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Cache,
    PretrainedConfig,
    StaticCache,
)

from spiralformer import SpiralConfig
from spiralformer.hf import SpiralCache, SpiralFormerConfig, SpiralFormerForCausalLM
from spiralformer.hf.outputs import EagerAttend
from spiralformer.model.blocks import Attend, Attention, Block, rotary
from spiralformer.model_folder import load_model
from spiralformer.presets import preset
from tests.hf import GREEDY, PAPER, RAGGED, SMALL, VOCAB, padded, prompts, wrapped

FAMILIES = {
    "spiral": SpiralConfig(layout="1+1x{1/4,1/2,1}+1", **SMALL),
    "parallel": SpiralConfig(layout="0+2x{1/3,1/2}+1", shift="parallel", **SMALL),
    "looped": SpiralConfig(layout="1+1x{1,1}+1", **SMALL),
    "baseline": SpiralConfig(layout="3", **SMALL),
}
RECORD = {"output_hidden_states": True, "output_attentions": True}


@pytest.fixture(params=FAMILIES)
def config(request) -> SpiralConfig:
    return FAMILIES[request.param]


def close(a: Tensor, b: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def attends(model: SpiralFormerForCausalLM) -> list:
    return [m.attend for m in model.modules() if isinstance(m, Attention)]


# ---------------------------------------------------------------------------- states and attentions


def chunkings(config: SpiralConfig) -> list:
    """For each layer of the unrolled computation, its iteration if that runs over chunks."""
    layout, layers = config.parsed_layout, []
    for iteration in config.iterations:
        layers += [iteration if iteration.chunk > 1 else None] * iteration.layers
    return [None] * layout.pre + layers + [None] * layout.post


def entries(out, layer: int, row: int, iteration, held: int, length: int, side: str = "left"):
    """States and attention weights of one row, from its `held`-th token or chunk on."""
    states, weights = out.hidden_states[layer + 1][row], out.attentions[layer][row]
    count = iteration.chunks if iteration else lambda n: n
    new, now = count(length) - count(held), count(length)
    if iteration is None and side == "left":
        return states[states.shape[0] - new :], weights[:, weights.shape[1] - new :, -now:]
    return states[:new], weights[:, :new, :now]


def test_each_layer_gives_its_states_and_attention_at_its_own_resolution(config):
    model, ids = wrapped(config), torch.tensor(prompts(13, 13))
    out = model(ids, use_cache=False, **RECORD)
    counts = [iteration.chunks(13) if iteration else 13 for iteration in chunkings(config)]
    assert [h.shape[1] for h in out.hidden_states] == [13, *counts[:-1], 13]
    assert [a.shape for a in out.attentions] == [(2, 2, n, n) for n in counts]
    for weights in out.attentions:
        close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert not weights.triu(1).any()
    close(out.logits, model(ids, use_cache=False).logits)
    close(model.model.head(out.hidden_states[-1]), out.logits)
    assert torch.equal(out.hidden_states[0], model.model.embed(ids))
    if config.parsed_layout.pre == 1:
        close(out.hidden_states[1], model.model.pre(out.hidden_states[0]))
    if config.iterations:
        first = config.parsed_layout.pre
        scaling, core = model.model.scalings[0], model.model.cores[0]
        h = model.model.topology.start(out.hidden_states[0], out.hidden_states[first])[0]
        rope = rotary(torch.arange(counts[first]), config)
        close(out.hidden_states[first + 1], core.blocks[0](scaling.downscale(h), rope))


@pytest.mark.parametrize("rows", [RAGGED[2:3], RAGGED], ids=["one", "ragged"])
def test_what_generation_records_is_what_one_pass_over_its_result_records(config, rows):
    model, inputs, steps = wrapped(config), padded(rows, extra=1), 12
    out = model.generate(
        **inputs, **{**GREEDY, "max_new_tokens": steps}, return_dict_in_generate=True, **RECORD
    )
    mask = inputs["attention_mask"]
    whole = model(
        out.sequences[:, :-1],
        attention_mask=torch.cat((mask, mask.new_ones(len(rows), steps - 1)), 1),
        use_cache=False,
        **RECORD,
    )
    records = [
        type(whole)(hidden_states=h, attentions=a)
        for h, a in zip(out.hidden_states, out.attentions, strict=True)
    ]
    for layer, iteration in enumerate(chunkings(config)):
        for row, tokens in enumerate(rows):
            ends = [0, *range(len(tokens), len(tokens) + steps)]
            states, weights = entries(whole, layer, row, iteration, 0, ends[-1])
            at = 0
            for record, (held, length) in zip(records, pairwise(ends), strict=True):
                h, a = entries(record, layer, row, iteration, held, length)
                end = at + len(h)
                close(h, states[at:end])
                close(a, weights[:, at:end, : a.shape[2]])
                close(a.sum(-1), a.new_ones(a.shape[:2]))  # nothing fell on padding or later
                at = end
            assert at == len(states) > 0


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_recorded_of_a_padded_row_is_what_it_gives_alone(config, side, use_cache):
    model = wrapped(config)
    batch = model(**padded(RAGGED, side, extra=2), use_cache=use_cache, **RECORD)
    for row, tokens in enumerate(RAGGED):
        alone = model(torch.tensor([tokens]), use_cache=use_cache, **RECORD)
        for layer, iteration in enumerate(chunkings(config)):
            found = entries(batch, layer, row, iteration, 0, len(tokens), side)
            wanted = entries(alone, layer, 0, iteration, 0, len(tokens), side)
            for a, b in zip(found, wanted, strict=True):
                close(a, b)


def test_recording_leaves_nothing_behind_and_follows_the_configuration():
    model, ids = wrapped(), torch.tensor(prompts(13))
    model.gradient_checkpointing_enable()
    before, checkpoint = attends(model), model.model.pre.checkpoint
    explicit = model(ids, **RECORD)
    assert attends(model) == before
    assert model.model.pre.checkpoint is checkpoint
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.pre.modules())
    assert model(ids).hidden_states is None
    assert model(ids).attentions is None
    model.set_attn_implementation("eager")
    model.config.output_attentions = model.config.output_hidden_states = True
    out = model(ids)
    for name in ("hidden_states", "attentions"):
        for a, b in zip(out[name], explicit[name], strict=True):
            close(a, b)
    assert len(model(ids, return_dict=False)) == 4  # logits, cache, states, attentions


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_is_recorded_in_training_has_a_gradient(config, attention):
    model = wrapped(config, attn_implementation=attention).train()
    model.gradient_checkpointing_enable()
    inputs = padded(RAGGED, "right")
    out = model(**inputs, labels=inputs["input_ids"], **RECORD)
    for x in (*out.hidden_states, *out.attentions):
        x.retain_grad()
    out.loss.backward()
    assert all(x.grad is not None for x in (*out.hidden_states, *out.attentions))
    assert out.hidden_states[0].grad.any()
    assert out.attentions[0].grad.any()


def test_the_body_gives_the_states_that_the_head_reads(config):
    model, inputs = wrapped(config), padded(RAGGED)
    hidden = model.base_model(**inputs).last_hidden_state
    assert torch.equal(model.model.head(hidden), model(**inputs).logits)


# ---------------------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("side", ["left", "right", None])
def test_eager_attention_is_sdpa(config, side, dtype):
    eager, sdpa = (wrapped(config, dtype, attn_implementation=a) for a in ("eager", "sdpa"))
    assert {type(a) for a in attends(eager)} == {EagerAttend}
    assert {type(a) for a in attends(sdpa)} == {Attend}
    inputs = padded(RAGGED, side) if side else {"input_ids": torch.tensor(prompts(21, 21))}
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    for options in ({"use_cache": False}, {"use_cache": True}):
        a, b = (model(**inputs, **options).logits[real].detach() for model in (eager, sdpa))
        close(a, b, atol=1e-10 if dtype == torch.float64 else 0.05 * float(b.abs().max()))
    if side != "right" and dtype == torch.float64:
        assert torch.equal(eager.generate(**inputs, **GREEDY), sdpa.generate(**inputs, **GREEDY))


def test_attention_is_chosen_at_any_time_and_an_unknown_one_is_refused(tmp_path):
    model = wrapped()
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    assert {type(a) for a in attends(model)} == {EagerAttend}
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert {type(a) for a in attends(loaded)} == {EagerAttend}
    AttentionInterface.register("registered", lambda *_: None)
    for unknown in ("flash_attention_2", "flex_attention", "registered", "quick"):
        with pytest.raises(ValueError, match=r"does not support|not supported"):
            AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=unknown)
        with pytest.raises(ValueError, match=r"does not support|not supported"):
            model.set_attn_implementation(unknown)
        assert model.config._attn_implementation == "eager"


# ---------------------------------------------------------------------------- embeddings and caches


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_starts_from_embeddings_as_from_their_tokens(config, beams):
    model, inputs = wrapped(config), padded(RAGGED)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    embeds = model.get_input_embeddings()(ids).detach()
    options = {**GREEDY, "attention_mask": mask, "num_beams": beams}
    whole = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, inputs_embeds=embeds, **options), whole)
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), whole[:, 21:])
    other = model.generate(inputs_embeds=embeds.roll(1, 1), **options)
    assert not torch.equal(other, whole[:, 21:])


def test_generation_from_embeddings_ends_at_the_longest_sequence():
    model = wrapped(PAPER.replace(max_length=48))
    embeds = model.get_input_embeddings()(torch.tensor(prompts(40))).detach()
    found = model.generate(inputs_embeds=embeds, **{**GREEDY, "max_new_tokens": 500})
    assert found.shape == (1, 8)
    with pytest.raises(ValueError, match="prompt of 48 tokens leaves no room"):
        model.generate(inputs_embeds=embeds.repeat(1, 2, 1)[:, :48], **GREEDY)
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(inputs_embeds=embeds[:, :0], **GREEDY)


def test_embeddings_go_through_a_cache_unless_they_want_a_gradient(config):
    model, inputs = wrapped(config), padded(RAGGED)
    embeds, mask = model.get_input_embeddings()(inputs["input_ids"]), inputs["attention_mask"]
    out = model(inputs_embeds=embeds, attention_mask=mask)
    assert out.past_key_values is None
    assert out.logits.requires_grad
    cache = None
    for start, end in ((0, 9), (9, 21)):
        part = {"inputs_embeds": embeds[:, start:end].detach(), "attention_mask": mask[:, :end]}
        found = model(**part, past_key_values=cache)
        cache = found.past_key_values
        real = mask[:, start:end].bool()
        close(found.logits[real], out.logits[:, start:end][real])


def test_a_cache_shows_keys_and_values_of_every_layer(config):
    model = wrapped(config)
    assert len(SpiralCache()) == 0
    cache = model(**padded(RAGGED)).past_key_values
    assert isinstance(cache, Cache)
    assert (cache.get_seq_length(), cache.batch_size, cache.get_max_length()) == (21, 4, -1)
    assert len(cache) == config.parsed_layout.compute_layers
    for row, tokens in enumerate(RAGGED):
        alone = model(torch.tensor([tokens])).past_key_values
        for layer, one, iteration in zip(
            cache.layers, alone.layers, chunkings(config), strict=True
        ):
            count = iteration.chunks if iteration else lambda n: n
            assert layer.keys.shape == layer.values.shape == (4, 2, count(21), 8)
            assert one.get_seq_length() == count(len(tokens))
            close(layer.keys[row, :, : count(len(tokens))], one.keys[0])
            close(layer.values[row, :, : count(len(tokens))], one.values[0])


def test_a_cropped_cache_is_one_that_never_saw_the_rest(config):
    model, ids = wrapped(config), torch.tensor(prompts(40, 40))
    cache = SpiralCache()
    if any(iteration.chunk > 1 for iteration in config.iterations):
        cache.activate_past_recording()
    model(ids[:, :20], past_key_values=cache)
    assert cache.is_croppable
    model(ids[:, 20:33], past_key_values=cache)
    cache.crop(-13)
    assert cache.get_seq_length() == 20
    found = model(ids[:, 33:], past_key_values=cache).logits
    text = torch.cat((ids[:, :20], ids[:, 33:]), 1)
    close(found, model(text, use_cache=False).logits[:, 20:])


def test_a_reordered_cache_goes_on_as_the_rows_it_took(config):
    model, inputs = wrapped(config), padded(RAGGED)
    cache = model(**inputs).past_key_values
    order = torch.tensor([3, 0, 0, 2, 1])
    cache.reorder_cache(order)
    new = torch.tensor(prompts(*[6] * 5))
    found = model(new, past_key_values=cache).logits
    text = padded([RAGGED[row] + more for row, more in zip(order, new.tolist(), strict=True)])
    close(found, model(**text, use_cache=False).logits[:, -6:])


def test_generation_goes_on_from_a_cache_of_a_prefix(config):
    model, (prompt,) = wrapped(config), prompts(17)
    ids = torch.tensor([prompt])
    whole = model.generate(ids, **GREEDY)
    for held in (1, 9, 16):
        cache = model(ids[:, :held]).past_key_values
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), whole)


def test_assisted_generation_and_prompt_lookup_are_greedy_generation(config):
    model, near = wrapped(config), wrapped(config)
    for p in near.parameters():
        p.data.lerp_(p.data.roll(1, 0), 0.02)  # right about some tokens, wrong about others
    ids = torch.tensor(prompts(13))
    options = {**GREEDY, "max_new_tokens": 40, "return_dict_in_generate": True}
    whole = model.generate(ids, **options).sequences
    for help_ in ({"assistant_model": near}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(ids, **help_, **options).sequences, whole)
        if any(iteration.chunk > 1 for iteration in config.iterations):
            with pytest.raises(ValueError, match="cuts output_attentions"):
                model.generate(ids, **help_, **options, **RECORD)
        else:
            found = model.generate(ids, **help_, **options, **RECORD)
            assert torch.equal(found.sequences, whole)
            assert [h[-1].shape[1] for h in found.hidden_states] == [13] + 39 * [1]


def test_static_caches_are_refused(config):
    model, ids = wrapped(config), torch.tensor(prompts(9))
    cache = StaticCache(config=model.config, max_cache_len=64)
    for call in (model, lambda ids, **kw: model.generate(ids, **GREEDY, **kw)):
        with pytest.raises(ValueError, match="past_key_values is a StaticCache"):
            call(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="cache_implementation 'static' is not supported"):
        model.generate(ids, **GREEDY, cache_implementation="static")


# ---------------------------------------------------------------------------- training and saving


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradient_checkpointing_gives_the_same_gradients(config, reentrant):
    model, ids = wrapped(config).train(), torch.tensor(prompts(30, 30))

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    given = None if reentrant is None else {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given)
    assert model.is_gradient_checkpointing
    blocks = []
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda *_: blocks.append(torch.is_grad_enabled()))
    torch.testing.assert_close(gradients(), plain)
    layers = config.parsed_layout.compute_layers
    # the reentrant kind runs the forward pass without a graph
    assert sorted(blocks) == layers * [not reentrant] + layers * [True]
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    with pytest.raises(ValueError, match="every_n_layers"):
        model.gradient_checkpointing_enable(every_n_layers=2)


def test_checkpointing_trains_what_lies_behind_frozen_embeddings(config):
    model, ids = wrapped(config).train(), torch.tensor(prompts(30, 30))
    model.get_input_embeddings().requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model(ids, labels=ids).loss.backward()
    stack = next(stack for stack in model.model.stacks() if stack.blocks)
    assert stack.blocks[0].attention.qkv.weight.grad.any()


@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_grows_and_shrinks_with_both_ends(config, tied, tmp_path):
    model, ids = wrapped(config.replace(tie_embeddings=tied)), torch.tensor(prompts(20)) % 32
    before = model(ids).logits
    for size, multiple, wanted in ((VOCAB + 7, None, VOCAB + 7), (32, None, 32), (33, 8, 40)):
        model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
        assert model.config.vocab_size == model.vocab_size == wanted
        assert model.get_output_embeddings().weight.shape == (wanted, 16)
        assert (model.model.head.weight is model.model.embedding.weight) == tied
        close(model(ids).logits[..., :32], before[..., :32])
    model.save_pretrained(tmp_path)
    close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    close(load_model(tmp_path)(ids), model(ids).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_saved_model_comes_back_in_its_dtype_from_any_number_of_files(
    config, dtype, tied, tmp_path
):
    model = wrapped(config.replace(tie_embeddings=tied), dtype)
    ids = torch.tensor(prompts(20))
    for shards, size in (("one", "50GB"), ("many", "4KB")):
        model.save_pretrained(tmp_path / shards, max_shard_size=size)
        found = AutoModelForCausalLM.from_pretrained(
            tmp_path / shards, dtype="auto", device_map="auto"
        )
        assert {p.dtype for p in found.parameters()} == {found.dtype} == {dtype}
        torch.testing.assert_close(found(ids).logits, model(ids).logits)
        state = found.state_dict()
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype=other)
    assert {p.dtype for p in found.parameters()} == {other}


def test_tied_weights_are_one_tensor_saved_once(config, tmp_path):
    model = wrapped(config.replace(tie_embeddings=True))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "model.head.weight" not in index["weight_map"]
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert loaded.all_tied_weights_keys == {"model.head.weight": "model.embedding.weight"}


def test_a_row_of_a_batch_gives_what_it_gives_alone_padding_included(config):
    model, batch = wrapped(config), padded(RAGGED, "right")
    for use_cache in (False, True):
        whole = model(**batch, use_cache=use_cache, output_hidden_states=True)
        for row in range(4):
            one = {name: value[row : row + 1] for name, value in batch.items()}
            alone = model(**one, use_cache=use_cache, output_hidden_states=True)
            close(whole.logits[row : row + 1], alone.logits)
            for a, b in zip(whole.hidden_states, alone.hidden_states, strict=True):
                close(a[row : row + 1, : b.shape[1]], b)


@pytest.mark.parametrize("strict", [False, True])
def test_the_forward_pass_is_exported_for_batches_of_any_shape(config, strict):
    model, any_ = wrapped(config), torch.export.Dim.DYNAMIC
    inputs = padded(RAGGED)
    exported = torch.export.export(
        model,
        (),
        kwargs=inputs,
        dynamic_shapes={name: {0: any_, 1: any_} for name in inputs},
        strict=strict,
    ).module()
    for batch in (inputs, padded(RAGGED[:3]), padded(prompts(33, 8), "right")):
        real = batch["attention_mask"].bool()
        close(exported(**batch).logits[real], model(**batch).logits[real])


# ---------------------------------------------------------------------------- configuration


class Named(SpiralFormerConfig):
    model_type = "named-spiral"

    def __init__(self, flavour: str = "plain", **kwargs) -> None:
        self.flavour = flavour
        super().__init__(**kwargs)


class Composite(PretrainedConfig):
    model_type = "spiral-composite"
    sub_configs = {"text_config": SpiralFormerConfig}  # noqa: RUF012

    def __init__(self, text_config=None, **kwargs) -> None:
        fields = text_config.to_dict() if isinstance(text_config, PretrainedConfig) else text_config
        self.text_config = SpiralFormerConfig(**(fields or {}))
        super().__init__(**kwargs)


def test_a_configuration_comes_back_as_it_was_saved(config, tmp_path):
    made = SpiralFormerConfig.from_spiral(config, eos_token_id=5, num_labels=3, remark="kept")
    made.save_pretrained(tmp_path / "a" / "b")
    for found in (
        SpiralFormerConfig.from_pretrained(tmp_path / "a" / "b"),
        SpiralFormerConfig.from_pretrained(tmp_path / "a", subfolder="b"),
        SpiralFormerConfig.from_json_file(tmp_path / "a" / "b" / "config.json"),
    ):
        assert found.to_dict() == made.to_dict()
        assert (found.spiral, found.remark, found.num_labels) == (config, "kept", 3)
    changed = SpiralFormerConfig.from_pretrained(tmp_path / "a" / "b", num_heads=4, remark="new")
    assert (changed.spiral, changed.remark) == (config.replace(num_heads=4), "new")


def test_subclasses_and_composites_of_the_configuration_come_back_too(config, tmp_path):
    named = Named(**config.to_dict(), flavour="sour")
    named.save_pretrained(tmp_path / "named")
    found = Named.from_pretrained(tmp_path / "named")
    assert (type(found), found.flavour, found.spiral) == (Named, "sour", config)
    assert found.to_dict() == named.to_dict()

    both = Composite(text_config=SpiralFormerConfig.from_spiral(config))
    both.save_pretrained(tmp_path / "both")
    found = Composite.from_pretrained(tmp_path / "both")
    assert found.to_dict() == both.to_dict()
    assert found.get_text_config().spiral == config
    assert SpiralFormerConfig.from_pretrained(tmp_path / "both").spiral == config


def test_a_configuration_of_nothing_is_the_papers_smallest():
    assert SpiralFormerConfig().spiral == preset("spiral-b-160m-mesh")
    assert Composite().text_config.spiral == SpiralFormerConfig().spiral
    assert SpiralFormerConfig(output_hidden_states=True, num_labels=2).num_labels == 2
    with pytest.raises(ValueError, match="missing fields layout, num_heads, vocab_size"):
        SpiralFormerConfig(hidden_size=16)
