"""The tables of an evaluation, in the paper's columns and beside its rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from spiralformer import console, paper, presets
from spiralformer.config import SpiralConfig
from spiralformer.evaluate.run import Evaluation, Options, Score
from spiralformer.evaluate.tasks import LAMBADA, PAPER, TEXTS

PERPLEXITIES = {  # columns of Table 1: where the number is
    "Pile": ("pile", "texts", "token_perplexity"),
    "Wiki": ("wikitext", "texts", "word_perplexity"),
    "LD-O": ("lambada_openai", "0-shot", "perplexity"),
    "LD-S": ("lambada_standard", "0-shot", "perplexity"),
}

SURE = 2.0  # standard errors of a difference, beyond which it is more than chance

Cells = dict[str, Score | None]


@dataclass(frozen=True)
class Row:
    labels: Sequence[str]
    cells: Cells
    printed: bool = False  # by the paper


@dataclass(frozen=True)
class Table:
    """A column appears where a row of ours has something in it."""

    labels: Sequence[str]
    rows: list[Row]
    digits: int = 2

    @property
    def columns(self) -> list[str]:
        ours = (row.cells.items() for row in self.rows if not row.printed)
        return list(dict.fromkeys(column for cells in ours for column, score in cells if score))

    def render(self, plain: bool) -> str:
        mark = "{}*".format if plain else console.Bold
        rows = []
        for row in self.rows:
            cells = []
            for column in self.columns:
                text = self._cell(row.cells.get(column))
                cells.append(mark(text) if self.is_best(row, column) else text)
            rows.append([*row.labels, *cells])
        draw = console.table if plain else console.markdown_table
        return draw([*self.labels, *self.columns], rows, left=len(self.labels))

    def is_best(self, row: Row, column: str) -> bool:
        """Whether a score is better than that of every other model by more than the error."""
        score = row.cells.get(column)
        if score is None or row.printed:
            return False
        rivals = [
            rival
            for other in self.rows
            if other is not row and not other.printed and other.labels[1:] == row.labels[1:]
            if (rival := other.cells.get(column)) is not None
        ]
        return bool(rivals) and all(surpasses(score, rival) for rival in rivals)

    def _cell(self, score: Score | None) -> str:
        if score is None:
            return "–"
        error = "" if score.stderr is None else f" ±{self._number(score.stderr)}"
        return self._number(score.value) + error

    def _number(self, value: float) -> str:
        if isinstance(value, int) or not math.isfinite(value):
            return f"{value:,}"
        return f"{value:.{self.digits}f}" if abs(value) < 1e5 else f"{value:.2e}"


def surpasses(one: Score, other: Score) -> bool:
    """Never where two figures do not compare, such as perplexities by different tokens."""
    if one.higher is None or (one.higher, one.basis) != (other.higher, other.basis):
        return False
    if one.stderr is None or other.stderr is None:
        return False
    ahead = one.value - other.value if one.higher else other.value - one.value
    return ahead > SURE * math.hypot(one.stderr, other.stderr)


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


def accuracies(evaluation: Evaluation, kind: str) -> Cells:
    """Of the paper's tasks by its metrics, in %; of all nine the mean too, each weighing the
    same."""
    cells: Cells = {}
    for name, task in PAPER.items():
        if (score := evaluation.metrics(name, kind).get(task.metric)) is not None:
            stderr = None if score.stderr is None else 100 * score.stderr
            cells[task.column] = Score(100 * score.value, stderr, higher=True)
    scores = [score for score in cells.values() if score is not None]
    if len(scores) == len(PAPER):
        errors = [score.stderr for score in scores if score.stderr is not None]
        stderr = math.hypot(*errors) / len(scores) if len(errors) == len(scores) else None
        mean = sum(score.value for score in scores) / len(scores)
        cells["Avg"] = Score(mean, stderr, higher=True)
    return cells


def table_1(evaluations: Sequence[Evaluation]) -> Table:
    """Perplexities and average accuracies."""
    rows = []
    for evaluation in evaluations:
        cells = {
            column: evaluation.metrics(task, kind).get(metric)
            for column, (task, kind, metric) in PERPLEXITIES.items()
        }
        cells |= {kind: accuracies(evaluation, kind).get("Avg") for kind in evaluation.results}
        rows.append(Row([evaluation.name], cells))
        if (preset := paper_name(evaluation.spiral_config)) is not None:
            is_main = preset in paper.TABLE_1
            quality = paper.TABLE_1[preset].quality if is_main else paper.TABLE_2[preset]
            columns = (*PERPLEXITIES, "0-shot", "5-shot")
            rows.append(_printed([f"paper: {preset}"], columns, asdict(quality).values()))
    return Table(["model"], rows)


def table_3(evaluations: Sequence[Evaluation]) -> Table:
    """Accuracies, task by task."""
    rows = []
    for kind in _kinds(evaluations):
        shots = kind.removesuffix("-shot")
        for evaluation in evaluations:
            rows.append(Row([evaluation.name, shots], accuracies(evaluation, kind)))
            preset = paper_name(evaluation.spiral_config)
            if preset is not None and (printed := paper.TABLE_3.get((preset, int(shots)))):
                labels, values = [f"paper: {preset}", shots], (*printed.tasks, printed.average)
                rows.append(_printed(labels, (*paper.TASKS, "Avg"), values))
    return Table(["model", "shots"], rows)


def _kinds(evaluations: Sequence[Evaluation]) -> list[str]:
    return [kind for kind in evaluations[0].results if kind != "texts"]


def _printed(labels: Sequence[str], columns: Sequence[str], values: Iterable[float]) -> Row:
    cells: Cells = {c: Score(value) for c, value in zip(columns, values, strict=True)}
    return Row(labels, cells, printed=True)


# ---------------------------------------------------------------------------- others


def other_table(evaluations: Sequence[Evaluation]) -> Table:
    """Every metric of the tasks that are not the paper's, as the harness gives it. Of a group that
    has a score its members are left out."""
    rows = []
    for kind in _kinds(evaluations):
        for evaluation in evaluations:
            results = evaluation.results[kind]
            groups = results.get("group_subtasks", {}).items()
            members = [
                task for group, some in groups if evaluation.metrics(group, kind) for task in some
            ]
            for task in results["results"]:
                if task not in members and task not in PAPER:
                    labels = [evaluation.name, task, kind.removesuffix("-shot")]
                    for metric, score in evaluation.metrics(task, kind).items():
                        rows.append(Row([*labels, metric], {"value": score}))
    return Table(["model", "task", "shots", "metric"], rows, digits=4)


def text_table(evaluations: Sequence[Evaluation]) -> Table:
    """Perplexities by token, word and byte: only the last two compare different tokenizers."""
    rows = [
        Row([evaluation.name, text], {**evaluation.metrics(text, "texts")})
        for evaluation in evaluations
        for text in evaluation.results.get("texts", {}).get("results", {})
    ]
    return Table(["model", "text"], rows)


def notes(evaluations: Sequence[Evaluation], options: Options, plain: bool) -> list[str]:
    """What a reader of the tables must know."""
    lines = ["±: one standard error, of a task by its examples, of a text by its documents.\n"]
    if len(evaluations) > 1:
        lines.append(
            f"{'*' if plain else 'Bold'}: better than every other model here by more than "
            f"{SURE:g} standard errors of the difference. Perplexities by different tokens are not "
            "compared.\n"
        )
    if options.limit:
        lines.append(f"Only the first examples of each task and text: --limit {options.limit}.\n")
    if options.text_names or options.text_files:
        longest = sorted({evaluation.max_length for evaluation in evaluations})
        context = options.context or " or ".join(map(str, longest))
        lines.append(
            f"Texts: windows of {context} tokens, stride {options.stride or 'the same'}.\n"
        )
    if {*TEXTS, *LAMBADA}.intersection(options.names):
        lines.append(
            "Perplexity: Pile per token, Wiki per word, LD-O and LD-S of the last word, no shots.\n"
        )
    return lines


def render(evaluations: Sequence[Evaluation], options: Options, *, plain: bool = False) -> str:
    """All tables: as markdown, or plain for a terminal."""
    tables = [make(evaluations) for make in (table_1, table_3, other_table, text_table)]
    parts = [table.render(plain) for table in tables if table.columns]
    return "\n".join([*parts, *notes(evaluations, options, plain)])
