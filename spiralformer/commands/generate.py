"""`spiralformer generate CHECKPOINT --prompt …`"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields

from spiralformer.errors import UserError
from spiralformer.files import read_text, require_folder
from spiralformer.machine import open_device

DTYPES = ("float32", "bfloat16", "float16", "float64")
RUNNERS = ("auto", "eager", "compile", "native")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", help="a model folder")
    several = "may be given several times"
    add("--prompt", action="append", default=[], metavar="TEXT", help=several)
    add("--prompt-file", metavar="FILE", help="a file whose whole text is a prompt")
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
    prompts = list(args.prompt)
    if args.prompt_file:
        prompts.append(read_text(args.prompt_file))
    if not prompts:
        raise UserError("give a prompt with --prompt TEXT or --prompt-file FILE")
    require_folder(args.checkpoint)

    import torch

    from spiralformer.data.tokenizer import load_tokenizer
    from spiralformer.decode import Sampling, native, runner_for, stream
    from spiralformer.decode.generate import TextStream
    from spiralformer.model_folder import load_model, tokenizer_files

    sampling = Sampling(**{field.name: getattr(args, field.name) for field in fields(Sampling)})
    device = open_device(args.device, "--device")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model = load_model(args.checkpoint, dtype=dtype, device=device)
    tokenizer_files(args.checkpoint)  # says so if there is none
    tokenizer = load_tokenizer(args.checkpoint)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    stop_ids = [] if args.ignore_eos else [tokenizer.eot_id]
    name = args.runner
    if args.compile:
        name = "compile" if device.type != "cpu" or native.unfit(model) else "native"
    room = max(map(len, ids)) + args.max_new_tokens
    runner = runner_for(model, name, rows=len(ids), tokens=args.max_new_tokens, capacity=room)

    new: list[list[int]] = [[] for _ in ids]
    texts = [TextStream(tokenizer.decode, args.stop) for _ in ids]
    alone = len(ids) == 1
    if alone:
        print(prompts[0], end="", flush=True)
    begun = first = time.perf_counter()
    count = 0
    for row, token in stream(
        model,
        ids,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        stop=texts[0].stopped if args.stop else None,
        runner=runner,
    ):
        if not count:
            first = time.perf_counter()
        count += 1
        if token not in stop_ids:
            new[row].append(token)
        if alone:
            print(texts[0].push(new[0]), end="", flush=True)
    ended = time.perf_counter()
    if alone:
        print(texts[0].push(new[0], final=True), flush=True)
    else:
        for prompt, tokens, text in zip(prompts, new, texts, strict=True):
            print(f"── {prompt!r}\n{prompt}{text.text(tokens)}")
    rest = count - len(ids)
    speed = f", then {rest / (ended - first):.1f} tokens/s" if rest > 0 else ""
    print(
        f"[{sum(map(len, ids))} prompt tokens read in {first - begun:.2f} s{speed}; {count} new; "
        f"{runner.name} runner]",
        file=sys.stderr,
    )
    return 0
