"""The tables of an evaluation, in the paper's columns and beside its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from spiralformer import console, paper, presets
from spiralformer.config import SpiralConfig
from spiralformer.evaluate.run import Evaluation, Options, Score
from spiralformer.evaluate.tasks import LAMBADA, PAPER, TEXTS


@dataclass(frozen=True)
class Row:
    labels: tuple[str, ...]
    cells: dict[str, Score]
    rivals: object = None  # rows with an equal one are compared; None: with no other
    lower: Sequence[str] = ()  # columns in which less is better


@dataclass(frozen=True)
class Table:
    """A figure is bold where it beats all its rivals by more than the two standard errors."""

    labels: tuple[str, ...]
    columns: Sequence[str]
    rows: list[Row]
    incomparable: Sequence[str] = ()  # columns without a best
    digits: int = 2

    def markdown(self) -> str:
        rows = [self._line(row, "**") for row in self.rows]
        return console.markdown_table([*self.labels, *self.columns], rows, left=len(self.labels))

    def plain(self) -> str:
        rows = [self._line(row, "") for row in self.rows]
        return console.table([*self.labels, *self.columns], rows, left=len(self.labels))

    def _line(self, row: Row, mark: str) -> list[str]:
        cells = []
        for column in self.columns:
            bold = mark if self._is_best(row, column) else ""
            score = row.cells.get(column)
            cells.append(f"{bold}{show(score, self.digits)}{bold}" if score else "–")
        return [*row.labels, *cells]

    def _is_best(self, row: Row, column: str) -> bool:
        others = [
            other.cells[column]
            for other in self.rows
            if other is not row and other.rivals == row.rivals and column in other.cells
        ]
        if row.rivals is None or not others or column not in row.cells:
            return False
        if column in self.incomparable:
            return False
        value, error = row.cells[column]
        sign = -1 if column in row.lower else 1
        return error is not None and all(
            other.stderr is not None
            and sign * (value - other.value) > math.hypot(error, other.stderr)
            for other in others
        )


def show(score: Score, digits: int = 2) -> str:
    def number(value: float) -> str:
        if isinstance(value, int) or not math.isfinite(value):
            return f"{value:,}"
        return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.2e}"

    value, error = score
    return number(value) if error is None else f"{number(value)} ±{number(error)}"


# ---------------------------------------------------------------------------- the paper's


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


def average(evaluation: Evaluation, shots: int) -> Score | None:
    """The mean over the paper's nine tasks, each weighing the same, in %."""
    scores = [evaluation.score(task, shots) for task in PAPER]
    known = [score for score in scores if score is not None]
    if len(known) < len(PAPER):
        return None
    errors = [score.stderr for score in known if score.stderr is not None]
    stderr = math.hypot(*errors) / len(PAPER) if len(errors) == len(PAPER) else None
    return _percent(Score(sum(score.value for score in known) / len(PAPER), stderr))


def _percent(score: Score) -> Score:
    return Score(100 * score.value, None if score.stderr is None else 100 * score.stderr)


def perplexities(evaluation: Evaluation) -> dict[str, Score]:
    """Those of Table 1: the Pile's per token, WikiText's per word as in the harness, LAMBADA's of
    the last word, without shots."""
    scores = {}
    for name, result in evaluation.texts.items():
        if name in TEXTS:
            per_word = name == "wikitext"
            value = result.per_word if per_word else result.per_token
            error = result.stderr(result.words if per_word else result.tokens)
            scores[TEXTS[name]] = Score(value, error)
    for name in LAMBADA:
        if (score := evaluation.score(name, 0, "perplexity")) is not None:
            scores[PAPER[name].column] = score
    return scores


def table_1(evaluations: Sequence[Evaluation], options: Options) -> Table | None:
    """Perplexities and average accuracies."""
    names = options.names
    lower = [column for name, column in TEXTS.items() if name in names]
    lower += [PAPER[name].column for name in LAMBADA if name in names and 0 in options.shots]
    averaged = sorted(set(options.shots)) if all(name in names for name in PAPER) else []
    columns = [*lower, *(f"{shots}-shot" for shots in averaged)]
    rows = []
    for evaluation in evaluations:
        cells = perplexities(evaluation)
        for shots in averaged:
            if (mean := average(evaluation, shots)) is not None:
                cells[f"{shots}-shot"] = mean
        rows.append(Row((evaluation.name,), cells, "all", lower))
        if (name := paper_name(evaluation.model.spiral_config)) is not None:
            quality = paper.TABLE_1[name].quality if name in paper.TABLE_1 else paper.TABLE_2[name]
            known = ("Pile", "Wiki", "LD-O", "LD-S", "0-shot", "5-shot")
            values = zip(known, asdict(quality).values(), strict=True)
            rows.append(Row((f"paper: {name}",), {c: Score(v, None) for c, v in values}))
    return (
        Table(("model",), columns, rows, _incomparable(evaluations, options)) if columns else None
    )


def table_3(evaluations: Sequence[Evaluation], options: Options) -> Table | None:
    """Accuracies in %, task by task."""
    names = [name for name in options.task_names if name in PAPER]
    columns = [PAPER[name].column for name in names]
    columns += ["Avg"] if len(names) == len(PAPER) else []
    rows = []
    for shots in sorted(set(options.shots)):
        for evaluation in evaluations:
            scores = {PAPER[name].column: evaluation.score(name, shots) for name in names}
            cells = {column: _percent(score) for column, score in scores.items() if score}
            if (mean := average(evaluation, shots)) is not None:
                cells["Avg"] = mean
            rows.append(Row((evaluation.name, str(shots)), cells, shots))
            preset = paper_name(evaluation.model.spiral_config)
            if preset is not None and (printed := paper.TABLE_3.get((preset, shots))):
                values = zip((*paper.TASKS, "Avg"), (*printed.tasks, printed.average), strict=True)
                cells = {column: Score(value, None) for column, value in values}
                rows.append(Row((f"paper: {preset}", str(shots)), cells))
    return Table(("model", "shots"), columns, rows) if names else None


# ---------------------------------------------------------------------------- others


def other_table(evaluations: Sequence[Evaluation], options: Options) -> Table | None:
    """Every metric of the tasks that are not the paper's, as the harness gives it."""
    rows = []
    for asked in options.task_names:
        for shots in sorted(set(options.shots)) if asked not in PAPER else ():
            for evaluation in evaluations:
                better = evaluation.results[shots].get("higher_is_better", {})
                for task in evaluation.shown[asked]:
                    for metric, score in evaluation.metrics(task, shots).items():
                        is_lower = better.get(task, {}).get(metric.split(",")[0]) is False
                        labels = (evaluation.name, task, str(shots), metric)
                        lower = ("value",) if is_lower else ()
                        rows.append(Row(labels, {"value": score}, labels[1:], lower))
    return Table(("model", "task", "shots", "metric"), ("value",), rows, digits=4) if rows else None


def text_table(evaluations: Sequence[Evaluation], options: Options) -> Table | None:
    """Perplexities by token, word and byte: only the last two compare different tokenizers."""
    lower = ("per token", "per word", "per byte")
    rows = [
        Row(
            (evaluation.name, name),
            {
                "per token": Score(result.per_token, result.stderr(result.tokens)),
                "per word": Score(result.per_word, result.stderr(result.words)),
                "per byte": Score(result.per_byte, result.stderr(result.bytes)),
                "bits/byte": Score(result.bits_per_byte, None),
                "tokens": Score(result.tokens, None),
                "documents": Score(result.documents, None),
            },
            name,
            lower,
        )
        for evaluation in evaluations
        for name, result in evaluation.texts.items()
    ]
    columns = (*lower, "bits/byte", "tokens", "documents")
    incomparable = _incomparable(evaluations, options)
    return Table(("model", "text"), columns, rows, incomparable) if rows else None


def _incomparable(evaluations: Sequence[Evaluation], options: Options) -> Sequence[str]:
    """Perplexities of texts that say nothing of which model is better: read in windows of different
    lengths, or per token of different tokenizers."""
    if len({options.context or e.model.max_length for e in evaluations}) > 1:
        return ("Pile", "Wiki", "per token", "per word", "per byte")
    vocabularies = {evaluation.model.vocabulary for evaluation in evaluations}
    return ("Pile", "per token") if len(vocabularies) > 1 else ()


def notes(evaluations: Sequence[Evaluation], options: Options) -> list[str]:
    """What a reader of the tables must know."""
    lines = []
    if options.limit:
        lines.append(
            f"Only the first {console.count(options.limit, 'example')} of each task (of a group, "
            "spread over its tasks) and documents of each text."
        )
    if any(evaluation.texts for evaluation in evaluations):
        longest = {evaluation.model.max_length for evaluation in evaluations}
        context = options.context or " or ".join(map(str, sorted(longest)))
        lines.append(
            f"Texts: windows of {context} tokens, stride {options.stride or 'the same'}; every "
            "token is scored once."
        )
    if any("wikitext" in evaluation.texts for evaluation in evaluations):
        lines.append(
            "Wiki is per word, as the harness reports it and as the paper's numbers read; "
            "Pile is per token."
        )
    if any(name in LAMBADA for name in options.names):
        lines.append("LD-O and LD-S perplexity is that of the last word, without shots.")
    cut = [
        f"{number:,} ({evaluation.name}, {shots}-shot)"
        for evaluation in evaluations
        for shots, results in evaluation.results.items()
        if (number := results["config"]["truncated_prompts"])
    ]
    if cut:
        lines.append(
            "Prompts that lost their beginning to the model's longest sequence, of those scored "
            f"in this run: {', '.join(cut)}."
        )
    return lines


def render(evaluations: Sequence[Evaluation], options: Options, *, plain: bool = False) -> str:
    """All tables: as markdown, or plain for a terminal."""
    tables = (
        table_1(evaluations, options),
        table_3(evaluations, options),
        other_table(evaluations, options),
        text_table(evaluations, options),
    )
    parts = [table.plain() if plain else table.markdown() for table in tables if table]
    return "\n".join([*parts, *(f"{note}\n" for note in notes(evaluations, options))])
