"""The trainer: its settings, its laws of resuming, and how it fails."""

from __future__ import annotations

import functools
import gzip
import json
import lzma
import math
import os
import random
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from spiralformer import ConfigError, SpiralFormer
from spiralformer.accounting import training_flops_per_token
from spiralformer.cli import main
from spiralformer.data.prepare import Recipe, prepare
from spiralformer.data.shards import manifest_text
from spiralformer.data.sources import find_sources
from spiralformer.data.tokenizer import load_tokenizer
from spiralformer.data.windows import open_split
from spiralformer.errors import UserError
from spiralformer.files import CONFIGS
from spiralformer.model_folder import load_model
from spiralformer.train import (
    Interrupted,
    RunFolder,
    TrainConfig,
    distributed,
    loop,
    plan,
    run,
    train,
)
from spiralformer.train.checkpoint import fault, newest_whole, read_state
from spiralformer.train.config import Optim
from spiralformer.train.optim import OPTIMIZERS, SCHEDULES, learning_rate, make_optimizers, update
from tests.training import (
    FORKS,
    _train,
    assert_close_weights,
    assert_same_run,
    checkpoints,
    in_process,
    make_data,
    repeatable,
    tiny,
    weights,
    write_text,
)

OLD = Path(__file__).parent / "fixtures" / "run-0.1"


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def small(data, tmp_path):
    return functools.partial(tiny, data, tmp_path / "run")


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory) -> Path:
    """The folder of a run that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(data, out), quiet=True)
    return out


# ---------------------------------------------------------------------------- settings


def test_a_configuration_reads_back_as_it_was_written(small, tmp_path):
    config = small(sample__prompts=("def f(x):", ""), optim__betas=(0.8, 0.9), tokens="2e9")
    assert TrainConfig.from_dict(config.to_dict()) == config
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert TrainConfig.load(tmp_path / "c.yaml") == config
    assert config.tokens == 2_000_000_000


def test_overrides_change_the_run_and_what_follows_from_the_model():
    settings = ["data.path=x", "optim.lr=1e-3", "model.layout=2+2x{1/4,1}+2", "steps=5"]
    config = TrainConfig.load("spiral-b-nano-mesh", settings)
    assert (config.optim.lr, config.steps, config.out) == (1e-3, 5, "runs/spiral-b-nano-mesh")
    assert (config.model.layout, config.model.mesh_slots) == ("2+2x{1/4,1}+2", 5)
    changed = config.override({"model.layout": "4", "seed": 3, "optim.clip": 0})
    assert (changed.model.topology, changed.seed, changed.optim.clip) == ("none", 3, 0.0)
    assert (changed.optim.lr, config.seed) == (1e-3, 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.lrr=1", "unknown field 'optim.lrr'; did you mean 'optim.lr'?"),
        ("lr=1", "unknown field 'lr'; did you mean 'optim.lr'?"),
        ("model.layuot=3", "model: unknown field 'layuot'; did you mean 'layout'?"),
        ("model.layout=3x", "model: layout '3x': not a layout"),
        ("optim.lr=fast", "optim.lr 'fast': input should be a valid number"),
        ("optim.lr=-1", "optim.lr '-1': input should be greater than 0"),
        ("optim.betas=0.9", "optim.betas.1 is missing"),
        ("steps=1.5", "steps '1.5': input should be a valid integer"),
        ("steps=1e999", "steps inf: input should be a finite number"),
        ("compile=maybe", "compile 'maybe': input should be a valid boolean"),
        ("precision=fp8", "precision 'fp8': input should be 'auto', 'float32' or 'bfloat16'"),
        ("length=2048", "length 2048 must lie in 1 … 1024, model.max_length"),
        ("length=8", "length 8 is too short for iteration 0"),
        ("micro_batch=7", "micro_batch 7 does not divide batch 512"),
        ("data=here", "data 'here': a group of fields; write for example data.path=…"),
        ("optim.name=sgd", "optim.name 'sgd': unknown; choose one of adamw"),
        ("steps", "'steps': write field=value"),
    ],
)
def test_a_wrong_setting_names_field_value_and_remedy(setting, message):
    with pytest.raises(ConfigError) as error:
        TrainConfig.load("spiral-b-nano-mesh", ["data.path=x", setting])
    assert message in str(error.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_in_configs_are_valid(path):
    config = TrainConfig.load(path)
    assert (config.optim.betas, config.optim.weight_decay) == ((0.9, 0.95), 0.01)
    scale = next((name for name in ("160m", "410m", "1b", "1.4b") if f"-{name}-" in path.stem), "")
    if scale:
        assert 2e-4 <= config.optim.lr <= 6e-4
        assert config.optim.lr == {"160m": 6e-4, "1.4b": 2e-4}.get(scale, config.optim.lr)
        assert (config.batch, config.length, config.tokens) == (512, 4096, 250_000_000_000)


# ---------------------------------------------------------------------------- the optimiser


def test_the_learning_rate_rises_to_the_peak_and_falls_to_a_tenth():
    rates = [learning_rate(step, 1000, Optim(lr=6e-4)) for step in range(1000)]
    assert rates[0] == pytest.approx(6e-5)
    assert rates[9] == max(rates) == 6e-4
    assert rates[-1] == pytest.approx(6e-5)
    assert rates[504] == pytest.approx(6e-4 * 0.55, rel=1e-3)  # half-way down
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert learning_rate(0, 1, Optim(lr=1.0)) == pytest.approx(0.1)  # too short to warm up


def test_warm_up_stable_decay_at_every_step():
    """Ten steps up, 72 at the peak, the last fifth of the ninety down to a tenth."""
    optim = Optim(lr=1.0, schedule="wsd", warmup=0.1, decay=0.2)
    rates = [learning_rate(step, 100, optim) for step in range(100)]
    rise, fall = [n / 10 for n in range(1, 11)], [0.1 + 0.9 * n / 18 for n in range(17, -1, -1)]
    assert rates == pytest.approx(rise + [1.0] * 72 + fall)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(small):
    model = SpiralFormer(small().model)
    hidden, rest = make_optimizers(model, Optim(name="muon"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    blocks = {names[p] for p in hidden.param_groups[0]["params"]}
    others = {names[p] for group in rest.param_groups for p in group["params"]}
    assert {name.split(".")[-2] for name in blocks} == {"qkv", "out", "up", "down"}
    assert "embedding.weight" in others
    assert "head.weight" in others
    assert not blocks & others
    assert blocks | others == set(names.values())


def test_an_update_of_muon_is_its_formula(small):
    """Momentum and its look-ahead, five Newton–Schulz steps, the rule of AdamW's size, decay apart.
    In float64; PyTorch orthogonalises in bfloat16, whose rounding five steps make larger."""
    model = SpiralFormer(small().model)
    config = Optim(name="muon", lr=0.1, weight_decay=0.5, momentum=0.9)
    optimizers = make_optimizers(model, config)
    weight = model.cores[0].blocks[0].mlp.up.weight
    buffer = torch.zeros_like(weight, dtype=torch.float64)
    torch.manual_seed(0)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        gradient = weight.grad.double()
        buffer = 0.9 * buffer + 0.1 * gradient
        x = (0.1 * gradient + 0.9 * buffer).T
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        step = 0.1 * 0.2 * max(weight.shape) ** 0.5 * x.T
        expected = weight.detach().double() * (1 - 0.1 * 0.5) - step
        update(optimizers, 0.1, 0.0, 1.0)
        assert (weight - expected).norm() < 0.02 * step.norm()


def test_weight_decay_is_on_matrices_only(small):
    model = SpiralFormer(small().model)
    [optimizer] = make_optimizers(model, Optim(weight_decay=0.5))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_an_entry_in_the_registry_is_an_optimiser_and_a_schedule(small, monkeypatch, poison):
    sgd = lambda parameters, config: [torch.optim.SGD(parameters.values(), lr=config.lr)]
    monkeypatch.setitem(OPTIMIZERS, "sgd", sgd)
    monkeypatch.setitem(SCHEDULES, "linear", lambda done, steps, config: 1 - done / steps)
    poison(9)
    changes = {"optim__name": "sgd", "optim__schedule": "linear", "optim__lr": 0.5}
    result = train(small(log__every=1, **changes), quiet=True)
    lines = [record for record in result.metrics() if record["kind"] == "train"]
    assert [line["lr"] for line in lines] == pytest.approx(
        [0.5 * (0.1 + 0.9 * (1 - step / 12)) for step in range(1, 13)]
    )
    assert result.record["skipped"] == 1
    assert lines[-1]["loss"] < lines[0]["loss"]


# ---------------------------------------------------------------------------- learning


def test_a_tiny_model_overfits_a_tiny_text(small, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog, twice a day.")
    source = find_sources([str(tmp_path / "text.txt")])
    prepare(source, tmp_path / "data", Recipe(bytes=True, valid_fraction=0))
    data = {"data__path": str(tmp_path / "data"), "data__valid": str(tmp_path / "data")}
    result = train(
        small(model__hidden_size=32, batch=2, steps=150, valid__every=150, **data), quiet=True
    )
    assert result.record["train_loss"] < 0.05
    assert result.valid_loss < 0.05
    assert result.record["valid"]["bits_per_byte"] < 0.1


def test_a_global_batch_weighs_every_token_alike(small, tmp_path, data):
    """Cut into micro-batches of any size, also where one window is shorter than the others."""
    for micro in (1, 4):
        config = small(micro_batch=micro, out=str(tmp_path / str(micro)), epochs=1, steps=0)
        train(config, quiet=True)
    stream = open_split(data).stream
    assert len(stream) % 32, "the fixture should have a last window that is not full"
    assert_close_weights(tmp_path / "1", tmp_path / "4", rtol=1e-4, atol=1e-5)


def test_validation_is_the_mean_over_the_validation_tokens(small, data):
    config = small(valid__tokens=0, valid__every=100)
    result = train(config, quiet=True)
    model, stream = load_model(result.model), open_split(data, "valid").stream
    losses = []
    with torch.no_grad():
        for start in range(0, len(stream), 32):
            targets = torch.tensor(stream.read(start, min(start + 32, len(stream))))[None]
            before = stream.read((start - 1) % len(stream), (start - 1) % len(stream) + 1)
            ids = torch.cat([torch.tensor(before)[None], targets[:, :-1]], 1)
            losses += [model(ids, targets).item()] * targets.numel()
    record = result.record["valid"]
    assert record["tokens"] == len(stream)
    assert record["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    text = open_split(data, "valid").text_bytes
    bits = record["loss"] / math.log(2) * len(stream) / text
    assert record["bits_per_byte"] == pytest.approx(bits)


@pytest.mark.parametrize("tokens", [96, 0])  # a part of the validation text; all of it
def test_model_gzip_and_xz_are_compared_on_the_same_text(small, tmp_path, tokens):
    source = write_text(tmp_path / "text.jsonl")
    prepare(find_sources([str(source)]), tmp_path / "bpe", Recipe(bpe=264, valid_fraction=0.2))
    config = small(data__path=str(tmp_path / "bpe"), valid__tokens=tokens, valid__every=100)
    result = train(config, quiet=True).record
    scored = open_split(tmp_path / "bpe", "valid").stream.read(0, result["valid"]["tokens"])
    text = load_tokenizer(tmp_path / "bpe").decode(scored).encode()
    assert result["valid"]["bytes"] == len(text)
    nats = result["valid"]["loss"] * len(scored)
    bits = result["valid"]["bits_per_byte"] * len(text)
    assert bits == pytest.approx(nats / math.log(2))
    assert result["compressors"] == {
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text),
    }


def test_checkpointing_activations_changes_nothing(small, whole):
    config = small(checkpointing=True)
    train(config, quiet=True)
    assert_same_run(whole, config.out)


def test_bfloat16_is_close_to_float32(small, tmp_path):
    losses = {}
    for precision in ("float32", "bfloat16"):
        config = small(precision=precision, out=str(tmp_path / precision), steps=6)
        losses[precision] = train(config, quiet=True).valid_loss
    assert losses["float32"] != losses["bfloat16"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


@pytest.mark.parametrize("fast", [True, False])
def test_auto_precision_is_what_is_fast_and_stays_what_it_was(small, fast, monkeypatch, capsys):
    monkeypatch.setattr(plan, "bfloat16_is_fast", lambda device: fast)
    config, chosen = small(precision="auto", steps=4, save__every=2), ("float32", "bfloat16")[fast]
    assert train(config).record["run"]["precision"] == chosen
    assert "note: bfloat16 is slower" not in capsys.readouterr().err
    # As if it had been stopped, and gone on where it is otherwise.
    (Path(config.out) / "result.json").unlink()
    shutil.rmtree(checkpoints(config)[-1])
    monkeypatch.setattr(plan, "bfloat16_is_fast", lambda device: not fast)
    assert train(config).record["run"]["precision"] == chosen
    assert ("note: bfloat16 is slower" in capsys.readouterr().err) is fast


@pytest.mark.parametrize(("ratio", "fast"), [(0.5, True), (8.0, False)])
def test_whether_bfloat16_is_fast_is_measured(ratio, fast, monkeypatch):
    assert distributed._seconds(torch.bfloat16, torch.device("cpu"), size=64) > 0
    times = {torch.float32: 2e-3, torch.bfloat16: 2e-3 * ratio}
    monkeypatch.setattr(distributed, "_seconds", lambda dtype, device: times[dtype])
    assert distributed.bfloat16_is_fast.__wrapped__(torch.device("cpu")) is fast


@pytest.mark.slow
def test_compiled_blocks_learn_the_same(small, whole):
    config = small(compile=True)
    train(config, quiet=True)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(config.out)[name], value, rtol=1e-2, atol=1e-3)


def test_an_elastic_step_keeps_what_was_drawn_and_the_last_iteration(small, tmp_path):
    """Never left out is the plain run, bit for bit; always left out is the run of the part, whose
    other weights never move but by their decay."""
    plain, never = small(out=str(tmp_path / "plain")), small(out=str(tmp_path / "never"), elastic=0)
    train(plain, quiet=True)
    train(never, quiet=True)
    for name, value in weights(plain.out).items():
        assert torch.equal(weights(never.out)[name], value)
    some = small(elastic="0.5,1", optim__weight_decay=0)
    lines = []
    train(some, quiet=True, watch=lines.append)
    after = weights(some.out)
    with torch.random.fork_rng([]):
        torch.manual_seed(some.seed)
        begun = SpiralFormer(some.model)
    moved = {name for name, p in begun.named_parameters() if not torch.equal(after[name], p)}
    still = {name for name in after if name not in moved}
    assert still == {
        name for name in after if name.startswith(("scalings.1", "topology.routers.2"))
    }
    flops = [
        training_flops_per_token(some.model.with_iterations(kept), some.length)
        for kept in ([0, 2], [2])
    ]
    line = next(line for line in lines if line["kind"] == "train")
    assert line["flops_per_second"] == pytest.approx(sum(flops) / 2 * line["tokens_per_second"])


def test_an_elastic_run_stopped_and_resumed_is_never_stopped(small, tmp_path):
    whole, stopped = (small(elastic=0.5, out=str(tmp_path / name)) for name in ("whole", "stopped"))
    assert in_process(whole) == (0, None)
    code, _ = in_process(stopped, kill_at=3, with_signal=signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert in_process(stopped) == (0, None)
    assert_same_run(whole.out, stopped.out)


# ---------------------------------------------------------------------------- never lose a run


@pytest.mark.parametrize("step", [3, 5, 9])  # 5: between two lines of metrics.jsonl
def test_stopped_by_sigterm_and_resumed_is_never_stopped(small, whole, step):
    config = small()
    code, _ = in_process(config, kill_at=step, with_signal=signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert checkpoints(config)[-1].name == f"step-{step:08}"
    assert in_process(config) == (0, None)
    assert_same_run(whole, config.out)


def test_muon_stopped_and_resumed_is_never_stopped(small, tmp_path):
    muon = {"optim__name": "muon", "optim__schedule": "wsd"}
    whole, stopped = small(**muon, out=str(tmp_path / "whole")), small(**muon)
    assert in_process(whole) == (0, None)
    code, _ = in_process(stopped, kill_at=6, with_signal=signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert in_process(stopped) == (0, None)
    assert_same_run(whole.out, stopped.out)


def test_a_signal_is_answered_between_micro_batches(small, whole, monkeypatch):
    """What there is of the step is dropped; resumed, the run is as if it had never been stopped."""
    calls, mean_loss = [], run.Run.mean_loss

    def signalled(self, *given):
        if self.model.training:
            calls.append(self.state.step)
            if len(calls) == 9:  # the first of two micro-batches of step 5
                os.kill(os.getpid(), signal.SIGTERM)
        return mean_loss(self, *given)

    config = small(save__every=0)
    monkeypatch.setattr(run.Run, "mean_loss", signalled)
    with pytest.raises(Interrupted, match=r"after step 4 of 12, saved as .*step-00000004"):
        train(config, quiet=True)
    assert calls == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    train(config, quiet=True)
    assert_same_run(whole, config.out)


def test_a_signal_in_the_first_step_leaves_nothing_to_resume(small, whole, monkeypatch):
    update = lambda *_: os.kill(os.getpid(), signal.SIGINT)
    config, mean_loss = small(), run.Run.mean_loss
    monkeypatch.setattr(run.Run, "mean_loss", lambda *given: (update(), mean_loss(*given))[1])
    with pytest.raises(Interrupted, match="in the first step: there is nothing to save"):
        train(config, quiet=True)
    monkeypatch.undo()
    train(config, quiet=True)
    assert_same_run(whole, config.out)


@pytest.mark.parametrize("step", [3, 6, 12])
def test_killed_and_resumed_is_never_stopped(small, whole, step):
    killed = small()
    code, _ = in_process(killed, kill_at=step, with_signal=signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert not (Path(killed.out) / "result.json").exists()
    assert in_process(killed) == (0, None)
    assert_same_run(whole, killed.out)


@pytest.mark.slow
def test_killed_while_saving_a_whole_checkpoint_always_remains(small, tmp_path):
    """Thirty times, at a random moment between the start of a save and a little after its end."""
    config = small(steps=100, save__every=1, valid__every=100, log__every=50)
    folder, rng = Path(config.out) / "checkpoints", random.Random(0)
    reached, torn = 0, 0
    for _ in range(30):
        process = FORKS.Process(target=_train, args=(None, config.to_dict(), 0, 1, 0, {}))
        process.start()
        deadline = time.monotonic() + 60
        before = {path.name for path in folder.iterdir()} if folder.exists() else set()
        while process.is_alive() and time.monotonic() < deadline:  # until it is saving anew
            now = {path.name for path in folder.iterdir()} if folder.exists() else set()
            if any(name.endswith(".part") for name in now - before):
                break
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.join()
        found = sorted(folder.glob("step-????????"), reverse=True)
        torn += any(folder.glob("*.part"))
        if found:
            assert fault(found[0]) is None
            assert read_state(found[0])["step"] >= reached
            reached = read_state(found[0])["step"]
    assert reached > 5
    assert torn > 3, "no save was hit: the test does not test"
    whole = config.override({"save.every": 0, "out": str(tmp_path / "whole")})
    train(whole, quiet=True)
    assert in_process(config) == (0, None)
    assert_same_run(whole.out, config.out)


def test_a_damaged_checkpoint_is_passed_over(small, whole, capsys):
    config = small()
    in_process(config, kill_at=9, with_signal=signal.SIGKILL)
    newest = checkpoints(config)[-1]
    assert newest.name == "step-00000008"
    file = next(newest.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    train(config)
    assert f"{newest} is damaged and passed over" in capsys.readouterr().err
    assert_same_run(whole, config.out)


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip(content: bytes, at: float) -> bytes:
    changed = bytearray(content)
    changed[int(at * (len(content) - 1))] ^= 1
    return bytes(changed)


DAMAGE = {
    "missing": None,
    "empty": lambda content: b"",
    "cut in half": _cut,
    "without its end": lambda content: content[:-2],
    "longer": lambda content: content + b"\0",
    "zeros": lambda content: bytes(len(content)),
    "first byte": lambda content: _flip(content, 0),
    "middle byte": lambda content: _flip(content, 0.5),
    "halves exchanged": lambda content: content[len(content) // 2 :] + _cut(content),
}


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "state.json", "files.json"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_whatever_is_damaged_the_checkpoint_before_is_taken(whole, tmp_path, file, kind):
    folder, said, change = tmp_path / "checkpoints", [], DAMAGE[kind]
    shutil.copytree(whole / "checkpoints", folder)
    assert newest_whole(folder, said.append) == folder / "step-00000012"
    damaged = folder / "step-00000012" / file
    content = damaged.read_bytes()
    damaged.unlink()
    if change is not None:
        damaged.write_bytes(change(content))
    assert newest_whole(folder, said.append) == folder / "step-00000008"
    assert len(said) == 1


def test_a_run_of_version_0_1_goes_on_and_ends_as_it_would_have(tmp_path):
    shutil.copytree(OLD, tmp_path / "old")
    fields = json.loads((tmp_path / "old/run/train.json").read_text())
    config = TrainConfig.from_dict(fields).override(
        {"out": str(tmp_path / "old/run"), "data.path": str(tmp_path / "old/data")}
    )
    result = train(config, resume="must", quiet=True)
    steps = [record["step"] for record in result.metrics() if record["kind"] == "train"]
    assert steps == [3, 6, 9, 12]
    assert result.record["train_loss"] == pytest.approx(4.080421765645345, rel=1e-6)
    assert result.valid_loss == pytest.approx(4.035850286483765, rel=1e-6)


def test_when_all_checkpoints_are_damaged_it_does_not_start_over_unasked(small):
    config = small()
    in_process(config, kill_at=9, with_signal=signal.SIGKILL)
    for path in checkpoints(config):
        (path / "state.json").unlink()
    with pytest.raises(UserError, match=r"every checkpoint is damaged .*state.json is missing"):
        train(config, quiet=True)


def test_the_last_k_checkpoints_are_kept(small):
    config = small(save__every=2, save__keep=3)
    train(config, quiet=True)
    assert [path.name for path in checkpoints(config)] == [
        f"step-{step:08}" for step in (8, 10, 12)
    ]


def test_another_configuration_is_refused_with_the_differences(small):
    config = small()
    train(config, quiet=True)
    other = config.override({"optim.lr": 2e-2, "model.shift": "parallel"})
    with pytest.raises(UserError) as error:
        train(other, quiet=True)
    assert "optim.lr: 0.01 there, 0.02 here" in str(error.value)
    assert "model.shift: overlap there, parallel here" in str(error.value)
    assert "seed" not in str(error.value)
    (Path(config.out) / "result.json").unlink()  # likewise for a run that is not finished
    with pytest.raises(UserError, match=r"optim.lr: 0.01 there, 0.02 here"):
        train(other, quiet=True)
    with pytest.raises(UserError, match="no such"):  # what cannot start removes nothing
        train(other.override({"data.path": "/no/such"}), resume="never", quiet=True)
    assert len(checkpoints(config)) == 2
    assert train(other, resume="never", quiet=True).record["run"]["optim.lr"] == 2e-2


def test_a_finished_run_is_given_more_steps(small, whole, tmp_path, capsys):
    """It keeps its steps, its optimiser and its place in the data; the learning rate is that of
    the longer run. Stopped on the way, it ends as if it had not been."""
    config = small(log__every=1)
    train(config.override({"steps": 6}), quiet=True)
    short = [line for line in repeatable(config.out) if line["kind"] == "train"]
    shutil.copytree(config.out, tmp_path / "stopped")
    result = train(config)
    assert "6 steps become 12; after step 6 the learning rate is that of" in capsys.readouterr().err
    assert (result.again, result.record["steps"], result.record["run"]["extended"]) == (
        False,
        12,
        [6],
    )
    lines = [line for line in repeatable(config.out) if line["kind"] == "train"]
    assert lines[:6] == short
    rates = [learning_rate(step, 12, config.optim) for step in range(6, 12)]
    assert [line["lr"] for line in lines[6:]] == rates
    for name, value in weights(whole).items():  # a run of 12 from the start had other rates
        assert not torch.equal(value, weights(config.out)[name]), name
    stopped = config.override({"out": str(tmp_path / "stopped")})
    for step in (7, 9):  # before and after a checkpoint of the longer run
        in_process(stopped, kill_at=step, with_signal=signal.SIGKILL)
        assert not (tmp_path / "stopped/result.json").exists()
    assert train(stopped, quiet=True).record["run"]["extended"] == [6]
    assert_same_run(config.out, stopped.out)
    assert train(config, quiet=True).again
    with pytest.raises(UserError, match=r"another run \(steps: 12 there, 6 here\)"):
        train(config.override({"steps": 6}), quiet=True)
    shutil.rmtree(tmp_path / "stopped/checkpoints")
    with pytest.raises(UserError, match=r"the checkpoint of step 12 is gone, .* more steps"):
        train(stopped.override({"steps": 20}), quiet=True)
    assert (tmp_path / "stopped/result.json").exists()


def test_a_run_may_go_on_in_another_manner(small, whole):
    """Micro-batches, logging and so on do not decide what is learned."""
    config = small()
    in_process(config, kill_at=6, with_signal=signal.SIGTERM)
    train(config.override({"micro_batch": 4, "log.every": 1, "save.keep": 1}), quiet=True)
    assert_close_weights(whole, config.out, rtol=1e-4, atol=1e-5)


def test_other_data_is_refused_and_moved_data_is_not(small, data, tmp_path):
    config = small()
    in_process(config, kill_at=6, with_signal=signal.SIGTERM)
    (tmp_path / "more").mkdir()
    more = make_data(tmp_path / "more", documents=41)
    with pytest.raises(UserError, match="training data: "):
        train(config.override({"data.path": str(more)}), quiet=True)
    shutil.copytree(data, tmp_path / "moved")
    train(config.override({"data.path": str(tmp_path / "moved")}), quiet=True)


def test_a_finished_run_is_not_run_again(small):
    config = small()
    first = train(config, quiet=True)
    before = (Path(config.out) / "metrics.jsonl").stat().st_mtime_ns
    second = train(config, quiet=True)
    assert (first.again, second.again) == (False, True)
    assert first.record == second.record
    assert (Path(config.out) / "metrics.jsonl").stat().st_mtime_ns == before


def test_resume_must_have_something_to_resume(small):
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        train(small(), resume="must", quiet=True)


def test_a_second_process_is_kept_out(small):
    config = small()
    with (
        RunFolder(Path(config.out)).locked(),
        pytest.raises(UserError, match=rf"process {os.getpid()} on .* is training here"),
    ):
        train(config, quiet=True)
    assert train(config, quiet=True).record["steps"] == 12  # the lock is gone with its holder


def test_a_folder_that_is_not_a_run_is_left_alone(small, data):
    config = small(out=str(data))
    names = sorted(os.listdir(data))
    with pytest.raises(UserError, match="exists and is not the folder of a run"):
        train(config, quiet=True)
    assert sorted(os.listdir(data)) == names


def test_a_full_disk_leaves_the_last_checkpoint(small, whole):
    """A limit on the size of files stands in for the disk."""
    config = small()
    in_process(config, kill_at=3, with_signal=signal.SIGTERM)
    saved = checkpoints(config)[-1]
    for limit in (20_000, 300):  # no room for a checkpoint; not even for a line of metrics
        code, error = in_process(config, file_limit=limit)
        assert code == 2
        assert "cannot be written: File too large" in error
    code, error = in_process(config, file_limit=20_000)
    assert f"the last checkpoint is {saved}" in error
    assert checkpoints(config) == [saved]
    assert fault(saved) is None
    assert in_process(config) == (0, None)
    assert_same_run(whole, config.out)


def test_a_truncated_shard_is_named_and_the_run_stays_as_it_was(small, data, tmp_path):
    shutil.copytree(data, tmp_path / "copy")
    config = small(data__path=str(tmp_path / "copy"))
    in_process(config, kill_at=6, with_signal=signal.SIGTERM)
    shard = tmp_path / "copy" / "train-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(UserError, match=r"train-00000.bin: truncated"):
        train(config, quiet=True)
    shard.write_bytes(whole)
    assert train(config, quiet=True).record["steps"] == 12
    shard = shard.with_name("valid-00000.bin")
    shard.write_bytes(shard.read_bytes()[:-10])  # training data do not stand in for it
    with pytest.raises(UserError, match=r"valid-00000.bin: truncated"):
        train(small(data__valid=str(tmp_path / "copy")), resume="never", quiet=True)


# ---------------------------------------------------------------------------- non-finite steps


class Poisoned(SpiralFormer):
    """Its loss is not a number in some of the calls that train it."""

    calls = 0
    bad: tuple[int, ...] = ()

    def forward(self, ids, targets=None, kept=None):
        loss = super().forward(ids, targets, kept)
        if self.training and targets is not None:
            Poisoned.calls += 1
            if Poisoned.calls in self.bad:
                return loss * float("nan")
        return loss


@pytest.fixture
def poison(monkeypatch):
    def make(*bad: int) -> None:
        monkeypatch.setattr(run, "SpiralFormer", Poisoned)
        monkeypatch.setattr(Poisoned, "bad", bad)
        monkeypatch.setattr(Poisoned, "calls", 0)

    return make


def test_a_step_that_is_not_finite_is_skipped_and_counted(small, poison, monkeypatch):
    poison(9)  # the first micro-batch of step 5
    before, moved = [], []
    real = loop.update

    def watched(optimizers, *arguments):
        parameters = [p for group in optimizers[0].param_groups for p in group["params"]]
        before[:] = [p.detach().clone() for p in parameters]
        norm = real(optimizers, *arguments)
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True)))
        return norm

    monkeypatch.setattr(loop, "update", watched)
    result = train(small(log__every=1), quiet=True)
    assert moved == [step != 5 for step in range(1, 13)]
    assert result.record["skipped"] == 1
    lines = [record for record in result.metrics() if record["kind"] == "train"]
    assert [line["loss"] is None for line in lines] == [step == 5 for step in range(1, 13)]
    assert math.isfinite(result.valid_loss)


def test_too_many_such_steps_stop_the_run_and_say_where(small, poison):
    poison(*range(13, 100))  # from step 7 on
    config = small(log__every=5, nonfinite_limit=3)
    with pytest.raises(UserError) as error:
        train(config, quiet=True)
    message = str(error.value)
    assert "not finite in 3 steps in a row, first in step 7 (samples 24–27, windows " in message
    assert f"the last checkpoint is {config.out}/checkpoints/step-00000004" in message
    assert [path.name for path in checkpoints(config)] == ["step-00000004"]


# ---------------------------------------------------------------------------- to look at


def test_the_model_folder_samples_and_picture_are_written(small, data):
    config = small(sample__tokens=8, sample__prompts=("spiral", ""), log__tensorboard=True)
    result = train(config, quiet=True)
    model = load_model(result.model)
    assert model.config == config.model
    fields = json.loads((result.model / "config.json").read_text())
    assert fields["eos_token_id"] == load_tokenizer(data).eot_id
    assert load_tokenizer(result.model).encode("loop") == list(b"loop")
    assert result.record["samples"][0].startswith("spiral")
    assert (Path(config.out) / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((Path(config.out) / "tensorboard").glob("events*"))
    kinds = [record["kind"] for record in result.metrics()]
    assert [kinds.count(kind) for kind in ("train", "valid", "sample")] == [4, 3, 3]


def test_weights_and_biases_when_installed_and_asked(small, monkeypatch):
    logged, started = [], {}
    fake = types.ModuleType("wandb")
    run = types.SimpleNamespace(
        log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: None
    )
    fake.init = lambda **options: started.update(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(small(log__wandb="spirals"), quiet=True)
    assert started["project"] == "spirals"
    assert [step for step, numbers in logged if "train/loss" in numbers] == [3, 6, 9, 12]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"wandb.*pip install 'spiralformer.wandb.'"):
        train(small(log__wandb="spirals"), resume="never", quiet=True)


def test_it_takes_and_leaves_nothing_in_the_process_and_is_quiet(small, whole, capfd):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    result = train(small(), quiet=True)
    assert_same_run(whole, result.folder)  # whatever the random state of the process
    assert torch.equal(torch.get_rng_state(), state)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not torch.distributed.is_initialized()
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------------------- the command


@pytest.fixture
def command(data, tmp_path, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(["train", *arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return call


def test_the_command_trains_and_says_so_when_it_is_done(command, small, tmp_path):
    (tmp_path / "run.yaml").write_text(small().to_yaml())
    status, out, err = command(str(tmp_path / "run.yaml"), "steps=6")
    assert status == 0
    assert "6 steps, 768 tokens" in out
    assert "bits per byte" in out
    assert str(tmp_path / "run" / "loss.png") in out
    assert "step 6  validation loss" in err
    status, again, err = command(str(tmp_path / "run.yaml"), "steps=6")
    assert (status, again) == (0, out)
    assert "is finished (6 steps): nothing to do" in err
    status, _, err = command(str(tmp_path / "run.yaml"), "steps=5")
    assert status == 2
    assert "holds another run (steps: 6 there, 5 here)" in err
    status, out, err = command(str(tmp_path / "run.yaml"), "steps=7")
    assert status == 0
    assert "7 steps, 896 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.yaml"], "nothing.yaml: no such file"),
        (["bad.yaml"], "bad.yaml: cannot be read"),
        (["spiral-b-namo-mesh"], "model: unknown preset 'spiral-b-namo-mesh'; the nearest"),
        (["spiral-b-nano-mesh"], "data.path is missing"),
        (["spiral-b-nano-mesh", "data.path=/no/such"], "data.path=/no/such: no such folder or"),
        (["spiral-b-nano-mesh", "data.path=bad.yaml"], "data.path=bad.yaml: bad.yaml.bin: no such"),
        (["spiral-b-nano-mesh", "data.path=x", "--frsh"], "unrecognized arguments: --frsh"),
        (["spiral-b-nano-mesh", "data.path=x", "--fresh", "--resume"], "not allowed with"),
        (
            ["spiral-b-nano-mesh", "data.path=x", "device=cuda:99"],
            "device cuda:99: cannot be used here",
        ),
        ([], "the following arguments are required: CONFIG"),
    ],
)
def test_the_command_refuses_in_one_line(command, arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("model: [")
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def fitted(tokens: int, folder: Path, *settings: str, model: str = "spiral-b-nano-mesh"):
    """The recipe for a folder that says that it has so many tokens."""
    sizes = {"tokens": tokens, "documents": 1, "bytes": tokens, "shards": []}
    manifest = {"splits": {"train": sizes, "valid": sizes}, "tokenizer": {"vocab_size": 257}}
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(manifest_text(manifest))
    return TrainConfig.load(model, [f"data.path={folder}", *settings])


@pytest.mark.parametrize("tokens", [300_000, 1_000_000, 9_000_000, 100_000_000])
def test_a_preset_fits_the_data(tmp_path, tokens):
    config = fitted(tokens, tmp_path / "data")
    assert 4 <= config.batch <= 256
    assert config.length == 512
    assert 100 <= tokens / (config.batch * config.length) <= 2048
    assert (config.model.vocab_size, config.optim.lr, config.optim.warmup) == (320, 3e-3, 0.05)
    longer = fitted(tokens, tmp_path / "data", "steps=100000")
    assert longer == config.override({"steps": 100_000})  # so that a run can be extended
    given = ["batch=12", "length=1000", "optim.lr=1e-4", "optim.warmup=0", "model.vocab_size=512"]
    config = fitted(tokens, tmp_path / "data", *given)
    assert (config.batch, config.length, config.optim.lr) == (12, 1000, 1e-4)
    assert (config.optim.warmup, config.model.vocab_size) == (0, 512)


def test_on_much_data_a_preset_has_the_papers_recipe(tmp_path):
    for model, lr in (("spiral-b-160m-mesh", 6e-4), ("pythia-1.4b", 2.2e-4)):
        config = fitted(250_000_000_000, tmp_path / "data", model=model)
        assert (config.batch, config.length) == (512, 4096)
        assert (config.optim.lr, config.optim.warmup) == (lr, 0.01)


def test_a_plan_of_few_steps_and_a_larger_vocabulary_are_said(small, capsys):
    train(small(model__vocab_size=512))
    said = capsys.readouterr().err
    assert "note: 12 steps are few to learn from; smaller batches (batch=1)" in said
    assert "the data's tokenizer 257; model.vocab_size=320 would fit it" in said
    train(small(model__vocab_size=320, steps=50), resume="never")
    assert "note:" not in capsys.readouterr().err


def test_a_vocabulary_that_is_too_small_is_refused(command, small, tmp_path):
    (tmp_path / "run.yaml").write_text(small(model__vocab_size=100).to_yaml())
    status, _, err = command(str(tmp_path / "run.yaml"))
    assert status == 2
    assert "set model.vocab_size=320" in err


def test_show_prints_the_configuration(command, small, tmp_path):
    (tmp_path / "run.yaml").write_text(small().to_yaml())
    status, out, _ = command(str(tmp_path / "run.yaml"), "--show")
    assert (status, out) == (0, small().to_yaml())
    assert not (tmp_path / "run").exists()


def test_help_names_every_field(command):
    _, out, _ = command("--help")
    for name in ("optim.weight_decay", "save.minutes", "nonfinite_limit", "sample.prompts"):
        assert name in out
    assert max(map(len, out.splitlines())) <= 80
