"""`spiralformer probe`: what each iteration of a loop attends to, as figures and a report."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from spiralformer.console import Progress, count
from spiralformer.errors import UserError
from spiralformer.files import writing
from spiralformer.model_folder import find_model
from spiralformer.probes import GAMMA, NUMBERS

if TYPE_CHECKING:
    from spiralformer.probes.result import ProbeResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    folder = "the folder of a model or of a run"
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help=folder)
    parser.add_argument("--compare", metavar="OTHER", help="a second one, as a control")
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
    parser.add_argument("--line", metavar="TEXT", help="a short text to read token by token, too")
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
    _check(args)
    from spiralformer.probes import page
    from spiralformer.probes.result import ProbeResult

    folder = Path(args.out or args.redraw)
    with writing(folder, "choose another --out"):
        folder.mkdir(parents=True, exist_ok=True)
    if args.redraw is None:
        _measure(args).save(folder)
    elif folder != Path(args.redraw):
        ProbeResult.load(Path(args.redraw)).save(folder)
    probed = ProbeResult.load(folder)  # what is drawn is what can be redrawn
    written = page.write(probed, folder)
    print(summary(probed))
    print(f"\n{written}, its figures and their numbers are written.")
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be known before anything heavy is imported."""
    if args.redraw is not None:
        if args.checkpoint or args.compare:
            raise UserError("--redraw draws from numbers alone; leave the checkpoints out")
        if not (Path(args.redraw) / NUMBERS).is_file():
            raise UserError(f"{args.redraw}: has no {NUMBERS}; `spiralformer probe` writes one")
        return
    if not args.checkpoint:
        raise UserError("name the folder of a model or of a run to probe, or --redraw DIR")
    if not args.out:
        raise UserError("say where to write with --out DIR")
    for named in filter(None, (args.checkpoint, args.compare)):
        find_model(named)
    for name, least in (("samples", 1), ("length", 2), ("gamma", 1), ("batch", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value} must be at least {least}")


def _measure(args: argparse.Namespace) -> ProbeResult:
    import torch

    from spiralformer.model_folder import load_config, load_model, usable_device
    from spiralformer.probes import sequences
    from spiralformer.probes.measure import chunkings, probe, read_line
    from spiralformer.probes.result import ProbeResult

    device = usable_device(args.device)
    given = [path for path in (args.checkpoint, args.compare) if path]
    folders = [find_model(path) for path in given]
    configs = [load_config(folder) for folder in folders]
    length = args.length or min(config.max_length for config in configs)
    for folder, config in zip(folders, configs, strict=True):
        if length > config.max_length:
            raise UserError(
                f"--length {length} is longer than max_length {config.max_length} of {folder}"
            )
    names = [Path(path).resolve().name for path in given]
    if len(set(names)) < len(names):
        names = given
    models, samples = [], []
    for name, folder, config in zip(names, folders, configs, strict=True):
        vocab = config.vocab_size
        sample = sequences.draw(args.data, folder, vocab, args.samples, length, args.seed)
        line = torch.tensor(_line(folder, args.line, config.max_length) if args.line else [])
        network, decode = load_model(folder, device=device), _decoder(folder)
        with Progress(name, len(sample.sequences), "sequences") as progress:
            model = probe(
                network,
                sample.sequences,
                name=name,
                gamma=args.gamma,
                batch=args.batch,
                grids=set().union(*map(chunkings, configs)),
                decode=decode,
                progress=progress.update,
            )
        if args.line:
            model.values["line"] = read_line(network, line.to(args.device), decode)
        samples.append(sample)
        models.append(model)
    notes = list(dict.fromkeys(note for sample in samples for note in sample.notes))
    probed = ProbeResult(samples[0].source, models, notes, args.gamma)
    if len(samples) == 2:
        if torch.equal(*(torch.cat(sample.sequences) for sample in samples)):
            probed.compare_losses()
        else:
            notes.append("the models have different tokenizers: their sequences differ")
    return probed


def _line(folder: Path, text: str, longest: int) -> list[int]:
    from spiralformer.data.tokenizer import load_tokenizer

    ids = load_tokenizer(folder).encode(text)
    if not 2 <= len(ids) <= longest:
        raise UserError(
            f"--line has {count(len(ids), 'token')} in the tokenizer of {folder}; 2 … {longest} "
            "are needed"
        )
    return ids


def _decoder(folder: Path) -> Callable[[int], str]:
    """The text of a token, where the folder has a tokenizer; else its number."""
    from spiralformer.data.tokenizer import load_tokenizer

    if not (folder / "tokenizer.json").is_file():
        return lambda token: f"#{token}"
    backend = load_tokenizer(folder).backend

    def decode(token: int) -> str:
        text = backend.decode([token], skip_special_tokens=False)
        return text if text and "\ufffd" not in text else backend.id_to_token(token) or f"#{token}"

    return decode


def summary(probed: ProbeResult) -> str:
    """The verdict, and what could not be done, in a few lines."""
    from spiralformer.probes import figures, page, result

    lines = [f"note: {note}" for note in page.notes(probed)]
    for model in probed.models:
        loss = f"loss {model['loss']['mean']:.3f}"
        lines += ["", f"{model.name}  {model.config.layout}  {loss}  ({page.amount(model)})"]
        lines.append(f"  {result.overall(model)}")
        for verdict in result.verdicts(model):
            label = f"{result.SYMBOLS[verdict.metric]}, {verdict.heads} heads"
            lines.append(f"  {label:18} {verdict.word:12} {verdict.sentence}")
        lines += [f"  not drawn: {line}" for line in figures.inapplicable(model)]
    for control in probed.models[1:]:
        lines += ["", *result.against_control(probed.models[0], control)]
    return "\n".join(lines).lstrip("\n")
