"""`spiralformer generate CHECKPOINT --prompt …`"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from spiralformer.errors import UserError

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a model folder")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be given several times"
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="a file whose whole text is a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 is greedy (default %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after end-of-text")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the one it was saved in")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--runner",
        choices=("auto", "eager", "compile", "native"),
        default="auto",
        help="what runs the decode step; auto is native where that was built before, and eager "
        "elsewhere. They are equal to rounding: the tokens of float32, but not always of bfloat16",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="the fastest runner of the device, built if need be: native on CPUs, else compile",
    )


def run(args: argparse.Namespace) -> int:
    prompts = list(args.prompt)
    if args.prompt_file:
        try:
            prompts.append(Path(args.prompt_file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt-file {args.prompt_file}: cannot be read ({error})") from None
    if not prompts:
        raise UserError("give a prompt with --prompt TEXT or --prompt-file FILE")

    import torch

    from spiralformer.data.tokenizer import load_tokenizer
    from spiralformer.decode import Sampling, native, runner_for, stream
    from spiralformer.decode.generate import TextStream
    from spiralformer.model_folder import load_model, tokenizer_files

    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    try:
        device = torch.device(args.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {args.device}: {str(error).splitlines()[0]}") from None
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
