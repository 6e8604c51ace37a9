"""`spiralformer train CONFIG [field=value …]`"""

from __future__ import annotations

import argparse
import os
import sys

from spiralformer.console import unheard
from spiralformer.errors import UserError
from spiralformer.files import packaged_config
from spiralformer.presets import PRESETS
from spiralformer.train.config import TrainConfig, describe_fields

EPILOG = """\
example: spiralformer train spiral-b-nano-mesh data.path=runs/stdlib steps=500

Where length, batch, optim.lr, optim.warmup or the vocabulary of a preset are
not given, they are chosen to fit the data; --show prints them.

The same command goes on from the last checkpoint in the run's folder, and with
more steps= from the end of a finished run. Stopped by Ctrl-C, SIGTERM or
SIGHUP, it finishes the micro-batch and saves first. For several processes see
docs/distributed.md.

fields, with their defaults:
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (EPILOG + describe_fields()).replace("%", "%%")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "config",
        metavar="CONFIG",
        help="a .yaml or .json file, a recipe (stdlib, nano), or a model preset",
    )
    add("settings", nargs="*", metavar="field=value", help="changes to it, for example steps=500")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on from a checkpoint, or not at all")
    how.add_argument(
        "--fresh", action="store_true", help="remove the run in the folder; start anew"
    )
    add("--quiet", action="store_true", help="print the summary only")
    add("--show", action="store_true", help="print the configuration, and do no more")


def run(args: argparse.Namespace) -> int:
    main = os.environ.get("RANK", "0") == "0"
    try:
        source = args.config if args.config in PRESETS else packaged_config(args.config)
        config = TrainConfig.load(source, args.settings)
    except UserError:
        if main:
            raise
        return 2  # the main process says it
    if args.show:
        print(config.to_yaml() if main else "", end="")
        return 0

    from spiralformer.train import Interrupted, RunFolder, log, train
    from spiralformer.train.distributed import SharedError

    try:
        result = train(
            config,
            resume="must" if args.resume else "never" if args.fresh else "auto",
            quiet=args.quiet,
        )
    except Interrupted as stop:
        if main:
            print(f"spiralformer train: {stop}", file=sys.stderr)
        return 128 + stop.signal
    except SharedError:
        if main:
            raise
        return 2
    if main:
        with unheard():  # the run is finished, whether or not anyone reads of it
            if result.record["samples"]:
                print(log.sample_lines(result.record["samples"]) + "\n")
            for name, text in log.summary(result.record):
                print(f"{name:<15}  {text}")
            for name in ("model", "losses", "metrics", "tensorboard", "samples", "result"):
                path = getattr(RunFolder(result.folder), name)
                if path.exists():
                    print(f"{name:<15}  {path}")
    return 0
