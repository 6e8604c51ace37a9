"""An evaluation from plan to results: check the input, then the data, then load models.

Whatever has been scored is kept in the output folder, under the fingerprint of the model's files
and with everything else that decides the number, so that an interrupted evaluation goes on and a
repeated one only prints.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spiralformer.errors import UserError
from spiralformer.evaluate import tasks
from spiralformer.evaluate.models import DTYPES, Candidate, choose_device, inspect, load_scorer
from spiralformer.evaluate.perplexity import Perplexity, perplexity
from spiralformer.evaluate.progress import Progress
from spiralformer.evaluate.tasks import TASKS, TEXT_FILES, TEXTS, DataError, Document, Rows

if TYPE_CHECKING:  # importing the harness takes seconds
    from spiralformer.evaluate.harness import LoadedTask, Score, TaskResult

PACKAGES = (
    "spiralformer",
    "lm_eval",
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
)

HUB = "hub"  # in the place of a digest


@dataclass(frozen=True)
class Options:
    """What to evaluate, and how."""

    tasks: Sequence[str] = ("paper",)
    shots: Sequence[int] = (0, 5)
    data_dir: Path | None = None
    text_files: Sequence[Path] = ()
    limit: int | None = None
    out: Path = Path("runs/eval")
    context: int | None = None
    stride: int | None = None
    batch_size: int = 8
    device: str | None = None
    dtype: str = "auto"
    seed: int = 1234

    def __post_init__(self) -> None:
        for name in ("limit", "context", "stride", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if any(k < 0 for k in self.shots):
            raise UserError(f"--shots {min(self.shots)} must not be negative")
        if self.context and self.stride and self.stride > self.context:
            raise UserError(
                f"--stride {self.stride} is longer than --context {self.context}: tokens between "
                "two windows would not be scored"
            )
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise UserError(f"--dtype {self.dtype} is not one of auto, {', '.join(DTYPES)}")
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise UserError(f"--data-dir {self.data_dir}: no such folder")
        if not self.names and not self.text_files:
            raise UserError("nothing to evaluate: name --tasks or a --text-file")

    @property
    def names(self) -> list[str]:
        return tasks.parse_names(self.tasks)

    @property
    def task_names(self) -> list[str]:
        return [name for name in self.names if name in TASKS]


@dataclass
class Evaluation:
    """What was found for one model."""

    name: str  # in tables
    candidate: Candidate
    tasks: dict[tuple[str, int], TaskResult] = field(default_factory=dict)  # by task and shots
    texts: dict[str, Perplexity] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # by job

    def score(self, task: str, shots: int) -> Score | None:
        """The metric of a task that the paper reports."""
        result = self.tasks.get((task, shots))
        return None if result is None else result.scores[TASKS[task].metric]


# ---------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Text:
    """A text to score; from the hub it is fetched only if it is needed."""

    name: str
    digest: str
    documents: Callable[[], list[Document]] | None = None


@dataclass(frozen=True)
class Suite:
    """The data of an evaluation. Local files are all read and checked when it is made."""

    rows: dict[str, Rows] | None  # of local tasks
    texts: list[Text]

    def digest(self, task: str) -> str:
        return HUB if self.rows is None else self.rows[task].digest

    def load(
        self, names: Iterable[str], texts: Iterable[Text]
    ) -> tuple[dict[str, LoadedTask], dict[str, list[Document]]]:
        """Tasks and documents, by name; the last step before models are loaded."""
        names, texts = sorted(set(names), key=list(TASKS).index), list(texts)
        remote = {text.name for text in texts if text.documents is None}
        documents = {text.name: text.documents() for text in texts if text.documents}
        if not names and not remote:
            return {}, documents
        from spiralformer.evaluate import harness

        if self.rows is not None:
            return harness.load_local({name: self.rows[name] for name in names}), documents
        loaded, fetched = harness.load_hub(names, sorted(remote))
        return loaded, documents | fetched


def open_suite(options: Options) -> Suite:
    """Finds all data; what local data are missing is said in one error."""
    files = [_plain_text(str(path), path) for path in dict.fromkeys(options.text_files)]
    names = [name for name in options.names if name in TEXTS]
    folder, most = options.data_dir, max(options.shots, default=0)
    if folder is None:
        return Suite(None, [*(Text(name, HUB) for name in names), *files])
    missing = {name: tasks.missing_files(name, folder, most) for name in options.names}
    lines = [f"\n  {name}: {', '.join(lacking)}" for name, lacking in missing.items() if lacking]
    if lines:
        raise DataError(
            f"--data-dir {folder} lacks data; add it or leave out the tasks:{''.join(lines)}"
        )
    rows = {name: tasks.read_task(TASKS[name], folder, most) for name in options.task_names}
    read = {"pile": _plain_text, "wikitext": _wikitext}
    return Suite(rows, [*(read[name](name, folder / TEXT_FILES[name]) for name in names), *files])


def _plain_text(name: str, path: Path) -> Text:
    found = tasks.read_documents(path)
    return Text(name, tasks.digest([path]), lambda: found)


def _wikitext(name: str, path: Path) -> Text:
    pages = tasks.wikitext_pages(tasks.read_text(path))
    if not pages:
        raise DataError(f"{path}: empty; there is no text to score")

    def documents() -> list[Document]:
        from spiralformer.evaluate import harness

        return harness.wikitext_documents(pages)

    return Text(name, tasks.digest([path]), documents)


# ---------------------------------------------------------------------------- running


def evaluate_folders(folders: Sequence[str | Path], options: Options) -> list[Evaluation]:
    """Everything asked for, for each model folder. Progress goes to standard error."""
    device = choose_device(options.device)
    candidates = [inspect(folder) for folder in folders]
    for candidate in candidates:
        _check_window(candidate, options)
    suite = open_suite(options)
    evaluations = [
        Evaluation(name, candidate)
        for name, candidate in zip(_short_names(candidates), candidates, strict=True)
    ]
    plans = [_plan(evaluation, suite, options) for evaluation in evaluations]
    pending = [job for plan in plans for job in plan if not job.recall()]
    loaded, documents = suite.load(
        (job.task for job in pending if job.task), (job.text for job in pending if job.text)
    )
    for evaluation, plan in zip(evaluations, plans, strict=True):
        due = [job for job in plan if job in pending]
        if len(due) < len(plan):
            print(
                f"{evaluation.name}: {len(plan) - len(due)} of {len(plan)} results are cached",
                file=sys.stderr,
            )
        if not due:
            continue
        scorer = load_scorer(evaluation.candidate, device=device, dtype=options.dtype)
        lm = scorer.harness_lm(options.batch_size) if any(job.task for job in due) else None
        for job in due:
            progress = Progress(f"{evaluation.name}  {job.label}")
            try:
                if job.task:
                    summary = job.score_task(lm, loaded[job.task], progress)
                else:
                    assert job.text is not None
                    summary = job.score_text(scorer, documents[job.text.name], progress)
            except BaseException:
                progress.close()
                raise
            job.keep(progress.close(summary))
        del scorer, lm
    return evaluations


def _check_window(candidate: Candidate, options: Options) -> None:
    for name in ("context", "stride"):
        value = getattr(options, name)
        if value and value > candidate.max_length:
            raise UserError(
                f"--{name} {value} is longer than the longest sequence of {candidate.folder}, "
                f"{candidate.max_length}"
            )


def _short_names(candidates: list[Candidate]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart."""
    paths = [candidate.folder.resolve() for candidate in candidates]
    if len(set(paths)) < len(paths):
        raise UserError("the same folder was given twice")
    names = []
    for path in paths:
        for k in range(1, len(path.parts) + 1):
            if sum(other.parts[-k:] == path.parts[-k:] for other in paths) == 1:
                break
        names.append("/".join(path.parts[-k:]))
    return names


@dataclass(eq=False)
class Job:
    """One number to find: a task with so many shots, or a text."""

    evaluation: Evaluation
    options: Options
    data: str
    task: str | None = None
    shots: int = 0
    text: Text | None = None

    @property
    def label(self) -> str:
        return f"{self.task} {self.shots}-shot" if self.task else f"{self.text and self.text.name}"

    @property
    def key(self) -> dict[str, Any]:
        """All that decides the result."""
        key: dict[str, Any] = {
            "model": self.evaluation.candidate.fingerprint,
            "dtype": self.options.dtype,
            "data": self.data,
            "limit": self.options.limit,
            "spiralformer": version("spiralformer"),
        }
        if self.task:
            return key | {
                "task": self.task,
                "shots": self.shots,
                "seed": self.options.seed,
                "lm_eval": _version("lm_eval"),
            }
        return key | {"text": self.label, **self.window}

    @property
    def window(self) -> dict[str, int]:
        context = self.options.context or self.evaluation.candidate.max_length
        return {"context": context, "stride": self.options.stride or context}

    @property
    def path(self) -> Path:
        key = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        name = re.sub(r"[^\w.-]+", "-", self.label).strip("-")[-60:]
        folder = self.options.out / "cache" / self.evaluation.candidate.fingerprint
        return folder / f"{name}-{key}.json"

    def recall(self) -> bool:
        """Takes the result from the cache, if it is there."""
        from_dict = Perplexity.from_dict if self.text else _task_result
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            if kept["key"] != self.key:
                return False
            self._put(from_dict(kept["result"]), kept["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def keep(self, seconds: float) -> None:
        self.evaluation.seconds[self.label] = seconds
        result: Any = self.evaluation.texts[self.label] if self.text else None
        if self.task:
            result = self.evaluation.tasks[self.task, self.shots]
        content = {"key": self.key, "result": asdict(result), "seconds": seconds}
        write(self.path, json.dumps(content, indent=1) + "\n")

    def score_task(self, lm: Any, loaded: LoadedTask, progress: Progress) -> str:
        from spiralformer.evaluate import harness

        assert self.task is not None
        result = harness.score(
            lm,
            loaded,
            self.shots,
            limit=self.options.limit,
            seed=self.options.seed,
            progress=progress,
        )
        self._put(result, None)
        metric = TASKS[self.task].metric
        return f"{metric} {100 * result.scores[metric].value:.2f}"

    def score_text(self, scorer: Any, documents: list[Document], progress: Progress) -> str:
        def on_total(tokens: int) -> None:
            progress.total = tokens

        result = perplexity(
            scorer,
            documents[: self.options.limit],
            **self.window,
            batch_size=self.options.batch_size,
            on_total=on_total,
            on_tokens=progress.tick,
        )
        self._put(result, None)
        return f"perplexity {result.per_token:.6g} per token"

    def _put(self, result: Any, seconds: float | None) -> None:
        if self.task:
            self.evaluation.tasks[self.task, self.shots] = result
        else:
            self.evaluation.texts[self.label] = result
        if seconds is not None:
            self.evaluation.seconds[self.label] = seconds


def _plan(evaluation: Evaluation, suite: Suite, options: Options) -> list[Job]:
    texts = [Job(evaluation, options, text.digest, text=text) for text in suite.texts]
    return texts + [
        Job(evaluation, options, suite.digest(name), task=name, shots=shots)
        for shots in sorted(set(options.shots))
        for name in options.task_names
    ]


def _task_result(fields: dict[str, Any]) -> TaskResult:
    from spiralformer.evaluate.harness import Score, TaskResult

    scores = {metric: Score(**score) for metric, score in fields["scores"].items()}
    return TaskResult(scores, fields["truncated"])


def write(path: Path, content: str) -> None:
    """All of it or nothing."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(content, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error}); choose another --out") from None


# ---------------------------------------------------------------------------- provenance


def provenance(options: Options) -> dict[str, Any]:
    """What a result must say of itself to be repeated."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
        },
        "commit": _commit(),
        "seeds": {"fewshot": options.seed},
        "options": {
            name: [str(item) for item in value]
            if isinstance(value, (list, tuple)) and name in ("tasks", "text_files")
            else str(value)
            if isinstance(value, Path)
            else value
            for name, value in asdict(options).items()
        },
        "device": choose_device(options.device),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this code runs from; + marks changes since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return None
