"""The picture says what the model does: what it shows to reach a token reaches it, nothing else."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from spiralformer import diagram, reference
from spiralformer.accounting import batches_at
from spiralformer.config import SpiralConfig
from spiralformer.decode.algorithm import step
from spiralformer.decode.runner import Runner
from spiralformer.decode.state import DecodeState
from spiralformer.model_folder import save_model
from spiralformer.presets import preset
from tests.strategies import VOCAB, build, configs, tokens

LENGTH = 24
SPIRAL = preset("spiral-b-nano-mesh")


def bare(config: SpiralConfig) -> SpiralConfig:
    """The loop alone: f_pre and f_post would let every earlier token reach every later one."""
    layout = config.parsed_layout
    cores = f"{layout.cores[0]}x{{{','.join(map(str, layout.resolutions))}}}"
    if not layout.tied:
        cores = "+".join(map(str, layout.cores))
    return config.replace(layout=f"0+{cores}+0")


def shown(config: SpiralConfig) -> torch.Tensor:
    """(i, k): whether the picture lets token k reach the output at i, through all iterations. A
    token keeps its own state by the topology, unless updates replace it."""
    reaches = torch.eye(LENGTH, dtype=torch.bool)
    start = reaches
    for iteration in config.iterations:
        rows = [
            reaches[list(diagram.reached(iteration, i))].any(0)
            | (reaches if config.topology == "mesh" else start)[i] * (config.topology != "none")
            for i in range(LENGTH)
        ]
        reaches = torch.stack(rows)
    return reaches


def seen(logits_of, ids: torch.Tensor) -> torch.Tensor:
    """(i, k): whether the logits at i change when token k does."""
    changed = ids.repeat(LENGTH, 1)
    changed.fill_diagonal_(0)
    changed += torch.diag((ids + 5) % VOCAB)
    difference = torch.stack([logits_of(row) for row in changed]) - logits_of(ids)
    return (difference.abs().amax(-1) > 1e-13).T


@settings(max_examples=40)
@given(configs(max_chunk=9))
def test_exactly_the_tokens_shown_reach_a_token(config):
    model = build(bare(config))
    with torch.no_grad():
        reaches = seen(lambda row: model(row[None])[0], tokens(LENGTH))
    assert torch.equal(shown(model.config), reaches)


@pytest.mark.parametrize("shift", ["overlap", "parallel"])
def test_the_oracle_sees_what_is_shown_at_each_iteration(shift):
    for resolution in ("1/8", "1/4", "1/2", "1"):
        config = SPIRAL.replace(
            layout=f"0+1x{{{resolution}}}+0",
            shift=shift,
            topology="none",
            hidden_size=32,
            vocab_size=VOCAB,
        )
        model = build(config)
        with torch.no_grad():
            reaches = seen(lambda row, model=model: reference.logits(model, row), tokens(LENGTH))
        assert torch.equal(shown(config), reaches)


@settings(max_examples=40)
@given(configs(max_chunk=9))
def test_decoding_runs_the_core_where_it_is_shown(config):
    model, ran = build(config), []

    class Watched(Runner):
        def stack(self, stack, inputs, *rest):
            if any(stack is core for core in model.cores):
                ran.append(len(inputs))
            return super().stack(stack, inputs, *rest)

    state, watched = DecodeState.empty(model, 1), Watched()
    for i, token in enumerate(tokens(LENGTH)):
        ran.clear()
        step(model, state, token[None], watched)
        assert ran == [len(batch) for batch in batches_at(config, i)]
        runs = diagram.passes(config, i)
        assert [len(re.findall(r"\d+", run)) for run in runs.split(", then ")] == (ran or [0])


def test_the_papers_example_in_words():
    config = SPIRAL.replace(offset="zero")
    assert diagram.describe(config, 7) == [
        "Token 7",
        "pre: attends to tokens 0–7.",
        "iteration 0 at 1/8: reads chunk 0 (tokens 0–7), which attended to chunk 0, so tokens 0–7.",
        "iteration 1 at 1/4: reads chunk 1 (tokens 4–7), which attended to chunks 0–1, "
        "so tokens 0–7.",
        "iteration 2 at 1/2: reads chunk 3 (tokens 6–7), which attended to chunks 0–3, "
        "so tokens 0–7.",
        "iteration 3 at 1: reads itself, which attended to tokens 0–7.",
        "post: attends to tokens 0–7.",
        "Decoding it runs the core for iterations 0, then 1, then 2, then 3.",
    ]
    assert diagram.describe(config, 6)[2].startswith("iteration 0 at 1/8: reads nothing")
    assert diagram.describe(config, 6)[-1] == "Decoding it runs the core for iteration 3."
    parallel = diagram.describe(config.replace(shift="parallel"), 7)
    assert parallel[-1] == "Decoding it runs the core for iterations 0 and 1 and 2 and 3 at once."


# ---------------------------------------------------------------------------- files


class Outside(HTMLParser):
    """What a page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = re.findall(r"@import|url\(|fetch\(|import\(", text)
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.fetched += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]


@settings(max_examples=10)
@given(configs(max_chunk=20))
def test_every_picture_shows_every_run_and_every_page_stands_alone(config):
    root = ElementTree.fromstring(diagram.svg(config))
    runs = sum(len(batches_at(config, i)) for i in range(diagram.length(config)))
    assert sum(element.get("class") == "batch" for element in root.iter()) == runs
    assert not Outside(diagram.page(config, "model")).fetched


def test_a_name_with_markup_cannot_break_the_page():
    assert "<b>&me" not in diagram.page(SPIRAL, "<b>&me</b>")


def test_layouts_presets_files_and_folders_are_drawn(run_command, tmp_path):
    small = SPIRAL.replace(hidden_size=32)
    save_model(build(small), tmp_path / "run" / "model")
    (tmp_path / "own.json").write_text((tmp_path / "run" / "model" / "config.json").read_text())
    expected = diagram.svg(SPIRAL)
    for named in (SPIRAL.layout, "spiral-b-nano-mesh", tmp_path / "run", tmp_path / "run/model"):
        assert run_command("diagram", named) == (0, expected, "")
    status, said, _ = run_command("diagram", "12", "--out", tmp_path / "deep" / "plain.svg")
    assert (status, said) == (0, f"{tmp_path}/deep/plain.svg is written.\n")
    assert (tmp_path / "deep" / "plain.svg").read_text() == diagram.svg(small.replace(layout="12"))
    assert run_command("diagram", "12", "--out", tmp_path / "plain.html")[0] == 0
    assert "<title>12</title>" in (tmp_path / "plain.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["4+8x{"], "layout '4+8x{': not a layout; write"),
        (["spiral-b-nano"], "unknown preset 'spiral-b-nano'; the nearest are"),
        (["12", "--out", "plain.png"], "--out plain.png: end it in .svg or .html"),
        (["12", "--out", "file/plain.svg"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_line(run_command, arguments, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    status, printed, errors = run_command("diagram", *arguments)
    assert (status, printed, errors.count("\n")) == (2, "", 1)
    assert remedy in errors
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
