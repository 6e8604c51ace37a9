"""Counts come from the configuration and equal the built model's, the machine's and the paper's."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from spiralformer import SpiralConfig, SpiralFormer, accounting, costs, paper, presets
from spiralformer.accounting import OURS, PAPER, Convention
from spiralformer.commands.count import table1
from spiralformer.model import blocks, operators, topology

SIZES = {"hidden_size": 32, "num_heads": 4, "vocab_size": 64}


def make(layout: str, **fields) -> SpiralConfig:
    return SpiralConfig(**{"layout": layout, **SIZES, **fields})


VARIANTS = [
    make("3"),
    make("2", norm="layernorm", intermediate_size=40, parallel_residual=False),
    make("1+2x{1,1}+1", topology="anchor"),
    make("0+1x{1}+0", topology="none", tie_embeddings=True),
    make("1+2+1+1"),
    make("1+1x{1/8,1/4,1/2,1}+1"),
    make("1+1x{1/8,1/4,1/2,1}+1", topology="anchor", rotary_fraction=0),
    make("1+1x{1/8,1/4,1/2,1}+1", shift="parallel", offset="zero", mesh_slots=3),
    make("1+1x{1/16,1/8,1/4,1/2}+1", scale_embeddings=False),
    make("0+2x{1/7,1/3,1}+1", downscale="mean"),
    make("1+1x{1/3,1/9}+0", upscale="uniform", offset=[2, 0], shift=[5, 8]),
    make("1+1x{1,1/5}+0", downscale="mean", upscale="uniform", topology="none"),
    *(make("1+1x{1/4,1/3,1}+1", downscale=name) for name in costs.DOWNSCALE),
    *(make("1+1x{1/4,1/3,1}+1", upscale=name) for name in costs.UPSCALE),
    *(make("1+1x{1/4,1/3,1}+1", topology=name) for name in costs.TOPOLOGY),
]
variants = pytest.mark.parametrize("config", VARIANTS, ids=lambda c: f"{c.layout}-{c.topology}")


# ---------------------------------------------------------------------------- the paper


@pytest.mark.parametrize("name", paper.TABLE_1)
def test_every_counted_cell_of_table_1_comes_out_to_the_printed_digit(name):
    config, printed = presets.preset(name), paper.TABLE_1[name]
    p = accounting.parameters(config, PAPER)
    assert f"{p.total / 1e6:.1f}" == f"{printed.total_params:.1f}"
    assert f"{p.non_embedding / 1e6:.1f}" == f"{printed.non_embedding_params:.1f}"
    flops = accounting.forward_flops(config, 4096, PAPER).total
    assert f"{flops / 1e12:.2f}" == f"{printed.flops:.2f}"


def test_table_1_has_22_rows_and_66_counted_cells():
    table = table1()
    assert (len(table["rows"]), table["rows_agreeing"]) == (22, 22)
    assert (table["cells"], table["cells_agreeing_paper"]) == (66, 66)
    assert table["cells_agreeing_ours"] < 66  # the two conventions do differ


def test_the_papers_convention_is_the_formula_of_the_design():
    """12d² + 13d per layer and 24d²n + 4n²d + 6Hn² + 19dn FLOPs, at any width and length."""
    config = make("5", norm="rmsnorm")
    d, heads, vocab, n = 32, 4, 64, 50
    p = accounting.parameters(config, PAPER)
    assert p.non_embedding == 5 * (12 * d * d + 13 * d) + 2 * d
    assert p.total == p.non_embedding + 2 * vocab * d + 2 * d * d
    layer = 24 * d * d * n + 4 * n * n * d + 6 * heads * n * n + 19 * d * n
    assert accounting.forward_flops(config, n, PAPER).total == 5 * layer + 2 * vocab * d * n


def test_the_printed_averages_are_the_means_of_the_printed_tasks():
    """A slip of a digit in our copy of Table 3 would show here. The paper's own rounding is off by
    at most 0.01, but for one row."""
    off = {}
    for key, row in paper.TABLE_3.items():
        assert len(row.tasks) == len(paper.TASKS)
        if abs(sum(row.tasks) / len(row.tasks) - row.average) > 0.0101:
            off[key] = row.average
    assert off == {("looped-410m-mesh", 5): 45.56}


def test_tables_1_2_and_3_agree_where_they_overlap():
    shared = set(paper.TABLE_1) & set(paper.TABLE_2)
    assert shared == {"spiral-b-410m-mesh", "spiral-b-410m-anchor"}
    for name in shared:
        assert paper.TABLE_1[name].quality == paper.TABLE_2[name]
    differing = set()
    for (name, shots), row in paper.TABLE_3.items():
        quality = paper.TABLE_1[name].quality
        if row.average != (quality.five_shot if shots else quality.zero_shot):
            differing.add((name, shots))
    assert differing == {("pythia-1.4b-mesh", 0), ("pythia-1.4b-mesh", 5)}
    printed = {(name, shots) for name in paper.TABLE_1 for shots in (0, 5)}
    assert printed - set(paper.TABLE_3) == {("spiral-l-1b-mesh", 0), ("spiral-l-1b-mesh", 5)}
    assert set(paper.TABLE_3) <= printed


# ---------------------------------------------------------------------------- presets


def test_everything_that_the_paper_printed_has_a_preset():
    assert set(paper.TABLE_1) | set(paper.TABLE_2) <= set(presets.names())


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ("fine-to-coarse", {"layout": "4+8x{1,1/2,1/4,1/8}+4"}),
        ("parallel", {"shift": "parallel"}),
        ("zero-offset", {"offset": "zero"}),
        ("mean", {"downscale": "mean"}),
        ("uniform", {"upscale": "uniform"}),
        ("mean-uniform", {"downscale": "mean", "upscale": "uniform"}),
    ],
)
def test_an_ablation_makes_its_change_and_no_other(change, fields):
    main = presets.preset("spiral-b-410m-mesh").to_dict()
    ablated = presets.preset(f"spiral-b-410m-mesh-{change}").to_dict()
    assert {k: v for k, v in ablated.items() if main[k] != v} == fields


# ---------------------------------------------------------------------------- the built model


def built(config: SpiralConfig) -> SpiralFormer:
    with torch.device("meta"):
        return SpiralFormer(config)


def size(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", presets.names())
def test_parameters_counted_are_parameters_built_for_every_preset(name):
    config = presets.preset(name)
    assert accounting.parameters(config).total == size(built(config))


@variants
def test_parameters_counted_are_parameters_built_part_by_part(config):
    model, counted = built(config), accounting.parameters(config)
    assert counted.total == size(model)
    assert counted.embedding == model.embedding.weight.numel()
    assert counted.pre == size(model.pre)
    assert counted.cores == tuple(size(core) for core in model.cores)
    assert counted.post == size(model.post)
    assert counted.final_norm == size(model.norm)
    assert counted.downscale == tuple(size(scaling.downscale) for scaling in model.scalings)
    assert counted.upscale == tuple(size(scaling.upscale) for scaling in model.scalings)
    assert counted.topology == size(model.topology)
    assert counted.head == (0 if config.tie_embeddings else model.head.weight.numel())
    assert counted.unexplained == 0


def test_every_name_that_has_a_cost_has_a_module():
    for named, built in (
        (costs.DOWNSCALE, operators.DOWNSCALE),
        (costs.UPSCALE, operators.UPSCALE),
        (costs.TOPOLOGY, topology.TOPOLOGY),
        (costs.NORM, blocks.NORM),
    ):
        assert list(named) == list(built)


def measured(config: SpiralConfig, length: int) -> tuple[int, int]:
    """Matmul and attention FLOPs that PyTorch's counter sees in a real forward pass."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(q, k, v, *args, out_shape=None, **kwargs) -> int:  # shapes (B, H, n, K)
        return 2 * math.prod(q) * k[-2] + 2 * math.prod(q[:-1]) * k[-2] * v[-1]

    model = SpiralFormer(config).eval()
    counter = FlopCounterMode(display=False, custom_mapping={flash: attention})
    with counter, torch.no_grad():
        model(torch.randint(config.vocab_size, (1, length)))
    counts = counter.get_flop_counts()["Global"]
    seen = counts.pop(flash, 0)
    return sum(counts.values()), seen


@variants
@pytest.mark.parametrize("length", [1, 3, 20, 64])
def test_flops_counted_are_flops_measured(config, length):
    counted = accounting.forward_flops(config, length).flops
    assert (counted.matmul, counted.attention) == measured(config, length)


# ---------------------------------------------------------------------------- consistency


@variants
@pytest.mark.parametrize("convention", Convention)
def test_parts_add_up(config, convention):
    forward = accounting.forward_flops(config, 37, convention)
    assert forward.total == sum(p.flops.total for p in forward.parts)
    assert forward.of("core") == sum(
        (forward.of("core", iteration=it.index) for it in config.iterations), accounting.Flops()
    )
    assert forward.flops == forward.of(*{p.part for p in forward.parts})
    cores = [p.entries for p in forward.parts if p.part == "core"]
    entries = [37 // it.chunk if convention is PAPER else it.chunks(37) for it in config.iterations]
    assert cores == entries


def test_a_compressed_iteration_costs_less_by_its_resolution():
    config = make("0+2x{1/4,1}+0", offset="zero")
    forward = accounting.forward_flops(config, 64)
    coarse, fine = (forward.of("core", iteration=t) for t in (0, 1))
    assert (4 * coarse.matmul, 16 * coarse.attention) == (fine.matmul, fine.attention)


@variants
def test_training_costs_three_forward_passes(config):
    forward = accounting.forward_flops(config, 20, OURS).flops
    per_token = accounting.training_flops_per_token(config, 20)
    assert per_token * 20 == pytest.approx(3 * (forward.matmul + forward.attention), rel=1e-12)


# ---------------------------------------------------------------------------- decoding


def test_the_papers_schedule_runs_1_875_passes_per_token_and_never_more_than_two():
    cost = accounting.decode_cost(presets.preset("spiral-b-410m-mesh"))
    assert (cost.period, cost.mean_passes) == (8, Fraction(15, 8))
    assert cost.histogram == cost.batch_histogram == {1: 1, 2: 7}
    zero = accounting.decode_cost(presets.preset("spiral-b-410m-mesh-zero-offset"))
    assert zero.histogram == {1: 4, 2: 2, 3: 1, 4: 1}  # nested: all four at i ≡ 7
    large = accounting.decode_cost(presets.preset("spiral-l-410m-mesh"))
    assert large.histogram == {0: 1, 1: 15}
    assert accounting.decode_cost(presets.preset("looped-410m-mesh")).histogram == {2: 1}
    assert accounting.decode_cost(presets.preset("pythia-410m")).histogram == {0: 1}


def test_in_the_parallel_regime_the_core_runs_once_per_token():
    parallel = presets.preset("spiral-b-410m-mesh-parallel")
    cost = accounting.decode_cost(parallel)
    assert cost.batch_histogram == {1: 8}
    assert cost.histogram == {1: 1, 2: 7}
    assert accounting.batches_at(parallel, 3) == ((0, 3),)
    overlap = presets.preset("spiral-b-410m-mesh")
    assert accounting.batches_at(overlap, 3) == ((0,), (3,))
    # A coarse pass after the full-resolution one waits for it: what it pools depends on it.
    late = presets.preset("spiral-b-410m-mesh-fine-to-coarse").replace(shift="parallel")
    assert accounting.batches_at(late, 3) == ((0,), (3,))


@variants
def test_passes_are_those_of_brute_force(config):
    """Counted over real sequences: a pass at i is a chunk that exists with i + 1 tokens but not
    with i."""
    cost = accounting.decode_cost(config)
    passes = []
    for i in range(3 * cost.period):
        new = [t.index for t in config.iterations if t.chunks(i + 1) > t.chunks(i)]
        assert accounting.passes_at(config, i) == tuple(new)
        batches = accounting.batches_at(config, i)
        assert [t for batch in batches for t in batch] == new
        for batch in batches:  # only the last of a batch may be one that its own token waits for
            assert all(config.iterations[t].reads_only_past for t in batch[:-1])
        passes.append(len(new))
    for start in (0, cost.period, cost.period + 1):
        window = Counter(passes[start : start + cost.period])
        assert dict(window) == cost.histogram
    assert Fraction(sum(passes), len(passes)) == cost.mean_passes
    assert cost.mean_batches <= cost.mean_passes


def test_a_pass_waits_for_an_iteration_that_reads_what_it_completes():
    config = make("0+1x{1/2,1/4,1/2}+0", offset="zero", shift=[2, 3, 2])
    assert config.pass_groups == ((0, 1), (2,))
    assert accounting.decode_cost(config).mean_batches == 1


def test_a_period_that_never_ends_is_cut_short():
    config = make("0+1x{1/101,1/103,1/107}+0")
    cost = accounting.decode_cost(config)
    assert cost.period == 101 * 103 * 107
    assert cost.positions == sum(cost.histogram.values()) == accounting.LONGEST_PERIOD


def test_weights_read_follow_the_runs_of_the_core():
    overlap, parallel = (presets.preset(f"spiral-b-nano-mesh{x}") for x in ("", "-parallel"))
    p = accounting.parameters(overlap)
    once = p.pre + p.post + p.final_norm + p.head
    assert accounting.weights_read_per_token(overlap) == once + 1.875 * p.cores[0]
    assert accounting.weights_read_per_token(parallel) == once + p.cores[0]
    untied = presets.preset("pythia-nano-mesh")
    q = accounting.parameters(untied)
    assert accounting.weights_read_per_token(untied) == q.total - q.embedding - q.topology


def test_decode_flops_are_what_one_more_token_adds_to_the_matmuls_of_the_layers():
    """Over a whole period from a whole number of chunks, so that every phase occurs once."""
    config = make("1+2x{1/4,1/2,1}+1", offset="zero", topology="none")
    length, period = 64, 4

    def linear(n: int) -> int:
        forward = accounting.forward_flops(config, n)
        return forward.of("pre", "core", "post", "head").matmul

    per_token = accounting.decode_flops_per_token(config, length)
    d = config.hidden_size
    attention = (
        4 * d * (2 * length + sum(2 * it.chunks(length) / it.chunk for it in config.iterations))
    )
    assert per_token - attention == (linear(length + period) - linear(length)) / period


# ---------------------------------------------------------------------------- cache


@variants
@pytest.mark.parametrize("length", [1, 3, 20])
def test_kv_bytes_are_the_keys_and_values_that_a_forward_pass_computes(config, length):
    """The K and V outputs of every layer, seen by hooks."""
    model = SpiralFormer(config).eval()
    seen: list[int] = []
    for stack in model.stacks():
        for block in stack.blocks:
            block.attention.qkv.register_forward_hook(
                lambda module, args, out: seen.append(out.numel() * 2 // 3)
            )
    with torch.no_grad():
        model(torch.randint(config.vocab_size, (1, length)))
    for width in (2, 4):
        assert accounting.kv_bytes(config, length, width).total == width * sum(seen)


def test_kv_bytes_say_which_part_holds_what():
    config = make("3+2x{1/8,1/4,1/2,1}+1")
    cache = accounting.kv_bytes(config, 20, 2)
    entry = 2 * 32 * 2
    assert (cache.pre, cache.post) == (3 * 20 * entry, 20 * entry)
    # (20 + ω) // g: 24 // 8, 22 // 4, 21 // 2, 20
    assert cache.iterations == tuple(2 * n * entry for n in (3, 5, 10, 20))
    assert cache.total == cache.pre + sum(cache.iterations) + cache.post


def test_the_fixed_part_is_an_open_sum_and_a_ring_for_each_coarse_iteration():
    overlap = accounting.fixed_bytes(make("0+1x{1/8,1/2,1}+0"), 2)
    assert overlap.chunks == (34 * 4, 34 * 4, 0)  # sum, maximum and normaliser in float32
    assert overlap.latents == ((32 + 8) * 2, (32 + 2) * 2, 0)  # with the shares of each member
    late = accounting.fixed_bytes(make("0+1x{1/8,1/2,1}+0", shift=[8, 3, 0]), 2)
    assert late.latents == ((32 + 8) * 2, 2 * (32 + 2) * 2, 0)
    mean = accounting.fixed_bytes(make("0+1x{1/8,1/2,1}+0", downscale="mean"), 8)
    assert mean.chunks == (32 * 8, 32 * 8, 0)
    shifted = accounting.fixed_bytes(make("0+1x{1,1}+0", shift=[2, 0]), 4)
    assert (shifted.chunks, shifted.latents) == ((0, 0), (2 * (32 + 1) * 4, 0))
    assert accounting.fixed_bytes(make("4"), 2).total == 0


@given(st.integers(1, 500))
def test_decoding_fills_the_cache_one_pass_at_a_time(length):
    config = make("1+1x{1/7,1/3,1/2,1}+1", shift="parallel")
    passes = Counter(t for i in range(length) for t in accounting.passes_at(config, i))
    per_pass = 2 * config.hidden_size * 4
    cache = accounting.kv_bytes(config, length, 4)
    assert cache.iterations == tuple(passes[it.index] * per_pass for it in config.iterations)
