"""A study: a declarative file, read at a scale.

A file names rows (a family and what is changed in it), a grid that all rows are repeated over, the
sweep of learning rates, and the paper's claims as comparisons of rows. It holds no size: widths,
budgets and rates are multiples of the scale's, so one file serves a laptop and a cluster."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from spiralformer import presets
from spiralformer.accounting import training_flops_per_token
from spiralformer.config import ConfigError, SpiralConfig
from spiralformer.errors import UserError, shown
from spiralformer.files import CONFIGS, first_mistake, read_yaml
from spiralformer.machine import within

FOLDER = CONFIGS / "studies"
LARGEST_BUDGET = 1e15  # tokens
MOST_SEEDS = 1000
PATIENCE = 2.0  # seconds: a pattern may take longer than the universe lasts


# ---------------------------------------------------------------------------- scales


@dataclass(frozen=True)
class Scale:
    """The sizes of a study: all that differs between a laptop and the paper."""

    size: str  # of the presets whose layouts are taken
    hidden_size: int
    num_heads: int
    vocab_size: int
    length: int
    batch: int
    tokens: int  # of a run
    lr: float  # the middle of the sweeps
    warmup: float
    valid_tokens: int
    sweep: float = 1.0  # tokens of a run of a sweep, as a share of `tokens`
    precision: str = "bfloat16"


def _paper(size: str, lr: float) -> Scale:
    sizes = presets.SIZES[size]
    width, heads, vocabulary = (sizes[k] for k in ("hidden_size", "num_heads", "vocab_size"))
    return Scale(
        size, width, heads, vocabulary, 4096, 512, 250_000_000_000, lr, 0.01, 1 << 24, 1 / 3
    )


BYTES = 320  # 256 and end of text, rounded up
SCALES: dict[str, Scale] = {
    "tiny": Scale("nano", 24, 3, BYTES, 64, 2, 512, 4e-3, 0.05, 256, 0.5, "float32"),
    # 400 steps of 8 × 512 bytes, and 1,200 at one and a half times the width
    "bytes-s": Scale("nano", 128, 4, BYTES, 512, 8, 1_638_400, 3e-3, 0.05, 1 << 16),
    "bytes-m": Scale("nano", 192, 6, BYTES, 512, 8, 4_915_200, 2e-3, 0.05, 1 << 16, 1 / 4),
    "160m": _paper("160m", 6e-4),
    "410m": _paper("410m", 3e-4),
    "1b": _paper("1b", 3e-4),
    "1.4b": _paper("1.4b", 2e-4),
}


def scale_named(name: str, budget: str = "") -> Scale:
    """`budget`: `0.5x` is a multiple of the scale's tokens; `400k`, `3M` or `1e6` are tokens."""
    if name not in SCALES:
        raise UserError(f"unknown scale {name!r}; choose one of {', '.join(SCALES)}")
    scale = SCALES[name]
    if not budget:
        return scale
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)([kMBx]?)", budget)
    if not match or not 0 < float(match[1]) < LARGEST_BUDGET:
        raise UserError(
            f"--budget {shown(budget)}: write tokens (400k, 3M, 1e6; at most {LARGEST_BUDGET:g}) "
            "or a multiple (0.5x)"
        )
    factor = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "x": scale.tokens}[match[2]]
    tokens = round(float(match[1]) * factor)
    if tokens > LARGEST_BUDGET:
        raise UserError(f"--budget {budget}: more than {LARGEST_BUDGET:g} tokens")
    if tokens < scale.batch * scale.length:
        raise UserError(
            f"--budget {budget!r} is less than one step of {scale.batch} × {scale.length} tokens"
        )
    return dataclasses.replace(scale, tokens=tokens)


# ---------------------------------------------------------------------------- families

FAMILIES = {
    "baseline": "Baseline (Pythia)",
    "baseline-mesh": "Baseline, MeSH",
    "looped-anchor": "LoopedFormer, Anchor",
    "looped-mesh": "LoopedFormer, MeSH",
    "spiral-b-anchor": "SpiralFormer-B, Anchor",
    "spiral-b-mesh": "SpiralFormer-B, MeSH",
    "spiral-l-anchor": "SpiralFormer-L, Anchor",
    "spiral-l-mesh": "SpiralFormer-L, MeSH",
}


def preset_name(family: str, size: str) -> str:
    """What the presets and the paper's tables call a family at a size."""
    head, _, topology = family.replace("baseline", "pythia").rpartition("-")
    return f"{head}-{size}-{topology}" if head else f"{topology}-{size}"


def family_config(family: str, scale: Scale, change: str = "") -> SpiralConfig:
    """A family at a scale; `change` is one of the paper's ablations of it."""
    if family == "baseline":
        fields = presets.PRESETS[preset_name(family, scale.size)]
    elif family == "baseline-mesh":  # the loop's layers, not shared
        looped = presets.preset(preset_name("looped-mesh", scale.size))
        untied = dataclasses.replace(looped.parsed_layout, tied=False)
        fields = {"layout": str(untied), "topology": "mesh"}
    else:
        head, _, topology = family.rpartition("-")
        name = preset_name(f"{head}-mesh", scale.size)
        changed = presets.ablated(name, change) if change else presets.PRESETS[name]
        fields = {**changed, "topology": topology}
    sizes = {k: getattr(scale, k) for k in ("hidden_size", "num_heads", "vocab_size")}
    return SpiralConfig(**{**fields, **sizes, "max_length": scale.length})


# ---------------------------------------------------------------------------- the file


def _one_of(names: Iterable[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is unknown; choose one of {', '.join(names)}")
        return value

    return AfterValidator(check)


Positive = Annotated[Fraction, Field(gt=0, le=1_000_000)]


class Fields(BaseModel):
    """What a file may hold, and no more."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Sweep(Fields):
    lrs: Annotated[list[Positive], Field(min_length=1)] = [Fraction(1)]  # times the scale's
    extensions: Annotated[int, Field(ge=0, le=100)] = (
        0  # how often a best at the edge extends it, by 2
    )


class Claim(Fields):
    """Something the paper says, as a comparison of rows by name.

    less: the first has less of `quantity` than the second; alike: they differ by less than
    `margin`; frontier: the first lies below the second's line, over `against`."""

    says: str
    source: str
    less: tuple[str, str] | None = None
    alike: tuple[str, str] | None = None
    frontier: tuple[str, str] | None = None
    quantity: Literal["loss", "flops", "parameters"] = "loss"
    margin: Annotated[float, Field(ge=0)] = 0.0
    against: Literal["flops", "parameters"] = "flops"
    per: Literal["", "budget", "width"] = ""  # a verdict for each value of this axis of the grid

    @model_validator(mode="after")
    def _one_kind(self) -> Claim:
        if sum(pair is not None for pair in (self.less, self.alike, self.frontier)) != 1:
            raise ValueError("needs one of less, alike and frontier")
        return self

    @property
    def rows(self) -> tuple[str, str]:
        rows = self.less or self.alike or self.frontier
        assert rows is not None
        return rows


class RowFields(Fields):
    family: Annotated[str, _one_of(FAMILIES)]
    name: str = ""
    label: str = ""
    change: Annotated[str, _one_of(presets.ABLATIONS)] = ""  # one of the paper's ablations
    resolutions: str = ""
    core: Annotated[Fraction, Field(ge=0, le=1)] | None = None  # of the layers, in the core
    set: dict[str, Any] = {}  # other fields of the model

    @model_validator(mode="before")
    @classmethod
    def _family_alone(cls, row: Any) -> Any:
        return {"family": row} if isinstance(row, str) else row

    @property
    def called(self) -> str:
        return self.name or "-".join(filter(None, (self.family, self.change)))


Figure = Literal["families", "recurrence", "scaling", "power"]


class StudyFile(Fields):
    title: str
    about: str = ""
    figure: Figure = "families"
    match: Literal["tokens", "flops"] = "tokens"
    seeds: Annotated[int, Field(ge=1, le=MOST_SEEDS)] = 1
    reference: str = ""  # the row that others are compared with; default: the first
    sweep: Sweep = Sweep()
    rows: list[RowFields] = Field(min_length=1)
    grid: Annotated[dict[Literal["budget", "width"], list[Positive]], Field(max_length=1)] = {}
    claims: list[Claim] = []

    @model_validator(mode="after")
    def _names(self) -> StudyFile:
        names = [row.called for row in self.rows]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rows: two are called {name!r}; give one of them another name")
        for name in filter(None, (self.reference, *(n for c in self.claims for n in c.rows))):
            if name not in names:
                raise ValueError(f"no row is called {name!r}; the rows are {', '.join(names)}")
        return self


_KNOWN = [name for kind in (StudyFile, RowFields, Claim, Sweep) for name in kind.model_fields]


def parse(path: Path) -> StudyFile:
    try:
        return StudyFile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UserError(f"{path}: {first_mistake(error, _KNOWN)}") from None


# ---------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """One line of the table: a model and its budget."""

    name: str  # what claims call it
    label: str
    model: SpiralConfig
    family: str  # whose sweep its learning rate is from
    steps: int
    point: dict[str, float] = field(default_factory=dict)  # its place on the study's grid
    core: float | None = None  # share of the layers in the core, in a study of it
    paper: str = ""  # what the paper's tables call it, with {} for the size

    @property
    def id(self) -> str:
        if "budget" in self.point:
            return f"{self.name} ×{self.point['budget']:g}"
        return f"{self.name} d{self.model.hidden_size}" if self.point else self.name


@dataclass(frozen=True)
class Study:
    """A file at a scale."""

    name: str
    file: StudyFile
    scale_name: str
    scale: Scale
    seeds: int
    rows: tuple[Row, ...]

    @property
    def families(self) -> list[str]:
        """Those whose learning rates are needed."""
        return list(dict.fromkeys(row.family for row in self.rows))

    @property
    def rates(self) -> list[float]:
        """Those that every sweep begins with."""
        return sorted(self.scale.lr * factor for factor in self.file.sweep.lrs)

    @property
    def claims(self) -> list[Claim]:
        """Those that speak of rows that are there."""
        names = {row.name for row in self.rows}
        return [claim for claim in self.file.claims if names.issuperset(claim.rows)]

    def at(self, vocab_size: int | None) -> Study:
        """The same with models of this vocabulary, where it is known."""
        if vocab_size is None:
            return self
        scale = dataclasses.replace(self.scale, vocab_size=vocab_size)
        rows = {row.id: row for row in _rows(self.file, scale)}
        return dataclasses.replace(self, scale=scale, rows=tuple(rows[row.id] for row in self.rows))


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(
    name: str, scale: str, *, budget: str = "", seeds: int | None = None, only: str = ""
) -> Study:
    """The study of this name (or file) at a scale."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and not path.is_file():
        raise UserError(f"unknown study {name!r}; choose one of {', '.join(names())}, or a file")
    if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds {seeds}: not in 1 … {MOST_SEEDS:,}")
    sizes, file = scale_named(scale, budget), parse(path)
    try:
        rows = _rows(file, sizes)
        with within(PATIENCE, f"--only {shown(only)}: takes too long to match"):
            chosen = tuple(row for row in rows if re.search(only, row.id))
    except ConfigError as error:
        raise UserError(f"{path}: {error}") from None
    except re.error as error:
        raise UserError(f"--only {shown(only)}: bad pattern: {error}") from None
    if not chosen:
        ids = ", ".join(row.id for row in rows)
        raise UserError(f"--only {only!r} matches no row; the rows are {ids}")
    return Study(path.stem, file, scale, sizes, seeds or file.seeds, chosen)


def _rows(file: StudyFile, scale: Scale) -> list[Row]:
    points: list[dict[str, float]] = [
        {axis: float(value)} for axis, values in file.grid.items() for value in values
    ]
    rows = []
    for point in points or [{}]:
        for k, fields in enumerate(file.rows):
            try:
                rows.append(_row(fields, point, file.match, scale))
            except (ConfigError, TypeError) as error:
                raise ConfigError(f"rows[{k}] ({fields.called}): {error}") from None
    return rows


def _row(fields: RowFields, point: dict[str, float], match: str, scale: Scale) -> Row:
    model, core = family_config(fields.family, scale, fields.change), None
    if fields.core is not None:
        model = _with_core(model, fields.core)
        layout = model.parsed_layout
        core = layout.cores[0] / layout.unique_layers if layout.tied else 0.0
    if fields.resolutions:
        layout = model.parsed_layout
        text = f"{layout.pre}+{layout.cores[0]}x{{{fields.resolutions}}}+{layout.post}"
        model = model.replace(layout=text)
    model = model.replace(**fields.set)
    if (width := point.get("width", 1.0)) != 1:
        heads = max(1, round(model.num_heads * width))
        model = model.replace(hidden_size=heads * model.head_size, num_heads=heads)
    tokens = scale.tokens * point.get("budget", 1.0)
    if match == "flops":  # what the tokens cost the plain baseline
        plain = training_flops_per_token(family_config("baseline", scale), scale.length)
        tokens *= plain / training_flops_per_token(model, scale.length)
    paper = ""
    if core is None and not (fields.resolutions or fields.set or "width" in point):
        paper = "-".join(filter(None, (preset_name(fields.family, "{}"), fields.change)))
    return Row(
        name=fields.called,
        label=fields.label or FAMILIES[fields.family],
        model=model,
        family=fields.family,
        steps=max(1, round(tokens / (scale.batch * scale.length))),
        point=point,
        core=core,
        paper=paper,
    )


def _with_core(model: SpiralConfig, share: Fraction) -> SpiralConfig:
    """The same layers, this share of them in the core, the others before and after alike."""
    layout = model.parsed_layout
    total = layout.unique_layers
    if not share and not layout.tied:
        return model
    looped = round(share * total)
    looped += (total - looped) % 2
    if not 0 < looped <= total or not layout.tied or not layout.cores:
        raise ConfigError(
            f"core {share} cannot be made of {total} layers of {model.layout}; core 0 needs a "
            "family without a loop such as baseline-mesh"
        )
    around = (total - looped) // 2
    inside = ",".join(map(str, layout.resolutions))
    return model.replace(layout=f"{around}+{looped}x{{{inside}}}+{around}")
