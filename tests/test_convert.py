"""GPT-NeoX ⇄ our baseline: the same logits, the same bits back, and clear refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from spiralformer import SpiralConfig, SpiralFormer, cli
from spiralformer.errors import UserError
from spiralformer.hf.neox import from_gpt_neox, to_gpt_neox
from spiralformer.model_folder import CheckpointError, load_model, save_model

SIZES = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "wide": {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6},
    "deep": {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4},
}


def gpt_neox(folder, size="tiny", dtype=torch.float32, **changes):
    """A GPT-NeoX model with weights far from their initial values, saved in a folder."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": 131,
        "max_position_embeddings": 64,
        "intermediate_size": 3 * SIZES[size]["hidden_size"],
        "layer_norm_eps": 1e-4,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **SIZES[size],
        **changes,
    }
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**fields)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            p.copy_(around + 0.1 * torch.randn_like(p))
    model.to(dtype).save_pretrained(folder)
    return model


def edit_config(folder, drop=(), **changes) -> None:
    path = folder / "config.json"
    fields = {k: v for k, v in json.loads(path.read_text()).items() if k not in drop}
    path.write_text(json.dumps({**fields, **changes}))


def largest_difference(model: SpiralFormer, theirs: GPTNeoXForCausalLM, length=64) -> float:
    ids = torch.randint(0, 131, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return (model(ids) - theirs(ids).logits).abs().max().item()


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_logits_equal_those_of_gpt_neox(tmp_path, size, parallel):
    theirs = gpt_neox(tmp_path / "neox", size, use_parallel_residual=parallel)
    ours = from_gpt_neox(tmp_path / "neox")
    assert ours.config.parallel_residual == parallel
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    "rope",
    [
        {"rotary_pct": 0.5, "rotary_emb_base": 500},
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ],
    ids=["old names", "new names"],
)
def test_rotary_fields_are_read_by_their_old_and_new_names(tmp_path, rope):
    theirs = gpt_neox(tmp_path, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5})
    edit_config(tmp_path, drop=["rope_parameters"], **rope)
    ours = from_gpt_neox(tmp_path)
    assert (ours.config.rotary_base, ours.config.rotary_fraction) == (500.0, 0.5)
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_there_and_back_changes_no_bit(tmp_path, dtype, tied):
    theirs = gpt_neox(tmp_path / "a", dtype=dtype, tie_word_embeddings=tied)
    ours = from_gpt_neox(tmp_path / "a")
    assert ours.embedding.weight.dtype == dtype
    assert (ours.head.weight is ours.embedding.weight) == tied
    to_gpt_neox(ours, tmp_path / "b", eos_token_id=1, bos_token_id=0)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = GPTNeoXForCausalLM.from_pretrained(tmp_path / "b")
    theirs.config.dtype = again.config.dtype = None
    skipped = {"_name_or_path", "transformers_version"}
    fields, fields_again = (
        {k: v for k, v in m.config.to_dict().items() if k not in skipped} for m in (theirs, again)
    )
    assert fields == fields_again
    state, state_again = theirs.state_dict(), again.state_dict()
    assert all(torch.equal(state[name], state_again[name]) for name in state)


@pytest.mark.parametrize("shards", [1, 2])
def test_pytorch_files_and_the_buffers_of_old_checkpoints_are_read(tmp_path, shards):
    theirs = gpt_neox(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    weights["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(1)
    if shards == 1:
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        where = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(weights)}
        for file in set(where.values()):
            torch.save({k: v for k, v in weights.items() if where[k] == file}, tmp_path / file)
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": where}))
    assert largest_difference(from_gpt_neox(tmp_path), theirs) < 1e-5


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; only 'gpt_neox'"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'; only 'gelu'"),
        ({"attention_bias": False}, "attention_bias is False; only True"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is .*linear.*scaled"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_parameters is .*dynamic.*scaled",
        ),
        ({"hidden_size": None}, "hidden_size is None; a whole number"),
        ({"num_attention_heads": 5}, "num_heads 5 does not divide"),
        ({"intermediate_size": 64}, "'gpt_neox.layers.0.mlp.dense_h_to_4h.weight' has the shape"),
        ({"num_hidden_layers": 3}, "the weights lack 'gpt_neox.layers.2"),
        ({"num_hidden_layers": 1}, "the weights have an unknown 'gpt_neox.layers.1"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, changes, message):
    gpt_neox(tmp_path)
    edit_config(tmp_path, drop=["rope_parameters"], **changes)
    with pytest.raises(CheckpointError, match=message) as refusal:
        from_gpt_neox(tmp_path)
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_damaged_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        from_gpt_neox(tmp_path / "nowhere")
    gpt_neox(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        from_gpt_neox(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: damaged"):
        from_gpt_neox(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        from_gpt_neox(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "1+1x{1/2,1}+1"}, "has a loop"),
        ({"norm": "rmsnorm"}, "norm is 'rmsnorm'"),
        ({"scale_embeddings": True}, "scale_embeddings is True"),
    ],
)
def test_models_that_are_not_gpt_neox_are_not_written_as_one(tmp_path, changes, message):
    fields = {"layout": "2", "norm": "layernorm", "scale_embeddings": False, **changes}
    config = SpiralConfig(hidden_size=16, num_heads=2, vocab_size=11, **fields)
    with pytest.raises(CheckpointError, match=message):
        to_gpt_neox(SpiralFormer(config), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------- commands


def test_import_and_export_commands_go_there_and_back(tmp_path, capsys):
    theirs = gpt_neox(tmp_path / "neox", dtype=torch.float16)
    (tmp_path / "neox" / "tokenizer.json").write_text("{}")
    paths = {name: str(tmp_path / name) for name in ("neox", "ours", "back")}
    assert cli.main(["import", paths["neox"], paths["ours"]]) == 0
    assert "2 layers of width 32" in capsys.readouterr().out
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["eos_token_id"] == 1
    assert largest_difference(load_model(paths["ours"], dtype=torch.float32), theirs.float()) < 1e-5

    assert cli.main(["export", paths["ours"], paths["back"], "--format", "gpt-neox"]) == 0
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("neox", "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "back" / "tokenizer.json").exists()
    assert GPTNeoXConfig.from_pretrained(paths["back"]).eos_token_id == 1


def test_commands_refuse_bad_input_and_overwrite_nothing(tmp_path, capsys):
    gpt_neox(tmp_path / "neox")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "work.txt").write_text("dear")
    neox, taken, out = (str(tmp_path / name) for name in ("neox", "taken", "out"))
    looped = SpiralConfig(layout="1+1x{1/2,1}+1", hidden_size=16, num_heads=2, vocab_size=11)
    save_model(SpiralFormer(looped), tmp_path / "looped")
    capsys.readouterr()
    for argv, message in (
        (["import", neox, taken], "exists already"),
        (["import", str(tmp_path / "looped"), out], "model_type is 'spiralformer'"),
        (["export", neox, out], "`spiralformer import` converts it"),
        (["export", str(tmp_path / "looped"), taken], "exists already"),
        (["export", str(tmp_path / "looped"), out, "--format", "gpt-neox"], "has a loop"),
    ):
        assert cli.main(argv) == 2, argv
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(UserError, match="exists already"):
        to_gpt_neox(from_gpt_neox(neox), taken)
    assert [p.name for p in (tmp_path / "taken").iterdir()] == ["work.txt"]
    assert not (tmp_path / "out").exists()
