"""Laws of studies: resumable, matched, judged by one rule, drawn from their records alone."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats as scipy_stats

from spiralformer import paper, presets
from spiralformer.accounting import parameters, training_flops_per_token
from spiralformer.cli import main
from spiralformer.data.windows import TokenDataset, open_split
from spiralformer.errors import UserError
from spiralformer.files import locked
from spiralformer.study import page, spec, stats
from spiralformer.study.compare import compare
from spiralformer.study.corpus import Corpus, open_corpus
from spiralformer.study.records import Records, RowRecord, RunRecord, SweepRecord, check_matched
from spiralformer.study.run import Run, RunPool, StudyRuns
from spiralformer.study.spec import SCALES, Claim
from spiralformer.study.stats import NO_VERDICT, NOT_SEEN, SEEN, UNDECIDED

STUDY = {
    "title": "Two families",
    "seeds": 2,
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
RESULTS = Path("docs/results")
NAMES = ["ablation", "main", "power", "recurrence", "scaling", "schedule"]
BRACKETED = SweepRecord(tried=[(1e-3, 2.1), (2e-3, 2.0), (4e-3, None)])


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.gz"
    words = np.random.default_rng(0).choice([b"spiral ", b"loop ", b"coarse ", b"fine "], 4000)
    path.write_bytes(gzip.compress(b"".join(words)))
    return str(path)


def write_study(folder: Path, fields: dict) -> str:
    path = folder / "two.yaml"
    path.write_text(yaml.safe_dump(fields))
    return str(path)


def study_runs(path: str, corpus: str, cache: Path, **changes) -> StudyRuns:
    study, data = spec.load(path, "tiny", **changes), open_corpus("", corpus, cache)
    return StudyRuns(study.at(data.vocab_size), data, cache, RunPool(jobs=2, quiet=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """A study that nothing disturbed: its runs, its records and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    runs = study_runs(write_study(folder, STUDY), corpus, folder / "cache")
    runs.conduct()
    return runs, runs.records(), folder


def results(records: Records) -> list:
    """Without what depends on the clock and the machine."""
    return [
        (row.id, run.seed, run.lr, run.tokens, run.loss, [(t, loss) for t, _, loss in run.curve])
        for row in records.rows
        for run in row.runs
    ]


# ---------------------------------------------------------------------------- going on


def test_a_study_interrupted_and_started_again_gives_the_same_records(whole, corpus, tmp_path):
    def interrupt() -> None:
        raise KeyboardInterrupt

    runs = study_runs(write_study(tmp_path, STUDY), corpus, tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        runs.conduct(interrupt)
    runs.conduct()
    assert results(runs.records()) == results(whole[1])


def test_a_finished_study_trains_nothing_and_another_shares_its_runs(
    whole, corpus, tmp_path, monkeypatch
):
    _, records, folder = whole
    trained: list[Run] = []
    monkeypatch.setattr(RunPool, "_carried_out", lambda pool, due: trained.extend(due) or ())
    again = study_runs(str(folder / "two.yaml"), corpus, folder / "cache")
    again.conduct()
    assert results(again.records()) == results(records)
    fields = {**STUDY, "title": "another", "rows": ["spiral-b-mesh"], "claims": []}
    path = write_study(tmp_path, fields)
    study_runs(path, corpus, folder / "cache").conduct()
    assert not trained
    study_runs(path, corpus, folder / "cache", seeds=3).conduct()
    assert [run.config.seed for run in trained] == [2]


def test_a_run_that_fails_does_not_lose_the_others_and_is_tried_again(whole, corpus, tmp_path):
    runs = study_runs(write_study(tmp_path, STUDY), corpus, tmp_path / "cache")
    taken = runs.row_run(runs.study.rows[1], 4e-3, 1).folder
    taken.parent.mkdir(parents=True)
    taken.write_text("not a folder")
    runs.conduct()
    records = runs.records()
    assert [len(row.runs) for row in records.rows] == [2, 1]
    assert list(records.rows[1].failures) == [1]
    assert str(taken) in records.rows[1].failures[1]
    assert records.unfinished == 1
    assert "seed 1 failed" in page.markdown(records)
    taken.unlink()
    runs.conduct()
    assert results(runs.records()) == results(whole[1])


def test_a_result_that_cannot_be_used_is_named_and_the_others_are(whole, corpus, tmp_path, capsys):
    shutil.copytree(whole[2], tmp_path / "study")
    runs = study_runs(str(tmp_path / "study/two.yaml"), corpus, tmp_path / "study/cache")
    damaged = runs.row_run(runs.study.rows[1], 4e-3, 1).folder / "result.json"
    result = json.loads(damaged.read_text())
    result["valid"]["loss"] = None
    damaged.write_text(json.dumps(result))
    metrics = runs.row_run(runs.study.rows[1], 4e-3, 0).folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + "torn\n")
    runs.announce()
    runs.conduct()
    records = runs.records()
    assert [len(row.runs) for row in records.rows] == [2, 1]
    assert f"{damaged}: the validation loss is not finite" in records.rows[1].failures[1]
    said = capsys.readouterr().err
    assert said.count(str(damaged)) == 1
    assert said.count(f"{metrics}:") == 1


def test_a_run_that_another_study_is_at_is_waited_for(whole, corpus, tmp_path):
    runs = study_runs(write_study(tmp_path, STUDY), corpus, tmp_path / "cache")
    *others, last = [runs.row_run(row, 4e-3, seed) for seed in range(2) for row in runs.study.rows]
    with locked(last.folder / "lock", "training", "wait"):
        conducting = threading.Thread(target=runs.conduct)
        conducting.start()
        while conducting.is_alive() and not all(run.finished for run in others):
            time.sleep(0.05)
        conducting.join(timeout=3)  # its process is at the lock
        assert conducting.is_alive()
    conducting.join()
    assert results(runs.records()) == results(whole[1])


def test_a_cache_that_holds_another_run_is_refused(whole, corpus):
    _, _, folder = whole
    runs = study_runs(str(folder / "two.yaml"), corpus, folder / "cache")
    run = runs.row_run(runs.study.rows[0], 4e-3, 0)
    other = Run("other", run.config.override({"optim.warmup": 0.5}))
    with pytest.raises(UserError, match=r"optim\.warmup"):
        other.carry_out()


def test_children_stop_in_good_order_and_the_same_command_goes_on(whole, corpus, tmp_path):
    """Two processes side by side, SIGTERM in the middle of it, then to the end."""
    path, cache = write_study(tmp_path, STUDY), str(tmp_path / "cache")
    command = [sys.executable, "-m", "spiralformer.cli", "study", path, "--scale", "tiny"]
    command += ["--corpus", corpus, "--cache", cache, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "cache").glob("*/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert "the same command goes on" in errors
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert results(Records.read(tmp_path / "out")) == results(whole[1])


# ---------------------------------------------------------------------------- data


def test_a_corpus_is_cut_in_order_and_a_token_is_a_byte(corpus, tmp_path, whole):
    data, text = open_corpus("", corpus, tmp_path), gzip.decompress(Path(corpus).read_bytes())
    folder, cuts = Path(data.train).parent, [round(len(text) * part) for part in (0.9, 0.95, 1)]
    for split, start, stop in zip(("train", "valid", "test"), [0, *cuts], cuts, strict=False):
        stream = open_split(folder / split).stream
        assert bytes(stream.read(0, len(stream)).astype(np.uint8)) == text[start:stop]
    run = whole[1].rows[0].runs[0]
    assert run.bits_per_byte == run.loss / math.log(2)


def test_families_see_the_same_data_in_the_same_order_and_seeds_do_not(whole):
    runs, records, _ = whole
    check_matched(records)
    orders = {}
    for row in runs.study.rows:
        for seed in range(2):
            config = runs.row_run(row, 4e-3, seed).config
            stream = open_split(config.data.path, "train").stream
            data = TokenDataset(stream, config.length, config.seed, config.model.vocab_size)
            samples = range(config.steps * config.batch)
            orders[row.name, seed] = [data.window_of(sample) for sample in samples]
    assert orders["looped-mesh", 0] == orders["spiral-b-mesh", 0]
    assert orders["looped-mesh", 0] != orders["looped-mesh", 1]


@pytest.mark.parametrize("name", ["tokens", "data", "batch", "length", "precision", "valid_tokens"])
def test_runs_that_are_not_matched_are_refused(whole, name):
    records = whole[1]
    row = records.rows[1]
    value = getattr(row.runs[0], name)
    wrong = row.runs[0].model_copy(update={name: value * 2})
    rows = [records.rows[0], row.model_copy(update={"runs": [wrong, row.runs[1]]})]
    with pytest.raises(UserError, match=f"seed 0 are not matched: {name}"):
        check_matched(records.model_copy(update={"rows": rows}))


# ---------------------------------------------------------------------------- the rule


def made_up(losses: dict[str, list[float]], *, steps: int = 400, claims=(), **fields) -> Records:
    """Records of these losses in nats, one for each seed."""

    def row(name: str, values: list[float]) -> RowRecord:
        runs = [
            RunRecord(
                seed=seed,
                lr=2e-3,
                steps=steps,
                tokens=steps * 4096,
                batch=8,
                length=512,
                precision="bfloat16",
                data="data",
                valid_tokens=64,
                loss=loss,
                bits_per_byte=None,
                seconds=60.0,
                curve=[(steps * 2048, 30.0, loss + 0.5), (steps * 4096, 60.0, loss)],
                code="here",
            )
            for seed, loss in enumerate(values)
        ]
        return RowRecord(
            name=name,
            id=name,
            label=name,
            family=name,
            layout="2",
            topology="none",
            parameters=1000,
            non_embedding=900,
            flops=100,
            training_flops=300.0,
            runs=runs,
        )

    rows = [row(name, values) for name, values in losses.items()]
    given = {
        "study": "made-up",
        "title": "Made up",
        "about": "",
        "setting": "",
        "machine": "here",
        "figure": "families",
        "match": "tokens",
        "reference": rows[-1].name,
        "seeds": 2,
        "rows": rows,
        "sweeps": {row.name: BRACKETED for row in rows},
        "claims": list(claims),
    }
    return Records(**{**given, **fields})


LESS = Claim(says="lower", source="here", less=("a", "b"))


def test_the_paired_interval_equals_a_hand_computation():
    records = made_up({"a": [2.00, 2.11, 2.19], "b": [2.10, 2.20, 2.31]}, claims=[LESS])
    (verdict,) = stats.verdicts(records)
    # differences −0.10, −0.09, −0.12: mean −0.31/3, standard deviation 0.0152753, and 4.302653 is
    # the 97.5 % point of Student's t with two degrees of freedom
    mean, half = -0.31 / 3, 4.302653 * 0.0152753 / math.sqrt(3)
    assert verdict.differences == pytest.approx((-0.10, -0.09, -0.12))
    assert verdict.estimate.interval == pytest.approx((mean - half, mean + half), abs=1e-6)
    assert verdict.word == SEEN
    test = scipy_stats.ttest_rel([2.00, 2.11, 2.19], [2.10, 2.20, 2.31])
    assert verdict.estimate.interval == pytest.approx(tuple(test.confidence_interval()))
    # 1.060660 is the 80 % point
    detectable = (4.302653 + 1.060660) * 0.0152753 / math.sqrt(3)
    assert verdict.estimate.detectable == pytest.approx(detectable, abs=1e-6)


def test_noise_is_what_rows_and_seeds_do_not_explain():
    assert stats.noise_of(made_up({"a": [2, 3], "b": [4, 5]}).rows).sigma == pytest.approx(0)
    noise = stats.noise_of(made_up({"a": [2.0, 2.0], "b": [3.0, 3.2]}).rows)
    # differences of pairs are -1 and -1.2: their variance 0.02 is twice σ²
    assert (noise.sigma, noise.freedom) == (pytest.approx(0.1), 1)
    three = made_up({"a": [2.0, 2.0, 2.1], "b": [3.0, 3.2, 3.1], "c": [1.0, 1.0, 1.0]})
    assert stats.noise_of(three.rows).freedom == 4
    assert stats.noise_of(made_up({"a": [2.0], "b": [3.0]}).rows) is None


@pytest.mark.parametrize(
    ("interval", "margin", "word"),
    [
        ((-0.3, -0.1), None, SEEN),
        ((-0.3, 0.1), None, UNDECIDED),
        ((0.1, 0.3), None, NOT_SEEN),
        ((-0.01, 0.03), 0.04, SEEN),
        ((-0.01, 0.05), 0.04, UNDECIDED),
        ((-0.09, -0.05), 0.04, NOT_SEEN),
    ],
)
def test_a_verdict_follows_the_interval(interval, margin, word):
    assert stats.word_for(interval, margin) == word


def test_a_verdict_needs_seeds_steps_and_a_bracketed_sweep():
    clear = {"a": [2.00, 2.01], "b": [2.50, 2.52]}
    (verdict,) = stats.verdicts(made_up(clear, claims=[LESS]))
    assert verdict.word == SEEN
    at_edge = SweepRecord(tried=[(1e-3, 2.1), (2e-3, 2.0)])
    one_rate = SweepRecord(tried=[(2e-3, 2.0)])
    for records, why in (
        (made_up({"a": [2.0], "b": [2.5]}, claims=[LESS]), "1 of 2 seeds"),
        (made_up(clear, steps=299, claims=[LESS]), "fewer than 300 steps"),
        (made_up(clear, claims=[LESS], sweeps={"a": BRACKETED, "b": at_edge}), "of b is not brack"),
        (made_up(clear, claims=[LESS], sweeps={"a": one_rate, "b": BRACKETED}), "of a is not brac"),
        (made_up(clear, claims=[LESS], sweeps={"a": BRACKETED}), "of b is not bracketed"),
    ):
        (verdict,) = stats.verdicts(records)
        assert verdict.word == NO_VERDICT
        assert why in verdict.why


def test_a_frontier_is_the_distance_of_parallel_lines():
    x = np.array([1e3, 1e4, 1e5, 1e6])
    noisy = np.exp([0.01, -0.01, -0.01, 0.01])
    below = stats.between_lines(list(zip(x, 9 * x**-0.1 * noisy, strict=True)),
                                list(zip(x, 10 * x**-0.1, strict=True)))  # fmt: skip
    assert below.interval[1] < 0
    assert below.freedom == 5
    level = math.exp(np.log([*(9 * x**-0.1), *(10 * x**-0.1)]).mean())
    assert below.mean == pytest.approx(math.log(0.9) * level)


def test_power_takes_the_cheapest_budget_of_four_standard_errors():
    records = made_up({"a": [2.0, 2.1, 2.0], "b": [2.1, 2.1, 2.3]}, claims=[LESS], figure="power")
    (budget,) = stats.power(records)
    assert budget.gap == pytest.approx(-0.4 / 3)
    assert budget.error == pytest.approx(np.std([0.1, 0, 0.3], ddof=1) / math.sqrt(3))
    assert not budget.enough
    clear = made_up({"a": [2.0, 2.1], "b": [2.3, 2.41]}, claims=[LESS], figure="power")
    assert stats.power(clear)[0].enough
    assert f"{400 * 4096:,} tokens" in stats.finding(clear)


# ---------------------------------------------------------------------------- learning rates


def test_a_sweep_takes_the_lowest_loss_and_knows_whether_it_is_bracketed():
    assert BRACKETED.chosen == 2e-3
    assert BRACKETED.bracketed  # a rate that diverged is a bound too
    assert not SweepRecord(tried=[(1.0, 3.0), (2.0, 2.0)]).bracketed
    assert not SweepRecord(tried=[(1.0, 1.0), (2.0, 2.0)]).bracketed
    assert SweepRecord(tried=[(1.0, None)]).chosen is None


def test_a_sweep_whose_best_is_at_the_edge_is_extended_as_often_as_allowed(corpus, tmp_path):
    fields = {
        **STUDY,
        "seeds": 1,
        "rows": ["spiral-b-mesh"],
        "claims": [],
        "sweep": {"lrs": ["1/1000", "1/500"], "extensions": 1},
    }
    runs = study_runs(write_study(tmp_path, fields), corpus, tmp_path / "cache")
    runs.conduct()
    records = runs.records()
    sweep = records.sweeps["spiral-b-mesh"]
    assert [lr for lr, _ in sweep.tried] == pytest.approx([4e-6, 8e-6, 1.6e-5])
    assert records.rows[0].runs[0].lr == sweep.chosen == pytest.approx(1.6e-5)
    assert not sweep.bracketed


# ---------------------------------------------------------------------------- the files


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_the_studies_are_understood_at_every_scale(name, scale):
    study = spec.load(name, scale)
    assert spec.names() == NAMES
    assert study.claims == study.file.claims != []
    if study.file.match == "tokens" and "budget" not in study.file.grid:
        assert len({row.steps for row in study.rows}) == 1


def test_main_and_ablation_have_the_rows_of_tables_1_and_2_and_our_operators():
    study = spec.load("main", "410m")
    assert (len(study.rows), study.seeds) == (7, 3)
    for row in study.rows:
        if (name := row.paper.format("410m")) in presets.PRESETS:
            assert row.model == presets.preset(name)
    *rows, attention, by_input = spec.load("ablation", "410m").rows
    assert [row.paper.format("410m") for row in rows] == list(paper.TABLE_2)
    assert [row.model for row in rows] == [presets.preset(name) for name in paper.TABLE_2]
    assert attention.model == presets.preset("spiral-b-410m-mesh-attention")
    assert by_input.model == presets.preset("spiral-b-410m-mesh-input")


@pytest.mark.parametrize("name", ["recurrence", "schedule"])
@pytest.mark.parametrize("scale", ["bytes-s", "410m"])
def test_equal_compute_is_equal_to_within_a_step(name, scale):
    study = spec.load(name, scale)
    per_token = {
        row.id: training_flops_per_token(row.model, study.scale.length) for row in study.rows
    }
    spent = [per_token[row.id] * row.steps for row in study.rows]
    assert max(spent) - min(spent) < max(per_token.values())
    if name == "recurrence":
        assert sorted(row.core for row in study.rows)[0] == 0
        assert len({row.model.parsed_layout.unique_layers for row in study.rows}) == 1
        counts = [parameters(row.model).non_embedding for row in study.rows]
        assert max(counts) / min(counts) < 1.006


def test_scaling_has_four_widths_of_four_families_and_wider_ones_take_lower_rates():
    study = spec.load("scaling", "bytes-s")
    assert {row.model.head_size for row in study.rows} == {32}
    runs = StudyRuns(study, Corpus("text", "train", "valid"), Path("cache"), RunPool())
    folders = [runs.row_run(row, 4e-3, seed=1).folder.as_posix() for row in study.rows]
    assert folders == [
        f"cache/text/{family}-d{width}-400x8x512-lr{lr}-seed1"
        for width, lr in ((64, "0.008"), (96, "0.005333"), (128, "0.004"), (160, "0.0032"))
        for family in ("baseline", "looped-mesh", "spiral-b-mesh", "spiral-l-mesh")
    ]


def losses_of(name: str) -> Records:
    """Records of a study with made-up losses, one row without any."""
    study = spec.load(name, "bytes-s", seeds=2)
    (plain,) = made_up({"a": [2.0, 2.01]}).rows
    rows = []
    for k, row in enumerate(study.rows):
        losses = [run.loss - 0.01 * k - 0.001 * k * run.seed for run in plain.runs]
        runs = [
            run.model_copy(update={"loss": loss, "steps": row.steps})
            for run, loss in zip(plain.runs, losses, strict=True)
        ]
        failed = {0: "no <luck>"} if k == 1 else {}
        rows.append(RowRecord.of(row, 512, [] if failed and name != "power" else runs, failed))
    return made_up(
        {"a": []},
        rows=rows,
        claims=study.claims,
        figure=study.file.figure,
        reference=study.file.reference,
        sweeps=dict.fromkeys(study.families, BRACKETED),
    )


def test_every_study_is_drawn_byte_for_byte_from_its_records(tmp_path):
    drawn, again = tmp_path / "drawn", tmp_path / "again"
    for name in NAMES:
        records = losses_of(name)
        written = page.write(records, drawn / name)
        assert {path.suffix for path in written} == {".json", ".md", ".csv", ".html", ".png"}
        records.write(again / name)
        text = (drawn / name / "table.md").read_text()
        assert text.index(stats.finding(records)) < text.index("![") < text.index("| model")
        web = (drawn / name / "report.html").read_text()
        assert "no &lt;luck&gt;" in web
        assert not [word for word in ('src="http', "href=", "<link", "<luck") if word in web]
    code = (
        "import sys; from spiralformer.cli import main; "
        "[main(['study', name, '--redraw', '--out', name]) for name in sys.argv[1:]]"
    )
    subprocess.run([sys.executable, "-c", code, *NAMES], check=True, cwd=again)
    files = [path.relative_to(drawn) for path in drawn.rglob("*.*")]
    assert len(files) == 6 * len(NAMES)
    for file in files:
        assert (drawn / file).read_bytes() == (again / file).read_bytes(), file


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("*/records.json")), ids=str)
def test_committed_tables_and_figures_are_those_of_the_committed_records(folder, tmp_path):
    for path in page.redraw(Records.read(folder.parent), tmp_path):
        committed = folder.parent / path.name
        if path.name != "report.html":  # which repeats them
            assert committed.read_bytes() == path.read_bytes(), path.name


def test_the_readme_says_what_the_committed_records_say():
    _, _, rest = Path("README.md").read_text().partition(page.MARKS[0])
    assert rest.partition(page.MARKS[1])[0] == page.findings(RESULTS)


def test_redrawing_writes_the_findings_between_the_marks_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = made_up({"a": [2.00, 2.11], "b": [2.10, 2.20]}, claims=[LESS])
    for name in ("ablation", "main"):
        records.write(RESULTS / name)
    readme = Path("README.md")
    text = "# Title\n\n" + "old numbers\n".join(page.MARKS) + "\nThe rest.\n"
    readme.write_text(text)
    assert main(["study", "main", "--redraw"]) == 0
    assert readme.read_text() == text.replace("old numbers\n", page.findings(RESULTS))
    first, picture, other = filter(None, page.findings(RESULTS).splitlines())
    assert "(docs/results/main/table.md): lower: seen (-0.0950 nats/token, 95 %" in first
    assert Path(picture.partition("(")[2].rstrip(")")).is_file()
    assert other == "- " + first.replace("/main/", "/ablation/")
    readme.write_text("no marks")
    assert main(["study", "main", "--redraw"]) == 0
    assert readme.read_text() == "no marks"


# ---------------------------------------------------------------------------- compare


def test_runs_of_a_user_are_compared_by_the_same_rule(whole, tmp_path):
    runs, records, _ = whole
    folders = [runs.row_run(row, 4e-3, s).folder for row in runs.study.rows for s in range(2)]
    checkpoint = folders[0] / "checkpoints" / "step"
    checkpoint.mkdir(parents=True)
    made = compare(folders)
    assert checkpoint.is_dir()  # a user's, who may go on from it
    assert [run.loss for row in made.rows for run in row.runs] == [
        run.loss for row in records.rows for run in row.runs
    ]
    theirs, ours = stats.verdicts(made)[0], stats.verdicts(records)[0]
    assert theirs.estimate == ours.estimate
    assert theirs.word == NO_VERDICT
    arguments = ["study", "compare", *map(str, folders), "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert (tmp_path / "families.png").is_file()


# ---------------------------------------------------------------------------- the command


def test_a_dry_run_trains_nothing_and_says_how_long_it_may_take(corpus, tmp_path, capsys):
    command = ["study", write_study(tmp_path, STUDY), "--scale", "tiny", "--corpus", corpus]
    assert main([*command, "--cache", str(tmp_path / "cache"), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "6 of 6 runs to do" in said.err
    assert "looped-mesh, lr 0.004, seed 1, 4 steps" in said.out
    assert not list((tmp_path / "cache").glob("*/*/metrics.jsonl"))


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
        (["main", "--corpus", "/nowhere"], "--corpus /nowhere"),
        (["main", "--tasks", "paper"], "--data-dir"),
        (["main", "--redraw"], "records.json: no such file"),
        (["main", "runs/one"], "only `study compare`"),
        (["compare", "runs/one"], "two folders"),
        (["compare", "runs/one", "runs/two"], "runs/one: not the folder of a finished run"),
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
        ({"rows": [{"family": "spiral-b-mesh", "change": "mode"}]}, "rows[0].change 'mode'"),
        ({"rows": []}, "rows"),
        ({"sweeps": {}}, "did you mean 'sweep'"),
        ({"sweep": {"lrs": ["fast"]}}, "sweep.lrs[0] 'fast'"),
        ({"grid": {"depth": [1]}}, "grid.depth"),
        ({"seeds": 0}, "seeds 0"),
        ({"rows": ["looped-mesh", "looped-mesh"]}, "two are called 'looped-mesh'"),
        ({"claims": [{"says": "x", "source": "y", "less": ["a", "b"]}]}, "no row is called 'a'"),
    ],
)
def test_a_malformed_study_is_refused_by_field(change, said, tmp_path, capsys):
    assert main(["study", write_study(tmp_path, {**STUDY, **change})]) == 2
    assert said in capsys.readouterr().err


def test_damaged_records_are_refused_by_field(tmp_path, capsys):
    (tmp_path / "records.json").write_text(json.dumps({"study": "main"}))
    assert main(["study", "main", "--redraw", "--out", str(tmp_path)]) == 2
    assert "title is missing" in capsys.readouterr().err.lower()
