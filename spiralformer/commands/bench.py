"""`spiralformer bench {limits,train,prefill,decode,memory,scaling}`"""

from __future__ import annotations

import argparse
from pathlib import Path

BENCHMARKS = {
    "limits": "what this machine's products and memory reach",
    "train": "time of a training step beside Hugging Face's GPT-NeoX",
    "prefill": "time to read a long prompt",
    "decode": "tokens/s of decoding",
    "memory": "peak of a training step, bytes of a decode state",
    "scaling": "growth of time with length beside that of FLOPs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        nargs="*",
        metavar="BENCHMARK",
        help="; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items()) + " (default: all)",
    )
    parser.add_argument("--scale", default="160m", help="160m, 410m, 1b, 1.4b or nano")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="rounds: 4 times as many for train, 3 for prefill, 10 for decode at batch 1; the "
        "best of each layer, its parts or token counts",
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--tokens", type=int, default=16, help="tokens decoded per measurement")
    parser.add_argument(
        "--context", type=int, default=2048, help="the long context of decode; 0: none"
    )
    parser.add_argument(
        "--length", type=int, default=1024, help="sequence length of train and memory"
    )
    parser.add_argument("--prompt", type=int, default=4096, help="prompt length of prefill")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], help="of scaling"
    )
    parser.add_argument("--no-compile", action="store_true", help="decode eagerly only")
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument("--out", default="runs/bench", help="folder of the JSON files")


def run(args: argparse.Namespace) -> int:
    from spiralformer.errors import UserError
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
        raise UserError(f"--lengths {args.lengths}: give two or more different lengths")

    import torch

    from spiralformer.bench import decode, limits, memory, picture, prefill, scaling, train
    from spiralformer.bench.peers import family
    from spiralformer.bench.results import read, write_table
    from spiralformer.files import writing

    out = Path(args.out)
    with writing(out):  # better now than after an hour
        out.mkdir(parents=True, exist_ok=True)
    read(out)
    if args.threads:
        torch.set_num_threads(args.threads)
    dtypes, compiled = tuple(args.dtypes), not args.no_compile
    run = {
        "limits": lambda: limits.run(family(args.scale), dtypes, args.repeats),
        "train": lambda: train.run(args.scale, args.length, dtypes, args.repeats),
        "prefill": lambda: prefill.run(args.scale, args.prompt, dtypes, args.repeats),
        "decode": lambda: decode.run(
            args.scale, dtypes, args.tokens, args.repeats, args.context, compiled
        ),
        "memory": lambda: memory.run(args.scale, args.length, dtypes),
        "scaling": lambda: scaling.run(args.scale, args.lengths, args.repeats),
    }
    found = []
    for name in args.benchmark or BENCHMARKS:
        results = run[name]()
        print(f"\n{results.save(out)}", flush=True)
        found.append(results)
    with writing(out):
        if path := picture.draw(out):
            print(path)
        print(write_table(out))
    print()
    for results in found:
        print(results.summary())
    bars = [bar for results in found for bar in results.bars]
    print(f"in all: {sum(bar.holds for bar in bars)} of {len(bars)} bars hold")
    return 0
