"""What a run shows: metrics.jsonl, TensorBoard, W&B, the loss picture, lines on the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spiralformer.console import duration, si
from spiralformer.files import digest, json_text, write_text
from spiralformer.machine import require_package
from spiralformer.train.config import TrainConfig

Record = dict[str, Any]
Sink = Callable[[Record], None]
TIMING = ("seconds", "tokens_per_second", "flops_per_second")  # all else in a record is repeatable


# ---------------------------------------------------------------------------- records


def read_metrics(path: Path, notice: Callable[[str], None] = lambda _: None) -> list[Record]:
    """The records of a run; a line that is none, cut off or damaged, is named and left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if _is_record(record):
            records.append(record)
        else:
            notice(f"{path}:{number}: not a record of a run; left out")
    return records


def _is_record(record: Any) -> bool:
    """Whether it has what is read of it."""
    numbers = {"train": ("loss", "seconds"), "valid": ("valid_loss",)}
    return (
        isinstance(record, dict)
        and isinstance(record.get("kind"), str)
        and all(isinstance(record.get(name), int) for name in ("step", "tokens"))
        and all(
            isinstance(record.get(name, ""), (int, float, type(None)))
            for name in numbers.get(record["kind"], ())
        )
    )


@contextlib.contextmanager
def metrics_file(path: Path, step: int, notice: Callable[[str], None]) -> Iterator[Sink]:
    """A line for each record. Those after the step that a run is resumed at are dropped: they will
    be made again."""
    line = lambda record: json_text(record) + "\n"
    kept = [record for record in read_metrics(path, notice) if record["step"] <= step]
    write_text(path, "".join(map(line, kept)))
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(record: Record) -> None:
        file.write(line(record))
        file.flush()
        os.fsync(file.fileno())

    try:
        yield write
    finally:
        with contextlib.suppress(OSError):  # of a line that could not be written
            file.close()


@contextlib.contextmanager
def tensorboard(folder: Path, step: int) -> Iterator[Sink]:
    from torch.utils.tensorboard import SummaryWriter

    def write(record: Record) -> None:
        for name, value in _numbers(record).items():
            board.add_scalar(name, value, record["step"])
        for i, text in enumerate(record.get("texts", ())):
            # Taken as Markdown: what is indented is shown as it is, whatever it holds.
            shown = "\n".join(f"    {line}" for line in text.splitlines())
            board.add_text(f"sample/{i}", shown, record["step"])

    # It writes in a thread; what fails there is raised here again, and need not be printed there.
    printed = threading.excepthook
    threading.excepthook = lambda args: None if args.exc_type is OSError else printed(args)
    try:
        board = SummaryWriter(str(folder), purge_step=step + 1)
        try:
            yield write
        finally:
            with contextlib.suppress(OSError):
                board.close()
    finally:
        threading.excepthook = printed


@contextlib.contextmanager
def weights_and_biases(config: TrainConfig, folder: Path) -> Iterator[Sink]:
    project, place = config.log.wandb, folder.resolve()
    run = import_wandb(project).init(
        project=project,
        name=place.name,
        id=digest(str(place).encode()),  # so that it goes on with the run
        resume="allow",
        dir=str(place),
        config=config.to_dict(),
    )
    try:
        yield lambda record: run.log(_numbers(record), step=record["step"])
    finally:
        run.finish()


def import_wandb(project: str) -> Any:
    require_package("wandb", f"log.wandb {project!r}", "wandb")
    import wandb

    return wandb


def _numbers(record: Record) -> dict[str, float]:
    return {
        f"{record['kind']}/{key}": value
        for key, value in record.items()
        if key not in ("step", "kind", "tokens") and isinstance(value, (int, float))
    }


# ---------------------------------------------------------------------------- lines


def train_note(record: Record) -> str:
    parts = [
        "loss -" if record["loss"] is None else f"loss {record['loss']:.3f}",
        f"lr {record['lr']:.2e}",
        f"{si(record['tokens_per_second'])}tok/s",
    ]
    if record["skipped"]:
        parts.append(f"{record['skipped']} skipped")
    return "  ".join(parts)


def valid_line(record: Record) -> str:
    parts = [
        f"step {record['step']:,}",
        f"validation loss {record['valid_loss']:.4f}",
        f"perplexity {record['perplexity']:.2f}",
    ]
    if record["bits_per_byte"] is not None:
        parts.append(f"bits/byte {record['bits_per_byte']:.3f}")
    return "  ".join(parts)


def sample_lines(texts: list[str], limit: int | None = None) -> str:
    """Each text behind a bar, the first `limit` characters of it."""
    shown = [text if limit is None or len(text) <= limit else text[:limit] + " …" for text in texts]
    return "\n\n".join("\n".join("  │ " + line for line in text.splitlines()) for text in shown)


def summary(result: Record) -> list[tuple[str, str]]:
    """The result of a finished run: what, and how much."""
    counts, valid = result["parameters"], result["valid"]
    speed = f"{si(result['tokens_per_second'])}tok/s, {si(result['flops_per_second'])}FLOP/s"
    rows = [
        ("model", f"{result['layout']} {result['topology']}, width {result['width']}"),
        ("parameters", f"{counts['total']:,} ({counts['non_embedding']:,} without embeddings)"),
        ("trained", f"{result['steps']:,} steps, {result['tokens']:,} tokens"),
        ("time", f"{duration(result['seconds'])}, {speed}"),
    ]
    if result["train_loss"] is not None:
        rows.append(("training loss", f"{result['train_loss']:.4f}"))
    if valid["loss"] is not None:
        rows.append(("validation loss", f"{valid['loss']:.4f} over {valid['tokens']:,} tokens"))
        rows.append(("perplexity", f"{valid['perplexity']:.2f}"))
    if valid["bits_per_byte"] is not None:
        bits = f"{valid['bits_per_byte']:.3f}"
        if others := ", ".join(f"{name} {b:.3f}" for name, b in result["compressors"].items()):
            bits += f" ({others}"
            bits += f" on the same {valid['bytes']:,} bytes)" if "bytes" in valid else ")"
        rows.append(("bits per byte", bits))
    if result["skipped"]:
        rows.append(("skipped steps", str(result["skipped"])))
    return rows


# ---------------------------------------------------------------------------- at the end


def draw_losses(records: list[Record], path: Path, title: str) -> None:
    """Loss against tokens, on training and validation data."""
    from spiralformer import plots

    curves = (
        ("training", "train", "loss", plots.BLUE, "-"),
        ("validation", "valid", "valid_loss", plots.ORANGE, "o-"),
    )
    with plots.style():
        figure = plots.new_figure(6, 3.6)
        axes = figure.add_subplot()
        for label, kind, key, color, line in curves:
            # A loss is None where all steps were skipped: a gap.
            points = [(each["tokens"], each[key]) for each in records if each["kind"] == kind]
            if points:
                axes.plot(*zip(*points, strict=True), line, lw=1, ms=3, color=color, label=label)
        axes.legend()
        axes.set(xlabel="tokens", ylabel="loss, nats per token", title=title)
        axes.grid(alpha=0.3)
        plots.save(figure, path)
