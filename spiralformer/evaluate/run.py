"""An evaluation from plan to results: check the input, then the data, then load models.

The harness keeps each answer of a model in OUT/cache, so that an interrupted evaluation goes on and
a repeated one only prints; its results go to OUT/MODEL/K-shot.json as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spiralformer import __version__, files
from spiralformer.config import SpiralConfig
from spiralformer.console import count, duration, say
from spiralformer.errors import UserError
from spiralformer.evaluate import tasks
from spiralformer.evaluate.perplexity import Document, perplexity
from spiralformer.evaluate.tasks import TEXTS, LoadedTask
from spiralformer.machine import require_package
from spiralformer.model_folder import find_model

NEEDED = ("lm_eval", "accelerate", "datasets")  # of the extra `eval`
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


class Score(NamedTuple):
    value: float
    stderr: float | None = None
    higher: bool | None = None  # whether more is better, where that is known
    basis: int | None = None  # two scores compare where it is the same


@dataclass
class Evaluation:
    """What one model reached."""

    name: str  # in tables
    folder: Path
    max_length: int
    spiral_config: SpiralConfig | None = None  # of a model of ours
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """As the harness gives them: of `texts`, and of tasks `0-shot`, `5-shot`, …"""

    def metrics(self, task: str, kind: str) -> dict[str, Score]:
        """All metrics of a task; those of a filter other than none are `metric,filter`."""
        results = self.results.get(kind, {})
        row = results.get("results", {}).get(task, {})
        directions = results.get("higher_is_better", {}).get(task, {})
        scores = {}
        for key, value in row.items():
            metric, comma, filtered = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                stderr = row.get(f"{metric}_stderr,{filtered}")
                name = metric if filtered == "none" else key
                scores[name] = Score(
                    value,
                    stderr if isinstance(stderr, float) else None,
                    directions.get(metric),
                    row.get("tokens") if metric == "token_perplexity" else None,
                )
        return scores


def require_packages() -> None:
    for name in NEEDED:
        require_package(name, "evaluating", "eval")


def evaluate_folders(folders: Sequence[str | Path], options: Options) -> list[Evaluation]:
    """Everything asked for, for each model folder. Progress goes to standard error."""
    require_packages()
    paths = [find_model(folder) for folder in folders]
    names = _short_names([Path(folder) for folder in folders])
    most = max(options.shots, default=0)
    if options.data_dir is not None:
        tasks.require_files(options.names, options.data_dir, most)
    with files.writing(options.out, "choose another --out"):
        (options.out / "cache").mkdir(parents=True, exist_ok=True)

    from spiralformer.evaluate import lm as lms

    device = lms.choose_device(options.device)
    settings: dict[str, Any] = {
        "dtype": options.dtype,
        "batch_size": options.batch_size,
        "trust_remote_code": options.trust_remote_code,
    }
    evaluations = []
    for name, path in zip(names, paths, strict=True):
        checked = lms.load_lm(path, device="meta", **settings)  # before any long work
        _check_window(path, checked.max_length, options)
        config = checked.model.config if isinstance(checked, lms.SpiralLM) else None
        evaluations.append(Evaluation(name, path, checked.max_length, config))
    texts = tasks.load_texts(options.text_names, options.data_dir, options.text_files)
    loaded: dict[str, LoadedTask] = {}
    if options.task_names:
        loaded = tasks.load_tasks(options.task_names, options.data_dir, most)
    for evaluation in evaluations:
        lm = lms.load_lm(evaluation.folder, device=device, **settings)
        lm.context, lm.stride, lm.screen = options.context, options.stride, sys.stderr
        cache = _cache(evaluation.folder, options)
        if texts:
            with _recorded(evaluation, "texts", lm, options) as results:
                results |= score_texts(lm, texts, cache, options.limit)
        for shots in sorted(set(options.shots)) if loaded else ():
            with _recorded(evaluation, f"{shots}-shot", lm, options) as results:
                results |= score_tasks(
                    lm,
                    loaded,
                    shots,
                    options.limit,
                    use_cache=cache,
                    batch_size=options.batch_size,
                    device=device,
                    fewshot_random_seed=options.seed,
                )
        del lm
    return evaluations


def _short_names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    for k in range(1, max(map(len, parts)) + 1):
        names = ["/".join(some[-k:]) for some in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError("the same folder was given twice")


def _check_window(folder: Path, max_length: int, options: Options) -> None:
    for name in ("context", "stride"):
        value = getattr(options, name)
        if value and value > max_length:
            raise UserError(
                f"--{name} {value} is longer than the longest sequence of {folder}, {max_length}"
            )


def _cache(folder: Path, options: Options) -> str:
    """Where the harness keeps answers. It knows them by their request: all else that decides an
    answer is in the name."""
    endings = (".safetensors", ".bin", ".json", ".model", ".txt", ".py")
    parts = [path for path in sorted(folder.iterdir()) if path.suffix in endings]
    model = [(path.name, files.digest(path)) for path in parts]
    key = [model, options.dtype, options.context, options.stride, __version__]
    return str(options.out / "cache" / files.digest(key))


@contextlib.contextmanager
def _recorded(
    evaluation: Evaluation, kind: str, lm: Any, options: Options
) -> Iterator[dict[str, Any]]:
    """Results to fill; they are then kept and written."""
    label = lm.label = f"{evaluation.name}  {kind}"
    lm.truncated, started = 0, time.monotonic()
    results: dict[str, Any] = {}
    with files.writing(options.out):
        yield results
    cut = f", {count(lm.truncated, 'prompt')} cut to fit" if lm.truncated else ""
    say(f"{label}  done{cut}  ({duration(time.monotonic() - started)})")
    results["config"] = results.get("config", {}) | {
        "model": str(evaluation.folder.resolve()),
        "model_dtype": options.dtype,
        "context": options.context,
        "stride": options.stride,
        "limit": options.limit,
        "truncated_prompts": lm.truncated,
        "spiralformer_version": __version__,
    }
    evaluation.results[kind] = results
    # Functions in the definitions of tasks become text; JSON has no infinity.
    content = json.loads(json.dumps(results, default=str), parse_constant=str)
    files.write_json(options.out / evaluation.name / f"{kind}.json", content)


# ---------------------------------------------------------------------------- scoring


def score_texts(
    lm: Any, texts: dict[str, list[Document]], cache: str, limit: int | None
) -> dict[str, Any]:
    """Perplexities and bits, in the form of the harness's results. Less of each is better."""
    from lm_eval.api.model import CachingLM

    label, scores = lm.label, {}
    with tasks.quiet():
        cached = CachingLM(lm, f"{cache}_rank0.db")  # as `simple_evaluate` names it
        for name, documents in texts.items():
            lm.label = f"{label}  {name}"
            scores[name] = perplexity(cached, documents[:limit])
    cached.dbdict.close()
    less = {
        name: {key.partition(",")[0]: False for key in metrics} for name, metrics in scores.items()
    }
    return {"results": scores, "higher_is_better": less}


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
    return results
