"""An evaluation from plan to results: check the input, then the data, then load models.

The harness keeps each answer of a model in OUT/cache, so that an interrupted evaluation goes on and
a repeated one only prints; its results go to OUT/MODEL/K-shot.json as they are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spiralformer import __version__, files
from spiralformer.console import duration, say
from spiralformer.errors import UserError
from spiralformer.evaluate import tasks
from spiralformer.evaluate.tasks import PAPER, TEXTS, LoadedTask

if TYPE_CHECKING:  # these need torch and the harness
    from spiralformer.evaluate.lm import InspectedFolder
    from spiralformer.evaluate.perplexity import Perplexity

DTYPES = ("auto", "float32", "bfloat16", "float16")
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
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype {self.dtype} is not one of {', '.join(DTYPES)}")
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


class Score(NamedTuple):
    value: float
    stderr: float | None


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
        if metric is None:
            metric = PAPER[task].metric if task in PAPER else next(iter(self.metrics(task, shots)))
        return self.metrics(task, shots).get(metric)

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
    most, given = max(options.shots, default=0), [Path(folder) for folder in folders]
    names = _short_names(given)
    if options.data_dir is not None:
        tasks.missing_files(options.names, options.data_dir, most)
    with files.writing(options.out, "choose another --out"):
        options.out.mkdir(parents=True, exist_ok=True)
        if not os.access(options.out, os.W_OK):
            raise PermissionError(13, "no permission", str(options.out))

    from spiralformer.evaluate import lm

    device = lm.choose_device(options.device)
    trusted = options.trust_remote_code
    models = [lm.inspect(folder, trust_remote_code=trusted) for folder in given]
    for model in models:
        _check_window(model, options)
    texts = tasks.load_texts(options.text_names, options.data_dir, options.text_files)
    loaded = {}
    if options.task_names:
        loaded = tasks.load_tasks(options.task_names, options.data_dir, most, options.limit)
    evaluations = []
    with open(os.dup(2), "w", errors="replace") as screen:
        for name, model in zip(names, models, strict=True):
            scorer = lm.load_lm(
                model, device=device, dtype=options.dtype, batch_size=options.batch_size
            )
            scorer.context, scorer.stride, scorer.screen = options.context, options.stride, screen
            evaluation = Evaluation(name, model, shown={k: v.shown for k, v in loaded.items()})
            evaluations.append(evaluation)
            _score_texts(evaluation, scorer, texts, options)
            for shots in sorted(set(options.shots)) if loaded else ():
                _score_tasks(evaluation, scorer, loaded, shots, options)
            del scorer
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


def _score_texts(evaluation: Evaluation, lm: Any, texts: dict[str, Any], options: Options) -> None:
    from lm_eval.api.model import CachingLM

    from spiralformer.evaluate.perplexity import perplexity

    if not texts:
        return
    with files.writing(options.out), tasks.quiet():
        cached = CachingLM(lm, _cache(evaluation.model, options) + "_rank0.db")
    for name, documents in texts.items():
        lm.label, started = f"{evaluation.name}  {name}", time.monotonic()
        with tasks.quiet():
            result = perplexity(cached, documents[: options.limit])
        evaluation.texts[name] = result
        took = duration(time.monotonic() - started)
        say(f"{lm.label}  {result.per_token:.6g} per token  ({took})")
    cached.dbdict.close()
    results = {name: result.metrics() for name, result in evaluation.texts.items()}
    config = _config(evaluation, options) | {"context": options.context, "stride": options.stride}
    _write(evaluation, options, "texts", {"results": results, "config": config})


def _score_tasks(
    evaluation: Evaluation, lm: Any, loaded: dict[str, LoadedTask], shots: int, options: Options
) -> None:
    from lm_eval import simple_evaluate

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # or each bootstrap starts a process per core
    samples: dict[str, list[int]] = {}
    for task in loaded.values():
        samples |= task.samples(options.limit) if options.limit else {}
        for name, part in task.parts.items():  # the harness leaves its last number there
            part.set_config("num_fewshot", task.shots[name])
    lm.label, lm.truncated, started = f"{evaluation.name}  {shots}-shot", 0, time.monotonic()
    with files.writing(options.out), tasks.quiet():
        results = simple_evaluate(
            model=lm,
            tasks=[root for task in loaded.values() for root in task.roots],
            num_fewshot=shots,
            batch_size=options.batch_size,
            device=str(lm.device),
            use_cache=_cache(evaluation.model, options),
            samples=samples or None,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
            fewshot_random_seed=options.seed,
        )
    for task in loaded.values():
        for part in task.parts.values():
            part._instances = None  # the prompts, which are large
    results["config"] |= _config(evaluation, options) | {"truncated_prompts": lm.truncated}
    evaluation.results[shots] = results
    say(f"{lm.label}  done  ({duration(time.monotonic() - started)})")
    _write(evaluation, options, f"{shots}-shot", results)


def _config(evaluation: Evaluation, options: Options) -> dict[str, Any]:
    model = evaluation.model
    return {
        "model": str(model.folder.resolve()),
        "model_fingerprint": model.fingerprint,
        "model_dtype": options.dtype,
        "limit": options.limit,
        "spiralformer_version": __version__,
    }


def _write(evaluation: Evaluation, options: Options, name: str, results: dict[str, Any]) -> None:
    """Functions in the definitions of tasks as text; JSON has no infinity."""
    content = json.loads(json.dumps(results, default=str), parse_constant=str)
    files.write_json(options.out / evaluation.name / f"{name}.json", content)
