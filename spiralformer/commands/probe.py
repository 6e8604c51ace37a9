"""`spiralformer probe`: what each iteration of a loop attends to, as figures and a report."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from spiralformer.config import SpiralConfig
from spiralformer.data.tokenizer import load_tokenizer
from spiralformer.errors import UserError
from spiralformer.model_folder import load_config, load_model
from spiralformer.probes import Findings, Numbers, probe, report, sequences, verdict
from spiralformer.probes.collect import chunkings
from spiralformer.probes.metrics import GAMMA


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="a model folder")
    parser.add_argument("--compare", metavar="OTHER", help="a second model folder, as a control")
    parser.add_argument(
        "--data",
        default="stdlib",
        help="a text or jsonl file (.gz, .zst), a folder of them, token shards (a folder or a "
        "common name of .bin and .idx), hf:NAME, or stdlib, the Python standard library "
        "(%(default)s)",
    )
    parser.add_argument("--samples", type=int, default=500, help="sequences (%(default)s)")
    parser.add_argument(
        "--length", type=int, metavar="L", help="tokens of each; default: the models' max_length"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for the report and the figures")
    parser.add_argument(
        "--redraw", metavar="DIR", help="draw everything again from the numbers in this folder"
    )
    parser.add_argument(
        "--gamma", type=int, default=GAMMA, help="local window, in tokens (%(default)s)"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which sequences (%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")


def run(args: argparse.Namespace) -> int:
    if args.redraw is not None:
        if args.checkpoint or args.compare:
            raise UserError("--redraw draws from numbers alone; leave the checkpoints out")
        numbers = Numbers.load(Path(args.redraw))
        folder = _folder(args.out or args.redraw)
        if folder != Path(args.redraw):
            numbers.save(folder)
    else:
        _check(args)
        folder = _folder(args.out)
        _measure(args).save(folder)
        numbers = Numbers.load(folder)  # what is drawn is what can be redrawn
    files = report.write(numbers, folder)
    print(summary(numbers))
    print(f"\n{files[-1]}, {len(files) - 1} figures and their numbers are written.")
    return 0


def _check(args: argparse.Namespace) -> None:
    if not args.checkpoint:
        raise UserError("name a model folder to probe, or --redraw DIR")
    if not args.out:
        raise UserError("say where to write with --out DIR")
    for name, least in (("samples", 1), ("length", 2), ("gamma", 1), ("batch", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value} must be at least {least}")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {args.device}: cannot be used ({reason})") from None


def _folder(path: str) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror})") from None
    return folder


def _measure(args: argparse.Namespace) -> Numbers:
    folders = [Path(path) for path in (args.checkpoint, args.compare) if path]
    configs = [load_config(folder) for folder in folders]
    length = args.length or min(config.max_length for config in configs)
    for folder, config in zip(folders, configs, strict=True):
        if length > config.max_length:
            raise UserError(
                f"--length {length} is longer than max_length {config.max_length} of {folder}"
            )
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    grids = set().union(*map(chunkings, configs))
    models, notes, samples = [], [], []
    for name, folder, config in zip(names, folders, configs, strict=True):
        sample = sequences.draw(
            args.data, folder, config.vocab_size, args.samples, length, args.seed
        )
        samples.append(sample)
        notes += [note for note in sample.notes if note not in notes]
        models.append(
            probe(
                load_model(folder, device=args.device),
                sample.sequences,
                name=name,
                gamma=args.gamma,
                batch=args.batch,
                grids=grids,
                decode=_decoder(folder, config),
                progress=_progress(name, len(sample.sequences)),
            )
        )
    numbers = Numbers(samples[0].source, models, notes, args.gamma)
    if len(samples) == 2:
        ids = [torch.cat(sample.sequences) for sample in samples]
        if torch.equal(*ids):
            numbers.pair_losses()
        else:
            notes.append("the models have different tokenizers: their sequences differ")
    return numbers


def _decoder(folder: Path, config: SpiralConfig) -> Callable[[int], str]:
    """The text of a token, where the folder has a tokenizer; else its number."""
    if not (folder / "tokenizer.json").is_file():
        return lambda token: f"#{token}"
    backend = load_tokenizer(folder).backend

    def decode(token: int) -> str:
        text = backend.decode([token], skip_special_tokens=False)
        return text if text and "\ufffd" not in text else backend.id_to_token(token) or f"#{token}"

    return decode


def _progress(name: str, total: int) -> Callable[[int], None]:
    if not sys.stderr.isatty():
        return lambda done: None
    start = time.monotonic()

    def show(done: int) -> None:
        left = (time.monotonic() - start) / done * (total - done)
        end = "\n" if done == total else ""
        print(f"\r{name}: {done}/{total} sequences, {left:.0f} s left   ", end=end, file=sys.stderr)

    return show


def summary(numbers: Numbers) -> str:
    """The verdict, and what could not be done, in a few lines."""
    lines = [f"note: {note}" for note in numbers.notes]
    for found in numbers.models:
        lines += [f"note: {found.name}: {line}" for line in found.skipped]
    for found in numbers.models:
        lines += ["", f"{found.name}  {found.config.layout}  loss {found.loss['mean']:.3f}"]
        lines += _verdict_lines(found)
    for control in numbers.models[1:]:
        lines += ["", *verdict.against_control(numbers.models[0], control)]
    return "\n".join(lines).lstrip("\n")


def _verdict_lines(found: Findings) -> list[str]:
    if not found.iterations:
        missing = "\n".join(f"    {line}" for line in report.inapplicable(found))
        return [
            "  This model has no loop: attention by layer and loss by position apply; not so:",
            missing,
        ]
    lines = [f"  {verdict.overall(found)}"]
    for judged in verdict.verdicts(found):
        label = f"{verdict.SYMBOLS[judged.metric]}, {judged.heads} heads"
        lines.append(f"  {label:18} {judged.word:10} {judged.sentence}")
    return lines
