"""The command line: `spiralformer COMMAND …`. Each command is a module of `spiralformer.commands`
with `add_arguments(parser)` and `run(args)`; only the chosen one is imported."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NoReturn

from spiralformer import __version__
from spiralformer.console import OutputError, forget_stdout, lasting_streams, say
from spiralformer.errors import UserError, shown

LONGEST = 2000  # characters of a message
COMMANDS = {
    "data": "text to token shards, for training",
    "train": "train a model, or go on training it",
    "generate": "continue prompts with a trained model",
    "serve": "an OpenAI-compatible server and a page to try a model in",
    "eval": "the paper's tables for checkpoints, ours or any Hugging Face causal language model",
    "probe": "what each iteration of a trained loop attends to: figures and a report",
    "study": "the paper's experiments at any scale: runs, tables, figures and verdicts",
    "count": "parameters, FLOPs, decode cost and cache size of a configuration",
    "diagram": "an architecture as a picture, or as a page on which one picks a token",
    "bench": "speed and memory on the CPU beside peers",
    "import": "a GPT-NeoX (Pythia) folder to a model folder of ours",
    "export": "a model folder for those who do not have this package",
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(message if len(message) <= 300 else f"{message[:300]}…")


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of the chosen command; `.run` is what carries them out."""
    parser = argparse.ArgumentParser(
        prog="spiralformer",
        description="SpiralFormer: looped Transformers, coarse to fine.",
        epilog="spiralformer COMMAND --help says more.",
    )
    parser.add_argument("--version", action="version", version=f"spiralformer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help, add_help=False)
    chosen = parser.parse_known_args(argv[:1])[0].command
    help = COMMANDS[chosen]
    command = Parser(prog=f"spiralformer {chosen}", description=help[0].upper() + help[1:] + ".")
    module = importlib.import_module(f"spiralformer.commands.{chosen}")
    module.add_arguments(command)
    args = command.parse_intermixed_args(argv[1:])  # flags may stand anywhere
    args.command, args.run = chosen, module.run
    return args


def require_bounded(args: argparse.Namespace) -> None:
    """Numbers that a machine can count with. What else a number must be, its command says."""
    for name, value in vars(args).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not -(2**63) <= number < 2**63:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} {shown(number)}: not a number of at most 2^63 - 1")


def main(argv: list[str] | None = None) -> int:
    with lasting_streams():
        try:
            try:
                return _main(sys.argv[1:] if argv is None else argv)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # the reader (head, less) has gone; nothing more to say
            forget_stdout()
            return 141
        except OutputError as error:
            forget_stdout()
            say(f"spiralformer: error: standard output cannot be written: {error}")
            return 2


def _main(argv: list[str]) -> int:
    args = parse(argv)
    try:
        require_bounded(args)
        return args.run(args) or 0
    except UserError as error:
        message = str(error)  # it may quote a file
        message = message if len(message) <= LONGEST else f"{message[:LONGEST]}…"
        say(f"spiralformer {args.command}: error: {message}")
        return 2
    except KeyboardInterrupt:
        say(f"spiralformer {args.command}: interrupted")
        return 130
    except OSError as error:  # of the system, where nobody could say more
        if isinstance(error, BrokenPipeError) or error.filename is None:
            raise
        say(f"spiralformer {args.command}: error: {error.filename}: {error.strerror}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
