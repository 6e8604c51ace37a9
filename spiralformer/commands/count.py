"""`spiralformer count`: what a configuration costs, before anything is built."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from spiralformer import accounting, paper, presets
from spiralformer.accounting import OURS, PAPER, Convention, Flops
from spiralformer.config import SpiralConfig
from spiralformer.errors import UserError

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
PATTERN = 40  # positions of the triggering pattern that are drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        metavar="PRESET|LAYOUT|FILE",
        help='a preset (see --list), a layout such as "4+8x{1/8,1/4,1/2,1}+4", or a JSON file',
    )
    parser.add_argument("--table1", action="store_true", help="the paper's Table 1, recounted")
    parser.add_argument("--list", action="store_true", help="the names of the presets")
    parser.add_argument(
        "--length", type=int, metavar="L", help="tokens; default: the longest sequence"
    )
    parser.add_argument("--hidden-size", type=int, metavar="D", help="width")
    parser.add_argument("--num-heads", type=int, metavar="H", help="attention heads")
    parser.add_argument("--vocab-size", type=int, metavar="V", help="vocabulary")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change any field of the configuration; may be repeated",
    )
    parser.add_argument("--dtype", choices=BYTES, default="bf16", help="of the cache (%(default)s)")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    if args.length is not None and args.length < 1:
        raise UserError(f"--length {args.length} must be at least 1")
    asked = [args.config is not None, args.table1, args.list]
    if sum(asked) != 1:
        raise UserError(
            "say one thing to count: a preset, a layout or a JSON file; or --table1; or --list"
        )
    options = ("length", "hidden_size", "num_heads", "vocab_size", "set")
    if args.config is None and any(getattr(args, name) for name in options):
        raise UserError("--table1 and --list take no sizes, lengths or settings; leave them out")
    if args.list:
        lines = (f"{name:<34}{fields['layout']}" for name, fields in presets.PRESETS.items())
        print(json.dumps(presets.names(), indent=2) if args.json else "\n".join(lines))
    elif args.table1:
        rows = table1()
        print(json.dumps(rows, indent=2) if args.json else show_table1(rows))
    else:
        sizes = {
            name: getattr(args, name)
            for name in ("hidden_size", "num_heads", "vocab_size")
            if getattr(args, name) is not None
        }
        config = presets.resolve(args.config, **{**sizes, **presets.parse_settings(args.set)})
        report = count(args.config, config, args.length or config.max_length, args.dtype)
        print(json.dumps(report, indent=2) if args.json else show(config, report))
    return 0


# ---------------------------------------------------------------------------- one configuration


def count(name: str, config: SpiralConfig, length: int, dtype: str) -> dict[str, Any]:
    """Everything that is known of a configuration, as plain data."""
    decode = accounting.decode_cost(config)
    cache = accounting.kv_bytes(config, length, BYTES[dtype])
    fixed = accounting.fixed_bytes(config, BYTES[dtype])
    printed = paper.TABLE_1.get(name) if name in presets.PRESETS else None
    if printed and config != presets.preset(name):
        printed = None
    return {
        "name": name,
        "config": config.to_dict(),
        "length": length,
        "parameters": {c.value: _parameters(config, c) for c in Convention},
        "prefill_flops": {c.value: _forward(config, length, c) for c in Convention},
        "training_flops_per_token": accounting.training_flops_per_token(config, length),
        "decode": {
            "mean_passes": float(decode.mean_passes),
            "mean_batches": float(decode.mean_batches),
            "period": decode.period,
            "positions": decode.positions,
            "histogram": decode.histogram,
            "batch_histogram": decode.batch_histogram,
            "triggers": [
                {
                    "iteration": it.index,
                    "resolution": str(it.resolution),
                    "chunk": it.chunk,
                    "offset": it.offset,
                    "shift": it.shift,
                    "first": it.chunk - 1 - it.offset,
                }
                for it in config.iterations
            ],
            "pattern": [
                accounting.passes_at(config, i) for i in range(min(decode.period, PATTERN))
            ],
            "flops_per_token": accounting.decode_flops_per_token(config, length),
            "weights_read_per_token": accounting.weights_read_per_token(config),
        },
        "kv_bytes": {"dtype": dtype, **dataclasses.asdict(cache), "total": cache.total},
        "fixed_bytes": {"dtype": dtype, **dataclasses.asdict(fixed), "total": fixed.total},
        "printed": dataclasses.asdict(printed) if printed else None,
    }


def _parameters(config: SpiralConfig, convention: Convention) -> dict[str, Any]:
    p = accounting.parameters(config, convention)
    return {**dataclasses.asdict(p), "non_embedding": p.non_embedding, "total": p.total}


def _forward(config: SpiralConfig, length: int, convention: Convention) -> dict[str, Any]:
    forward = accounting.forward_flops(config, length, convention)
    return {
        **_flops(forward.flops),
        "parts": [
            {"part": p.part, "iteration": p.iteration, "entries": p.entries, **_flops(p.flops)}
            for p in forward.parts
        ],
    }


def _flops(flops: Flops) -> dict[str, int]:
    return {**dataclasses.asdict(flops), "total": flops.total}


# ---------------------------------------------------------------------------- for people


def show(config: SpiralConfig, report: dict[str, Any]) -> str:
    sections = [
        _heading(config, report),
        _show_parameters(config, report),
        _show_flops(config, report),
        _show_decoding(config, report),
        _show_cache(config, report),
    ]
    return "\n\n".join(section for section in sections if section)


def _heading(config: SpiralConfig, report: dict[str, Any]) -> str:
    topology = {"mesh": f"MeSH with {config.mesh_slots} slots", "anchor": "Anchor"}.get(
        config.topology, "none"
    )
    name = f"{report['name']}: " if report["name"] in presets.PRESETS else ""
    return (
        f"{name}{config.layout}\n"
        f"width {config.hidden_size:,} · {config.num_heads} heads · MLP "
        f"{config.intermediate_size:,} · vocabulary {config.vocab_size:,} · {config.norm} · "
        f"topology {topology}"
    )


def _show_parameters(config: SpiralConfig, report: dict[str, Any]) -> str:
    ours, theirs = report["parameters"]["ours"], report["parameters"]["paper"]
    layout = config.parsed_layout

    def row(label: str, note: str, key: str) -> list[str]:
        pair = [p[key] if isinstance(p[key], int) else sum(p[key]) for p in (ours, theirs)]
        return [label, note, *(f"{n:,}" if n else "–" for n in pair)]

    depths = " + ".join(map(str, layout.core_stacks))
    if not config.num_iterations:
        core = ""
    elif layout.tied:
        core = f"{depths} layers, run {config.num_iterations} times"
    else:
        core = f"{depths} layers, one core per iteration"
    rows = [
        row("embedding", "", "embedding"),
        row("pre", _layers(layout.pre), "pre"),
        row("core", core, "cores"),
        row("post", _layers(layout.post), "post"),
        row("final norm", "", "final_norm"),
        row("down-scaling", config.downscale, "downscale"),
        row("up-scaling", config.upscale, "upscale"),
        row("topology", config.topology, "topology"),
        row("head", "tied to the embedding" if config.tie_embeddings else "", "head"),
        row("unexplained", "2d² in the paper's totals", "unexplained"),
    ]
    rows = [r for r in rows if r[2:] != ["–", "–"]]
    rows += [[], row("non-embedding", "", "non_embedding"), row("total", "", "total")]
    text = _table(["Parameters", "", "ours", "paper's convention"], rows, left=2)
    if report["printed"]:
        total, inner = (report["printed"][k] for k in ("total_params", "non_embedding_params"))
        text += f"\n  Table 1 prints {total:.1f} M and {inner:.1f} M (non-embedding)."
    return text


def _show_flops(config: SpiralConfig, report: dict[str, Any]) -> str:
    length, unit = report["length"], _Unit(report["prefill_flops"]["ours"]["total"])
    ours = accounting.forward_flops(config, length, OURS)
    theirs = accounting.forward_flops(config, length, PAPER)
    layout = config.parsed_layout

    def row(label: str, note: str, *parts: str, iteration: int | None = None) -> list[str]:
        f, g = (c.of(*parts, iteration=iteration) for c in (ours, theirs))
        numbers = (f.matmul, f.attention, f.elementwise, f.total)
        share = f"{100 * f.total / ours.total:.1f} %"
        return [label, note, *map(unit.of, numbers), share, unit.of(g.total)]

    steps = ("downscale", "core", "upscale")
    rows = [row("pre", f"{layout.pre} × {length:,}", "pre")] if layout.pre else []
    rows += [
        row(
            f"iteration {it.index} ({it.resolution})",
            f"{it.layers} × {it.chunks(length):,}",
            *steps,
            iteration=it.index,
        )
        for it in config.iterations
    ]
    if ours.of("topology").total or theirs.of("topology").total:
        rows.append(row("topology", "", "topology"))
    if layout.post:
        rows.append(row("post", f"{layout.post} × {length:,}", "post"))
    rows.append(row("embedding, norm, head", "", "embedding", "final norm", "head"))
    everything = {p.part for p in ours.parts} | {p.part for p in theirs.parts}
    rows += [[], row("total", "", *sorted(everything))]
    header = [
        f"Prefill of {length:,} tokens",
        "layers × n",
        "matmul",
        "attention",
        "other",
        "ours",
        "share",
        "paper's",
    ]
    text = _table(header, rows, left=1)
    text += f"\n  in {unit.name}FLOPs."
    if report["printed"] and length == 4096:
        text += f" Table 1 prints {report['printed']['flops']:.2f} TFLOPs."
    text += (
        f"\n  Training: {_si(report['training_flops_per_token'])}FLOPs per token "
        "(3 × matmul and attention, nothing recomputed)."
    )
    return text


def _show_decoding(config: SpiralConfig, report: dict[str, Any]) -> str:
    decode, length = report["decode"], report["length"]
    lines = []
    if config.iterations:
        shown = len(decode["pattern"])
        whole = (
            "one period" if shown == decode["period"] else f"first {shown} of {decode['period']:,}"
        )
        rows = []
        for it in config.iterations:
            marks = "".join("●" if it.triggers(i) else "·" for i in range(shown))
            when = (
                "every token"
                if it.chunk == 1
                else f"i ≡ {it.chunk - 1 - it.offset} (mod {it.chunk})"
            )
            rows.append(
                [f"iteration {it.index}", *map(str, (it.chunk, it.offset, it.shift)), when, marks]
            )
        sums = "".join(_digit(len(passes)) for passes in decode["pattern"])
        rows.append(["passes at a token", "", "", "", "", sums])
        header = ["Decoding", "g", "ω", "s", "core runs at", whole]
        lines.append(_table(header, rows, left=1, left_too=(4, 5)))
        passes = _histogram(decode["histogram"], decode["positions"], "pass", "passes")
        lines.append(
            _wrap(f"{decode['mean_passes']:.4g} core passes per token on average: {passes}.")
        )
        if decode["batch_histogram"] != decode["histogram"]:
            runs = _histogram(decode["batch_histogram"], decode["positions"], "run", "runs")
            lines.append(
                _wrap(
                    "Passes that do not wait for each other (s ≥ g) can share one run of the core: "
                    f"{decode['mean_batches']:.4g} per token on average, {runs}."
                )
            )
    else:
        lines.append("Decoding")
    lines.append(
        f"  {_si(decode['flops_per_token'])}FLOPs per token at a context of {length:,}; "
        f"{_si(decode['weights_read_per_token'])} weights read per token."
    )
    return "\n".join(lines)


def _histogram(histogram: dict[int, int], positions: int, one: str, many: str) -> str:
    return ", ".join(
        f"{k} {one if k == 1 else many} at {v:,} of {positions:,}" for k, v in histogram.items()
    )


def _show_cache(config: SpiralConfig, report: dict[str, Any]) -> str:
    kv, fixed, length = report["kv_bytes"], report["fixed_bytes"], report["length"]
    layout = config.parsed_layout

    def row(label: str, layers: int | str, entries: int | str, size: int) -> list[str]:
        cells = (f"{n:,}" if isinstance(n, int) else n for n in (layers, entries))
        return [label, *cells, f"{size:,}", f"{size / length:,.1f}"]

    rows = [row("pre", layout.pre, length, kv["pre"])] if layout.pre else []
    for it, size in zip(config.iterations, kv["iterations"], strict=True):
        rows.append(row(f"iteration {it.index}", it.layers, it.chunks(length), size))
    if layout.post:
        rows.append(row("post", layout.post, length, kv["post"]))
    rows += [[], row("total", "", "", kv["total"])]
    if fixed["total"]:
        rows.append(["and, whatever the length", "", "", f"{fixed['total']:,}", ""])
    header = [f"Cache of a sequence, {kv['dtype']}", "layers", "entries", "bytes", "per token"]
    return _table(header, rows, left=1)


# ---------------------------------------------------------------------------- Table 1


def table1() -> dict[str, Any]:
    """Table 1 recounted in both conventions, and which cells print the same digits."""
    rows = []
    for name, printed in paper.TABLE_1.items():
        config = presets.preset(name)
        row: dict[str, Any] = {
            "preset": name,
            "layout": config.layout,
            "printed": _cells(
                printed.total_params * 1e6, printed.non_embedding_params * 1e6, printed.flops * 1e12
            ),
        }
        for convention in Convention:
            p = accounting.parameters(config, convention)
            flops = accounting.forward_flops(config, 4096, convention).total
            cells = _cells(p.total, p.non_embedding, flops)
            row[convention.value] = cells
            row[f"{convention.value}_agrees"] = {
                key: cells[key] == row["printed"][key] for key in cells
            }
        rows.append(row)
    agree = {
        c.value: [ok for r in rows for ok in r[f"{c.value}_agrees"].values()] for c in Convention
    }
    exact = sum(all(row["paper_agrees"].values()) for row in rows)
    return {
        "rows": rows,
        "cells": len(agree["paper"]),
        "rows_agreeing": exact,
        **{f"cells_agreeing_{name}": sum(oks) for name, oks in agree.items()},
    }


def _cells(total: float, non_embedding: float, flops: float) -> dict[str, str]:
    """As the paper prints them: millions, millions and 1e12."""
    return {
        "total": f"{total / 1e6:.1f}",
        "non_embedding": f"{non_embedding / 1e6:.1f}",
        "flops": f"{flops / 1e12:.2f}",
    }


def show_table1(table: dict[str, Any]) -> str:
    def parameters(row: dict[str, Any], column: str) -> str:
        cells, agrees = row[column], row.get(f"{column}_agrees")
        marks = (
            "" if agrees is None else f" {_mark(agrees['total'])}{_mark(agrees['non_embedding'])}"
        )
        return f"{cells['total']}/{cells['non_embedding']}{marks}"

    def flops(row: dict[str, Any], column: str) -> str:
        agrees = row.get(f"{column}_agrees")
        return row[column]["flops"] + ("" if agrees is None else f" {_mark(agrees['flops'])}")

    columns = {"printed": "paper", "paper": "counted", "ours": "ours"}
    rows: list[list[str]] = []
    for row in table["rows"]:
        if rows and row["preset"].startswith("pythia") and not row["preset"].endswith("mesh"):
            rows.append([])  # the next scale
        cells = [parameters(row, c) for c in columns] + [flops(row, c) for c in columns]
        rows.append([row["preset"], *cells])
    titles = f"{'':24}{'parameters, M (total/non-embedding)':<51}FLOPs, 1e12"
    cells, exact = table["cells"], f"{table['rows_agreeing']}/{len(table['rows'])}"
    legend = [
        "paper    as printed; FLOPs are those of a prefill of 4096 tokens",
        f"counted  in the paper's convention: {exact} rows, "
        f"{table['cells_agreeing_paper']}/{cells} cells equal to the printed digits (=)",
        f"ours     what our model has and does: {table['cells_agreeing_ours']}/{cells} cells print "
        "the same. It has RMSNorm, no operators",
        "         where g = 1, and not the 2d² of every printed total, which the paper does not "
        "explain",
    ]
    text = _table(["Table 1", *columns.values(), *columns.values()], rows, left=1)
    return "\n".join([titles, text, "", *legend])


def _mark(agrees: bool) -> str:
    return "=" if agrees else "≠"


# ---------------------------------------------------------------------------- plain text


class _Unit:
    """The unit in which numbers read well of which this is the largest."""

    def __init__(self, largest: float, least: float = 100) -> None:
        self.name, self.scale = "", 1.0
        for name, scale in (("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
            if largest >= least * scale:
                self.name, self.scale = name, scale

    def of(self, number: float) -> str:
        return f"{number / self.scale:,.1f}" if number else "–"


def _si(number: float) -> str:
    unit = _Unit(number, least=1)
    return f"{unit.of(number)} {unit.name}"


def _wrap(text: str) -> str:
    return textwrap.fill(text, 98, initial_indent="  ", subsequent_indent="  ")


def _layers(n: int) -> str:
    return f"{n} layer{'s' * (n != 1)}" if n else ""


def _digit(n: int) -> str:
    return str(n) if n < 10 else "+"


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: int, left_too: Sequence[int] = ()
) -> str:
    """Columns aligned; the first `left` ones to the left. An empty row is a thin line."""
    rows = [["  " + row[0], *row[1:]] if row else [] for row in rows]
    widths = [max(len(row[k]) for row in (header, *rows) if row) for k in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.ljust(width) if k < left or k in left_too else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    body = [line(row) if row else "  " + rule[2:] for row in rows]
    return "\n".join([line(header), rule, *body])
