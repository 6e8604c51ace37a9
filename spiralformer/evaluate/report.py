"""The tables of an evaluation, in the paper's columns and beside its rows, and its JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spiralformer import paper, presets
from spiralformer.config import SpiralConfig
from spiralformer.evaluate.run import Evaluation, Options, provenance
from spiralformer.evaluate.tasks import LAMBADA, TASKS, TEXTS

Number = tuple[float, float | None]  # a value and its standard error


# ---------------------------------------------------------------------------- numbers


def paper_name(config: SpiralConfig | None) -> str | None:
    """The preset of the paper's tables that a configuration is. Sequence length and initialisation
    are not part of what a model is."""
    if config is None:
        return None
    same = {
        "max_length": config.max_length,
        "init_std": config.init_std,
        "init_depth_scaled": config.init_depth_scaled,
    }
    printed = [*paper.TABLE_1, *paper.TABLE_2]
    return next((n for n in printed if presets.preset(n).replace(**same) == config), None)


def average(evaluation: Evaluation, shots: int) -> Number | None:
    """The mean over the nine tasks, each weighing the same, in %."""
    scores = [evaluation.score(task, shots) for task in TASKS]
    found = [score for score in scores if score is not None]
    if len(found) < len(TASKS):
        return None
    errors = [score.stderr for score in found]
    known = [error for error in errors if error is not None]
    stderr = math.hypot(*known) / len(TASKS) if len(known) == len(TASKS) else None
    value = sum(score.value for score in found) / len(TASKS)
    return 100 * value, None if stderr is None else 100 * stderr


def perplexities(evaluation: Evaluation) -> dict[str, Number]:
    """The perplexities of Table 1: the Pile's per token, WikiText's per word as in the harness,
    LAMBADA's of the last word, without shots."""
    found: dict[str, Number] = {}
    for name, column in TEXTS.items():
        if result := evaluation.texts.get(name):
            per = result.words if name == "wikitext" else result.tokens
            value = result.per_word if name == "wikitext" else result.per_token
            found[column] = (value, result.stderr(per))
    for name in LAMBADA:
        if last_words := evaluation.tasks.get((name, 0)):
            score = last_words.scores["perplexity"]
            found[TASKS[name].column] = (score.value, score.stderr)
    return found


# ---------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Row:
    labels: tuple[str, ...]
    cells: dict[str, Number]
    printed: bool = False  # by the paper: not a rival of ours


@dataclass(frozen=True)
class Table:
    """Rows with the same second label, if there is one, are rivals; the best of them is bold."""

    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: list[Row]
    lower_is_better: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = [[*self.labels, *self.columns]]
        lines += [[*row.labels, *(self._cell(row, c) for c in self.columns)] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [
            [
                cell.ljust(width) if k < len(self.labels) else cell.rjust(width)
                for k, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            for line in lines
        ]
        rule = [
            "-" * width if k < len(self.labels) else "-" * (width - 1) + ":"
            for k, width in enumerate(widths)
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in (aligned[0], rule, *aligned[1:]))

    def _cell(self, row: Row, column: str) -> str:
        if column not in row.cells:
            return "–"
        value, stderr = row.cells[column]
        text = number(value) if stderr is None else f"{number(value)} ±{number(stderr)}"
        return f"**{text}**" if self._is_best(row, column) else text

    def _is_best(self, row: Row, column: str) -> bool:
        rivals = [
            other.cells[column][0]
            for other in self.rows
            if not other.printed and column in other.cells and other.labels[1:] == row.labels[1:]
        ]
        if row.printed or len(rivals) < 2:
            return False
        best = min(rivals) if column in self.lower_is_better else max(rivals)
        return row.cells[column][0] == best


def number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.2f}" if value < 1e5 else f"{value:.2e}"


def table_1(evaluations: Sequence[Evaluation], options: Options) -> Table | None:
    """Perplexities and average accuracies."""
    names = options.names
    columns = [column for name, column in TEXTS.items() if name in names]
    columns += [TASKS[name].column for name in LAMBADA if name in names and 0 in options.shots]
    lower = tuple(columns)
    averaged = sorted(set(options.shots)) if len(options.task_names) == len(TASKS) else []
    columns += [f"{shots}-shot" for shots in averaged]
    rows = []
    for evaluation in evaluations:
        cells = perplexities(evaluation)
        for shots in averaged:
            if (found := average(evaluation, shots)) is not None:
                cells[f"{shots}-shot"] = found
        rows.append(Row((evaluation.name,), cells))
        name = paper_name(evaluation.candidate.spiral_config)
        if name is not None:
            quality = paper.TABLE_1[name].quality if name in paper.TABLE_1 else paper.TABLE_2[name]
            known = ("Pile", "Wiki", "LD-O", "LD-S", "0-shot", "5-shot")
            values = zip(known, asdict(quality).values(), strict=True)
            rows.append(Row((_cited(name),), {c: (v, None) for c, v in values}, printed=True))
    return Table(("model",), tuple(columns), rows, lower) if columns else None


def table_3(evaluations: Sequence[Evaluation], options: Options) -> Table | None:
    """Accuracies in %, task by task."""
    names = options.task_names
    if not names:
        return None
    columns = [TASKS[name].column for name in names]
    if len(names) == len(TASKS):
        columns.append("Avg")
    rows = []
    for shots in sorted(set(options.shots)):
        for evaluation in evaluations:
            cells: dict[str, Number] = {}
            for name in names:
                if (score := evaluation.score(name, shots)) is not None:
                    stderr = None if score.stderr is None else 100 * score.stderr
                    cells[TASKS[name].column] = (100 * score.value, stderr)
            if (mean := average(evaluation, shots)) is not None:
                cells["Avg"] = mean
            rows.append(Row((evaluation.name, str(shots)), cells))
            preset = paper_name(evaluation.candidate.spiral_config)
            if preset is not None and (printed := paper.TABLE_3.get((preset, shots))):
                values = zip((*paper.TASKS, "Avg"), (*printed.tasks, printed.average), strict=True)
                cells = {column: (value, None) for column, value in values}
                rows.append(Row((_cited(preset), str(shots)), cells, printed=True))
    return Table(("model", "shots"), tuple(columns), rows)


def text_table(evaluations: Sequence[Evaluation]) -> Table | None:
    """Perplexities by token, word and byte: only the last two compare different tokenizers."""
    rows = [
        Row(
            (evaluation.name, name),
            {
                "per token": (result.per_token, result.stderr(result.tokens)),
                "per word": (result.per_word, result.stderr(result.words)),
                "per byte": (result.per_byte, result.stderr(result.bytes)),
                "bits/byte": (result.bits_per_byte, None),
                "tokens": (result.tokens, None),
                "documents": (result.documents, None),
            },
        )
        for evaluation in evaluations
        for name, result in evaluation.texts.items()
    ]
    return TextTable(rows) if rows else None


class TextTable(Table):
    def __init__(self, rows: list[Row]) -> None:
        lower = ("per token", "per word", "per byte", "bits/byte")
        super().__init__(("model", "text"), (*lower, "tokens", "documents"), rows, lower)

    def _cell(self, row: Row, column: str) -> str:
        if column in ("tokens", "documents"):
            return f"{row.cells[column][0]:,.0f}"
        return super()._cell(row, column)


def _cited(name: str) -> str:
    return f"  paper: {name}"


def notes(evaluations: Sequence[Evaluation], options: Options) -> list[str]:
    """What a reader of the tables must know."""
    lines = []
    if options.limit:
        lines.append(
            f"Only the first {options.limit} examples of each task (of MMLU, spread over its "
            "subjects) and documents of each text."
        )
    if any(evaluation.texts for evaluation in evaluations):
        longest = {e.candidate.max_length for e in evaluations}
        context = options.context or " or ".join(map(str, sorted(longest)))
        stride = options.stride or "the same"
        lines.append(
            f"Texts: windows of {context} tokens, stride {stride}; every token is scored once."
        )
    if any("wikitext" in evaluation.texts for evaluation in evaluations):
        lines.append(
            "Wiki is per word, as the harness reports it and as the paper's numbers read; "
            "Pile is per token."
        )
    if any(task in LAMBADA for e in evaluations for task, _ in e.tasks):
        lines.append("LD-O and LD-S perplexity is that of the last word, without shots.")
    cut = {
        f"{result.truncated:,} ({e.name}, {task} {shots}-shot)": None
        for e in evaluations
        for (task, shots), result in e.tasks.items()
        if result.truncated
    }
    if cut:
        lines.append(
            "Prompts that lost their beginning to the model's longest sequence: "
            + ", ".join(cut)
            + "."
        )
    return lines


def render(evaluations: Sequence[Evaluation], options: Options) -> str:
    """All tables as markdown."""
    tables = (
        table_1(evaluations, options),
        table_3(evaluations, options),
        text_table(evaluations),
    )
    parts = [table.markdown() for table in tables if table is not None]
    return "\n\n".join([*parts, *notes(evaluations, options)]) + "\n"


def for_terminal(markdown: str) -> str:
    """Bold as a terminal shows it; the columns stay aligned."""
    return re.sub(r"\*\*(.+?)\*\*", "    \x1b[1m\\1\x1b[0m", markdown)


# ---------------------------------------------------------------------------- JSON


def to_json(evaluations: Sequence[Evaluation], options: Options) -> dict[str, Any]:
    return {**provenance(options), "models": [_model_json(e, options) for e in evaluations]}


def _model_json(evaluation: Evaluation, options: Options) -> dict[str, Any]:
    candidate = evaluation.candidate
    averages = {
        str(shots): {"value": found[0], "stderr": found[1]}
        for shots in sorted(set(options.shots))
        if (found := average(evaluation, shots)) is not None
    }
    return {
        "name": evaluation.name,
        "folder": str(candidate.folder.resolve()),
        "fingerprint": candidate.fingerprint,
        "config": candidate.config,
        "max_length": candidate.max_length,
        "paper": paper_name(candidate.spiral_config),
        "tasks": [
            {
                "task": task,
                "shots": shots,
                "reported": TASKS[task].metric,
                "truncated": result.truncated,
                "scores": {m: _finite(asdict(score)) for m, score in result.scores.items()},
            }
            for (task, shots), result in evaluation.tasks.items()
        ],
        "average": averages,
        "texts": {
            name: _finite(
                {
                    "per_token": result.per_token,
                    "per_word": result.per_word,
                    "per_byte": result.per_byte,
                    "bits_per_byte": result.bits_per_byte,
                    "per_token_stderr": result.stderr(result.tokens),
                    **asdict(result),
                }
            )
            for name, result in evaluation.texts.items()
        },
        "seconds": evaluation.seconds,
    }


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()
    }
