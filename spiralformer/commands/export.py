"""`spiralformer export`: a model folder for those who do not have this package."""

from __future__ import annotations

import argparse
from pathlib import Path

from spiralformer.files import read_json, require_free
from spiralformer.model_folder import find_model

FORMATS = {
    "hf": "loads with trust_remote_code=True; the folder carries the code it needs",
    "gpt-neox": "a GPT-NeoX checkpoint; for plain layouts with LayerNorm, such as imported ones",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    folder = "the folder of a model or of a run"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=folder)
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="hf",
        help="; ".join(f"{name}: {what}" for name, what in FORMATS.items()) + " (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    source, out = find_model(args.checkpoint), Path(args.out)
    require_free(out)

    from spiralformer.hf import neox
    from spiralformer.model_folder import load_config, load_model, tokenizer_of

    if args.format == "gpt-neox":
        neox.write_config(load_config(source))  # refuses before the weights are read
        fields = read_json(source / "config.json")
        ids = {name: fields[name] for name in neox.TOKEN_IDS if fields.get(name) is not None}
        tokenizer = tokenizer_of(source)
        neox.to_gpt_neox(load_model(source), out, tokenizer=tokenizer, **ids)
        print(f"{out}: opens with transformers as GPTNeoXForCausalLM")
    else:
        from spiralformer.hf.export import export

        export(source, out)
        print(f"{out}: opens with transformers, trust_remote_code=True")
    return 0
