"""GPT-NeoX ⇄ our baseline: the same logits, the same bits back, and clear refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from spiralformer import ConfigError, SpiralConfig, SpiralFormer
from spiralformer.convert import MAPPINGS, convert
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
        (
            {"intermediate_size": 64},
            "of another shape are 'gpt_neox.layers.0.mlp.dense_4h_to_h.weight' and 5 more",
        ),
        ({"num_hidden_layers": 3}, "they lack 'gpt_neox.layers.2"),
        ({"num_hidden_layers": 1}, "unknown are 'gpt_neox.layers.1"),
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


def test_import_and_export_commands_go_there_and_back(run_command, tmp_path):
    theirs = gpt_neox(tmp_path / "neox", dtype=torch.float16)
    (tmp_path / "neox" / "tokenizer.json").write_text("{}")
    neox, ours, back = (tmp_path / name for name in ("neox", "ours", "back"))
    status, out, _ = run_command("import", neox, ours)
    assert status == 0
    assert "2 layers of width 32" in out
    assert json.loads((ours / "config.json").read_text())["eos_token_id"] == 1
    assert largest_difference(load_model(ours, dtype=torch.float32), theirs.float()) < 1e-5

    assert run_command("export", ours, back, "--format", "gpt-neox")[0] == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (neox, back))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (back / "tokenizer.json").exists()
    assert GPTNeoXConfig.from_pretrained(back).eos_token_id == 1


def test_commands_refuse_bad_input_and_overwrite_nothing(run_command, tmp_path):
    gpt_neox(tmp_path / "neox")
    neox, looped, taken, out = (tmp_path / name for name in ("neox", "looped", "taken", "out"))
    taken.mkdir()
    (taken / "work.txt").write_text("dear")
    config = SpiralConfig(layout="1+1x{1/2,1}+1", hidden_size=16, num_heads=2, vocab_size=11)
    save_model(SpiralFormer(config), looped)
    for arguments, message in (
        (("import", neox, taken), "exists already"),
        (("import", tmp_path / "none", out), "none: no such folder; fetch a model"),
        (("import", looped, out), "model_type is 'spiralformer'"),
        (("export", neox, out), "`spiralformer import` converts it"),
        (("export", looped, taken), "exists already"),
        (("export", looped, out, "--format", "gpt-neox"), "has a loop"),
    ):
        status, _, error = run_command(*arguments)
        assert status == 2, arguments
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(UserError, match="exists already"):
        to_gpt_neox(from_gpt_neox(neox), taken)
    assert [path.name for path in taken.iterdir()] == ["work.txt"]
    assert not out.exists()


# ---------------------------------------------------------------------------- dense → looped


def dense_model(layers: int = 8, **changes) -> SpiralFormer:
    torch.manual_seed(0)
    model = SpiralFormer(
        SpiralConfig(layout=str(layers), hidden_size=32, num_heads=4, vocab_size=131, **changes)
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            p.copy_(around + 0.1 * torch.randn_like(p))
    return model.eval()


IDS = torch.randint(0, 131, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layers", MAPPINGS)
@pytest.mark.parametrize("layout", ["2+4x{1}+2", "0+8x{1}+0", "1+6x{1/4,1}+1", "2+3+1+2"])
@pytest.mark.parametrize("topology", ["mesh", "none"])
def test_a_loop_that_leaves_out_nothing_begins_as_the_dense_model(layers, layout, topology):
    """With coarse iterations before it too, where they are written to the memory of MeSH."""
    if topology == "none" and "/" in layout:
        layout = "2+4x{1}+2"
    dense = dense_model()
    looped = convert(dense, layout, layers=layers, topology=topology)
    with torch.no_grad():
        torch.testing.assert_close(looped(IDS), dense(IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("step", [[2], [4], [7]]),
        ("average", [[2, 3], [4, 5], [6, 7]]),
    ],
)
def test_the_core_is_made_of_the_layers_that_the_mapping_says(layers, expected):
    dense = dense_model(10)
    looped = convert(dense, "2+3x{1/2,1}+2", layers=layers)
    for stack, numbers in (
        (looped.pre, [[0], [1]]),
        (looped.cores[0], expected),
        (looped.post, [[8], [9]]),
    ):
        for block, sources in zip(stack.blocks, numbers, strict=True):
            mean = sum(dense.pre.blocks[k].mlp.up.weight for k in sources) / len(sources)
            torch.testing.assert_close(block.mlp.up.weight, mean)


def test_a_converted_model_learns_and_its_coarse_iterations_too():
    looped = convert(dense_model(), "2+3x{1/4,1/2,1}+2").train()
    looped(IDS[:, :-1], IDS[:, 1:]).backward()
    for name, p in looped.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("2+6x{1/2,1}+2", {}, "10 layers around and in a loop, and the dense model has 8"),
        ("2+4x{1/2,1}+2", {"layers": "all"}, "layers 'all' is unknown; choose one of step"),
        ("2+4x{1/2,1}+2", {"mesh_slots": 3}, "mesh_slots 3: .* 4 in all"),
        ("8", {}, "asks for 8 layers around and in a loop"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, changes, message):
    with pytest.raises(ConfigError, match=message):
        convert(dense_model(), layout, **changes)
