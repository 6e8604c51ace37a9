"""`spiralformer eval`: the rows of the paper's Tables 1 and 3 for any checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from spiralformer.evaluate.tasks import TASKS, TEXTS

EPILOG = f"""
tasks: {", ".join(TASKS)} (accuracy, through EleutherAI's lm-evaluation-harness);
texts: {", ".join(TEXTS)} (perplexity). `paper` is all of them.

--data-dir reads TASK.SPLIT.jsonl and TASK.fewshot.jsonl, with the fields of the tasks' usual
Hugging Face datasets, pile_sample.test.jsonl and wikitext2_raw.test.txt. Without it, data come
from the hub.

Results go to OUT/results.json and OUT/table.md. What has been scored is kept in OUT/cache: an
interrupted evaluation goes on where it was.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="a checkpoint of ours, or the folder of any Hugging Face causal language model",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="NAME",
        help="what to evaluate (paper; nothing when only --text-file is given)",
    )
    parser.add_argument(
        "--shots", nargs="+", type=int, default=[0, 5], metavar="K", help="few-shot examples (0 5)"
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="local data; default: the hub")
    parser.add_argument(
        "--text-file",
        dest="text_files",
        action="append",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="also the perplexity of a text file, or of a jsonl file's `text` fields (.gz too)",
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="only the first N examples of a task (of MMLU, spread over its subjects) or documents",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/eval"), metavar="DIR", help="results (%(default)s)"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="L",
        help="tokens of a perplexity window; default: the model's longest sequence",
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="S",
        help="tokens between the ends of two windows; default: --context, no token seen twice",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="B", help="sequences at a time (%(default)s)"
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, …; default: a GPU if any")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights; auto is as saved",
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="of the few-shot examples (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    from spiralformer.evaluate import report
    from spiralformer.evaluate.run import Options, evaluate_folders, write

    text_files = [path for paths in args.text_files for path in paths]
    options = Options(
        tasks=args.tasks if args.tasks is not None else ([] if text_files else ["paper"]),
        shots=args.shots,
        data_dir=args.data_dir,
        text_files=text_files,
        limit=args.limit,
        out=args.out,
        context=args.context,
        stride=args.stride,
        batch_size=args.batch_size,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
    )
    try:
        evaluations = evaluate_folders(args.folders, options)
    except KeyboardInterrupt:
        print(
            f"\nwhat was finished is kept in {options.out / 'cache'}; the same command goes on",
            file=sys.stderr,
        )
        raise
    table = report.render(evaluations, options)
    results = json.dumps(report.to_json(evaluations, options), indent=2, ensure_ascii=False)
    write(options.out / "table.md", table)
    write(options.out / "results.json", results + "\n")
    print(report.for_terminal(table) if sys.stdout.isatty() else table, end="")
    return 0
