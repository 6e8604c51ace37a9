"""`spiralformer eval`: the rows of the paper's Tables 1 and 3 for any checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from spiralformer.console import say
from spiralformer.evaluate.tasks import PAPER, TEXTS
from spiralformer.files import write_text
from spiralformer.model_folder import find_model

if TYPE_CHECKING:
    from spiralformer.evaluate.run import Options

DTYPES = ("auto", "float32", "bfloat16", "float16")
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
    add = parser.add_argument
    folder = "the folder of a model or run of ours, or of any Hugging Face causal language model"
    add("folders", nargs="+", metavar="FOLDER", help=folder)
    tasks = "what to evaluate (paper; nothing when only --text-file is given)"
    add("--tasks", nargs="+", metavar="NAME", help=tasks)
    shots = "few-shot examples (0 5)"
    add("--shots", nargs="+", type=int, default=[0, 5], metavar="K", help=shots)
    add("--data-dir", type=Path, metavar="DIR", help="local data; default: the hub")
    text = "also the perplexity of a text file, or of a jsonl file's `text` fields (.gz too)"
    add("--text-file", action="extend", nargs="+", type=Path, default=[], metavar="FILE", help=text)
    limit = "only the first N examples of a task (of a group: about N, some of each task)"
    add("--limit", type=int, metavar="N", help=limit)
    out = Path("runs/eval")
    add("--out", type=Path, default=out, metavar="DIR", help="results (%(default)s)")
    context = "tokens of a perplexity window; default: the model's longest sequence"
    add("--context", type=int, metavar="L", help=context)
    stride = "tokens between the ends of two windows; default: --context, no token seen twice"
    add("--stride", type=int, metavar="S", help=stride)
    batch = "sequences at a time (%(default)s)"
    add("--batch-size", type=int, default=8, metavar="B", help=batch)
    add("--device", metavar="D", help="cpu, cuda, cuda:1, …; default: a GPU if any")
    add("--dtype", default="auto", choices=DTYPES, help="of the weights; auto is as saved")
    add("--seed", type=int, default=1234, help="of the few-shot examples (%(default)s)")
    trust = "run code that a Hugging Face folder brings along"
    add("--trust-remote-code", action="store_true", help=trust)


def run(args: argparse.Namespace) -> int:
    for folder in args.folders:
        find_model(folder)

    from spiralformer.evaluate.run import Options

    given = vars(args) | {"text_files": list(dict.fromkeys(args.text_file))}
    if args.tasks is None:
        given["tasks"] = [] if args.text_file else ["paper"]
    evaluate(args.folders, Options(**{field.name: given[field.name] for field in fields(Options)}))
    return 0


def evaluate(folders: Sequence[str | Path], options: Options) -> None:
    """Prints the tables, and writes them beside the results."""
    from spiralformer.evaluate.run import evaluate_folders
    from spiralformer.evaluate.tables import render

    try:
        evaluations = evaluate_folders(folders, options)
    except KeyboardInterrupt:
        say(f"\nwhat was answered is kept in {options.out / 'cache'}; the same command goes on")
        raise
    table = render(evaluations, options)
    write_text(options.out / "table.md", table)
    print(render(evaluations, options, plain=True) if sys.stdout.isatty() else table, end="")
