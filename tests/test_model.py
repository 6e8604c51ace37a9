"""Laws of the model: causality, prefix consistency, equality with the oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spiralformer import SpiralConfig, SpiralFormer, costs, reference
from spiralformer.accounting import parameters
from spiralformer.config import ConfigError, allow_shifts_that_leak_the_future
from spiralformer.decode import Sampling, generate
from spiralformer.model.blocks import attend_in_blocks
from spiralformer.model.loss import CHUNK, IGNORE, linear_cross_entropy, token_losses
from tests.strategies import VOCAB, build, configs, tokens

SMALL = {"hidden_size": 32, "num_heads": 4, "vocab_size": 97, "max_length": 128}
GREEDY = Sampling(temperature=0)
PAPER_B = SpiralConfig(layout="1+2x{1/8,1/4,1/2,1}+1", **SMALL)


def change_after(ids: torch.Tensor, i: int) -> torch.Tensor:
    changed = ids.clone()
    changed[:, i + 1 :] = (changed[:, i + 1 :] + 1) % VOCAB
    return changed


def largest_leak(model: SpiralFormer, length: int) -> float:
    """How far the outputs up to i move when every token after i changes, the worst over i."""
    ids = tokens(1, length)
    worst = 0.0
    with torch.no_grad():
        before = model(ids)
        for i in range(length - 1):
            after = model(change_after(ids, i))
            worst = max(worst, (after[:, : i + 1] - before[:, : i + 1]).abs().max().item())
    return worst


@given(configs(), st.integers(2, 30), st.integers(0, 3))
def test_output_never_depends_on_later_tokens(config, length, seed):
    assert largest_leak(build(config, seed), length) < 1e-10


@pytest.mark.parametrize("topology", ["anchor", "mesh"])
@pytest.mark.parametrize("g", [2, 3, 5, 8])
def test_the_causality_check_catches_the_illegal_shift(topology, g):
    with allow_shifts_that_leak_the_future():
        config = PAPER_B.replace(
            layout=f"1+1x{{1/{g}}}+1", topology=topology, shift=[g - 2], vocab_size=VOCAB
        )
    legal = config.replace(shift="overlap")
    assert largest_leak(build(legal), 24) < 1e-10
    assert largest_leak(build(config), 24) > 1e-6


@given(configs(), st.integers(1, 30), st.integers(0, 3))
def test_output_is_the_same_for_every_longer_length(config, length, seed):
    model, ids = build(config, seed), tokens(1, length)
    with torch.no_grad():
        full = model(ids)
        for shorter in range(1, length):
            torch.testing.assert_close(
                model(ids[:, :shorter]), full[:, :shorter], rtol=0, atol=1e-10
            )


@given(configs(), st.integers(1, 26), st.integers(0, 3))
def test_fast_path_equals_the_oracle_with_gradients(config, length, seed):
    model, ids = build(config, seed), tokens(length)
    probe = torch.randn(length, VOCAB, dtype=torch.float64)

    def run(forward) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        model.zero_grad(set_to_none=True)
        out = forward()
        (out * probe).sum().backward()
        return out.detach(), {n: p.grad for n, p in model.named_parameters()}

    fast, fast_grads = run(lambda: model(ids[None])[0])
    slow, slow_grads = run(lambda: reference.logits(model, ids))
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-10)
    for name, grad in fast_grads.items():
        other = slow_grads[name]
        scale = max(1.0, grad.abs().max().item()) if grad is not None else 1.0
        zero = torch.zeros((), dtype=torch.float64)
        difference = (grad if grad is not None else zero) - (other if other is not None else zero)
        assert difference.abs().max() < 1e-10 * scale, name


@given(configs(), st.data())
def test_some_iterations_of_a_model_are_a_model(config, data):
    """The same from the whole model and from the part, which is one of the family; all iterations
    are the plain model, bit for bit."""
    whole, ids = build(config), tokens(2, 20)
    *coarse, last = range(config.num_iterations)
    kept = [t for t in coarse if data.draw(st.booleans())] + [last]
    part = whole.with_iterations(kept)
    with torch.no_grad():
        assert torch.equal(whole(ids, kept=kept), part(ids))
        torch.testing.assert_close(part(ids)[0], reference.logits(part, ids[0]), rtol=0, atol=1e-10)
        assert torch.equal(whole(ids, kept=range(config.num_iterations)), whole(ids))
    assert parameters(part.config).total == sum(p.numel() for p in part.parameters())
    assert {*part.parameters()} <= {*whole.parameters()}
    new = generate(part, [[1, 2, 3]], max_new_tokens=20, sampling=GREEDY)[0]
    logits = part(torch.tensor([[1, 2, 3, *new]]))
    assert new == logits[0, 2:-1].argmax(-1).tolist()


@pytest.mark.parametrize("kept", [[], [0], [3, 1], [1, 1, 3], [-1, 3], [0, 3, 4]])
def test_iterations_without_the_last_or_out_of_order_are_refused(kept):
    with pytest.raises(ConfigError, match="rising numbers of 0 … 3, the last of them 3"):
        PAPER_B.with_iterations(kept)


@pytest.mark.parametrize("offset", ["half", "zero"])
@pytest.mark.parametrize("name", costs.DOWNSCALE)
def test_a_chunk_pooled_member_by_member_is_pooled_at_once(name, offset):
    config = PAPER_B.replace(layout="1+1x{1/5}+1", downscale=name, offset=offset)
    operator = build(config).scalings[0].downscale
    h = torch.randn(2, 12, 32, dtype=torch.float64)
    ends = [i for i in range(12) if config.iterations[0].triggers(i)]
    state, latents = operator.start((2,), h), []
    for i in range(ends[-1] + 1):
        state = operator.push(state, h[:, i : i + 1])
        if i in ends:
            latents.append(operator.latent(state))
            state = operator.start((2,), h)
    torch.testing.assert_close(torch.stack(latents, 1), operator(h), rtol=0, atol=1e-12)


@pytest.mark.parametrize("offset", ["half", "zero"])
@pytest.mark.parametrize("name", costs.UPSCALE)
def test_shares_of_a_chunk_seen_member_by_member_are_those_of_the_whole(name, offset):
    config = PAPER_B.replace(layout="1+1x{1/5}+1", upscale=name, offset=offset)
    operator, iteration = build(config).scalings[0].upscale, config.iterations[0]
    h = torch.randn(2, 12, 32, dtype=torch.float64)
    ends = [i for i in range(12) if iteration.triggers(i)]
    z = torch.randn(2, len(ends), 32, dtype=torch.float64)
    state, updates = operator.start((2,), h), []
    for i in range(ends[-1] + 1):
        state = operator.push(state, h[:, i : i + 1])
        if i in ends:
            latent = z[:, ends.index(i)]
            updates.append(operator.allocation(latent, state)[..., None] * latent[:, None])
            state = operator.start((2,), h)
    one_by_one = torch.cat(updates, 1)[:, iteration.offset :]
    torch.testing.assert_close(one_by_one, operator(z, h), rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [2, 5, 128, 129, 300])
def test_attention_in_blocks_is_attention(length):
    q, k, v = torch.randn(3, 2, 3, length, 8, dtype=torch.float64).requires_grad_().unbind(0)
    plain = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    blocks = attend_in_blocks(q, k, v)
    torch.testing.assert_close(blocks, plain)
    weights = torch.randn_like(plain)
    for one, other in zip(*(grads(x, weights, (q, k, v)) for x in (plain, blocks)), strict=True):
        torch.testing.assert_close(one, other)


def grads(x, weights, inputs):
    return torch.autograd.grad(x, inputs, weights, retain_graph=True)


def test_rows_of_a_batch_are_independent():
    model = build(PAPER_B)
    ids = tokens(3, 40)
    with torch.no_grad():
        together = model(ids)
        for row in range(3):
            torch.testing.assert_close(
                together[row], model(ids[row : row + 1])[0], atol=1e-12, rtol=0
            )


# ---------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("tokens_count", [5, CHUNK, CHUNK + 7])
def test_chunked_loss_equals_plain_cross_entropy_with_gradients(tokens_count):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 31, bias=False).double()
    wrapped = torch.nn.Sequential(head)
    hidden = torch.randn(1, tokens_count, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 31, (1, tokens_count))
    targets[0, ::3] = IGNORE

    def grads(loss):
        return torch.autograd.grad(loss, [hidden, head.weight])

    plain = torch.nn.functional.cross_entropy(
        head(hidden)[0], targets[0], ignore_index=IGNORE, reduction="sum"
    )
    wanted = grads(plain)
    for module in (head, wrapped):
        loss = linear_cross_entropy(module, hidden, targets)
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
        for got, want in zip(grads(loss), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    each = token_losses(head, hidden, targets)
    torch.testing.assert_close(each.sum(), plain, rtol=1e-12, atol=0)
    assert (each[0, ::3] == 0).all()


def test_loss_ignores_targets_of_minus_100():
    model, ids = build(PAPER_B), tokens(2, 20)
    targets = tokens(2, 20, seed=1)
    targets[:, 10:] = IGNORE
    short = model(ids[:, :10], targets[:, :10])
    torch.testing.assert_close(model(ids, targets), short)


def test_bf16_autocast_gives_finite_sane_losses():
    torch.manual_seed(0)
    model = SpiralFormer(PAPER_B)
    ids, targets = tokens(2, 64), tokens(2, 64, seed=1)
    exact = model(ids, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, targets)
    loss.backward()
    assert abs(loss.item() - exact.item()) < 0.02
    assert all(p.grad.isfinite().all() for p in model.parameters())


# ---------------------------------------------------------------------------- other ways to run it


def loss_and_grads(model, run=None) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = (model if run is None else run)(tokens(2, 50), tokens(2, 50, seed=1))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_gradient_checkpointing_gives_the_same_gradients():
    model = build(PAPER_B, dtype=torch.float32).train()
    plain = loss_and_grads(model)
    model.set_checkpointing()
    blocks_run = []
    hook = model.cores[0].blocks[0].register_forward_pre_hook(lambda *_: blocks_run.append(1))
    again = loss_and_grads(model)
    hook.remove()
    assert len(blocks_run) == 2 * PAPER_B.num_iterations  # forward, and again in the backward pass
    torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1+1x{1/4,1/3,1}+1", "1+1+1+1", "2"])
def test_compiled_model_gives_the_same_result_as_eager(layout):
    model = build(PAPER_B.replace(layout=layout), dtype=torch.float32)
    eager = loss_and_grads(model)
    compiled = loss_and_grads(model, torch.compile(model))
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)


def test_a_model_can_be_built_on_meta_at_once():
    config = PAPER_B.replace(hidden_size=2048, num_heads=16, vocab_size=50304)
    with torch.device("meta"):
        model = SpiralFormer(config)
    assert all(p.is_meta for p in model.parameters())


def test_too_long_a_sequence_is_refused():
    model = build(PAPER_B)
    with pytest.raises(ValueError, match="129 tokens is longer than max_length 128"):
        model(tokens(1, 129))


def test_output_projections_start_smaller_the_deeper_the_unrolled_computation():
    torch.manual_seed(0)
    config = PAPER_B.replace(layout="2+4x{1/4,1/2,1}+2", hidden_size=128)
    model = SpiralFormer(config)
    for block in (model.pre.blocks[0], model.cores[0].blocks[3]):
        std = block.mlp.down.weight.std().item()
        assert std == pytest.approx(0.02 / (2 * 16) ** 0.5, rel=0.05)
        assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_whole_model_is_traced_without_breaks(autocast):
    torch.manual_seed(0)
    model, ids = SpiralFormer(PAPER_B), torch.randint(0, 97, (2, 41))
    found = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
            loss = run(ids[:, :-1], ids[:, 1:])
            loss.backward()
            found.append((loss, *(weight.grad.clone() for weight in model.parameters())))
            model.zero_grad()
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("autocast", [False, True])
def test_blocks_are_compiled_for_one_length_and_for_all_others(autocast):
    model, graphs = SpiralFormer(PAPER_B), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    for stack in model.stacks():
        for block in stack.blocks:
            block.compile(backend=count, fullgraph=True)
    for length in (64, 48):
        ids = torch.randint(0, 97, (8, length + 1))  # no pass has few rows
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(ids[:, :-1], ids[:, 1:]).backward()
    assert len(graphs) == 2


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_model_can_be_differentiated_by_example():
    """Gradients of each example, with torch.func."""
    torch.manual_seed(0)
    model, ids = SpiralFormer(PAPER_B).double(), torch.randint(0, 97, (3, 21))
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, weights, (ids[None, :-1],))
        return nn.functional.cross_entropy(logits[0], ids[1:])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ids)
    for row in range(3):
        alone = torch.autograd.grad(loss(weights, ids[row]), list(weights.values()))
        torch.testing.assert_close([grad[row] for grad in each.values()], list(alone))


def test_bfloat16_is_near_float32():
    config = SpiralConfig(
        layout="1+1x{1/4,1}+1", hidden_size=32, num_heads=2, vocab_size=50, max_length=64
    )
    torch.manual_seed(0)
    model, ids = SpiralFormer(config), torch.randint(0, 50, (2, 41))
    losses, grads = [], []
    for bfloat in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat):
            loss = model(ids[:, :-1], ids[:, 1:])
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 2e-2
    assert torch.nn.functional.cosine_similarity(*grads, dim=0) > 0.999
