"""Laws of generation, and its command."""

import io
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spiralformer import SpiralConfig, load
from spiralformer.cli import main
from spiralformer.data.tokenizer import byte_tokenizer
from spiralformer.decode import (
    GREEDY,
    Batch,
    RequestError,
    Row,
    Sampling,
    StateError,
    generate,
    prefill,
    step,
    stream,
)
from spiralformer.decode.generate import TextStream, penalise, probabilities
from spiralformer.model_folder import load_model, save_model
from tests.strategies import VOCAB, build, configs, tokens

CONFIG = SpiralConfig(
    layout="1+1x{1/4,1/3,1}+1", hidden_size=32, num_heads=4, vocab_size=VOCAB, max_length=96
)
RAGGED = [tokens(n, seed=n).tolist() for n in (1, 5, 12)]


def naive_greedy(model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("shift", ["overlap", "parallel"])
def test_greedy_equals_rerunning_the_whole_prefix(shift):
    model = build(CONFIG.replace(shift=shift))
    got = generate(model, RAGGED, max_new_tokens=20)
    assert got == [naive_greedy(model, prompt, 20) for prompt in RAGGED]


def test_a_sampled_row_does_not_depend_on_its_batch():
    model = build(CONFIG)
    sampling = Sampling(temperature=1.3, top_k=9, top_p=0.95, seed=7)
    together = generate(model, RAGGED, max_new_tokens=16, sampling=sampling)
    for b, prompt in enumerate(RAGGED):
        alone = Sampling(temperature=1.3, top_k=9, top_p=0.95, seed=7 + b)
        assert generate(model, [prompt], max_new_tokens=16, sampling=alone) == [together[b]]
    other = Sampling(temperature=1.3, top_k=9, top_p=0.95, seed=100)
    assert generate(model, RAGGED, max_new_tokens=16, sampling=other) != together


def test_rows_end_by_themselves_at_stop_ids():
    model = build(CONFIG)
    free = generate(model, RAGGED, max_new_tokens=20)
    stop = free[1][3]
    got = generate(model, RAGGED, max_new_tokens=20, stop_ids=[stop])
    for one, whole in zip(got, free, strict=True):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert one == whole[:end]


def test_generation_ends_when_the_longest_sequence_is_full():
    model = build(CONFIG.replace(max_length=16))
    assert len(generate(model, [RAGGED[2]], max_new_tokens=50)[0]) == 16 - 12 + 1


def test_tokens_stream_one_at_a_time():
    model = build(CONFIG)
    seen = []
    for row, token in stream(model, RAGGED, max_new_tokens=3):
        seen.append(row)
        assert 0 <= token < VOCAB
    assert seen == [0, 1, 2] * 3


def continue_in_turn(model, arrivals: dict[Row, int], cancelled: dict[Row, int]) -> None:
    """Rows join before the step that is given for them, and are cancelled after so many tokens.
    Each logit is compared with the forward pass over the row's whole text."""
    batch, waiting, now = Batch(model), dict(arrivals), 0
    while waiting or batch.rows:
        batch.advance()
        for row in [row for row, at in waiting.items() if at <= now]:
            del waiting[row]
            hidden, state = prefill(model, torch.tensor([row.prompt]), last=True)
            batch.join([row], state, hidden[:, 0])
        for row, _, logits in batch.choose():
            text = torch.tensor([[*row.prompt, *row.new[:-1]]])
            with torch.no_grad():
                torch.testing.assert_close(logits, model(text)[0, -1], rtol=0, atol=1e-9)
            if len(row.new) == cancelled.get(row):
                row.ended = "cancelled"
        now += 1


def alone(model, row: Row) -> list[int]:
    [new] = generate(model, [row.prompt], max_new_tokens=row.max_new_tokens, sampling=row.sampling)
    return new


@given(
    configs(),
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 14), st.integers(0, 12), st.integers(1, 20)),
        min_size=1,
        max_size=5,
    ),
)
def test_rows_that_join_and_leave_between_tokens_get_what_they_get_alone(config, rows):
    """Each row: length of its prompt, of its answer, when it joins, and when it is cancelled."""
    model = build(config)
    arrivals, cancelled = {}, {}
    for b, (length, count, at, end) in enumerate(rows):
        row = Row(tokens(length, seed=b).tolist(), count, Sampling(1.2, top_k=9, seed=b))
        arrivals[row], cancelled[row] = at, end
    continue_in_turn(model, arrivals, cancelled)
    for row, end in cancelled.items():
        assert row.new == alone(model, row)[:end]
        assert row.ended == ("max_new_tokens" if row.max_new_tokens < end else "cancelled")


@pytest.mark.parametrize("shift", ["overlap", "parallel"])
@pytest.mark.parametrize("left", range(6))
@pytest.mark.parametrize("joined", range(6))
def test_rows_join_and_leave_at_every_phase_of_every_chunk(joined, left, shift):
    """Chunks of 3 and 2: a batch of any phase is joined by a row of any phase, and left."""
    model = build(CONFIG.replace(layout="1+1x{1/3,1/2}+0", shift=shift))
    first = Row(tokens(2).tolist(), joined + 1 + left)
    second = Row(tokens(1 + left, seed=1).tolist(), 8)
    continue_in_turn(model, {first: 0, second: joined}, {})
    assert [first.new, second.new] == [alone(model, first), alone(model, second)]


def test_a_joined_state_can_be_truncated_as_far_as_its_rows_could():
    model, ids = build(CONFIG), tokens(2, 20)
    _, state = prefill(model, ids[:1, :9], history=4)
    _, other = prefill(model, ids[1:, :14], capacity=40)
    state.join(other)
    assert (state.lengths, state.oldest) == ([9, 14], [5, 14])
    state.truncate(model, [6, 14])
    texts = torch.cat((ids[0, :6], ids[1, :1])), torch.cat((ids[1, :14], ids[0, :1]))
    out = model.head(step(model, state, torch.stack((ids[1, 0], ids[0, 0]))))
    for row, text in enumerate(texts):
        torch.testing.assert_close(out[row], model(text[None])[0, -1].detach(), rtol=0, atol=1e-9)
    with pytest.raises(StateError, match="another model"):
        state.join(prefill(build(CONFIG.replace(offset="zero")), ids)[1])


def test_the_cuts_keep_what_they_say():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    plain = logits.double().softmax(-1)

    def kept(**cut) -> list[int]:
        return probabilities(logits, Sampling(**cut)).nonzero().flatten().tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=float(plain[0]) + 1e-6) == [0, 1]
    assert kept(top_p=float(plain[0]) - 1e-6) == [0]
    assert kept(min_p=0.13) == [0, 1, 2]  # e^-2 = 0.135 of the likeliest
    assert kept(min_p=0.14) == [0, 1]
    hot = probabilities(logits, Sampling(temperature=2.0))
    torch.testing.assert_close(hot, (logits.double() / 2).softmax(-1))
    assert probabilities(logits, Sampling(top_k=3, top_p=0.9)).sum() == pytest.approx(1)


def test_repetition_penalty_lowers_seen_tokens_whatever_their_sign():
    out = penalise(torch.tensor([2.0, -2.0, 1.0]), [0, 1, 1], 2.0)
    assert out.tolist() == [1.0, -4.0, 1.0]


def test_text_stream_holds_back_stop_strings_and_unfinished_characters():
    raw = "né STOP rest".encode()
    text = TextStream(lambda ids: bytes(ids).decode(errors="replace"), ["STOP"])
    pieces = [text.push(list(raw[: n + 1])) for n in range(len(raw))]
    assert "".join(pieces) == "né "
    assert pieces[:3] == ["n", "", "é"]
    assert text.stopped(list(raw[:8]))
    assert not text.stopped(list(raw[:7]))


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([], 5, "no prompt"),
        ([[]], 5, "prompt 0 is empty"),
        ([[1], [VOCAB]], 5, f"prompt 1 has token {VOCAB}, outside 0…{VOCAB - 1}"),
        ([[1] * 97], 5, "prompt 0 has 97 tokens, and the model's max_length is 96"),
        ([[1]], 0, "max_new_tokens 0"),
    ],
)
def test_bad_requests_are_refused(prompts, count, message):
    with pytest.raises(RequestError, match=message):
        generate(build(CONFIG), prompts, max_new_tokens=count, sampling=GREEDY)


@pytest.mark.parametrize("wrong", [{"top_p": 0}, {"temperature": -1}, {"min_p": 2}, {"top_k": -1}])
def test_bad_sampling_is_refused(wrong):
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Sampling(**wrong)


# ---------------------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    model = build(CONFIG.replace(vocab_size=tokenizer.vocab_size), dtype=torch.float32)
    save_model(model, tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_prints_the_continuation_and_its_speed(folder):
    command = [sys.executable, "-m", "spiralformer.cli", "generate", str(folder)]
    command += ["--prompt", "def f", "--max-new-tokens", "9", "--temperature", "0"]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"def f")
    assert b"tokens/s" in done.stderr


GREEDILY = ["--max-new-tokens", "9", "--temperature", "0"]


def test_a_prompt_is_the_same_wherever_it_comes_from(folder, tmp_path, run_command, monkeypatch):
    """Given, of a file, of a file of lines, piped, or typed on a terminal."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def answer(*arguments: str, stdin: io.StringIO | None = None) -> str:
        monkeypatch.setattr("sys.stdin", stdin or io.StringIO())
        status, out, _ = run_command("generate", folder, *GREEDILY, *arguments)
        assert status == 0
        return out

    one, two = (answer("--prompt", text) for text in ("def f", "né"))
    assert one.startswith("def f")
    assert one != "def f\n"
    (tmp_path / "prompt").write_text("def f")
    assert answer("--prompt-file", str(tmp_path / "prompt")) == one
    assert answer(stdin=io.StringIO("def f\n")) == one
    assert answer("--prompt", "def f", stdin=io.StringIO("another")) == one
    (tmp_path / "prompts").write_text("def f\n\nné\n")
    assert answer("--prompts-file", str(tmp_path / "prompts")) == f"── 'def f'\n{one}── 'né'\n{two}"
    long = "x" * 97  # longer than the model's longest sequence: said, and the next line is read
    typed = Terminal(f"def f\n\n{long}\nné\n")
    assert answer(stdin=typed) == f"> {one}> > > {two}> "


def test_json_lines_say_what_ended_each_sample(folder, tmp_path, run_command, monkeypatch):
    prompts = [f"x{n}" for n in range(3)]
    (tmp_path / "prompts").write_text("\n".join(prompts))
    given = ("--prompts-file", tmp_path / "prompts", "--samples", 2, "--seed", 5, "--json")

    def records(*arguments) -> list[dict]:
        status, out, _ = run_command("generate", folder, "--max-new-tokens", 6, *arguments)
        assert status == 0
        return [json.loads(line) for line in out.splitlines()]

    together = records(*given)
    assert [(r["prompt"], r["sample"]) for r in together] == [
        (p, k) for p in prompts for k in (0, 1)
    ]
    assert together[0]["continuation"] != together[1]["continuation"]
    for n, record in enumerate(together):  # each draws from a seed of its own
        assert record["ended_by"] == "max_new_tokens"
        alone = records("--prompt", record["prompt"], "--seed", 5 + n, "--json")
        assert alone == [record | {"sample": 0}]
    monkeypatch.setattr("spiralformer.commands.generate.ROWS", 4)
    assert records(*given) == together
    text = together[0]["continuation"]
    [stopped] = records("--prompt", "x0", "--seed", 5, "--json", "--stop", text[1])
    assert stopped["ended_by"] == "stop"
    assert stopped["continuation"] == text[: text.index(text[1])]


def test_the_end_of_the_longest_sequence_is_said(folder, run_command):
    prompt = ("--prompt", "x" * 90)
    _, _, said = run_command("generate", folder, *prompt, "--max-new-tokens", 7)
    assert "longest sequence" not in said
    _, _, said = run_command("generate", folder, *prompt, "--max-new-tokens", 8, "--ignore-eos")
    assert "note: ended at the model's longest sequence, 96 tokens" in said
    several = ("--prompt", "y", "--max-new-tokens", 8, "--ignore-eos", "--json")
    _, out, said = run_command("generate", folder, *prompt, *several)
    assert "note: 1 of 2 ended at the model's longest sequence" in said
    ends = [json.loads(line)["ended_by"] for line in out.splitlines()]
    assert ends == ["max_length", "max_new_tokens"]


def test_end_of_text_ends_a_row_and_is_not_shown(folder, run_command):
    """Also where the tokenizer does not call the token special."""
    tokenizer, (new,) = byte_tokenizer(), generate(load_model(folder), [[120]], max_new_tokens=9)
    end = tokenizer.backend.id_to_token(new[2])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    _, out, _ = run_command("generate", folder, *GREEDILY, "--prompt", "x", "--json")
    before = new.index(new[2])
    assert json.loads(out) == {
        "prompt": "x",
        "sample": 0,
        "continuation": tokenizer.decode(new[:before]),
        "new_tokens": before + 1,
        "ended_by": "end_of_text",
    }
    said = load(folder).generate("x", max_new_tokens=9, temperature=0)
    assert said == f"x{tokenizer.decode(new[:before])}"
    _, out, _ = run_command("generate", folder, *GREEDILY, "--prompt", "x", "--ignore-eos")
    assert out == f"x{tokenizer.decode(new)}\n"


def test_a_tokenizer_file_of_any_name_becomes_the_folders_tokenizer(folder, tmp_path):
    named = tmp_path / "20B_tokenizer.json"
    named.write_bytes((folder / "tokenizer.json").read_bytes())
    save_model(build(CONFIG), tmp_path / "other", tokenizer=named)
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == named.read_bytes()


def damage(folder, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "missing weights":
        weights.unlink()
    elif how == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "another model":
        config.write_text(json.dumps({"model_type": "llama"}))
    elif how == "weights of another size":
        config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing weights", "model.safetensors: no such file"),
        ("truncated weights", "model.safetensors: damaged"),
        ("another model", "model_type is 'llama', not 'spiralformer'"),
        ("weights of another size", "the weights do not fit config.json: of another shape are"),
        ("no tokenizer", "has no tokenizer.json"),
    ],
)
def test_a_damaged_checkpoint_is_said_in_a_line(folder, capsys, how, message):
    damage(folder, how)
    assert main(["generate", str(folder), "--prompt", "x"]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_wrong_arguments_are_said_in_a_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for extra, message in (
        ([], "give a prompt"),
        (["--prompt", "x", "--samples", "0"], "--samples 0 must be at least 1"),
        (["--prompt", ""], "prompt 0 is empty"),
        (["--prompt", "x", "--top-p", "0"], "top_p 0.0 must be in (0, 1]"),
        (["--prompt-file", str(tmp_path / "nowhere")], "nowhere: no such file"),
        (["--prompt", "x", "--device", "nowhere"], "--device nowhere: cannot be used here"),
        (["--prompt", "x", "--prompt", "x" * 97], "prompt 1 has 97 tokens"),
    ):
        assert main(["generate", str(folder), *extra]) == 2
        assert message in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert "no such folder" in capsys.readouterr().err
