"""An evaluation from plan to results: check the input, then the data, then load models.

The harness keeps each answer of a model in OUT/cache, so that an interrupted evaluation goes on and
a repeated one only prints; its results go to OUT/MODEL/K-shot.json as they are.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spiralformer import __version__, files
from spiralformer.console import duration, say
from spiralformer.errors import UserError
from spiralformer.evaluate import tasks
from spiralformer.evaluate.perplexity import Perplexity, Score, perplexity
from spiralformer.evaluate.tasks import PAPER, TEXTS, Document, LoadedTask

if TYPE_CHECKING:  # it needs torch and the harness
    from spiralformer.evaluate.lm import InspectedFolder

BOOTSTRAPS = 1000  # for the standard error of LAMBADA's perplexity


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
    trust_remote_code: bool = False

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
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise UserError(f"--data-dir {self.data_dir}: no such folder")
        if not self.names and not self.text_files:
            raise UserError("nothing to evaluate: name --tasks or a --text-file")

    @property
    def names(self) -> list[str]:
        return tasks.parse_names(self.tasks)

    @property
    def task_names(self) -> list[str]:
        return [name for name in self.names if name not in TEXTS]

    @property
    def text_names(self) -> list[str]:
        return [name for name in self.names if name in TEXTS]


@dataclass
class Evaluation:
    """What one model reached."""

    name: str  # in tables
    model: InspectedFolder
    results: dict[int, dict[str, Any]] = field(default_factory=dict)  # the harness's, by shots
    texts: dict[str, Perplexity] = field(default_factory=dict)
    shown: dict[str, list[str]] = field(default_factory=dict)  # names in the results, by task

    def score(self, task: str, shots: int, metric: str | None = None) -> Score | None:
        """A metric of a task: if none is named, the one that the paper reports, or the first."""
        metrics = self.metrics(task, shots)
        if metric is None:
            metric = PAPER[task].metric if task in PAPER else next(iter(metrics), "")
        return metrics.get(metric)

    def metrics(self, task: str, shots: int) -> dict[str, Score]:
        """All metrics of a task; those of a filter other than none are `metric,filter`."""
        row = self.results.get(shots, {}).get("results", {}).get(task, {})
        scores = {}
        for key, value in row.items():
            metric, comma, filtered = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                stderr = row.get(f"{metric}_stderr,{filtered}")
                name = metric if filtered == "none" else key
                scores[name] = Score(value, stderr if isinstance(stderr, float) else None)
        return scores


def evaluate_folders(folders: Sequence[str | Path], options: Options) -> list[Evaluation]:
    """Everything asked for, for each model folder. Progress goes to standard error."""
    if missing := [name for name in ("lm_eval", "datasets") if find_spec(name) is None]:
        raise UserError(f"{', '.join(missing)} is not installed: pip install 'spiralformer[eval]'")
    names = _short_names([Path(folder) for folder in folders])
    most = max(options.shots, default=0)
    if options.data_dir is not None:
        tasks.missing_files(options.names, options.data_dir, most)
    with files.writing(options.out, "choose another --out"):
        options.out.mkdir(parents=True, exist_ok=True)
        if not os.access(options.out, os.W_OK):
            raise PermissionError(13, "no permission", str(options.out))

    from spiralformer.evaluate import lm as lms

    device = lms.choose_device(options.device)
    trusted = options.trust_remote_code
    models = [lms.inspect(folder, trust_remote_code=trusted) for folder in folders]
    for model in models:
        _check_window(model, options)
    texts = tasks.load_texts(options.text_names, options.data_dir, options.text_files)
    loaded: dict[str, LoadedTask] = {}
    if options.task_names:
        loaded = tasks.load_tasks(options.task_names, options.data_dir, most, options.limit)
    evaluations = []
    for name, model in zip(names, models, strict=True):
        lm = lms.load_lm(model, device=device, dtype=options.dtype, batch_size=options.batch_size)
        lm.context, lm.stride, lm.screen = options.context, options.stride, sys.stderr
        evaluation = Evaluation(name, model, shown={k: v.shown for k, v in loaded.items()})
        evaluations.append(evaluation)
        if texts:
            _evaluate_texts(evaluation, lm, texts, options)
        for shots in sorted(set(options.shots)) if loaded else ():
            _evaluate_tasks(evaluation, lm, loaded, shots, options)
        del lm
    return evaluations


def _short_names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError("the same folder was given twice")
    names = []
    for path in paths:
        for k in range(1, len(path.parts) + 1):
            if sum(other.parts[-k:] == path.parts[-k:] for other in paths) == 1:
                break
        names.append("/".join(path.parts[-k:]))
    return names


def _check_window(model: InspectedFolder, options: Options) -> None:
    for name in ("context", "stride"):
        value = getattr(options, name)
        if value and value > model.max_length:
            raise UserError(
                f"--{name} {value} is longer than the longest sequence of {model.folder}, "
                f"{model.max_length}"
            )


# ---------------------------------------------------------------------------- scoring


def _cache(model: InspectedFolder, options: Options) -> str:
    """Where the harness keeps answers. It knows them by their request: all else that decides an
    answer is in the name."""
    key = [model.fingerprint, options.dtype, options.context, options.stride, __version__]
    return str(options.out / "cache" / files.digest(key))


def _evaluate_texts(
    evaluation: Evaluation, lm: Any, texts: dict[str, list[Document]], options: Options
) -> None:
    from lm_eval.api.model import CachingLM

    with files.writing(options.out), tasks.quiet():
        cached = CachingLM(lm, _cache(evaluation.model, options) + "_rank0.db")
    for name, documents in texts.items():
        lm.label, started = f"{evaluation.name}  {name}", time.monotonic()
        with tasks.quiet():
            evaluation.texts[name] = perplexity(cached, documents[: options.limit])
        value = evaluation.texts[name].per("token").value
        say(f"{lm.label}  {value:.6g} per token  ({duration(time.monotonic() - started)})")
    cached.dbdict.close()
    results = {name: result.metrics() for name, result in evaluation.texts.items()}
    config = {"context": options.context, "stride": options.stride}
    _write(evaluation, options, "texts", {"results": results, "config": config})


def _evaluate_tasks(
    evaluation: Evaluation, lm: Any, loaded: dict[str, LoadedTask], shots: int, options: Options
) -> None:
    lm.label, lm.truncated, started = f"{evaluation.name}  {shots}-shot", 0, time.monotonic()
    with files.writing(options.out):
        results = score_tasks(
            lm,
            loaded,
            shots,
            limit=options.limit,
            use_cache=_cache(evaluation.model, options),
            batch_size=options.batch_size,
            device=str(lm.device),
            fewshot_random_seed=options.seed,
        )
    results["config"]["truncated_prompts"] = lm.truncated
    evaluation.results[shots] = results
    say(f"{lm.label}  done  ({duration(time.monotonic() - started)})")
    _write(evaluation, options, f"{shots}-shot", results)


def score_tasks(
    lm: Any, loaded: dict[str, LoadedTask], shots: int, limit: int | None = None, **options: Any
) -> dict[str, Any]:
    """The harness's results for any of its models. `options` are those of `simple_evaluate`."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # or each bootstrap starts a process per core
    samples: dict[str, list[int]] = {}
    for task in loaded.values():
        task.reset()
        samples |= task.samples(limit) if limit else {}
    with tasks.quiet():
        results: Any = simple_evaluate(
            model=lm,
            tasks=[root for task in loaded.values() for root in task.roots],
            task_manager=TaskManager(include_defaults=False),  # nothing is looked up by name
            num_fewshot=shots,
            samples=samples or None,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
            **options,
        )
    for task in loaded.values():
        task.reset()
    return results


def _write(evaluation: Evaluation, options: Options, name: str, results: dict[str, Any]) -> None:
    """Functions in the definitions of tasks as text; JSON has no infinity."""
    results["config"] |= {
        "model": str(evaluation.model.folder.resolve()),
        "model_fingerprint": evaluation.model.fingerprint,
        "model_dtype": options.dtype,
        "limit": options.limit,
        "spiralformer_version": __version__,
    }
    content = json.loads(json.dumps(results, default=str), parse_constant=str)
    files.write_json(options.out / evaluation.name / f"{name}.json", content)
