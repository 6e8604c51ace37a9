"""Laws of evaluation: perplexity, the harness's tasks, the tables, bad input.

Everything is made here: data, tokenizer and models; nothing comes from a network.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import datasets
import lm_eval
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import spiralformer.hf  # noqa: F401 (registers our model)
from spiralformer import cli, paper, presets
from spiralformer.config import SpiralConfig
from spiralformer.data.tokenizer import train_bpe
from spiralformer.evaluate import lm as lms
from spiralformer.evaluate import run, tables, tasks
from spiralformer.evaluate.lm import HuggingFaceLM, SpiralLM, load_lm
from spiralformer.evaluate.perplexity import Document, perplexity, windows
from spiralformer.evaluate.tasks import LAMBADA, MMLU, PAPER, quiet
from spiralformer.model import SpiralFormer
from spiralformer.model.loss import CHUNK
from spiralformer.model_folder import load_config, save_model

VOCAB = 320
MAX_LENGTH = 256
TEXT = "the cat sat on a red mat and saw two old dogs near some tall green trees by water"
WORDS = re.findall(r"\w+", TEXT)


@pytest.fixture(autouse=True)
def no_survey_of_the_machine(monkeypatch):
    """The harness takes seconds to describe the machine in each result."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")


# ---------------------------------------------------------------------------- made-up data


def sentence(seed: int, length: int = 6) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, length))


def rows_of(task: str, count: int, first: int = 0) -> list[dict]:
    """Rows in which the right answer is known from the text: it ends in `right`."""
    return [row_of(task.partition("_")[0], n) for n in range(first, first + count)]


def row_of(task: str, n: int) -> dict:
    text, good = sentence(n), f"{sentence(n, 2)} right"
    bad = [sentence(n + 7 * k, 3) for k in (1, 2, 3)]
    place, second = n % 4, n % 2
    choices = [*bad[:place], good, *bad[place:]]
    pair = [bad[0], good] if second else [good, bad[0]]
    names = ["wrong", "right"] if second else ["right", "wrong"]
    labels = list("ABCD")
    return {
        "lambada": {"text": f"{sentence(n, 8)} word{n}"},
        "hellaswag": {"activity_label": "Walking", "ctx_a": text, "ctx_b": "the man", "ctx": "-",
                      "endings": choices, "label": str(place)},
        "piqa": {"goal": text, "sol1": pair[0], "sol2": pair[1], "label": second},
        "winogrande": {"sentence": f"{text} _ ran {sentence(n + 1, 2)}.", "option1": names[0],
                       "option2": names[1], "answer": str(second + 1)},
        "arc": {"question": f"{text}?", "choices": {"text": choices, "label": labels},
                "answerKey": labels[place]},
        "sciq": {"question": f"{text}?", "correct_answer": good, "distractor1": bad[0],
                 "distractor2": bad[1], "distractor3": bad[2],
                 "support": sentence(n, 9) if second else ""},
        "mmlu": {"question": text, "subject": "anatomy" if place == 0 else "astronomy",
                 "choices": choices, "answer": place},
    }[task]  # fmt: skip


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


WIKITEXT = """
 = First Article = 

 The cat ( an old cat ) sat on a 1 @,@ 000 @-@ year mat . It 's red .

 = = A section = = 

 Two dogs saw " some trees " by water .

 = Second Article = 

 The trees , tall and green , sat near water ; the dogs saw a cat .
"""


def write_data(folder: Path) -> Path:
    """What --data-dir reads."""
    for task in PAPER.values():
        write_jsonl(folder / task.scored_file, rows_of(task.file, 12))
        if task.name not in LAMBADA:
            write_jsonl(folder / task.shots_file, rows_of(task.file, 20, first=100))
    write_jsonl(
        folder / "pile_sample.test.jsonl", [{"text": sentence(n, 5 + 9 * n)} for n in range(5)]
    )
    (folder / "wikitext2_raw.test.txt").write_text(WIKITEXT)
    return folder


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([WIKITEXT, *(sentence(n, 30) for n in range(20))], VOCAB).save(folder)
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory, tokenizer_folder) -> Path:
    torch.manual_seed(0)
    config = SpiralConfig(
        layout="1+1x{1/4,1/2,1}+1",
        hidden_size=32,
        num_heads=4,
        vocab_size=VOCAB + 4,  # padded, as the paper's is
        max_length=MAX_LENGTH,
        init_std=0.2,
    )
    folder = tmp_path_factory.mktemp("models") / "ours"
    return save_model(SpiralFormer(config), folder, tokenizer=tokenizer_folder)


@pytest.fixture(scope="module")
def neox(tmp_path_factory, tokenizer_folder) -> Path:
    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    folder = tmp_path_factory.mktemp("models") / "neox"
    with quiet():
        GPTNeoXForCausalLM(config).save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def our_lm(ours) -> SpiralLM:
    lm = load_lm(ours, batch_size=4)
    assert isinstance(lm, SpiralLM)
    return lm


@pytest.fixture(scope="module")
def neox_lm(neox) -> HuggingFaceLM:
    lm = load_lm(neox, batch_size=4)
    assert isinstance(lm, HuggingFaceLM)
    return lm


@pytest.fixture
def exact_lm(request, ours, neox) -> SpiralLM | HuggingFaceLM:
    """In float64, for each of both kinds."""
    lm = load_lm(ours if request.param == "ours" else neox)
    lm.model.double()
    if isinstance(lm, HuggingFaceLM):
        lm.softmax_dtype = torch.float64
    return lm


@pytest.fixture(scope="module")
def loaded(data_dir) -> dict[str, tasks.LoadedTask]:
    return tasks.load_tasks(list(PAPER), data_dir, 5)


DOCUMENTS = [Document(sentence(n, length)) for n, length in enumerate((1, 16, 4, 40, 9))]


# ---------------------------------------------------------------------------- perplexity


def logits_of(lm, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        out = lm.model(torch.tensor([ids]))
    return out[0] if isinstance(out, torch.Tensor) else out.logits[0]


def naive_loss(lm, text: str, context: int, stride: int) -> float:
    """A token at a time: which window scores it follows from its position alone."""
    tokens = [lm.prefix_token_id, *lm.tok_encode(text)]
    total = 0.0
    for i in range(1, len(tokens)):  # the target
        later = max(0, math.ceil((i - context) / stride))
        end = min(context + later * stride, len(tokens) - 1)
        begin = max(0, end - context)
        logits = logits_of(lm, tokens[begin:i])[-1]
        total -= float(torch.log_softmax(logits, -1)[tokens[i]])
    return total


@pytest.mark.parametrize("exact_lm", ["ours", "neox"], indirect=True)
def test_perplexity_equals_the_naive_loop(exact_lm):
    counts = sum(len(exact_lm.tok_encode(document.text)) for document in DOCUMENTS)
    for context, stride, size in [
        (None, None, 1), (None, None, 4), (32, None, 3), (32, 8, 5), (17, 5, 2), (20, 1, 16)
    ]:  # fmt: skip
        exact_lm.context, exact_lm.stride = context, stride
        setattr(exact_lm, "batch_size" if isinstance(exact_lm, SpiralLM) else "batch_size_per_gpu",
                size)  # fmt: skip
        result = perplexity(exact_lm, DOCUMENTS)
        context = context or MAX_LENGTH
        loss = sum(naive_loss(exact_lm, d.text, context, stride or context) for d in DOCUMENTS)
        assert result["tokens"] == counts
        assert result["loss"] == pytest.approx(loss, rel=1e-9)
        expected = math.exp(loss / counts)
        assert result["token_perplexity,none"] == pytest.approx(expected, rel=1e-6)


@given(st.integers(0, 200), st.integers(1, 50), st.integers(1, 50))
def test_every_token_is_scored_exactly_once(targets, context, stride):
    stride = min(stride, context)
    made = list(windows(targets, context, stride))
    scored = [i for _, scored_from, end in made for i in range(scored_from, end)]
    assert scored == list(range(targets))
    for k, (start, scored_from, end) in enumerate(made):
        assert start <= scored_from < end <= start + context
        assert k == 0 or end - start == context  # as much context as there is room for
        assert k == 0 or scored_from - start >= context - stride


def rolling(*texts: str) -> list[Instance]:
    return [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]


class KnownLM:
    """Each token costs what its id says; a token is a character."""

    def tok_encode(self, text):
        return [ord(c) for c in text]

    def loglikelihood_rolling(self, requests):
        return [-sum(self.tok_encode(request.args[0])) / 100 for request in requests]


def test_tokens_weigh_the_same_and_words_and_bytes_normalise():
    texts = ["aaa bb", "zzzz é zzzzzzzzzzzzzzzzzzzz"]
    result = perplexity(KnownLM(), [Document(text) for text in texts])
    loss = sum(map(ord, "".join(texts))) / 100
    tokens = sum(map(len, texts))
    for unit, count in (("token", tokens), ("word", 5), ("byte", tokens + 1)):  # é has two
        assert result[f"{unit}_perplexity,none"] == pytest.approx(math.exp(loss / count))
    assert result["bits_per_byte,none"] == pytest.approx(loss / (tokens + 1) / math.log(2))


def test_standard_error_is_that_of_drawing_documents():
    rng = np.random.default_rng(0)
    texts = ["".join(chr(c) for c in rng.integers(1, 300, rng.integers(5, 60))) for _ in range(60)]
    documents = [Document(text) for text in texts]
    result = perplexity(KnownLM(), documents)
    again = [
        perplexity(KnownLM(), [documents[k] for k in rng.integers(0, 60, 60)])[
            "token_perplexity,none"
        ]
        for _ in range(100)
    ]
    stderr = "token_perplexity_stderr,none"
    assert result[stderr] == pytest.approx(np.std(again), rel=0.25)
    assert perplexity(KnownLM(), documents[:1])[stderr] is None


def test_only_a_few_rows_of_logits_exist_at_once(our_lm, neox_lm, monkeypatch):
    documents = [Document(sentence(n, 400)) for n in range(8)]
    rows: list[int] = []
    count = lambda module, inputs, out: rows.append(out.shape[0])
    hook = our_lm.model.head.register_forward_hook(count)
    monkeypatch.setattr(our_lm, "batch_size", 8)
    perplexity(our_lm, documents)
    hook.remove()
    assert max(rows) <= CHUNK < sum(rows)

    rows.clear()
    monkeypatch.setattr(lms, "LOGITS", 2 * MAX_LENGTH * VOCAB)
    hook = neox_lm.model.get_output_embeddings().register_forward_hook(count)
    perplexity(neox_lm, documents)
    hook.remove()
    assert max(rows) == 2


def test_wikitext_is_what_the_harness_makes_of_it(our_lm):
    documents = [tasks.wikitext_document(page) for page in tasks.wikitext_pages(WIKITEXT)]
    assert [document.text.strip().split("\n")[0] for document in documents] == [
        "= First Article =",
        "= Second Article =",
    ]
    assert (
        "(an old cat) sat on a 1,000-year mat. It's red .\n\n== A section ==" in documents[0].text
    )
    first, second = WIKITEXT[1:].split("\n = Second")
    pages = [first, " = Second" + second]
    source = {
        "task": "wikitext",
        "custom_dataset": lambda **_: {
            "test": datasets.Dataset.from_list([{"page": page} for page in pages])
        },
        "training_split": None,
        "validation_split": None,
    }
    with quiet():
        folder = Path(lm_eval.tasks.__file__).parent / "wikitext"
        manager = TaskManager(include_path=folder, include_defaults=False)
        task = tasks.LoadedTask("wikitext", manager.load({"group": "g", "task": [source]}))
    expected = run.score_tasks(our_lm, {"wikitext": task}, 0)["results"]["wikitext"]
    result = perplexity(our_lm, documents)
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert result[f"{metric},none"] == pytest.approx(expected[f"{metric},none"], rel=1e-6)


# ---------------------------------------------------------------------------- log-likelihoods

PAIRS = [
    ("", " the cat"),
    ("the cat", " sat on a mat"),
    (sentence(1, 30), " " + sentence(2, 20)),
    ("the cat ", "sat"),  # the space belongs to the continuation
    ("a red", " mat"),
    ("a red", " dog"),  # one context, read once
    ("a red", " mat near the water"),
    (sentence(4, 400), " near water"),  # longer than the model's longest sequence
    (sentence(5, 60), " water"),
]


def requests(pairs=PAIRS) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, 0) for pair in pairs]


@pytest.mark.parametrize("size", [1, 3, 8])
def test_batched_scores_equal_one_at_a_time(our_lm, size, monkeypatch):
    alone = [our_lm.loglikelihood(requests([pair]))[0] for pair in PAIRS]
    monkeypatch.setattr(our_lm, "batch_size", size)
    monkeypatch.setattr(lms, "BATCHES", 2)
    together = our_lm.loglikelihood(requests())
    assert [ll for ll, _ in together] == pytest.approx([ll for ll, _ in alone], rel=1e-5)
    assert [greedy for _, greedy in together] == [greedy for _, greedy in alone]


def test_a_context_is_read_once_for_all_its_continuations(our_lm):
    context = our_lm.tok_encode(sentence(1, 30))
    answers = [our_lm.tok_encode(" " + sentence(k, 1 + k)) for k in range(4)]
    read: list[int] = []
    hook = our_lm.model.embedding.register_forward_hook(
        lambda module, inputs, out: read.append(inputs[0].numel())
    )
    shared = our_lm._loglikelihood_tokens([(None, context, answer) for answer in answers])
    hook.remove()
    assert read == [len(context), 4 * (max(map(len, answers)) - 1)]
    alone = [our_lm._loglikelihood_tokens([(None, context, answer)])[0] for answer in answers]
    assert [ll for ll, _ in shared] == pytest.approx([ll for ll, _ in alone], rel=1e-5)


@pytest.mark.parametrize("exact_lm", ["ours"], indirect=True)
def test_loglikelihood_is_that_of_the_continuation_given_the_context(exact_lm):
    """Also where a prompt is too long: it loses its beginning, and is counted."""
    for number, cut in ((2, 0), (7, 1)):
        context, continuation = PAIRS[number]
        tokens = exact_lm.tok_encode(context + continuation)[-(MAX_LENGTH + 1) :]
        begin = len(tokens) - len(exact_lm.tok_encode(continuation))
        logprobs = torch.log_softmax(logits_of(exact_lm, tokens[:-1]), -1)
        expected = sum(float(logprobs[i - 1, tokens[i]]) for i in range(begin, len(tokens)))
        ((ll, _),) = exact_lm.loglikelihood(requests([PAIRS[number]]))
        assert ll == pytest.approx(expected, rel=1e-9)
        assert exact_lm.truncated == cut


def test_greedy_is_said_of_what_the_model_would_generate(our_lm):
    context = our_lm.tok_encode("the cat sat")
    best = list(context)
    for _ in range(3):
        best.append(int(logits_of(our_lm, best)[-1].argmax()))
    wrong = [*best[:-1], (best[-1] + 1) % VOCAB]
    batch = [(None, context, ids[len(context) :]) for ids in (best, wrong)]
    assert [greedy for _, greedy in our_lm._loglikelihood_tokens(batch)] == [True, False]


@pytest.fixture(scope="module")
def ours_by_the_harness(ours) -> HFLM:
    with quiet():
        return HFLM(pretrained=str(ours), device="cpu", batch_size=4, softmax_dtype="float32")


def test_our_scores_equal_those_of_the_harnesss_own_class(our_lm, neox_lm, ours_by_the_harness):
    long = [sentence(3, 600), sentence(1, 16)]  # several windows, and one
    assert len(our_lm.tok_encode(long[0])) > 2 * MAX_LENGTH
    assert ours_by_the_harness.max_length == our_lm.max_length
    with quiet():
        expected = ours_by_the_harness.loglikelihood(requests())
        rolled = ours_by_the_harness.loglikelihood_rolling(rolling(*long))
        neox_rolled = HFLM.loglikelihood_rolling(neox_lm, rolling(*long))
    scores = our_lm.loglikelihood(requests())
    assert [ll for ll, _ in scores] == pytest.approx([ll for ll, _ in expected], rel=1e-4)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert our_lm.loglikelihood_rolling(rolling(*long)) == pytest.approx(rolled, rel=1e-5)
    assert neox_lm.loglikelihood_rolling(rolling(*long)) == pytest.approx(neox_rolled, rel=1e-5)


def test_our_answers_equal_those_of_the_harnesss_own_class(our_lm, ours_by_the_harness):
    """Of so many tokens, and up to the first of several stop strings."""

    def asked(until: list[str]) -> list[Instance]:
        settings = {"until": until, "max_gen_toks": 12}
        return [Instance("generate_until", {}, (sentence(k, 9), settings), 0) for k in (1, 2)]

    with quiet():
        whole = ours_by_the_harness.generate_until(asked(["never said"]))
        stops = [text[4:6] for text in whole]
        cut = ours_by_the_harness.generate_until(asked(stops))
    assert [len(text) for text in cut] < [len(text) for text in whole]
    assert our_lm.generate_until(asked(["never said"])) == whole
    assert our_lm.generate_until(asked(stops)) == cut


# ---------------------------------------------------------------------------- tasks


class StubLM(LM):
    """Answers are known: `belief(context, continuation)` is the log-likelihood."""

    def __init__(self, belief):
        super().__init__()
        self.belief, self.seen = belief, []

    def loglikelihood(self, requests):
        self.seen += [request.args for request in requests]
        answers = [self.belief(*request.args) for request in requests]
        return [answer if isinstance(answer, tuple) else (answer, False) for answer in answers]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    generate_until = loglikelihood_rolling


def score(lm, loaded, shots: int, limit: int | None = None) -> run.Evaluation:
    """An evaluation by any model of the harness."""
    return evaluation({f"{shots}-shot": run.score_tasks(lm, loaded, shots, limit)})


def evaluation(results: dict, name: str = "m", config: SpiralConfig | None = None):
    return run.Evaluation(name, Path(name), MAX_LENGTH, config, results)


def counts(evaluation: run.Evaluation, task: str, kind: str = "0-shot") -> int:
    return evaluation.results[kind]["results"][task]["sample_len"]


def likes_right(context: str, continuation: str) -> tuple[float, bool]:
    """Knows every answer: ours end in `right`, WinoGrande puts it into the context."""
    last = context.rsplit("\n\n", 1)[-1]
    good = continuation.endswith("right") or " right ran" in f"{last}{continuation}"
    return (-1.0 if good else -50.0), good


def hates_right(context: str, continuation: str) -> tuple[float, bool]:
    ll, good = likes_right(context, continuation)
    return -60 - ll, not good


def knows_anatomy(context: str, continuation: str) -> float:
    return likes_right(context, continuation)[0] * (1 if "about anatomy" in context else -1)


@pytest.mark.parametrize("shots", [0, 5])
def test_our_class_equals_the_harnesss_own_in_every_task(
    our_lm, ours_by_the_harness, loaded, shots
):
    ours = score(our_lm, loaded, shots, limit=6)
    theirs = score(ours_by_the_harness, loaded, shots, limit=6)
    for name in PAPER:
        expected = theirs.metrics(name, f"{shots}-shot")
        assert expected
        for metric, got in ours.metrics(name, f"{shots}-shot").items():
            wanted = expected[metric]
            assert got.value == pytest.approx(wanted.value, rel=1e-4), (name, metric)
            assert got.stderr == pytest.approx(wanted.stderr, rel=1e-3), (name, metric)


@pytest.mark.parametrize("shots", [0, 5])
@pytest.mark.parametrize(("belief", "share"), [(likes_right, 1.0), (hates_right, 0.0)])
def test_knowing_every_answer_is_100_percent_and_the_opposite_0(loaded, shots, belief, share):
    """In each task's every metric, by the metric that the paper reports too."""
    chosen = {name: task for name, task in loaded.items() if name not in LAMBADA}
    scored = score(StubLM(belief), chosen, shots)
    for name in chosen:
        metrics = scored.metrics(name, f"{shots}-shot")
        assert PAPER[name].metric in metrics
        assert {each.value for each in metrics.values()} == {share}, name
        assert counts(scored, name, f"{shots}-shot") == 12


def test_lambada_is_about_the_last_word(loaded):
    """Its perplexity, and the share of words that are the likeliest."""
    beliefs = {f" word{n}": (-1.0 - n, n < 3) for n in range(12)}
    stub = StubLM(lambda context, word: beliefs[word])
    scored = score(stub, {name: loaded[name] for name in LAMBADA}, 0)
    for name in LAMBADA:
        metrics = scored.metrics(name, "0-shot")
        expected = math.exp(-np.mean([ll for ll, _ in beliefs.values()]))
        assert metrics["perplexity"].value == pytest.approx(expected)
        assert metrics["perplexity"].stderr > 0
        stderr = np.std([1] * 3 + [0] * 9, ddof=1) / math.sqrt(12)
        assert metrics["acc"][:2] == pytest.approx((3 / 12, stderr))
        assert (metrics["acc"].higher, metrics["perplexity"].higher) == (True, False)
    assert all("word" not in context for context, _ in stub.seen)


def test_mmlu_weighs_subjects_by_their_size(loaded):
    """Three questions of anatomy, nine of astronomy: knowing only anatomy is 25 %."""
    mmlu = {MMLU: loaded[MMLU]}
    assert sorted(len(part.task_docs) for part in mmlu[MMLU].parts.values()) == [3, 9]
    scored = score(StubLM(knows_anatomy), mmlu, 0)
    assert scored.metrics(MMLU, "0-shot")["acc"].value == 0.25


def test_prompts_are_the_harnesss_with_so_many_examples(loaded, data_dir):
    """Also after a run with another number, whose prompts are gone."""
    for name, task in loaded.items():
        score(StubLM(likes_right), {name: task}, 0, limit=1)
        stub = StubLM(likes_right)
        score(stub, {name: task}, 5)
        shown = [context.split("\n\n") for context, _ in stub.seen]
        described = name == MMLU  # its prompts begin with a description
        assert {len(parts) for parts in shown} == {6 + described}, name
        if name not in LAMBADA:
            examples = (data_dir / PAPER[name].shots_file).read_text()
            part = shown[0][described].split("\n")[0].removeprefix("Question: ")
            assert part.removeprefix("Walking: ")[:20] in examples
        elif name == "lambada_standard":  # of the other, the harness takes no care
            for context, word in stub.seen:
                assert word.strip() not in context.split()  # never shown its own answer
        again = StubLM(likes_right)
        score(again, {name: task}, 5)
        assert stub.seen == again.seen


def test_limit_takes_the_first_examples_and_spreads_over_subjects(loaded, data_dir):
    some, everything = StubLM(likes_right), StubLM(knows_anatomy)
    chosen = {name: loaded[name] for name in ("piqa", MMLU)}
    scored = score(some, chosen, 0, limit=4)
    score(everything, chosen, 0)
    assert [counts(scored, name) for name in chosen] == [4, 4]
    assert some.seen[:8] == everything.seen[:8]  # two answers to each
    assert sum("about anatomy" in context for context, _ in some.seen) == 4 * 2
    half = score(StubLM(knows_anatomy), chosen, 0, limit=2)
    assert half.metrics(MMLU, "0-shot")["acc"].value == 0.5  # one example of each


# ---------------------------------------------------------------------------- tables


def made_up(values: dict[str, float], kind: str = "0-shot", config=None, **texts):
    """An evaluation with these percentages, and a perplexity of 9."""
    rows = {
        task: {f"{PAPER[task].metric},none": value / 100,
               f"{PAPER[task].metric}_stderr,none": 0.01,
               "perplexity,none": 9.0, "perplexity_stderr,none": 1.0}
        for task, value in values.items()
    }  # fmt: skip
    return evaluation({"texts": {"results": texts}, kind: {"results": rows}}, config=config)


def test_average_is_the_papers():
    checked = 0
    for (name, shots), printed in paper.TABLE_3.items():
        if (name, shots) == ("looped-410m-mesh", 5):
            continue  # its printed average is not that of its row, 45.60
        values = dict(zip(PAPER, printed.tasks, strict=True))
        mean = tables.accuracies(made_up(values), "0-shot")["Avg"]
        assert mean.value == pytest.approx(printed.average, abs=0.011), name
        assert mean.stderr == pytest.approx(100 * 0.01 / 3)
        checked += 1
    assert checked == len(paper.TABLE_3) - 1
    del values["sciq"]
    assert "Avg" not in tables.accuracies(made_up(values), "0-shot")


def cells(row: tables.Row) -> dict[str, float]:
    return {column: round(score.value, 2) for column, score in row.cells.items() if score}


def test_columns_are_the_papers_and_its_row_stands_beside_ours():
    assert tuple(task.column for task in PAPER.values()) == paper.TASKS
    normalised = [task.column for task in PAPER.values() if task.metric == "acc_norm"]
    assert normalised == ["HS", "PQ", "ARC-E", "ARC-C", "SciQ"]
    name = "spiral-b-160m-mesh"
    config = presets.preset(name).replace(max_length=1024)
    text = {"token_perplexity,none": 7.389, "word_perplexity,none": 54.598}
    mine = made_up(dict.fromkeys(PAPER, 40.0), config=config, pile=text, wikitext=text)
    first, third = tables.table_1([mine]), tables.table_3([mine])
    assert first.columns == ["Pile", "Wiki", "LD-O", "LD-S", "0-shot"]
    assert cells(first.rows[0]) == {
        "Pile": 7.39, "Wiki": 54.6, "LD-O": 9.0, "LD-S": 9.0, "0-shot": 40.0
    }  # fmt: skip
    assert list(cells(first.rows[1]).values()) == [11.29, 30.27, 43.27, 155.78, 39.73, 41.02]
    assert third.columns == [*paper.TASKS, "Avg"]
    assert set(cells(third.rows[0]).values()) == {40.0}
    assert cells(third.rows[1])["LD-O"] == 32.93
    assert tables.paper_name(presets.preset(name).replace(hidden_size=1536)) is None
    assert tables.paper_name(presets.preset("spiral-b-410m-mesh-mean")) == "spiral-b-410m-mesh-mean"
    assert tables.paper_name(presets.preset("spiral-b-nano-mesh")) is None


@pytest.mark.parametrize(
    ("metric", "one", "two", "bold"),
    [
        ("acc", (0.60, 0.03), (0.50, 0.03), [0]),
        ("acc", (0.50, 0.03), (0.60, 0.03), [1]),
        ("acc", (0.6001, 0.03), (0.50, 0.04), [0]),  # 2.0 errors of the difference, which is 0.05
        ("acc", (0.5999, 0.03), (0.50, 0.04), []),
        ("acc", (0.60, "N/A"), (0.50, 0.01), []),
        ("perplexity", (9.0, 0.1), (8.0, 0.1), [1]),
        ("unknown", (9.0, 0.1), (8.0, 0.1), []),  # nobody says whether more of it is better
        ("token_perplexity", (9.0, 0.1, 70), (8.0, 0.1, 70), [1]),
        ("token_perplexity", (9.0, 0.1, 70), (8.0, 0.1, 80), []),  # of different tokenizers
    ],
)
def test_bold_is_what_surpasses_all_others_beyond_the_error(metric, one, two, bold):
    directions = {"t": {"acc": True, "perplexity": False, "token_perplexity": False}}
    models = []
    for name, (value, stderr, *tokens) in (("one", one), ("two", two)):
        row = {f"{metric},none": value, f"{metric}_stderr,none": stderr, "tokens": sum(tokens)}
        results = {"results": {"t": row}, "higher_is_better": directions}
        models.append(evaluation({"texts": results, "0-shot": results}, name))
    for table in (tables.text_table(models), tables.other_table(models)):
        lines = table.render(plain=False).splitlines()[2:]
        assert [k for k, line in enumerate(lines) if "**" in line] == bold


def test_bold_compares_models_in_the_same_row_only():
    """Not with the other shots, and not with what the paper printed."""
    name = "spiral-b-160m-mesh"
    mine = made_up(dict.fromkeys(PAPER, 90.0), config=presets.preset(name))
    assert len(tables.table_3([mine]).rows) == 2
    assert "**" not in tables.table_3([mine]).render(plain=False)
    mine.results["5-shot"] = made_up(dict.fromkeys(PAPER, 70.0)).results["0-shot"]
    assert "**" not in tables.table_3([mine]).render(plain=False)
    del mine.results["5-shot"]
    worse = made_up(dict.fromkeys(PAPER, 80.0))
    assert tables.table_3([mine, worse]).render(plain=False).count("**") == 2 * 10
    assert tables.table_3([mine, worse]).render(plain=True).count("*") == 10


def test_the_extra_installs_what_is_needed():
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    packages = [re.match(r"\w+", each)[0] for each in extras["optional-dependencies"]["eval"]]
    assert set(packages) >= set(run.NEEDED)


# ---------------------------------------------------------------------------- the command


def evaluate(*arguments) -> int:
    return cli.main(["eval", *map(str, arguments)])


def results_of(out: Path, name: str) -> dict:
    return json.loads((out / f"{name}.json").read_text())["results"]


def test_one_command_gives_the_tables_of_several_models(ours, neox, data_dir, tmp_path, capsys):
    text = tmp_path / "notes.txt.gz"
    text.write_bytes(gzip.compress(b"the cat sat on a mat"))
    out = tmp_path / "out"
    assert evaluate(ours, neox, "--data-dir", data_dir, "--text-file", text, "--tasks", "paper",
                    "--out", out, "--batch-size", 16, "--limit", 5) == 0  # fmt: skip
    printed, progress = capsys.readouterr()
    assert "it/s" not in progress  # of the libraries
    assert printed == (out / "table.md").read_text()
    lines = [re.split(r" *\| *", line)[1:-1] for line in printed.splitlines() if line[:1] == "|"]
    assert "±: one standard error" in printed
    assert "Bold: better than every other model here" in printed
    labels = [line[0] for line in lines if line[0] in ("ours", "neox")]
    assert labels == ["ours", "neox"] * 3 + ["ours"] * 3 + ["neox"] * 3
    assert not [line for line in lines if "–" in line]
    for name in ("ours", "neox"):
        perplexities = results_of(out, f"{name}/texts")
        assert list(perplexities) == ["pile", "wikitext", str(text)]
        assert perplexities["pile"]["sample_len"] == 5
        first = next(line for line in lines if line[0] == name)
        pile = perplexities["pile"]["token_perplexity,none"]
        assert float(first[1].strip("*").split(" ±")[0]) == pytest.approx(pile, abs=0.01)
        for shots in (0, 5):
            assert results_of(out, f"{name}/{shots}-shot").keys() >= PAPER.keys()


TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "the mat is"
doc_to_choice: "{{{{colours}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
"""


def test_any_task_of_the_harness_can_be_named(ours, data_dir, tmp_path, capsys, monkeypatch):
    """Here one of a YAML file of ours, and the harness's own WikiText with a group's members. The
    paper's average stays that of its nine."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    write_jsonl(tmp_path / "c.jsonl", [{"colours": ["red", "green"], "label": k} for k in (0, 1)])
    (tmp_path / "colours.yaml").write_text(TASK.format(data=tmp_path / "c.jsonl"))
    arguments = (ours, "--data-dir", data_dir, "--shots", 0, "--limit", 3, "--out", tmp_path / "o")
    assert evaluate(*arguments, "--tasks", "paper", tmp_path / "colours.yaml") == 0
    with_it = capsys.readouterr().out
    assert results_of(tmp_path / "o" / "ours", "0-shot")["colours"]["acc,none"] == 0.5
    assert re.search(r"ours \| colours \| 0 \| acc \| 0.5000", with_it)
    assert evaluate(*arguments, "--tasks", "paper") == 0
    alone = capsys.readouterr().out
    assert with_it.split("\n\n")[:2] == alone.split("\n\n")[:2]  # Tables 1 and 3


def test_an_interrupted_evaluation_goes_on(ours, data_dir, tmp_path, capsys, monkeypatch):
    arguments = (ours, "--data-dir", data_dir, "--tasks", "pile,piqa,sciq", "--shots", 0, 2,
                 "--batch-size", 4)  # fmt: skip
    assert evaluate(*arguments, "--out", tmp_path / "straight") == 0
    straight = capsys.readouterr().out
    scored, answered, stop_after = SpiralLM._score, [], 9

    def counted(self, contexts, continuations):
        if len(answered) == stop_after:
            raise KeyboardInterrupt
        answered.append(sum(map(len, continuations)))
        return scored(self, contexts, continuations)

    monkeypatch.setattr(SpiralLM, "_score", counted)
    out = ("--out", tmp_path / "out")
    assert evaluate(*arguments, *out) == 130
    assert "the same command goes on" in capsys.readouterr().err
    before, stop_after = sum(answered), None
    assert evaluate(*arguments, *out) == 0
    assert capsys.readouterr().out == straight
    assert before > 5  # texts
    # 12 questions of two tasks with 2 and 4 answers, twice: nothing is scored again.
    assert sum(answered) == 5 + 2 * 12 * (2 + 4)
    answered.clear()
    assert evaluate(*arguments, *out) == 0
    assert not answered
    assert capsys.readouterr().out == straight


def test_what_decides_a_number_decides_the_cache(ours, data_dir, tmp_path, monkeypatch):
    scored, answered = SpiralLM._score, []
    monkeypatch.setattr(SpiralLM, "_score", lambda *a: answered.append(1) or scored(*a))
    copy, data, out = tmp_path / "ours", tmp_path / "data", tmp_path / "out"
    shutil.copytree(ours, copy)
    shutil.copytree(data_dir, data)

    def scores_anew(*more) -> bool:
        answered.clear()
        assert evaluate(copy, "--data-dir", data, "--tasks", "pile", "--out", out, *more) == 0
        return bool(answered)

    assert scores_anew()
    assert not scores_anew()
    assert not scores_anew("--batch-size", 1)
    assert not scores_anew("--limit", 2)
    assert scores_anew("--stride", 9)
    assert scores_anew("--context", 64)
    assert scores_anew("--dtype", "bfloat16")
    with (data / "pile_sample.test.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert scores_anew()
    save_model(SpiralFormer(load_config(copy)), copy, tokenizer=ours)
    assert scores_anew()


def test_missing_shots_are_no_matter_when_they_are_not_asked_for(ours, data_dir, tmp_path):
    shutil.copy(data_dir / "piqa.validation.jsonl", tmp_path)
    arguments = (ours, "--data-dir", tmp_path, "--tasks", "piqa", "--out", tmp_path / "out")
    assert evaluate(*arguments, "--shots", 0) == 0


# ---------------------------------------------------------------------------- bad input


@pytest.fixture
def refused(capsys, monkeypatch, ours, data_dir, tmp_path):
    """Runs the command; it must end with status 2 before a model is loaded, and say so."""

    def checked_only(folder, device, **settings):
        assert device == "meta"
        return load_lm(folder, device=device, **settings)

    monkeypatch.setattr(lms, "load_lm", checked_only)

    def check(*arguments, folder=ours, data=data_dir) -> str:
        source = () if data is None else ("--data-dir", data)
        assert evaluate(folder, *source, "--out", tmp_path / "out", *arguments) == 2
        return capsys.readouterr().err

    return check


@pytest.fixture
def own_data(data_dir, tmp_path) -> Path:
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


def test_a_folder_that_is_no_model_is_refused(refused, ours, neox, tmp_path):
    assert "no such folder" in refused(folder=tmp_path / "nowhere")
    copy = tmp_path / "run" / "last"
    shutil.copytree(ours, copy)
    assert f"did you mean {copy}?" in refused(folder=tmp_path / "run")
    (copy / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refused(folder=copy)
    (copy / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refused(folder=copy)
    shutil.copy(ours / "tokenizer.json", copy)
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors: damaged" in refused(folder=copy)
    (copy / "model.safetensors").unlink()
    assert "no weights" in refused(folder=copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"layout": "1+2x{1/4,1/2,1}+1"}))
    (copy / "model.safetensors").write_bytes(weights)
    assert "the weights do not fit config.json" in refused(folder=copy)

    other = tmp_path / "other"
    shutil.copytree(neox, other)
    for content, message in (
        ('{"model_type": "no_such_model"}', "no_such_model"),
        ('{"model_type": "t5"}', "T5Config'> for this kind of AutoModel"),
        ("{", "not JSON"),
    ):
        (other / "config.json").write_text(content)
        assert message in refused(folder=other)


@pytest.mark.parametrize("kind", ["ours", "neox"])
def test_a_tokenizer_that_does_not_fit_is_refused(refused, request, tmp_path, kind):
    copy = tmp_path / kind
    shutil.copytree(request.getfixturevalue(kind), copy)
    size = json.loads((copy / "config.json").read_text())["vocab_size"]
    train_bpe([WIKITEXT, *(sentence(n, 30) for n in range(20))], size + 1).save(copy)
    message = refused(folder=copy)
    assert f"its largest id is {size}, the model's vocabulary has {size}" in message
    assert str(copy) in message


def test_unknown_tasks_are_refused_with_the_nearest_names(refused):
    message = refused("--tasks", "piqa", "helaswag")
    assert "unknown task 'helaswag'; the nearest: hellaswag" in message


def test_missing_data_is_listed_with_the_flag(refused, own_data, tmp_path, monkeypatch):
    for name in ("hellaswag.validation", "mmlu.fewshot", "pile_sample.test"):
        (own_data / f"{name}.jsonl").unlink()
    message = refused(data=own_data)
    lacking = "pile_sample.test.jsonl, hellaswag.validation.jsonl, mmlu.fewshot.jsonl"
    assert f"--data-dir {own_data} lacks {lacking};" in message
    assert "mmlu" not in refused("--shots", 0, data=own_data)
    assert "no such folder" in refused(data=tmp_path / "nowhere")

    def no_hub(*args, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", no_hub)
    for name in ("piqa", "wikitext"):
        message = refused("--tasks", name, data=None)
        assert f"{name}: cannot be loaded: " in message
        assert "Couldn't reach the Hub; --data-dir" in message


BAD_ROWS = {
    "hellaswag.validation": {"label": "4"},
    "piqa.validation": {"label": 2},
    "winogrande.validation": {"answer": "3"},
    "arc_easy.test": {"answerKey": "E"},
    "sciq.test": {"support": None},
    "mmlu.test": {"answer": 9},
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_makes_no_question_is_refused_with_its_line(refused, own_data, name):
    path = own_data / f"{name}.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = json.dumps(json.loads(lines[4]) | BAD_ROWS[name])
    path.write_text("\n".join(lines))
    assert f"{path}:5: " in refused("--tasks", name.split(".")[0], data=own_data)


def test_unreadable_files_are_refused_with_their_line(refused, own_data, tmp_path):
    path = own_data / "piqa.validation.jsonl"
    first = path.read_bytes().split(b"\n")[0]
    for content, message in (
        (b'{"goal": "a", "sol1": "b"}\n' * 3, f"{path}: the harness cannot use its rows"),
        (first + b"\n{oops\n", f"{path}:2: not JSON"),
        (first + b"\n\n[1]\n", f"{path}:3: not a JSON object"),
        (first + b'\n{"goal": "\xff"}\n', f"{path}: cannot be read: not UTF-8 text"),
        (b"\n\n", f"{path}: empty"),
    ):
        path.write_bytes(content)
        assert message in refused("--tasks", "piqa", data=own_data)
    write_jsonl(own_data / "sciq.fewshot.jsonl", rows_of("sciq", 3))
    assert "3 examples are too few for 5 shots" in refused("--tasks", "sciq", data=own_data)
    write_jsonl(own_data / "mmlu.fewshot.jsonl", rows_of("mmlu", 16))
    message = "4 examples are too few for 5 shots of mmlu_anatomy_continuation"
    assert message in refused("--tasks", "mmlu", data=own_data)
    write_jsonl(own_data / "lambada_standard.test.jsonl", rows_of("lambada", 5))
    assert "5 examples are too few" in refused("--tasks", "lambada_standard", data=own_data)
    write_jsonl(own_data / "mmlu.test.jsonl", [rows_of("mmlu", 1)[0] | {"subject": "astrology"}])
    message = "no task mmlu_astrology_continuation"
    assert message in refused("--tasks", "mmlu", "--shots", 0, data=own_data)

    text, lines, packed = (tmp_path / name for name in ("a.txt", "a.jsonl", "a.txt.gz"))
    assert f"{text}: no such file" in refused("--text-file", text)
    for file, content, message in (
        (text, b" \n", f"{text}: empty"),
        (text, b"one\ntwo \xff\n", f"{text}: not UTF-8 at byte 8"),
        (lines, b'{"text": "a"}\n{"txt": "b"}\n', f"{lines}:2: no field 'text'"),
        (packed, b"not gzip", f"{packed}: truncated or damaged"),
    ):
        file.write_bytes(content)
        assert message in refused("--text-file", file)


def test_impossible_settings_are_refused(refused, ours, tmp_path):
    assert "--stride 9 is longer than --context 8" in refused("--context", 8, "--stride", 9)
    message = f"--context 300 is longer than the longest sequence of {ours}, 256"
    assert message in refused("--context", 300)
    for flag in ("--limit", "--context", "--stride", "--batch-size"):
        assert f"{flag} 0 must be at least 1" in refused(flag, 0)
    assert "--shots -1" in refused("--shots", -1)
    assert "--device nonsense" in refused("--device", "nonsense")
    assert "the same folder was given twice" in refused(ours / ".." / "ours")
    (tmp_path / "file").touch()
    assert "choose another --out" in refused("--out", tmp_path / "file")


def test_nothing_of_the_harness_is_imported_for_help():
    code = (
        "import sys; from spiralformer import cli\n"
        "try: cli.main(['eval', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'lm_eval', 'datasets', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "lm-evaluation-harness" in done.stdout
