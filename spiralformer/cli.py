"""The command line: `spiralformer COMMAND …`. Each command is a module of `spiralformer.commands`
with `add_arguments(parser)` and `run(args)`; only the chosen one is imported."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from spiralformer.errors import UserError

COMMANDS = {
    "data": "text to token shards, for training",
    "train": "train a model, or go on training it",
    "generate": "continue prompts with a trained model",
    "eval": "the paper's tables for checkpoints, ours or any Hugging Face causal language model",
    "probe": "what each iteration of a trained loop attends to: figures and a report",
    "count": "parameters, FLOPs, decode cost and cache size of a configuration",
    "bench": "speed and memory beside peers, as ratios within one run",
    "import": "a GPT-NeoX (Pythia) folder to a model folder of ours",
    "export": "a model folder for those who do not have this package",
}


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of the chosen command; `.run` is what carries them out."""
    parser = argparse.ArgumentParser(
        prog="spiralformer", description="SpiralFormer: looped Transformers, coarse to fine."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((a for a in argv if not a.startswith("-")), None)
    for name, help in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        if name == chosen:
            module = importlib.import_module(f"spiralformer.commands.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        return args.run(args) or 0
    except UserError as error:
        print(f"spiralformer {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"spiralformer {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has gone; nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
