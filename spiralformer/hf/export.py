"""A model folder that opens with `trust_remote_code=True` where this package is not installed.

The folder carries the modules that the model needs, one file each side by side, because that is all
that the dynamic loader of `transformers` understands: `spiralformer.model.blocks` becomes
`spiral_model_blocks.py` and the imports between them become relative. Nothing else is changed.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
from importlib.abc import InspectLoader
from pathlib import Path

from spiralformer import __version__
from spiralformer.files import inside, new_folder, read_json, write_json
from spiralformer.hf.configuration_spiralformer import SpiralFormerConfig
from spiralformer.hf.modeling_spiralformer import SpiralFormerForCausalLM
from spiralformer.model_folder import (
    WEIGHTS,
    copy_tokenizer,
    load_model,
    tokenizer_of,
    weight_files,
)

PACKAGE = "spiralformer"
AUTO_CLASSES = {"AutoConfig": SpiralFormerConfig, "AutoModelForCausalLM": SpiralFormerForCausalLM}


def flat_name(module: str) -> str:
    """spiralformer.model.blocks → spiral_model_blocks; spiralformer.hf.cache → cache"""
    parts = module.split(".")[1:]
    return "_".join(parts[1:] if parts[0] == "hf" else ["spiral", *parts])


def flatten(module: str) -> tuple[str, list[str]]:
    """The source of a module with relative imports, and the modules of the package it imports."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert isinstance(spec.loader, InspectLoader)
    source = spec.loader.get_source(module) or ""
    lines, needed = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == PACKAGE for alias in node.names), module
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            assert node.level == 0, f"{module}:{node.lineno}"
            assert name != PACKAGE, f"{module}:{node.lineno}: import from the module itself"
            if name.startswith(f"{PACKAGE}."):
                needed.append(name)
                at = node.lineno - 1
                lines[at] = lines[at].replace(f"from {name} ", f"from .{flat_name(name)} ", 1)
    header = f"# {module} of spiralformer {__version__} (Apache-2.0), its imports made relative."
    return "\n".join([header, *lines]) + "\n", needed


def sources() -> dict[str, str]:
    """Every file of code that the model and its configuration need, by name."""
    files: dict[str, str] = {}
    waiting = [cls.__module__ for cls in AUTO_CLASSES.values()]
    while waiting:
        module = waiting.pop()
        name = f"{flat_name(module)}.py"
        if name not in files:
            files[name], needed = flatten(module)
            waiting += needed
    return files


def export(checkpoint: str | Path, folder: str | Path) -> Path:
    """Writes the exported folder of a model folder."""
    checkpoint = Path(checkpoint)
    config = load_model(checkpoint).config  # nothing is written of a damaged one
    fields = read_json(checkpoint / "config.json")
    fields["auto_map"] = {
        auto: f"{flat_name(cls.__module__)}.{cls.__name__}" for auto, cls in AUTO_CLASSES.items()
    }
    others = [
        inside(checkpoint, name) for name in (f"{WEIGHTS}.index.json", "generation_config.json")
    ]
    with new_folder(folder) as part:
        for path in (*weight_files(checkpoint), *filter(Path.exists, others)):
            shutil.copyfile(path, part / path.name)
        for name, source in sources().items():
            (part / name).write_text(source, encoding="utf-8")
        write_json(part / "config.json", fields)
        if tokenizer_of(checkpoint):
            copy_tokenizer(checkpoint, part)
            described = part / "tokenizer_config.json"
            if not described.exists():
                about = {"tokenizer_class": "PreTrainedTokenizerFast"}
                write_json(described, {**about, "model_max_length": config.max_length})
    return Path(folder)
