"""`spiralformer study NAME`"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType

from spiralformer.errors import UserError

EPILOG = """\
example: spiralformer study main --scale nano --seeds 3 --jobs 2

The same command goes on where it was stopped. Finished runs are kept in --cache, which studies
share; a run that failed is tried again the next time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "name",
        metavar="NAME",
        help="main, ablation, recurrence, scaling or schedule, or a .yaml file",
    )
    add("--scale", default="nano", help="tiny, nano, 160m, 410m, 1b or 1.4b (%(default)s)")
    add("--seeds", type=int, metavar="N", help="seeds of each row; default: the study's")
    add(
        "--budget",
        default="",
        help="tokens of a run (400k, 1e6), or a multiple of the scale's (2x)",
    )
    add("--jobs", type=int, default=1, metavar="N", help="runs side by side (%(default)s)")
    add("--out", type=Path, metavar="DIR", help="tables and figures; default: runs/studies/NAME")
    add(
        "--cache",
        type=Path,
        default=Path("runs/studies/cache"),
        metavar="DIR",
        help="the runs, shared between studies (%(default)s)",
    )
    add("--data", default="", metavar="DIR", help="folder of shards; default: the embedded corpus")
    add("--only", default="", metavar="REGEX", help="only rows whose name matches")
    add("--tasks", nargs="+", metavar="TASK", help="also evaluate the models: as `eval --tasks`")
    add("--data-dir", type=Path, metavar="DIR", help="data of --tasks")
    add("--report-only", action="store_true", help="train nothing; write what the cache gives")
    add("--quiet", action="store_true", help="print the table and the verdicts only")


def run(args: argparse.Namespace) -> int:
    if args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: at least 1 is needed")
    if args.tasks and args.data_dir is None:
        raise UserError("--tasks needs --data-dir DIR, as `spiralformer eval` does")

    from spiralformer.study import report, spec
    from spiralformer.study.conduct import conduct
    from spiralformer.study.lab import Lab
    from spiralformer.train.log import Console

    scale = spec.scale_named(args.scale)
    if args.budget:
        scale = spec.with_budget(scale, args.budget)
    study = spec.load(args.name, scale, seeds=args.seeds, only=args.only)
    if args.tasks and not study.keep_models:
        raise UserError(f"--tasks: study {study.name} keeps no models; main does")
    out = args.out or Path("runs/studies") / re.sub(r"\.ya?ml$", "", Path(args.name).name)
    lab = Lab(args.cache, args.jobs, Console(args.quiet))
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        results = conduct(
            args.name,
            scale=args.scale,
            seeds=args.seeds,
            budget=args.budget,
            only=args.only,
            data=args.data,
            lab=lab,
            report_only=args.report_only,
        )
        if args.tasks:
            results = report.with_tasks(results, lab, args.tasks, args.data_dir, out / "eval")
    except KeyboardInterrupt:
        lab.console.close()
        print("finished runs are kept; the same command goes on from here", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    lab.console.close()
    written = report.write(results, out)
    print(report.for_terminal(results))
    print("\n" + "\n".join(os.fspath(path) for path in written))
    return 1 if results.unfinished and not args.report_only else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # launchers may say it twice
    raise KeyboardInterrupt
