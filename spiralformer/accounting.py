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
from dataclasses import dataclass
from fractions import Fraction

from spiralformer.config import Iteration, SpiralConfig


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
    scorers: tuple[int, ...]  # one per iteration
    routers: tuple[int, ...]  # one per iteration
    mesh: int
    head: int  # 0 if it shares the embedding's weights
    unexplained: int  # 2d² in the paper's totals

    @property
    def non_embedding(self) -> int:
        """Everything but the embedding, the head and what is unexplained."""
        layers = self.pre + sum(self.cores) + self.post + self.final_norm
        return layers + sum(self.scorers) + sum(self.routers) + self.mesh

    @property
    def total(self) -> int:
        return self.embedding + self.non_embedding + self.head + self.unexplained


def parameters(config: SpiralConfig, convention: Convention = OURS) -> Parameters:
    d, paper = config.hidden_size, convention is PAPER
    norm = 2 * d if paper or config.norm == "layernorm" else d
    layer = _layer_weights(config) + _layer_biases(config) + 2 * norm
    layout, scaled = config.parsed_layout, _scaled_iterations(config, convention)
    scored = scaled if config.downscale == "self_aggregation" else ()
    routed = scaled if config.upscale == "output_dependent" else ()
    scorer = d + 1 if paper else d
    return Parameters(
        embedding=config.vocab_size * d,
        pre=layout.pre * layer,
        cores=tuple(layers * layer for layers in layout.core_stacks),
        post=layout.post * layer,
        final_norm=norm,
        scorers=tuple(scorer if it in scored else 0 for it in config.iterations),
        routers=tuple((d + 1) * it.chunk if it in routed else 0 for it in config.iterations),
        mesh=_mesh_routers(config) * (d + 1) * 2 * config.mesh_slots,
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
    coarse = tuple(it for it in config.iterations if it.chunk > 1)
    return config.iterations if coarse and convention is PAPER else coarse


def _mesh_routers(config: SpiralConfig) -> int:
    """One per iteration and the transitional one; a router is write and read together."""
    return config.num_iterations + 1 if config.topology == "mesh" else 0


# ---------------------------------------------------------------------------- FLOPs


@dataclass(frozen=True)
class Flops:
    matmul: int = 0  # linear maps, and the weighted sum of self-aggregation
    attention: int = 0  # q·kᵀ and the product with v
    elementwise: int = 0  # everything else

    @property
    def total(self) -> int:
        return self.matmul + self.attention + self.elementwise

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
        )

    def __mul__(self, times: int) -> Flops:
        return Flops(self.matmul * times, self.attention * times, self.elementwise * times)


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
        add("topology", length, _topology_flops(config, length, convention, None))
    for it in config.iterations:
        t, n = it.index, length // it.chunk if paper else it.chunks(length)
        if it in scaled:
            add("downscale", length, _downscale_flops(config, it, length, n, convention), t)
        add("core", n, _layer_flops(config, n, convention) * it.layers, t)
        if it in scaled:
            add("upscale", n, _upscale_flops(config, it, length, n, convention), t)
        add("topology", length, _topology_flops(config, length, convention, t), t)
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
    """Per entry. RMSNorm: square, sum, scale, weight; LayerNorm also centres and adds a bias."""
    per_value = 4 if convention is PAPER or config.norm == "rmsnorm" else 7
    return per_value * config.hidden_size


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


_SOFTMAX = 5  # per value: maximum, subtract, exp, sum, divide


def _downscale_flops(
    config: SpiralConfig, it: Iteration, length: int, n: int, convention: Convention
) -> Flops:
    d, g = config.hidden_size, it.chunk
    if config.downscale == "mean":
        return Flops(elementwise=d * (n * g + n))
    if convention is PAPER:
        return Flops(matmul=2 * d * length + 2 * d * length)
    scores, weighted_sum = 2 * d * length, 2 * d * g * n  # every token is scored
    return Flops(matmul=scores + weighted_sum, elementwise=_SOFTMAX * g * n)


def _upscale_flops(
    config: SpiralConfig, it: Iteration, length: int, n: int, convention: Convention
) -> Flops:
    d, g = config.hidden_size, it.chunk
    scale = Flops(elementwise=d * length if convention is PAPER else d * g * n)
    if config.upscale == "uniform":
        return scale
    allocation = 0 if convention is PAPER else (1 + _SOFTMAX + 1) * g * n  # bias, softmax, gain
    return scale + Flops(matmul=2 * d * g * n, elementwise=allocation)


def _topology_flops(
    config: SpiralConfig, length: int, convention: Convention, iteration: int | None
) -> Flops:
    """Of the update after an iteration, or (None) of InitTopo before the first."""
    d, slots = config.hidden_size, config.mesh_slots
    if config.topology == "mesh":
        routers = 2 * d * 2 * slots * length
        if convention is PAPER:
            return Flops(matmul=routers, elementwise=2 * (2 * d * slots) * length)
        updates = 1 if iteration is None else iteration + 2  # v and those of iterations 0 … t
        route = (1 + _SOFTMAX) * 2 * slots  # bias, softmax
        read = d + updates * (2 * slots + 2 * d)  # r₀·x, then ⟨w, r⟩ and a scaled add for each
        return Flops(matmul=routers, elementwise=(route + read) * length)
    if config.topology == "anchor" and iteration is not None and convention is OURS:
        return Flops(elementwise=d * length)
    return Flops()


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
    return tuple(it.index for it in config.iterations if it.triggers(position))


def batches_at(config: SpiralConfig, position: int) -> tuple[tuple[int, ...], ...]:
    """The passes at a position in as few runs of the core as their dependencies allow.

    An iteration with s ≥ g reads no pass made at this token, so what comes after it need not wait:
    its own pass joins the next that does, and the shared weights are read once for both. Cores that
    are not shared have nothing to join.
    """
    batches: list[tuple[int, ...]] = []
    waiting: tuple[int, ...] = ()
    for t in passes_at(config, position):
        waiting += (t,)
        if not config.iterations[t].lags or not config.parsed_layout.tied:
            batches.append(waiting)
            waiting = ()
    return (*batches, waiting) if waiting else tuple(batches)


def decode_cost(config: SpiralConfig) -> DecodeCost:
    period = math.lcm(*(it.chunk for it in config.iterations))
    positions = min(period, LONGEST_PERIOD)
    passes = Counter(len(passes_at(config, i)) for i in range(positions))
    batches = Counter(len(batches_at(config, i)) for i in range(positions))
    return DecodeCost(
        period=period,
        mean_passes=sum((Fraction(1, it.chunk) for it in config.iterations), Fraction(0)),
        histogram=dict(sorted(passes.items())),
        batch_histogram=dict(sorted(batches.items())),
        positions=positions,
    )


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
    cores = sum(it.layers * layer(it.chunks(context)) / it.chunk for it in config.iterations)
    return full + cores + head


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
        iterations=tuple(it.layers * it.chunks(length) * entry for it in config.iterations),
        post=layout.post * length * entry,
    )


@dataclass(frozen=True)
class FixedBytes:
    """Bytes of a sequence's decode state that do not grow with its length, per iteration."""

    pooling: tuple[int, ...]  # the running sum of the open chunk
    latents: tuple[int, ...]  # the latents that tokens to come will read, and their allocations

    @property
    def total(self) -> int:
        return sum(self.pooling) + sum(self.latents)


def fixed_bytes(config: SpiralConfig, bytes_per_value: int) -> FixedBytes:
    """The open chunk is a weighted sum of d values with, for self-aggregation, its running maximum
    and normaliser, all in at least float32; latents (d values and g shares each) are in the model's
    dtype. An iteration with g = 1 has no open chunk. Lengths and other bookkeeping are left out."""
    d, wide = config.hidden_size, max(bytes_per_value, 4)
    softmax = 2 if config.downscale == "self_aggregation" else 0
    return FixedBytes(
        pooling=tuple((d + softmax) * wide * (it.chunk > 1) for it in config.iterations),
        latents=tuple(it.ring * (d + it.chunk) * bytes_per_value for it in config.iterations),
    )
