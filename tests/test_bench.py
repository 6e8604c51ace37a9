"""`spiralformer bench`: how it times, what it records, how it refuses. No speed is tested."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from spiralformer.bench import cases, report, timing
from spiralformer.bench.peers import PEER, build, family
from spiralformer.bench.timing import Measurement, interleave
from spiralformer.decode import generate


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now.time))
    return now


@pytest.fixture
def bench(run_command, tmp_path):
    """Runs the command on a folder of its own; gives its status, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        return run_command("bench", "--out", out, *arguments)

    out = call.out = tmp_path / "bench"
    return call


# ---------------------------------------------------------------------------- timing


def test_cases_take_turns_and_every_run_but_the_first_is_kept(clock):
    order, took = [], {"a": iter((1.0, 5.0, 3.0, 4.0)), "b": iter((9.0, 7.0, 8.0, 6.0))}

    def case(name):
        order.append(name)
        clock.time += next(took[name])

    seconds = interleave({name: lambda name=name: case(name) for name in took}, 3, "")
    assert "".join(order) == "abababab"
    assert seconds == {"a": (5.0, 3.0, 4.0), "b": (7.0, 8.0, 6.0)}
    measured = Measurement("", "float32", "spiral-b", tokens=12, seconds=seconds["a"])
    assert (measured.median, measured.best) == (3.0, 4.0)


def test_a_case_beyond_patience_runs_once_and_counts(clock):
    def slow():
        clock.time += timing.PATIENCE + 1

    seconds = interleave({"slow": slow, "quick": lambda: None}, 2, "")
    assert seconds == {"slow": (timing.PATIENCE + 1,), "quick": (0.0, 0.0)}


# ---------------------------------------------------------------------------- cases


@pytest.mark.parametrize("name", [PEER, "spiral-b"])
def test_cases_can_be_timed_beyond_a_presets_max_length(name):
    length = family("nano")["spiral-b"].max_length + 8
    config = family("nano", length)[name]
    cases.training(name, config, "float32", length)()
    cases.reading(name, config, "bfloat16", length)()


@pytest.mark.parametrize("lengths", [[5], [3, 9, 4]])
def test_hugging_faces_generate_goes_on_as_our_own_does(lengths, monkeypatch):
    """What is timed is decoding: run after run gives the tokens of one long request."""
    config = family("nano")["spiral-b"]
    model = build("spiral-b", config, torch.float64).eval()
    prompts = [[(7 * row + k) % 50 for k in range(n)] for row, n in enumerate(lengths)]
    rows = [[] for _ in prompts]

    def kept(out):
        rows[:] = out.sequences[:, max(lengths) :].tolist()
        return out

    wrapper = cases.wrap(model)
    theirs = wrapper.generate
    monkeypatch.setattr(wrapper, "generate", lambda *a, **k: kept(theirs(*a, **k)))
    run = cases.hf_decoding(wrapper, prompts, 8)
    run()
    run()
    assert rows == generate(model, prompts, max_new_tokens=1 + 2 * 8)


# ---------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_every_benchmark_runs_and_is_written(bench):
    sizes = {"length": 32, "prompt": 32, "context": 16, "tokens": 2, "repeats": 2}
    flags = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    status, out, _ = bench("--scale", "nano", *flags, "--lengths", "16", "1040")
    assert status == 0
    assert "decoding, batch 8, ragged, bfloat16, nano shapes" in out
    records = {n: json.loads((bench.out / f"bench-{n}.json").read_text()) for n in cases.BENCHMARKS}
    for name, record in records.items():
        assert record["command"].startswith("spiralformer")
        assert record["torch"] == torch.__version__
        assert record["threads"] == torch.get_num_threads()
        assert record["cpu"]
        assert {m["dtype"] for m in record["measurements"]} == {"float32", "bfloat16"}
        if name != "serve":  # whose peer needs vLLM
            assert PEER in {m["model"] for m in record["measurements"]}
        for m in record["measurements"]:
            assert m["bytes"] > 0 or (len(m["seconds"]) == 2 and min(m["seconds"]) > 0)
    runners = {m["runner"] for m in records["decode"]["measurements"] if m["model"] != PEER}
    assert runners == {"eager", "native", "hf"}
    assert (bench.out / "bench.png").stat().st_size
    assert "growth" in (bench.out / "table.md").read_text()


def test_a_table_sets_each_case_beside_the_peer():
    group = [
        Measurement("x", "float32", PEER, "", 8, 8, (2.0, 4.0, 3.0)),
        Measurement("x", "float32", "spiral-b", "native", 8, 8, (1.0, 2.0, 1.5)),
    ]
    header, rows = report.rows(group)
    assert dict(zip(header, rows[1], strict=True)) == {
        "tokens/s": "spiral-b, native",
        "median": "5.3",
        "best": "8.0",
        "÷ hf": "2.00",
        "runs": "3",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("trian", "unknown benchmark 'trian'; choose from train, prefill"),
        ("train --scale 7b", "--scale 7b: choose from 160m, 410m"),
        ("train --repeats 0", "--repeats 0: at least 1"),
        ("decode --tokens -1", "--tokens -1: at least 1"),
        ("decode --context -1", "--context -1: at least 0"),
        ("train --threads 0", "--threads 0: at least 1"),
        ("growth --lengths 8 8", "--lengths 8 8: give two or more"),
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
    status, out, err = bench("train", "--scale", "nano", "--out", str(file))
    assert (status, out) == (2, "")
    assert f"{file}: cannot be written" in err
    assert file.read_text() == "mine"


@pytest.mark.parametrize("content", ["{", '{"measurements": [{"bars": 3}]}'])
def test_a_damaged_record_is_refused_before_measuring(bench, content):
    bench.out.mkdir()
    broken = bench.out / "bench-train.json"
    broken.write_text(content)
    status, out, err = bench("train", "--scale", "nano")
    assert (status, out) == (2, "")
    assert f"{broken}: " in err
    assert broken.read_text() == content
