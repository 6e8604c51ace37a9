"""Laws of evaluation: perplexity, the harness's tasks, the cache, the tables, bad input.

Everything is made here: data, tokenizer and models; nothing comes from a network.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import spiralformer.hf  # noqa: F401 (registers our model)
from spiralformer import cli, paper, presets
from spiralformer.config import SpiralConfig
from spiralformer.data.tokenizer import train_bpe
from spiralformer.evaluate import harness, models, report, run, tasks
from spiralformer.evaluate.models import HFScorer, SpiralScorer, load_scorer
from spiralformer.evaluate.perplexity import perplexity, windows
from spiralformer.evaluate.progress import quiet
from spiralformer.evaluate.tasks import TASKS, Document
from spiralformer.model import SpiralFormer
from spiralformer.model.loss import CHUNK
from spiralformer.model_folder import save_model

VOCAB = 320
MAX_LENGTH = 256
TEXT = "the cat sat on a red mat and saw two old dogs near some tall green trees by water"
WORDS = re.findall(r"\w+", TEXT)


# ---------------------------------------------------------------------------- made-up data


def sentence(seed: int, length: int = 6) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, length))


def rows_of(task: str, count: int, first: int = 0) -> list[dict]:
    """Rows in which the right answer is known from the text: it ends in `right`."""
    rows: list[dict] = []
    for n in range(first, first + count):
        good, bad = [f"{sentence(n, 2)} right"], [f"{sentence(n + 7 * k, 3)}" for k in (1, 2, 3)]
        place = n % 4
        choices = bad[:place] + good + bad[place:]
        if task.startswith("lambada"):
            rows.append({"text": f"{sentence(n, 8)} word{n}"})
        elif task == "hellaswag":
            rows.append(
                {
                    "activity_label": "Walking",
                    "ctx_a": sentence(n),
                    "ctx_b": "the man",
                    "ctx": "unused",
                    "endings": choices,
                    "label": str(place),
                }
            )
        elif task == "piqa":
            pair = [bad[0], good[0]] if n % 2 else [good[0], bad[0]]
            rows.append({"goal": sentence(n), "sol1": pair[0], "sol2": pair[1], "label": n % 2})
        elif task == "winogrande":
            rows.append(
                {
                    "sentence": f"{sentence(n)} _ ran {sentence(n + 1, 2)}.",
                    "option1": "wrong" if n % 2 else "right",
                    "option2": "right" if n % 2 else "wrong",
                    "answer": "2" if n % 2 else "1",
                }
            )
        elif task.startswith("arc"):
            labels = list("ABCD")
            rows.append(
                {
                    "question": f"{sentence(n)}?",
                    "choices": {"text": choices, "label": labels},
                    "answerKey": labels[place],
                }
            )
        elif task == "sciq":
            rows.append(
                {
                    "question": f"{sentence(n)}?",
                    "correct_answer": good[0],
                    **{f"distractor{k + 1}": bad[k] for k in range(3)},
                    "support": sentence(n, 9) if n % 2 else "",
                }
            )
        else:
            subject = "anatomy" if n % 4 == 0 else "astronomy"
            rows.append(
                {"question": sentence(n), "subject": subject, "choices": choices, "answer": place}
            )
    return rows


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


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for task in TASKS.values():
        write_jsonl(folder / task.eval_file, rows_of(task.file, 12))
        if not task.name.startswith("lambada"):
            write_jsonl(folder / task.shots_file, rows_of(task.file, 20, first=100))
    write_jsonl(
        folder / "pile_sample.test.jsonl", [{"text": sentence(n, 5 + 9 * n)} for n in range(5)]
    )
    (folder / "wikitext2_raw.test.txt").write_text(WIKITEXT)
    return folder


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
def our_scorer(ours) -> SpiralScorer:
    scorer = load_scorer(models.inspect(ours), device="cpu")
    assert isinstance(scorer, SpiralScorer)
    return scorer


@pytest.fixture(scope="module")
def neox_scorer(neox) -> HFScorer:
    scorer = load_scorer(models.inspect(neox), device="cpu")
    assert isinstance(scorer, HFScorer)
    return scorer


@pytest.fixture(scope="module")
def exact_scorers(ours, neox) -> dict[str, SpiralScorer | HFScorer]:
    """The same in float64."""
    mine = load_scorer(models.inspect(ours), device="cpu")
    other = load_scorer(models.inspect(neox), device="cpu")
    assert isinstance(mine, SpiralScorer)
    assert isinstance(other, HFScorer)
    mine.model.double()
    other.lm.model.double()
    return {"ours": mine, "neox": other}


@pytest.fixture(scope="module")
def loaded(data_dir) -> dict[str, harness.LoadedTask]:
    return harness.load_local({n: tasks.read_task(t, data_dir, 5) for n, t in TASKS.items()})


DOCUMENTS = [Document.of(sentence(n, length)) for n, length in enumerate((1, 16, 4, 40, 9))]


# ---------------------------------------------------------------------------- perplexity


def logits_of(scorer, ids: list[int]) -> torch.Tensor:
    batch = torch.tensor([ids])
    with torch.no_grad():
        return (
            scorer.model(batch)[0] if hasattr(scorer, "model") else scorer.lm.model(batch).logits[0]
        )


def naive_loss(scorer, text: str, context: int, stride: int) -> tuple[float, int]:
    """A token at a time: which window scores it follows from its position alone."""
    tokens = [scorer.prefix, *scorer.encode(text)]
    total = 0.0
    for i in range(1, len(tokens)):  # the target
        later = max(0, math.ceil((i - context) / stride))
        end = min(context + later * stride, len(tokens) - 1)
        begin = max(0, end - context)
        logits = logits_of(scorer, tokens[begin:i])[-1]
        total -= float(torch.log_softmax(logits, -1)[tokens[i]])
    return total, len(tokens) - 1


@pytest.mark.parametrize("kind", ["ours", "neox"])
@pytest.mark.parametrize(
    ("context", "stride", "batch_size"),
    [(None, None, 1), (None, None, 4), (32, None, 3), (32, 8, 5), (17, 5, 2), (20, 1, 16)],
)
def test_perplexity_equals_the_naive_loop(exact_scorers, kind, context, stride, batch_size):
    scorer = exact_scorers[kind]
    found = perplexity(scorer, DOCUMENTS, context=context, stride=stride, batch_size=batch_size)
    context = context or MAX_LENGTH
    naive = [naive_loss(scorer, d.text, context, stride or context) for d in DOCUMENTS]
    losses, counts = map(sum, zip(*naive, strict=True))
    assert found.tokens == counts
    assert found.loss == pytest.approx(losses, rel=1e-9)
    assert found.per_token == pytest.approx(math.exp(losses / counts), rel=1e-6)


@given(st.integers(0, 200), st.integers(1, 50), st.integers(1, 50))
def test_every_token_is_scored_exactly_once(targets, context, stride):
    stride = min(stride, context)
    found = list(windows(targets, context, stride))
    scored = [i for window in found for i in range(window.scored_from, window.end)]
    assert scored == list(range(targets))
    for k, (start, scored_from, end) in enumerate(found):
        assert start <= scored_from < end <= start + context
        assert k == 0 or end - start == context  # as much context as there is room for
        assert k == 0 or scored_from - start >= context - stride


def test_without_overlap_the_windows_are_the_harnesss(neox_scorer, our_scorer):
    request = [rolling(DOCUMENTS[3].text), rolling(DOCUMENTS[1].text)]
    with quiet():
        expected = neox_scorer.lm.loglikelihood_rolling(request)
    found = [-perplexity(neox_scorer, [DOCUMENTS[k]]).loss for k in (3, 1)]
    assert found == pytest.approx(expected, rel=1e-5)
    long = Document.of(sentence(3, 600))  # several windows
    assert len(our_scorer.encode(long.text)) > 2 * MAX_LENGTH
    with quiet():
        expected = neox_scorer.lm.loglikelihood_rolling([rolling(long.text)])
    assert -perplexity(neox_scorer, [long]).loss == pytest.approx(expected[0], rel=1e-5)
    found = our_scorer.harness_lm(4).loglikelihood_rolling([rolling(long.text)])
    assert -perplexity(our_scorer, [long]).loss == pytest.approx(found[0], rel=1e-6)


def rolling(text: str) -> Instance:
    return Instance("loglikelihood_rolling", {}, (text,), 0)


class KnownScorer:
    """Each token costs what its id says; a token is a character."""

    max_length, prefix = 16, 0

    def encode(self, text):
        return [ord(c) for c in text]

    def losses(self, ids, targets, lengths):
        return torch.where(targets == -100, 0.0, targets / 100)


def test_tokens_weigh_the_same_and_words_and_bytes_normalise():
    texts = ["aaa bb", "zzzz é zzzzzzzzzzzzzzzzzzzz"]
    found = perplexity(KnownScorer(), [Document.of(text) for text in texts])
    loss = sum(map(ord, "".join(texts))) / 100
    assert found.tokens == sum(map(len, texts))
    assert found.words == 5
    assert found.bytes == found.tokens + 1  # é has two
    assert found.per_token == pytest.approx(math.exp(loss / found.tokens))
    assert found.per_word == pytest.approx(math.exp(loss / 5))
    assert found.per_byte == pytest.approx(math.exp(loss / found.bytes))
    assert found.bits_per_byte == pytest.approx(math.log2(found.per_byte))


def test_standard_error_is_that_of_drawing_documents():
    rng = np.random.default_rng(0)
    texts = ["".join(chr(c) for c in rng.integers(1, 300, rng.integers(5, 60))) for _ in range(60)]
    documents = [Document.of(text) for text in texts]
    found = perplexity(KnownScorer(), documents)
    again = [
        perplexity(KnownScorer(), [documents[k] for k in rng.integers(0, 60, 60)]).per_token
        for _ in range(100)
    ]
    assert found.stderr(found.tokens) == pytest.approx(np.std(again), rel=0.25)
    assert perplexity(KnownScorer(), documents[:1]).stderr(9) is None


def test_only_a_few_rows_of_logits_exist_at_once(our_scorer, neox_scorer, monkeypatch):
    seen = []
    hook = our_scorer.model.head.register_forward_hook(
        lambda module, inputs, out: seen.append(inputs[0].shape[0])
    )
    documents = [Document.of(sentence(n, 400)) for n in range(8)]
    perplexity(our_scorer, documents, batch_size=8)
    lm = our_scorer.harness_lm(8)
    lm.loglikelihood(
        [Instance("loglikelihood", {}, ("the", " " + sentence(n, 200)), 0) for n in range(9)]
    )
    hook.remove()
    assert max(seen) <= CHUNK < sum(seen)

    monkeypatch.setattr(models, "LOGITS", 2 * MAX_LENGTH * VOCAB)
    rows = []
    hook = neox_scorer.lm.model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, out: rows.append(out.shape[0])
    )
    perplexity(neox_scorer, documents, batch_size=8)
    hook.remove()
    assert max(rows) == 2


def test_wikitext_is_what_the_harness_makes_of_it(our_scorer):
    pages = tasks.wikitext_pages(WIKITEXT)
    assert [page.split("\n")[0].strip(" =") for page in pages] == [
        "First Article",
        "Second Article",
    ]
    documents = harness.wikitext_documents(pages)
    assert (
        "(an old cat) sat on a 1,000-year mat. It's red .\n\n== A section ==" in documents[0].text
    )

    def local_rows(**_):
        return {"test": harness.datasets.Dataset.from_list([{"page": page} for page in pages])}

    source = {
        "task": "wikitext",
        "custom_dataset": local_rows,
        "training_split": None,
        "validation_split": None,
    }
    with quiet():
        task = harness._manager().load({"group": "g", "task": [source]})["tasks"]
        expected = harness.evaluate(our_scorer.harness_lm(2), {"tasks": task}, log_samples=False)
    expected = expected["results"]["wikitext"]
    found = perplexity(our_scorer, documents)
    assert found.per_word == pytest.approx(expected["word_perplexity,none"], rel=1e-6)
    assert found.per_byte == pytest.approx(expected["byte_perplexity,none"], rel=1e-6)
    assert found.bits_per_byte == pytest.approx(expected["bits_per_byte,none"], rel=1e-6)


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


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batched_scores_equal_one_at_a_time(our_scorer, batch_size):
    found = our_scorer.harness_lm(batch_size).loglikelihood(requests())
    alone = [our_scorer.harness_lm(1).loglikelihood(requests([pair]))[0] for pair in PAIRS]
    assert [ll for ll, _ in found] == pytest.approx([ll for ll, _ in alone], rel=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in alone]


def test_loglikelihood_is_that_of_the_continuation_given_the_context(exact_scorers):
    scorer = exact_scorers["ours"]
    context, continuation = PAIRS[2]
    tokens = scorer.encode(context + continuation)
    begin = len(scorer.encode(context))
    logprobs = torch.log_softmax(logits_of(scorer, tokens[:-1]), -1)
    expected = sum(float(logprobs[i - 1, tokens[i]]) for i in range(begin, len(tokens)))
    ((found, _),) = scorer.harness_lm(1).loglikelihood(requests([PAIRS[2]]))
    assert found == pytest.approx(expected, rel=1e-9)


def test_greedy_is_said_of_what_the_model_would_generate(our_scorer):
    lm = our_scorer.harness_lm(2)
    context = our_scorer.encode("the cat sat")
    best = list(context)
    for _ in range(3):
        best.append(int(logits_of(our_scorer, best)[-1].argmax()))
    wrong = [*best[:-1], (best[-1] + 1) % VOCAB]
    batch = [(None, context, ids[len(context) :]) for ids in (best, wrong)]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(batch)] == [True, False]


def test_too_long_a_prompt_loses_its_beginning_and_is_counted(our_scorer):
    with quiet() as truncations:
        ((cut, _),) = our_scorer.harness_lm(1).loglikelihood(requests([PAIRS[7]]))
    assert truncations.count == 1
    tokens = our_scorer.encode("".join(PAIRS[7]))[-(MAX_LENGTH + 1) :]
    begin = len(tokens) - len(our_scorer.encode(PAIRS[7][1]))
    logprobs = torch.log_softmax(logits_of(our_scorer, tokens[:-1]), -1)
    expected = sum(float(logprobs[i - 1, tokens[i]]) for i in range(begin, len(tokens)))
    assert cut == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def ours_by_the_harness(ours) -> HFLM:
    with quiet():
        return HFLM(pretrained=str(ours), device="cpu", batch_size=4, softmax_dtype="float32")


def test_in_process_equals_the_harnesss_hf_path(our_scorer, ours_by_the_harness):
    lm = our_scorer.harness_lm(3)
    assert ours_by_the_harness.max_length == lm.max_length
    with quiet():
        expected = ours_by_the_harness.loglikelihood(requests())
        rolled = ours_by_the_harness.loglikelihood_rolling([rolling(sentence(3, 300))])
        found = lm.loglikelihood(requests())
    assert [ll for ll, _ in found] == pytest.approx([ll for ll, _ in expected], rel=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert lm.loglikelihood_rolling([rolling(sentence(3, 300))]) == pytest.approx(rolled, rel=1e-5)


@pytest.mark.parametrize("shots", [0, 5])
def test_in_process_equals_the_hf_path_in_every_task(
    our_scorer, ours_by_the_harness, loaded, shots
):
    for name, task in loaded.items():
        found = harness.score(our_scorer.harness_lm(8), task, shots, limit=6)
        expected = harness.score(ours_by_the_harness, task, shots, limit=6)
        assert found.truncated == expected.truncated
        for metric, score in expected.scores.items():
            assert found.scores[metric].value == pytest.approx(score.value, rel=1e-4), (
                name,
                metric,
            )
            assert found.scores[metric].stderr == pytest.approx(score.stderr, rel=1e-3), name


# ---------------------------------------------------------------------------- metrics


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


def likes_right(context: str, continuation: str) -> tuple[float, bool]:
    """Knows every answer: ours end in `right`, WinoGrande puts it into the context."""
    last = context.rsplit("\n\n", 1)[-1]
    good = continuation.endswith("right") or " right ran" in f"{last}{continuation}"
    return (-1.0 if good else -50.0), good


def hates_right(context: str, continuation: str) -> tuple[float, bool]:
    ll, good = likes_right(context, continuation)
    return -60 - ll, not good


@pytest.mark.parametrize("shots", [0, 5])
def test_knowing_every_answer_is_100_percent_and_the_opposite_0(loaded, shots):
    for name, task in loaded.items():
        if name.startswith("lambada"):
            continue
        for belief, expected in ((likes_right, 1.0), (hates_right, 0.0)):
            scores = harness.score(StubLM(belief), task, shots).scores
            assert TASKS[name].metric in scores
            assert {score.value for score in scores.values()} == {expected}, name
            assert {score.count for score in scores.values()} == {12}


def test_accuracy_is_the_share_that_is_right_with_its_standard_error(loaded):
    known = {f" word{n}" for n in range(3)}
    stub = StubLM(lambda context, word: (-2.0, word in known))
    scores = harness.score(stub, loaded["lambada_openai"], 0).scores
    assert scores["acc"].value == 3 / 12
    assert scores["acc"].stderr == pytest.approx(np.std([1] * 3 + [0] * 9, ddof=1) / math.sqrt(12))


def test_lambada_perplexity_is_that_of_the_last_word(loaded):
    beliefs = {f" word{n}": -1.0 - n for n in range(12)}
    for name in tasks.LAMBADA:
        stub = StubLM(lambda context, word: beliefs[word])
        scores = harness.score(stub, loaded[name], 0).scores
        assert scores["perplexity"].value == pytest.approx(
            math.exp(-np.mean(list(beliefs.values())))
        )
        assert scores["perplexity"].stderr > 0
        assert all("word" not in context for context, _ in stub.seen)


def test_the_paper_reports_length_normalised_accuracy_of_five_tasks():
    normalised = [task.column for task in TASKS.values() if task.metric == "acc_norm"]
    assert normalised == ["HS", "PQ", "ARC-E", "ARC-C", "SciQ"]
    assert {task.metric for task in TASKS.values()} == {"acc", "acc_norm"}


@pytest.mark.parametrize("name", [n for n, task in TASKS.items() if task.metric == "acc_norm"])
def test_acc_norm_is_by_length_and_acc_is_not(loaded, name):
    """A belief that costs per character: the right answer is cheaper per character, but longer."""

    def belief(context: str, continuation: str) -> float:
        text = continuation[1:]
        return -0.9 * len(text) if text.endswith("right") else -1.0 * len(text)

    task = loaded[name]
    (part,) = task.parts.values()
    choices = [part.doc_to_choice(doc) for doc in part.task_docs]
    cheapest = [max(some, key=lambda c: belief("", " " + c)).endswith("right") for some in choices]
    scores = harness.score(StubLM(belief), task, 0).scores
    assert scores["acc_norm"].value == 1.0
    assert scores["acc"].value == pytest.approx(np.mean(cheapest))
    assert scores["acc"].value < 1.0


def half_known(context: str) -> int:
    return 1 if "about anatomy" in context else -1


def test_mmlu_weighs_subjects_by_their_size(loaded):
    """Three questions of anatomy, nine of astronomy: knowing only anatomy is 25 %."""

    def belief(context: str, continuation: str) -> float:
        return likes_right(context, continuation)[0] * half_known(context)

    task = loaded["mmlu_continuation"]
    assert sorted(len(part.task_docs) for part in task.parts.values()) == [3, 9]
    score = harness.score(StubLM(belief), task, 0).scores["acc"]
    assert (score.value, score.count) == (0.25, 12)


def test_prompts_are_the_harnesss_with_so_many_examples(loaded, data_dir):
    for name, task in loaded.items():
        stub = StubLM(likes_right)
        harness.score(stub, task, 5)
        shown = [context.split("\n\n") for context, _ in stub.seen]
        described = name == "mmlu_continuation"  # its prompts begin with a description
        assert {len(parts) for parts in shown} == {6 + described}, name
        if name not in tasks.LAMBADA:
            examples = (data_dir / TASKS[name].shots_file).read_text()
            part = shown[0][described].split("\n")[0].removeprefix("Question: ")
            assert part.removeprefix("Walking: ")[:20] in examples
    for context, word in stub_of(loaded["lambada_standard"], 5).seen:
        assert word.strip() not in context.split()  # never shown its own answer
    again = [stub_of(loaded["arc_easy"], 5).seen for _ in range(2)]
    assert again[0] == again[1]


def stub_of(task: harness.LoadedTask, shots: int) -> StubLM:
    stub = StubLM(likes_right)
    harness.score(stub, task, shots)
    return stub


def test_limit_takes_the_first_examples_and_spreads_over_subjects(loaded):
    stub = StubLM(likes_right)
    assert harness.score(stub, loaded["piqa"], 0, limit=5).scores["acc"].count == 5
    everything = stub_of(loaded["piqa"], 0).seen
    assert stub.seen == everything[:10]
    stub = StubLM(likes_right)
    assert harness.score(stub, loaded["mmlu_continuation"], 0, limit=4).scores["acc"].count == 4
    assert sum("about anatomy" in context for context, _ in stub.seen) == 4 * 2
    assert harness.score(stub, loaded["mmlu_continuation"], 0, limit=1).scores["acc"].stderr is None
    half = StubLM(lambda context, answer: likes_right(context, answer)[0] * half_known(context))
    score = harness.score(half, loaded["mmlu_continuation"], 0, limit=2).scores["acc"]
    assert (score.value, score.stderr) == (0.5, 0.5)  # of one example each, taken together
    assert harness.spread(7, {"a": 1, "b": 9, "c": 3}) == {"a": 1, "b": 3, "c": 3}
    assert harness.spread(None, {"a": 1}) == {"a": 1}


# ---------------------------------------------------------------------------- tables


def made_up(name: str, folder: Path, values: dict[tuple[str, int], float]) -> run.Evaluation:
    config = json.loads((folder / "config.json").read_text())
    candidate = models.Candidate(folder, config, None, 4096, name)
    found = {
        key: harness.TaskResult(
            {
                TASKS[key[0]].metric: harness.Score(value / 100, 0.01, 100),
                "perplexity": harness.Score(9.0, 1.0, 100),
            },
            0,
        )
        for key, value in values.items()
    }
    return run.Evaluation(name, candidate, found)


def preset_folder(folder: Path, name: str, **changes) -> Path:
    folder.mkdir()
    fields = presets.preset(name).replace(**changes).to_dict()
    (folder / "config.json").write_text(json.dumps({"model_type": "spiralformer", **fields}))
    return folder


def test_average_is_the_papers(tmp_path):
    folder = preset_folder(tmp_path / "m", "spiral-b-160m-mesh")
    checked = 0
    for (name, shots), printed in paper.TABLE_3.items():
        if (name, shots) == ("looped-410m-mesh", 5):
            continue  # its printed average is not that of its row, 45.60
        values = {(t, shots): v for t, v in zip(TASKS, printed.tasks, strict=True)}
        found = report.average(made_up(name, folder, values), shots)
        assert found[0] == pytest.approx(printed.average, abs=0.011), name
        assert found[1] == pytest.approx(100 * 0.01 / 3)
        checked += 1
    assert checked == len(paper.TABLE_3) - 1
    del values["sciq", shots]
    assert report.average(made_up(name, folder, values), shots) is None


def test_columns_are_the_papers_and_its_row_stands_beside_ours(tmp_path):
    assert tuple(task.column for task in TASKS.values()) == paper.TASKS
    name = "spiral-b-160m-mesh"
    folder = preset_folder(tmp_path / "m", name, max_length=1024)
    values = {(t, shots): 40.0 + shots for t in TASKS for shots in (0, 5)}
    evaluation = made_up("mine", folder, values)
    first, third, *_ = report.render([evaluation], run.Options(out=tmp_path)).split("\n\n")
    assert cells(first)[0] == ["model", "Pile", "Wiki", "LD-O", "LD-S", "0-shot", "5-shot"]
    assert cells(first)[2] == [
        "mine",
        "–",
        "–",
        "9.00 ±1.00",
        "9.00 ±1.00",
        "40.00 ±0.33",
        "45.00 ±0.33",
    ]
    assert cells(first)[3] == [
        f"paper: {name}",
        "11.29",
        "30.27",
        "43.27",
        "155.78",
        "39.73",
        "41.02",
    ]
    assert cells(third)[0] == ["model", "shots", *paper.TASKS, "Avg"]
    assert [line[:3] for line in cells(third)[2:]] == [
        ["mine", "0", "40.00 ±1.00"],
        [f"paper: {name}", "0", "32.93"],
        ["mine", "5", "45.00 ±1.00"],
        [f"paper: {name}", "5", "27.07"],
    ]
    assert report.paper_name(presets.preset(name).replace(hidden_size=1536)) is None
    assert report.paper_name(presets.preset("spiral-b-410m-mesh-mean")) == "spiral-b-410m-mesh-mean"
    assert report.paper_name(presets.preset("spiral-b-nano-mesh")) is None


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")]


def test_the_best_of_several_is_bold_and_the_papers_row_is_no_rival(tmp_path):
    folder = preset_folder(tmp_path / "m", "spiral-b-160m-mesh")
    good = made_up("good", folder, {("piqa", 0): 30.0, ("sciq", 0): 20.0, ("lambada_openai", 0): 9})
    bad = made_up("bad", folder, {("piqa", 0): 29.0, ("sciq", 0): 20.0, ("lambada_openai", 0): 9})
    bad.tasks["lambada_openai", 0].scores["perplexity"] = harness.Score(8.0, 1.0, 100)
    options = run.Options(tasks=["piqa", "sciq", "lambada_openai"], shots=[0], out=tmp_path)
    table = report.render([good, bad], options)
    assert "| **30.00 ±1.00** |" in table
    assert table.count("**20.00 ±1.00**") == 2  # a tie
    assert "**29.00" not in table
    assert "**8.00 ±1.00**" in table  # a lower perplexity is better
    assert "**9.00" not in table.split("\n\n")[0]
    assert "**" not in report.render([good], options)
    rows = [(("x", "0"), 1), (("y", "0"), 0.5), (("x", "5"), 3), (("y", "5"), 4)]
    made = [report.Row(labels, {"a": (value, None)}) for labels, value in rows]
    made.append(report.Row(("paper", "5"), {"a": (4, None)}, printed=True))
    bold = re.findall(r"\*\*(.+?)\*\*", report.Table(("model", "shots"), ("a",), made).markdown())
    assert bold == ["1.00", "4.00"]
    shown = report.for_terminal(table)
    assert "\x1b[1m30.00 ±1.00\x1b[0m" in shown
    plain = re.sub(r"\x1b\[\dm", "", shown)
    assert {len(line) for line in plain.split("\n\n")[1].split("\n")} == {
        len(table.split("\n\n")[1].split("\n")[0])
    }


# ---------------------------------------------------------------------------- the command


def evaluate(*arguments) -> int:
    return cli.main(["eval", *map(str, arguments)])


def test_one_command_gives_the_tables_of_several_models(ours, neox, data_dir, tmp_path, capsys):
    text = tmp_path / "notes.txt.gz"
    text.write_bytes(gzip.compress(b"the cat sat on a mat"))
    out = tmp_path / "out"
    assert evaluate(ours, neox, "--data-dir", data_dir, "--text-file", text, "--tasks", "paper",
                    "--out", out, "--batch-size", 16, "--limit", 5) == 0  # fmt: skip
    printed, progress = capsys.readouterr()
    assert "Map:" not in progress
    assert "it/s" not in progress
    assert printed == (out / "table.md").read_text()
    first, third, texts, *_ = printed.split("\n\n")
    assert [line[0] for line in cells(first)[2:]] == ["ours", "neox"]
    assert [line[:2] for line in cells(third)[2:]] == [
        [name, shots] for shots in "05" for name in ("ours", "neox")
    ]
    assert [line[1] for line in cells(texts)[2:]] == ["pile", "wikitext", str(text)] * 2
    assert all(len(line) == 12 and "–" not in line for line in cells(third)[2:])

    results = json.loads((out / "results.json").read_text())
    assert results["versions"]["lm_eval"]
    assert results["seeds"] == {"fewshot": 1234}
    assert results["commit"] is None or len(results["commit"]) >= 40
    mine, other = results["models"]
    assert mine["config"]["layout"] == "1+1x{1/4,1/2,1}+1"
    assert other["config"]["model_type"] == "gpt_neox"
    assert len(mine["tasks"]) == 18
    assert mine["seconds"].keys() >= {"hellaswag 5-shot", "pile"}
    assert mine["texts"]["pile"]["documents"] == 5
    pile = cells(texts)[2]
    assert float(pile[2].strip("*").split(" ±")[0]) == pytest.approx(
        mine["texts"]["pile"]["per_token"], abs=0.01
    )
    assert float(cells(first)[2][2].strip("*").split(" ±")[0]) == pytest.approx(
        mine["texts"]["wikitext"]["per_word"], rel=1e-2
    )


def test_an_interrupted_evaluation_goes_on(ours, data_dir, tmp_path, capsys, monkeypatch):
    arguments = (ours, "--data-dir", data_dir, "--tasks", "pile,piqa,sciq", "--shots", 0, 2,
                 "--out", tmp_path)  # fmt: skip
    score, calls = harness.score, []

    def counted(lm, task, shots, **options):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append((task.task.name, shots))
        return score(lm, task, shots, **options)

    monkeypatch.setattr(harness, "score", counted)
    assert evaluate(*arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert calls == [("piqa", 0), ("sciq", 0)]

    calls.clear()
    monkeypatch.setattr(harness, "score", lambda *a, **k: calls.append(a[2]) or score(*a, **k))
    assert evaluate(*arguments) == 0
    assert calls == [2, 2]
    table = capsys.readouterr().out

    monkeypatch.setattr(run, "load_scorer", lambda *a, **k: pytest.fail("all of it is cached"))
    assert evaluate(*arguments) == 0
    assert capsys.readouterr().out == table


def test_what_decides_a_number_decides_the_cache(ours, data_dir, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(run, "perplexity", lambda *a, **k: calls.append(k) or perplexity(*a, **k))
    copy, data, out = tmp_path / "ours", tmp_path / "data", tmp_path / "out"
    shutil.copytree(ours, copy)
    shutil.copytree(data_dir, data)

    def runs(*more) -> int:
        calls.clear()
        assert evaluate(copy, "--data-dir", data, "--tasks", "pile", "--out", out, *more) == 0
        return len(calls)

    assert runs() == 1
    assert runs() == 0
    assert runs("--batch-size", 1) == 0  # decides nothing
    assert runs("--limit", 2) == 1
    assert runs("--stride", 9) == 1
    assert runs("--context", 64) == 1
    assert runs("--dtype", "bfloat16") == 1
    with (data / "pile_sample.test.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert runs() == 1
    model = SpiralFormer(models.load_config(copy))
    save_model(model, copy, tokenizer=ours)
    assert runs() == 1
    (cached,) = list((out / "cache").glob("*/pile-*.json"))[:1]
    cached.write_text("{")
    assert runs() + runs("--limit", 2) >= 0  # a damaged entry is no error


def test_missing_shots_and_hub_are_no_matter_when_they_are_not_asked_for(ours, data_dir, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(data_dir / "piqa.validation.jsonl", data)
    arguments = (ours, "--data-dir", data, "--tasks", "piqa", "--out", tmp_path, "--shots", 0)
    assert evaluate(*arguments) == 0


# ---------------------------------------------------------------------------- bad input


@pytest.fixture
def refused(capsys, monkeypatch, ours, data_dir, tmp_path):
    """Runs the command; it must end with status 2 before a model is loaded, and say so."""
    monkeypatch.setattr(run, "load_scorer", lambda *a, **k: pytest.fail("a model was loaded"))

    def check(*arguments, folder=ours, data=data_dir) -> str:
        source = () if data is None else ("--data-dir", data)
        assert evaluate(folder, *source, "--out", tmp_path / "out", *arguments) == 2
        return capsys.readouterr().err

    return check


def test_a_folder_that_is_no_model_is_refused(refused, ours, neox, tmp_path):
    assert "no such folder" in refused(folder=tmp_path / "nowhere")
    assert "no config.json" in refused(folder=tmp_path)
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
    for config, message in (
        ('{"model_type": "no_such_model"}', "no_such_model"),
        ('{"model_type": "t5"}', "no causal language model"),
        ("{", "cannot be read"),
    ):
        (other / "config.json").write_text(config)
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
    assert "unknown task 'helaswag'; the nearest: hellaswag" in refused("--tasks", "helaswag")
    assert "arc_easy" in refused("--tasks", "piqa", "arc-easy")
    assert "known: paper, pile" in refused("--tasks", "qqqq")


def test_missing_data_is_listed_with_the_flag(refused, data_dir, tmp_path, monkeypatch):
    data = tmp_path / "data"
    shutil.copytree(data_dir, data)
    for name in ("hellaswag.validation", "mmlu.fewshot", "pile_sample.test"):
        (data / f"{name}.jsonl").unlink()
    message = refused(data=data)
    assert f"--data-dir {data} lacks data" in message
    for name in ("hellaswag.validation.jsonl", "mmlu.fewshot.jsonl", "pile_sample.test.jsonl"):
        assert name in message
    assert "piqa" not in message
    assert "mmlu" not in refused("--shots", 0, data=data)
    assert "no such folder" in refused(data=tmp_path / "nowhere")

    def no_hub(*args, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(harness.datasets, "load_dataset", no_hub)
    monkeypatch.setattr(harness, "_expect_no_hub", lambda error: None)
    message = refused("--tasks", "piqa", "sciq", "pile", "wikitext", data=None)
    assert "no data for pile, wikitext, piqa, sciq from the Hugging Face hub" in message
    assert "--data-dir" in message


BAD_ROWS = {
    "hellaswag.validation": [
        ({"label": "4"}, "label '4'"),
        ({"endings": "a"}, "'endings'"),
        ({"endings": []}, "endings"),
    ],
    "piqa.validation": [
        ({"label": 2}, "label 2"),
        ({"label": "1"}, "'label'"),
        ({"goal": None}, "goal"),
    ],
    "winogrande.validation": [({"sentence": "no blank"}, "blank"), ({"answer": "3"}, "answer '3'")],
    "arc_easy.test": [
        ({"answerKey": "E"}, "answerKey 'E'"),
        ({"choices": {"text": ["a"], "label": ["A", "B"]}}, "differ in length"),
        ({"choices": ["a"]}, "'choices'"),
    ],
    "arc_challenge.fewshot": [({"answerKey": "E"}, "answerKey 'E'")],
    "sciq.test": [({"support": 3}, "'support'")],
    "mmlu.test": [({"answer": 9}, "answer 9"), ({"answer": True}, "'answer'")],
    "lambada_openai.test": [({"text": "one"}, "last word")],
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_malformed_row_is_refused_with_its_line(refused, data_dir, tmp_path, name):
    data = tmp_path / "data"
    shutil.copytree(data_dir, data)
    path = data / f"{name}.jsonl"
    lines = path.read_text().splitlines()
    task = name.split(".")[0]
    for change, message in BAD_ROWS[name]:
        lines[2] = json.dumps(json.loads(lines[3]) | change)
        path.write_text("\n".join(lines))
        found = refused("--tasks", task, data=data)
        assert f"{path}:3:" in found
        assert message in found
    row = json.loads(lines[3])
    row.pop(next(iter(TASKS[tasks.ALIASES.get(task, task)].fields)))
    lines[2] = json.dumps(row)
    path.write_text("\n".join(lines))
    assert f"{path}:3: field" in refused("--tasks", task, data=data)


def test_unreadable_files_are_refused_with_their_line(refused, data_dir, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(data_dir, data)
    path = data / "piqa.validation.jsonl"
    first = path.read_bytes().split(b"\n")[0]
    for content, message in (
        (first + b"\n{oops\n", f"{path}:2: not JSON"),
        (first + b"\n\n[1]\n", f"{path}:3: not a JSON object"),
        (first + b'\n{"goal": "\xff"}\n', f"{path}:2: not UTF-8"),
        (b"\n\n", f"{path}: empty"),
        (b"", f"{path}: empty"),
    ):
        path.write_bytes(content)
        assert message in refused("--tasks", "piqa", data=data)
    write_jsonl(data / "sciq.fewshot.jsonl", rows_of("sciq", 3))
    assert "3 examples are too few for 5 shots" in refused("--tasks", "sciq", data=data)
    write_jsonl(data / "mmlu.fewshot.jsonl", rows_of("mmlu", 16))
    assert "4 examples of anatomy, too few for 5" in refused("--tasks", "mmlu", data=data)
    write_jsonl(data / "lambada_standard.test.jsonl", rows_of("lambada", 5))
    assert "5 examples are too few" in refused("--tasks", "lambada_standard", data=data)
    rows = rows_of("mmlu", 8)
    rows[0]["subject"] = "astrology"
    write_jsonl(data / "mmlu.test.jsonl", rows)
    assert "no MMLU subject 'astrology'" in refused("--tasks", "mmlu", "--shots", 0, data=data)

    text = tmp_path / "a.txt"
    assert f"{text}: no such file" in refused("--text-file", text)
    text.write_bytes(b" \n")
    assert f"{text}: empty" in refused("--text-file", text)
    text.write_bytes(b"one\ntwo \xff\n")
    assert f"{text}:2: not UTF-8" in refused("--text-file", text)
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "a"}\n{"txt": "b"}\n')
    assert f"{lines}:2: no text under the field 'text'" in refused("--text-file", lines)
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(b"not gzip")
    assert f"{packed}: cannot be read" in refused("--text-file", packed)


def test_impossible_settings_are_refused(refused, ours):
    assert "--stride 9 is longer than --context 8" in refused("--context", 8, "--stride", 9)
    assert f"--context 300 is longer than the longest sequence of {ours}, 256" in refused(
        "--context", 300
    )
    for flag in ("--limit", "--context", "--stride", "--batch-size"):
        assert f"{flag} 0 must be at least 1" in refused(flag, 0)
    assert "--shots -1" in refused("--shots", -1)
    assert "--device nonsense" in refused("--device", "nonsense")


def test_a_folder_given_twice_is_refused(ours, data_dir, capsys):
    assert evaluate(ours, ours / ".." / "ours", "--data-dir", data_dir) == 2
    assert "the same folder was given twice" in capsys.readouterr().err


def test_nothing_of_the_harness_is_imported_for_help(capsys):
    with pytest.raises(SystemExit) as stop:
        evaluate("--help")
    assert stop.value.code == 0
    assert "lm-evaluation-harness" in capsys.readouterr().out
    code = (
        "import sys; from spiralformer import cli\n"
        "try: cli.main(['eval', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(m in sys.modules for m in ('lm_eval', 'datasets', 'transformers')))"
    )
    import subprocess
    import sys

    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_progress_says_how_much_is_left():
    from spiralformer.evaluate.progress import Progress, clock

    class Terminal:
        def __init__(self):
            self.text = ""

        def isatty(self):
            return True

        def flush(self):
            pass

        def write(self, text):
            self.text += text

    screen = Terminal()
    progress = Progress("piqa", 200, screen)
    progress.started -= 60
    progress.tick(50)
    assert "piqa  50/200  25 %  3:00 left" in screen.text
    progress.close("acc 50.00")
    assert screen.text.endswith("piqa  acc 50.00  (1:00)\n")
    assert clock(3661) == "1:01:01"


def test_a_model_of_another_family_is_compared_in_the_same_words(neox_scorer, our_scorer):
    """The same text gives the same tokens, words and bytes whatever scores it."""
    found, other = (perplexity(scorer, DOCUMENTS) for scorer in (our_scorer, neox_scorer))
    assert (found.words, found.bytes, found.tokens) == (other.words, other.bytes, other.tokens)
    assert found.per_token != pytest.approx(other.per_token)
