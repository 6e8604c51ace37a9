"""`spiralformer bench`: how it times, what its bars say, and how it refuses. No speed is tested."""

from __future__ import annotations

import json
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from spiralformer.bench import decode, prefill, timing, train
from spiralformer.bench.peers import PEER, family
from spiralformer.bench.results import Bar, Results, speeds
from spiralformer.bench.scaling import exponent
from spiralformer.bench.timing import Laps, interleave
from spiralformer.cli import main

SECONDS = {PEER: 2.0, "baseline": 1.0, "looped": 1.1, "spiral-b": 0.9, "spiral-l": 0.95}


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now.time))
    return now


@pytest.fixture
def bench(capsys, tmp_path):
    """Runs the command on a folder of its own; gives its status, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(["bench", *arguments, *(() if "--out" in arguments else ("--out", str(out)))])
        return status, *capsys.readouterr()

    out = call.out = tmp_path / "bench"
    return call


# ---------------------------------------------------------------------------- timing


def test_cases_take_turns_and_the_best_counts_but_not_the_first(clock):
    order, took = [], {"a": iter((1.0, 5.0, 3.0, 4.0)), "b": iter((9.0, 7.0, 8.0, 6.0))}

    def case(name):
        order.append(name)
        clock.time += next(took[name])

    found = interleave({name: lambda name=name: case(name) for name in took}, 3)
    assert "".join(order) == "abababab"
    assert found == {"a": 3.0, "b": 6.0}


def test_a_case_beyond_patience_runs_once_and_counts(clock):
    runs = []

    def slow():
        runs.append(1)
        clock.time += timing.PATIENCE + 1

    assert interleave({"slow": slow, "own": lambda: 0.5}, 2) == {
        "slow": timing.PATIENCE + 1,
        "own": 0.5,
    }
    assert len(runs) == 1


def test_the_best_of_every_lap_is_added_up(clock):
    laps = Laps()

    def run(*lengths):
        def case():
            for length in lengths[:-1]:
                clock.time += length
                laps.mark()
            clock.time += lengths[-1]

        return laps.time(case)

    assert run(3.0, 1.0, 5.0) == 9.0
    assert run(1.0, 3.0, 4.0) == 1.0 + 1.0 + 4.0
    assert run(9.0, 9.0, 9.0) == 6.0


def test_a_lap_ends_at_each_layer_on_the_way_forward_and_back(monkeypatch):
    ticks = count()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    laps = Laps(layers)
    assert laps.time(lambda: layers(torch.ones(1, 2)).sum().backward()) == 3 + 3 + 1


@pytest.mark.parametrize("power", [-0.5, 0.0, 1.0, 1.37])
def test_a_fit_finds_the_exponent(power):
    lengths = [512, 1024, 4096]
    assert exponent(lengths, [3 * n**power for n in lengths]) == pytest.approx(power)


def test_growth_can_be_timed_beyond_a_presets_max_length():
    config = family("nano")["spiral-b"]
    length = config.max_length + 8
    assert train.make_step("spiral-b", "nano", length, "float32")() > 0
    with torch.no_grad():
        assert prefill.make_case("spiral-b", config, "float32", length)() > 0


# ---------------------------------------------------------------------------- bars


def test_a_bar_holds_up_to_its_limit():
    least, most = Bar("a", 1.0, 1.0, True), Bar("b", 1.0, 1.0, False)
    assert least.holds
    assert most.holds
    least.figure, most.figure = 0.999, 1.001
    assert not least.holds
    assert not most.holds
    assert str(least) == "DOES NOT HOLD  0.999 ≥ 1.000  a"
    summary = Results("x", bars=[least, Bar("c", 2.0, 1.0, True)]).summary()
    assert summary.endswith("x: 1 of 2 bars hold")


def figures(results: Results) -> dict[str, float]:
    return {bar.name.split(": ", 1)[1]: bar.figure for bar in results.bars}


def test_bars_of_training(monkeypatch):
    monkeypatch.setattr(train, "interleave", lambda *_: SECONDS)
    monkeypatch.setattr(train, "gemm_peak", lambda *_: 1e12)
    monkeypatch.setattr(train, "operator_seconds", lambda *_: 0.018)
    results = train.run("nano", 32, ("float32",), 1)
    flops = {m["case"]: m["flops"] for m in results.measurements}
    assert figures(results) == pytest.approx(
        {
            "our baseline's speed ÷ Hugging Face's": 2.0,
            "spiral-b: (time ÷ baseline) ÷ (FLOPs ÷ baseline)": 0.9
            / (flops["spiral-b"] / flops["baseline"]),
            "spiral-l: (time ÷ baseline) ÷ (FLOPs ÷ baseline)": 0.95
            / (flops["spiral-l"] / flops["baseline"]),
            "spiral-b: FLOP/s ÷ GEMM peak": flops["spiral-b"] / 0.9 / 1e12,
            "spiral-b: operators around the core ÷ step": 0.02,
        }
    )


def test_bars_of_prompts(monkeypatch):
    monkeypatch.setattr(prefill, "interleave", lambda *_: SECONDS)
    assert figures(prefill.run("nano", 32, ("float32",), 1)) == {
        "spiral-b's time ÷ baseline's": 0.9,
        "spiral-l's time ÷ baseline's": 0.95,
        "baseline's time ÷ Hugging Face's": 0.5,
    }


def test_bars_of_decoding_take_the_better_of_eager_and_compiled(monkeypatch):
    found = {PEER: 10.0}
    for name, eager, compiled in (
        ("baseline", 8.0, 20.0),
        ("looped", 19.0, 7.0),
        ("spiral-b", 6.0, 21.0),
        ("spiral-b parallel", 5.0, 30.0),
    ):
        found |= {f"{name}, eager": eager, f"{name}, compiled": compiled}
    monkeypatch.setattr(decode, "measure", lambda *_: found)
    read = decode.weights_read_per_token(family("nano")["baseline"]) * 4 * 20.0
    monkeypatch.setattr(decode, "read_rates", lambda *_: {"slow": {1: 1.0}, "fast": {1: 2 * read}})
    assert figures(decode.run("nano", ("float32",), context=0)) == pytest.approx(
        {
            "our baseline ÷ Hugging Face": 2.0,
            "SpiralFormer-B overlap ÷ LoopedFormer": 21 / 19,
            "SpiralFormer-B parallel ÷ our baseline": 1.5,
            "our baseline's weight bytes/s ÷ a bare chain of its linears'": 0.5,
        }
    )


def test_speeds_are_ratios_to_the_peers():
    step = [{"precision": "float32", "case": c, "seconds": s} for c, s in SECONDS.items()]
    lines = speeds({"train": {"measurements": step}})
    assert lines[0] == "| | training step, float32 |"
    assert "| Hugging Face GPT-NeoX | 1.00× |" in lines
    assert "| our baseline | 2.00× |" in lines
    assert "| SpiralFormer-L | 2.11× |" in lines


# ---------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_every_benchmark_runs_and_is_written(bench):
    sizes = {"length": 32, "prompt": 32, "context": 16, "tokens": 2, "repeats": 1}
    flags = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    status, out, err = bench("--scale", "nano", *flags, "--lengths", "16", "1040")
    assert (status, err) == (0, "")
    names = ("limits", "train", "prefill", "decode", "memory", "scaling")
    found = {n: json.loads((bench.out / f"bench-{n}.json").read_text()) for n in names}
    assert (bench.out / "bench.png").stat().st_size
    bars = [bar for one in found.values() for bar in one["bars"]]
    held = sum(bar["holds"] for bar in bars)
    assert out.endswith(f"in all: {held} of {len(bars)} bars hold\n")
    assert len(bars) == 10 + 6 + 8 + 3 + 12
    table = (bench.out / "table.md").read_text()
    assert all(bar["name"] in table for bar in bars)
    exact = next(bar for bar in found["memory"]["bars"] if bar["name"].startswith("decode state"))
    assert exact["figure"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("trian", "unknown benchmark 'trian'; choose from limits, train"),
        ("limits --scale 7b", "--scale 7b: choose from 160m, 410m"),
        ("limits --repeats 0", "--repeats 0: at least 1"),
        ("decode --tokens -1", "--tokens -1: at least 1"),
        ("decode --context -1", "--context -1: at least 0"),
        ("limits --threads 0", "--threads 0: at least 1"),
        ("scaling --lengths 8 8", "--lengths [8, 8]: give two or more"),
    ],
)
def test_what_cannot_be_timed_is_refused(bench, arguments, said):
    status, out, err = bench(*arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith("spiralformer bench: error: ")
    assert said in err
    assert not bench.out.exists()


def test_a_folder_that_cannot_hold_results_is_refused_before_measuring(bench, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    status, out, err = bench("limits", "--scale", "nano", "--out", str(file))
    assert (status, out) == (2, "")
    assert f"{file}: cannot be written" in err
    assert file.read_text() == "mine"

    bench.out.mkdir()
    broken = bench.out / "bench-train.json"
    broken.write_text("{")
    status, out, err = bench("limits", "--scale", "nano")
    assert (status, out) == (2, "")
    assert f"{broken}: cannot be read" in err
    assert broken.read_text() == "{"
