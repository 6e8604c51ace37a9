"""Runs that a user made, as a study: the same table, figures and rule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from spiralformer.console import count
from spiralformer.errors import UserError
from spiralformer.study.records import Records, RowRecord, RunRecord, SweepRecord, check_matched
from spiralformer.study.run import Run, machine
from spiralformer.study.spec import Claim, Row
from spiralformer.train import TrainConfig, read_result


def compare(folders: Sequence[Path]) -> Records:
    """Runs of one model and budget are a row, their learning rates a sweep, of which the best is
    shown. Every row is compared with the first."""
    if len(folders) < 2:
        raise UserError("study compare needs two folders of finished runs, or more")
    groups: dict[str, list[tuple[Run, RunRecord]]] = {}
    for folder in folders:
        if not (folder / "result.json").is_file():
            raise UserError(f"{folder}: not the folder of a finished run (it has no result.json)")
        fields = {**read_result(folder / "result.json")["config"], "out": str(folder)}
        run = Run(folder.name, TrainConfig.from_dict(fields))
        key = json.dumps([fields["model"], run.config.steps, run.config.batch, run.config.length])
        groups.setdefault(key, []).append((run, run.record()))
    rows: list[RowRecord] = []
    sweeps: dict[str, SweepRecord] = {}
    for members in groups.values():
        row, sweep = _row(members, [row.name for row in rows])
        rows.append(row)
        sweeps[row.name] = sweep
    first, *others = (row.name for row in rows)
    says = "{} has a lower loss than {}"
    made = Records(
        study="compare",
        title=f"{count(len(folders), 'run')} compared",
        about="",
        setting=f"Runs: {', '.join(folder.name for folder in folders)}.",
        machine=machine(),
        figure="families",
        match="tokens",
        reference=first,
        seeds=1,
        rows=rows,
        sweeps=sweeps,
        claims=[
            Claim(says=says.format(name, first), source="", less=(name, first)) for name in others
        ],
    )
    try:
        check_matched(made)
    except UserError as error:
        return made.model_copy(update={"claims": [], "about": f"No verdicts: {error}."})
    return made


def _row(
    members: Sequence[tuple[Run, RunRecord]], taken: list[str]
) -> tuple[RowRecord, SweepRecord]:
    runs: dict[float, dict[int, RunRecord]] = {}
    for run, record in members:
        seeds = runs.setdefault(record.lr, {})
        if record.seed in seeds:
            raise UserError(f"{run.folder}: another run has its model, rate and seed {record.seed}")
        seeds[record.seed] = record
    mean = lambda seeds: sum(record.loss for record in seeds.values()) / len(seeds)
    sweep = SweepRecord(tried=sorted((lr, mean(seeds)) for lr, seeds in runs.items()))
    assert sweep.chosen is not None
    run = members[0][0]
    model = run.config.model
    name = f"{model.layout} {model.topology}".removesuffix(" none") + f" d{model.hidden_size}"
    if name in taken:
        name += f" ({run.folder.name})"
    row = Row(name, name, model, family=name, steps=run.config.steps)
    records = [record for _, record in sorted(runs[sweep.chosen].items())]
    return RowRecord.of(row, run.config.length, records, {}), sweep
