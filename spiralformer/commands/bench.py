"""`spiralformer bench {decode,train}`"""

from __future__ import annotations

import argparse
from pathlib import Path

BENCHMARKS = {
    "decode": "tokens/s of decoding beside Hugging Face's GPT-NeoX",
    "train": "time and memory of a training step beside Hugging Face's GPT-NeoX",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        nargs="*",
        metavar="BENCHMARK",
        help="; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items()) + " (default: all)",
    )
    parser.add_argument("--scale", default="160m", help="160m, 410m, 1b, 1.4b or nano")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the best of each counts")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens decoded per measurement")
    parser.add_argument("--context", type=int, default=2048, help="the long context of decode")
    parser.add_argument("--length", type=int, default=1024, help="sequence length of train")
    parser.add_argument("--no-compile", action="store_true", help="decode eagerly only")
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument("--out", default="runs/bench", help="folder of the JSON files")


def run(args: argparse.Namespace) -> int:
    from spiralformer.errors import UserError

    for name in args.benchmark:
        if name not in BENCHMARKS:
            raise UserError(f"unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")

    import torch

    from spiralformer.bench import decode, train

    if args.threads:
        torch.set_num_threads(args.threads)
    found = []
    for name in args.benchmark or BENCHMARKS:
        if name == "decode":
            results = decode.run(
                args.scale,
                tuple(args.dtypes),
                args.tokens,
                args.repeats,
                args.context,
                not args.no_compile,
            )
        else:
            results = train.run(args.scale, args.length, tuple(args.dtypes), args.repeats)
        print(f"\n{results.save(Path(args.out))}")
        found.append(results)
    print()
    for results in found:
        print(results.summary())
    return 0
