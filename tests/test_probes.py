"""Laws of the probes: closed forms, fidelity to the model, means, figures, and plain speaking."""

import base64
import dataclasses
import json
import math
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from fractions import Fraction
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spiralformer import SpiralConfig, SpiralFormer
from spiralformer.cli import main
from spiralformer.commands.probe import summary
from spiralformer.data.shards import write_index
from spiralformer.data.tokenizer import byte_tokenizer
from spiralformer.errors import UserError
from spiralformer.model.operators import DOWNSCALE, UPSCALE, causal_shift, to_grid
from spiralformer.model_folder import save_model
from spiralformer.plots import to_bytes
from spiralformer.probes import capture, measure, metrics, page
from spiralformer.probes import figures as drawings
from spiralformer.probes import sequences as windows
from spiralformer.probes.capture import attention_rows, mesh_routing, watching
from spiralformer.probes.measure import probe
from spiralformer.probes.result import ModelResult, ProbeResult, judge, overall
from tests.strategies import VOCAB, build, configs, tokens

SIZES = {"hidden_size": 16, "num_heads": 2, "max_length": 64, "intermediate_size": 24}
SPIRAL = SpiralConfig(layout="1+2x{1/4,1/2,1}+1", vocab_size=VOCAB, **SIZES)


def of_matrix(attention: np.ndarray, window: int, block: int | None = None) -> tuple[float, float]:
    """Entropy and LAM of one hand-built matrix."""
    rows = torch.from_numpy(attention)[None]
    blocks = rows.split(block or len(attention), dim=1)
    entropy, local_mass = metrics.attention_metrics(blocks, len(attention), window)
    return entropy.item(), local_mass.item()


# ---------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("n", [2, 3, 7, 40])
@pytest.mark.parametrize("window", [1, 4, 32])
def test_metrics_equal_closed_forms_on_hand_built_attention(n, window):
    diagonal = np.eye(n)
    assert of_matrix(diagonal, window) == pytest.approx((1, 0))  # itself is not its neighbourhood
    first = np.zeros((n, n))
    first[:, 0] = 1
    assert of_matrix(first, window) == pytest.approx((0, min(window, n - 1) / n))
    previous = np.eye(n, k=-1)
    previous[0, 0] = 1
    entropy = (-2 / n * math.log(2 / n) + (n - 2) / n * math.log(n)) / math.log(n)
    assert of_matrix(previous, window) == pytest.approx((entropy, (n - 1) / n))
    uniform = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    marginal = [sum(1 / (q + 1) for q in range(k, n)) / n for k in range(n)]
    entropy = -sum(p * math.log(p) for p in marginal) / math.log(n)
    local = sum(min(window, q) / (q + 1) for q in range(n)) / n
    assert of_matrix(uniform, window) == pytest.approx((entropy, local))
    assert metrics.uniform_reference(n, window) == pytest.approx((entropy, local))


@given(st.integers(2, 30), st.integers(1, 12), st.integers(1, 30), st.integers(0, 99))
def test_metrics_equal_an_independent_computation_on_random_attention(n, window, block, seed):
    weights = np.random.default_rng(seed).exponential(size=(n, n)) ** 3
    attention = np.tril(weights) / np.tril(weights).sum(1, keepdims=True)
    local = 0.0
    for q in range(n):
        for k in range(n):
            if q - window <= k < q:
                local += attention[q, k] / n
    p = attention.mean(axis=0)
    entropy = sum(-x * math.log(x) for x in p / p.sum() if x > 0) / math.log(n)
    assert of_matrix(attention, window, block) == pytest.approx((entropy, local), abs=1e-12)


def test_the_window_follows_the_resolution_exactly():
    expected = {"1": 32, "1/2": 16, "1/8": 4, "1/3": 11, "1/7": 5, "1/64": 1}
    assert {r: metrics.window(Fraction(r)) for r in expected} == expected


def test_dynamic_heads_are_the_top_forty_percent():
    delta = np.random.default_rng(0).permutation(128).reshape(8, 16) / 128
    chosen = metrics.dynamic_heads(delta)
    assert chosen.sum() == 51
    assert delta[chosen].min() > delta[~chosen].max()
    assert metrics.dynamic_heads(np.array([[0.3, 0.1, 0.2]])).tolist() == [[True, False, False]]
    assert metrics.dynamic_heads(np.array([[0.4, 0.1, 0.2, 0.3]])).sum() == 2  # 1.6, rounded
    assert not metrics.dynamic_heads(np.zeros((2, 3))).any()
    missing = np.array([[0.1, np.nan, 0.2, 0.3, np.nan]])
    assert metrics.dynamic_heads(missing).tolist() == [[False, False, False, True, False]]


def test_cross_loop_range_is_max_less_min_over_the_iterations_that_ran():
    values = np.array([[[0.1, 0.9]], [[0.4, 0.8]], [[0.2, 0.2]]])
    np.testing.assert_allclose(metrics.cross_loop_range(values), [[0.3, 0.7]])
    values[2] = np.nan  # too short a sequence for this iteration
    np.testing.assert_allclose(metrics.cross_loop_range(values), [[0.3, 0.1]])


def test_min_max_follows_the_papers_degenerate_rule():
    np.testing.assert_allclose(metrics.min_max(np.array([[1.0, 2.0, 5.0]])), [[0, 0.25, 1]])
    for degenerate in ([[2.0, 2.0]], [[2.0, 2.0 + 1e-15]], [[1.0, np.nan]], [[1.0, np.inf]]):
        assert (metrics.min_max(np.array(degenerate)) == 0).all()


def test_cka_is_one_for_the_same_state_turned_and_scaled_and_near_zero_for_unrelated_ones():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 100, generator=generator, dtype=torch.float64)  # fewer tokens than width
    turn = torch.linalg.qr(torch.randn(100, 100, generator=generator, dtype=torch.float64))[0]
    other = torch.randn(60, 100, generator=generator, dtype=torch.float64)
    similarity = metrics.cka(metrics.hsic(torch.stack([x, 3 * x @ turn + 5, other])).numpy())
    assert similarity[0, 1] == pytest.approx(1)
    assert abs(similarity[0, 2]) < 0.1  # the plain estimator says 0.6 here


def test_hsic_equals_its_definition_as_a_mean_over_quadruples():
    x, y = torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    k, m = (x @ x.T).numpy(), (y @ y.T).numpy()
    places = range(len(k))
    quadruples = [
        (i, j, q, r)
        for i in places
        for j in places
        for q in places
        for r in places
        if len({i, j, q, r}) == 4
    ]
    total = sum(
        k[i, j] * m[i, j] + k[i, j] * m[q, r] - 2 * k[i, j] * m[i, q] for i, j, q, r in quadruples
    )
    assert metrics.hsic(torch.stack([x, y]))[0, 1].item() == pytest.approx(total / len(quadruples))


def test_an_answer_is_settled_where_it_appears_to_stay():
    predictions = torch.tensor([[5, 1, 2, 7], [5, 9, 3, 7], [5, 9, 2, 8], [5, 9, 3, 7]])
    assert metrics.settled(predictions).tolist() == [0, 1, 3, 3]


# ---------------------------------------------------------------------------- fidelity


@settings(max_examples=40)
@given(configs(), st.integers(1, 30))
def test_captured_attention_is_the_models_own(config, length):
    """Rows sum to one, are causal, n_t × n_t, and weigh the values into the model's own output."""
    model, ids = build(config), tokens(1, length)
    seen = []
    for stack in model.stacks():
        for block in stack.blocks:
            block.attention.attend.register_forward_hook(
                lambda module, args, output: seen.append((*(a[0] for a in args[:3]), output[0]))
            )
    with torch.no_grad(), watching(model, gamma=7) as trace:  # narrower than the sequence
        model(ids)
    layout = config.parsed_layout
    stages = [("pre", layout.pre, length, Fraction(1))]
    stages += [
        (str(each.index), each.layers, each.chunks(length), each.resolution)
        for each in config.iterations
    ]
    stages += [("post", layout.post, length, Fraction(1))]
    expected = [
        (stage, layer, n, r) for stage, layers, n, r in stages if n for layer in range(layers)
    ]
    ran = [
        (stage, layer) for stage, values in trace.attention.items() for layer in range(len(values))
    ]
    assert ran == [(stage, layer) for stage, layer, _, _ in expected]
    for (q, k, v, output), (stage, layer, n, r) in zip(seen, expected, strict=True):
        rows = attention_rows(q, k, 0, n)
        assert rows.shape == (config.num_heads, n, n)
        torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))
        assert (rows.triu(1) == 0).all()
        torch.testing.assert_close(rows @ v, output, rtol=0, atol=1e-12)
        entropy, local_mass = trace.attention[stage][layer]
        for head in range(config.num_heads):
            wanted = of_matrix(rows[head].numpy(), math.ceil(7 * r))
            got = (entropy[0, head].item(), local_mass[0, head].item())
            assert got == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["1+2x{1/4,1/3,1}+1", "1+1+2+1", "3"])
def test_the_probe_does_not_change_the_models_output_by_a_bit(layout, dtype):
    model = build(SPIRAL.replace(layout=layout), dtype=dtype)
    ids = tokens(2, 50)
    before = model(ids)
    with watching(model):
        during = model(ids)
    assert torch.equal(before, during)
    assert torch.equal(before, model(ids))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@settings(max_examples=25)
@given(configs(), st.integers(1, 30))
def test_the_trace_holds_the_loops_states_and_updates(config, length):
    """The states are rebuilt from the updates by each topology's own equation."""
    model, ids = build(config), tokens(2, length)
    with torch.no_grad(), watching(model) as trace:
        logits = model(ids)
        torch.testing.assert_close(model.head(trace.out), logits)
        assert len(trace.states) == config.num_iterations + 1
        if config.topology == "mesh":
            terms = torch.stack([trace.x, trace.v, *trace.updates], -1)
            routes = mesh_routing(model, trace)
            for state, (_, _, weights) in zip(trace.states, routes, strict=True):
                rebuilt = (terms[..., : weights.shape[-1]] * weights[..., None, :]).sum(-1)
                torch.testing.assert_close(rebuilt, state, rtol=0, atol=1e-11)
        else:
            base = trace.v if config.topology == "anchor" else 0
            for state, update in zip(trace.states[1:], trace.updates, strict=True):
                torch.testing.assert_close(base + update, state, rtol=0, atol=1e-12)


def test_the_lens_at_the_last_state_is_the_models_own_answer():
    model, ids = build(SPIRAL), tokens(3, 40)
    result = probe(model, list(ids))
    with torch.no_grad():
        logits = model(ids)[:, :-1]
    own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    right = (logits.argmax(-1) == ids[:, 1:]).double().mean().item()
    assert result["loss"]["mean"] == pytest.approx(own)
    assert result["lens"]["loss"][-1] == pytest.approx(own)
    assert result["lens"]["accuracy"][-1] == pytest.approx(right)
    assert result["lens"]["settled"].sum() == pytest.approx(1)


@pytest.mark.parametrize("config", [SPIRAL, SPIRAL.replace(layout="2")], ids=["loop", "plain"])
def test_a_line_is_read_as_the_model_reads_it(config):
    """By the last state; by the state before the loop, as post and head alone would."""
    model, ids = build(config), tokens(1, 20)[0]
    line = measure.read_line(model, ids, str)
    assert line["tokens"] == [str(token) for token in ids.tolist()]
    with torch.no_grad(), watching(model) as trace:
        own = model(ids[None])
        early = model.head(model.norm(model.post(trace.states[0])))
    for row, logits in ((-1, own), (0, early)):
        shares = logits[0, :-1].softmax(-1)
        assert line["answers"][row] == [str(token) for token in shares.argmax(-1).tolist()]
        given = shares.gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(line["probability"][row], given.numpy(), rtol=1e-6)
    assert len(line["answers"]) == 1 + config.num_iterations


def test_a_lens_on_some_positions_sees_the_same_as_on_all(monkeypatch):
    """Those positions are a fixed draw, so fixed states give a part of the whole answer."""
    model, ids = build(SPIRAL), tokens(1, 60)
    monkeypatch.setattr(metrics, "LENS_POSITIONS", 20)
    monkeypatch.setattr(metrics, "CKA_POSITIONS", 20)
    result = probe(model, list(ids))
    chosen = metrics.positions(59, 20)
    assert len(set(chosen.tolist())) == 20
    assert set((chosen % 4).tolist()) == {0, 1, 2, 3}  # every place of a chunk
    with torch.no_grad():
        logits = model(ids)[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert result["lens"]["loss"][-1] == pytest.approx(losses[chosen].mean().item())
    assert result["loss"]["mean"] == pytest.approx(losses.mean().item())  # this one is of all
    assert np.isfinite(result["cka"]).all()


def test_blocks_of_queries_do_not_change_the_metrics(monkeypatch):
    model, ids = build(SPIRAL), tokens(1, 50)
    whole = probe(model, list(ids))
    monkeypatch.setattr(capture, "BLOCK", 300)
    for stage, values in probe(model, list(ids))["attention"].items():
        for metric, heads in values.items():
            np.testing.assert_allclose(heads, whole["attention"][stage][metric], atol=1e-13)


# ---------------------------------------------------------------------------- means


def flat(value, path="") -> dict[str, np.ndarray]:
    if isinstance(value, ModelResult):
        value = value.values
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    elif isinstance(value, (float, np.ndarray)):
        return {path: np.asarray(value)}
    else:
        return {}
    flattened = (flat(item, f"{path}/{name}") for name, item in items if name != "each")
    return {name: values for part in flattened for name, values in part.items()}


def test_means_do_not_depend_on_the_order_of_sequences_or_on_batching():
    model = build(SPIRAL)
    sequences = [*tokens(5, 40), *tokens(2, 23, seed=1), *tokens(1, 3, seed=2)]
    plain = flat(probe(model, sequences))
    shuffled = flat(probe(model, [sequences[i] for i in (4, 7, 0, 6, 2, 1, 5, 3)]))
    batched = flat(probe(model, sequences, batch=3))
    assert len(plain) > 40
    for name, values in plain.items():
        if name.startswith("/attention"):
            np.testing.assert_array_equal(shuffled[name], values, err_msg=name)
        np.testing.assert_allclose(shuffled[name], values, rtol=1e-12, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(batched[name], values, rtol=1e-9, atol=1e-11, err_msg=name)


def test_a_mean_over_sequences_is_the_mean_of_each_ones_value():
    model, ids = build(SPIRAL), tokens(4, 40)
    together = probe(model, list(ids))
    each = [probe(model, [row]) for row in ids]
    for stage in ("pre", "0", "1", "2", "post"):
        wanted = np.mean([f["attention"][stage]["entropy"] for f in each], axis=0)
        np.testing.assert_allclose(together["attention"][stage]["entropy"], wanted)
    wanted = np.mean([f["updates"]["size"] for f in each], axis=0)
    np.testing.assert_allclose(together["updates"]["size"], wanted)


# ---------------------------------------------------------------------------- beyond the paper


def test_update_sizes_leave_out_the_tokens_that_no_update_reaches():
    model, ids = build(SPIRAL.replace(topology="anchor")), tokens(1, 21)
    with torch.no_grad(), watching(model) as trace:
        model(ids)
    result = probe(model, list(ids))["updates"]
    for iteration, update in zip(SPIRAL.iterations, trace.updates, strict=True):
        h, after = trace.states[iteration.index][0], trace.states[iteration.index + 1][0]
        reached = range(iteration.shift, 21)
        sizes = [(update[0, i].norm() / h[i].norm()).item() for i in reached]
        changes = [((after[i] - h[i]).norm() / h[i].norm()).item() for i in reached]
        assert result["size"][iteration.index] == pytest.approx(np.mean(sizes))
        assert result["change"][iteration.index] == pytest.approx(np.mean(changes))


def test_aggregation_is_seen_by_place_and_by_token():
    model = build(SPIRAL.replace(layout="0+1x{1/4}+0", topology="none"))
    ids = torch.randint(0, 8, (30, 42), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # token 5 gets far more weight than any other
        model.scalings[0].downscale.scorer.weight.copy_(3 * model.embedding.weight[5])
        model.embedding.weight[:8] -= model.embedding.weight[:8].mean(0)
    result = probe(model, list(ids))["aggregation"][0]
    lifts = {text: lift for text, lift, _ in result["tokens"]}
    assert max(lifts, key=lifts.get) == "#5"

    h = model.embed(ids).detach()
    scores = (h @ model.scalings[0].downscale.scorer.weight[0]).detach()
    sums, lift_of_5 = np.zeros(4), []
    for row, score in zip(ids, scores, strict=True):
        for start in range(2, 42, 4):  # ω = 2: the first chunk is short and left out
            alpha = score[start : start + 4].softmax(0)
            sums += alpha.numpy() / (30 * 10)
            lift_of_5 += [4 * a.item() for a, t in zip(alpha, row[start:], strict=False) if t == 5]
    np.testing.assert_allclose(result["mean"], sums)
    assert lifts["#5"] == pytest.approx(np.mean(lift_of_5))


@pytest.mark.parametrize("upscale", UPSCALE)
@pytest.mark.parametrize("downscale", DOWNSCALE)
def test_the_weights_of_every_operator_rebuild_what_it_did(downscale, upscale):
    """Latents from α and updates from β, for whatever operators there are."""
    config = SPIRAL.replace(layout="1+1x{1/4,1}+1", downscale=downscale, upscale=upscale)
    model, ids = build(config), tokens(2, 43)
    [iteration, full], [scaling, _] = config.iterations, model.scalings
    pooled = []
    scaling.downscale.register_forward_hook(lambda module, args, output: pooled.append(output))
    with torch.no_grad(), watching(model) as trace:
        model(ids)
        alpha = capture.aggregation_weights(model, trace, 0)
        beta = capture.allocation_weights(model, trace, 0)
        learned = [any(True for _ in each.parameters()) for each in scaling.children()]
        assert [alpha is not None, beta is not None] == learned
        if alpha is not None:
            members, real = to_grid(trace.states[0], iteration)
            assert (alpha[:, ~real] == 0).all()
            values = scaling.downscale.value(members)
            torch.testing.assert_close((alpha[..., None] * values).sum(2), pooled[0])
        if beta is not None:
            shared = math.sqrt(4) * beta[..., None] * trace.latents[0][:, :, None]
            update = causal_shift(shared.flatten(1, 2)[:, iteration.offset :], iteration.shift, 43)
            torch.testing.assert_close(update, trace.updates[0])
        assert capture.aggregation_weights(model, trace, full.index) is None
        assert capture.allocation_weights(model, trace, full.index) is None


def test_allocation_is_the_softmax_of_the_router_on_the_latents():
    model, ids = build(SPIRAL), tokens(1, 40)
    latents = []
    upscale = model.scalings[0].upscale
    upscale.register_forward_pre_hook(lambda module, args: latents.append(args[0]))
    profile = probe(model, list(ids))["allocation"][0]
    with torch.no_grad():
        beta = torch.softmax(latents[0] @ upscale.router.weight.T + upscale.router.bias, -1)
    whole = beta[0, 1:]  # ω = 2: the first chunk is short and left out
    np.testing.assert_allclose(profile["mean"], whole.mean(0))
    np.testing.assert_allclose(profile["spread"], whole.std(0, correction=0))


def test_an_operator_that_says_nothing_of_its_weights_is_probed_all_the_same():
    """A class of its own name, learned, without `weights`, `allocation` or `route`."""

    class First(torch.nn.Linear):
        def forward(self, h):
            return super().forward(h[:, ::4][:, : h.shape[1] // 4])

    class Repeat(torch.nn.Linear):
        def forward(self, z, h):
            return super().forward(z).repeat_interleave(4, 1)

    model = build(SPIRAL.replace(layout="0+1x{1/4,1}+0", offset="zero", topology="anchor"))
    model.scalings[0].downscale = First(16, 16).double()
    model.scalings[0].upscale = Repeat(16, 16).double()
    result = probe(model, list(tokens(2, 40)))
    assert result["aggregation"] == result["allocation"] == [None, None]
    assert np.isfinite(result["updates"]["size"]).all()


def test_mesh_routing_weights_are_distributions_over_slots():
    result = probe(build(SPIRAL), list(tokens(3, 40)))["routing"]
    for key in ("write", "read"):
        assert result[key].shape == (4, 6)
        np.testing.assert_allclose(result[key].sum(1), 1)
    np.testing.assert_allclose(result["share"].sum(1), 1)
    assert (np.triu(result["coefficients"], 2) == 0).all()  # a state knows no later update
    np.testing.assert_allclose(result["coefficients"][:, 0], result["read"][:, 0])  # x is in slot 0


def test_loss_by_place_finds_a_cost_where_it_was_planted():
    grids = [(4, 2)]
    losses = torch.tensor([3.0 if (i + 2) % 4 == 1 else 1.0 for i in range(39)]).double()
    loss = measure.Loss(measure.Run(build(SPIRAL), 32, grids, str))
    excess = loss.by_place(losses[None])["phase/4/2"][0]
    np.testing.assert_allclose(excess, [-0.5, 1.5, -0.5, -0.5])


def test_the_control_is_held_against_the_model_sequence_by_sequence():
    ids, grids = list(tokens(6, 40)), [(4, 2)]
    models = [probe(build(SPIRAL, seed), ids, grids=grids) for seed in (0, 1)]
    numbers = ProbeResult("text", models, [], 32)
    numbers.compare_losses()
    phase, other = (result["loss"]["phases"][0] for result in models)
    difference = phase["each"] - other["each"]
    assert difference.shape == (6, 4)
    np.testing.assert_allclose(phase["against"], phase["excess"] - other["excess"], atol=1e-12)
    error = difference.std(axis=0, ddof=1) / math.sqrt(6)
    np.testing.assert_allclose(phase["against_error"], error)


# ---------------------------------------------------------------------------- the verdict


def made_up(values: np.ndarray, layout: str = "0+1x{1/4,1/2,1}+0") -> ModelResult:
    """The result of a model with 16 heads, whose entropies and LAMs are these (T, heads)."""
    config = SPIRAL.replace(layout=layout, hidden_size=64, num_heads=16, rotary_fraction=0.5)
    result = probe(build(config), [tokens(64)])
    for t, row in enumerate(values):
        result["attention"][str(t)] = {"entropy": row[None], "local_mass": row[None]}
    return result


def test_the_verdict_follows_its_rule():
    noise = 0.02 * np.random.default_rng(0).standard_normal(16)

    def words(*means: float, layout: str = "0+1x{1/4,1/2,1}+0") -> tuple[str, str]:
        rows = np.array([m + noise * (1 + t) for t, m in enumerate(means)])
        result = made_up(rows, layout)
        return judge(result, "entropy", "all").word, judge(result, "local_mass", "all").word

    assert words(0.8, 0.6, 0.5) == ("yes", "opposite")
    assert words(0.8, 0.85, 0.5) == ("partly", "opposite")
    assert words(0.2, 0.5, 0.8) == ("opposite", "yes")
    assert words(0.2, 0.1, 0.8) == ("opposite", "partly")
    assert words(0.5, 0.5, 0.501) == ("no", "no")
    assert words(0.5, 0.6, 0.8, layout="0+1x{1,1/2,1/4}+0") == ("yes", "opposite")  # by resolution
    assert words(0.5, layout="0+1x{1}+0") == ("not measured", "not measured")


def test_a_shift_that_uniform_attention_makes_too_is_called_geometry():
    config = SPIRAL.replace(
        layout="0+1x{1/4,1/2,1}+0", hidden_size=64, num_heads=16, rotary_fraction=0.5
    )
    heads = []
    for iteration in config.iterations:
        heads.append(
            metrics.uniform_reference(iteration.chunks(64), metrics.window(iteration.resolution))[1]
        )
    jitter = 1e-3 * np.random.default_rng(0).standard_normal((3, 16))
    result = made_up(np.array(heads)[:, None] + jitter - jitter.mean(1, keepdims=True))
    assert judge(result, "local_mass", "all").word == "geometry"
    assert "does not show" in overall(result)


# ---------------------------------------------------------------------------- figures and report


def save(config: SpiralConfig, folder, seed: int = 0):
    byte_tokenizer().save(folder.parent / "tokenizer")
    return save_model(
        build(config, seed, torch.float32), folder, tokenizer=folder.parent / "tokenizer"
    )


BYTES = SPIRAL.replace(vocab_size=257)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probes")
    save(BYTES, folder / "spiral")
    save(BYTES.replace(layout="1+2x{1,1}+1"), folder / "looped")
    save(BYTES.replace(layout="2"), folder / "plain")
    text = "".join(f"line {i} says {i * i % 97}\n" for i in range(60))
    (folder / "text.txt").write_text(text)
    return folder


def run_probe(out, *arguments):
    assert main(["probe", *map(str, arguments), "--samples", "4", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def probed(place):
    """A SpiralFormer, through the command line."""
    data = ("--data", place / "text.txt", "--length", "48", "--line", "a <b> & c")
    return run_probe(place / "probed", place / "spiral", *data)


@pytest.fixture(scope="module")
def compared(place):
    """A SpiralFormer and its control, in a few of the figures."""
    data = ("--data", place / "text.txt", "--length", "48")
    with pytest.MonkeyPatch.context() as patch:
        few = [d for d in drawings.DRAWINGS if d.name in ("heads", "cka", "chunks")]
        patch.setattr(drawings, "DRAWINGS", few)
        return run_probe(place / "compared", place / "spiral", "--compare", place / "looped", *data)


def files(folder) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_figure_redrawn_from_its_numbers_is_the_same_figure(probed, tmp_path):
    """By the command: every file that it writes again has the same bytes."""
    assert main(["probe", "--redraw", str(probed), "--out", str(tmp_path)]) == 0
    first, again = files(probed), files(tmp_path)
    assert len(first) == 2 * len(drawings.DRAWINGS) + 3  # the diagram, the numbers, the report
    assert first.keys() == again.keys()
    assert [name for name in first if first[name] != again[name]] == []


def test_a_probe_of_a_loaded_folder_equals_one_of_the_model(place, probed):
    """What the command wrote is what the model gives on the same sequences."""
    sample = windows.draw(str(place / "text.txt"), place / "spiral", 257, 4, 48, 0)
    own = flat(probe(build(BYTES, dtype=torch.float32), sample.sequences))
    loaded = ProbeResult.load(probed).models[0]
    assert "".join(loaded.values.pop("line")["tokens"]) == "a <b> & c"
    written = flat(loaded)
    assert len(own) > 40
    assert own.keys() == written.keys()
    for name, values in own.items():
        np.testing.assert_array_equal(written[name], values, err_msg=name)


def test_a_run_that_is_stopped_leaves_every_file_whole(probed, tmp_path, monkeypatch):
    """What stood in the folder stays, or is replaced by a complete file; no scraps."""
    shutil.copytree(probed, tmp_path / "out")
    before = files(tmp_path / "out")

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    assert main(["probe", "--redraw", str(tmp_path / "out")]) != 0
    assert files(tmp_path / "out") == before


def named(name: str) -> drawings.Drawing:
    return next(drawing for drawing in drawings.DRAWINGS if drawing.name == name)


def test_a_control_is_drawn_side_by_side_where_a_figure_applies_to_it(compared):
    def width(name: str) -> float:
        text = (compared / "figures" / f"{name}.svg").read_text()
        return float(re.search(r'width="([\d.]+)pt"', text)[1]) / 72

    assert width("heads") == pytest.approx(2 * named("heads").size[0])
    assert width("chunks") == pytest.approx(named("chunks").size[0])  # the control has no chunks
    page = (compared / "report.html").read_text()
    assert page.count("<img ") == 3


@pytest.mark.parametrize("name", ["shift-all", "profile", "lens", "updates", "position"])
def test_models_side_by_side_have_a_common_scale_that_shows_all_of_both(compared, name):
    drawing = named(name)
    shared, own = [], []

    def draw(canvas, model):
        shared.append(drawing.draw(canvas, model))
        own.append([axis.get_view_interval() for axis in shared[-1]])
        return shared[-1]

    models = ProbeResult.load(compared).models
    drawings.render(dataclasses.replace(drawing, draw=draw), models)
    ends = np.array(own)  # model, axis, end
    assert ends.size
    wanted = np.stack([ends[..., 0].min(0), ends[..., 1].max(0)], -1)
    for axes in shared:
        np.testing.assert_array_equal([axis.get_view_interval() for axis in axes], wanted)


def test_no_bar_of_a_chunk_is_cut_off(probed):
    [model] = ProbeResult.load(probed).models
    even, odd, _ = model["allocation"]
    even |= {"mean": np.full(4, 0.25), "spread": np.zeros(4)}
    odd |= {"mean": np.array([0.0, 1.0]), "spread": np.zeros(2)}
    figure = drawings.render(named("chunks"), [model])
    for ax in figure.subfigs[0].axes:
        assert max(patch.get_height() for patch in ax.patches) < ax.get_ylim()[1]


def test_figures_do_not_depend_on_the_users_matplotlib_settings(compared):
    import matplotlib

    models = ProbeResult.load(compared).models
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "savefig.dpi": 30}):
        figure = drawings.render(named("cka"), models)
        for kind in ("png", "svg"):
            written = (compared / "figures" / f"cka.{kind}").read_bytes()
            assert to_bytes(figure, kind) == written


def test_numbers_are_strict_json_and_come_back_exactly(compared, tmp_path):
    text = (compared / "numbers.json").read_text()
    json.loads(text, parse_constant=pytest.fail)
    numbers = ProbeResult.load(compared)
    numbers.save(tmp_path)
    assert (tmp_path / "numbers.json").read_text() == text
    assert [result.name for result in numbers.models] == ["spiral", "looped"]
    assert numbers.models[0].sequences == 4


def test_the_report_is_well_formed_and_needs_nothing_but_itself(probed):
    text = (probed / "report.html").read_text()
    unclosed = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "img"):
                unclosed.append(tag)

        def handle_endtag(self, tag):
            assert unclosed.pop() == tag, self.getpos()

    Tags().feed(text)
    assert unclosed == []
    assert not re.search(r"<link|<script src|@import|url\(|<iframe|href=", text)
    assert set(re.findall(r"https?://[^\"'\s]*", text)) <= {"http://www.w3.org/2000/svg"}
    pictures = re.findall(r'src="([^"]*)"', text)
    assert len(pictures) == len(drawings.DRAWINGS)
    for picture in pictures:
        kind, content = picture.split(",")
        assert kind == "data:image/svg+xml;base64"
        root = ElementTree.fromstring(base64.b64decode(content))
        assert len(list(root.iter())) > 50
    for drawing in drawings.DRAWINGS:
        assert drawing.title in text


def test_the_verdict_is_told_in_words(compared):
    said = summary(ProbeResult.load(compared))
    assert re.search(r"H, all heads +(yes|no|partly|opposite|geometry) +H goes 0\.\d+ → 0\.", said)
    assert "ΔLAM, the range of a head across the loop" in said


def test_names_with_markup_cannot_break_the_page(compared):
    numbers = ProbeResult.load(compared)
    numbers.models[0].name = "<b>&me</b>"
    assert "<b>&me" not in page.html(numbers, {})


def test_a_probe_is_one_class_and_a_figure_one_function(place, tmp_path, monkeypatch):
    """Nothing else is touched for it to be measured, kept, drawn and shown."""
    monkeypatch.setattr(measure, "PROBES", {**measure.PROBES})
    monkeypatch.setattr(drawings, "DRAWINGS", [])

    class Even(measure.Probe, key="even"):
        def measure(self, trace, ids):
            return {"share": (ids % 2 == 0).double().mean(1)}

    @drawings.drawing("even", "Even tokens", (2, 2))
    def draw(canvas, model):
        """How many tokens are even."""
        canvas.subplots().bar(["even"], [model["even"]["share"]])
        return []

    run_probe(tmp_path, place / "spiral", "--data", place / "text.txt", "--length", "48")
    assert 0 < ProbeResult.load(tmp_path).models[0]["even"]["share"] < 1
    assert {"figures/even.png", "figures/even.svg"} < files(tmp_path).keys()
    assert "How many tokens are even." in (tmp_path / "report.html").read_text()


# ---------------------------------------------------------------------------- which models


@pytest.mark.parametrize(
    ("layout", "topology"),
    [
        ("1+2x{1,1}+0", "anchor"),
        ("0+1x{1/4,1}+0", "none"),
        ("1+2+1+1", "mesh"),
        ("1+2+2+1", "none"),
    ],
)
def test_every_member_of_the_family_can_be_probed(layout, topology):
    config = SPIRAL.replace(layout=layout, topology=topology)
    result = probe(build(config), list(tokens(3, 40)))
    depth = min(config.parsed_layout.cores)
    for metric in ("entropy", "local_mass"):
        assert result.delta(metric).shape == (depth, 2)  # heads are compared by (layer, head)
        assert np.isfinite(result.delta(metric)).all()
        heads = result.heads(metric, "all")
        assert heads.shape == (config.num_iterations, depth * 2)
    assert ("routing" in result) == (topology == "mesh")


# ---------------------------------------------------------------------------- bad input


def run(capsys, *arguments) -> tuple[int, str]:
    code = main(["probe", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_model_without_a_loop_says_which_probes_apply(place, tmp_path, capsys):
    code, said = run(
        capsys, place / "plain", "--data", place / "text.txt", "--samples", 2, "--out", tmp_path
    )
    assert code == 0
    assert "This model has no loop" in said
    assert "not drawn: Logit lens: at which loop does the answer appear?: needs a loop" in said
    written = {p.name for p in (tmp_path / "figures").glob("*.svg")}
    assert written == {"profile.svg", "position.svg", "diagram.svg"}
    assert "What does not apply to plain" in (tmp_path / "report.html").read_text()


def test_a_text_shorter_than_a_chunk_is_probed_as_far_as_it_goes(place, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("ab")  # three tokens with end-of-text, ω = 4, g = 8
    save(BYTES.replace(layout="0+1x{1/8,1}+0"), tmp_path / "model")
    code, said = run(
        capsys, tmp_path / "model", "--data", tmp_path / "short.txt", "--out", tmp_path / "out"
    )
    assert code == 0
    assert "short.txt has only 3 tokens: one sequence of all of them was used" in said
    assert "iteration 0 (resolution 1/8, chunks of 8), in 1 of 1 sequence, ran on nothing" in said
    assert "not measured" in said
    assert "ran on nothing" in (tmp_path / "out" / "report.html").read_text()


def test_fewer_sequences_than_asked_for_are_said_plainly(place):
    sample = windows.draw(str(place / "text.txt"), place / "spiral", 257, 500, 64, 0)
    text = (place / "text.txt").read_bytes()
    assert len(sample.sequences) == (len(text) + 1) // 64
    assert f"500 sequences were asked for; {place / 'text.txt'} has" in sample.notes[0]
    joined = torch.cat(sample.sequences).tolist()
    assert bytes(joined) == text[: len(joined)]


def test_sequences_are_a_fair_draw_that_the_seed_decides(place):
    def drawn(seed: int) -> list[list[int]]:
        sample = windows.draw(str(place / "text.txt"), place / "spiral", 257, 9, 16, seed)
        assert sample.notes == []
        return [ids.tolist() for ids in sample.sequences]

    assert drawn(0) == drawn(0) != drawn(1)
    text = [*(place / "text.txt").read_bytes(), 256]
    everything = [text[i : i + 16] for i in range(0, len(text) - 15, 16)]
    counts = [0] * len(everything)
    for seed in range(60):
        for ids in drawn(seed):
            counts[everything.index(ids)] += 1
    assert min(counts) > 0
    first, second = sum(counts[: len(counts) // 2]), sum(counts[len(counts) // 2 :])
    assert 0.7 < first / second < 1.4


def test_jsonl_and_token_shards_are_read(place, tmp_path):
    lines = [json.dumps({"text": word * 10}) for word in ("one ", "two ")]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    sample = windows.draw(str(tmp_path / "data.jsonl"), place / "spiral", 257, 1, 82, 0)
    assert sample.sequences[0].tolist() == [*b"one " * 10, 256, *b"two " * 10, 256]

    stream = np.arange(100, dtype=np.uint16)
    (tmp_path / "shard.bin").write_bytes(stream.tobytes())
    write_index(tmp_path / "shard.idx", np.array([60, 40]), stream.dtype)
    for name in ("shard", "shard.bin", "shard.idx", "."):
        sample = windows.draw(str(tmp_path / name), place / "spiral", 257, 99, 30, 0)
        assert torch.cat(sample.sequences).tolist() == list(range(90))
    with pytest.raises(UserError, match="has token 89, but the model's vocabulary is 50"):
        windows.draw(str(tmp_path / "shard"), place / "spiral", 50, 99, 30, 0)


def test_the_standard_library_is_always_there(place, monkeypatch):
    monkeypatch.setattr(windows, "CHARACTERS", 200_000)
    sample = windows.draw("stdlib", place / "spiral", 257, 3, 64, 0)
    assert [len(ids) for ids in sample.sequences] == [64] * 3
    assert re.fullmatch(r"only the first \d+,\d+ characters of stdlib .*", sample.notes[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spiral"], "say where to write with --out DIR"),
        ([], "name the folder of a model or of a run to probe"),
        (["nowhere", "--out", "out"], "nowhere: no such folder"),
        (["spiral", "--out", "out", "--samples", "0"], "--samples 0 must be at least 1"),
        (["spiral", "--out", "out", "--length", "1"], "--length 1 must be at least 2"),
        (["spiral", "--out", "out", "--length", "65"], "longer than max_length 64"),
        (["spiral", "--out", "text.txt"], "cannot be written"),
        (["spiral", "--out", "out", "--data", "none.txt"], "none.txt: no such file"),
        (["spiral", "--out", "out", "--data", "empty.txt"], "there is no text in it"),
        (["bare", "--out", "out", "--data", "text.txt"], "has no tokenizer.json"),
        (["spiral", "--out", "out", "--device", "nonsense"], "--device nonsense: cannot be used"),
        (["spiral", "--out", "o", "--line", "a"], "--line has 1 token in the tokenizer of spiral"),
        (["--redraw", "spiral"], "spiral: has no numbers.json"),
        (["--redraw", "damaged"], "damaged"),
        (["spiral", "--redraw", "damaged"], "leave the checkpoints out"),
    ],
)
def test_a_mistake_is_one_plain_line(place, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    (place / "empty.txt").write_text("")
    (place / "damaged").mkdir(exist_ok=True)
    (place / "damaged" / "numbers.json").write_text('{"format": 1, "models": [{"name": 1}]}')
    if "bare" in arguments and not (place / "bare").exists():
        save_model(SpiralFormer(BYTES), place / "bare")
    code, said = run(capsys, *arguments)
    assert code == 2
    assert message in said
    assert "Traceback" not in said
