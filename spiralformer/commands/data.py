"""`spiralformer data`: text to token shards."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from spiralformer.console import Progress, count, duration, table
from spiralformer.data.sources import COMPRESSIONS, KINDS, find_sources
from spiralformer.errors import UserError

RECORDS = ", ".join(suffix for suffix, kind in KINDS.items() if kind != "text")
TEXTS = ", ".join(suffix for suffix, kind in KINDS.items() if kind == "text")
MOST_WORKERS = 1024
EPILOG = f"""\
sources: a file, a folder, hf:NAME[,CONFIG][:SPLIT] (a Hugging Face dataset) or
stdlib (the standard library of this Python). Records with a field of text:
{RECORDS}. Plain text: {TEXTS} and any other
file whose beginning is UTF-8; what a folder has besides (and hidden files) is
left out and named. Any of them may be compressed ({", ".join(COMPRESSIONS)}).

The shards are Megatron's and GPT-NeoX's (.bin and .idx). Interrupted, the same
command goes on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("sources", nargs="*", metavar="SOURCE", help="what to read, in this order (see below)")
    add("--out", metavar="DIR", help="folder to make")
    add("--verify", metavar="DIR", help="check the files of a folder made earlier, and do no more")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--tokenizer", metavar="PATH", help="tokenizer.json, or a folder with it")
    bpe = "train a byte-level BPE (on the first 256 MB of training text)"
    either("--train-bpe", type=int, metavar="VOCAB", help=bpe)
    either("--bytes", action="store_true", help="a token is a byte")
    add("--eot-token", metavar="TOKEN", help="end-of-text token (default: the tokenizer's)")
    valid = (
        "share of the documents for validation, chosen by their content: one at least, unless 0 "
        "(default: %(default)s)"
    )
    add("--valid-fraction", type=float, default=0.005, metavar="F", help=valid)
    add("--seed", type=int, default=0, help="of that choice (default: 0)")
    add("--text-field", default="text", metavar="NAME", help="field with the text (default: text)")
    rule = (
        "what a document of a plain text file is: file (all of it); a size such as 64k (so much, "
        "to the next blank line); auto (default): the file up to 1 MiB, else 64k"
    )
    add("--split-documents", default="auto", metavar="RULE", help=rule)
    add("--skip-bad", action="store_true", help="leave out unreadable documents, and count them")
    add("--workers", type=int, metavar="N", help="threads (default: one for each core)")


def run(args: argparse.Namespace) -> None:
    if args.verify:
        return _verify(args.verify)
    if not args.sources or not args.out:
        raise UserError("name a source and --out DIR (or --verify DIR); see --help")
    if args.workers is not None and not 1 <= args.workers <= MOST_WORKERS:
        raise UserError(f"--workers {args.workers}: not in 1 … {MOST_WORKERS:,}")

    from spiralformer.data.prepare import Recipe, prepare

    recipe = Recipe(
        tokenizer=args.tokenizer,
        bpe=args.train_bpe,
        bytes=args.bytes,
        eot=args.eot_token,
        valid_fraction=args.valid_fraction,
        seed=args.seed,
        text_field=args.text_field,
        split_documents=args.split_documents,
    )
    with Progress("tokenizing", unit="MB") as progress:
        sources = find_sources(args.sources, progress.say)
        sizes = [source.size for source in sources]
        size = None if None in sizes else sum(filter(None, sizes)) / 1e6
        begun = False

        def report(read: int, tokens: int) -> None:
            nonlocal begun
            if not begun:  # an earlier call may have read some of it
                progress.start(size, read / 1e6)
                begun = True
            progress.update(read / 1e6, count(tokens, "token"))

        try:
            manifest = prepare(
                sources,
                args.out,
                recipe,
                workers=args.workers or _cores(),
                skip_bad=args.skip_bad,
                report=report,
                notice=progress.say,
            )
        except KeyboardInterrupt:
            progress.say(f"the same command goes on from {args.out}.partial")
            raise
    print(summary(manifest))
    print(f"{args.out} ready in {duration(progress.seconds)}")


def _verify(folder: str) -> None:
    from spiralformer.data.shards import MANIFEST, verify

    files = verify(folder)
    known = (Path(folder) / MANIFEST).is_file()
    how = "checksums hold" if known else "consistent (there is no manifest, and so no checksums)"
    print(f"{folder}: {count(len(files), 'file')}, {how}")


def _cores() -> int:
    """That this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def summary(manifest: dict[str, Any]) -> str:
    """The manifest's counts as a table."""
    rows = []
    for name, split in manifest["splits"].items():
        ratio = f"{split['bytes'] / split['tokens']:.3f}" if split["tokens"] else "-"
        counts = (f"{split[what]:,}" for what in ("documents", "tokens", "bytes"))
        rows.append((name, *counts, ratio, str(len(split["shards"]))))
    header = ("split", "documents", "tokens", "text bytes", "bytes/token", "shards")
    tokenizer = manifest["tokenizer"]
    lines = [
        table(header, rows).strip("\n"),
        f"tokenizer: {tokenizer['origin']}, {tokenizer['vocab_size']:,} ids as "
        f"{manifest['dtype']}, {tokenizer['eot']} is {tokenizer['eot_id']}",
    ]
    for what, kind in (("empty_documents", "empty"), ("skipped_documents", "unreadable")):
        if manifest[what]:
            lines.append(f"left out: {count(manifest[what], f'{kind} document')}")
    if manifest["settings"]["valid_fraction"] and not manifest["splits"]["valid"]["documents"]:
        lines.append("no validation: there is too little text to cut some off")
    return "\n".join(lines)
