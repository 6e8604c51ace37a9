"""What a training run is: a frozen, validated configuration, from a file, a preset and overrides.

A field either decides what is learned (the model, the data, the optimiser, …) or only how the run
is carried out and looked at. A run may be taken up again with other fields of the second kind."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from spiralformer import presets
from spiralformer.config import ConfigError, SpiralConfig

PRECISIONS = ("auto", "float32", "bfloat16")
PARALLEL = ("ddp", "fsdp")
FILES = (".yaml", ".yml", ".json")


def _about(help: str, decides: bool = False) -> dict[str, Any]:
    return {"help": help, "decides": decides}


def _setting(help: str, default: Any, *, decides: bool = False) -> Any:
    return field(default=default, metadata=_about(help, decides))


class _Group:
    """Fields of a dataclass brought to their declared types, then checked by `_check`."""

    _PREFIX: typing.ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for declared in dataclasses.fields(typing.cast(Any, self)):
            name, value = declared.name, getattr(self, declared.name)
            object.__setattr__(self, name, _typed(self._PREFIX + name, value, hints[name]))
        self._check()

    def _check(self) -> None:
        pass

    def _refuse(self, name: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self._PREFIX}{name} {getattr(self, name)!r} {remedy}")

    def _at_least(self, least: float, *names: str) -> None:
        for name in names:
            if not getattr(self, name) >= least:
                raise self._refuse(name, f"must be at least {least}")

    def _within(self, low: float, high: float, *names: str) -> None:
        for name in names:
            if not low <= getattr(self, name) <= high:
                raise self._refuse(name, f"must lie in {low:g} … {high:g}")


@dataclass(frozen=True, kw_only=True)
class Data(_Group):
    """Where the tokens come from."""

    _PREFIX = "data."

    path: str = _setting("folder of `spiralformer data`, or Megatron shards", "")
    valid: str = _setting(
        "folder or shards to validate on, if not those of path; none: no validation", ""
    )
    holdout: float = _setting(
        "share of shards without a validation split that is kept for it", 0.0, decides=True
    )

    def _check(self) -> None:
        if not self.path:
            raise ConfigError(
                "data.path is missing: name a folder made by `spiralformer data`, for example "
                "data.path=runs/stdlib"
            )
        if not 0 <= self.holdout < 1:
            raise self._refuse("holdout", "must lie in 0 … 1 (1 excluded)")


@dataclass(frozen=True, kw_only=True)
class Optim(_Group):
    """AdamW and its schedule. The defaults are the paper's."""

    _PREFIX = "optim."

    lr: float = _setting("peak learning rate (the paper: 6e-4 at 160M)", 6e-4, decides=True)
    betas: tuple[float, float] = _setting("AdamW's β", (0.9, 0.95), decides=True)
    eps: float = _setting("AdamW's ε", 1e-8, decides=True)
    weight_decay: float = _setting(
        "of parameters with two or more dimensions: all but biases and norms", 0.01, decides=True
    )
    warmup: float = _setting("share of the steps with a rising learning rate", 0.01, decides=True)
    final: float = _setting("share of the peak that the cosine falls to", 0.1, decides=True)
    clip: float = _setting("largest norm of the gradient; 0: any", 1.0, decides=True)

    def _check(self) -> None:
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise self._refuse(name, "must be a positive number")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise self._refuse("betas", "must both lie in 0 … 1 (1 excluded)")
        self._at_least(0, "weight_decay", "clip")
        self._within(0, 1, "warmup", "final")


@dataclass(frozen=True, kw_only=True)
class Valid(_Group):
    _PREFIX = "valid."

    every: int = _setting("steps between validations; 0: twenty in all", 0)
    tokens: int = _setting("validate on the first so many tokens; 0: on all", 1 << 20)

    def _check(self) -> None:
        self._at_least(0, "every", "tokens")


@dataclass(frozen=True, kw_only=True)
class Save(_Group):
    _PREFIX = "save."

    every: int = _setting("steps between checkpoints; 0: by the clock only", 1000)
    minutes: float = _setting("minutes between checkpoints, at most", 15.0)
    keep: int = _setting("how many of the last checkpoints are kept", 2)

    def _check(self) -> None:
        self._at_least(0, "every", "minutes")
        self._at_least(1, "keep")


@dataclass(frozen=True, kw_only=True)
class Sample(_Group):
    _PREFIX = "sample."

    prompts: tuple[str, ...] = _setting("texts to go on from; empty: begin a document", ("",))
    every: int = _setting("steps between samples; 0: with each validation", 0)
    tokens: int = _setting("length of a sample; 0: no samples", 128)
    temperature: float = _setting("0: always the likeliest token", 0.8)
    top_k: int = _setting("draw from so many of the likeliest tokens; 0: from all", 40)

    def _check(self) -> None:
        self._at_least(0, "every", "temperature", "top_k", "tokens")


@dataclass(frozen=True, kw_only=True)
class Log(_Group):
    _PREFIX = "log."

    every: int = _setting("steps between lines of metrics.jsonl", 10)
    tensorboard: bool = _setting("write TensorBoard events", True)
    wandb: str = _setting("project of Weights & Biases; empty: not used", "")

    def _check(self) -> None:
        self._at_least(1, "every")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Group):
    """A training run. Only the model and the data are required."""

    model: SpiralConfig = field(
        metadata=_about("a preset's name, or model.preset=NAME model.FIELD=VALUE …", decides=True)
    )
    data: Data
    out: str = _setting("folder of the run", "")

    length: int = _setting("tokens of a sequence; 0: the model's max_length", 0, decides=True)
    batch: int = _setting("sequences of a step, over all processes", 512, decides=True)
    micro_batch: int = _setting(
        "sequences at a time on a process; 0: as many as divide its share, up to 8", 0
    )
    steps: int = _setting("steps of the run; 0: as many as `tokens` say", 0, decides=True)
    tokens: int = _setting("tokens of the run; 0: as many as `epochs` say", 0, decides=True)
    epochs: float = _setting("passes over the data", 1.0, decides=True)
    seed: int = _setting("of the initial weights and the order of the data", 0, decides=True)

    optim: Optim = field(default_factory=Optim)
    precision: str = _setting(
        "float32, bfloat16 (autocast) or auto: bfloat16 where it is fast",
        "auto",
        decides=True,
    )
    nonfinite_limit: int = _setting(
        "stop after so many steps in a row with a non-finite loss or gradient", 10
    )

    device: str = _setting("auto (cuda if there is one, else cpu), cuda, cpu or mps", "auto")
    parallel: str = _setting("with several processes: ddp or fsdp", "ddp")
    checkpointing: bool = _setting("recompute activations in the backward pass", False)
    compile: bool = _setting("compile the blocks with torch.compile", False)

    valid: Valid = field(default_factory=Valid)
    save: Save = field(default_factory=Save)
    sample: Sample = field(default_factory=Sample)
    log: Log = field(default_factory=Log)

    def _check(self) -> None:
        object.__setattr__(self, "length", self.length or self.model.max_length)
        object.__setattr__(self, "out", self.out or "runs/train")
        self._at_least(1, "length", "batch", "nonfinite_limit")
        self._at_least(0, "micro_batch", "steps", "tokens", "seed")
        if not 0 < self.epochs < math.inf:
            raise self._refuse("epochs", "must be a positive number")
        for name, choices in (("precision", PRECISIONS), ("parallel", PARALLEL)):
            if getattr(self, name) not in choices:
                raise self._refuse(name, f"is unknown; choose one of {', '.join(choices)}")
        if self.length > self.model.max_length:
            raise self._refuse("length", f"exceeds model.max_length {self.model.max_length}")
        for it in self.model.iterations:
            if self.length <= max(it.shift, it.chunk):
                raise self._refuse(
                    "length",
                    f"is too short for iteration {it.index} of layout {self.model.layout} (chunks "
                    f"of {it.chunk}, shift {it.shift}): it would never be trained",
                )
        if self.micro_batch and self.batch % self.micro_batch:
            raise self._refuse("micro_batch", f"does not divide batch {self.batch}")

    # ------------------------------------------------------------------ input and output

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """From nested fields, as in a file. `model` is a name or fields of the model."""
        fields = dict(fields)
        if "model" not in fields:
            raise ConfigError("model is missing: name a preset, for example spiral-b-nano-mesh")
        fields["model"] = _model(fields["model"])
        fields.setdefault("data", {})
        return _build(cls, fields)

    def to_dict(self) -> dict[str, Any]:
        return {
            name: value.to_dict()
            if isinstance(value, SpiralConfig)
            else json.loads(json.dumps(dataclasses.asdict(value)))
            if dataclasses.is_dataclass(value) and not isinstance(value, type)
            else value
            for name, value in ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        }

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def override(self, settings: Mapping[str, Any]) -> TrainConfig:
        """The same run with some fields changed: `{"optim.lr": 1e-3, "model.shift": "parallel"}`.
        What followed from a changed field of the model follows anew."""
        fields = self.to_dict()
        model = {k[6:]: v for k, v in settings.items() if k.startswith("model.")}
        if "length" not in settings and self.length == self.model.max_length:
            fields["length"] = 0
        for path, value in settings.items():
            if not path.startswith("model."):
                _put(fields, path, value)
        chosen = _model(fields["model"]) if "model" in settings else self.model
        return _build(type(self), {**fields, "model": chosen.replace(**model)})

    @classmethod
    def load(cls, source: str | Path, settings: Iterable[str] = ()) -> TrainConfig:
        """What the command line means: a file or a preset's name, and overrides a.b=value."""
        source = str(source)
        if source.endswith(FILES):
            fields, name = _read(Path(source)), Path(source).stem
        else:
            fields, name = {"model": {"preset": source}}, source
        fields.setdefault("out", f"runs/{name}")
        if isinstance(fields.get("model"), str):
            fields["model"] = {"preset": fields["model"]}
        model = []
        for setting in settings:
            path, equals, text = setting.partition("=")
            if not equals or not path.strip():
                raise ConfigError(f"{setting!r}: write field=value, for example optim.lr=1e-3")
            path, text = path.strip(), text.strip()
            if path == "model":
                fields["model"] = {"preset": text}
            elif path == "model.preset":
                _put(fields, path, text)
            elif path.startswith("model."):
                model.append(f"{path[6:]}={text}")
            else:
                _put(fields, path, text)
        try:
            for name, value in presets.parse_settings(model).items():
                _put(fields, f"model.{name}", value)
        except ConfigError as error:
            raise ConfigError(f"model: {error}") from None
        return cls.from_dict(fields)

    # ------------------------------------------------------------------ comparing

    def deciding(self) -> dict[str, Any]:
        """The fields that decide what is learned, by their dotted names. Where the data lie is not
        one of them: what they are is recorded by the run (see `loop`)."""
        return {name: value for name, value, about in _flat(self) if about.metadata["decides"]}

    def digest(self) -> str:
        """Of the deciding fields and the folder of the data: the same for equal runs."""
        content = {**self.deciding(), "data.path": self.data.path, "data.valid": self.data.valid}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def describe_fields() -> str:
    """Every field with its meaning and default, for --help."""
    lines = []
    for name, about in _fields(TrainConfig):
        default = about.default
        shown = "" if default in (dataclasses.MISSING, "", ("",)) else f" [{_shown(default)}]"
        lines.append(f"  {name:<19} {about.metadata['help']}{shown}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return str(value).lower() if isinstance(value, bool) else f"{value}"


# ---------------------------------------------------------------------------- nested fields

G = TypeVar("G")


def _model(value: Any) -> SpiralConfig:
    try:
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
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from None


def _build(cls: type[G], fields: Mapping[str, Any], prefix: str = "") -> G:
    """A dataclass from nested fields; an unknown one is answered with the nearest name."""
    declared = {about.name for about in dataclasses.fields(typing.cast(Any, cls))}
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in fields.items():
        if name not in declared:
            raise _unknown(prefix + str(name))
        group = hints[name]
        if isinstance(group, type) and issubclass(group, _Group) and not isinstance(value, group):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{name} {value!r} must be a group of fields")
            value = _build(group, value, f"{prefix}{name}.")
        values[name] = value
    return cls(**values)


def _unknown(path: str) -> ConfigError:
    names = [name for name, _ in _fields(TrainConfig)]
    last = {name.split(".")[-1]: name for name in reversed(names)}
    near = difflib.get_close_matches(path, names, 1)
    near = near or [last[n] for n in difflib.get_close_matches(path.split(".")[-1], last, 1)]
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return ConfigError(f"unknown field {path!r}; {hint}")


def _put(fields: dict[str, Any], path: str, value: Any) -> None:
    """fields["a"]["b"] = value for the path a.b"""
    *groups, name = path.split(".")
    for group in groups:
        inner = fields.get(group)
        fields[group] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        fields = inner
    fields[name] = value


def _fields(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Dotted name and field, groups opened."""
    hints = typing.get_type_hints(cls)
    for about in dataclasses.fields(cls):
        group = hints[about.name]
        if isinstance(group, type) and issubclass(group, _Group):
            yield from _fields(group, f"{prefix}{about.name}.")
        else:
            yield prefix + about.name, about


def _flat(config: TrainConfig) -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Dotted name, value and field, groups and the model opened."""
    values = config.to_dict()
    for name, about in _fields(TrainConfig):
        value: Any = values
        for part in name.split("."):
            value = value[part]
        if name == "model":
            yield from ((f"model.{k}", v, about) for k, v in value.items())
        else:
            yield name, value, about


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a mapping of fields")
    return found


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value as its declared type. Text is taken too: overrides are text, and YAML reads 1e-3 as
    text."""
    if typing.get_origin(hint) is tuple:
        return _tuple(name, value, typing.get_args(hint))
    if hint is bool:
        text = str(value).lower()
        if text not in ("true", "false"):
            raise ConfigError(f"{name} {value!r} must be true or false")
        return text == "true"
    if hint in (int, float):
        return _number(name, value, hint)
    if hint is str:
        if not isinstance(value, (str, Path)):
            raise ConfigError(f"{name} {value!r} must be text")
        return str(value)
    if not isinstance(value, hint):
        raise ConfigError(f"{name} {value!r} must be a group of fields")
    return value


def _number(name: str, value: Any, hint: type) -> int | float:
    kind = "a whole number" if hint is int else "a number"
    try:
        if isinstance(value, bool):
            raise ValueError
        number = value if isinstance(value, int) else float(value)
        if hint is float:
            number = float(number)
        elif number != int(number):
            raise ValueError
        if number != number:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} {value!r} must be {kind}") from None
    return hint(number)


def _tuple(name: str, value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        # A text is one prompt; numbers are written with commas between them.
        value = [value] if kinds[0] is str else value.strip("()[] ").split(",")
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} {value!r} must be a list")
    if kinds[-1] is not Ellipsis and len(value) != len(kinds):
        raise ConfigError(f"{name} {value!r} must have {len(kinds)} values")
    return tuple(_typed(name, item, kinds[0]) for item in value)
