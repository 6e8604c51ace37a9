"""Parameters, FLOPs, decoding cost and cache sizes, all from the configuration alone.

Two conventions stand side by side. OURS is what the model of this package has and does. PAPER is
the convention that reproduces Table 1 to the printed digit. It differs from ours in this:

- parameters: every norm is a LayerNorm; scorers have a bias; iterations with g = 1 own a scorer and
  a router as soon as any iteration has g > 1; and the total has 2d² more, which the paper does not
  explain;
- FLOPs: no GELU, no rotary embedding, no final norm, no softmax outside attention, no anchor; MeSH
  writes and reads a buffer of B slots, where ours combines past updates by their coefficients;
  n_t is ⌊L/g⌋, where ours is every complete chunk.

A multiplication and an addition are two FLOPs; exp, erf, a square root and a comparison are one
each. Attention is counted in full, n × n, although half of it is masked. Copies, lookups, casts and
the rotary angles are left out everywhere.

Letters: d width, m MLP width, H heads, V vocabulary, T iterations, B memory slots, L tokens,
n entries of a (compressed) sequence, g chunk size.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from spiralformer import costs
from spiralformer.config import Iteration, SpiralConfig
from spiralformer.costs import Flops


class Convention(enum.Enum):
    OURS = "ours"
    PAPER = "paper"


OURS, PAPER = Convention.OURS, Convention.PAPER


# ---------------------------------------------------------------------------- parameters


@dataclass(frozen=True)
class Parameters:
    """Parameters of each part."""

    embedding: int
    pre: int
    cores: tuple[int, ...]  # one, or one per iteration if the layout is untied
    post: int
    final_norm: int
    downscale: tuple[int, ...]  # one per iteration
    upscale: tuple[int, ...]  # one per iteration
    topology: int
    head: int  # 0 if it shares the embedding's weights
    unexplained: int  # 2d² in the paper's totals

    @property
    def non_embedding(self) -> int:
        """Everything but the embedding, the head and what is unexplained."""
        layers = self.pre + sum(self.cores) + self.post + self.final_norm
        return layers + sum(self.downscale) + sum(self.upscale) + self.topology

    @property
    def total(self) -> int:
        return self.embedding + self.non_embedding + self.head + self.unexplained


def parameters(config: SpiralConfig, convention: Convention = OURS) -> Parameters:
    d, paper = config.hidden_size, convention is PAPER
    norm = costs.NORM["layernorm" if paper else config.norm].parameters * d
    layer = _layer_weights(config) + _layer_biases(config) + 2 * norm
    layout = config.parsed_layout

    def of_operators(cost: costs.OperatorCost) -> tuple[int, ...]:
        count = (paper and cost.paper_parameters) or cost.parameters
        scaled = _scaled_iterations(config, convention)
        return tuple(count(d, i.chunk) if i in scaled else 0 for i in config.iterations)

    return Parameters(
        embedding=config.vocab_size * d,
        pre=layout.pre * layer,
        cores=tuple(layers * layer for layers in layout.core_stacks),
        post=layout.post * layer,
        final_norm=norm,
        downscale=of_operators(costs.DOWNSCALE[config.downscale]),
        upscale=of_operators(costs.UPSCALE[config.upscale]),
        topology=costs.TOPOLOGY[config.topology].parameters(
            d, config.mesh_slots, config.num_iterations
        ),
        head=0 if config.tie_embeddings else config.vocab_size * d,
        unexplained=2 * d * d if paper else 0,
    )


def _layer_weights(config: SpiralConfig) -> int:
    """Weights of the linear maps of a layer: qkv, out, up, down."""
    d, m = config.hidden_size, config.intermediate_size
    return 3 * d * d + d * d + d * m + m * d


def _layer_biases(config: SpiralConfig) -> int:
    d, m = config.hidden_size, config.intermediate_size
    return 3 * d + d + m + d


def _scaled_iterations(config: SpiralConfig, convention: Convention) -> tuple[Iteration, ...]:
    """The iterations that have down- and up-scaling operators."""
    coarse = tuple(iteration for iteration in config.iterations if iteration.chunk > 1)
    return config.iterations if coarse and convention is PAPER else coarse


# ---------------------------------------------------------------------------- FLOPs


@dataclass(frozen=True)
class FlopsPart:
    """The FLOPs of one step of Algorithm 1."""

    part: str  # embedding, pre, topology, downscale, core, upscale, post, final norm, head
    iteration: int | None
    entries: int  # length of the sequence that it runs on
    flops: Flops


@dataclass(frozen=True)
class ForwardFlops:
    """The FLOPs of a forward pass over one sequence, in the order of the computation."""

    length: int
    parts: tuple[FlopsPart, ...]

    @property
    def flops(self) -> Flops:
        return sum((p.flops for p in self.parts), Flops())

    @property
    def total(self) -> int:
        return self.flops.total

    def of(self, *names: str, iteration: int | None = None) -> Flops:
        """The sum over the parts of these names; over all iterations unless one is named."""
        chosen = (p for p in self.parts if p.part in names and iteration in (None, p.iteration))
        return sum((p.flops for p in chosen), Flops())


def forward_flops(config: SpiralConfig, length: int, convention: Convention = OURS) -> ForwardFlops:
    """FLOPs of a forward pass over `length` tokens, logits at every one of them.

    A prefill that needs the last token's logits only saves all but 1/L of the head.
    """
    d, paper, layout = config.hidden_size, convention is PAPER, config.parsed_layout
    scaled = _scaled_iterations(config, convention)
    parts: list[FlopsPart] = []

    def add(part: str, entries: int, flops: Flops, iteration: int | None = None) -> None:
        parts.append(FlopsPart(part, iteration, entries, flops))

    scale = d * length if config.scale_embeddings and not paper else 0
    add("embedding", length, Flops(elementwise=scale))
    add("pre", length, _layer_flops(config, length, convention) * layout.pre)
    if config.num_iterations:
        add("topology", length, _topology_flops(config, length, convention, 0))
    down, up = costs.DOWNSCALE[config.downscale], costs.UPSCALE[config.upscale]
    for iteration in config.iterations:
        t, g = iteration.index, iteration.chunk
        n = length // g if paper else iteration.chunks(length)
        if iteration in scaled:
            add("downscale", length, _operator_flops(down, d, g, n, length, convention), t)
        add("core", n, _layer_flops(config, n, convention) * iteration.layers, t)
        if iteration in scaled:
            add("upscale", n, _operator_flops(up, d, g, n, length, convention), t)
        add("topology", length, _topology_flops(config, length, convention, t + 1), t)
    add("post", length, _layer_flops(config, length, convention) * layout.post)
    norm = 0 if paper else length * _norm_flops(config, convention)
    add("final norm", length, Flops(elementwise=norm))
    add("head", length, Flops(matmul=2 * d * config.vocab_size * length))
    return ForwardFlops(length, tuple(parts))


def training_flops_per_token(config: SpiralConfig, length: int) -> float:
    """3 × the forward pass's matmul and attention FLOPs, per token of a sequence.

    The backward pass does two products for each of the forward's. Left out: elementwise terms,
    the optimiser, and what activation checkpointing or fused attention compute again.
    """
    forward = forward_flops(config, length).flops
    return 3 * (forward.matmul + forward.attention) / length


def _norm_flops(config: SpiralConfig, convention: Convention) -> int:
    """Per entry."""
    cost = costs.NORM["rmsnorm" if convention is PAPER else config.norm]
    return cost.flops * config.hidden_size


def _layer_flops(config: SpiralConfig, n: int, convention: Convention) -> Flops:
    d, heads = config.hidden_size, config.num_heads
    residuals = 2 * d
    per_entry = _layer_biases(config) + residuals + 2 * _norm_flops(config, convention)
    if convention is OURS:
        per_entry += 5 * config.intermediate_size  # GELU: x/2·(1 + erf(x/√2))
        per_entry += 3 * 2 * heads * config.rotary_size  # q and k: two products and a sum
    return Flops(
        matmul=2 * n * _layer_weights(config),
        attention=4 * n * n * d,
        elementwise=n * per_entry + 6 * heads * n * n,  # scale and softmax
    )


def _operator_flops(
    cost: costs.OperatorCost, d: int, g: int, n: int, length: int, convention: Convention
) -> Flops:
    if convention is PAPER and cost.paper_flops:
        return cost.paper_flops(d, g, n, length)
    return cost.flops(d, g, n)


def _topology_flops(
    config: SpiralConfig, length: int, convention: Convention, updates: int
) -> Flops:
    cost = costs.TOPOLOGY[config.topology]
    of_token = cost.paper_flops if convention is PAPER else cost.flops
    return of_token(config.hidden_size, config.mesh_slots, updates) * length


# ---------------------------------------------------------------------------- decoding

LONGEST_PERIOD = 1 << 16


@dataclass(frozen=True)
class DecodeCost:
    """What a decoded token costs, over one period of the triggering pattern."""

    period: int  # after this many tokens the pattern repeats
    mean_passes: Fraction  # core passes per token, Σ_t 1/g_t
    histogram: dict[int, int]  # core passes at a token → how many of the period's positions
    batch_histogram: dict[int, int]  # the same for batches, see `batches_at`
    positions: int  # over which the histograms run: the period, or LONGEST_PERIOD if that is less

    @property
    def mean_batches(self) -> Fraction:
        return Fraction(sum(k * v for k, v in self.batch_histogram.items()), self.positions)


def passes_at(config: SpiralConfig, position: int) -> tuple[int, ...]:
    """The iterations whose core runs when this position is decoded: those that end a chunk."""
    return tuple(iteration.index for iteration in config.iterations if iteration.triggers(position))


def batches_at(config: SpiralConfig, position: int) -> tuple[tuple[int, ...], ...]:
    """The passes at a position as decoding makes them: those of a group run the core as one."""
    due = passes_at(config, position)
    batches = (tuple(t for t in group if t in due) for group in config.pass_groups)
    return tuple(batch for batch in batches if batch)


def decode_cost(config: SpiralConfig) -> DecodeCost:
    period = math.lcm(*(iteration.chunk for iteration in config.iterations))
    positions = min(period, LONGEST_PERIOD)
    passes = _histogram(positions, [(iteration,) for iteration in config.iterations])
    groups = [tuple(config.iterations[t] for t in group) for group in config.pass_groups]
    batches = _histogram(positions, groups)
    return DecodeCost(
        period=period,
        mean_passes=sum(
            (Fraction(1, iteration.chunk) for iteration in config.iterations), Fraction(0)
        ),
        histogram=passes,
        batch_histogram=batches,
        positions=positions,
    )


def _histogram(positions: int, groups: Sequence[Sequence[Iteration]]) -> dict[int, int]:
    """Groups of which an iteration is due at a position → how many of the positions."""
    due = [bytearray(positions) for _ in groups]
    for marks, group in zip(due, groups, strict=True):
        for iteration in group:
            first = iteration.chunk - 1 - iteration.offset
            marks[first :: iteration.chunk] = b"\1" * len(range(first, positions, iteration.chunk))
    counted = Counter(map(sum, zip(*due, strict=True))) if due else Counter({0: positions})
    return dict(sorted(counted.items()))


def weights_read_per_token(config: SpiralConfig) -> float:
    """Parameters that decoding one token of one sequence reads on average.

    Pre, post, norm and head once, the core once for each batch of passes. Left out: one row of the
    embedding, scorers and routers.
    """
    p, layout = parameters(config), config.parsed_layout
    head = p.embedding if config.tie_embeddings else p.head
    once = p.pre + p.post + p.final_norm + head
    # Untied cores all run at full resolution: each is read once at every token.
    reads = decode_cost(config).mean_batches if layout.tied else 1
    return float(once + sum(p.cores) * reads)


def decode_flops_per_token(config: SpiralConfig, context: int) -> float:
    """Matmul and attention FLOPs of decoding one token when `context` tokens, itself included, are
    cached; the mean over the phases of the chunks. Left out: scorers, routers, topology and
    elementwise terms."""

    def layer(entries: int) -> int:
        return 2 * _layer_weights(config) + 4 * entries * config.hidden_size

    full = (config.parsed_layout.pre + config.parsed_layout.post) * layer(context)
    head = 2 * config.hidden_size * config.vocab_size
    cores = sum(
        iteration.layers * layer(iteration.chunks(context)) / iteration.chunk
        for iteration in config.iterations
    )
    return full + cores + head


# ---------------------------------------------------------------------------- training


def training_bytes(config: SpiralConfig, length: int, micro_batch: int) -> int:
    """The least that training holds at once: of every parameter the weight, the gradient and two
    moments of AdamW in float32, and of every layer its input, in 16 bits."""
    layout = config.parsed_layout
    entries = (layout.pre + layout.post) * length + sum(
        iteration.layers * iteration.chunks(length) for iteration in config.iterations
    )
    return 16 * parameters(config).total + 2 * entries * config.hidden_size * micro_batch


# ---------------------------------------------------------------------------- decode state


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of keys and values that one sequence holds."""

    pre: int
    iterations: tuple[int, ...]
    post: int

    @property
    def total(self) -> int:
        return self.pre + sum(self.iterations) + self.post


def kv_bytes(config: SpiralConfig, length: int, bytes_per_value: int) -> CacheBytes:
    """After `length` tokens: each layer holds K and V of d values per entry; pre and post have one
    entry per token, iteration t one per complete chunk. Spare capacity is left out."""
    entry = 2 * config.hidden_size * bytes_per_value
    layout = config.parsed_layout
    return CacheBytes(
        pre=layout.pre * length * entry,
        iterations=tuple(
            iteration.layers * iteration.chunks(length) * entry for iteration in config.iterations
        ),
        post=layout.post * length * entry,
    )


@dataclass(frozen=True)
class FixedBytes:
    """Bytes of a sequence's decode state that do not grow with its length, per iteration."""

    chunks: tuple[int, ...]  # what the operators keep of the chunk under way
    latents: tuple[int, ...]  # the latents that tokens to come will read, and their allocations

    @property
    def total(self) -> int:
        return sum(self.chunks) + sum(self.latents)


def fixed_bytes(config: SpiralConfig, bytes_per_value: int) -> FixedBytes:
    """What operators keep of a chunk is in at least float32; latents (d values and g shares each)
    are in the model's dtype. An iteration with g = 1 has no chunk under way. Lengths and other
    bookkeeping are left out."""
    d, wide = config.hidden_size, max(bytes_per_value, 4)
    down, up = costs.DOWNSCALE[config.downscale], costs.UPSCALE[config.upscale]
    return FixedBytes(
        chunks=tuple(
            (down.state(d, i.chunk) + up.state(d, i.chunk)) * wide * (i.chunk > 1)
            for i in config.iterations
        ),
        latents=tuple(i.latents_kept * (d + i.chunk) * bytes_per_value for i in config.iterations),
    )
