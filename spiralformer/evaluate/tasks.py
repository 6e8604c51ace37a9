"""What is evaluated: the nine tasks of Table 3, the texts of Table 1, any task of the harness.

A folder of local data holds TASK.SPLIT.jsonl to be scored and TASK.fewshot.jsonl for prompts, with
the fields of the task's usual Hugging Face dataset, so that the harness's own prompts work on them.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spiralformer.data.sources import ReadOptions, find_sources, read_documents
from spiralformer.errors import UserError, first_line
from spiralformer.evaluate.perplexity import Document
from spiralformer.files import parse_json, read_text

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
HUB_TEXTS = {  # WikiText-2 as the harness takes it; of the Pile, what is free to copy
    "pile": "hf:monology/pile-uncopyrighted:validation",
    "wikitext": "hf:EleutherAI/wikitext_document_level,wikitext-2-raw-v1:test",
}

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


# ---------------------------------------------------------------------------- tasks


class LoadedTask:
    """A task, group or tag of the harness, with its data."""

    def __init__(self, name: str, built: dict[str, Any]) -> None:
        self.parts = built["tasks"]  # by name
        group = built["groups"].get(name)
        self.roots = list(self.parts.values()) if group is None else [group]
        self.own_shots = {name: part.get_config("num_fewshot") for name, part in self.parts.items()}
        for part, task in self.parts.items():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise UserError(f"task {part} runs code or shows pictures: not done here")

    def reset(self) -> None:
        """For another run: the harness leaves its prompts and its number of shots in a task."""
        for name, part in self.parts.items():
            part.set_config("num_fewshot", self.own_shots[name])
            part._instances = None

    def samples(self, limit: int) -> dict[str, list[int]]:
        """The first examples, about `limit` in all: as many of each part."""
        share = math.ceil(limit / len(self.parts))
        return {name: list(range(len(part.task_docs)))[:share] for name, part in self.parts.items()}


def load_tasks(names: Sequence[str], data_dir: Path | None, shots: int) -> dict[str, LoadedTask]:
    """The harness's tasks. The paper's have local data where there is a folder of them; all other
    data come from where the task says, mostly the hub."""
    loaded = {}
    with quiet():
        manager = _manager(names)
        for name in names:
            if data_dir is not None and name in PAPER:
                loaded[name] = _load_local(PAPER[name], data_dir, shots, manager)
                continue
            try:
                loaded[name] = LoadedTask(name, manager.load(name))
            except UserError:
                raise
            except Exception as error:  # what a task does to find its data is its own affair
                raise _cannot_load(name, error) from None
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


# ---------------------------------------------------------------------------- local data


def require_files(names: Sequence[str], folder: Path, shots: int) -> None:
    """Of the paper's tasks and texts. LAMBADA can do without a few-shot file: the harness has no
    training examples of it either."""
    ours = [PAPER[name] for name in names if name in PAPER]
    wanted = [TEXT_FILES[name] for name in names if name in TEXTS]
    wanted += [task.scored_file for task in ours]
    wanted += [task.shots_file for task in ours if shots and task.name not in LAMBADA]
    if lacking := [file for file in wanted if not (folder / file).is_file()]:
        raise UserError(
            f"--data-dir {folder} lacks {', '.join(lacking)}; add them, or leave out their tasks"
        )


def _load_local(task: PaperTask, folder: Path, shots: int, manager: Any) -> LoadedTask:
    """The harness's definition of a task, with local rows in the place of the hub's."""
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    scored, examples = folder / task.scored_file, folder / task.shots_file
    rows = read_rows(scored)
    prompts = read_rows(examples) if examples.is_file() else {}
    data = {task.name: (rows, prompts)}
    if task.name == MMLU:
        subjects = sorted({str(row.get("subject")) for row in rows.values()})
        data = {
            f"mmlu_{subject}_continuation": (_about(subject, rows), _about(subject, prompts))
            for subject in subjects
        }
        if unknown := [name for name in data if name not in manager.task_index]:
            raise UserError(f"{scored}: a subject unknown to the harness: no task {unknown[0]}")
    parts = [_local_part(name, task, *some) for name, some in data.items()]
    try:
        built = manager.load({"group": f"local {task.name}", "task": parts})
    except Exception as error:  # it looks at the first row, and asks Arrow for all of them
        raise UserError(f"{scored}: the harness cannot use its rows: {_reason(error)}") from None
    for name, part in built["tasks"].items():
        _check_rows(part, scored, data[name][0])
        pool, is_scored = len(part.sampler.df), part.fewshot_cfg.split in (task.split, None)
        if shots and pool < shots + is_scored:  # no question is an example for itself
            file = scored if is_scored else examples
            raise UserError(f"{file}: {pool} examples are too few for {shots} shots of {name}")
    if task.name == MMLU:
        accuracy = AggMetricConfig(metric="acc", weight_by_size=True)
        group = built["groups"][MMLU] = Group(MMLU, aggregate_metric_list=[accuracy])
        for part in built["tasks"].values():
            group.add(part)
    return LoadedTask(task.name, built)


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


def _check_rows(part: Any, path: Path, lines: Iterable[int]) -> None:
    """Whether the harness can make a question of each row, with its answer among the choices."""
    for line, doc in zip(lines, part.task_docs, strict=True):
        try:
            text, target = part.doc_to_text(doc), part.doc_to_target(doc)
            choices = part.doc_to_choice(doc) if part.config.doc_to_choice else None
        except Exception as error:
            raise UserError(f"{path}:{line}: the harness cannot use it: {_reason(error)}") from None
        answer = text if part.multiple_input else target
        if choices is not None and not (isinstance(answer, int) and 0 <= answer < len(choices)):
            raise UserError(f"{path}:{line}: answer {answer!r} is none of {len(choices)} choices")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__} {first_line(error)}"


LARGEST_ROWS = 1 << 30  # bytes of a file of examples


def read_rows(path: Path) -> Rows:
    """The JSON objects of a file, one a line. Blank lines are passed by."""
    rows = {}
    for number, line in enumerate(read_text(path, LARGEST_ROWS).split("\n"), 1):
        if not line.strip():
            continue
        rows[number] = parse_json(line, f"{path}:{number}")
        if not isinstance(rows[number], dict):
            raise UserError(f"{path}:{number}: not a JSON object")
    if not rows:
        raise UserError(f"{path}: empty")
    return rows


# ---------------------------------------------------------------------------- texts


def load_texts(
    names: Sequence[str], data_dir: Path | None, files: Sequence[Path]
) -> dict[str, list[Document]]:
    """Documents, by the name of a text or of a file."""
    texts = {}
    for name in names:
        is_wiki = name == "wikitext"
        if data_dir is not None:
            contents = _read(data_dir / TEXT_FILES[name])
            contents = wikitext_pages(contents[0]) if is_wiki else contents
        else:
            try:
                with quiet():
                    contents = _read(HUB_TEXTS[name], "page" if is_wiki else "text")
            except UserError as error:
                raise _cannot_load(name, error) from None
        texts[name] = [wikitext_document(text) if is_wiki else Document(text) for text in contents]
    return texts | {str(path): [Document(text) for text in _read(path)] for path in files}


def _read(source: str | Path, text_field: str = "text") -> list[str]:
    """The texts of anything that `spiralformer data` reads; a plain text file is one."""
    options = ReadOptions(text_field, split_documents="file")
    documents = (read_documents(one, options) for one in find_sources([str(source)]))
    texts = [text for some in documents for text, _ in some if text and text.strip()]
    if not texts:
        raise UserError(f"{source}: empty; there is no text to score")
    return texts


def wikitext_pages(text: str) -> list[str]:
    """WikiText as the harness has it: a document per article, from heading to heading."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        plain = line.replace("= = =", "===").replace("= =", "==").strip()
        if plain.startswith("= ") and plain.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    joined = ("\n".join(lines) for lines in pages)
    return [page for page in joined if page.strip()]


def wikitext_document(page: str) -> Document:
    """Detokenized, but counted as it was."""
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    return Document(wikitext_detokenizer({"page": page}), page)
