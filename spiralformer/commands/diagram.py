"""`spiralformer diagram`: an architecture as a picture, or as a page on which one picks a token."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from spiralformer import diagram, presets
from spiralformer.commands.count import read_config
from spiralformer.errors import UserError
from spiralformer.files import write_text

KINDS = (".svg", ".html")
SIZES = {"hidden_size": 64, "num_heads": 1, "vocab_size": 256}  # of a layout; they are not drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="LAYOUT|PRESET|FILE|FOLDER",
        help='a layout such as "4+8x{1/8,1/4,1/2,1}+4", a preset (see count --list), a JSON file, '
        "or the folder of a model or of a run",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="FILE.svg: the picture (without --out it is printed); FILE.html: a page on which one "
        "picks a token and sees what it reads and which passes it triggers",
    )


def run(args: argparse.Namespace) -> int:
    if args.out is not None and Path(args.out).suffix not in KINDS:
        raise UserError(f"--out {args.out}: end it in {' or '.join(KINDS)}")
    config = read_config(args.model, SIZES if presets.is_layout(args.model) else {})
    if args.out is None:
        sys.stdout.write(diagram.svg(config))
        return 0
    name = args.model.rstrip("/")
    drawn = diagram.page(config, name) if args.out.endswith(".html") else diagram.svg(config)
    write_text(args.out, drawn)
    print(f"{args.out} is written.")
    return 0
