"""`spiralformer count`: what a configuration costs, before anything is built."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spiralformer import accounting, paper, presets
from spiralformer.accounting import Convention
from spiralformer.config import SpiralConfig
from spiralformer.console import count as counted
from spiralformer.console import si, table
from spiralformer.errors import UserError
from spiralformer.model_folder import find_model, load_config, packaged_models

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
SIZES = ("hidden_size", "num_heads", "vocab_size")
FLOPS = ("matmul", "attention", "elementwise", "total")
PATTERN = 24  # positions of the triggering pattern that are drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = (
        'a preset (see --list), a layout such as "4+8x{1/8,1/4,1/2,1}+4", a JSON file, or the '
        "folder of a model or of a run"
    )
    add("config", nargs="?", metavar="PRESET|LAYOUT|FILE|FOLDER", help=what)
    add("--table1", action="store_true", help="the paper's Table 1, recounted")
    add("--list", action="store_true", help="the names of the presets")
    add("--length", type=int, metavar="L", help="tokens; default: the longest sequence")
    add("--hidden-size", type=int, metavar="D", help="width")
    add("--num-heads", type=int, metavar="H", help="attention heads")
    add("--vocab-size", type=int, metavar="V", help="vocabulary")
    change = "change any field of the configuration; may be repeated"
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help=change)
    add("--dtype", choices=BYTES, default="bf16", help="of the cache (%(default)s)")
    add("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    if args.length is not None and args.length < 1:
        raise UserError(f"--length {args.length} must be at least 1")
    if (args.config is not None) + args.table1 + args.list != 1:
        raise UserError(
            "say one thing to count: a preset, a layout, a JSON file or a folder; or --table1; or "
            "--list"
        )
    if args.config is None and any(getattr(args, name) for name in ("length", "set", *SIZES)):
        raise UserError("--table1 and --list take no sizes, lengths or settings; leave them out")
    report: Any
    if args.list:
        report = presets.names()
        shown = "\n".join(f"{name:<34}{presets.PRESETS[name]['layout']}" for name in report)
    elif args.table1:
        report = table1()
        shown = show_table1(report)
    else:
        sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
        config = read_config(args.config, {**sizes, **presets.parse_settings(args.set)})
        report = count(args.config, config, args.length or config.max_length, args.dtype)
        shown = show(config, report)
    print(json.dumps(report, indent=2) if args.json else shown)
    return 0


# ---------------------------------------------------------------------------- one configuration


def read_config(named: str, changes: dict[str, Any]) -> SpiralConfig:
    """The configuration that is meant, with some fields changed."""
    if named in presets.PRESETS or not (Path(named).is_dir() or named in packaged_models()):
        return presets.resolve(named, **changes)
    return load_config(find_model(named)).replace(**changes)


def count(name: str, config: SpiralConfig, length: int, dtype: str) -> dict[str, Any]:
    """Everything that is known of a configuration, as plain data."""
    decode, size = accounting.decode_cost(config), BYTES[dtype]
    as_printed = name in paper.TABLE_1 and config == presets.preset(name)
    return {
        "name": name,
        "config": config.to_dict(),
        "length": length,
        "parameters": {c.value: _plain(accounting.parameters(config, c)) for c in Convention},
        "prefill_flops": {c.value: _prefill(config, length, c) for c in Convention},
        "training_flops_per_token": accounting.training_flops_per_token(config, length),
        "decode": {
            **_plain(decode),
            "mean_passes": float(decode.mean_passes),
            "mean_batches": float(decode.mean_batches),
            "triggers": [
                {
                    "iteration": iteration.index,
                    "resolution": str(iteration.resolution),
                    "chunk": iteration.chunk,
                    "offset": iteration.offset,
                    "shift": iteration.shift,
                    "first": iteration.chunk - 1 - iteration.offset,
                }
                for iteration in config.iterations
            ],
            "pattern": [
                accounting.passes_at(config, i) for i in range(min(decode.period, PATTERN))
            ],
            "flops_per_token": accounting.decode_flops_per_token(config, length),
            "weights_read_per_token": accounting.weights_read_per_token(config),
        },
        "kv_bytes": {"dtype": dtype, **_plain(accounting.kv_bytes(config, length, size))},
        "fixed_bytes": {"dtype": dtype, **_plain(accounting.fixed_bytes(config, size))},
        "printed": asdict(paper.TABLE_1[name]) if as_printed else None,
    }


def _prefill(config: SpiralConfig, length: int, convention: Convention) -> dict[str, Any]:
    forward = accounting.forward_flops(config, length, convention)
    parts = [
        {"part": p.part, "iteration": p.iteration, "entries": p.entries, **_plain(p.flops)}
        for p in forward.parts
    ]
    return {**_plain(forward.flops), "parts": parts}


def _plain(counts: Any) -> dict[str, Any]:
    """The fields of a dataclass and, such as totals, its properties."""
    computed = [name for name, kind in vars(type(counts)).items() if isinstance(kind, property)]
    return asdict(counts) | {name: getattr(counts, name) for name in computed}


# ---------------------------------------------------------------------------- for people


def show(config: SpiralConfig, report: dict[str, Any]) -> str:
    name = f"{report['name']}: " if report["name"] in presets.PRESETS else ""
    slots = f", {config.mesh_slots} slots" if config.topology == "mesh" else ""
    heading = (
        f"{name}{config.layout}\nwidth {config.hidden_size:,} · {config.num_heads} heads · MLP "
        f"{config.intermediate_size:,} · vocabulary {config.vocab_size:,} · {config.norm} · "
        f"topology {config.topology}{slots}\n"
    )
    parts = (show_parameters, show_flops, show_decoding, show_cache)
    return "".join([_wrap(heading), *(part(config, report) for part in parts)]).rstrip("\n")


def show_parameters(config: SpiralConfig, report: dict[str, Any]) -> str:
    conventions = [report["parameters"][name] for name in ("ours", "paper")]
    layout = config.parsed_layout
    how = f"run {config.num_iterations} times" if layout.tied else "one core per iteration"
    notes = {
        "pre": counted(layout.pre, "layer"),
        "cores": " + ".join(counted(n, "layer") for n in layout.core_stacks) + f", {how}",
        "post": counted(layout.post, "layer"),
        "downscale": config.downscale,
        "upscale": config.upscale,
        "topology": config.topology,
        "head": "tied to the embedding" if config.tie_embeddings else "",
        "unexplained": "2d² in the paper's totals",
    }
    rows: list[list[str]] = []
    for part in conventions[0]:
        numbers = [p[part] if isinstance(p[part], int) else sum(p[part]) for p in conventions]
        if part == "non_embedding":
            rows.append([])
        if any(numbers):
            cells = (f"{number:,}" if number else "–" for number in numbers)
            rows.append([part.replace("_", " "), notes.get(part, ""), *cells])
    text = table(["Parameters", "", "ours", "paper's convention"], rows, left=2)
    if report["printed"]:
        total, inner = (report["printed"][k] for k in ("total_params", "non_embedding_params"))
        text += f"Table 1 prints {total:.1f} M and {inner:.1f} M (non-embedding).\n"
    return text


def show_flops(config: SpiralConfig, report: dict[str, Any]) -> str:
    sums: dict[str, Counter[str]] = {}
    for convention, flops in report["prefill_flops"].items():
        for part in (*flops["parts"], flops | {"part": "total", "iteration": None}):
            label, t = part["part"], part["iteration"]
            if t is not None and label != "topology":
                label = f"iteration {t} ({config.iterations[t].resolution})"
            kinds = {f"{convention} {kind}": part[kind] for kind in FLOPS}
            sums.setdefault(label, Counter()).update(kinds)
    total = sums["total"]["ours total"]
    exponent = min(int(math.log10(total)) // 3, 4)
    rows = []
    for label, flops in sums.items():
        numbers = [*(flops[f"ours {kind}"] for kind in FLOPS), flops["paper total"]]
        cells = [f"{number / 1000**exponent:,.4f}" if number else "–" for number in numbers]
        if set(cells) - {"–", "0.0000"}:
            rows.append([label, *cells, f"{100 * flops['ours total'] / total:.1f}"])
    rows.insert(-1, [])
    length, unit = report["length"], " kMGT"[exponent].strip()
    header = [f"{unit}FLOPs", "matmul", "attention", "other", "ours", "paper's", "%"]
    text = f"\nPrefill of {length:,} tokens\n" + table(header, rows)
    if report["printed"] and length == 4096:
        text += f"Table 1 prints {report['printed']['flops']:.2f} TFLOPs.\n"
    training = si(report["training_flops_per_token"])
    return text + (
        f"Training: {training}FLOPs per token (3 × matmul and attention, nothing recomputed).\n"
    )


def show_decoding(config: SpiralConfig, report: dict[str, Any]) -> str:
    decode, text = report["decode"], ""
    if config.iterations:
        drawn = len(decode["pattern"])
        whole = drawn == decode["period"]
        rows = [
            [
                f"iteration {i.index}",
                *map(str, (i.chunk, i.offset, i.shift)),
                f"i ≡ {i.chunk - 1 - i.offset} (mod {i.chunk})" if i.chunk > 1 else "every token",
                "".join("●" if i.triggers(at) else "·" for at in range(drawn)),
            ]
            for i in config.iterations
        ]
        passes = (str(len(due)) if len(due) < 10 else "+" for due in decode["pattern"])
        rows.append(["passes", "", "", "", "", "".join(passes)])
        period = "one period" if whole else f"first {drawn} of {decode['period']:,}"
        text = table(["Decoding", "g", "ω", "s", "core runs at", period], rows)
        shares = _histogram(decode["histogram"], decode["positions"], "pass", "passes")
        text += _wrap(f"{decode['mean_passes']:.4g} core passes per token on average: {shares}.\n")
        if decode["batch_histogram"] != decode["histogram"]:
            shares = _histogram(decode["batch_histogram"], decode["positions"], "run")
            text += _wrap(
                "Passes that do not wait for each other (s ≥ g) can share one run of the core: "
                f"{decode['mean_batches']:.4g} per token on average, {shares}.\n"
            )
    return text + _wrap(
        f"Decoding takes {si(decode['flops_per_token'])}FLOPs per token at a context of "
        f"{report['length']:,} and reads {si(decode['weights_read_per_token'])} weights.\n"
    )


def _histogram(histogram: dict[int, int], positions: int, one: str, many: str = "") -> str:
    return ", ".join(
        f"{counted(k, one, many)} at {v:,} of {positions:,}" for k, v in histogram.items()
    )


def show_cache(config: SpiralConfig, report: dict[str, Any]) -> str:
    kv, length, layout = report["kv_bytes"], report["length"], config.parsed_layout
    stacks = [
        ("pre", layout.pre, length, kv["pre"]),
        *(
            (f"iteration {i.index}", i.layers, i.chunks(length), size)
            for i, size in zip(config.iterations, kv["iterations"], strict=True)
        ),
        ("post", layout.post, length, kv["post"]),
    ]
    rows = [
        [name, str(layers), f"{entries:,}", f"{size:,}", f"{size / length:,.1f}"]
        for name, layers, entries, size in stacks
        if layers
    ]
    rows += [[], ["total", "", "", f"{kv['total']:,}", f"{kv['total'] / length:,.1f}"]]
    if fixed := report["fixed_bytes"]["total"]:
        rows.append(["and, whatever the length", "", "", f"{fixed:,}", ""])
    header = [f"Cache of a sequence, {kv['dtype']}", "layers", "entries", "bytes", "per token"]
    return table(header, rows)


def _wrap(text: str) -> str:
    return "".join(textwrap.fill(line, 80) + "\n" for line in text.splitlines())


# ---------------------------------------------------------------------------- Table 1


def table1() -> dict[str, Any]:
    """Table 1 recounted in both conventions, and which cells print the same digits."""
    rows = []
    for name, printed in paper.TABLE_1.items():
        config = presets.preset(name)
        cells = _cells(printed.total_params, printed.non_embedding_params, printed.flops)
        row: dict[str, Any] = {"preset": name, "layout": config.layout, "printed": cells}
        for convention in Convention:
            p = accounting.parameters(config, convention)
            flops = accounting.forward_flops(config, 4096, convention).total
            counts = _cells(p.total / 1e6, p.non_embedding / 1e6, flops / 1e12)
            row[convention.value] = counts
            row[f"{convention.value}_agrees"] = {k: counts[k] == cells[k] for k in cells}
        rows.append(row)
    return {
        "rows": rows,
        "cells": 3 * len(rows),
        "rows_agreeing": sum(all(row["paper_agrees"].values()) for row in rows),
        **{
            f"cells_agreeing_{c.value}": sum(sum(r[f"{c.value}_agrees"].values()) for r in rows)
            for c in Convention
        },
    }


def _cells(total: float, non_embedding: float, flops: float) -> dict[str, str]:
    """As the paper prints them: millions, millions and 1e12."""
    return {
        "total": f"{total:.1f}",
        "non_embedding": f"{non_embedding:.1f}",
        "flops": f"{flops:.2f}",
    }


def show_table1(table1: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for row in table1["rows"]:
        if rows and row["layout"].isdigit():
            rows.append([])  # a baseline begins the next scale
        marks = "".join("=" if agrees else "≠" for agrees in row["paper_agrees"].values())
        columns = [
            [f"{c['total']}/{c['non_embedding']}", c["flops"]]
            for c in (row["printed"], row["ours"])
        ]
        rows.append([row["preset"], *columns[0], marks, *columns[1]])
    exact, cells = f"{table1['rows_agreeing']}/{len(table1['rows'])}", table1["cells"]
    text = table(["Table 1", "paper", "FLOPs", "counted", "ours", "FLOPs"], rows)
    return text + _wrap(
        "Parameters in millions, total/non-embedding; TFLOPs of a prefill of 4096 tokens.\n"
        f"counted: in the paper's convention; {exact} rows, "
        f"{table1['cells_agreeing_paper']}/{cells} cells equal to the printed digits (=).\n"
        "ours: what our model has and does. It has RMSNorm, no operators where g = 1, and not the "
        "2d² of every printed total, which the paper does not explain; "
        f"{table1['cells_agreeing_ours']}/{cells} cells print the same.\n"
    ).rstrip("\n")
