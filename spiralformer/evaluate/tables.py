"""The tables of an evaluation, in the paper's columns and beside its rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from spiralformer import console, paper, presets
from spiralformer.config import SpiralConfig
from spiralformer.evaluate.perplexity import Score
from spiralformer.evaluate.run import Evaluation, Options
from spiralformer.evaluate.tasks import LAMBADA, PAPER, TEXTS


@dataclass(frozen=True)
class Row:
    labels: tuple[str, ...]
    cells: dict[str, Score]
    printed: bool = False  # by the paper: not a rival of ours


@dataclass(frozen=True)
class Table:
    """Rows with the same labels after the first are rivals: a figure is bold where it beats all the
    others by more than the two standard errors."""

    labels: tuple[str, ...]
    columns: Sequence[str]
    rows: list[Row]
    lower: Sequence[str] = ()  # columns in which less is better
    unranked: Sequence[str] = ()  # columns without a best
    digits: int = 2

    def render(self, plain: bool) -> str:
        header, left = [*self.labels, *self.columns], len(self.labels)
        rows = [
            [*row.labels, *(self._cell(row, column, plain) for column in self.columns)]
            for row in self.rows
        ]
        draw = console.table if plain else console.markdown_table
        return draw(header, rows, left=left)

    def _cell(self, row: Row, column: str, plain: bool) -> str:
        if column not in row.cells:
            return "–"
        value, error = row.cells[column]
        text = self._number(value) + (f" ±{self._number(error)}" if error is not None else "")
        return f"**{text}**" if not plain and self.is_best(row, column) else text

    def _number(self, value: float) -> str:
        if isinstance(value, int) or not math.isfinite(value):
            return f"{value:,}"
        return f"{value:.{self.digits}f}" if abs(value) < 1e5 else f"{value:.2e}"

    def is_best(self, row: Row, column: str) -> bool:
        sign, (value, error) = -1 if column in self.lower else 1, row.cells[column]
        leads = [
            sign * (value - other.cells[column].value)
            > math.hypot(error or 0, other.cells[column].stderr or 0)
            for other in self.rows
            if other is not row
            and not other.printed
            and other.labels[1:] == row.labels[1:]
            and column in other.cells
        ]
        return bool(leads) and all(leads) and not row.printed and column not in self.unranked


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
    scores = [score for task in PAPER if (score := evaluation.score(task, shots)) is not None]
    if len(scores) < len(PAPER):
        return None
    errors = [score.stderr for score in scores if score.stderr is not None]
    stderr = math.hypot(*errors) / len(PAPER) if len(errors) == len(PAPER) else None
    return _percent(Score(sum(score.value for score in scores) / len(PAPER), stderr))


def _percent(score: Score) -> Score:
    return Score(100 * score.value, None if score.stderr is None else 100 * score.stderr)


def table_1(evaluations: Sequence[Evaluation], options: Options) -> Table:
    """Perplexities (the Pile's per token, WikiText's per word as in the harness, LAMBADA's of the
    last word, without shots) and average accuracies."""
    names = options.names
    lower = [column for name, column in TEXTS.items() if name in names]
    lower += [PAPER[name].column for name in LAMBADA if name in names and 0 in options.shots]
    averaged = sorted(set(options.shots)) if all(name in names for name in PAPER) else []
    columns = [*lower, *(f"{shots}-shot" for shots in averaged)]
    rows = []
    for evaluation in evaluations:
        scores = {f"{shots}-shot": average(evaluation, shots) for shots in averaged}
        for name, unit in (("pile", "token"), ("wikitext", "word")):
            if name in evaluation.texts:
                scores[TEXTS[name]] = evaluation.texts[name].per(unit)
        for name in LAMBADA:
            scores[PAPER[name].column] = evaluation.score(name, 0, "perplexity")
        rows.append(Row((evaluation.name,), _known(scores)))
        if (preset := paper_name(evaluation.model.spiral_config)) is not None:
            is_main = preset in paper.TABLE_1
            quality = paper.TABLE_1[preset].quality if is_main else paper.TABLE_2[preset]
            headers = ("Pile", "Wiki", "LD-O", "LD-S", "0-shot", "5-shot")
            rows.append(_printed((preset,), headers, asdict(quality).values()))
    return Table(("model",), columns, rows, lower, _unranked(evaluations, options))


def table_3(evaluations: Sequence[Evaluation], options: Options) -> Table:
    """Accuracies in %, task by task."""
    names = [name for name in options.task_names if name in PAPER]
    columns = [PAPER[name].column for name in names]
    columns += ["Avg"] if len(names) == len(PAPER) else []
    rows = []
    for shots in sorted(set(options.shots)):
        for evaluation in evaluations:
            scores = {PAPER[name].column: evaluation.score(name, shots) for name in names}
            cells = {column: _percent(score) for column, score in _known(scores).items()}
            cells |= _known({"Avg": average(evaluation, shots)})
            rows.append(Row((evaluation.name, str(shots)), cells))
            preset = paper_name(evaluation.model.spiral_config)
            if preset is not None and (printed := paper.TABLE_3.get((preset, shots))):
                values = (*printed.tasks, printed.average)
                rows.append(_printed((preset, str(shots)), (*paper.TASKS, "Avg"), values))
    return Table(("model", "shots"), columns, rows)


def _known(scores: dict[str, Score | None]) -> dict[str, Score]:
    return {column: score for column, score in scores.items() if score is not None}


def _printed(labels: tuple[str, ...], columns: Sequence[str], values: Iterable[float]) -> Row:
    cells = {c: Score(value) for c, value in zip(columns, values, strict=True)}
    return Row((f"paper: {labels[0]}", *labels[1:]), cells, printed=True)


# ---------------------------------------------------------------------------- others


def other_table(evaluations: Sequence[Evaluation], options: Options) -> Table:
    """Every metric of the tasks that are not the paper's, as the harness gives it."""
    rows = [
        Row((evaluation.name, task, str(shots), metric), {"value": score})
        for asked in options.task_names
        if asked not in PAPER
        for shots in sorted(set(options.shots))
        for evaluation in evaluations
        for task in evaluation.shown[asked]
        for metric, score in evaluation.metrics(task, shots).items()
    ]
    columns = ("value",) if rows else ()
    labels = ("model", "task", "shots", "metric")
    return Table(labels, columns, rows, unranked=columns, digits=4)  # who knows what is better


def text_table(evaluations: Sequence[Evaluation], options: Options) -> Table:
    """Perplexities by token, word and byte: only the last two compare different tokenizers."""
    rows = []
    for evaluation in evaluations:
        for name, result in evaluation.texts.items():
            cells = {f"per {unit}": result.per(unit) for unit in ("token", "word", "byte")}
            cells["bits/byte"] = Score(result.bits_per_byte)
            cells["tokens"] = Score(result.tokens)
            cells["documents"] = Score(result.documents)
            rows.append(Row((evaluation.name, name), cells))
    columns = list(rows[0].cells) if rows else []
    unranked = (*columns[3:], *_unranked(evaluations, options))
    return Table(("model", "text"), columns, rows, columns[:3], unranked)


def _unranked(evaluations: Sequence[Evaluation], options: Options) -> Sequence[str]:
    """Perplexities of texts that say nothing of which model is better: read in windows of different
    lengths, or per token of different tokenizers."""
    if len({options.context or evaluation.model.max_length for evaluation in evaluations}) > 1:
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
    if "wikitext" in options.names:
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
    made = [make(evaluations, options) for make in (table_1, table_3, other_table, text_table)]
    parts = [table.render(plain) for table in made if table.columns]
    return "\n".join([*parts, *(f"{note}\n" for note in notes(evaluations, options))])
