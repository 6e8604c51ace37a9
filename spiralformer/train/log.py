"""What a run shows: the live line, metrics.jsonl, TensorBoard, W&B, the loss curve, the summary."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from spiralformer.errors import UserError
from spiralformer.train.checkpoint import PART, RunFolder

Record = dict[str, Any]
TIMING = ("seconds", "tokens_per_second", "flops_per_second")  # all else in a record is repeatable


# ---------------------------------------------------------------------------- the terminal


class Console:
    """Lines to stderr. On a terminal the last one is rewritten; elsewhere progress is a new line
    every ten seconds."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.live = not quiet and sys.stderr.isatty()
        self.interval = 0.1 if self.live else 10.0
        self.shown_at = -math.inf
        self.open = False  # whether a line is being rewritten

    def progress(self, text: str, *, always: bool = False) -> None:
        now = time.monotonic()
        if self.quiet or (now - self.shown_at < self.interval and not always):
            return
        self.shown_at = now
        if self.live:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print(f"\r{text[: width - 1]}\x1b[K", end="", file=sys.stderr, flush=True)
            self.open = True
        else:
            print(text, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        if self.quiet:
            return
        self.close()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.open = False


def progress_line(record: Record, steps: int, left: float) -> str:
    parts = [
        f"step {record['step']:,}/{steps:,}",
        "loss -" if record["loss"] is None else f"loss {record['loss']:.3f}",
        f"lr {record['lr']:.2e}",
        f"{_rate(record['tokens_per_second'])}tok/s",
        f"{_rate(record['flops_per_second'])}FLOP/s",
        f"{duration(left)} left",
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


def places(folder: RunFolder) -> str:
    """Where everything was written."""
    rows = (
        ("model", folder.model),
        ("loss curve", folder.curve),
        ("metrics", folder.metrics),
        ("TensorBoard", folder.tensorboard),
        ("samples", folder.samples),
        ("result", folder.result),
    )
    return "\n".join(f"{name:<15}  {path}" for name, path in rows if path.exists())


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _rate(value: float) -> str:
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f} {letter}"
    return f"{value:.1f} "


# ---------------------------------------------------------------------------- records


class Metrics:
    """Writes each record to metrics.jsonl and, where asked, to TensorBoard and W&B.

    Records after the step that a run is resumed at are dropped: they will be made again."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        beside = path.with_name(path.name + PART)
        with open(beside, "w", encoding="utf-8") as file:
            file.writelines(_line(record) for record in kept)
        os.replace(beside, path)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self.tensorboard: Any = None
        self.wandb: Any = None

    def add_tensorboard(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.tensorboard = SummaryWriter(str(folder), purge_step=step + 1)

    def add_wandb(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"log.wandb {project!r}: wandb is not installed; pip install wandb, or leave it out"
            ) from None
        place = str(folder.resolve())
        self.wandb = wandb.init(
            project=project,
            name=folder.resolve().name,
            id=hashlib.sha256(place.encode()).hexdigest()[:16],  # so that it goes on with the run
            resume="allow",
            dir=place,
            config=config,
        )

    def write(self, record: Record) -> None:
        self.file.write(_line(record))
        self.file.flush()
        step, kind = record["step"], record["kind"]
        numbers = {
            f"{kind}/{key}": value
            for key, value in record.items()
            if key not in ("step", "kind", "tokens") and isinstance(value, (int, float))
        }
        if self.tensorboard is not None:
            for name, value in numbers.items():
                self.tensorboard.add_scalar(name, value, step)
            for i, text in enumerate(record.get("texts", ())):
                self.tensorboard.add_text(f"sample/{i}", f"```\n{text}\n```", step)
        if self.wandb is not None and numbers:
            self.wandb.log(numbers, step=step)

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def read_metrics(path: Path) -> list[Record]:
    """The records of a run; a last line that was cut off is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


# ---------------------------------------------------------------------------- at the end


def draw_curve(records: list[Record], path: Path, title: str) -> None:
    """Loss against tokens, on training and validation data."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    training: dict[str, Any] = {"lw": 1, "color": "tab:blue", "alpha": 0.7, "label": "training"}
    validation: dict[str, Any] = {"marker": "o", "ms": 3, "color": "tab:red", "label": "validation"}
    for kind, key, style in (("train", "loss", training), ("valid", "valid_loss", validation)):
        points = [(r["tokens"], r[key]) for r in records if r["kind"] == kind]
        points = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
        if points:
            axes.plot(*zip(*points, strict=True), **style)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    beside = path.with_name(PART + path.name)
    figure.savefig(beside)
    os.replace(beside, path)


def compressed_bits_per_byte(texts: list[bytes]) -> dict[str, float]:
    """What general compressors make of the same texts joined, in bits per byte."""
    joined = b"".join(texts)
    if not joined:
        return {}
    sizes = {
        "gzip -9": len(gzip.compress(joined, 9)),
        "xz -9": len(lzma.compress(joined, preset=9)),
    }
    return {name: 8 * size / len(joined) for name, size in sizes.items()}


def summary(result: Record) -> str:
    """The result of a finished run as a table."""
    counts, valid = result["parameters"], result["valid"]
    bits = valid["bits_per_byte"]
    rows = [
        ("model", f"{result['layout']} {result['topology']}, width {result['width']}"),
        ("parameters", f"{counts['total']:,} ({counts['non_embedding']:,} without embeddings)"),
        ("trained", f"{result['steps']:,} steps, {result['tokens']:,} tokens"),
        (
            "time",
            f"{duration(result['seconds'])}, {_rate(result['tokens_per_second'])}tok/s, "
            f"{_rate(result['flops_per_second'])}FLOP/s",
        ),
    ]
    if result["train_loss"] is not None:
        rows.append(("training loss", f"{result['train_loss']:.4f}"))
    if valid["loss"] is not None:
        rows += [
            ("validation loss", f"{valid['loss']:.4f} over {valid['tokens']:,} tokens"),
            ("perplexity", f"{valid['perplexity']:.2f}"),
        ]
    if bits is not None:
        others = ", ".join(f"{k} {v:.3f}" for k, v in result["compressors"].items())
        rows.append(("bits per byte", f"{bits:.3f}" + (f" ({others})" if others else "")))
    if result["skipped"]:
        rows.append(("skipped steps", str(result["skipped"])))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
