"""The recipe of a training run: frozen, validated, from a file, a preset and overrides.

A field either decides what is learned (the model, the data, the optimiser, …) or only how the run
is carried out and looked at. A run may be taken up again with other fields of the second kind."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from spiralformer import presets
from spiralformer.config import ConfigError, SpiralConfig
from spiralformer.files import digest, read_text
from spiralformer.train.optim import OPTIMIZERS, SCHEDULES

FILES = (".yaml", ".yml", ".json")


# ---------------------------------------------------------------------------- kinds of values


def _number(value: Any) -> Any:
    """Overrides are text, and YAML reads 1e-3 as text."""
    if isinstance(value, bool):
        return str(value)  # which is no number
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _items(value: Any) -> Any:
    return value.strip("()[] ").split(",") if isinstance(value, str) else value


def _one(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _entry_of(registry: Mapping[str, Any]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in registry:
            raise ValueError(f"is unknown; choose one of {', '.join(registry)}")
        return name

    return check


def _model(value: Any) -> SpiralConfig:
    with _of_the_model():
        if isinstance(value, SpiralConfig):
            return value
        if isinstance(value, str):
            return presets.resolve(value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{value!r} is neither a preset's name nor fields")
        fields = dict(value)
        if "preset" in fields:
            return presets.resolve(str(fields.pop("preset")), **fields)
        return SpiralConfig.from_dict(fields)


@contextlib.contextmanager
def _of_the_model() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from None


Whole = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str, BeforeValidator(_text)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
Model = Annotated[
    SpiralConfig, PlainValidator(_model), PlainSerializer(lambda model: model.to_dict())
]


# ---------------------------------------------------------------------------- the fields


def _setting(help: str, default: Any = ..., *, decides: bool = False, **limits: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"decides": decides}, **limits)


class Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Data(Group):
    """Where the tokens come from."""

    path: Text = _setting(
        "folder of `spiralformer data`, or Megatron shards", min_length=1, examples=["runs/stdlib"]
    )
    valid: Text = _setting(
        "folder or shards to validate on, if not those of path; none: no validation", ""
    )
    holdout: Number = _setting(
        "share of shards without a validation split that is kept for it",
        0.0,
        decides=True,
        ge=0,
        lt=1,
    )


class Optim(Group):
    """The optimiser and its schedule. The defaults are the paper's."""

    name: Annotated[str, AfterValidator(_entry_of(OPTIMIZERS))] = _setting(
        f"optimiser: {', '.join(OPTIMIZERS)}", "adamw", decides=True
    )
    schedule: Annotated[str, AfterValidator(_entry_of(SCHEDULES))] = _setting(
        f"how the learning rate falls after its peak: {', '.join(SCHEDULES)}",
        "cosine",
        decides=True,
    )
    lr: Number = _setting("peak learning rate (the paper: 6e-4 at 160M)", 6e-4, decides=True, gt=0)
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_items)] = _setting(
        "AdamW's β", (0.9, 0.95), decides=True
    )
    eps: Number = _setting("AdamW's ε", 1e-8, decides=True, gt=0)
    weight_decay: Number = _setting(
        "of parameters with two or more dimensions: all but biases and norms",
        0.01,
        decides=True,
        ge=0,
    )
    warmup: Number = _setting(
        "share of the steps with a rising learning rate", 0.01, decides=True, ge=0, le=1
    )
    final: Number = _setting(
        "share of the peak that the schedule falls to", 0.1, decides=True, ge=0, le=1
    )
    clip: Number = _setting("largest norm of the gradient; 0: any", 1.0, decides=True, ge=0)


class Valid(Group):
    every: Whole = _setting("steps between validations; 0: twenty in all", 0, ge=0)
    tokens: Whole = _setting("validate on the first so many tokens; 0: on all", 1 << 20, ge=0)


class Save(Group):
    every: Whole = _setting("steps between checkpoints; 0: by the clock only", 1000, ge=0)
    minutes: Number = _setting("minutes between checkpoints, at most; 0: any", 15.0, ge=0)
    keep: Whole = _setting("how many of the last checkpoints are kept", 2, ge=1)


class Sample(Group):
    prompts: Annotated[tuple[str, ...], BeforeValidator(_one)] = _setting(
        "texts to go on from; empty: begin a document", ("",)
    )
    every: Whole = _setting("steps between samples; 0: with each validation", 0, ge=0)
    tokens: Whole = _setting("length of a sample; 0: no samples", 128, ge=0)
    temperature: Number = _setting("0: always the likeliest token", 0.8, ge=0)
    top_k: Whole = _setting("draw from so many of the likeliest tokens; 0: from all", 40, ge=0)


class Log(Group):
    every: Whole = _setting("steps between lines of metrics.jsonl", 10, ge=1)
    tensorboard: bool = _setting("write TensorBoard events", True)
    wandb: Text = _setting("project of Weights & Biases; empty: not used", "")


class TrainConfig(Group):
    """A training run. Only the model and the data are required.

    Build it with `load`, `from_dict` or `override`, whose errors are one line for the user."""

    model: Model = _setting(
        "a preset's name, or model.preset=NAME model.FIELD=VALUE …",
        decides=True,
        examples=["spiral-b-nano-mesh"],
    )
    data: Data
    out: Text = _setting("folder of the run", "runs/train", min_length=1)

    length: Whole = _setting("tokens of a sequence; 0: the model's max_length", 0, decides=True)
    batch: Whole = _setting("sequences of a step, over all processes", 512, decides=True, ge=1)
    micro_batch: Whole = _setting(
        "sequences at a time on a process; 0: as many as divide its share, up to 8", 0, ge=0
    )
    steps: Whole = _setting("steps of the run; 0: as many as `tokens` say", 0, decides=True, ge=0)
    tokens: Whole = _setting("tokens of the run; 0: as many as `epochs` say", 0, decides=True, ge=0)
    epochs: Number = _setting("passes over the data", 1.0, decides=True, gt=0)
    seed: Whole = _setting(
        "of the initial weights and the order of the data", 0, decides=True, ge=0
    )

    optim: Optim = Optim()
    precision: Literal["auto", "float32", "bfloat16"] = _setting(
        "float32, bfloat16 (autocast) or auto: bfloat16 where it is fast", "auto", decides=True
    )
    nonfinite_limit: Whole = _setting(
        "stop after so many steps in a row with a non-finite loss or gradient", 10, ge=1
    )

    device: Text = _setting("auto (cuda if there is one, else cpu), cuda, cpu or mps", "auto")
    parallel: Literal["ddp", "fsdp"] = _setting("with several processes: ddp or fsdp", "ddp")
    checkpointing: bool = _setting("recompute activations in the backward pass", False)
    compile: bool = _setting("compile the blocks with torch.compile", False)

    valid: Valid = Valid()
    save: Save = Save()
    sample: Sample = Sample()
    log: Log = Log()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        longest = self.model.max_length
        if not self.length:
            object.__setattr__(self, "length", longest)
        if not 1 <= self.length <= longest:
            raise ConfigError(f"length {self.length} must lie in 1 … {longest}, model.max_length")
        for iteration in self.model.iterations:
            if self.length <= max(iteration.shift, iteration.chunk):
                raise ConfigError(
                    f"length {self.length} is too short for iteration {iteration.index} of layout "
                    f"{self.model.layout} (chunks of {iteration.chunk}, shift {iteration.shift}): "
                    "it would never be trained"
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
        if name.endswith(FILES):
            name, fields = Path(source).stem, _read(Path(source))
        fields.setdefault("out", f"runs/{name}")
        if isinstance(fields.get("model"), str):
            fields["model"] = {"preset": fields["model"]}
        # The preset first: other fields of the model change it.
        for setting in sorted(
            settings, key=lambda text: not re.match(r"model(\.preset)?\s*=", text)
        ):
            path, equals, text = (part.strip() for part in setting.partition("="))
            if not equals or not path:
                raise ConfigError(f"{setting!r}: write field=value, for example optim.lr=1e-3")
            if path == "model":
                fields["model"] = {"preset": text}
            elif path.startswith("model.") and path != "model.preset":
                with _of_the_model():
                    (value,) = presets.parse_settings([f"{path[6:]}={text}"]).values()
                _put(fields, path, value)
            else:
                _put(fields, path, text)
        return cls.from_dict(fields)

    def override(self, settings: Mapping[str, Any]) -> TrainConfig:
        """The same run with some fields changed: `{"optim.lr": 1e-3, "model.shift": "parallel"}`.
        What followed from a changed field of the model follows anew."""
        fields = self.to_dict()
        if self.length == self.model.max_length:
            fields["length"] = 0
        changes = {}
        for path, value in settings.items():
            if path.startswith("model."):
                changes[path[6:]] = value
            else:
                _put(fields, path, value)
        chosen = _model(fields["model"]) if "model" in settings else self.model
        with _of_the_model():
            fields["model"] = chosen.replace(**changes)
        return self.from_dict(fields)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    # ------------------------------------------------------------------ comparing

    def deciding(self) -> dict[str, Any]:
        """The fields that decide what is learned, by their dotted names. Where the data lie is not
        one of them: what they are is recorded by the run (see `RunPlan`)."""
        flat = dict(_flat(self.to_dict()))
        return {
            name: value
            for name, value in flat.items()
            if _decides(FIELDS["model" if name.startswith("model.") else name])
        }

    def digest(self) -> str:
        """Of the deciding fields and the folder of the data: the same for equal runs."""
        return digest(
            {**self.deciding(), "data.path": self.data.path, "data.valid": self.data.valid}
        )


def _leaves(group: type[Group], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in group.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


FIELDS: dict[str, FieldInfo] = dict(_leaves(TrainConfig))  # by dotted name


def default_of(name: str) -> Any:
    """What a run had that was written before there was such a field."""
    if name.startswith("model."):
        defaults = {field.name: field.default for field in dataclasses.fields(SpiralConfig)}
        return defaults.get(name.removeprefix("model."))
    return FIELDS[name].default if name in FIELDS else None


def describe_fields() -> str:
    """Every field with its meaning and default, for --help."""
    return "\n".join(
        textwrap.fill(
            f"{field.description}{_shown(field.default)}",
            width=80,
            initial_indent=f"  {name:<19} ",
            subsequent_indent=" " * 22,
        )
        for name, field in FIELDS.items()
    )


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    if isinstance(default, bool):
        default = str(default).lower()
    return f" [{default}]" if isinstance(default, (str, int, float)) and default != "" else ""


def _decides(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra["decides"])


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _put(fields: dict[str, Any], path: str, value: Any) -> None:
    """fields["a"]["b"] = value for the path a.b"""
    *groups, name = path.split(".")
    for group in groups:
        inner = fields.get(group)
        fields[group] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        fields = inner
    fields[name] = value


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: not a mapping of fields")
    return fields


# ---------------------------------------------------------------------------- what was wrong

SHOULD = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be text",
    "model": "must be a group of fields",
}


def _explain(error: ValidationError) -> str:
    """The first mistake: field, value and remedy. A wrong name comes before its consequences."""
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    name, kind, value = ".".join(map(str, first["loc"])), first["type"], first["input"]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if kind == "extra_forbidden":
        return f"unknown field {name!r}; {_nearest(name)}"
    if kind == "missing":
        field = FIELDS.get(name)
        if field is None or not field.examples:
            return f"{name} is missing"
        return f"{name} is missing ({field.description}): for example {name}={field.examples[0]}"
    said = SHOULD.get(kind.split("_")[0]) if kind.endswith(("_type", "_parsing", "_float")) else ""
    said = said or re.sub(r"^(Value error, |\w+ should )", "", first["msg"])
    return f"{name} {value!r} {said if cause or said.startswith('must') else 'must ' + said}"


def _nearest(name: str) -> str:
    last = {known.split(".")[-1]: known for known in reversed(FIELDS)}
    near = difflib.get_close_matches(name, FIELDS, 1)
    near = near or [last[n] for n in difflib.get_close_matches(name.split(".")[-1], last, 1)]
    return f"did you mean {near[0]!r}?" if near else "`spiralformer train --help` names all"
