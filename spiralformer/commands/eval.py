"""`spiralformer eval`: the rows of the paper's Tables 1 and 3 for any checkpoints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from spiralformer.evaluate.tasks import PAPER, TEXTS

EPILOG = f"""
the paper's tasks: {", ".join(PAPER)} (accuracy); its texts: {", ".join(TEXTS)}
(perplexity). `paper` is all of them, `mmlu` is mmlu_continuation. Any other task, group or tag of
EleutherAI's lm-evaluation-harness can be named too, or the YAML file of one.

--data-dir reads TASK.SPLIT.jsonl and TASK.fewshot.jsonl of the paper's tasks, with the fields of
their usual Hugging Face datasets, pile_sample.test.jsonl and wikitext2_raw.test.txt. Other data
come from the hub.

OUT/table.md has the tables, OUT/MODEL/K-shot.json the harness's results, OUT/MODEL/texts.json the
perplexities. Each answer of a model is kept in OUT/cache: an interrupted evaluation goes on where
it was.
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
        help="only the first N examples of a task (of a group, spread over its tasks) or documents",
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
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that a Hugging Face folder brings along",
    )


def run(args: argparse.Namespace) -> int:
    from spiralformer import files
    from spiralformer.console import say
    from spiralformer.evaluate.run import Options, evaluate_folders
    from spiralformer.evaluate.tables import render

    text_files = [path for paths in args.text_files for path in paths]
    options = Options(
        tasks=args.tasks if args.tasks is not None else ([] if text_files else ["paper"]),
        shots=args.shots,
        data_dir=args.data_dir,
        text_files=list(dict.fromkeys(text_files)),
        limit=args.limit,
        out=args.out,
        context=args.context,
        stride=args.stride,
        batch_size=args.batch_size,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
        trust_remote_code=args.trust_remote_code,
    )
    try:
        evaluations = evaluate_folders(args.folders, options)
    except KeyboardInterrupt:
        say(f"\nwhat was answered is kept in {options.out / 'cache'}; the same command goes on")
        raise
    table = render(evaluations, options)
    files.write_text(options.out / "table.md", table)
    print(render(evaluations, options, plain=True) if sys.stdout.isatty() else table, end="")
    return 0
