"""Named configurations: every row of the paper's Tables 1 and 2, and the same at nano size.

A name is family-size[-topology][-change]. What the paper printed for it is in `paper`, under the
same name. `resolve` is how every command turns its argument into a configuration.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

from spiralformer.config import ConfigError, Layout, SpiralConfig
from spiralformer.files import read_json

# Pythia-1B officially has 8 heads; the FLOPs that the paper prints for it are those of 16.
SIZES: dict[str, dict[str, int]] = {
    "160m": {"hidden_size": 768, "num_heads": 12, "vocab_size": 50304},
    "410m": {"hidden_size": 1024, "num_heads": 16, "vocab_size": 50304},
    "1b": {"hidden_size": 2048, "num_heads": 16, "vocab_size": 50304},
    "1.4b": {"hidden_size": 2048, "num_heads": 16, "vocab_size": 50304},
    "nano": {"hidden_size": 128, "num_heads": 4, "vocab_size": 4096, "max_length": 1024},
}

LAYOUTS: dict[str, str] = {
    "pythia-160m": "12",
    "looped-160m-anchor": "2+4x{1,1}+2",
    "looped-160m-mesh": "2+4x{1,1}+2",
    "spiral-b-160m-mesh": "2+4x{1/8,1/4,1/2,1}+2",
    "spiral-l-160m-mesh": "4+4x{1/16,1/8,1/4,1/2}+4",
    "pythia-410m": "24",
    "looped-410m-anchor": "4+8x{1,1}+4",
    "looped-410m-mesh": "4+8x{1,1}+4",
    "spiral-b-410m-anchor": "4+8x{1/8,1/4,1/2,1}+4",
    "spiral-b-410m-mesh": "4+8x{1/8,1/4,1/2,1}+4",
    "spiral-l-410m-mesh": "8+8x{1/16,1/8,1/4,1/2}+8",
    "pythia-1b": "16",
    "looped-1b-anchor": "3+5x{1,1}+3",
    "looped-1b-mesh": "3+5x{1,1}+3",
    "spiral-b-1b-mesh": "3+5x{1/8,1/4,1/2,1}+3",
    "spiral-l-1b-mesh": "5+6x{1/16,1/8,1/4,1/2}+5",
    "pythia-1.4b": "24",
    "pythia-1.4b-mesh": "4+8+8+4",
    "looped-1.4b-anchor": "4+8x{1,1}+4",
    "looped-1.4b-mesh": "4+8x{1,1}+4",
    "spiral-b-1.4b-mesh": "4+8x{1/8,1/4,1/2,1}+4",
    "spiral-l-1.4b-mesh": "8+8x{1/16,1/8,1/4,1/2}+8",
    "pythia-nano": "12",
    "pythia-nano-mesh": "2+4+4+2",
    "looped-nano-anchor": "2+4x{1,1}+2",
    "looped-nano-mesh": "2+4x{1,1}+2",
    "spiral-b-nano-anchor": "2+4x{1/8,1/4,1/2,1}+2",
    "spiral-b-nano-mesh": "2+4x{1/8,1/4,1/2,1}+2",
    "spiral-l-nano-mesh": "4+4x{1/16,1/8,1/4,1/2}+4",
}

# Table 2: one change each to SpiralFormer-B with MeSH. Its first row, MeSH to Anchor, is a
# preset of its own.
ABLATIONS: dict[str, dict[str, str]] = {
    "fine-to-coarse": {},  # the schedule reversed
    "parallel": {"shift": "parallel"},
    "zero-offset": {"offset": "zero"},
    "mean": {"downscale": "mean"},
    "uniform": {"upscale": "uniform"},
    "mean-uniform": {"downscale": "mean", "upscale": "uniform"},
}
VARIANTS: dict[str, dict[str, str]] = {  # beyond the paper's tables
    "attention": {"downscale": "attention"},
    "input": {"upscale": "input_dependent"},
}
CHANGES = ABLATIONS | VARIANTS
ABLATED = ("spiral-b-410m-mesh", "spiral-b-nano-mesh")


def _plain(name: str) -> dict[str, Any]:
    size, *topology = re.sub(r"^(pythia|looped|spiral-b|spiral-l)-", "", name).split("-")
    return {
        "layout": LAYOUTS[name],
        **SIZES[size],
        "topology": topology[0] if topology else "none",
    }


def ablated(name: str, change: str) -> dict[str, Any]:
    """The fields of a preset with one change."""
    fields = _plain(name)
    if change == "fine-to-coarse":
        fields["layout"] = re.sub(
            r"\{(.*)\}",
            lambda m: "{" + ",".join(reversed(m[1].split(","))) + "}",
            fields["layout"],
        )
    return {**fields, **CHANGES[change]}


PRESETS: dict[str, dict[str, Any]] = {
    **{name: _plain(name) for name in LAYOUTS},
    **{f"{name}-{change}": ablated(name, change) for name in ABLATED for change in CHANGES},
}


def names() -> list[str]:
    return list(PRESETS)


def preset(name: str) -> SpiralConfig:
    """The configuration of this name."""
    if name not in PRESETS:
        near = ", ".join(difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.0))
        raise ConfigError(
            f"unknown preset {name!r}; the nearest are {near} (all: spiralformer count --list)"
        )
    return SpiralConfig(**PRESETS[name])


def resolve(text: str, /, **overrides: Any) -> SpiralConfig:
    """The configuration that `text` means, with some fields changed.

    `text` is the name of a preset, the path of a JSON file, or a layout; a layout needs its sizes
    among the overrides.
    """
    if text in PRESETS:
        return preset(text).replace(**overrides)
    if is_layout(text):
        Layout.parse(text)  # a wrong layout is said before missing sizes
        sizes = ("hidden_size", "num_heads", "vocab_size")
        missing = [name for name in sizes if name not in overrides]
        if missing:
            raise ConfigError(
                f"layout {text!r} says nothing of the sizes: give {', '.join(missing)}, or name a "
                "preset such as spiral-b-nano-mesh and change its layout"
            )
        return SpiralConfig.from_dict({"layout": text, **overrides})
    if text.endswith(".json") or "/" in text:
        fields = read_json(text)
        try:
            config = SpiralConfig.from_dict(fields)
        except ConfigError as error:
            raise ConfigError(f"{text}: {error}") from None
        return config.replace(**overrides)
    return preset(text)  # says which names are near


def is_layout(text: str) -> bool:
    """Whether this means a layout, right or wrong, and not a preset or a file."""
    return bool(re.match(r"[\d\s]*[+{]|[\d\s]+($|[xX×])", text))


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """`["shift=parallel", "offset=4,2,1,0"]` as fields of a configuration."""
    types = {field.name: field.type for field in dataclasses.fields(SpiralConfig)}
    fields: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name, text = name.strip(), text.strip()
        if not equals or not name:
            raise ConfigError(f"setting {setting!r}: write field=value, for example shift=parallel")
        if name not in types:
            SpiralConfig.from_dict({name: text})  # says which field is near
        fields[name] = text if types.get(name) == "str" else _value(text)
    return fields


def _value(text: str) -> Any:
    """A number, true, false or a list where the text is one; else the text itself."""
    if re.fullmatch(r"\d+(\s*,\s*\d+)+", text):
        text = f"[{text}]"
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
