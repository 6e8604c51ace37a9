"""`spiralformer count`: what it prints, and how it refuses."""

from __future__ import annotations

import json
from functools import partial

import pytest

from spiralformer import ConfigError, SpiralConfig, presets
from spiralformer.accounting import PAPER, forward_flops, parameters

SPIRAL = "4+8x{1/8,1/4,1/2,1}+4"
SIZES = ["--hidden-size", "64", "--num-heads", "4", "--vocab-size", "100"]


@pytest.fixture
def count(run_command):
    return partial(run_command, "count")


# ---------------------------------------------------------------------------- what it prints


@pytest.mark.parametrize(
    "arguments",
    [
        *([name] for name in presets.names()),
        [SPIRAL, *SIZES],
        ["3 + 2 × {1/7, 1/3, 1} + 0", *SIZES, "--set", "topology=anchor"],
        ["0+1x{1/101,1/103}+0", *SIZES],
        ["1", *SIZES, "--length", "1", "--dtype", "fp64"],
        ["--table1"],
        ["--list"],
    ],
    ids=" ".join,
)
def test_the_output_fits_80_columns(count, arguments):
    status, out, err = count(*arguments)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_a_preset_shows_parameters_flops_decoding_and_cache(count):
    _, out, _ = count("spiral-b-410m-mesh", "--length", "4096")
    lines = [line.split() for line in out.splitlines()]
    assert ["total", "304,619,604", "306,752,601"] in lines
    assert "Table 1 prints 306.8 M and 201.6 M" in out
    assert "Table 1 prints 4.11 TFLOPs" in out
    assert "1.875 core passes per token on average: 1 pass at 1 of 8, 2 passes at 7 of 8." in out
    assert ["iteration", "0", "8", "4", "7", "i", "≡", "3", "(mod", "8)", "···●····"] in lines
    assert ["passes", "22222221"] in lines
    assert ["iteration", "0", "8", "512", "16,777,216", "4,096.0"] in lines


def test_printed_digits_stand_beside_the_unchanged_preset_only(count):
    _, out, _ = count("spiral-b-410m-mesh", "--set", "norm=layernorm", "--length", "4096")
    assert "Table 1" not in out
    _, out, _ = count("spiral-b-410m-mesh", "--length", "128")
    assert "TFLOPs" not in out


def test_table1_says_that_66_of_66_cells_agree(count):
    status, out, _ = count("--table1")
    assert status == 0
    assert "22/22 rows, 66/66 cells equal" in out
    for name in ("spiral-b-410m-anchor", "pythia-1.4b-mesh"):
        assert sum(name in line.split() for line in out.splitlines()) == 1


def test_table1_marks_the_cells_that_differ(count, monkeypatch):
    from spiralformer import accounting

    true = accounting._layer_biases
    monkeypatch.setattr(accounting, "_layer_biases", lambda config: 200 * true(config))
    _, out, _ = count("--table1")
    assert "66/66" not in out
    assert "≠≠" in out


def test_list_names_every_preset(count):
    _, out, _ = count("--list")
    assert [line.split()[0] for line in out.splitlines()] == presets.names()
    _, out, _ = count("--list", "--json")
    assert json.loads(out) == presets.names()


# ---------------------------------------------------------------------------- JSON


def test_json_holds_the_same_numbers(count):
    status, out, _ = count("spiral-l-160m-mesh", "--length", "1000", "--dtype", "fp32", "--json")
    assert status == 0
    report = json.loads(out)
    config = presets.preset("spiral-l-160m-mesh")
    assert SpiralConfig.from_dict(report["config"]) == config
    assert report["length"] == 1000
    assert report["parameters"]["ours"]["total"] == parameters(config).total
    assert report["parameters"]["paper"]["non_embedding"] == parameters(config, PAPER).non_embedding
    for convention in ("ours", "paper"):
        flops = report["prefill_flops"][convention]
        assert flops["total"] == flops["matmul"] + flops["attention"] + flops["elementwise"]
        assert flops["total"] == sum(part["total"] for part in flops["parts"])
    assert report["prefill_flops"]["ours"]["total"] == forward_flops(config, 1000).total
    assert report["decode"]["mean_passes"] == 0.9375
    assert report["decode"]["histogram"] == {"0": 1, "1": 15}
    assert [t["first"] for t in report["decode"]["triggers"]] == [7, 3, 1, 0]
    kv = report["kv_bytes"]
    assert kv["total"] == kv["pre"] + sum(kv["iterations"]) + kv["post"]
    assert kv["iterations"][0] == 4 * ((1000 + 8) // 16) * 2 * 768 * 4
    assert report["printed"]["flops"] == 1.49


def test_json_of_table1_says_which_cells_agree(count):
    _, out, _ = count("--table1", "--json")
    table = json.loads(out)
    assert table["cells_agreeing_paper"] == table["cells"] == 66
    row = next(r for r in table["rows"] if r["preset"] == "spiral-b-410m-anchor")
    assert row["printed"] == {"total": "306.7", "non_embedding": "201.6", "flops": "4.10"}
    assert row["paper_agrees"] == {"total": True, "non_embedding": True, "flops": True}
    assert row["ours_agrees"]["total"] is False


# ---------------------------------------------------------------------------- what it accepts


def test_a_preset_a_layout_and_a_file_of_the_same_model_count_the_same(count, tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(presets.preset("spiral-b-nano-mesh").to_dict()))
    layout = ["2+4 × {1/8, 1/4, 1/2, 1}+2", "--hidden-size", "128", "--num-heads", "4"]
    layout += ["--vocab-size", "4096", "--set", "max_length=1024"]
    reports = []
    for arguments in (["spiral-b-nano-mesh"], [str(path)], layout):
        status, out, _ = count(*arguments, "--json")
        assert status == 0
        report = json.loads(out)
        del report["name"]
        reports.append(report)
    assert reports[0] == reports[1] == reports[2]


def test_settings_change_fields(count):
    _, out, _ = count(
        *("spiral-b-nano-mesh", "--json", "--set", "layout=24", "--set", "hidden_size=64"),
        *("--set", "tie_embeddings=true", "--set", "norm_eps=1e-6", "--num-heads", "2"),
    )
    config = json.loads(out)["config"]
    assert (config["layout"], config["topology"], config["hidden_size"]) == ("24", "none", 64)
    assert (config["tie_embeddings"], config["norm_eps"], config["num_heads"]) == (True, 1e-6, 2)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (["offset=4,2,1,0"], {"offset": [4, 2, 1, 0]}),
        (["offset=[4, 2, 1, 0]"], {"offset": [4, 2, 1, 0]}),
        (["offset=zero", "shift = parallel"], {"offset": "zero", "shift": "parallel"}),
        (["layout=24"], {"layout": "24"}),
        (["topology=none"], {"topology": "none"}),
        (["init_std=0.1", "vocab_size=7"], {"init_std": 0.1, "vocab_size": 7}),
        ([], {}),
    ],
)
def test_settings_are_read_as_the_field_wants_them(settings, fields):
    assert presets.parse_settings(settings) == fields


def test_the_default_length_is_the_longest_sequence(count):
    assert json.loads(count("spiral-b-nano-mesh", "--json")[1])["length"] == 1024
    assert json.loads(count("spiral-b-160m-mesh", "--json")[1])["length"] == 4096


# ---------------------------------------------------------------------------- how it refuses


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["spiral-410m"], ["preset 'spiral-410m'", "spiral-b-410m-mesh", "--list"]),
        (["zzz"], ["preset 'zzz'", "nearest"]),
        (["4+8x{2}+4"], ["'4+8x{2}+4'", "resolution 2", "(0, 1]"]),
        (["4+8"], ["layout '4+8'", "write"]),
        ([SPIRAL], ["says nothing of the sizes", "hidden_size, num_heads, vocab_size"]),
        ([SPIRAL, "--hidden-size", "64"], ["give num_heads, vocab_size"]),
        ([SPIRAL, *SIZES, "--num-heads", "7"], ["num_heads 7", "hidden_size 64"]),
        (["missing.json"], ["missing.json", "no such file"]),
        (["pythia-nano", "--set", "shift"], ["'shift'", "field=value"]),
        (["pythia-nano", "--set", "topolgy=none"], ["'topolgy'", "did you mean 'topology'"]),
        (["pythia-nano", "--set", "self=1"], ["unknown field 'self'"]),
        (["pythia-nano", "--length", "0"], ["--length 0", "at least 1"]),
        (["pythia-nano", "--length", "many"], ["--length", "'many'"]),
        (["pythia-nano", "--dtype", "int3"], ["--dtype", "'int3'", "bf16"]),
        ([], ["a preset, a layout, a JSON file or a folder", "--table1", "--list"]),
        (["pythia-nano", "--table1"], ["one thing"]),
        (["--table1", "--list"], ["one thing"]),
        (["--table1", "--length", "7"], ["--table1", "leave them out"]),
        (["--bogus"], ["--bogus"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_named_with_status_2_and_nothing_printed(count, arguments, parts):
    status, out, err = count(*arguments)
    assert (status, out) == (2, "")
    for part in parts:
        assert part in err
    assert "Traceback" not in err


def test_a_damaged_file_is_named(count, tmp_path):
    path = tmp_path / "model.json"
    path.write_text('{"layout": "4", "hidden_size": 64')
    status, out, err = count(str(path))
    assert (status, out) == (2, "")
    assert f"{path}: not JSON" in err


def test_in_python_the_same_mistakes_are_value_errors():
    with pytest.raises(
        ValueError, match="unknown preset 'pythia-410'; the nearest are pythia-410m"
    ):
        presets.preset("pythia-410")
    with pytest.raises(ConfigError, match="says nothing of the sizes"):
        presets.resolve(SPIRAL)
    with pytest.raises(ConfigError, match="unknown field 'text'"):
        presets.resolve("pythia-nano", text=3)
