"""The recipe of a training run: frozen, validated, from a file, a preset and overrides.

Pydantic checks the fields; `spiralformer train --help` lists them with what is said here."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from spiralformer import presets
from spiralformer.config import ConfigError, SpiralConfig
from spiralformer.errors import UserError, shown
from spiralformer.files import read_yaml
from spiralformer.train.optim import OPTIMIZERS, SCHEDULES

# These fields and groups say how a run is carried out and looked at; it may be taken up again with
# others. All the rest decide what is learned. Where the data lie is not one of those: what the data
# are is recorded by the run (see `RunPlan`).
HOW = (
    *("out", "data.path", "data.valid", "valid", "save", "sample", "log"),
    *("micro_batch", "nonfinite_limit", "device", "parallel", "checkpointing", "compile"),
)


# ---------------------------------------------------------------------------- kinds of values


def _number(value: Any) -> Any:
    """Overrides are text, and YAML reads 1e-3 as text. True is not a number."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value) if "e" in value.lower() else value
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _list(value: Any) -> Any:
    """Text or a lone number stands for a list."""
    if isinstance(value, str):
        return [part for part in value.strip("()[] ").split(",") if part]
    return [value] if isinstance(value, (int, float)) else value


def _one(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _model(value: Any) -> SpiralConfig:
    """From a configuration, a preset's name, or fields, which `preset` may be one of."""
    try:
        if not isinstance(value, Mapping):
            value = {"preset": value}
        fields = {str(name): entry for name, entry in value.items()}
        preset = fields.pop("preset", None)
        text = [f"{name}={entry}" for name, entry in fields.items() if isinstance(entry, str)]
        fields |= presets.parse_settings(text)
        if preset is None:
            return SpiralConfig.from_dict(fields)
        if isinstance(preset, SpiralConfig):
            return preset.replace(**fields)
        return presets.resolve(str(preset), **fields)
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from None


Count = Annotated[int, BeforeValidator(_number), Field(ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(_number), Field(gt=-1e30, lt=1e30)]
Share = Annotated[Number, Field(ge=0, le=1)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
Text = Annotated[
    str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)
]
Model = Annotated[
    SpiralConfig, PlainValidator(_model), PlainSerializer(lambda model: model.to_dict())
]


# ---------------------------------------------------------------------------- the fields


def _field(default: Any, help: str, **limits: Any) -> Any:
    return Field(default, description=help, **limits)


class Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Data(Group):
    path: Text = _field(..., "folder of `spiralformer data`, or Megatron shards", min_length=1)
    valid: Text = _field(
        "", "folder or shards to validate on, if not those of path; none: no validation"
    )
    holdout: Beta = _field(0.0, "share of shards without a validation split that is kept for it")


class Optim(Group):
    """The optimiser and its schedule. The defaults are the paper's."""

    name: str = _field("adamw", f"optimiser: {', '.join(OPTIMIZERS)}")
    schedule: str = _field(
        "cosine", f"how the learning rate falls after its peak: {', '.join(SCHEDULES)}"
    )
    lr: Number = _field(6e-4, "peak learning rate (the paper: 6e-4 at 160M)", gt=0)
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_list)] = _field((0.9, 0.95), "AdamW's β")
    eps: Number = _field(1e-8, "AdamW's ε", gt=0)
    momentum: Beta = _field(0.95, "Muon's momentum")
    weight_decay: Number = _field(
        0.01, "of parameters with two or more dimensions: all but biases and norms", ge=0
    )
    warmup: Share = _field(0.01, "share of the steps with a rising learning rate")
    decay: Share = _field(0.2, "wsd: share of the steps after the warm-up with a falling rate")
    final: Share = _field(0.1, "share of the peak that the schedule falls to")
    clip: Number = _field(1.0, "largest norm of the gradient; 0: any", ge=0)

    @field_validator("name", "schedule")
    @classmethod
    def _is_registered(cls, name: str, info: ValidationInfo) -> str:
        registry = OPTIMIZERS if info.field_name == "name" else SCHEDULES
        if name not in registry:
            raise ValueError(f"unknown; choose one of {', '.join(registry)}")
        return name


class Valid(Group):
    every: Count = _field(0, "steps between validations; 0: twenty in all")
    tokens: Count = _field(1 << 20, "validate on the first so many tokens; 0: on all")


class Save(Group):
    every: Count = _field(1000, "steps between checkpoints; 0: by the clock only")
    minutes: Number = _field(15.0, "minutes between checkpoints, at most; 0: any", ge=0)
    keep: Count = _field(2, "how many of the last checkpoints are kept", ge=1)


class Sample(Group):
    prompts: Annotated[tuple[str, ...], BeforeValidator(_one)] = _field(
        ("",), "texts to go on from; empty: begin a document"
    )
    every: Count = _field(0, "steps between samples; 0: with each validation")
    tokens: Count = _field(128, "length of a sample; 0: no samples")
    temperature: Number = _field(0.8, "0: always the likeliest token", ge=0)
    top_k: Count = _field(40, "draw from so many of the likeliest tokens; 0: from all")


class Log(Group):
    every: Count = _field(10, "steps between lines of metrics.jsonl", ge=1)
    tensorboard: bool = _field(True, "write TensorBoard events")
    wandb: Text = _field("", "project of Weights & Biases; empty: not used")


class TrainConfig(Group):
    """A training run. Only the model and the data are required.

    Build it with `load`, `from_dict` or `override`, whose errors are one line for the user."""

    model: Model = _field(..., "a preset's name, or model.preset=NAME model.FIELD=VALUE …")
    data: Data
    out: Text = _field("runs/train", "folder of the run", min_length=1)

    length: Count = _field(0, "tokens of a sequence; 0: the model's max_length")
    batch: Count = _field(512, "sequences of a step, over all processes", ge=1, le=1 << 24)
    micro_batch: Count = _field(
        0, "sequences at a time on a process; 0: as many as divide its share, up to 8"
    )
    steps: Count = _field(0, "steps of the run; 0: as many as `tokens` say")
    tokens: Count = _field(0, "tokens of the run; 0: as many as `epochs` say")
    epochs: Number = _field(1.0, "passes over the data", gt=0)
    seed: Count = _field(0, "of the initial weights and the order of the data")
    elastic: Annotated[tuple[Share, ...], BeforeValidator(_list)] = _field(
        (), "chance that a step leaves out an iteration: one for each but the last, or one for all"
    )

    optim: Optim = Optim()
    precision: Literal["auto", "float32", "bfloat16"] = _field(
        "auto", "float32, bfloat16 (autocast) or auto: bfloat16 where it is fast"
    )
    nonfinite_limit: Count = _field(
        10, "stop after so many steps in a row with a non-finite loss or gradient", ge=1
    )

    device: Text = _field("auto", "auto (cuda if there is one, else cpu), cuda, cpu or mps")
    parallel: Literal["ddp", "fsdp"] = _field("ddp", "with several processes: ddp or fsdp")
    checkpointing: bool = _field(False, "recompute activations in the backward pass")
    compile: bool = _field(False, "compile the blocks with torch.compile")

    valid: Valid = Valid()
    save: Save = Save()
    sample: Sample = Sample()
    log: Log = Log()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        longest = self.model.max_length
        if not self.length:
            object.__setattr__(self, "length", longest)
        if self.length > longest:
            raise ConfigError(f"length {self.length} must lie in 1 … {longest}, model.max_length")
        for iteration in self.model.iterations:
            if self.length <= max(iteration.shift, iteration.chunk):
                raise ConfigError(
                    f"length {self.length} is too short for iteration {iteration.index} of layout "
                    f"{self.model.layout} (chunks of {iteration.chunk}, shift {iteration.shift}): "
                    "it would never be trained"
                )
        if self.elastic:
            coarse = max(0, self.model.num_iterations - 1)
            chances = self.elastic * coarse if len(self.elastic) == 1 else self.elastic
            if not coarse or len(chances) != coarse:
                raise ConfigError(
                    f"elastic {','.join(map(str, self.elastic))}: layout {self.model.layout} has "
                    f"{coarse} iterations that can be left out; give as many numbers, or one"
                )
            object.__setattr__(self, "elastic", chances)
        if self.parallel == "fsdp" and self.optim.name == "muon":
            raise ConfigError(
                "optim.name muon needs whole matrices, fsdp shards them; set parallel=ddp"
            )
        if self.micro_batch and self.batch % self.micro_batch:
            raise ConfigError(f"micro_batch {self.micro_batch} does not divide batch {self.batch}")
        return self

    # ------------------------------------------------------------------ input and output

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """From nested fields, as in a file. `model` is a name or fields of the model."""
        try:
            return cls.model_validate({"data": {}, **fields})
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @classmethod
    def load(cls, source: str | Path, settings: Iterable[str] = ()) -> TrainConfig:
        """What the command line means: a file or a preset's name, and overrides a.b=value."""
        name, fields = str(source), dict[str, Any](model=str(source))
        if name.endswith((".yaml", ".yml", ".json")):
            name, fields = Path(source).stem, _read(Path(source))
        changes = {}
        for setting in settings:
            path, equals, text = (part.strip() for part in setting.partition("="))
            if not equals or not path:
                raise ConfigError(f"{setting!r}: write field=value, for example optim.lr=1e-3")
            changes[path] = text
        fields = _changed({"out": f"runs/{name}", **fields}, changes)
        config = cls.from_dict(fields)
        fit = {name: value for name, value in _fit(config).items() if not _is_given(name, fields)}
        return config.override(fit)

    def override(self, settings: Mapping[str, Any]) -> TrainConfig:
        """The same run with some fields changed: `{"optim.lr": 1e-3, "model.shift": "parallel"}`.
        What followed from a changed field of the model follows anew."""
        fields = {**self.to_dict(), "model": self.model}
        if self.length == self.model.max_length:
            fields["length"] = 0
        return self.from_dict(_changed(fields, settings))

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def deciding(self) -> dict[str, Any]:
        """The fields that decide what is learned, by their dotted names."""
        return {
            name: value
            for name, value in _flat(self.to_dict())
            if name not in HOW and name.split(".")[0] not in HOW
        }


def _changed(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested fields with other values for some dotted names."""
    fields = dict(fields)
    # The model first: its own fields change it.
    for path in sorted(changes, key=lambda path: path != "model"):
        *groups, name = path.split(".")
        inner = fields
        for group in groups:
            value = inner.get(group, {})
            inner[group] = dict(value) if isinstance(value, Mapping) else {"preset": value}
            inner = inner[group]
        inner[name] = changes[path]
    return fields


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _read(path: Path) -> dict[str, Any]:
    fields = read_yaml(path)
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: not a mapping of fields")
    return fields


# ---------------------------------------------------------------------------- what fits the data

PAPER_SIZED = 1 << 28  # tokens of training data from which on the paper's batches are taken
STEPS = 1000  # in a pass over less


def _fit(config: TrainConfig) -> dict[str, Any]:
    """Values for what a recipe leaves open. They depend on the data and the model, and not on how
    long the run is, so that a run can be given more steps."""
    tokens, known = _measure(config.data)
    if not tokens:
        return {}
    model, rate = config.model, 6e-4 * 768 / config.model.hidden_size  # the paper's, at its width
    fit = {"optim.lr": float(f"{min(rate, 3e-3):.2g}")}
    if known is not None:
        fit["model.vocab_size"] = vocabulary(known)
    if tokens < PAPER_SIZED:
        coarsest = max((iteration.chunk for iteration in model.iterations), default=1)
        length = config.length if config.length < model.max_length else max(512, 4 * coarsest)
        length = min(length, model.max_length)
        batch = 1 << max(2, (tokens // (STEPS * length)).bit_length() - 1)
        fit |= {"length": length, "batch": min(batch, 512), "optim.warmup": 0.05}
    return fit


def _measure(data: Data) -> tuple[int, int | None]:
    """Tokens to train on, and tokens of the tokenizer where one is known. What is wrong with the
    data is said when they are opened."""
    from spiralformer.data.shards import MANIFEST, find_shards, read_manifest

    try:
        if (Path(data.path) / MANIFEST).is_file():
            manifest = read_manifest(Path(data.path))
            return manifest["splits"]["train"]["tokens"], manifest["tokenizer"]["vocab_size"]
        return sum(len(shard.stream) for shard in find_shards(data.path)), None
    except UserError:
        return 0, None


def vocabulary(tokens: int) -> int:
    """Of a model for a tokenizer of so many tokens: a multiple of 64."""
    return -(-tokens // 64) * 64


def _is_given(name: str, fields: Mapping[str, Any]) -> bool:
    """A preset says nothing of the vocabulary; any other description of a model does."""
    model = fields["model"]
    if name == "model.vocab_size" and not isinstance(model, Mapping):
        return model not in presets.PRESETS
    if name == "model.vocab_size" and model.get("preset") not in presets.PRESETS:
        return True
    return name in dict(_flat(fields))


# ---------------------------------------------------------------------------- by dotted name


def _leaves(group: type[Group], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in group.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


FIELDS: dict[str, FieldInfo] = dict(_leaves(TrainConfig))


def default_of(name: str) -> Any:
    """What a run had that was written before there was such a field."""
    if name.startswith("model."):
        defaults = {field.name: field.default for field in dataclasses.fields(SpiralConfig)}
        return defaults.get(name.removeprefix("model."))
    default = FIELDS[name].default if name in FIELDS else None
    return list(default) if isinstance(default, tuple) else default


def describe_fields() -> str:
    """Every field with its meaning and default, for --help."""
    lines = []
    for name, field in FIELDS.items():
        default = field.default
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        text = field.description or ""
        if not field.is_required() and default != "":
            text += f" [{str(default).lower()}]"
        first = f"  {name:<19} "
        lines.append(textwrap.fill(text, 80, initial_indent=first, subsequent_indent=" " * 22))
    return "\n".join(lines)


def _explain(error: ValidationError) -> str:
    """The first mistake: field, value and remedy. A wrong name comes before its consequences."""
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    name = ".".join(map(str, first["loc"]))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if first["type"] == "extra_forbidden":
        return f"unknown field {shown(name)}; {_nearest(name)}"
    if first["type"] == "missing":
        return f"{name} is missing" + (f": {FIELDS[name].description}" if name in FIELDS else "")
    if first["type"] == "model_type":
        inner = next(known for known in FIELDS if known.startswith(f"{name}."))
        return f"{name} {shown(first['input'])}: a group of fields; write for example {inner}=…"
    problem = first["msg"].removeprefix("Value error, ")
    return f"{name} {shown(first['input'])}: {problem[0].lower()}{problem[1:]}"


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, FIELDS, 1)
    if not near:  # perhaps the group was forgotten
        last = {known.split(".")[-1]: known for known in reversed(FIELDS)}
        near = [last[match] for match in difflib.get_close_matches(name.split(".")[-1], last, 1)]
    return f"did you mean {near[0]!r}?" if near else "`spiralformer train --help` names all"
