"""A study from beginning to end: data, sweeps, runs, and what is found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spiralformer.config import SpiralConfig
from spiralformer.console import duration
from spiralformer.data.prepare import Recipe, prepare
from spiralformer.data.sources import find_sources
from spiralformer.data.windows import open_split
from spiralformer.errors import UserError
from spiralformer.study import spec
from spiralformer.study.judge import (
    Found,
    Noise,
    Verdict,
    check_all_matched,
    noise_of,
    verdicts,
)
from spiralformer.study.lab import Lab, Run, data_identity
from spiralformer.study.spec import Row, Scale, Study
from spiralformer.study.tune import Tuned, next_rate, settled
from spiralformer.train.config import TrainConfig

VALID_FRACTION = 0.05  # of the embedded corpus


@dataclass(frozen=True)
class Results:
    """All that a report is made of."""

    study: Study
    scale: str
    data: str
    found: list[Found]
    tuned: dict[str, Tuned]
    noise: Noise | None
    verdicts: list[Verdict]
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)  # by row, where asked for

    @property
    def versions(self) -> list[str]:
        """Of the code that made the runs."""
        return sorted({r["code"] for row in self.found for r in row.records.values()})

    @property
    def unfinished(self) -> int:
        return sum(self.study.seeds - len(row.records) for row in self.found)


# ---------------------------------------------------------------------------- data


def corpus(
    scale: Scale, data: str, cache: Path, notice: Callable[[str], None]
) -> tuple[str, Scale]:
    """The folder of shards, made of the embedded corpus where none is named, and the scale with the
    vocabulary of its tokenizer."""
    if not data:
        folder = cache / "data" / f"stdlib-bpe{scale.vocab_size}"
        recipe = Recipe(bpe=scale.vocab_size, valid_fraction=VALID_FRACTION)
        folder.parent.mkdir(parents=True, exist_ok=True)
        quiet = folder.exists()
        prepare(
            find_sources(["stdlib"]), folder, recipe, notice=(lambda _: None) if quiet else notice
        )
        return str(folder), scale
    if not Path(data).is_dir():
        raise UserError(f"--data {data}: no such folder; `spiralformer data` makes one")
    vocab = open_split(data, "train").vocab_size
    if vocab is None:
        return data, scale
    return data, dataclasses.replace(scale, vocab_size=-(-vocab // 64) * 64)


# ---------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Bench:
    """Turns rows into runs on one corpus."""

    study: Study
    data: str
    identity: str

    def run(
        self, label: str, model: SpiralConfig, steps: int, lr: float, seed: int, keep: bool = False
    ) -> Run:
        scale = self.study.scale
        config = TrainConfig.from_dict(
            {
                "model": model.to_dict(),
                "data": {"path": self.data, "valid": self.data},
                "length": scale.length,
                "batch": scale.batch,
                "steps": steps,
                "seed": seed,
                "precision": scale.precision,
                "optim": {"lr": float(f"{lr:.6g}"), "warmup": scale.warmup},
                "valid": {"every": steps, "tokens": scale.valid_tokens},
                "save": {"every": 0, "minutes": 2, "keep": 1},
                "sample": {"tokens": 0},
                "log": {"every": max(1, steps // 20), "tensorboard": False},
            }
        )
        return Run(f"{label}, lr {lr:.2g}, seed {seed}", config, self.identity, keep)

    def sweep_run(self, family: str, lr: float) -> Run:
        scale, sweep = self.study.scale, self.study.sweep
        steps = max(1, round(scale.tokens * sweep.budget / (scale.batch * scale.length)))
        model = spec.family_config(family, scale)
        return self.run(f"sweep of {family}", model, steps, lr, seed=0)

    def row_run(self, row: Row, lr: float, seed: int) -> Run:
        return self.run(
            row.id, row.model, row.steps, lr * row.lr_factor, seed, self.study.keep_models
        )

    # ------------------------------------------------------------------ sweeps

    def grid(self) -> list[float]:
        return [self.study.scale.lr * factor for factor in self.study.sweep.lrs]

    def tried(self, lab: Lab, family: str) -> dict[float, float]:
        """The sweep as far as it is in the cache, extensions included."""
        grid, tried = self.grid(), {}
        for lr in grid:
            if (loss := self._swept(lab, family, lr)) is not None:
                tried[lr] = loss
        while len(tried) >= len(grid):
            more = next_rate(tried, len(grid), self.study.sweep.extensions)
            loss = None if more is None else self._swept(lab, family, more)
            if more is None or loss is None:
                break
            tried[more] = loss
        return tried

    def _swept(self, lab: Lab, family: str, lr: float) -> float | None:
        run = self.sweep_run(family, lr)
        record = lab.result(run)
        if record is not None:
            return record["valid"]["loss"]
        return None if lab.failure(run) is None else math.inf

    def sweep(self, lab: Lab) -> None:
        """Runs every family's grid, then extends those whose best is at an edge."""
        lab.run(
            [self.sweep_run(family, lr) for family in self.study.families for lr in self.grid()]
        )
        for _ in range(self.study.sweep.extensions):
            more = []
            for family in self.study.families:
                tried = self.tried(lab, family)
                lr = next_rate(tried, len(self.grid()), self.study.sweep.extensions)
                if lr is not None:
                    lab.console.say(f"sweep of {family}: the best is at the edge; trying {lr:.3g}")
                    more.append(self.sweep_run(family, lr))
            lab.run(more)

    def tuned(self, lab: Lab) -> dict[str, Tuned]:
        return {
            family: settled(self.tried(lab, family), len(self.grid()))
            for family in self.study.families
        }

    # ------------------------------------------------------------------ rows

    def rows(self, tuned: dict[str, Tuned]) -> list[tuple[Row, int, Run]]:
        return [
            (row, seed, self.row_run(row, chosen, seed))
            for seed in range(self.study.seeds)
            for row in self.study.rows
            if (chosen := tuned[row.tuned].chosen) is not None
        ]

    def found(self, lab: Lab, tuned: dict[str, Tuned]) -> list[Found]:
        found = {
            row.id: Found(row, self.study.scale.length, self._lr(row, tuned), {}, {})
            for row in self.study.rows
        }
        for row, seed, run in self.rows(tuned):
            record = lab.result(run)
            if record is not None:
                found[row.id].records[seed] = record
            elif (reason := lab.failure(run)) is not None:
                found[row.id].failures[seed] = reason
        for entry in found.values():
            if entry.lr is None:
                entry.failures[0] = f"no learning rate: the sweep of {entry.row.tuned} failed"
        return list(found.values())

    @staticmethod
    def _lr(row: Row, tuned: dict[str, Tuned]) -> float | None:
        chosen = tuned[row.tuned].chosen
        return None if chosen is None else chosen * row.lr_factor


# ---------------------------------------------------------------------------- the whole


def conduct(
    name: str,
    *,
    scale: str = "nano",
    seeds: int | None = None,
    budget: str = "",
    only: str = "",
    data: str = "",
    lab: Lab,
    report_only: bool = False,
) -> Results:
    """Carries out what is missing of a study, and gives what is found."""
    sizes = spec.scale_named(scale)
    if budget:
        sizes = spec.with_budget(sizes, budget)
    study = spec.load(name, sizes, seeds=seeds, only=only)
    folder, fitted = corpus(sizes, data or study.data, lab.cache, lab.console.say)
    study = spec.load(name, fitted, seeds=seeds, only=only)
    bench = Bench(study, folder, data_identity(folder))

    if not report_only:
        _announce(bench, lab)
        final = bench.rows({f: Tuned({}, study.scale.lr, 0, False) for f in study.families})
        lab.later = sum(run.flops for _, _, run in final)
        bench.sweep(lab)
        lab.later = 0.0
        lab.run([run for _, _, run in bench.rows(bench.tuned(lab))])
    tuned = bench.tuned(lab)
    found = bench.found(lab, tuned)
    if not any(row.records for row in found):
        reasons = [reason for row in found for reason in row.failures.values()]
        raise UserError(
            f"no run of {name} is finished" + (f": {reasons[0]}" if reasons else f" in {lab.cache}")
        )
    check_all_matched(found, study.match)
    noise = noise_of(found, f"from this study, {study.seeds} seeds")
    if noise is None and name != "main":
        noise = _borrowed(fitted, folder, lab)
    return Results(study, scale, folder, found, tuned, noise, verdicts(study.claims, found, noise))


def _borrowed(scale: Scale, folder: str, lab: Lab) -> Noise | None:
    """The noise of the main study at this scale and budget, if seeds of it are in the cache."""
    for seeds in range(8, 1, -1):
        bench = Bench(spec.load("main", scale, seeds=seeds), folder, data_identity(folder))
        found = bench.found(lab, bench.tuned(lab))
        whole = [row for row in found if len(row.records) == seeds]
        if len(whole) > 1:
            return noise_of(whole, f"from the main study, {seeds} seeds")
    return None


def _announce(bench: Bench, lab: Lab) -> None:
    """What will be done, and what it may cost."""
    study = bench.study
    sweeps = [bench.sweep_run(f, lr) for f in study.families for lr in bench.grid()]
    tuned = bench.tuned(lab)
    guess = {f: t if t.chosen else Tuned({}, study.scale.lr, 0, False) for f, t in tuned.items()}
    finals = [run for _, _, run in bench.rows(guess)]
    due = lab.missing([*sweeps, *finals])
    flops = sum(run.flops for run in due)
    steps = sorted({row.steps for row in study.rows})
    shown = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"
    lab.console.say(
        f"{study.title}: {len(study.rows)} rows × {study.seeds} seeds of {shown} steps of "
        f"{study.scale.batch} × {study.scale.length} tokens, and sweeps of {len(study.families)} "
        f"families × {len(bench.grid())} learning rates"
    )
    rate, _ = lab.rate()
    lab.console.say(
        f"{len(due)} of {len({r.key for r in [*sweeps, *finals]})} runs to do, {flops:.3g} FLOPs: "
        f"about {duration(flops / rate / max(1, lab.jobs))} if a core does {rate / 1e9:.0f} GFLOP/s"
        " (extensions of sweeps not counted)"
    )
