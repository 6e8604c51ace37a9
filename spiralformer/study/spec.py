"""A study: a declarative file, read at a scale.

A file names rows (a family and what is changed in it), a grid that all rows are repeated over, the
sweep of learning rates, and the paper's claims as comparisons of rows. It holds no size: widths,
budgets and rates are multiples of the scale's, so one file serves a laptop and a cluster."""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from spiralformer import presets
from spiralformer.accounting import training_flops_per_token
from spiralformer.config import ConfigError, SpiralConfig
from spiralformer.errors import UserError
from spiralformer.files import CONFIGS

FOLDER = CONFIGS / "studies"


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
    precision: str = "float32"


def _paper(size: str, lr: float) -> Scale:
    sizes = presets.SIZES[size]
    return Scale(
        size=size,
        hidden_size=sizes["hidden_size"],
        num_heads=sizes["num_heads"],
        vocab_size=sizes["vocab_size"],
        length=4096,
        batch=512,
        tokens=250_000_000_000,
        lr=lr,
        warmup=0.01,
        valid_tokens=1 << 24,
        precision="bfloat16",
    )


SCALES: dict[str, Scale] = {
    "tiny": Scale("nano", 24, 3, 512, 64, 2, 512, 4e-3, 0.05, 256),
    "nano": Scale("nano", 96, 3, 1024, 512, 4, 245_760, 2e-3, 0.05, 65_536),
    "160m": _paper("160m", 6e-4),
    "410m": _paper("410m", 3e-4),
    "1b": _paper("1b", 3e-4),
    "1.4b": _paper("1.4b", 2e-4),
}


def scale_named(name: str) -> Scale:
    if name not in SCALES:
        raise UserError(f"unknown scale {name!r}; choose one of {', '.join(SCALES)}")
    return SCALES[name]


def with_budget(scale: Scale, budget: str) -> Scale:
    """`0.5x` is a multiple of the scale's tokens; `400k`, `3M` or `1e6` are tokens."""
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)([kMBx]?)", budget)
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if not found or not number > 0:
        raise UserError(f"--budget {budget!r}: write tokens (400k, 3M, 1e6) or a multiple (0.5x)")
    factor = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "x": scale.tokens}[found[2]]
    tokens = round(number * factor)
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
    return SpiralConfig(
        **{
            **fields,
            "hidden_size": scale.hidden_size,
            "num_heads": scale.num_heads,
            "vocab_size": scale.vocab_size,
            "max_length": scale.length,
        }
    )


# ---------------------------------------------------------------------------- rows and claims


@dataclass(frozen=True)
class Row:
    """One line of the table: a model, its budget, and whose learning rate it takes."""

    name: str  # what claims call it
    label: str
    model: SpiralConfig
    tuned: str  # the family whose sweep its learning rate is from
    lr_factor: float  # base width over its width
    steps: int
    point: dict[str, float] = field(default_factory=dict)  # its place on the study's grid
    core: Fraction | None = None  # share of the layers in the core, in a study of it
    paper: str = ""  # what the paper's tables call it, with {} for the size

    @property
    def id(self) -> str:
        marks = {
            "budget": f"×{self.point.get('budget', 1):g}",
            "width": f"d{self.model.hidden_size}",
        }
        return " ".join([self.name, *(marks[axis] for axis in self.point)])


@dataclass(frozen=True)
class Claim:
    """Something the paper says, as a comparison of rows by name.

    less: the first has less of `quantity` than the second; alike: they differ by less than
    `margin`; frontier: the first lies below the line fitted to the second, over `against`."""

    says: str
    source: str
    kind: str
    rows: tuple[str, str]
    quantity: str = "loss"
    margin: float = 0.0
    against: str = "flops"
    per: str = ""  # a verdict for each value of this axis of the grid, not one over all


@dataclass(frozen=True)
class Sweep:
    lrs: tuple[float, ...]  # as multiples of the scale's
    budget: float  # as a multiple of the scale's tokens
    extensions: int  # how often a best at the edge may extend the grid by a factor of two


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    about: str
    figure: str
    match: str  # tokens or flops
    seeds: int
    keep_models: bool
    reference: str  # the row that others are compared with in the table
    sweep: Sweep
    scale: Scale
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    data: str  # "" is the embedded corpus

    @property
    def families(self) -> list[str]:
        """Those whose learning rates are needed."""
        return list(dict.fromkeys(row.tuned for row in self.rows))


# ---------------------------------------------------------------------------- reading

TOP = (
    *("title", "about", "figure", "match", "seeds", "keep_models", "reference", "data"),
    *("sweep", "rows", "grid", "claims"),
)
ROW = ("family", "name", "label", "change", "resolutions", "core", "set", "tuned")
CLAIM = (
    *("says", "source", "less", "alike", "frontier"),
    *("quantity", "margin", "against"),
    "per",
)
FIGURES = ("families", "ablation", "recurrence", "scaling", "schedule")
AXES = ("budget", "width")
QUANTITIES = ("loss", "flops", "parameters")


class _Bad(UserError):
    pass


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str, scale: Scale, *, seeds: int | None = None, only: str = "") -> Study:
    """The study of this name (or file) at a scale."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        if path.parent == FOLDER:
            raise UserError(
                f"unknown study {name!r}; choose one of {', '.join(names())}, or a file"
            )
        raise UserError(f"{path}: no such file")
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    try:
        study = _study(path.stem, fields, scale)
    except (_Bad, ConfigError) as error:
        raise UserError(f"{path}: {error}") from None
    if seeds is not None:
        if seeds < 1:
            raise UserError(f"--seeds {seeds}: at least 1 is needed")
        study = dataclasses.replace(study, seeds=seeds)
    if only:
        try:
            rows = tuple(row for row in study.rows if re.search(only, row.id))
        except re.error as error:
            raise UserError(f"--only {only!r}: bad pattern: {error}") from None
        if not rows:
            ids = ", ".join(row.id for row in study.rows)
            raise UserError(f"--only {only!r} matches no row; the rows are {ids}")
        study = dataclasses.replace(study, rows=rows)
    return study


def _study(name: str, fields: Any, scale: Scale) -> Study:
    _fields("", fields, TOP)
    sweep = _fields("sweep", fields.get("sweep", {}), ("lrs", "budget", "extensions"))
    lrs = sweep.get("lrs", [1])
    if not isinstance(lrs, list) or not lrs:
        raise _Bad(f"sweep.lrs {lrs!r} must be a list of multiples of the scale's learning rate")
    grid = _fields("grid", fields.get("grid", {}), AXES)
    if len(grid) > 1:
        raise _Bad("grid: one axis at a time")
    match = _choice("match", fields.get("match", "tokens"), ("tokens", "flops"))
    points: list[dict[str, float]] = [{}]
    for axis, values in grid.items():
        if not isinstance(values, list) or not values:
            raise _Bad(f"grid.{axis} {values!r} must be a list of multiples")
        points = [{axis: float(_positive(f"grid.{axis}", value))} for value in values]
    given = fields.get("rows")
    if not isinstance(given, list) or not given:
        raise _Bad("rows must be a list of families, or of mappings with a family")
    rows = tuple(
        _row(f"rows[{k}]", row, point, match, scale)
        for point in points
        for k, row in enumerate(given)
    )
    ids = [row.id for row in rows]
    for row in ids:
        if ids.count(row) > 1:
            raise _Bad(f"rows: two are called {row!r}; give one of them another name")
    known = list(dict.fromkeys(row.name for row in rows))
    claims = fields.get("claims", [])
    if not isinstance(claims, list):
        raise _Bad("claims must be a list")
    seeds = fields.get("seeds", 1)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise _Bad(f"seeds {seeds!r} must be a whole number of at least 1")
    return Study(
        name=name,
        title=str(fields.get("title", name)),
        about=str(fields.get("about", "")).strip(),
        figure=_choice("figure", fields.get("figure", "families"), FIGURES),
        match=match,
        seeds=seeds,
        keep_models=bool(fields.get("keep_models", False)),
        reference=_choice("reference", fields.get("reference", known[0]), tuple(known)),
        sweep=Sweep(
            tuple(sorted(float(_positive("sweep.lrs", lr)) for lr in lrs)),
            float(_positive("sweep.budget", sweep.get("budget", 1))),
            int(sweep.get("extensions", 0)),
        ),
        scale=scale,
        rows=rows,
        claims=tuple(_claim(f"claims[{k}]", claim, known, grid) for k, claim in enumerate(claims)),
        data=str(fields.get("data", "")),
    )


def _row(place: str, fields: Any, point: dict[str, float], match: str, scale: Scale) -> Row:
    if isinstance(fields, str):
        fields = {"family": fields}
    _fields(place, fields, ROW)
    family = _choice(f"{place}.family", fields.get("family"), tuple(FAMILIES))
    change = fields.get("change", "")
    if change:
        _choice(f"{place}.change", change, tuple(presets.ABLATIONS))
    model = family_config(family, scale, change)
    core = None
    if "core" in fields:
        core, model = _with_core(place, model, fields["core"])
    if "resolutions" in fields:
        layout = model.parsed_layout
        text = f"{layout.pre}+{layout.cores[0]}x{{{fields['resolutions']}}}+{layout.post}"
        model = model.replace(layout=text)
    try:
        model = model.replace(**fields.get("set", {}))
    except (ConfigError, TypeError) as error:
        raise _Bad(f"{place}.set: {error}") from None
    tuned = _choice(f"{place}.tuned", fields.get("tuned", family), tuple(FAMILIES))
    width = point.get("width", 1.0)
    if width != 1:
        heads = max(1, round(model.num_heads * width))
        model = model.replace(hidden_size=heads * model.head_size, num_heads=heads)
    tokens = scale.tokens * point.get("budget", 1.0)
    if match == "flops":  # what the tokens cost the plain baseline
        plain = training_flops_per_token(family_config("baseline", scale), scale.length)
        tokens *= plain / training_flops_per_token(model, scale.length)
    unchanged = not {"change", "core", "resolutions", "set"} & fields.keys()
    named = (unchanged or change) and "width" not in point
    paper = preset_name(family, "{}") if named else ""
    return Row(
        name=str(fields.get("name") or "-".join(filter(None, (family, change)))),
        label=str(fields.get("label") or FAMILIES[family]),
        model=model,
        tuned=tuned,
        lr_factor=scale.hidden_size / model.hidden_size,
        steps=max(1, round(tokens / (scale.batch * scale.length))),
        point=point,
        core=core,
        paper=f"{paper}-{change}" if paper and change else paper,
    )


def _with_core(place: str, model: SpiralConfig, share: Any) -> tuple[Fraction, SpiralConfig]:
    """The same layers, this share of them in the core, the others before and after alike."""
    wanted = Fraction(_positive(f"{place}.core", share, zero=True))
    layout = model.parsed_layout
    total = layout.unique_layers
    if not wanted:
        if layout.tied:
            raise _Bad(f"{place}.core 0 needs an untied family such as baseline-mesh")
        return Fraction(0), model
    looped = round(wanted * total)
    looped += (total - looped) % 2
    if not 0 < looped <= total or not layout.tied or not layout.cores:
        raise _Bad(f"{place}.core {share} cannot be made of {total} layers of {model.layout}")
    around = (total - looped) // 2
    inside = ",".join(map(str, layout.resolutions))
    return Fraction(looped, total), model.replace(layout=f"{around}+{looped}x{{{inside}}}+{around}")


def _claim(place: str, fields: Any, known: list[str], grid: dict[str, Any]) -> Claim:
    _fields(place, fields, CLAIM)
    kinds = [kind for kind in ("less", "alike", "frontier") if kind in fields]
    if len(kinds) != 1 or "says" not in fields or "source" not in fields:
        raise _Bad(f"{place} needs says, source and one of less, alike and frontier")
    rows = fields[kinds[0]]
    if not isinstance(rows, list) or len(rows) != 2:
        raise _Bad(f"{place}.{kinds[0]} {rows!r} must be two rows")
    for row in rows:
        _choice(f"{place}.{kinds[0]}", row, tuple(known))
    per = fields.get("per", "")
    if per:
        _choice(f"{place}.per", per, tuple(grid))
    return Claim(
        says=str(fields["says"]),
        source=str(fields["source"]),
        kind=kinds[0],
        rows=(rows[0], rows[1]),
        quantity=_choice(f"{place}.quantity", fields.get("quantity", "loss"), QUANTITIES),
        margin=float(_positive(f"{place}.margin", fields.get("margin", 0), zero=True)),
        against=_choice(f"{place}.against", fields.get("against", "flops"), QUANTITIES[1:]),
        per=per,
    )


def _fields(place: str, given: Any, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _Bad(f"{place or 'the file'} must be a mapping of fields")
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise _Bad(f"unknown field {f'{place}.{name}' if place else name!r}; {hint}")
    return given


def _choice(place: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise _Bad(f"{place} {value!r} is unknown; choose one of {', '.join(choices)}")
    return value


def _positive(place: str, value: Any, zero: bool = False) -> Fraction:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = Fraction(str(value))
        if number < 0 or (not number and not zero):
            raise ValueError
    except (ValueError, ZeroDivisionError):
        kind = "a number of at least 0" if zero else "a positive number"
        raise _Bad(f"{place} {value!r} must be {kind}, such as 1/3") from None
    return number
