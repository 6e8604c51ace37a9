"""What is evaluated: the nine tasks of Table 3, the texts of Table 1, any task of the harness.

A folder of local data holds TASK.SPLIT.jsonl to be scored and TASK.fewshot.jsonl for prompts, with
the fields of the task's usual Hugging Face dataset, so that the harness's own prompts work on them.
"""

from __future__ import annotations

import contextlib
import difflib
import gzip
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spiralformer.errors import UserError

Rows = dict[int, dict[str, Any]]  # of a jsonl file, by the numbers of their lines


@dataclass(frozen=True)
class PaperTask:
    """A task of the harness. The paper reports `metric` of it, under `column`."""

    name: str
    column: str
    metric: str
    file: str  # how the names of its local files begin
    split: str  # what the harness scores
    shots_split: str  # where it draws examples from

    @property
    def scored_file(self) -> str:
        return f"{self.file}.{self.split}.jsonl"

    @property
    def shots_file(self) -> str:
        return f"{self.file}.fewshot.jsonl"


# fmt: off
PAPER = {task.name: task for task in (  # in the order of Table 3
    PaperTask("lambada_openai", "LD-O", "acc", "lambada_openai", "test", "test"),
    PaperTask("lambada_standard", "LD-S", "acc", "lambada_standard", "test", "validation"),
    PaperTask("hellaswag", "HS", "acc_norm", "hellaswag", "validation", "train"),
    PaperTask("piqa", "PQ", "acc_norm", "piqa", "validation", "train"),
    PaperTask("winogrande", "WG", "acc", "winogrande", "validation", "train"),
    PaperTask("arc_easy", "ARC-E", "acc_norm", "arc_easy", "test", "train"),
    PaperTask("arc_challenge", "ARC-C", "acc_norm", "arc_challenge", "test", "train"),
    PaperTask("sciq", "SciQ", "acc_norm", "sciq", "test", "train"),
    PaperTask("mmlu_continuation", "MMLU", "acc", "mmlu", "test", "dev"),
)}
# fmt: on
LAMBADA = ("lambada_openai", "lambada_standard")
MMLU = "mmlu_continuation"
ALIASES = {"mmlu": MMLU}

TEXTS = {"pile": "Pile", "wikitext": "Wiki"}  # by name, with the column of Table 1
TEXT_FILES = {"pile": "pile_sample.test.jsonl", "wikitext": "wikitext2_raw.test.txt"}

# Where the harness keeps the paper's tasks: to index all of its tasks takes seconds.
_FOLDERS = ("arc", "hellaswag", "lambada", "mmlu/continuation", "piqa", "sciq", "winogrande")


def parse_names(names: Iterable[str]) -> list[str]:
    """Names of tasks and texts, the paper's first and in its order; `paper` is all of these."""
    ours = [*TEXTS, *PAPER]
    asked: dict[str, None] = {}
    for name in " ".join(names).replace(",", " ").split():
        asked.update(dict.fromkeys(ours if name == "paper" else [ALIASES.get(name, name)]))
    return [name for name in ours if name in asked] + [name for name in asked if name not in ours]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing that a library prints or logs is seen. Errors are raised as ever."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            yield
    finally:
        logging.disable(before)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---------------------------------------------------------------------------- tasks


class LoadedTask:
    """A task, group or tag of the harness, with its data."""

    def __init__(self, roots: list[Any], parts: dict[str, Any]) -> None:
        self.roots = roots  # what is given to `simple_evaluate`
        self.parts = parts  # the tasks in it, by name
        groups = [root.name for root in roots if getattr(root, "has_aggregation", False)]
        self.shown = groups or list(parts)  # names in the results: the group's, or its tasks'
        self.own_shots = {name: part.get_config("num_fewshot") for name, part in parts.items()}
        for name, part in parts.items():
            if getattr(part, "UNSAFE_CODE", False):
                raise UserError(f"task {name} runs code that a model wrote: not done here")
            if getattr(part, "MULTIMODAL", False):
                raise UserError(f"task {name} is not about text alone, and these models are")

    def reset(self) -> None:
        """For another run: the harness leaves its prompts and its number of shots in a task."""
        for name, part in self.parts.items():
            part.set_config("num_fewshot", self.own_shots[name])
            part._instances = None

    def samples(self, limit: int) -> dict[str, list[int]]:
        """The first examples, `limit` in all, spread over the parts; at least one of each."""
        sizes = {name: len(part.task_docs) for name, part in self.parts.items()}
        return {name: list(range(max(count, 1))) for name, count in spread(limit, sizes).items()}


def spread(limit: int, sizes: dict[str, int]) -> dict[str, int]:
    """How many examples of each part make up `limit`, as evenly as their sizes allow."""
    turns = sorted((turn, k) for k, size in enumerate(sizes.values()) for turn in range(size))
    counts = [0] * len(sizes)
    for _, k in turns[:limit]:
        counts[k] += 1
    return dict(zip(sizes, counts, strict=True))


def load_tasks(
    names: Sequence[str], data_dir: Path | None, shots: int, limit: int | None = None
) -> dict[str, LoadedTask]:
    """The harness's tasks. The paper's have local data where there is a folder of them; all other
    data come from where the task says, mostly the hub."""
    loaded = {}
    with quiet():
        manager = _manager(names)
        for name in names:
            if data_dir is not None and name in PAPER:
                loaded[name] = _local(PAPER[name], data_dir, shots, limit, manager)
                continue
            try:
                built = manager.load(name)
            except Exception as error:  # what a task does to find its data is its own affair
                raise _cannot_load(name, error) from None
            group = built["groups"].get(name)
            roots = [group] if group is not None else list(built["tasks"].values())
            loaded[name] = LoadedTask(roots, built["tasks"])
    return loaded


def _cannot_load(name: str, error: Exception) -> UserError:
    remedy = "; --data-dir DIR reads local files instead" if name in (*PAPER, *TEXTS) else ""
    return UserError(f"{name}: cannot be loaded: {first_line(error)}{remedy}")


def _manager(names: Sequence[str]) -> Any:
    """The harness's index of tasks; one that is in nobody's index is refused."""
    from lm_eval import tasks
    from lm_eval.tasks import TaskManager

    if all(name in PAPER for name in names):
        root = Path(tasks.__file__).parent
        folders: list[str | Path] = [root / folder for folder in _FOLDERS]
        return TaskManager(include_path=folders, include_defaults=False)
    manager = TaskManager()
    known = [*TEXTS, *ALIASES, "paper", *manager.all_tasks]
    for name in names:
        if name not in manager.task_index and not Path(name).is_file():
            near = difflib.get_close_matches(name.lower(), known, 3)
            hint = f"the nearest: {', '.join(near)}" if near else "`lm_eval ls tasks` lists them"
            raise UserError(f"unknown task {name!r}; {hint}")
    return manager


def _local(
    task: PaperTask, folder: Path, shots: int, limit: int | None, manager: Any
) -> LoadedTask:
    """The harness's definition of a task, with local rows in the place of the hub's."""
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    scored, examples = folder / task.scored_file, folder / task.shots_file
    rows = read_rows(scored)
    prompts = read_rows(examples) if examples.is_file() else {}
    data = {task.name: (rows, prompts)}
    if task.name == MMLU:
        data = {}
        sizes = Counter(sorted(str(row.get("subject")) for row in rows.values()))
        counts = spread(limit, sizes) if limit else sizes
        for subject in (subject for subject, count in counts.items() if count):
            name = f"mmlu_{subject}_continuation"
            if name not in manager.task_index:
                raise UserError(f"{scored}: the harness has no MMLU subject {subject!r}")
            data[name] = (_about(subject, rows), _about(subject, prompts))
    parts = [_local_part(name, task, *some) for name, some in data.items()]
    try:
        built = manager.load({"group": f"local {task.name}", "task": parts})["tasks"]
    except Exception as error:  # it looks at the first row, and asks Arrow for all of them
        reason = f"{type(error).__name__} {first_line(error)}"
        raise UserError(f"{scored}: the harness cannot use its rows: {reason}") from None
    for name, part in built.items():
        _check_rows(part, scored, list(data[name][0])[:limit])
        pool, is_scored = len(part.sampler.df), part.fewshot_cfg.split in (task.split, None)
        if shots and pool < shots + is_scored:  # no question is an example for itself
            file = scored if is_scored else examples
            raise UserError(f"{file}: {pool} examples are too few for {shots} shots of {name}")
    if task.name != MMLU:
        return LoadedTask(list(built.values()), built)
    group = Group(MMLU, aggregate_metric_list=[AggMetricConfig(metric="acc", weight_by_size=True)])
    for part in built.values():
        group.add(part)
    return LoadedTask([group], built)


def _about(subject: str, rows: Rows) -> Rows:
    return {line: row for line, row in rows.items() if row.get("subject") == subject}


def _local_part(name: str, task: PaperTask, rows: Rows, prompts: Rows) -> dict[str, Any]:
    """What of a task's definition changes: where its data come from."""
    splits = {task.split: list(rows.values())}
    changes = {}
    if prompts:
        splits["fewshot"] = list(prompts.values())
        changes["fewshot_split"] = "fewshot"
    elif task.shots_split != task.split:
        # Examples come from what is scored; the harness then leaves out the one in question.
        changes["fewshot_split"] = task.split

    def local_rows(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {split: Dataset.from_list(some) for split, some in splits.items()}

    return {"task": name, "custom_dataset": local_rows, **changes}


def _check_rows(part: Any, path: Path, lines: list[int]) -> None:
    """Whether the harness can make a question of each row, with its answer among the choices."""
    for line, doc in zip(lines, part.task_docs, strict=False):
        try:
            text, target = part.doc_to_text(doc), part.doc_to_target(doc)
            choices = part.doc_to_choice(doc) if part.config.doc_to_choice else None
        except Exception as error:
            reason = f"{type(error).__name__} {first_line(error)}"
            raise UserError(f"{path}:{line}: the harness cannot use it: {reason}") from None
        answer = text if part.multiple_input else target
        if choices is not None and not (isinstance(answer, int) and 0 <= answer < len(choices)):
            raise UserError(f"{path}:{line}: answer {answer!r} is none of {len(choices)} choices")


def missing_files(names: Sequence[str], folder: Path, shots: int) -> None:
    """Refuses a folder without the files of the paper's tasks and texts. LAMBADA can do without a
    few-shot file: the harness has no training examples of it either."""
    lines = []
    for name in names:
        wanted = [TEXT_FILES[name]] if name in TEXTS else []
        if name in PAPER:
            wanted = [PAPER[name].scored_file]
            wanted += [PAPER[name].shots_file] if shots and name not in LAMBADA else []
        if lacking := [file for file in wanted if not (folder / file).is_file()]:
            lines.append(f"\n  {name}: {', '.join(lacking)}")
    if lines:
        raise UserError(
            f"--data-dir {folder} lacks data; add it or leave out the tasks:{''.join(lines)}"
        )


# ---------------------------------------------------------------------------- texts


@dataclass(frozen=True)
class Document:
    """A text to score. Words and bytes are those of the original, where that was another text."""

    text: str
    words: int
    bytes: int

    @classmethod
    def of(cls, text: str, original: str | None = None) -> Document:
        """Words are counted as the harness does."""
        original = text if original is None else original
        return cls(text, len(re.split(r"\s+", original)), len(original.encode()))


def load_texts(
    names: Sequence[str], data_dir: Path | None, files: Sequence[Path]
) -> dict[str, list[Document]]:
    """Documents, by the name of a text or of a file."""
    texts = {}
    for name in names:
        if data_dir is not None:
            path = data_dir / TEXT_FILES[name]
            is_wiki = name == "wikitext"
            texts[name] = wikitext_documents(read_text(path)) if is_wiki else read_documents(path)
            continue
        try:
            with quiet():
                texts[name] = _hub_documents(name)
        except Exception as error:
            raise _cannot_load(name, error) from None
    return texts | {str(path): read_documents(path) for path in files}


def _hub_documents(name: str) -> list[Document]:
    """WikiText-2 as the harness takes it; the validation set of the Pile, what is free of it."""
    import datasets

    if name == "wikitext":
        source = ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1")
        pages = [row["page"] for row in datasets.load_dataset(*source, split="test")]
        return [_wikitext_document(page) for page in pages]
    files = {"validation": "val.jsonl.zst"}
    rows = datasets.load_dataset(
        "monology/pile-uncopyrighted", data_files=files, split="validation"
    )
    return [Document.of(row["text"]) for row in rows if row["text"]]


def wikitext_documents(text: str) -> list[Document]:
    """WikiText as the harness has it: a document per article, from heading to heading."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        plain = line.replace("= = =", "===").replace("= =", "==").strip()
        if plain.startswith("= ") and plain.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    joined = ("\n".join(lines) for lines in pages)
    return [_wikitext_document(page) for page in joined if page.strip()]


def _wikitext_document(page: str) -> Document:
    """Detokenized, but counted as it was."""
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    return Document.of(wikitext_detokenizer({"page": page}), page)


def read_documents(path: Path) -> list[Document]:
    """A jsonl file has one document per line, under `text`; any other file is one document."""
    if path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        rows = read_rows(path)
        for line, row in rows.items():
            if not isinstance(row.get("text"), str):
                raise UserError(f"{path}:{line}: no text under the field 'text'")
        texts = [row["text"] for row in rows.values()]
    else:
        texts = [read_text(path)]
    documents = [Document.of(text) for text in texts if text.strip()]
    if not documents:
        raise UserError(f"{path}: empty; there is no text to score")
    return documents


# ---------------------------------------------------------------------------- files


def read_rows(path: Path) -> Rows:
    """Blank lines are passed by."""
    rows = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows[number] = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(rows[number], dict):
            raise UserError(f"{path}:{number}: not a JSON object")
    if not rows:
        raise UserError(f"{path}: empty")
    return rows


def read_text(path: Path) -> str:
    """The text of a file; also of one that gzip has packed."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        return content.decode()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 ({error.reason})") from None
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
