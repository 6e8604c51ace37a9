"""`spiralformer data`: text to token shards."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from spiralformer.data.prepare import MANIFEST, Progress, Recipe, prepare, verify
from spiralformer.data.sources import Source, find_sources
from spiralformer.errors import UserError

EPILOG = """\
sources: .txt, .jsonl, .parquet, .gz or .zst of these, a folder of them, hf:NAME[,CONFIG][:SPLIT] (a
Hugging Face dataset) or stdlib (the standard library of this Python).

The shards are Megatron's and GPT-NeoX's (.bin and .idx). Interrupted, the same command goes on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("sources", nargs="*", metavar="SOURCE", help="what to read, in this order (see below)")
    add("--out", metavar="DIR", help="folder to make")
    add("--verify", metavar="DIR", help="check the files of a folder made earlier, and do no more")
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer.json, or a folder with it"
    )
    tokenizer.add_argument("--train-bpe", type=int, metavar="VOCAB", help="train a byte-level BPE")
    tokenizer.add_argument("--bytes", action="store_true", help="a token is a byte")
    add("--eot-token", metavar="TOKEN", help="end-of-text token (default: the tokenizer's)")
    add(
        "--bpe-sample",
        type=int,
        default=256,
        metavar="MB",
        help="train the BPE on the first so many megabytes of training text (default: 256)",
    )
    add(
        "--valid-fraction",
        type=float,
        default=0.005,
        metavar="F",
        help="share of the documents for validation, chosen by their content (default: 0.005)",
    )
    add("--seed", type=int, default=0, help="of that choice (default: 0)")
    add("--text-field", default="text", metavar="NAME", help="field with the text (default: text)")
    add(
        "--split-documents",
        default="auto",
        metavar="RULE",
        help="what a document of a plain text file is: file (all of it); blank (a paragraph); a "
        "size such as 64k (so much, to the next blank line); re:PATTERN (up to a line with it); "
        "auto (default): the file up to 1 MiB, else 64k",
    )
    add("--skip-bad", action="store_true", help="leave out unreadable documents, and count them")
    add("--workers", type=int, metavar="N", help="processes (default: one for each core)")
    add(
        "--shard-tokens",
        type=int,
        default=1 << 30,
        metavar="N",
        help="begin a new shard after so many tokens (default: 2^30)",
    )


def run(args: argparse.Namespace) -> None:
    if args.verify:
        return _verify(args.verify)
    if not args.sources or not args.out:
        raise UserError("name a source and --out DIR (or --verify DIR); see --help")
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: at least 1 is needed")
    recipe = Recipe(
        tokenizer=args.tokenizer,
        bpe=args.train_bpe,
        bytes=args.bytes,
        bpe_sample=args.bpe_sample * 1_000_000,
        eot=args.eot_token,
        valid_fraction=args.valid_fraction,
        seed=args.seed,
        text_field=args.text_field,
        split_documents=args.split_documents,
        shard_tokens=args.shard_tokens,
    )
    sources = find_sources(args.sources)
    start = time.monotonic()
    line = ProgressLine()
    try:
        manifest = prepare(
            sources,
            args.out,
            recipe,
            workers=args.workers or _workers_for(sources),
            skip_bad=args.skip_bad,
            report=line.show,
            notice=line.say,
        )
    except KeyboardInterrupt:
        line.say(f"the same command goes on from {args.out}.partial")
        raise
    finally:
        line.end()
    print(summary(manifest))
    print(f"{args.out} ready in {time.monotonic() - start:.1f} s")


def _verify(folder: str) -> None:
    files = verify(folder)
    how = (
        "checksums hold"
        if os.path.exists(os.path.join(folder, MANIFEST))
        else "consistent (there is no manifest, and so no checksums)"
    )
    print(f"{folder}: {len(files)} files, {how}")


def _workers_for(sources: list[Source]) -> int:
    """One for each core, but none that would start for less than a few megabytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if any(source.size is None for source in sources):
        return cores or 1
    return min(cores or 1, 1 + sum(source.size or 0 for source in sources) // 4_000_000)


def summary(manifest: dict[str, Any]) -> str:
    """The manifest's counts as a table."""
    header = ("split", "documents", "tokens", "text bytes", "bytes/token", "shards")
    rows = [header]
    for name, split in manifest["splits"].items():
        ratio = f"{split['bytes'] / split['tokens']:.3f}" if split["tokens"] else "-"
        counts = (f"{split[count]:,}" for count in ("documents", "tokens", "bytes"))
        rows.append((name, *counts, ratio, str(len(split["shards"]))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    tokenizer = manifest["tokenizer"]
    lines.append(
        f"tokenizer: {tokenizer['origin']}, {tokenizer['vocab_size']:,} ids stored as "
        f"{manifest['dtype']}, end of text {tokenizer['eot']} = {tokenizer['eot_id']}"
    )
    for count, what in (("empty_documents", "empty"), ("skipped_documents", "unreadable")):
        if manifest[count]:
            lines.append(f"left out: {manifest[count]:,} {what} documents")
    if manifest["settings"]["valid_fraction"] and not manifest["splits"]["valid"]["documents"]:
        lines.append("no document fell into validation: raise --valid-fraction")
    return "\n".join(lines)


class ProgressLine:
    """One line that is rewritten on a terminal; elsewhere a new one now and then."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.start = time.monotonic()
        self.shown_at = self.start
        self.first: Progress | None = None

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if self.first is None:  # the rate is that of the work after the first batch
            self.first, self.start = progress, now
            return
        if now - self.shown_at < (0.2 if self.live else 10):
            return
        self.shown_at = now
        text = self.describe(progress, now - self.start)
        print(
            f"\r{text}\x1b[K" if self.live else text, end="" if self.live else "\n", file=sys.stderr
        )
        sys.stderr.flush()

    def describe(self, progress: Progress, seconds: float) -> str:
        assert self.first is not None
        rate = (progress.text_bytes - self.first.text_bytes) / max(seconds, 1e-9) / 1e6
        parts = [
            f"{progress.documents:,} documents",
            f"{progress.text_bytes / 1e6:,.0f} MB at {rate:.1f} MB/s",
            f"{progress.tokens:,} tokens",
        ]
        read = progress.read - self.first.read
        if progress.total and read:
            left = (progress.total - progress.read) * seconds / read
            parts.append(f"{100 * progress.read / progress.total:.0f} %, {_duration(left)} left")
        return ", ".join(parts)

    def say(self, message: str) -> None:
        self.end()
        print(message, file=sys.stderr)

    def end(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
