"""What is evaluated: the nine tasks of Table 3, the texts of Table 1, and their local files.

A local folder holds TASK.SPLIT.jsonl to be scored and TASK.fewshot.jsonl for prompts, with the
fields of the task's usual Hugging Face dataset, so that the harness's own prompts work on them.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spiralformer.errors import UserError

Row = dict[str, Any]
Fields = Mapping[str, type | tuple[type, ...]]


class DataError(UserError, ValueError):
    """A data file that is missing, empty or malformed. The message names file and line."""


@dataclass(frozen=True)
class Task:
    """A task of the harness. The paper reports `metric` of it, under `column`."""

    name: str
    column: str
    metric: str
    file: str  # how the names of its local files begin
    split: str  # what the harness scores
    shots_from: str | None  # where it draws examples from; None: from what it scores
    fields: Fields
    complaint: Callable[[Row], str | None] = lambda row: None

    @property
    def eval_file(self) -> str:
        return f"{self.file}.{self.split}.jsonl"

    @property
    def shots_file(self) -> str:
        return f"{self.file}.fewshot.jsonl"


def _one_of(field: str, allowed: Iterable[Any], row: Row) -> str | None:
    allowed = list(allowed)
    return None if row[field] in allowed else f"{field} {row[field]!r} is not one of {allowed}"


def _wrong_hellaswag(row: Row) -> str | None:
    if wrong := _not_strings("endings", row["endings"]):
        return wrong
    return _one_of("label", map(str, range(len(row["endings"]))), {"label": str(row["label"])})


def _wrong_winogrande(row: Row) -> str | None:
    if "_" not in row["sentence"]:
        return "sentence has no blank _"
    return _one_of("answer", ("1", "2"), row)


def _wrong_arc(row: Row) -> str | None:
    texts, labels = row["choices"].get("text"), row["choices"].get("label")
    if wrong := _not_strings("choices.text", texts) or _not_strings("choices.label", labels):
        return wrong
    if len(texts) != len(labels):
        return "choices.text and choices.label differ in length"
    return _one_of("answerKey", labels, row)


def _wrong_mmlu(row: Row) -> str | None:
    return _not_strings("choices", row["choices"]) or _one_of(
        "answer", range(len(row["choices"])), row
    )


def _not_strings(field: str, value: Any) -> str | None:
    good = isinstance(value, list) and value and all(isinstance(v, str) and v for v in value)
    return None if good else f"{field} is not a list of texts"


def _wrong_lambada(row: Row) -> str | None:
    return None if " " in row["text"].strip() else "text has no last word to guess"


_ARC = {"question": str, "choices": dict, "answerKey": str}
_SCIQ = dict.fromkeys(
    ("question", "correct_answer", "distractor1", "distractor2", "distractor3", "support"), str
)
_HELLASWAG: Fields = {
    "ctx_a": str,
    "ctx_b": str,
    "endings": list,
    "label": (str, int),
    "activity_label": str,
}
_PIQA = {"goal": str, "sol1": str, "sol2": str, "label": int}
_WINOGRANDE = dict.fromkeys(("sentence", "option1", "option2", "answer"), str)
_MMLU = {"question": str, "subject": str, "choices": list, "answer": int}

# fmt: off
TASKS: dict[str, Task] = {task.name: task for task in (  # in the order of Table 3
    Task("lambada_openai", "LD-O", "acc", "lambada_openai", "test", None,
         {"text": str}, _wrong_lambada),
    Task("lambada_standard", "LD-S", "acc", "lambada_standard", "test", "validation",
         {"text": str}, _wrong_lambada),
    Task("hellaswag", "HS", "acc_norm", "hellaswag", "validation", "train",
         _HELLASWAG, _wrong_hellaswag),
    Task("piqa", "PQ", "acc_norm", "piqa", "validation", "train",
         _PIQA, lambda row: _one_of("label", (0, 1), row)),
    Task("winogrande", "WG", "acc", "winogrande", "validation", "train",
         _WINOGRANDE, _wrong_winogrande),
    Task("arc_easy", "ARC-E", "acc_norm", "arc_easy", "test", "train", _ARC, _wrong_arc),
    Task("arc_challenge", "ARC-C", "acc_norm", "arc_challenge", "test", "train", _ARC, _wrong_arc),
    Task("sciq", "SciQ", "acc_norm", "sciq", "test", "train", _SCIQ),
    Task("mmlu_continuation", "MMLU", "acc", "mmlu", "test", "dev", _MMLU, _wrong_mmlu),
)}
# fmt: on
LAMBADA = ("lambada_openai", "lambada_standard")

TEXTS = {"pile": "Pile", "wikitext": "Wiki"}  # by name, with the column of Table 1
TEXT_FILES = {"pile": "pile_sample.test.jsonl", "wikitext": "wikitext2_raw.test.txt"}

ALIASES = {"mmlu": "mmlu_continuation"}


def parse_names(names: Iterable[str]) -> list[str]:
    """Names of tasks and texts in the paper's order; `paper` is all of them."""
    known = [*TEXTS, *TASKS]
    asked = set()
    for name in " ".join(names).replace(",", " ").split():
        if name == "paper":
            asked.update(known)
        elif (real := ALIASES.get(name, name)) in known:
            asked.add(real)
        else:
            near = difflib.get_close_matches(name.lower(), ["paper", *known, *ALIASES], 3, 0.4)
            hint = (
                f"the nearest: {', '.join(near)}" if near else f"known: paper, {', '.join(known)}"
            )
            raise UserError(f"unknown task {name!r}; {hint}")
    return [name for name in known if name in asked]


# ---------------------------------------------------------------------------- local files


@dataclass(frozen=True)
class Rows:
    """The rows of a local task and of its few-shot file, if there is one."""

    scored: list[Row]
    shots: list[Row] | None
    digest: str  # of the files


@dataclass(frozen=True)
class Document:
    """A text to score. Words and bytes are those of the original, where that was another text."""

    text: str
    words: int
    bytes: int

    @classmethod
    def of(cls, text: str) -> Document:
        """Words are counted as the harness does."""
        return cls(text, len(re.split(r"\s+", text)), len(text.encode()))


def read_task(task: Task, folder: Path, shots: int) -> Rows:
    """The rows of a task, all of them checked. `shots` is the most that a prompt will need."""
    scored = folder / task.eval_file
    prompts = folder / task.shots_file
    rows = _read_rows(task, scored)
    files = [scored]
    examples = None
    if prompts.is_file():
        examples = _read_rows(task, prompts)
        files.append(prompts)
    _check_enough(task, rows, examples, shots, prompts if examples is not None else scored)
    return Rows(rows, examples, digest(files))


def missing_files(name: str, folder: Path, shots: int) -> list[str]:
    """Files of a task or text that are not there. LAMBADA can do without a few-shot file: the
    harness has no training examples of it either and draws them from other splits."""
    wanted = [TEXT_FILES[name]] if name in TEXTS else [TASKS[name].eval_file]
    if shots and name in TASKS and name not in LAMBADA:
        wanted.append(TASKS[name].shots_file)
    return [file for file in wanted if not (folder / file).is_file()]


def _check_enough(
    task: Task, rows: list[Row], examples: list[Row] | None, shots: int, path: Path
) -> None:
    if not shots:
        return
    if task.file == "mmlu":
        counts = {row["subject"]: 0 for row in rows}
        for row in examples or ():
            counts[row["subject"]] = counts.get(row["subject"], 0) + 1
        subject, found = min(counts.items(), key=lambda item: item[1])
        if found < shots:
            raise DataError(f"{path}: {found} examples of {subject}, too few for {shots} shots")
        return
    # From what is scored itself, one more is needed than is shown.
    pool, needed = (rows, shots + 1) if examples is None else (examples, shots)
    if len(pool) < needed:
        raise DataError(f"{path}: {len(pool)} examples are too few for {shots} shots")


def _read_rows(task: Task, path: Path) -> list[Row]:
    rows = []
    for number, row in read_jsonl(path):
        wrong = None
        for field, type_ in task.fields.items():
            if field not in row:
                wrong = f"field {field!r} is missing"
            elif not isinstance(row[field], type_) or isinstance(row[field], bool):
                wrong = f"field {field!r} is {row[field]!r:.60}, not {_type_name(type_)}"
            if wrong:
                break
        wrong = wrong or task.complaint(row)
        if wrong:
            raise DataError(f"{path}:{number}: {wrong} (needed for {task.name})")
        rows.append({field: row[field] for field in task.fields})
    if not rows:
        raise DataError(f"{path}: empty; {task.name} needs examples")
    return rows


def _type_name(type_: type | tuple[type, ...]) -> str:
    types = type_ if isinstance(type_, tuple) else (type_,)
    names = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}
    return " or ".join(names[t] for t in types)


def read_jsonl(path: Path) -> list[tuple[int, Row]]:
    """The objects of a file with their line numbers; blank lines are passed by."""
    rows = []
    for number, line in enumerate(_read_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8 ({error.reason})") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: not a JSON object")
        rows.append((number, row))
    return rows


def read_documents(path: Path) -> list[Document]:
    """A jsonl file has one document per line, under `text`; any other file is one document."""
    if path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        documents = []
        for number, row in read_jsonl(path):
            if not isinstance(row.get("text"), str):
                raise DataError(f"{path}:{number}: no text under the field 'text'")
            if row["text"]:
                documents.append(Document.of(row["text"]))
    else:
        text = read_text(path)
        documents = [Document.of(text)] if text.strip() else []
    if not documents:
        raise DataError(f"{path}: empty; there is no text to score")
    return documents


def read_text(path: Path) -> str:
    content = _read_bytes(path)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason})") from None


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def wikitext_pages(text: str) -> list[str]:
    """WikiText as the harness has it: a document per article, from heading to heading."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        plain = line.replace("= = =", "===").replace("= =", "==").strip()
        if plain.startswith("= ") and plain.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    return [page for page in ("\n".join(lines) for lines in pages) if page.strip()]


def digest(files: Iterable[Path]) -> str:
    """Of the contents of files, in their order."""
    state = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            state.update(hashlib.file_digest(file, "sha256").digest())
    return state.hexdigest()
