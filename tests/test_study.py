"""Laws of studies: cached, resumable, matched, judged by one rule."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from spiralformer import presets
from spiralformer.accounting import parameters, training_flops_per_token
from spiralformer.cli import main
from spiralformer.data.prepare import Recipe, prepare
from spiralformer.data.sources import find_sources
from spiralformer.errors import UserError
from spiralformer.study import judge, lab, report, spec
from spiralformer.study.conduct import Results, conduct
from spiralformer.study.judge import NOISY, NOT_RUN, NOT_SEEN, SEEN, Found
from spiralformer.study.lab import Console, Lab, carry_out
from spiralformer.study.spec import SCALES
from spiralformer.study.tune import next_rate, settled
from tests.training import write_text

STUDY = {
    "title": "Two families",
    "seeds": 2,
    "sweep": {"lrs": [1], "budget": "1/2"},
    "rows": ["looped-mesh", "spiral-b-mesh"],
    "claims": [
        {"says": "lower", "source": "here", "less": ["spiral-b-mesh", "looped-mesh"]},
        {
            "says": "cheaper",
            "source": "here",
            "less": ["spiral-b-mesh", "looped-mesh"],
            "quantity": "flops",
        },
    ],
}


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("study")
    text = write_text(folder / "text.jsonl", 300)
    recipe = Recipe(bytes=True, valid_fraction=0.2)
    prepare(find_sources([str(text)]), folder / "data", recipe)
    return str(folder / "data")


@pytest.fixture
def study(tmp_path) -> str:
    return write_study(tmp_path, STUDY)


def write_study(folder: Path, fields: dict) -> str:
    path = folder / "two.yaml"
    path.write_text(yaml.safe_dump(fields))
    return str(path)


class Counting:
    """Carries runs out and counts them; an order says what to do instead at the n-th."""

    def __init__(self, **orders) -> None:
        self.begun: list[str] = []
        self.done: list[str] = []
        self.orders = orders

    def __call__(self, cache, run):
        self.begun.append(run.key)
        order = self.orders.get(f"at_{len(self.begun)}")
        if order == "interrupt":
            raise KeyboardInterrupt
        if order == "interrupt inside":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lab, "write_json", _interrupted)
                carry_out(cache, run)
        if order == "fail" or run.label.startswith(self.orders.get("fails", "-")):
            lab.write_json(cache / f"{run.key}.failed.json", {"reason": "no luck", "trace": ""})
            raise UserError("no luck")
        record = carry_out(cache, run)
        self.done.append(run.key)
        return record


def _interrupted(*_):
    raise KeyboardInterrupt


def study_results(study, data, cache, execute=carry_out, **kwargs):
    bench = Lab(cache, jobs=0, console=Console(quiet=True), execute=execute)
    return conduct(study, scale="tiny", data=data, lab=bench, **kwargs)


def tables(results) -> tuple:
    return report.markdown(results), report.cells(results), report.to_json(results)["verdicts"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """A study that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    counting = Counting()
    results = study_results(write_study(folder, STUDY), data, folder / "cache", counting)
    return results, counting, folder


# ---------------------------------------------------------------------------- going on


@pytest.mark.parametrize(("moment", "order"), [(2, "interrupt inside"), (5, "interrupt")])
def test_a_study_interrupted_and_started_again_gives_the_same_tables(
    whole, study, data, tmp_path, moment, order
):
    results, undisturbed, _ = whole
    first, second = Counting(**{f"at_{moment}": order}), Counting()
    with pytest.raises(KeyboardInterrupt):
        study_results(study, data, tmp_path / "cache", first)
    again = study_results(study, data, tmp_path / "cache", second)
    assert tables(again) == tables(results)
    assert not set(first.done) & set(second.begun)
    assert sorted(first.done + second.done) == sorted(undisturbed.done)


def test_a_finished_study_runs_nothing_again(whole, data):
    results, undisturbed, folder = whole
    assert len(undisturbed.begun) == len(set(undisturbed.begun)) == 2 + 2 * 2
    counting = Counting()
    again = study_results(str(folder / "two.yaml"), data, folder / "cache", counting)
    assert not counting.begun
    assert tables(again) == tables(results)
    told = study_results(str(folder / "two.yaml"), data, folder / "cache", report_only=True)
    assert tables(told) == tables(results)


def test_another_study_shares_the_runs_and_more_seeds_add_only_theirs(whole, data, tmp_path):
    _, _, folder = whole
    fields = {**STUDY, "title": "another", "rows": ["spiral-b-mesh"], "claims": []}
    counting = Counting()
    study_results(write_study(tmp_path, fields), data, folder / "cache", counting)
    assert not counting.begun
    study_results(write_study(tmp_path, fields), data, folder / "cache", counting, seeds=3)
    assert len(counting.begun) == 1


def test_what_decides_a_run_decides_its_key(whole, data):
    record = next(iter(whole[0].found[0].records.values()))
    config = lab.TrainConfig.from_dict(record["config"])
    run = lab.Run("a", config, "data")
    same = (
        lab.Run("b", config, "data", keep_model=True),
        lab.Run("c", config.override({"out": "elsewhere", "data.path": "moved"}), "data"),
    )
    other = (
        lab.Run("a", config, "other data"),
        lab.Run("a", config.override({"optim.lr": 0.1}), "data"),
        lab.Run("a", config.override({"seed": 7}), "data"),
        lab.Run("a", config.override({"model.shift": "parallel"}), "data"),
        lab.Run("a", config.override({"valid.tokens": 64}), "data"),
    )
    assert {r.key for r in same} == {run.key}
    assert len({r.key for r in (run, *other)}) == 1 + len(other)


def test_a_finished_run_keeps_its_metrics_and_no_checkpoints(whole):
    _, counting, folder = whole
    for key in counting.done:
        names = set(os.listdir(folder / "cache" / key))
        assert {"metrics.jsonl", "result.json"} <= names
        assert not names & {"checkpoints", "model"}


def test_a_run_that_fails_does_not_lose_the_others_and_is_tried_again(whole, study, data, tmp_path):
    counting = Counting(fails="spiral-b-mesh, lr 0.004, seed 1")
    results = study_results(study, data, tmp_path / "cache", counting)
    row = results.found[1]
    assert row.failures == {1: "no luck"}
    assert list(row.records) == [0]
    assert len(results.found[0].records) == 2
    assert "failed: no luck" in report.markdown(results)
    assert results.unfinished == 1
    again = Counting()
    assert tables(study_results(study, data, tmp_path / "cache", again)) == tables(whole[0])
    assert len(again.begun) == 1


def test_a_family_whose_sweep_fails_is_shown_as_failed(study, data, tmp_path):
    counting = Counting(fails="sweep of spiral-b-mesh")
    results = study_results(study, data, tmp_path / "cache", counting, seeds=1)
    assert "no learning rate" in report.markdown(results)
    assert [v.word for v in results.verdicts] == [NOT_RUN, SEEN]


def test_a_run_that_another_process_is_at_is_not_carried_out_twice(whole, tmp_path):
    record = next(iter(whole[0].found[0].records.values()))
    run = lab.Run("a", lab.TrainConfig.from_dict(record["config"]), "data")
    with lab.claimed(tmp_path, run) as mine, lab.claimed(tmp_path, run) as theirs:
        assert mine
        assert not theirs


# ---------------------------------------------------------------------------- matched


def test_runs_are_matched_by_their_own_records(whole):
    results, _, _ = whole
    first, second = ({**f.records[0]} for f in results.found)
    judge.check_matched([("a", first), ("b", second)])
    for change in (
        lambda r: r.update(tokens=r["tokens"] - 1),
        lambda r: r["valid"].update(tokens=1),
        lambda r: r["run"].update({"validation data": "other"}),
        lambda r: r["run"].update({"training data": "other"}),
        lambda r: r["order"].update({"to 2": "other"}),
    ):
        wrong = copy.deepcopy(second)
        change(wrong)
        with pytest.raises(judge.Unmatched, match="seed 0"):
            judge.check_matched([("a, seed 0", first), ("b, seed 0", wrong)])


def test_runs_of_two_seeds_have_two_orders_and_of_two_families_one(whole):
    results, _, _ = whole
    one, other = results.found
    assert one.records[0]["order"] == other.records[0]["order"]
    assert one.records[0]["order"] != one.records[1]["order"]


def test_matched_by_compute_means_within_a_step(whole):
    results, _, _ = whole
    first, second = (copy.deepcopy(f.records[0]) for f in results.found)
    with pytest.raises(judge.Unmatched, match="FLOPs"):
        judge.check_matched(
            [("a", {**first, "tokens": 10 * first["tokens"]}), ("b", second)], "flops"
        )
    judge.check_matched([("a", first), ("b", {**first, "tokens": first["tokens"] + 1})], "flops")


# ---------------------------------------------------------------------------- the rule


def made_up(name: str, losses: dict[int, float], **changes) -> Found:
    row = next(r for r in spec.load("main", SCALES["tiny"]).rows if r.name == name)
    records = {
        seed: {"valid": {"loss": loss, "bits_per_byte": None}, "tokens": 512}
        for seed, loss in losses.items()
    }
    return Found(dataclasses.replace(row, **changes), 64, 1e-3, records, {})


def test_noise_is_what_rows_and_seeds_do_not_explain():
    exact = [made_up("baseline", {0: 2.0, 1: 3.0}), made_up("looped-mesh", {0: 4.0, 1: 5.0})]
    assert judge.noise_of(exact, "").sigma == pytest.approx(0, abs=1e-12)
    rough = [made_up("baseline", {0: 2.0, 1: 2.0}), made_up("looped-mesh", {0: 3.0, 1: 3.2})]
    noise = judge.noise_of(rough, "")
    assert noise.freedom == 1
    # differences of pairs are -1 and -1.2: their variance 0.02 is twice σ²
    assert noise.sigma == pytest.approx(0.1)
    assert (
        judge.noise_of([made_up("baseline", {0: 2.0}), made_up("looped-mesh", {0: 3})], "") is None
    )


@pytest.mark.parametrize(
    ("difference", "error", "margin", "word"),
    [
        (-0.21, 0.1, None, SEEN),
        (-0.19, 0.1, None, NOISY),
        (0.19, 0.1, None, NOISY),
        (0.21, 0.1, None, NOT_SEEN),
        (-1.0, None, None, NOISY),
        (0.01, 0.01, 0.04, SEEN),
        (0.03, 0.01, 0.04, NOISY),
        (-0.07, 0.01, 0.04, NOT_SEEN),
    ],
)
def test_a_verdict_follows_the_rule(difference, error, margin, word):
    assert judge.word_for(difference, error, margin) == word


def test_verdicts_are_paired_by_seed_and_need_noise():
    a = made_up("spiral-b-mesh", {0: 2.0, 1: 3.0, 2: 4.0})
    b = made_up("looped-mesh", {0: 2.1, 1: 3.1})
    claim = spec.Claim("lower", "here", "less", ("spiral-b-mesh", "looped-mesh"))
    (found,) = judge.verdicts([claim], [a, b], judge.Noise(0.02, 4, ""))
    assert (found.word, found.pairs) == (SEEN, 2)
    assert found.difference == pytest.approx(-0.1)
    assert found.error == pytest.approx(0.02)
    assert judge.verdicts([claim], [a, b], None)[0].word == NOISY
    assert judge.verdicts([claim], [a], None)[0].word == NOT_RUN


def test_a_frontier_is_measured_from_the_other_family_s_line():
    def family(name, factor):
        rows = []
        for width in (8, 16, 32, 64):
            model = spec.family_config(name, SCALES["tiny"])
            model = model.replace(hidden_size=width, num_heads=1)
            x = parameters(model).total
            loss = factor * 10 * x**-0.1
            rows.append(made_up(name, {0: loss}, model=model, point={"width": width / 24}))
        return rows

    found = family("baseline", 1.0) + family("spiral-l-mesh", 0.9)
    pair = ("spiral-l-mesh", "baseline")
    claim = spec.Claim("below", "here", "frontier", pair, against="parameters")
    (seen,) = judge.verdicts([claim], found, judge.Noise(0.01, 4, ""))
    assert seen.word == SEEN
    reverse = dataclasses.replace(claim, rows=pair[::-1])
    assert judge.verdicts([reverse], found, judge.Noise(0.01, 4, ""))[0].word == NOT_SEEN
    slope, _, scatter = judge.fitted([(x, 3 * x**-0.5) for x in (1, 10, 100)])
    assert slope == pytest.approx(-0.5)
    assert scatter == pytest.approx(0, abs=1e-9)


# ---------------------------------------------------------------------------- learning rates


def test_a_sweep_takes_the_lowest_loss_and_extends_at_an_edge():
    inside = {1.0: 3.0, 2.0: 2.0, 4.0: 2.5}
    assert settled(inside, 3).chosen == 2.0
    assert next_rate(inside, 3, 2) is None
    high, low = {1.0: 3.0, 2.0: 2.0, 4.0: 1.5}, {1.0: 1.0, 2.0: 2.0, 4.0: 3.0}
    assert next_rate(high, 3, 2) == 8.0
    assert next_rate(low, 3, 2) == 0.5
    assert next_rate({**high, 8.0: 1.4, 16.0: 1.3}, 3, 2) is None
    assert settled({**high, 8.0: 1.4, 16.0: 1.3}, 3).at_edge
    diverged = {1.0: 2.0, 2.0: 1.0, 4.0: math.inf}
    assert settled(diverged, 3).chosen == 2.0
    assert settled({1.0: math.inf}, 1).chosen is None


def test_a_study_extends_the_sweep_of_a_family_whose_best_is_at_the_edge(data, tmp_path):
    fields = {
        **STUDY,
        "seeds": 1,
        "rows": ["spiral-b-mesh"],
        "claims": [],
        "sweep": {"lrs": ["1/1000", "1/500"], "extensions": 1},
    }
    results = study_results(write_study(tmp_path, fields), data, tmp_path / "cache")
    tuned = results.tuned["spiral-b-mesh"]
    assert list(tuned.tried) == pytest.approx([4e-6, 8e-6, 1.6e-5])
    assert (tuned.chosen, tuned.extended, tuned.at_edge) == (pytest.approx(1.6e-5), 1, True)
    assert results.found[0].lr == tuned.chosen
    assert "extended once" in report.markdown(results)


# ---------------------------------------------------------------------------- the files


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["main", "ablation", "recurrence", "scaling", "schedule"])
def test_the_studies_are_understood_at_every_scale(name, scale):
    study = spec.load(name, SCALES[scale])
    assert study.claims
    assert {row.tuned for row in study.rows} == set(study.families)
    for row in study.rows:
        assert row.model.max_length == SCALES[scale].length
        assert row.steps >= 1
    if study.match == "tokens" and not any("budget" in row.point for row in study.rows):
        assert len({row.steps for row in study.rows}) == 1


def test_main_has_the_families_of_table_1():
    study = spec.load("main", SCALES["410m"])
    assert len(study.rows) == 7
    assert study.seeds == 3
    for row in study.rows:
        name = row.paper.format("410m")
        if name in presets.PRESETS:
            assert row.model == presets.preset(name)


def test_ablation_has_the_rows_of_table_2():
    rows = spec.load("ablation", SCALES["410m"]).rows
    assert [row.paper.format("410m") for row in rows] == list(report.paper.TABLE_2)
    for row in rows:
        assert row.model == presets.preset(row.paper.format("410m"))


@pytest.mark.parametrize("scale", ["nano", "160m", "410m", "1.4b"])
def test_recurrence_holds_parameters_and_compute_fixed(scale):
    study = spec.load("recurrence", SCALES[scale])
    budgets = {row.point["budget"] for row in study.rows}
    assert len(budgets) == 2
    ratios = sorted({row.core for row in study.rows})
    assert ratios[0] == 0
    assert ratios[-1] >= 0.8
    assert len(ratios) >= 6
    assert len({row.model.parsed_layout.unique_layers for row in study.rows}) == 1
    counts = [parameters(row.model).non_embedding for row in study.rows]
    assert max(counts) / min(counts) < 1.006
    for budget in budgets:
        spent = [
            training_flops_per_token(row.model, study.scale.length) * row.steps
            for row in study.rows
            if row.point["budget"] == budget
        ]
        assert max(spent) - min(spent) < max(
            training_flops_per_token(row.model, study.scale.length) for row in study.rows
        )
    for row in study.rows:
        layout = row.model.parsed_layout
        assert layout.pre == layout.post
        if layout.tied:
            assert row.core * layout.unique_layers == layout.cores[0]


def test_scaling_has_four_sizes_of_four_families():
    study = spec.load("scaling", SCALES["nano"])
    assert len({row.model.hidden_size for row in study.rows}) >= 4
    assert len({row.name for row in study.rows}) == 4
    for row in study.rows:
        assert row.lr_factor * row.model.hidden_size == SCALES["nano"].hidden_size
        assert row.model.head_size == 32


@pytest.mark.parametrize("name", ["main", "ablation", "recurrence", "scaling", "schedule"])
def test_every_study_has_its_table_figure_and_verdicts(name, tmp_path):
    """Of made-up losses, one row without any."""
    study = spec.load(name, SCALES["nano"], seeds=2)
    found = []
    for k, row in enumerate(study.rows):
        losses = {} if k == 1 else {0: 4 - 0.01 * k, 1: 4.002 - 0.011 * k}
        made = dataclasses.replace(made_up("baseline", losses), row=row)
        for record in made.records.values():
            record |= {"steps": row.steps, "order": {}, "run": {}, "code": "here"}
        found.append(dataclasses.replace(made, failures={} if losses else {0: "no luck"}))
    noise = judge.noise_of(found, "here")
    tried = {1e-3: 4.0, 2e-3: 3.9, 4e-3: math.inf}
    tuned = {family: settled(tried, 3) for family in study.families}
    verdicts = judge.verdicts(study.claims, found, noise)
    results = Results(study, "nano", "data", found, tuned, noise, verdicts)
    written = {path.name for path in report.write(results, tmp_path)}
    assert {f"{study.figure}.png", "sweep.png", "report.html"} <= written
    text = (tmp_path / "table.md").read_text()
    assert all(row.model.layout in text for row in study.rows)
    assert "failed: no luck" in text
    assert len(verdicts) == len(study.claims) * (2 if name == "recurrence" else 1)
    assert {SEEN, NOT_SEEN, NOISY} & {v.word for v in verdicts}


def test_outputs_are_complete_and_self_contained(whole, tmp_path):
    results, _, _ = whole
    names = {path.name for path in report.write(results, tmp_path)}
    assert {"table.md", "table.csv", "results.json", "report.html", "families.png"} <= names
    page = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert not [word for word in ('src="http', "href=", "<link") if word in page]
    assert all(v.word in page and judge.RULE[:40] in page for v in results.verdicts)


# ---------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mian"], "unknown study 'mian'"),
        (["main", "--scale", "huge"], "unknown scale 'huge'"),
        (["main", "--seeds", "0"], "--seeds 0"),
        (["main", "--jobs", "0"], "--jobs 0"),
        (["main", "--budget", "lots"], "--budget 'lots'"),
        (["main", "--budget", "7"], "less than one step"),
        (["main", "--only", "nothing"], "matches no row"),
        (["main", "--data", "/nowhere"], "/nowhere: no such folder"),
        (["main", "--tasks", "paper"], "--data-dir"),
        (["/nowhere/my.yaml"], "no such file"),
    ],
)
def test_bad_input_is_said_before_any_work(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": ["spiral-c-mesh"]}, "rows[0].family 'spiral-c-mesh'"),
        ({"rows": [{"family": "looped-mesh", "chnage": "mean"}]}, "did you mean 'change'"),
        ({"rows": []}, "rows must be a list"),
        ({"sweeps": {}}, "did you mean 'sweep'"),
        ({"sweep": {"lrs": ["fast"]}}, "sweep.lrs 'fast'"),
        ({"grid": {"depth": [1]}}, "grid.depth"),
        ({"seeds": 0}, "seeds 0"),
        ({"rows": ["looped-mesh", "looped-mesh"]}, "two are called 'looped-mesh'"),
        ({"claims": [{"says": "x", "source": "y", "less": ["a", "b"]}]}, "claims[0].less 'a'"),
    ],
)
def test_a_malformed_study_is_refused_by_field(change, said, tmp_path, capsys):
    assert main(["study", write_study(tmp_path, {**STUDY, **change})]) == 2
    assert said in capsys.readouterr().err


def test_children_stop_in_good_order_and_the_same_command_goes_on(whole, data, tmp_path):
    """Two processes side by side, SIGTERM in the middle of it, then to the end."""
    path = write_study(tmp_path, STUDY)
    command = [sys.executable, "-m", "spiralformer.cli", "study", path, "--scale", "tiny"]
    command += ["--data", data, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    command += ["--jobs", "2", "--seeds", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob("*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "the same command goes on" in errors
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [f"{f.losses[0]:.4f}" for f in whole[0].found]
    assert all(loss in done.stdout for loss in losses)
    assert not list((tmp_path / "cache").glob("*.failed.json"))
