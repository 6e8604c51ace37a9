"""`spiralformer study NAME`"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from spiralformer.console import say
from spiralformer.errors import UserError
from spiralformer.files import require_writable

DEFAULT_SCALE = "bytes-s"
RESULTS, README = Path("docs/results"), Path("README.md")  # of a checkout
EPILOG = """\
examples:
  spiralformer study main --corpus enwik8.gz --dry-run
  spiralformer study power --seeds 3
  spiralformer study main --redraw
  spiralformer study compare runs/one runs/other

The same command goes on where it was stopped. Finished runs are kept in --cache, which studies
share; a run that failed is tried again the next time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "name",
        metavar="NAME",
        help="main, ablation, recurrence, scaling, schedule or power, a .yaml file, or compare",
    )
    add("runs", nargs="*", type=Path, metavar="RUN", help="of compare: folders of finished runs")
    add("--scale", default=DEFAULT_SCALE, help="tiny, bytes-s, bytes-m, 160m … 1.4b (%(default)s)")
    add("--seeds", type=int, metavar="N", help="seeds of each row; default: the study's")
    add("--budget", default="", help="tokens of a run (400k, 1e6), or a multiple (2x)")
    add(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs side by side, the cores shared between them (%(default)s)",
    )
    add("--out", type=Path, metavar="DIR", help="tables and figures; default: runs/studies/NAME")
    add(
        "--cache",
        type=Path,
        default=Path("runs/studies/cache"),
        metavar="DIR",
        help="the runs, shared between studies (%(default)s)",
    )
    add("--corpus", default="", metavar="FILE", help="bytes to train on, 90:5:5, such as enwik8.gz")
    add("--data", default="", metavar="DIR", help="folder of shards; default: the embedded corpus")
    add("--only", default="", metavar="REGEX", help="only rows whose name matches")
    add("--tasks", nargs="+", metavar="TASK", help="also evaluate the models: as `eval --tasks`")
    add("--data-dir", type=Path, metavar="DIR", help="data of --tasks")
    add("--dry-run", action="store_true", help="say what would be run and how long it may take")
    add("--report-only", action="store_true", help="train nothing; write what the cache gives")
    add("--redraw", action="store_true", help="tables and figures anew, from records.json alone")
    add("--quiet", action="store_true", help="print the table and the verdicts only")


def run(args: argparse.Namespace) -> int:
    if args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: at least 1 is needed")
    if args.tasks and args.data_dir is None:
        raise UserError("--tasks needs --data-dir DIR, as `spiralformer eval` does")
    if args.tasks:
        from spiralformer.evaluate.run import require_packages

        require_packages()
    if args.data and args.corpus:
        raise UserError("--data and --corpus: give one of them")
    if args.runs and args.name != "compare":
        raise UserError(f"{args.runs[0]}: only `study compare` takes folders of runs")
    if args.redraw:
        return _redraw(args)
    if args.name == "compare":
        from spiralformer.study.compare import compare

        return _written(args, compare(args.runs))
    return _conduct(args)


def _conduct(args: argparse.Namespace) -> int:
    from spiralformer.study import spec

    study = spec.load(args.name, args.scale, budget=args.budget, seeds=args.seeds, only=args.only)

    if not args.dry_run:
        require_writable(_out(args), "choose another --out")

    from spiralformer.study.corpus import open_corpus
    from spiralformer.study.run import RunPool, StudyRuns

    corpus, pool = open_corpus(args.data, args.corpus, args.cache), RunPool(args.jobs, args.quiet)
    runs = StudyRuns(study.at(corpus.vocab_size), corpus, args.cache, pool, _command(args))
    if args.dry_run:
        for run in runs.plan():
            if not run.finished:
                print(f"{run.label}, {run.config.steps:,} steps, {run.flops:.3g} FLOPs")
        runs.announce()
        return 0
    if not args.report_only:
        if not args.quiet:
            runs.announce()
        with _stopping_in_good_order():
            runs.conduct(lambda: runs.records().write(_out(args)))
    records = runs.records()
    if not any(row.runs for row in records.rows):
        reason = next(iter(pool.failures.values()), "not begun")
        raise UserError(f"no run of {study.name} is finished in {args.cache}: {reason}")
    code = _written(args, records)
    if args.tasks:
        from spiralformer.commands.eval import evaluate
        from spiralformer.evaluate.run import Options

        finished = [run for _, run in runs.rows(records.sweeps) if runs.finished(run)]
        models = [run.folder / "model" for run in finished if run.config.seed == 0]
        evaluate(models, Options(args.tasks, data_dir=args.data_dir, out=_out(args) / "eval"))
    return 1 if records.unfinished and not args.report_only else code


def _command(args: argparse.Namespace) -> str:
    """What others would write to repeat it, with files of their own."""
    options = {
        "--scale": args.scale,
        "--seeds": args.seeds,
        "--budget": args.budget,
        "--corpus": Path(args.corpus).name,
        "--data": Path(args.data).name,
        "--only": args.only,
    }
    given = [word for name, value in options.items() if value for word in (name, str(value))]
    return shlex.join(["spiralformer", "study", args.name, *given])


def _out(args: argparse.Namespace) -> Path:
    name = re.sub(r"\.ya?ml$", "", Path(args.name).name)
    name += "" if args.scale == DEFAULT_SCALE else f"-{args.scale}"
    return args.out or Path("runs/studies") / name


def _redraw(args: argparse.Namespace) -> int:
    """Where nothing else is said, the committed records, and what the README says of them."""
    from spiralformer.study import page
    from spiralformer.study.records import FILE, Records

    committed = RESULTS / _out(args).name
    folder = committed if args.out is None and (committed / FILE).is_file() else _out(args)
    written = page.redraw(Records.read(folder), folder)
    if folder.parent == RESULTS and page.update_readme(README, RESULTS):
        written.append(README)
    print("\n".join(map(str, written)))
    return 0


def _written(args: argparse.Namespace, records) -> int:
    from spiralformer.study import page

    written = page.write(records, _out(args))
    print(page.for_terminal(records))
    print("\n" + "\n".join(map(str, written)))
    return 0


@contextlib.contextmanager
def _stopping_in_good_order() -> Iterator[None]:
    """SIGTERM and SIGHUP are taken as Ctrl-C: the runs save before they end."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # launchers may say it twice
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM, *filter(None, [getattr(signal, "SIGHUP", None)])]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say("finished runs are kept; the same command goes on from here")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
