"""Laws of the Hugging Face classes: they compute what our model does, whatever tool calls them."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

from spiralformer import ConfigError, SpiralConfig, SpiralFormer, decode
from spiralformer.decode.generate import generate
from spiralformer.decode.native import NativeRunner
from spiralformer.hf import SpiralCache, SpiralFormerConfig, SpiralFormerForCausalLM
from spiralformer.hf.export import export
from spiralformer.model_folder import load_model, save_model
from tests.hf import (
    GREEDY,
    LAYOUTS,
    PAPER,
    RAGGED,
    SMALL,
    padded,
    prompts,
    tiny_tokenizer,
    wrapped,
)
from tests.strategies import build

# ---------------------------------------------------------------------------- generation


@pytest.mark.parametrize("rows", [RAGGED[2:3], RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("topology", ["anchor", "mesh"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_with_cache_is_greedy_without_cache_is_our_own(layout, topology, rows):
    model = wrapped(SpiralConfig(**LAYOUTS[layout], **SMALL, topology=topology))
    inputs = padded(rows)
    found = model.generate(**inputs, **GREEDY)
    assert torch.equal(found, model.generate(**inputs, **GREEDY, use_cache=False))
    new = found[:, inputs["input_ids"].shape[1] :].tolist()
    assert new == generate(model.model, rows, max_new_tokens=20)
    assert len(set(map(tuple, new))) == len(rows)  # else the test would show little
    assert len(set().union(*new)) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beam_search_with_cache_is_beam_search_without(layout):
    model = wrapped(SpiralConfig(**LAYOUTS[layout], **SMALL))
    inputs = padded(RAGGED)
    options = {**GREEDY, "num_beams": 4, "num_return_sequences": 2, "eos_token_id": 7}
    found = model.generate(**inputs, **options)
    assert torch.equal(found, model.generate(**inputs, **options, use_cache=False))
    assert not torch.equal(found[::2], model.generate(**inputs, **GREEDY, eos_token_id=7))


@pytest.mark.parametrize("beams", [1, 3])
def test_sampled_sequences_with_cache_are_those_without(beams):
    model, inputs = wrapped(), padded(RAGGED)
    options = {**GREEDY, "do_sample": True, "temperature": 2.0, "num_beams": beams}

    def sample(**more):
        torch.manual_seed(3)
        return model.generate(**inputs, **options, num_return_sequences=3, **more)

    found = sample()
    assert torch.equal(found, sample(use_cache=False))
    assert len(set(map(tuple, found.tolist()))) == 12


def test_generation_goes_on_from_a_returned_cache():
    model, inputs = wrapped(), padded(RAGGED, extra=2)
    options = {**GREEDY, "return_dict_in_generate": True}
    whole = model.generate(**inputs, **GREEDY)
    half = model.generate(**inputs, **{**options, "max_new_tokens": 9})
    assert isinstance(half.past_key_values, SpiralCache)
    mask = torch.cat((inputs["attention_mask"], torch.ones(4, 9, dtype=torch.long)), 1)
    passed = count_tokens(model)
    again = model.generate(
        half.sequences,
        attention_mask=mask,
        past_key_values=half.past_key_values,
        **{**GREEDY, "max_new_tokens": 11},
    )
    assert torch.equal(again, whole)
    assert sum(passed) == 4 * 11  # nothing was read twice


@pytest.mark.parametrize("layout", LAYOUTS)
def test_assisted_generation_is_greedy_generation(layout):
    """Guesses of an assistant, or of the text itself, are checked many at once and taken back."""
    model = wrapped(SpiralConfig(**LAYOUTS[layout], **SMALL))
    other = build(SpiralConfig(**LAYOUTS[layout], **SMALL), seed=1, dtype=torch.float64)
    near = wrapped(SpiralConfig(**LAYOUTS[layout], **SMALL))
    for p, q in zip(near.model.parameters(), other.parameters(), strict=True):
        p.data.lerp_(q.data, 0.02)  # right about some tokens, wrong about others
    ids = torch.tensor(prompts(13))
    mask = torch.ones_like(ids)
    whole = model.generate(ids, attention_mask=mask, **{**GREEDY, "max_new_tokens": 60})
    crops = []
    crop = SpiralCache.crop

    def counted(cache, tokens):
        crops.append(tokens)
        return crop(cache, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpiralCache, "crop", counted)
        options = {**GREEDY, "max_new_tokens": 60, "attention_mask": mask}
        assert torch.equal(model.generate(ids, assistant_model=near, **options), whole)
        assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), whole)
    assert min(crops) < 0
    assert len(crops) < 100  # some guesses were right


def test_a_model_folder_of_version_0_1_opens_and_computes_the_same():
    folder = Path(__file__).parent / "fixtures" / "model-0.1"
    expected = json.loads((folder / "expected.json").read_text())
    ids, wanted = torch.tensor(expected["ids"]), torch.tensor(expected["logits"]).double()
    ours = load_model(folder, dtype=torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), wanted, rtol=0, atol=1e-6)
        torch.testing.assert_close(theirs(ids).logits, wanted, rtol=0, atol=1e-6)


def test_a_copied_cache_goes_its_own_way():
    model, (prompt,) = wrapped(), prompts(9)
    cache = model(torch.tensor([prompt])).past_key_values
    go_on = lambda cache, more: model.generate(
        torch.tensor([prompt + more]), past_key_values=cache, **GREEDY
    )
    for more in ([5], [6, 7]):
        whole = model.generate(torch.tensor([prompt + more]), **GREEDY)
        assert torch.equal(go_on(copy.deepcopy(cache), more), whole)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_native_runner_generates_what_the_eager_one_does(layout):
    model = wrapped(SpiralConfig(**LAYOUTS[layout], **SMALL), dtype=torch.float32)
    passes = []
    run = NativeRunner.stack
    for rows in (RAGGED[2:3], RAGGED):
        for options in ({}, {"num_beams": 3}, {"do_sample": True, "temperature": 2.0}):

            def tokens(runner, rows=rows, options=options):
                torch.manual_seed(5)
                return model.generate(**padded(rows), **{**GREEDY, **options}, runner=runner)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(NativeRunner, "stack", lambda *args: passes.append(1) or run(*args))
                native = tokens("native")
            assert torch.equal(native, tokens("eager"))
    assert len(passes) > 6 * 20


def count_tokens(model: SpiralFormerForCausalLM) -> list[int]:
    """A list that gets the number of tokens of each pass through the embedding."""
    passed: list[int] = []
    model.model.embedding.register_forward_pre_hook(lambda _, args: passed.append(args[0].numel()))
    return passed


@pytest.mark.parametrize("size", [1, 4, 7, 50])
def test_prefill_in_chunks_changes_nothing(size):
    model, inputs = wrapped(), padded(RAGGED)
    whole = model.generate(**inputs, **GREEDY)
    passed = count_tokens(model)
    assert torch.equal(whole, model.generate(**inputs, **GREEDY, prefill_chunk_size=size))
    assert passed[0] == 4 * min(size, 21)


def test_a_decoding_loop_by_hand_gives_the_logits_of_one_pass():
    model, inputs = wrapped(), padded(RAGGED)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        full = model(**inputs, use_cache=False).logits
        cache, parts = None, []
        for start, end in ((0, 9), (9, 10), (10, 15), (15, 21)):
            out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            cache = out.past_key_values
            parts.append(out.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], full[real], rtol=0, atol=1e-9)
    assert cache.get_seq_length() == 21
    assert cache.lengths == [13, 1, 8, 21]


def test_cache_rows_can_be_repeated_selected_and_forgotten():
    model, inputs = wrapped(), padded(RAGGED)
    cache = model(**inputs).past_key_values
    cache.batch_repeat_interleave(2)
    assert cache.lengths == [13, 13, 1, 1, 8, 8, 21, 21]
    cache.batch_select_indices(torch.tensor([7, 0, 2]))
    assert cache.lengths == [21, 13, 1]
    cache.reset()
    again = model(**inputs, past_key_values=cache)
    assert again.past_key_values.lengths == [13, 1, 8, 21]


def test_a_model_in_training_generates_the_same_tokens():
    model, inputs = wrapped(), padded(RAGGED)
    wanted = model.generate(**inputs, **GREEDY)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(model.generate(**inputs, **GREEDY), wanted)


def test_generation_length_is_asked_for_not_taken_from_the_models_longest_sequence(tmp_path):
    short = PAPER.replace(max_length=48)
    save_model(build(short, dtype=torch.float32), tmp_path / "m")
    for model in (wrapped(short), AutoModelForCausalLM.from_pretrained(tmp_path / "m")):
        ids = torch.tensor(prompts(5))
        with pytest.warns(UserWarning, match="model-agnostic default"):
            assert model.generate(ids, do_sample=False).shape == (1, 25)
        assert model.generate(ids, **{**GREEDY, "max_new_tokens": 500}).shape == (1, 48)
    model.generation_config.max_length = 40
    model.save_pretrained(tmp_path / "again")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert model.generate(ids, do_sample=False).shape == (1, 40)


# ---------------------------------------------------------------------------- forward and loss


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_computed_as_if_it_were_alone(side):
    model, inputs = wrapped(), padded(RAGGED, side)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    out = model(**inputs, labels=labels)
    masks = inputs["attention_mask"].bool()
    logits = [row[mask] for row, mask in zip(out.logits, masks, strict=True)]
    total, count = 0.0, 0
    for row, found in zip(RAGGED, logits, strict=True):
        ids = torch.tensor([row])
        torch.testing.assert_close(found, model.model(ids)[0], rtol=0, atol=1e-10)
        if len(row) > 1:
            total += model.model(ids[:, :-1], ids[:, 1:]) * (len(row) - 1)
            count += len(row) - 1
    torch.testing.assert_close(out.loss, total / count)


def test_the_loss_of_unshifted_labels_is_our_loss_with_gradients():
    model, ids = wrapped(), torch.tensor(prompts(30, 30))
    labels = ids.clone()
    labels[:, 10:15] = -100
    ours = model.model(ids[:, :-1], labels[:, 1:])
    wanted = torch.autograd.grad(ours, list(model.parameters()))
    for given in ({"labels": labels}, {"shift_labels": torch.nn.functional.pad(
        labels[:, 1:], (0, 1), value=-100)}):  # fmt: skip
        out = model.train()(ids, **given)
        torch.testing.assert_close(out.loss, ours)
        grads = torch.autograd.grad(out.loss, list(model.parameters()))
        for got, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    items = (labels[:, 1:] != -100).sum()
    scaled = model(ids, labels=labels, num_items_in_batch=4 * items).loss
    torch.testing.assert_close(scaled, ours / 4)
    assert torch.equal(model(ids, labels=labels, num_items_in_batch=int(4 * items)).loss, scaled)


def test_logits_come_unless_a_training_loss_makes_them_a_waste():
    model, ids = wrapped(), torch.tensor(prompts(12, 12))
    full = model.model(ids)
    assert torch.equal(model(ids, use_cache=False).logits, full)
    assert torch.equal(model(ids, labels=ids).logits, full)  # the Trainer's evaluation
    model.train()
    assert torch.equal(model(ids).logits, full)
    assert model(ids, labels=ids).logits is None
    assert torch.equal(model(ids, labels=ids, logits_to_keep=0).logits, full)
    last = model(ids, labels=ids, logits_to_keep=3).logits
    torch.testing.assert_close(last, full[:, -3:])
    places = torch.tensor([1, 5])
    torch.testing.assert_close(model(ids, logits_to_keep=places).logits, full[:, places])
    loss, logits = model.eval()(ids, labels=ids, return_dict=False)
    assert loss.dim() == 0
    assert torch.equal(logits, full)


def test_nothing_through_a_cache_pretends_to_have_a_gradient():
    model, ids = wrapped(), torch.tensor(prompts(12))
    assert not model(ids).logits.requires_grad
    assert not model(ids, labels=ids, use_cache=True).loss.requires_grad
    assert model(ids, use_cache=False).logits.requires_grad
    assert model.train()(ids).logits.requires_grad


@pytest.mark.parametrize("scale", [True, False])
def test_embeddings_can_be_given_in_place_of_tokens(scale):
    model, inputs = wrapped(PAPER.replace(scale_embeddings=scale)), padded(RAGGED)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    found = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits
    torch.testing.assert_close(found, model(**inputs, use_cache=False).logits)


def test_position_ids_are_accepted_where_they_say_nothing_new():
    model, inputs = wrapped(), padded(RAGGED)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    out = model(**inputs, position_ids=positions)
    assert torch.equal(out.logits, model(**inputs).logits)
    newest = {"input_ids": inputs["input_ids"][:, :1], "past_key_values": out.past_key_values}
    model(**newest, position_ids=torch.tensor(out.past_key_values.lengths)[:, None])
    with pytest.raises(ValueError, match="cannot be packed"):
        model(**inputs, position_ids=positions % 4)
    with pytest.raises(ValueError, match="cannot be packed"):
        model(**newest, position_ids=torch.zeros(4, 1, dtype=torch.long))


# ---------------------------------------------------------------------------- folders


@pytest.mark.parametrize("tied", [False, True])
def test_folders_of_either_side_open_on_the_other(tmp_path, tied):
    model = build(PAPER.replace(tie_embeddings=tied, offset=(3, 1, 0, 0)), dtype=torch.float32)
    ids = torch.tensor(prompts(20))
    save_model(model, tmp_path / "ours", eos_token_id=5)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(theirs) is SpiralFormerForCausalLM
    assert (theirs.config.eos_token_id, theirs.generation_config.eos_token_id) == (5, 5)
    assert (theirs.model.head.weight is theirs.model.embedding.weight) == tied
    assert torch.equal(theirs(ids, use_cache=False).logits, model(ids))

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    again = load_model(tmp_path / "theirs")
    assert again.config == model.config
    assert torch.equal(again(ids), model(ids))
    assert AutoConfig.from_pretrained(tmp_path / "theirs").spiral == model.config


def test_a_folder_opens_in_another_dtype_and_on_a_device_map(tmp_path):
    save_model(build(PAPER, dtype=torch.float32), tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.bfloat16, device_map="auto"
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model._no_split_modules == {"Block"}
    ids = torch.tensor(prompts(20))
    exact = load_model(tmp_path / "m")(ids)
    assert (model(ids).logits.float() - exact).abs().max() < 0.05 * exact.abs().max()
    assert model.generate(ids, **GREEDY).shape == (1, 40)


def test_the_config_mirrors_ours_and_is_validated_again_when_it_changes():
    config = SpiralFormerConfig.from_spiral(PAPER, eos_token_id=5)
    assert config.spiral == PAPER
    assert SpiralFormerConfig.from_dict(json.loads(config.to_json_string())).spiral == PAPER
    assert (config.num_attention_heads, config.max_position_embeddings) == (2, 128)
    assert (config.num_hidden_layers, config.tie_word_embeddings) == (3, False)
    assert SpiralFormerConfig(layout="2", hidden_size=16, num_attention_heads=2, vocab_size=5)
    config.tie_word_embeddings = True
    assert config.spiral.tie_embeddings
    config.num_heads = 3
    with pytest.raises(ConfigError, match="num_heads 3 does not divide"):
        _ = config.spiral
    with pytest.raises(ConfigError, match="leak the future"):
        SpiralFormerConfig(**{**PAPER.to_dict(), "shift": [6, 3, 1, 0]})


def test_a_new_model_starts_from_our_initialisation():
    torch.manual_seed(0)
    ours = SpiralFormer(PAPER).state_dict()
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(SpiralFormerConfig.from_spiral(PAPER))
    assert all(torch.equal(ours[k], v) for k, v in theirs.model.state_dict().items())


# ---------------------------------------------------------------------------- training


def examples(*lengths: int) -> list[dict[str, torch.Tensor]]:
    """Rows of one length, of which only the last `n` tokens count."""
    rows = []
    for ids, n in zip(torch.tensor(prompts(*[24] * len(lengths))), lengths, strict=True):
        labels = ids.clone()
        labels[:-n] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def trainer(model, data, folder, **options) -> Trainer:
    options = {"per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, **options}
    options.setdefault("save_strategy", "no")
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        **{"optim": "sgd", **options},
    )
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)


def losses(run: Trainer) -> list[float]:
    run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_trainer_gets_the_same_loss_and_weights_however_the_batch_is_accumulated(tmp_path):
    data = examples(1, 23, 2, 9)  # a mean of the four means would be another number
    whole, parts = wrapped(dtype=torch.float32), wrapped(dtype=torch.float32)
    ids, labels = (torch.stack([row[k] for row in data]) for k in ("input_ids", "labels"))
    first = whole.model(ids[:, :-1], labels[:, 1:]).item()
    together = losses(trainer(whole, data, tmp_path))
    accumulated = losses(
        trainer(
            parts,
            data,
            tmp_path,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            gradient_checkpointing=True,
        )
    )
    assert together[0] == pytest.approx(first, abs=1e-4)
    assert together[2] < together[0] - 0.1
    assert accumulated == pytest.approx(together, abs=1e-4)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_trainer_evaluates_predicts_and_smooths_labels(tmp_path):
    data, model = examples(5, 23, 2, 9), wrapped(dtype=torch.float32)
    ids, labels = (torch.stack([row[k] for row in data]) for k in ("input_ids", "labels"))
    run = trainer(model, data, tmp_path, per_device_eval_batch_size=4, label_smoothing_factor=0.2)
    logits = model(ids).logits.detach()
    smooth = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2
    )
    found = run.compute_loss(model, {"input_ids": ids, "labels": labels})
    torch.testing.assert_close(found.detach(), smooth, rtol=1e-4, atol=1e-4)
    run.label_smoother = None
    predicted = run.predict(data)
    torch.testing.assert_close(torch.tensor(predicted.predictions), logits, rtol=0, atol=1e-5)
    exact = model.model(ids[:, :-1], labels[:, 1:]).item()
    assert predicted.metrics["test_loss"] == pytest.approx(exact, abs=1e-4)


@pytest.mark.slow
def test_a_trainer_that_was_stopped_goes_on_as_if_it_never_had_been(tmp_path):
    data = examples(*range(1, 24))
    whole, stopped, fresh = (wrapped(dtype=torch.float32) for _ in range(3))
    save = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    wanted = losses(trainer(whole, data, tmp_path / "whole", **save))
    losses(trainer(stopped, data, tmp_path / "stopped", **{**save, "max_steps": 2}))
    run = trainer(fresh, data, tmp_path / "stopped", **save)
    run.train(resume_from_checkpoint=True)
    found = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert run.state.global_step == 4
    assert found == wanted
    for a, b in zip(whole.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)


def test_lora_trains_its_adapters_alone_and_decodes_with_them(tmp_path):
    base = wrapped(dtype=torch.float32)
    before = {k: v.clone() for k, v in base.state_dict().items()}
    # "up" and "down" alone would also name the scaling operators
    targets = ["qkv", "out", "mlp.up", "mlp.down", "head"]
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets))
    adapted = {n.split(".lora_A")[0].rsplit(".", 1)[1] for n in model.state_dict() if "lora_A" in n}
    assert adapted == {"qkv", "out", "up", "down", "head"}
    data = examples(23, 23, 23, 23)
    found = losses(trainer(model, data, tmp_path, max_steps=8))
    assert found[-1] < found[0] - 0.2
    after = {
        name.replace("base_model.model.", "").replace("base_layer.", ""): value
        for name, value in model.state_dict().items()
        if "lora_" not in name
    }
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    model.eval()
    inputs = padded(RAGGED)
    tokens = model.generate(**inputs, **GREEDY)
    assert torch.equal(tokens, model.generate(**inputs, **GREEDY, use_cache=False))
    with model.disable_adapter():
        assert not torch.equal(tokens, model.generate(**inputs, **GREEDY))
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    ids = torch.tensor(prompts(20))
    torch.testing.assert_close(load_model(tmp_path / "merged")(ids), merged(ids).logits)


# ---------------------------------------------------------------------------- tools


@pytest.fixture
def spoken(tmp_path):
    """A model folder with a tokenizer."""
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer.json")
    model = build(PAPER.replace(vocab_size=tokenizer.get_vocab_size()), dtype=torch.float32)
    return save_model(
        model, tmp_path / "spoken", tokenizer=tmp_path / "tokenizer.json", eos_token_id=0
    )


def test_the_pipeline_writes_what_our_generate_writes(spoken, caplog):
    speak = pipeline("text-generation", model=str(spoken))
    assert "is not supported" not in caplog.text
    text = "a loop runs"
    found = speak(text, max_new_tokens=12, do_sample=False)[0]["generated_text"]
    tokenizer = Tokenizer.from_file(str(spoken / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    new = generate(load_model(spoken), [ids], max_new_tokens=12, stop_ids=[0])[0]
    assert found == tokenizer.decode(ids + new)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_trl_tunes_on_the_loss_of_our_model(spoken, tmp_path, adapters):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(spoken, eos_token="<eos>", pad_token="<eos>")
    texts = ["a loop runs coarse to fine", "each chunk is one latent of the loop"]
    model = AutoModelForCausalLM.from_pretrained(spoken)
    inputs = tokenizer([text + "<eos>" for text in texts], return_tensors="pt", padding=True)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    first = model(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels
    ).loss.item()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": texts}),
        peft_config=LoraConfig(r=4, target_modules=["qkv", "mlp.up"]) if adapters else None,
        args=SFTConfig(
            output_dir=str(tmp_path / "tuned"),
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=0.05,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        ),
    )
    found = losses(run)
    assert len(found) == 2
    assert found[0] == pytest.approx(first, rel=1e-4)
    assert found[1] < found[0]
    kept = [
        torch.equal(before[name.replace("base_layer.", "")], value)
        for name, value in model.state_dict().items()
        if "lora_" not in name
    ]
    assert all(kept) if adapters else not all(kept)


WITHOUT_PACKAGE = """
import json, sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "spiralformer":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NotInstalled())
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer([text], return_tensors="pt")
found = model.generate(**inputs, max_new_tokens=20, do_sample=False, num_beams=2)
assert not any(name.split(".")[0] == "spiralformer" for name in sys.modules)
print(json.dumps(found.tolist()))
"""


def test_an_exported_folder_generates_the_same_where_the_package_is_not_installed(spoken, tmp_path):
    export(spoken, tmp_path / "exported-1.0")
    text = "each chunk is one latent"
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE, str(tmp_path / "exported-1.0"), text],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    model = AutoModelForCausalLM.from_pretrained(spoken)
    inputs = AutoTokenizer.from_pretrained(spoken)([text], return_tensors="pt")
    here = model.generate(**inputs, max_new_tokens=20, do_sample=False, num_beams=2)
    assert json.loads(run.stdout.splitlines()[-1]) == here.tolist()
    assert load_model(tmp_path / "exported-1.0").config == load_model(spoken).config


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_implementation": "static"}, "cache_implementation 'static' is not supported"),
        ({"cache_implementation": "offloaded"}, "cache_implementation 'offloaded'"),
        ({"cache_implementation": "paged"}, "cache_implementation 'paged'"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "mode 'contrastive_search' is not supported"),
        ({"num_beams": 4, "num_beam_groups": 2}, "mode 'group_beam_search' is not supported"),
        ({"dola_layers": "low"}, "mode 'dola_generation' is not supported"),
        ({"past_key_values": DynamicCache()}, "past_key_values is a DynamicCache"),
    ],
)
def test_generation_that_cannot_work_is_refused(options, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        wrapped().generate(torch.tensor(prompts(9)), **{**GREEDY, **options})


def test_continuous_batching_is_refused():
    with pytest.raises(NotImplementedError, match="continuous batching"):
        wrapped().generate_batch(prompts(9))


def test_prompts_that_cannot_be_continued_are_refused():
    model = wrapped()
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), **GREEDY)
    with pytest.raises(ValueError, match="row 1 of the batch is empty"):
        model.generate(**padded([[1, 2, 3], []]), **GREEDY)
    with pytest.raises(ValueError, match="longest sequence is 128"):
        model.generate(torch.tensor(prompts(128)), **GREEDY)
    with pytest.raises(ValueError, match="padding_side to 'left'"):
        model.generate(**padded(RAGGED, "right"), **GREEDY)


def test_masks_and_caches_that_contradict_are_refused():
    model, inputs = wrapped(), padded(RAGGED)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    holed = mask.clone()
    holed[3, 5] = 0
    with pytest.raises(ValueError, match="hole in row 3"):
        model(ids, attention_mask=holed)
    with pytest.raises(ValueError, match=r"must be \(batch, length\)"):
        model(ids, attention_mask=torch.ones(4, 1, 21, 21))
    cache = model(**inputs).past_key_values
    new = ids[:, :1]
    with pytest.raises(ValueError, match="covers 21 columns; 21 are in the cache and 1 are new"):
        model(new, attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match=r"says that \[21, 21, 21, 21\] tokens came before"):
        model(new, attention_mask=torch.ones(4, 22), past_key_values=cache)
    with pytest.raises(decode.StateError, match="2 rows of tokens for a state of 4"):
        model(new[:2], past_key_values=cache)
    with pytest.raises(decode.StateError, match="another model"):
        wrapped(PAPER.replace(layout="2+1x{1/2,1}+1"))(new, past_key_values=cache)
    with pytest.raises(ValueError, match=r"cannot be cropped.*activate_past_recording\(\)"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="minus the number of tokens"):
        cache.crop(5)
    with pytest.raises(NotImplementedError, match="filled by SpiralFormerForCausalLM"):
        cache.update(None, None, 0)


def test_forward_refuses_what_it_would_have_to_ignore():
    model, ids = wrapped(), torch.tensor(prompts(9))
    with pytest.raises(ValueError, match="does not support token_type_ids"):
        model(ids, token_type_ids=torch.zeros_like(ids))
    model(ids, token_type_ids=None)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(1, 9, 16, dtype=torch.float64))
