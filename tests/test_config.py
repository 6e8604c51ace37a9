"""The configuration: what is written is what is meant, and what is wrong is said at once."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiralformer import ConfigError, SpiralConfig
from spiralformer.config import Layout, allow_shifts_that_leak_the_future
from spiralformer.errors import UserError

SIZES = {"hidden_size": 32, "num_heads": 4, "vocab_size": 64}
SPIRAL = "1+2x{1/8,1/4,1/2,1}+1"


def make(layout: str = SPIRAL, **fields) -> SpiralConfig:
    return SpiralConfig(**{"layout": layout, **SIZES, **fields})


resolutions = st.integers(1, 12).flatmap(
    lambda den: st.integers(1, den).map(lambda num: Fraction(num, den))
)
depths = st.integers(0, 30)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    kind = draw(st.sampled_from(["plain", "tied", "untied"]))
    if kind == "plain":
        return Layout(draw(st.integers(1, 99)), (), (), 0, tied=True)
    pre, post = draw(depths), draw(depths)
    if kind == "untied":
        cores = tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=5)))
        return Layout(pre, cores, (Fraction(1),) * len(cores), post, tied=False)
    schedule = tuple(draw(st.lists(resolutions, min_size=1, max_size=6)))
    core = draw(st.integers(1, 30))
    return Layout(pre, (core,) * len(schedule), schedule, post, tied=True)


@st.composite
def configs(draw: st.DrawFn) -> SpiralConfig:
    layout = draw(layouts())
    loops = len(layout.cores)
    chunks = [int(1 / r) for r in layout.resolutions]
    offsets = st.tuples(*(st.integers(0, g - 1) for g in chunks))
    shifts = st.tuples(*(st.integers(g - 1, 2 * g + 2) for g in chunks))
    topology = draw(st.sampled_from(["none", "anchor", "mesh"])) if loops else "none"
    return make(
        str(layout),
        topology=topology,
        mesh_slots=draw(st.integers(1, 9)) if topology == "mesh" else 0,
        downscale=draw(st.sampled_from(["self_aggregation", "mean"])),
        upscale=draw(st.sampled_from(["output_dependent", "uniform"])),
        offset=draw(st.one_of(st.sampled_from(["half", "zero"]), offsets)),
        shift=draw(st.one_of(st.sampled_from(["overlap", "parallel"]), shifts)),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        rotary_fraction=draw(st.sampled_from([0, 0.25, 0.5, 1])),
        intermediate_size=draw(st.sampled_from([0, 40, 128])),
        tie_embeddings=draw(st.booleans()),
        scale_embeddings=draw(st.booleans()),
        norm_eps=draw(st.floats(1e-8, 1e-3)),
    )


# ---------------------------------------------------------------------------- layout


@given(layouts())
def test_a_layout_prints_as_what_it_parses_from(layout):
    assert Layout.parse(str(layout)) == layout


@given(layouts(), st.data())
def test_spaces_and_the_times_sign_change_nothing(layout, data):
    canonical = str(layout)
    times = data.draw(st.sampled_from(["x", "×", " × ", "X"]))
    spaced = canonical.replace(",", " , ").replace("+", " + ").replace("x", times)
    assert str(Layout.parse(f"  {spaced}\t")) == canonical
    assert make(spaced, topology="").layout == canonical


def test_a_layout_says_how_many_layers_there_are_and_how_many_run():
    spiral = Layout.parse(SPIRAL)
    assert (spiral.unique_layers, spiral.compute_layers) == (4, 10)
    assert spiral.core_stacks == (2,)
    untied = Layout.parse("1+2+3+4")
    assert (untied.unique_layers, untied.compute_layers) == (10, 10)
    assert untied.core_stacks == untied.cores == (2, 3)
    plain = Layout.parse("24")
    assert (plain.unique_layers, plain.compute_layers, plain.cores) == (24, 24, ())


def test_resolutions_are_exact():
    """With floats 1/(1/93) is less than 93."""
    for g in (3, 6, 7, 93, 99, 105):
        (it,) = make(f"0+1x{{1/{g}}}+0").iterations
        assert it.chunk == g
    assert [it.chunk for it in make("0+1x{2/5,0.3,3/4}+0").iterations] == [2, 3, 1]
    assert make("0+1x{0.125}+0") == make("0+1x{1/8}+0")


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("", "not a layout"),
        ("0", "at least one layer"),
        ("4+8", "not a layout"),
        ("4+8x{}+4", "resolution ''"),
        ("4+8x{1/8", "not a layout"),
        ("4+8x{1/8}", "not a layout"),
        ("4+0x{1/8}+4", "at least one layer"),
        ("4+0+8+4", "at least one layer"),
        ("4+8x{2}+4", "resolution 2 lies outside (0, 1]"),
        ("4+8x{0}+4", "resolution 0 lies outside (0, 1]"),
        ("4+8x{9/8,1}+4", "resolution 9/8 lies outside (0, 1]"),
        ("4+8x{-1/2}+4", "resolution '-1/2'"),
        ("4+8x{1/0}+4", "resolution '1/0'"),
        ("4+8x{half}+4", "resolution 'half'"),
        ("-4+8x{1}+4", "not a layout"),
        ("twelve", "not a layout"),
        (12, "not a string"),
        (None, "not a string"),
    ],
)
def test_a_wrong_layout_is_refused_with_the_reason_and_the_grammar(layout, why):
    with pytest.raises(ConfigError) as error:
        make(layout)
    message = str(error.value)
    assert message.startswith(f"layout {layout!r}: ")
    assert why in message
    assert '"4+8x{1/8,1/4,1/2,1}+4"' in message


# ---------------------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"hidden_size": 0}, ["hidden_size 0", "at least 1"]),
        ({"hidden_size": 32.0}, ["hidden_size 32.0", "whole number"]),
        ({"num_heads": True}, ["num_heads True", "whole number"]),
        ({"num_heads": -4}, ["num_heads -4", "at least 1"]),
        ({"num_heads": 5}, ["num_heads 5", "hidden_size 32", "1, 2, 4, 8, 16, 32"]),
        ({"vocab_size": "64"}, ["vocab_size '64'", "whole number"]),
        ({"max_length": 0}, ["max_length 0", "at least 1"]),
        ({"intermediate_size": -1}, ["intermediate_size -1", "at least 1"]),
        ({"topology": "ring"}, ["topology 'ring'", "none, anchor, mesh"]),
        ({"layout": "4", "topology": "mesh"}, ["topology 'mesh'", "'4'", "4+8+8+4"]),
        ({"topology": "anchor", "mesh_slots": 5}, ["mesh_slots 5", "'anchor'", "leave it out"]),
        ({"mesh_slots": -1}, ["mesh_slots -1", "at least 1"]),
        ({"downscale": "max"}, ["downscale 'max'", "self_aggregation, mean"]),
        ({"upscale": "linear"}, ["upscale 'linear'", "output_dependent, uniform"]),
        ({"norm": "batch"}, ["norm 'batch'", "rmsnorm, layernorm"]),
        ({"rotary_fraction": 1.5}, ["rotary_fraction 1.5", "[0, 1]"]),
        ({"rotary_fraction": 0.4}, ["rotary_fraction 0.4", "3 of 8", "even"]),
        ({"rotary_base": 0}, ["rotary_base 0", "positive"]),
        ({"norm_eps": float("nan")}, ["norm_eps nan", "positive"]),
        ({"init_std": float("inf")}, ["init_std inf", "positive"]),
        ({"tie_embeddings": 1}, ["tie_embeddings 1", "true or false"]),
        ({"offset": "third"}, ["offset 'third'", "half, zero or a list"]),
        ({"offset": [1, 1]}, ["offset [1, 1]", "list of 4", SPIRAL]),
        ({"offset": [8, 0, 0, 0]}, ["offset 8 of iteration 0", "0…7"]),
        ({"offset": [0, 0, 0, 1]}, ["offset 1 of iteration 3", "0…0"]),
        ({"offset": [0, 0, 0, -1]}, ["offset [0, 0, 0, -1]", "whole numbers"]),
        ({"shift": "none"}, ["shift 'none'", "overlap, parallel or a list"]),
        ({"shift": 7}, ["shift 7", "list of 4"]),
        ({"shift": [7, 2, 1, 0]}, ["shift 2 of iteration 1", "leak the future", "shift is 3"]),
        ({"shift": [6, 3, 1, 0]}, ["shift 6 of iteration 0", "leak the future", "shift is 7"]),
    ],
)
def test_a_wrong_field_is_refused_with_field_value_and_remedy(fields, parts):
    with pytest.raises(ConfigError) as error:
        make(**fields)
    message = str(error.value)
    for part in parts:
        assert part in message
    assert len(message.splitlines()) <= 2


def test_a_config_error_is_a_value_error_and_a_mistake_of_the_user():
    with pytest.raises(ValueError, match="layout"):
        make("")
    assert issubclass(ConfigError, UserError)


def test_unknown_and_missing_fields_are_named():
    with pytest.raises(ConfigError, match="unknown field 'topolgy'; did you mean 'topology'"):
        SpiralConfig.from_dict({"layout": "4", **SIZES, "topolgy": "none"})
    with pytest.raises(ConfigError, match="unknown field 'zzz'; known: layout, hidden_size"):
        SpiralConfig.from_dict({"zzz": 1})
    with pytest.raises(ConfigError, match="missing fields num_heads, vocab_size"):
        SpiralConfig.from_dict({"layout": "4", "hidden_size": 32})
    with pytest.raises(ConfigError, match=r"missing field layout$"):
        SpiralConfig.from_dict(SIZES)


def test_a_config_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        make().hidden_size = 64  # type: ignore[misc]


def test_an_illegal_shift_is_reached_through_the_escape_only():
    illegal = {"shift": [6, 3, 1, 0]}
    with allow_shifts_that_leak_the_future():
        assert make(**illegal).iterations[0].shift == 6
    with pytest.raises(ConfigError, match="leak the future"):
        make(**illegal)


# ---------------------------------------------------------------------------- defaults


def test_only_the_layout_and_the_sizes_are_required_and_the_rest_is_the_paper():
    spiral = make()
    assert (spiral.topology, spiral.mesh_slots) == ("mesh", 7)  # B = T + 3
    assert (spiral.downscale, spiral.upscale) == ("self_aggregation", "output_dependent")
    assert [it.chunk for it in spiral.iterations] == [8, 4, 2, 1]
    assert [it.offset for it in spiral.iterations] == [4, 2, 1, 0]
    assert [it.shift for it in spiral.iterations] == [7, 3, 1, 0]
    assert (spiral.intermediate_size, spiral.norm, spiral.rotary_size) == (128, "rmsnorm", 2)
    plain = make("24")
    assert (plain.topology, plain.mesh_slots, plain.iterations) == ("none", 0, ())


def test_the_named_rules_are_those_of_the_ablations():
    parallel = make(shift="parallel", offset="zero")
    assert [it.shift for it in parallel.iterations] == [8, 4, 2, 0]
    assert [it.offset for it in parallel.iterations] == [0, 0, 0, 0]
    assert [it.reads_only_past for it in parallel.iterations] == [True, True, True, False]
    assert not any(it.reads_only_past for it in make().iterations)


@given(configs(), st.integers(1, 60))
def test_chunks_are_the_complete_ones_and_each_ends_in_a_trigger(config, length):
    for it in config.iterations:
        complete = [i for i in range(length) if it.triggers(i)]
        assert it.chunks(length) == len(complete)
        assert [it.chunk_of(i) for i in complete] == list(range(len(complete)))
        for i in range(length):
            assert i + it.offset == it.chunk_of(i) * it.chunk + it.phase_of(i)


@given(configs(), st.integers(0, 60))
def test_a_token_reads_a_latent_that_is_kept_or_one_that_it_completes(config, position):
    for it in config.iterations:
        if position >= it.shift:
            read, finished = it.chunk_of(position - it.shift), it.chunks(position)
            completes = it.triggers(position) and read == finished and not it.reads_only_past
            assert completes or finished - it.latents_kept <= read < finished


@given(configs())
def test_no_more_latents_are_kept_than_are_read(config):
    for it in config.iterations:
        ages = [
            it.chunks(i) - it.chunk_of(i - it.shift)
            for i in range(it.shift, it.shift + 2 * it.chunk)
        ]
        assert max(ages) == it.latents_kept


# ---------------------------------------------------------------------------- JSON and changes


@given(configs())
def test_json_round_trips_without_loss(config):
    again = SpiralConfig.from_json(config.to_json())
    assert again == config
    assert again.iterations == config.iterations
    assert again.to_json() == config.to_json()
    assert json.loads(config.to_json()) == config.to_dict()


def test_a_file_that_is_no_config_is_named_with_the_reason(tmp_path):
    path = tmp_path / "config.json"
    for text, why in [
        ("{", "not JSON"),
        ("[1]", "a JSON object"),
        (json.dumps({"layout": "4", **SIZES, "depth": 3}), "unknown field 'depth'"),
        (json.dumps({"layout": "4", **SIZES, "num_heads": 3}), "num_heads 3"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError) as error:
            SpiralConfig.load(path)
        assert str(error.value).startswith(f"{path}: ")
        assert why in str(error.value)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        SpiralConfig.load(path)
    with pytest.raises(ConfigError, match=r"missing\.json: cannot be read"):
        SpiralConfig.load(tmp_path / "missing.json")
    path.write_text(make().to_json())
    assert SpiralConfig.load(path) == make()


@given(configs())
def test_replacing_nothing_changes_nothing(config):
    assert config.replace() == config


def test_what_followed_from_a_replaced_field_follows_anew():
    config = make()
    assert config.replace(hidden_size=64).intermediate_size == 256
    assert config.replace(layout="1+2x{1/2,1}+1").mesh_slots == 5
    assert config.replace(layout="4") == make("4")
    assert config.replace(topology="anchor").mesh_slots == 0
    assert make("4").replace(layout=SPIRAL) == config
    own = make(intermediate_size=100, mesh_slots=4)
    assert own.replace(hidden_size=64).intermediate_size == 100
    assert own.replace(layout="1+2x{1/2,1}+1").mesh_slots == 4
    with pytest.raises(ConfigError, match="unknown field 'widht'"):
        config.replace(widht=3)
