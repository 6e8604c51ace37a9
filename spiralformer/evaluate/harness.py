"""EleutherAI's lm-evaluation-harness: its task definitions, with its data or with local files."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.api.group import Group
from lm_eval.api.model import LM, CacheHook
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.group import AggMetricConfig
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from spiralformer.evaluate.progress import Progress, quiet
from spiralformer.evaluate.tasks import TASKS, DataError, Document, Row, Rows, Task

SEED = 1234  # of the few-shot examples: the harness's own default
BOOTSTRAPS = 1000  # for the standard error of LAMBADA's perplexity

_FOLDERS = (  # indexing all of the harness's tasks takes half a minute
    "arc",
    "hellaswag",
    "lambada",
    "mmlu/continuation",
    "piqa",
    "sciq",
    "wikitext",
    "winogrande",
)


@dataclass(frozen=True)
class Score:
    """A metric of a task: a fraction, or for `perplexity` a perplexity."""

    value: float
    stderr: float | None
    count: int  # examples


@dataclass(frozen=True)
class LoadedTask:
    """A task of the harness with its data; MMLU is 57 of them."""

    task: Task
    parts: dict[str, ConfigurableTask]

    def __post_init__(self) -> None:
        """The harness would process HellaSwag's documents anew whenever it looks at them."""
        for part in self.parts.values():
            if part.config.process_docs is not None:
                part.dataset[self.task.split] = part.task_docs
                part.config.process_docs = None


# ---------------------------------------------------------------------------- loading


def _manager() -> TaskManager:
    root = Path(lm_eval.tasks.__file__).parent
    paths: list[str | Path] = [root / folder for folder in _FOLDERS]
    return TaskManager(include_path=paths, include_defaults=False)


def load_local(rows: dict[str, Rows]) -> dict[str, LoadedTask]:
    """The harness's definitions of tasks, with local rows in the place of the hub's."""
    with quiet():
        manager = _manager()
        loaded = {}
        for name, data in rows.items():
            task = TASKS[name]
            parts = _local_parts(task, data, set(manager.task_index))
            group = {"group": f"local {name}", "task": parts}
            try:
                built = manager.load(group)["tasks"]
            except Exception as error:  # the checks of `tasks` should have found it
                raise DataError(
                    f"{task.eval_file}: the harness cannot use it ({error!r})"
                ) from error
            loaded[name] = LoadedTask(task, built)
        return loaded


def _local_parts(task: Task, data: Rows, known: set[str]) -> list[dict[str, Any]]:
    if task.file != "mmlu":
        return [{"task": task.name, **_local_source(task, data.scored, data.shots)}]
    parts = []
    for subject in sorted({row["subject"] for row in data.scored}):
        name = f"mmlu_{subject}_continuation"
        if name not in known:
            raise DataError(f"{task.eval_file}: the harness has no MMLU subject {subject!r}")
        scored, shots = (
            [row for row in some or () if row["subject"] == subject]
            for some in (data.scored, data.shots)
        )
        parts.append({"task": name, **_local_source(task, scored, shots or None)})
    return parts


def _local_source(task: Task, scored: list[Row], shots: list[Row] | None) -> dict[str, Any]:
    """What of a task's definition changes: where its data come from."""
    splits = {task.split: scored}
    changes: dict[str, Any] = {}
    if shots is not None:
        splits[task.shots_from or "fewshot"] = shots
        if task.shots_from is None:
            changes["fewshot_split"] = "fewshot"
    elif task.shots_from is not None:
        # Examples come from what is scored; the harness then leaves out the one in question.
        changes["fewshot_split"] = task.split

    def local_rows(**_: Any) -> dict[str, datasets.Dataset]:
        return {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}

    return {"custom_dataset": local_rows, **changes}


def load_hub(
    names: list[str], texts: list[str]
) -> tuple[dict[str, LoadedTask], dict[str, list[Document]]]:
    """The harness's tasks as they are, and texts. What cannot be had is listed in one error."""
    loaded: dict[str, LoadedTask] = {}
    documents: dict[str, list[Document]] = {}
    missing: dict[str, str] = {}
    with quiet():
        manager = _manager()
        for name in (*texts, *names):
            try:
                if name in TASKS:
                    loaded[name] = LoadedTask(TASKS[name], manager.load(name)["tasks"])
                else:
                    documents[name] = _hub_documents(name)
            except Exception as error:
                missing[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
                _expect_no_hub(error)
    if missing:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in missing.items())
        raise DataError(
            f"no data for {', '.join(missing)} from the Hugging Face hub; "
            f"--data-dir DIR reads local files instead{lines}"
        )
    return loaded, documents


def _expect_no_hub(error: Exception) -> None:
    """After one failed connection look only at the cache: an attempt takes half a minute."""
    if isinstance(error, ConnectionError):
        import huggingface_hub.constants

        datasets.config.HF_HUB_OFFLINE = True
        huggingface_hub.constants.HF_HUB_OFFLINE = True


# ---------------------------------------------------------------------------- texts


def wikitext_documents(pages: list[str]) -> list[Document]:
    """Articles as the harness scores them: detokenized, but counted as they were."""
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    documents = []
    for page in pages:
        counts = process_results({"page": page}, (0.0,))
        words, size = counts["word_perplexity"][1], counts["byte_perplexity"][1]
        documents.append(Document(wikitext_detokenizer({"page": page}), words, size))
    return documents


def _hub_documents(name: str) -> list[Document]:
    """WikiText-2 as the harness takes it; the validation set of the Pile, what is free of it."""
    if name == "wikitext":
        dataset = datasets.load_dataset(
            "EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", split="test"
        )
        return wikitext_documents([row["page"] for row in dataset])
    dataset = datasets.load_dataset(
        "monology/pile-uncopyrighted",
        data_files={"validation": "val.jsonl.zst"},
        split="validation",
    )
    return [Document.of(row["text"]) for row in dataset if row["text"]]


# ---------------------------------------------------------------------------- scoring


class _Ticker(CacheHook):
    """The harness tells a model's cache of each answer; here the progress line hears of it."""

    def __init__(self, progress: Progress, expected: Callable[[], int]) -> None:
        super().__init__(None)
        self.progress, self.expected = progress, expected

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self.progress.total = self.progress.total or self.expected()
        self.progress.tick()


@dataclass(frozen=True)
class TaskResult:
    scores: dict[str, Score]  # by metric: acc, acc_norm, perplexity
    truncated: int  # prompts that lost their beginning to the model's longest sequence


def score(
    lm: LM,
    loaded: LoadedTask,
    shots: int,
    *,
    limit: int | None = None,
    seed: int = SEED,
    progress: Progress | None = None,
) -> TaskResult:
    """Runs a task through the harness; `limit` is the number of examples, for MMLU spread evenly
    over its subjects."""
    share = spread(limit, {name: len(part.task_docs) for name, part in loaded.parts.items()})
    parts = {name: part for name, part in loaded.parts.items() if share[name]}
    for part in parts.values():
        part.set_config("num_fewshot", shots)
        part.set_fewshot_seed(seed)
    group = Group("all", aggregate_metric_list=[AggMetricConfig(metric="acc", weight_by_size=True)])
    for part in parts.values():
        group.add(part)
    if progress is not None:
        lm.set_cache_hook(
            _Ticker(progress, lambda: sum(len(part.instances or ()) for part in parts.values()))
        )
    with quiet() as truncations, _one_process():
        results = evaluate(
            lm,
            {"tasks": parts, "groups": {"all": group}},
            samples={name: list(range(share[name])) for name in parts} if limit else None,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
    for part in parts.values():
        part._instances = None  # the prompts, which are large
    assert results is not None
    name = "all" if len(parts) > 1 else next(iter(parts))
    found = results["results"].get(name) or results["groups"][name]
    count = sum(share.values())
    scores = {}
    for metric in ("acc", "acc_norm", "perplexity"):
        if f"{metric},none" in found:
            value = float(found[f"{metric},none"])
            scores[metric] = Score(
                value, _stderr(metric, value, found[f"{metric}_stderr,none"], count), count
            )
    return TaskResult(scores, truncations.count)


def _stderr(metric: str, value: float, found: Any, count: int) -> float | None:
    """The harness gives none for a group with a part of one example; then that of all together."""
    if isinstance(found, float) and math.isfinite(found):
        return found
    if metric == "perplexity" or count < 2:
        return None
    return math.sqrt(value * (1 - value) / (count - 1))


def spread(limit: int | None, sizes: dict[str, int]) -> dict[str, int]:
    """How many examples of each part make up `limit`, as evenly as their sizes allow."""
    if limit is None:
        return dict(sizes)
    turns = sorted((turn, k) for k, size in enumerate(sizes.values()) for turn in range(size))
    counts = [0] * len(sizes)
    for _, k in turns[:limit]:
        counts[k] += 1
    return dict(zip(sizes, counts, strict=True))


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """The harness would start a process per core for its bootstrap."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
