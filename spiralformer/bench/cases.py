"""What is measured: a training step, a prompt, decoded tokens, memory, growth with length.

Each benchmark yields groups of measurements; the cases of a group are run in turns.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from spiralformer.accounting import kv_bytes, parameters, training_bytes
from spiralformer.bench import served
from spiralformer.bench.peers import PEER, build, family, wrap
from spiralformer.bench.timing import Measurement, interleave
from spiralformer.config import SpiralConfig
from spiralformer.console import say
from spiralformer.decode import prefill, stream
from spiralformer.machine import require_memory
from spiralformer.model import SpiralFormer

WHOLE = (PEER, "baseline", "looped", "spiral-b", "spiral-l")  # compared on whole sequences
DECODED = (*WHOLE, "spiral-b parallel")
STATUS = Path("/proc/self/status")  # where Linux tells a process of its memory

Case = Callable[[], object]
Groups = Iterator[list[Measurement]]


@dataclass(frozen=True)
class Sizes:
    scale: str
    repeats: int
    dtypes: Sequence[str]
    runners: Sequence[str]  # of decoding; growth takes the first
    tokens: int  # decoded in a run: best a multiple of the longest chunk, so that all do the same
    context: int  # before decoding; 0: none
    length: int  # of a training step
    prompt: int
    lengths: Sequence[int]  # of growth


# ---------------------------------------------------------------------------- benchmarks


def train(sizes: Sizes) -> Groups:
    for dtype in sizes.dtypes:
        setting = f"training step of 1 × {sizes.length} tokens"
        yield measure_whole(training, setting, sizes, dtype, sizes.length)


def prompt(sizes: Sizes) -> Groups:
    for dtype in sizes.dtypes:
        setting = f"prompt of {sizes.prompt} tokens"
        yield measure_whole(reading, setting, sizes, dtype, sizes.prompt)


def decode(sizes: Sizes) -> Groups:
    settings = {
        "decoding, batch 1": [8],
        "decoding, batch 8, ragged": [8 + 5 * row for row in range(8)],
    }
    if sizes.context:
        settings[f"decoding after {sizes.context} tokens"] = [sizes.context]
    for dtype in sizes.dtypes:
        for setting, lengths in settings.items():
            yield measure_decoding(setting, sizes, dtype, *lengths)


def memory(sizes: Sizes) -> Groups:
    step = f"memory of a training step of 1 × {sizes.length} tokens"
    kinds = [(step, step_peak, sizes.length)] if STATUS.exists() else []
    kinds += [(f"decode state after {sizes.prompt} tokens", state_bytes, sizes.prompt)]
    if not STATUS.exists():
        say("no peaks of training: only Linux tells them")
    for dtype in sizes.dtypes:
        for setting, size_of, length in kinds:
            held = {name: size_of(name, sizes.scale, length, dtype) for name in WHOLE}
            yield [
                Measurement(setting, dtype, name, length=length, bytes=size)
                for name, size in held.items()
            ]


def growth(sizes: Sizes) -> Groups:
    sizes = replace(sizes, runners=sizes.runners[:1])
    for dtype in sizes.dtypes:
        for setting, measure_at in (
            ("prompts by length", partial(measure_whole, reading)),
            ("training steps by length", partial(measure_whole, training)),
            ("decoding by context", measure_decoding),
        ):
            at_lengths = (measure_at(setting, sizes, dtype, n) for n in sorted(sizes.lengths))
            yield [m for group in at_lengths for m in group]


def serve(sizes: Sizes) -> Groups:
    """Tokens of prompts and answers per second, by the number of clients."""
    for dtype in sizes.dtypes:
        with served.servers(sizes.scale, dtype) as ports:
            for setting, prompt, tokens in (
                ("long answers, by clients", served.SHORT, sizes.tokens),
                ("long prompts, by clients", served.LONG, served.FEW),
            ):
                loads = dict(served.cases(ports, served.CLIENTS, prompt, tokens))
                seconds = interleave(loads, sizes.repeats, f"{setting}, {dtype}")
                yield [
                    Measurement(
                        setting, dtype, name, engine, clients, clients * (prompt + tokens), runs
                    )
                    for (name, engine, clients), runs in seconds.items()
                ]


BENCHMARKS: dict[str, Callable[[Sizes], Groups]] = {
    "train": train,
    "prefill": prompt,
    "decode": decode,
    "memory": memory,
    "growth": growth,
    "serve": serve,
}


def measure(
    cases: Mapping[tuple[str, str], Case],
    setting: str,
    sizes: Sizes,
    dtype: str,
    length: int,
    tokens: int,
) -> list[Measurement]:
    seconds = interleave(cases, sizes.repeats, f"{setting}, {dtype}")
    return [
        Measurement(setting, dtype, *case, length, tokens, runs) for case, runs in seconds.items()
    ]


def require_room(
    configs: Mapping[str, SpiralConfig],
    names: Sequence[str],
    dtype: str,
    tokens: int,
    training: bool = False,
) -> None:
    """All models of a group are there at once."""
    size = getattr(torch, dtype).itemsize
    needed = 0
    for name in names:
        held = parameters(configs[name]).total * size + kv_bytes(configs[name], tokens, size).total
        needed += training_bytes(configs[name], tokens, 1) if training else held
    require_memory(needed, f"measuring {len(names)} models beside each other")


# ---------------------------------------------------------------------------- whole sequences


def measure_whole(
    make: Callable[[str, SpiralConfig, str, int], Case],
    setting: str,
    sizes: Sizes,
    dtype: str,
    length: int,
) -> list[Measurement]:
    configs = family(sizes.scale, length)
    require_room(configs, WHOLE, dtype, length, training=make is training)
    cases = {(name, ""): make(name, configs[name], dtype, length) for name in WHOLE}
    return measure(cases, setting, sizes, dtype, length, length)


def training(name: str, config: SpiralConfig, dtype: str, length: int) -> Case:
    """Forward, backward and AdamW on one sequence; float32 weights, autocast if bfloat16."""
    model = build(name, config, torch.float32).train()
    ids = torch.randint(0, config.vocab_size, (1, length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            if name == PEER:
                loss = model(ids[:, :-1], labels=ids[:, :-1], use_cache=False).loss
            else:
                loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def reading(name: str, config: SpiralConfig, dtype: str, length: int) -> Case:
    """A prompt is read: the next token's logits are wanted, and the caches."""
    model = build(name, config, getattr(torch, dtype)).eval()
    ids = torch.randint(0, config.vocab_size, (1, length))

    @torch.no_grad()
    def read() -> None:
        if name == PEER:
            model(ids, use_cache=True, logits_to_keep=1)
        else:
            model.head(prefill(model, ids, last=True)[0])

    return read


# ---------------------------------------------------------------------------- decoding


def measure_decoding(setting: str, sizes: Sizes, dtype: str, *lengths: int) -> list[Measurement]:
    """A batch of prompts of these lengths is read first; each run goes on where the last ended."""
    prompts, tokens = [[7] * length for length in lengths], sizes.tokens
    most = tokens * (sizes.repeats + 1) + 1
    configs = family(sizes.scale, max(lengths) + most)
    require_room(configs, DECODED, dtype, len(lengths) * (max(lengths) + most))
    cases: dict[tuple[str, str], Case] = {}
    for name in DECODED:
        model = build(name, configs[name], getattr(torch, dtype)).eval()
        if name == PEER:
            cases[name, ""] = hf_decoding(model, prompts, tokens)
            continue
        for runner in sizes.runners:
            if runner == "hf":
                cases[name, runner] = hf_decoding(wrap(model), prompts, tokens)
            else:
                cases[name, runner] = our_decoding(model, runner, prompts, tokens, most)
    return measure(cases, setting, sizes, dtype, max(lengths), tokens * len(prompts))


def our_decoding(
    model: SpiralFormer, runner: Any, prompts: list[list[int]], tokens: int, most: int
) -> Case:
    rows = len(prompts)
    new = stream(model, prompts, max_new_tokens=most, runner=runner)
    next(islice(new, rows - 1, None))  # the prompts are read, and each has its first token
    return lambda: next(islice(new, rows * tokens - 1, None))


def hf_decoding(model: Any, prompts: list[list[int]], tokens: int) -> Case:
    """`generate` of `transformers`, which is given its own output and cache to go on."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    cache = None

    def go_on(count: int) -> None:
        nonlocal ids, mask, cache
        out = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        ids, cache = out.sequences, out.past_key_values
        mask = torch.cat([mask, mask.new_ones(len(mask), count)], 1)

    go_on(1)
    return lambda: go_on(tokens)


# ---------------------------------------------------------------------------- memory


def step_peak(name: str, scale: str, length: int, dtype: str) -> int:
    """Resident bytes that training takes, weights and optimizer included."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return alone.submit(_step_peak, name, scale, length, dtype).result()


def _step_peak(name: str, scale: str, length: int, dtype: str) -> int:
    def resident(kind: str) -> int:
        return 1024 * int(re.findall(kind + r":\s+(\d+) kB", STATUS.read_text())[0])

    training(name, family("nano")[name], dtype, 64)()  # imports what a first step imports
    before = resident("VmRSS")
    step = training(name, family(scale, length)[name], dtype, length)
    step()
    step()  # with the optimizer's state in place
    return resident("VmHWM") - before


@torch.no_grad()
def state_bytes(name: str, scale: str, length: int, dtype: str) -> int:
    """Bytes that the decode state of one sequence holds."""
    model = build(name, family(scale, length)[name], getattr(torch, dtype)).eval()
    ids = torch.zeros((1, length), dtype=torch.long)
    if name != PEER:
        _, state = prefill(model, ids, last=True)
        return state.nbytes
    layers = model(ids, use_cache=True, logits_to_keep=1).past_key_values.layers
    return sum(kept.nbytes for layer in layers for kept in (layer.keys, layer.values))
