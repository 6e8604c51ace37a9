"""A model folder that opens with `trust_remote_code=True` where this package is not installed.

The folder carries the modules that the model needs, one file each side by side, because that is all
that the dynamic loader of `transformers` understands: `spiralformer.model.blocks` becomes
`spiral_model_blocks.py` and the imports between them become relative. Nothing else is changed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
from importlib.abc import InspectLoader
from pathlib import Path

from spiralformer import __version__
from spiralformer.hf.configuration_spiralformer import SpiralFormerConfig
from spiralformer.hf.modeling_spiralformer import SpiralFormerForCausalLM
from spiralformer.hf.neox import new_folder, tokenizer_of
from spiralformer.model_folder import WEIGHTS, load_config, load_model, read_json, tokenizer_files

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
    load_model(checkpoint)  # nothing is written of a damaged one
    config = load_config(checkpoint)
    fields = read_json(checkpoint / "config.json")
    fields["auto_map"] = {
        auto: f"{flat_name(cls.__module__)}.{cls.__name__}" for auto, cls in AUTO_CLASSES.items()
    }
    index = checkpoint / f"{WEIGHTS}.index.json"
    names = {WEIGHTS}
    if index.exists():
        names = {index.name, *read_json(index)["weight_map"].values()}
    if (checkpoint / "generation_config.json").exists():
        names.add("generation_config.json")
    if tokenizer_of(checkpoint):
        names |= {path.name for path in tokenizer_files(checkpoint)}
    with new_folder(folder) as part:
        for name in names:
            shutil.copyfile(checkpoint / name, part / name)
        for name, source in sources().items():
            (part / name).write_text(source, encoding="utf-8")
        (part / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        described = part / "tokenizer_config.json"
        if (part / "tokenizer.json").exists() and not described.exists():
            about = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config.max_length,
            }
            described.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return Path(folder)
