"""`spiralformer import`: a GPT-NeoX (Pythia) folder becomes a model folder of ours."""

from __future__ import annotations

import argparse
from pathlib import Path

from spiralformer.files import read_json, require_free
from spiralformer.hf import neox
from spiralformer.model_folder import save_model, tokenizer_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="HF_FOLDER", help="a GPT-NeoX folder, such as Pythia's")
    parser.add_argument("out", metavar="OUT", help="the model folder to write")


def run(args: argparse.Namespace) -> int:
    source, out = Path(args.source), Path(args.out)
    require_free(out)
    model = neox.from_gpt_neox(source)
    fields = read_json(source / "config.json")
    ids = {name: fields[name] for name in neox.TOKEN_IDS if fields.get(name) is not None}
    tokenizer = tokenizer_of(source)
    save_model(model, out, tokenizer=tokenizer, **ids)
    config, dtype = model.config, str(model.embedding.weight.dtype).removeprefix("torch.")
    print(
        f"{out}: {config.layout} layers of width {config.hidden_size}, {config.num_heads} heads, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters in {dtype}"
        + ("" if tokenizer else "; no tokenizer.json was found")
    )
    return 0
