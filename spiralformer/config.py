"""The configuration: what a model of the family *is*, validated once, when it is built.

Dimension words used everywhere: g = chunk size, ω = chunk offset, s = right-shift,
T = number of loop iterations, L = sequence length, n_t = chunks of iteration t.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from spiralformer.costs import DOWNSCALE, NORM, TOPOLOGY, UPSCALE
from spiralformer.errors import UserError, shown

CHOICES = {
    "topology": list(TOPOLOGY),
    "downscale": list(DOWNSCALE),
    "upscale": list(UPSCALE),
    "norm": list(NORM),
}
# What is larger is a slip of the finger: it would be refused by memory, or take for ever to count.
LONGEST_LAYOUT = 4096  # characters
MOST_LAYERS = 1024  # of the unrolled computation
MOST_ITERATIONS = 64
LARGEST = {
    "hidden_size": 1 << 17,
    "num_heads": 1 << 17,
    "vocab_size": 1 << 24,
    "mesh_slots": 1 << 10,
    "intermediate_size": 1 << 20,
    "max_length": 1 << 24,
}
LARGEST_FLOAT = 1e30
LONGEST_CHUNK = 1 << 20  # and offset, and shift
RULES: dict[str, dict[str, Callable[[int], int]]] = {  # of the chunk size g
    "offset": {"half": lambda g: g // 2, "zero": lambda g: 0},
    "shift": {"overlap": lambda g: g - 1, "parallel": lambda g: g if g > 1 else 0},
}

GRAMMAR = (
    'write "24" (no loop), "4+8x{1/8,1/4,1/2,1}+4" (pre + core x {resolutions} + post; pre and '
    'post may be 0) or "4+8+8+4" (pre + untied full-resolution cores + post)'
)


class ConfigError(UserError, ValueError):
    """A wrong configuration. The message names the field, the value and the remedy."""


# ---------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class Layout:
    """How the layers are laid out: N_pre + N_loop × {r_0, …, r_{T-1}} + N_post."""

    pre: int
    cores: tuple[int, ...]  # layers of the core run at each iteration; () without a loop
    resolutions: tuple[Fraction, ...]  # r_t of each iteration
    post: int
    tied: bool  # one core shared by all iterations, or one core each

    @classmethod
    def parse(cls, text: str) -> Layout:
        def fail(why: str) -> ConfigError:
            return ConfigError(f"layout {shown(text)}: {why}; {GRAMMAR}")

        if not isinstance(text, str):
            raise fail("not a string")
        if len(text) > LONGEST_LAYOUT:
            raise fail(f"longer than {LONGEST_LAYOUT:,} characters")
        plain = re.sub(r"\s+", "", text).replace("×", "x").replace("X", "x")
        number = "[0-9]+"  # \d would be any script's digits
        if re.fullmatch(number, plain):
            if int(plain) == 0:
                raise fail("a model needs at least one layer")
            return cls(int(plain), (), (), 0, tied=True)
        if re.fullmatch(rf"{number}(\+{number}){{2,}}", plain):
            pre, *cores, post = (int(part) for part in plain.split("+"))
            if 0 in cores:
                raise fail("a core needs at least one layer")
            return cls(pre, tuple(cores), (Fraction(1),) * len(cores), post, tied=False)
        match = re.fullmatch(rf"({number})\+({number})x{{([^{{}}]*)}}\+({number})", plain)
        if not match:
            raise fail("not a layout")
        pre, core, post = (int(match[k]) for k in (1, 2, 4))
        if core == 0:
            raise fail("the core needs at least one layer")
        resolutions = []
        for item in match[3].split(","):
            fraction = re.fullmatch(rf"{number}(/{number}|\.{number})?", item)
            if not fraction or re.fullmatch(f"{number}/0+", item):
                raise fail(f"resolution {shown(item)} is not a fraction such as 1/8")
            r = Fraction(item)
            if not 0 < r <= 1:
                raise fail(f"resolution {item[:40]} lies outside (0, 1]")
            if r < Fraction(1, LONGEST_CHUNK):
                raise fail(f"resolution {item[:40]} is less than 1/{LONGEST_CHUNK}")
            resolutions.append(r)
        return cls(pre, (core,) * len(resolutions), tuple(resolutions), post, tied=True)

    def __post_init__(self) -> None:
        for what, value, most in (
            ("iterations", len(self.cores), MOST_ITERATIONS),
            ("layers", self.compute_layers, MOST_LAYERS),
        ):
            if value > most:
                raise ConfigError(f"layout: {shown(value)} {what}; {most:,} are the most")

    def __str__(self) -> str:
        if not self.cores:
            return str(self.pre)
        if not self.tied:
            return "+".join(map(str, (self.pre, *self.cores, self.post)))
        return f"{self.pre}+{self.cores[0]}x{{{','.join(map(str, self.resolutions))}}}+{self.post}"

    @property
    def core_stacks(self) -> tuple[int, ...]:
        """Depths of the cores that own parameters."""
        return self.cores[:1] if self.tied else self.cores

    @property
    def unique_layers(self) -> int:
        return self.pre + sum(self.core_stacks) + self.post

    @property
    def compute_layers(self) -> int:
        """Layers of the unrolled computation, N_compute."""
        return self.pre + sum(self.cores) + self.post


@dataclass(frozen=True)
class Iteration:
    """The geometry of one loop iteration: chunk size g, offset ω, shift s (Eq. pi-rho-offset)."""

    index: int
    resolution: Fraction
    chunk: int
    offset: int
    shift: int
    layers: int

    def chunks(self, length: int) -> int:
        """n_t(L): every complete chunk, so that no output depends on how much text follows."""
        return (length + self.offset) // self.chunk

    def chunk_of(self, position: int) -> int:
        """π_t(i)"""
        return (position + self.offset) // self.chunk

    def phase_of(self, position: int) -> int:
        """ρ_t(i)"""
        return (position + self.offset) % self.chunk

    def triggers(self, position: int) -> bool:
        """Whether a chunk completes at this position: decoding runs the core here."""
        return self.phase_of(position) == self.chunk - 1

    @property
    def reads_only_past(self) -> bool:
        """s ≥ g: no token reads a pass made at that token (the parallel regime)."""
        return self.shift >= self.chunk

    @property
    def latents_kept(self) -> int:
        """Finished latents that later tokens may still read, ⌈s/g⌉."""
        return -(-self.shift // self.chunk)


# ---------------------------------------------------------------------------- config

_leak_allowed = contextvars.ContextVar("leak_allowed", default=False)


@contextlib.contextmanager
def allow_shifts_that_leak_the_future() -> Iterator[None]:
    """Escape for tests of Proposition 1: inside, illegal shifts s < g-1 are accepted."""
    token = _leak_allowed.set(True)
    try:
        yield
    finally:
        _leak_allowed.reset(token)


def _describe(help: str, **kwargs: Any) -> Any:
    return dataclasses.field(metadata={"help": help}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class SpiralConfig:
    """A model of the SpiralFormer family. Only the layout and the sizes are required."""

    layout: str = _describe(f"layer layout and resolution schedule: {GRAMMAR}")
    hidden_size: int = _describe("width d")
    num_heads: int = _describe("attention heads; divides hidden_size")
    vocab_size: int = _describe("rows of the embedding and of the head")

    topology: str = _describe(
        "how an update enters the state: none (replaces it), anchor or mesh; "
        "default mesh with a loop, none without",
        default="",
    )
    mesh_slots: int = _describe("memory slots B of MeSH; default T + 3", default=0)
    downscale: str = _describe(
        f"how a chunk becomes a latent: {', '.join(DOWNSCALE)}", default="self_aggregation"
    )
    upscale: str = _describe(
        f"how a latent reaches its tokens: {', '.join(UPSCALE)}", default="output_dependent"
    )
    offset: str | tuple[int, ...] = _describe(
        "chunk offsets ω: half (g//2), zero, or a list with one per iteration", default="half"
    )
    shift: str | tuple[int, ...] = _describe(
        "right-shifts s: overlap (g-1), parallel (g; 0 where g = 1, which is the critical path), "
        "or a list with one per iteration",
        default="overlap",
    )

    intermediate_size: int = _describe("MLP width; default 4 × hidden_size", default=0)
    norm: str = _describe(" or ".join(NORM), default="rmsnorm")
    norm_eps: float = _describe("epsilon of the norms", default=1e-5)
    parallel_residual: bool = _describe("attention and MLP read the same input", default=True)
    rotary_fraction: float = _describe("share of each head that is rotated", default=0.25)
    rotary_base: float = _describe("base of the rotary frequencies", default=10000.0)
    max_length: int = _describe("longest sequence", default=4096)
    scale_embeddings: bool = _describe("multiply token embeddings by √d", default=True)
    tie_embeddings: bool = _describe("the head shares the embedding's weights", default=False)
    init_std: float = _describe("standard deviation of the initial weights", default=0.02)
    init_depth_scaled: bool = _describe(
        "scale output projections by 1/√(2·N_compute)", default=True
    )

    # ------------------------------------------------------------------ building

    def __post_init__(self) -> None:
        fix = lambda name, value: object.__setattr__(self, name, value)
        fix("layout", str(Layout.parse(self.layout)))
        for field in dataclasses.fields(self):
            self._check_type(field)
        loops = self.num_iterations
        fix("topology", self.topology or ("mesh" if loops else "none"))
        fix("intermediate_size", self.intermediate_size or 4 * self.hidden_size)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} {shown(getattr(self, name))} is unknown; choose one of "
                    f"{', '.join(choices)}"
                )
        if not loops and self.topology != "none":
            raise ConfigError(
                f"topology {self.topology!r} needs a loop, and layout {self.layout!r} has none; "
                'use topology "none" or a layout such as "4+8+8+4"'
            )
        if self.topology == "mesh":
            fix("mesh_slots", self.mesh_slots or loops + 3)
        elif self.mesh_slots:
            raise ConfigError(
                f"mesh_slots {self.mesh_slots} is for topology 'mesh', not {self.topology!r}; "
                "leave it out"
            )
        if self.hidden_size % self.num_heads:
            divisors = (k for k in range(1, self.hidden_size + 1) if self.hidden_size % k == 0)
            raise ConfigError(
                f"num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}; "
                f"choose one of {', '.join(map(str, divisors))}"
            )
        if self.rotary_size % 2:
            raise ConfigError(
                f"rotary_fraction {self.rotary_fraction} rotates {self.rotary_size} of "
                f"{self.head_size} dimensions of a head; the number must be even"
            )
        for name in ("offset", "shift"):
            self._check_rule(name)
        for t, g, omega, s in ((i.index, i.chunk, i.offset, i.shift) for i in self.iterations):
            if not 0 <= omega < g:
                raise ConfigError(
                    f"offset {omega} of iteration {t} must lie in 0…{g - 1} (its chunks hold {g})"
                )
            if s < g - 1 and not _leak_allowed.get():
                raise ConfigError(
                    f"shift {s} of iteration {t} would leak the future: a chunk of {g} tokens is "
                    f"known only at its last one; the smallest legal shift is {g - 1}"
                )

    def _check_type(self, field: dataclasses.Field) -> None:
        name, value = field.name, getattr(self, field.name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if field.type == "int":
            least = 0 if field.default == 0 else 1  # 0 stands for a default that follows
            if not number or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} {shown(value)} must be a whole number of at least 1")
            if value > LARGEST[name]:
                raise ConfigError(f"{name} {shown(value)} must be at most {LARGEST[name]:,}")
        elif name == "rotary_fraction":
            if not number or not 0 <= value <= 1:
                raise ConfigError(f"{name} {shown(value)} lies outside [0, 1]")
        elif field.type == "float":
            if not number or not 0 < value < LARGEST_FLOAT:
                raise ConfigError(
                    f"{name} {shown(value)} must be a positive number below {LARGEST_FLOAT:g}"
                )
        elif field.type == "bool" and not isinstance(value, bool):
            raise ConfigError(f"{name} {shown(value)} must be true or false")
        elif field.type == "str" and not isinstance(value, str):
            raise ConfigError(f"{name} {shown(value)} must be text")
        if field.type == "float":
            object.__setattr__(self, name, float(value))

    def _check_rule(self, name: str) -> None:
        """A named rule stays named; a list becomes a tuple of whole numbers, one per iteration."""
        value, named, loops = getattr(self, name), RULES[name], self.num_iterations
        if isinstance(value, str):
            if value not in named:
                raise ConfigError(
                    f"{name} {shown(value)} is unknown; choose {', '.join(named)} or a list"
                )
            return
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if len(values) != loops or any(
            type(v) is not int or not 0 <= v <= LONGEST_CHUNK for v in values
        ):
            raise ConfigError(
                f"{name} {shown(value)} must be one of {', '.join(named)} or a list of {loops} "
                f"whole numbers up to {LONGEST_CHUNK:,}, one per iteration of {self.layout}"
            )
        object.__setattr__(self, name, values)

    # ------------------------------------------------------------------ derived

    @cached_property
    def parsed_layout(self) -> Layout:
        return Layout.parse(self.layout)

    @property
    def num_iterations(self) -> int:
        """T"""
        return len(self.parsed_layout.resolutions)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def rotary_size(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_size * self.rotary_fraction)

    @cached_property
    def iterations(self) -> tuple[Iteration, ...]:
        def of(name: str, t: int, g: int) -> int:
            value = getattr(self, name)
            return RULES[name][value](g) if isinstance(value, str) else value[t]

        layout = self.parsed_layout
        iterations = []
        for t, (r, layers) in enumerate(zip(layout.resolutions, layout.cores, strict=True)):
            g = math.floor(1 / r)  # exact: r is a Fraction
            iterations.append(Iteration(t, r, g, of("offset", t, g), of("shift", t, g), layers))
        return tuple(iterations)

    @cached_property
    def pass_groups(self) -> tuple[tuple[int, ...], ...]:
        """The iterations in groups whose passes at one token go through the core together.

        An iteration that reads only the past lets the next one go on without waiting for its pass,
        so both passes can be one batch, which reads the shared weights once. Untied cores have
        nothing to share."""
        groups: list[tuple[int, ...]] = []
        for t in range(self.num_iterations):
            if t and self.parsed_layout.tied and self.iterations[t - 1].reads_only_past:
                groups[-1] += (t,)
            else:
                groups.append((t,))
        return tuple(groups)

    # ------------------------------------------------------------------ input and output

    def replace(self, **changes: Any) -> SpiralConfig:
        """The same configuration with some fields changed; what followed from them follows anew."""
        fields = self.to_dict()
        if fields["intermediate_size"] == 4 * self.hidden_size:
            del fields["intermediate_size"]
        if fields["mesh_slots"] == self.num_iterations + 3 or "topology" in changes:
            del fields["mesh_slots"]
        if self.topology == ("mesh" if self.num_iterations else "none") and "layout" in changes:
            del fields["topology"]
        return self.from_dict({**fields, **changes})

    def with_iterations(self, kept: Sequence[int]) -> SpiralConfig:
        """Of the model that runs only these iterations of the loop: coarse ones may be left out,
        the last one gives the result."""
        last = self.num_iterations - 1
        if sorted({*kept, last}) != list(kept) or kept[0] < 0 or kept[-1] > last:
            raise ConfigError(
                f"iterations {','.join(map(str, kept)) or 'none'} of layout {self.layout}: choose "
                f"rising numbers of 0 … {last}, the last of them {last}"
            )
        layout = self.parsed_layout
        pick = lambda values: tuple(values[t] for t in kept)
        layout = dataclasses.replace(
            layout, cores=pick(layout.cores), resolutions=pick(layout.resolutions)
        )
        rule = lambda value: value if isinstance(value, str) else pick(value)
        return dataclasses.replace(
            self, layout=str(layout), offset=rule(self.offset), shift=rule(self.shift)
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> SpiralConfig:
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"unknown field {shown(name)}; {hint}")
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.default is dataclasses.MISSING and f.name not in fields
        ]
        if missing:
            raise ConfigError(f"missing field{'s' * (len(missing) > 1)} {', '.join(missing)}")
        return cls(**fields)
