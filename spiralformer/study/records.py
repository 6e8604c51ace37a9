"""What the runs of a study came to: one small JSON file, and all that tables, figures and verdicts
are made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from spiralformer.accounting import forward_flops, parameters, training_flops_per_token
from spiralformer.errors import UserError
from spiralformer.files import read_record, write_json
from spiralformer.study.spec import Claim, Figure, Row

FILE = "records.json"


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunRecord(Record):
    """A finished run."""

    seed: int
    lr: float
    steps: int
    tokens: int
    batch: int
    length: int
    precision: str
    data: str  # what tells its training and validation data from others
    valid_tokens: int
    loss: float  # of validation, nats per token
    bits_per_byte: float | None
    seconds: float
    curve: list[tuple[int, float, float]]  # tokens, seconds, validation loss
    code: str

    @property
    def bits(self) -> float:
        """Bits per byte of one nat per token; 1 where bytes are not known."""
        return 1.0 if self.bits_per_byte is None else self.bits_per_byte / self.loss

    @classmethod
    def of(cls, result: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> RunRecord:
        """From the result.json and metrics.jsonl of a run's folder."""
        curve, seconds = [], 0.0
        for line in metrics:
            if line["kind"] == "train":
                seconds = line["seconds"]
            elif line["kind"] == "valid" and line["valid_loss"] is not None:
                curve.append((line["tokens"], seconds, line["valid_loss"]))
        run, valid = result["run"], result["valid"]
        return cls(
            seed=run["seed"],
            lr=run["optim.lr"],
            steps=result["steps"],
            tokens=result["tokens"],
            batch=run["batch"],
            length=run["length"],
            precision=run["precision"],
            data=f"{run['training data']} {run['validation data']}",
            valid_tokens=valid["tokens"],
            loss=valid["loss"],
            bits_per_byte=valid["bits_per_byte"],
            seconds=result["seconds"],
            curve=curve,
            code=result["code"],
        )


class RowRecord(Record):
    """A row with its runs, one for each seed."""

    name: str
    id: str
    label: str
    family: str  # whose learning rate it takes; "" where no sweep is known
    layout: str
    topology: str
    parameters: int
    non_embedding: int
    flops: int  # of a forward pass over a sequence
    training_flops: float  # of a token
    point: dict[str, float] = {}
    core: float | None = None
    paper: str = ""
    runs: list[RunRecord] = []
    failures: dict[int, str] = {}  # by seed

    @classmethod
    def of(
        cls, row: Row, length: int, runs: list[RunRecord], failures: dict[int, str]
    ) -> RowRecord:
        model, counted = row.model, parameters(row.model)
        return cls(
            name=row.name,
            id=row.id,
            label=row.label,
            family=row.family,
            layout=model.layout,
            topology=model.topology,
            parameters=counted.total,
            non_embedding=counted.non_embedding,
            flops=forward_flops(model, length).total,
            training_flops=training_flops_per_token(model, length),
            point=row.point,
            core=row.core,
            paper=row.paper,
            runs=runs,
            failures=failures,
        )

    @property
    def unit_losses(self) -> dict[int, float]:
        """By seed, in the unit of the table."""
        return {run.seed: run.loss * run.bits for run in self.runs}

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.unit_losses.values())))

    @property
    def spread(self) -> float:
        """Standard deviation over seeds, of which there are two at least."""
        return float(np.std(list(self.unit_losses.values()), ddof=1))

    @property
    def spent(self) -> float:
        """Training FLOPs of a run."""
        return self.training_flops * float(np.mean([run.tokens for run in self.runs]))


class SweepRecord(Record):
    """Learning rates tried for a family."""

    tried: list[tuple[float, float | None]]  # rate and validation loss; None: the run failed

    @property
    def chosen(self) -> float | None:
        """The one of the lowest loss."""
        finished = [(loss, lr) for lr, loss in self.tried if loss is not None]
        return min(finished)[1] if finished else None

    @property
    def bracketed(self) -> bool:
        """Whether rates on both sides of the best were tried."""
        rates = [lr for lr, _ in self.tried]
        return self.chosen is not None and min(rates) < self.chosen < max(rates)


class Records(Record):
    study: str
    title: str
    about: str
    setting: str
    machine: str
    command: str = ""
    figure: Figure
    match: str
    reference: str
    seeds: int  # planned
    rows: list[RowRecord]
    sweeps: dict[str, SweepRecord]
    claims: list[Claim]

    @property
    def runs(self) -> list[RunRecord]:
        return [run for row in self.rows for run in row.runs]

    @property
    def unit(self) -> str:
        known = all(run.bits_per_byte is not None for run in self.runs)
        return "bits/byte" if known else "nats/token"

    @property
    def seen(self) -> str:
        """What a model reads one of at a time."""
        return (
            "bytes"
            if all(math.isclose(run.bits, 1 / math.log(2)) for run in self.runs)
            else "tokens"
        )

    @property
    def unfinished(self) -> int:
        return sum(max(0, self.seeds - len(row.runs)) for row in self.rows)

    def reference_of(self, row: RowRecord) -> RowRecord | None:
        """The study's reference at the same point of the grid, if it is another row."""
        for other in self.rows:
            if other.name == self.reference and other.point == row.point and other is not row:
                return other
        return None

    def write(self, folder: Path) -> Path:
        write_json(folder / FILE, self.model_dump(mode="json"))
        return folder / FILE

    @classmethod
    def read(cls, folder: Path) -> Records:
        records = read_record(folder / FILE, cls)
        if not records.runs:
            raise UserError(f"{folder / FILE}: has no finished run")
        return records


# ---------------------------------------------------------------------------- matched


def check_matched(records: Records) -> None:
    """That runs of one seed and budget saw the same: data in one order, tokens, validation text.

    The order of the data follows from data, length, batch and seed. Matched by FLOPs, runs stop at
    different places of that order."""
    names = ["data", "length", "batch", "precision", "valid_tokens"]
    names += ["tokens"] if records.match == "tokens" else []
    firsts: dict[tuple[int, float | None], tuple[RowRecord, RunRecord]] = {}
    for row in records.rows:
        for run in row.runs:
            one, first = firsts.setdefault((run.seed, row.point.get("budget")), (row, run))
            for name in names:
                a, b = getattr(first, name), getattr(run, name)
                if a != b:
                    raise UserError(
                        f"runs of seed {run.seed} are not matched: {name} {a} in {one.id}, {b} in "
                        f"{row.id}"
                    )
