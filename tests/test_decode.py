"""Laws of decoding: a state advanced in any way gives what the forward pass gives."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from spiralformer import SpiralConfig
from spiralformer.accounting import batches_at, fixed_bytes, kv_bytes
from spiralformer.decode import (
    DecodeState,
    StateError,
    extend,
    generate,
    native,
    prefill,
    runner_for,
    step,
)
from spiralformer.decode.state import CacheWrite, StackCache
from spiralformer.errors import UserError
from tests.strategies import VOCAB, build, configs, tokens

SMALL = {"hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB, "max_length": 128}
PIPES: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
PAPER_B = SpiralConfig(layout="1+2x{1/8,1/4,1/2,1}+1", **SMALL)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@given(configs(), st.integers(1, 28), st.integers(0, 3), st.data())
def test_every_split_into_prefill_and_steps_gives_the_forward_pass(config, length, seed, data):
    model, ids = build(config, seed), tokens(1, length)
    with torch.no_grad():
        full = model(ids)
    split = data.draw(st.integers(0, length))
    state = DecodeState.empty(model, 1, capacity=data.draw(st.integers(1, 40)))
    got = []
    if split:
        got.append(model.head(extend(model, state, ids[:, :split])))
    for i in range(split, length):
        got.append(model.head(step(model, state, ids[:, i]))[:, None])
    close(torch.cat(got, 1), full)
    assert state.lengths == [length]


@given(configs(), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 3))
def test_extending_by_any_pieces_gives_the_forward_pass(config, pieces, seed):
    model, ids = build(config, seed), tokens(1, sum(pieces))
    state = DecodeState.empty(model, 1, capacity=1)
    got = [
        model.head(extend(model, state, piece))
        for piece in ids.split(pieces, dim=1)
        if piece.shape[1]
    ]
    if got:
        with torch.no_grad():
            close(torch.cat(got, 1), model(ids))


@given(
    configs(),
    st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_every_row_of_a_ragged_batch_equals_itself_alone(config, rows, seed):
    """Each row is advanced by its own numbers of tokens, then by three common steps."""
    model = build(config, seed)
    batch, steps = len(rows), 3
    ids = tokens(batch, 21 + steps)
    state = DecodeState.empty(model, batch, capacity=2)
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    for call in range(3):
        new = [row[call] for row in rows]
        if not max(new):
            continue
        padded = torch.full((batch, max(new)), VOCAB - 1)
        for b, n in enumerate(new):
            padded[b, :n] = ids[b, state.lengths[b] : state.lengths[b] + n]
        out = model.head(extend(model, state, padded, new))
        for b, n in enumerate(new):
            got[b].append(out[b, :n])
    for _ in range(steps):
        token = torch.stack([ids[b, length] for b, length in enumerate(state.lengths)])
        out = model.head(step(model, state, token))
        for b in range(batch):
            got[b].append(out[b : b + 1])
    with torch.no_grad():
        for b, length in enumerate(state.lengths):
            close(torch.cat(got[b]), model(ids[b : b + 1, :length])[0])


@given(
    configs(),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_the_last_tokens_alone_come_out_as_among_all(config, rows, seed):
    """Two calls on ragged rows; the states left behind are the same too."""
    model = build(config, seed)
    states = [DecodeState.empty(model, len(rows), capacity=2) for _ in range(2)]
    for call in range(2):
        new, ids = [row[call] for row in rows], tokens(len(rows), 8, seed=call)
        if not max(new):
            continue
        every = extend(model, states[0], ids, new)
        last = extend(model, states[1], ids, new, last=True)
        assert last.shape[1] == 1
        for b, n in enumerate(new):
            if n:
                close(last[b, 0], every[b, n - 1])
    for one, other in zip(*(state.tensors() for state in states), strict=True):
        close(one, other)


@given(configs(), st.integers(1, 20), st.integers(0, 12), st.integers(0, 3), st.data())
def test_truncated_tokens_might_never_have_been_seen(config, length, history, seed, data):
    model, batch = build(config, seed), 2
    ids, other = tokens(batch, 40), tokens(batch, 40, seed=9)
    state = DecodeState.empty(model, batch, capacity=4, history=history)
    new = [length, data.draw(st.integers(1, length))]
    extend(model, state, ids[:, :length], new)
    back = [data.draw(st.integers(0, min(history, n))) for n in new]
    kept = [n - b for n, b in zip(new, back, strict=True)]
    state.truncate(model, kept)
    out = model.head(extend(model, state, other[:, :7]))
    more = model.head(step(model, state, other[:, 7]))
    with torch.no_grad():
        for b, n in enumerate(kept):
            text = torch.cat((ids[b, :n], other[b, :8]))[None]
            full = model(text)[0, n:]
            close(torch.cat((out[b], more[b : b + 1])), full)


def test_truncating_beyond_the_history_is_refused():
    model = build(PAPER_B)
    _, state = prefill(model, tokens(1, 20), history=4)
    with pytest.raises(StateError, match="row 0 of 20 tokens cannot be truncated to 15"):
        state.truncate(model, [15])
    state.truncate(model, [16])
    with pytest.raises(StateError):
        state.truncate(model, [15])
    state.truncate(model, [0])
    close(
        model.head(extend(model, state, tokens(1, 9, seed=3))), model(tokens(1, 9, seed=3)).detach()
    )


def test_forked_and_reordered_rows_go_their_own_way():
    model, ids = build(PAPER_B), tokens(2, 30)
    _, state = prefill(model, ids[:, :13], [13, 9])
    fork = state.fork(2)
    assert fork.lengths == [13, 13, 9, 9]
    step(model, fork, tokens(4, 1, seed=5)[:, 0])  # must not touch the original
    state.reorder([1, 0])
    out = model.head(step(model, state, ids[:, 20]))
    for row, source, length in ((0, 1, 9), (1, 0, 13)):
        text = torch.cat((ids[source, :length], ids[row, 20:21]))[None]
        close(out[row], model(text)[0, -1].detach())


@given(configs(), st.integers(1, 20))
def test_capacity_growth_changes_nothing(config, length):
    model, ids = build(config), tokens(1, length)
    outs = []
    for capacity in (1, 64):
        state = DecodeState.empty(model, 1, capacity=capacity)
        outs.append(torch.stack([step(model, state, ids[:, i]) for i in range(length)]))
    assert torch.equal(*outs)


@given(
    configs(),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_a_state_takes_the_bytes_that_the_accounting_says(config, batch, length, dtype):
    state = DecodeState.empty(build(config, dtype=dtype), batch, capacity=length)
    size = dtype.itemsize
    per_row = kv_bytes(config, length, size).total + fixed_bytes(config, size).total
    assert state.nbytes == batch * per_row


def count_core_passes(model, length: int) -> list[int]:
    """How often the core's first block ran at each token."""
    state = DecodeState.empty(model, 1, capacity=length)
    ran: list[int] = []
    hooks = [
        core.blocks[0].register_forward_pre_hook(lambda *_: ran.append(1)) for core in model.cores
    ]
    counts = []
    for _ in range(length):
        ran.clear()
        step(model, state, tokens(1, 1)[:, 0])
        counts.append(len(ran))
    for hook in hooks:
        hook.remove()
    return counts


def test_overlap_runs_at_most_two_core_passes_a_token_and_1_875_on_average():
    counts = count_core_passes(build(PAPER_B), 64)
    assert sum(counts) / 64 == 1.875
    assert max(counts) == 2


@given(configs(), st.integers(1, 30))
def test_core_passes_are_those_that_the_accounting_counts(config, length):
    counted = [len(batches_at(config, i)) for i in range(length)]
    assert count_core_passes(build(config), length) == counted


def test_parallel_regime_runs_one_batched_pass_a_token():
    assert count_core_passes(build(PAPER_B.replace(shift="parallel")), 32) == [1] * 32


def test_only_rows_that_trigger_run_a_coarse_pass():
    model = build(PAPER_B.replace(layout="1+1x{1/8}+1"))
    _, state = prefill(model, tokens(3, 12), [11, 3, 5])  # ω=4: positions 3, 11, … complete a chunk
    sizes = []
    hook = model.cores[0].register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[0]))
    step(model, state, tokens(3, 1)[:, 0])
    hook.remove()
    assert sizes == [2]


def test_a_state_of_another_model_is_refused():
    model, other = build(PAPER_B), build(PAPER_B.replace(layout="1+1x{1/2,1}+1"))
    state = DecodeState.empty(model, 1)
    with pytest.raises(StateError, match="another model"):
        step(other, state, tokens(1, 1)[:, 0])


def test_a_fixed_capacity_is_kept():
    model = build(PAPER_B)
    state = DecodeState.empty(model, 1, capacity=4, fixed=True)
    extend(model, state, tokens(1, 4))
    with pytest.raises(StateError, match="5 tokens do not fit the fixed capacity of 4"):
        step(model, state, tokens(1, 1)[:, 0])
    assert state.lengths == [4]


# ---------------------------------------------------------------------------- the native step


@pytest.mark.slow  # a machine builds the operators once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17])
@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (33, 7), (5, 1), (768, 50)])
def test_skinny_linears_are_linears(dtype, rows, inner, outer):
    torch.manual_seed(0)
    linear = nn.Linear(inner, outer, bias=outer % 2 == 0).to(dtype)
    assert native.load() is None
    x = torch.randn(rows, 1, inner).to(dtype)
    exact = copy.deepcopy(linear).double()(x.double())
    with torch.no_grad():
        found = torch.ops.spiralformer.skinny_linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(
        found, exact.to(dtype), rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5
    )


@pytest.mark.slow
@settings(max_examples=60)
@given(
    configs(),
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 3),
)
def test_native_steps_of_ragged_rows_give_the_forward_pass(config, starts, dtype, seed):
    """Rows of different lengths: read eagerly, then stepped natively."""
    model = build(config, seed, dtype=dtype)
    exact = copy.deepcopy(model).double()
    ids = tokens(len(starts), 32)
    state = DecodeState.empty(model, len(starts), capacity=3)
    extend(model, state, ids, starts)
    runner = runner_for(model, "native")
    for k in range(5):
        at = torch.tensor([start + k for start in starts])
        hidden = step(model, state, ids.gather(1, at[:, None])[:, 0], runner)
        logits = runner.head(model, hidden)
        for row, start in enumerate(starts):
            with torch.no_grad():
                whole = exact(ids[row : row + 1, : start + k + 1])[0, -1]
            error = (logits[row].double() - whole).abs().max()
            assert error <= (5e-2 if dtype == torch.bfloat16 else 1e-5) * whole.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("shift", ["overlap", "parallel"])
def test_native_steps_can_be_taken_back(shift):
    model = build(PAPER_B.replace(shift=shift), dtype=torch.float32)
    runner, ids = runner_for(model, "native"), tokens(2, 40)
    state = DecodeState.empty(model, 2, history=12)
    extend(model, state, ids[:, :9], [9, 6])
    for k in range(11):
        step(model, state, ids[:, 9 + k], runner)
    state.truncate(model, [12, 8])
    whole = DecodeState.empty(model, 2)
    extend(model, whole, torch.cat((ids[:1, :12], ids[:1, :12])), [12, 0])
    extend(model, whole, torch.stack((ids[1], ids[1]))[:, :6], [0, 6])
    extend(model, whole, ids[:, 9:11], [0, 2])
    for k in range(20, 30):
        found = step(model, state, ids[:, k], runner)
        torch.testing.assert_close(found, step(model, whole, ids[:, k]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_native_ragged_rows_are_the_same_as_eager():
    model = build(PAPER_B, dtype=torch.float32)
    prompts = [tokens(n).tolist() for n in (3, 8, 10)]
    assert generate(model, prompts, max_new_tokens=20, runner="native") == generate(
        model, prompts, max_new_tokens=20, runner="eager"
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_a_native_stack_is_the_same_for_any_number_of_threads(dtype, parallel, rows):
    """Wide enough that every thread has a part, which it may not read before the others wrote."""
    config = PAPER_B.replace(hidden_size=256, num_heads=4, parallel_residual=parallel)
    model = build(config.replace(intermediate_size=1024), dtype=dtype)
    runner, core = runner_for(model, "native"), model.core(0)
    inputs = torch.randn(20, rows, 1, 256).to(dtype)
    outputs = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            cache = StackCache.empty(len(core.blocks), rows, 20 + 3 * rows, model)
            held = lambda k: [3 * row + k for row in range(rows)]
            outputs.append(
                [
                    runner.stack(core, [x], [CacheWrite(cache, held(k), [1] * rows)])[0]
                    for k, x in enumerate(inputs)
                ]
            )
    finally:
        torch.set_num_threads(before)
    for one, two, three in zip(*outputs, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.slow
def test_native_steps_outside_the_cache_are_refused():
    model = build(PAPER_B, dtype=torch.float32)
    runner, state = runner_for(model, "native"), DecodeState.empty(model, 1, capacity=4)
    extend(model, state, tokens(1, 4))
    write = CacheWrite(state.pre, [4], [1])  # without having reserved a place
    with pytest.raises(RuntimeError, match="entry 4 of row 0 is outside its cache"):
        runner.stack(model.pre, [torch.zeros(1, 1, 32)], [write])


def test_the_native_runner_says_why_it_cannot():
    assert native.unfit(nn.Linear(2, 2).double()) == "the weights are float64"
    assert native.unfit(nn.Linear(2, 2, device="meta")) == "the weights are on meta"
    several = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    assert native.unfit(several) == "the weights are of several types"
    with pytest.raises(UserError, match="the weights are float64; use 'eager'"):
        runner_for(build(PAPER_B), "native")
    with pytest.raises(UserError, match="runner 'fast' is unknown; choose auto, eager"):
        runner_for(build(PAPER_B), "fast")


def test_a_short_generation_never_waits_for_a_compiler(monkeypatch):
    model = build(PAPER_B, dtype=torch.float32)
    built: list[str] = []
    monkeypatch.setattr(native, "is_built", lambda: False)
    monkeypatch.setattr(native, "load", lambda: built.append("asked") or "no compiler")
    assert runner_for(model, rows=1, tokens=100).name == "eager"
    assert not built
    assert runner_for(model, rows=8, tokens=1000).name == "eager"  # tried, and there is none
    assert built
    with pytest.raises(UserError, match="no compiler"):
        runner_for(model, "native")


@pytest.mark.slow
def test_a_build_is_made_once_by_one_process_in_a_folder_of_ones_own(tmp_path):
    """Also after a build that was killed half-way."""
    code = (
        "from spiralformer.decode import native; reason = native.load(); "
        "assert reason is None, reason; print(native.library())"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    run = lambda: subprocess.Popen([sys.executable, "-c", code], env=env, **PIPES)
    killed = run()
    while not list(tmp_path.rglob("*.lock")):
        assert killed.poll() is None, killed.stderr.read()
    killed.kill()
    killed.wait()
    both = [run(), run()]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("building" in err for _, err in outputs) == 1
    library = Path(outputs[0][0].strip())
    assert library.is_relative_to(tmp_path)
    assert library.parent.stat().st_mode & 0o777 == 0o700
    library.parent.chmod(0o777)
    refused = run()
    assert "others can write there" in refused.communicate()[1]


@pytest.mark.slow
@pytest.mark.parametrize("shift", ["overlap", "parallel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_compiled_step_gives_the_same_tokens(shift, dtype):
    model = build(PAPER_B.replace(shift=shift), dtype=dtype)
    prompt = [tokens(10).tolist()]
    assert generate(model, prompt, max_new_tokens=40, runner="compile") == generate(
        model, prompt, max_new_tokens=40, runner="eager"
    )
