"""`spiralformer bench [train prefill decode memory growth serve]`"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from spiralformer.errors import UserError

BENCHMARKS = {
    "train": "a training step",
    "prefill": "reading a prompt",
    "decode": "decoding: one sequence, a ragged batch of 8, one after a long context",
    "memory": "peak of a training step, bytes of a decode state",
    "growth": "speed at several lengths",
    "serve": "servers with 1, 8 and 32 clients",
}
DTYPES = ["float32", "bfloat16"]
RUNNERS = ["native", "eager", "hf"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = "; ".join(f"{name}: {about}" for name, about in BENCHMARKS.items())
    add("benchmark", nargs="*", metavar="BENCHMARK", help=f"{what} (default: all)")
    add("--scale", default="160m", help="160m, 410m, 1b, 1.4b or nano (%(default)s)")
    add("--repeats", type=int, default=5, help="runs of each case, after a first (%(default)s)")
    add("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    runners = "of decoding; hf: transformers' generate; growth takes the first"
    add("--runners", nargs="+", default=RUNNERS, choices=RUNNERS, help=runners)
    add("--tokens", type=int, default=32, help="tokens decoded in a run (%(default)s)")
    add("--context", type=int, default=2048, help="the long context; 0: none (%(default)s)")
    add("--length", type=int, default=1024, help="of a training step (%(default)s)")
    add("--prompt", type=int, default=4096, help="tokens of a prompt (%(default)s)")
    add("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], help="of growth")
    add("--threads", type=int, help="default: PyTorch's")
    add("--out", type=Path, default=Path("runs/bench"), help="folder of the results (%(default)s)")


def run(args: argparse.Namespace) -> int:
    from spiralformer.files import writing
    from spiralformer.presets import SIZES

    for name in args.benchmark:
        if name not in BENCHMARKS:
            raise UserError(f"unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")
    if args.scale not in SIZES:
        raise UserError(f"--scale {args.scale}: choose from {', '.join(SIZES)}")
    for name in ("repeats", "tokens", "length", "prompt", "threads", "context"):
        least = 0 if name == "context" else 1
        if (value := getattr(args, name)) is not None and value < least:
            raise UserError(f"--{name} {value}: at least {least} is needed")
    if len(set(args.lengths)) < 2 or min(args.lengths) < 1:
        given = " ".join(map(str, args.lengths))
        raise UserError(f"--lengths {given}: give two or more different lengths")
    with writing(args.out):  # better now than after an hour
        args.out.mkdir(parents=True, exist_ok=True)

    import torch

    from spiralformer.bench import cases, report
    from spiralformer.console import table

    report.read(args.out)  # its records and these will make one table
    if args.threads:
        torch.set_num_threads(args.threads)
    sizes = cases.Sizes(**{name: getattr(args, name) for name in cases.Sizes.__annotations__})
    command = shlex.join(["spiralformer", *sys.argv[1:]])
    for name in args.benchmark or BENCHMARKS:
        measurements = []
        for group in cases.BENCHMARKS[name](sizes):
            print(f"{group[0].setting}, {group[0].dtype}, {args.scale} shapes")
            print(table(*report.rows(group)), flush=True)
            measurements += group
        print(report.save(args.out, name, command, measurements), flush=True)
    for path in (report.write_tables(args.out), report.draw(args.out)):
        if path:
            print(path)
    return 0
