"""`spiralformer generate CHECKPOINT --prompt …`"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from spiralformer.console import count, say
from spiralformer.errors import UserError
from spiralformer.files import read_text
from spiralformer.model_folder import find_model

if TYPE_CHECKING:
    from spiralformer.data.tokenizer import TextTokenizer
    from spiralformer.decode import Runner, Sampling
    from spiralformer.model import SpiralFormer

DTYPES = ("float32", "bfloat16", "float16", "float64")
RUNNERS = ("auto", "eager", "compile", "native")
ROWS = 32  # continued at a time
EPILOG = """
Without a prompt, piped text is one (its last line end left out); on a terminal each line is one,
until Ctrl-D.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add("checkpoint", help="the folder of a model or of a run")
    several = "may be given several times"
    add("--prompt", action="append", default=[], metavar="TEXT", help=several)
    add("--prompt-file", metavar="FILE", help="a file whose whole text is a prompt")
    add("--prompts-file", metavar="FILE", help="a file whose lines are prompts")
    add("--samples", type=int, default=1, metavar="N", help="continuations of each (%(default)s)")
    lines = "a JSON object for each: prompt, sample, continuation, new_tokens, ended_by"
    add("--json", action="store_true", help=lines)
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--temperature", type=float, default=0.8, help="0 is greedy (default %(default)s)")
    add("--top-k", type=int, default=0, metavar="K")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--min-p", type=float, default=0.0, metavar="P")
    add("--repetition-penalty", type=float, default=1.0, metavar="X")
    add("--seed", type=int, default=0)
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    add("--ignore-eos", action="store_true", help="go on after end-of-text")
    add("--dtype", choices=DTYPES, help="default: the one it was saved in")
    add("--device", default="cpu")
    runner = (
        "what runs the decode step; auto is native where that was built before, and eager "
        "elsewhere. They are equal to rounding: the tokens of float32, but not always of bfloat16"
    )
    add("--runner", choices=RUNNERS, default="auto", help=runner)
    fastest = "the fastest runner of the device, built if need be: native on CPUs, else compile"
    add("--compile", action="store_true", help=fastest)


def run(args: argparse.Namespace) -> int:
    folder = find_model(args.checkpoint)
    if args.samples < 1:
        raise UserError(f"--samples {args.samples} must be at least 1")
    prompts = read_prompts(args)

    import torch

    from spiralformer.data.tokenizer import load_tokenizer
    from spiralformer.decode import Sampling, native, runner_for
    from spiralformer.model_folder import load_model, tokenizer_files, usable_device

    sampling = Sampling(**{field.name: getattr(args, field.name) for field in fields(Sampling)})
    device = usable_device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model = load_model(folder, dtype=dtype, device=device)
    tokenizer_files(folder)  # says so if there is none
    tokenizer = load_tokenizer(folder)
    name = args.runner
    if args.compile:
        name = "compile" if device.type != "cpu" or native.unfit(model) else "native"
    room = model.config.max_length
    if prompts:
        room = min(room, max(len(tokenizer.encode(text)) for text in prompts) + args.max_new_tokens)
    rows = min(args.samples * max(len(prompts), 1), ROWS)
    runner = runner_for(model, name, rows=rows, tokens=args.max_new_tokens, capacity=room)
    writer = Writer(args, model, tokenizer, runner, sampling)
    if prompts:
        writer.write(prompts)
    for line in () if prompts else typed_lines():
        try:
            writer.write([line])
        except UserError as error:
            say(f"error: {error}")
    return 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """What was given or piped; nothing where lines will be typed."""
    prompts = list(args.prompt)
    if args.prompt_file:
        prompts.append(read_text(args.prompt_file))
    if args.prompts_file:
        prompts += filter(str.strip, read_text(args.prompts_file).splitlines())
    if not (prompts or sys.stdin.isatty()):
        try:
            prompts = [text] if (text := sys.stdin.read().removesuffix("\n")) else []
        except UnicodeDecodeError:
            raise UserError("standard input: not UTF-8 text") from None
        if not prompts:
            raise UserError("give a prompt: --prompt TEXT, --prompt-file, --prompts-file or a pipe")
    return prompts


def typed_lines() -> Iterator[str]:
    say("a line is a prompt; Ctrl-D ends")
    while True:
        try:
            line = input("> ")
        except EOFError:
            say("")
            return
        if line.strip():
            yield line


class Row(NamedTuple):
    prompt: str
    ids: list[int]
    sample: int  # the how-manieth of its prompt


@dataclass(frozen=True)
class Writer:
    """Continues prompts and writes what comes: a single text as it grows, else row by row."""

    args: argparse.Namespace
    model: SpiralFormer
    tokenizer: TextTokenizer
    runner: Runner
    sampling: Sampling

    def write(self, prompts: list[str]) -> None:
        from spiralformer.decode.generate import check_prompts

        ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        check_prompts(self.model, ids, self.args.max_new_tokens)  # of all, before anything is done
        rows = [
            Row(*each, sample)
            for each in zip(prompts, ids, strict=True)
            for sample in range(self.args.samples)
        ]
        for first in range(0, len(rows), ROWS):
            self._write_rows(rows[first : first + ROWS], first, grows=len(rows) == 1)

    def _write_rows(self, rows: list[Row], first: int, *, grows: bool) -> None:
        from spiralformer.decode import stream
        from spiralformer.decode.generate import TextStream, ending

        args, ids = self.args, [row.ids for row in rows]
        stop_ids = [] if args.ignore_eos else [self.tokenizer.eot_id]
        text = TextStream(
            lambda tokens: self.tokenizer.decode(t for t in tokens if t not in stop_ids), args.stop
        )
        stop = text.stopped if args.stop else None
        limits: Any = {"max_new_tokens": args.max_new_tokens, "stop_ids": stop_ids, "stop": stop}
        sampling = replace(self.sampling, seed=self.sampling.seed + first)
        grows = grows and not args.json
        new: list[list[int]] = [[] for _ in rows]
        if grows:
            print(rows[0].prompt, end="", flush=True)
        times = [time.perf_counter()]
        for k, token in stream(self.model, ids, sampling=sampling, runner=self.runner, **limits):
            times.append(time.perf_counter())
            new[k].append(token)
            if grows:
                print(text.push(new[0]), end="", flush=True)
        if grows:
            print(text.push(new[0], final=True), flush=True)
        full = 0
        for row, tokens in zip(rows, new, strict=True):
            ended_by = ending(self.model.config.max_length, len(row.ids), tokens, **limits)
            full += ended_by == "max_length"
            continuation = text.text(tokens)
            if args.json:
                record = {
                    "prompt": row.prompt,
                    "sample": row.sample,
                    "continuation": continuation,
                    "new_tokens": len(tokens),
                    "ended_by": ended_by,
                }
                print(json.dumps(record, ensure_ascii=False), flush=True)
            elif not grows:
                print(f"── {row.prompt!r}\n{row.prompt}{continuation}", flush=True)
        read_tokens = count(sum(map(len, ids)), "prompt token")
        begun, first_token, *later = times
        rest = len(times) - 1 - len(rows)  # the first token of each row came with its prompt
        speed = f", then {rest / (later[-1] - first_token):.1f} tokens/s" if rest else ""
        say(
            f"[{read_tokens} read in {first_token - begun:.2f} s{speed}; {len(times) - 1:,} new; "
            f"{self.runner.name} runner]"
        )
        if full:
            which = "" if len(rows) == 1 else f"{full} of {len(rows)} "
            most = count(self.model.config.max_length, "token")
            say(f"note: {which}ended at the model's longest sequence, {most}")
