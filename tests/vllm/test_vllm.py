"""Served by vLLM, a model says what our own decoder says, however vLLM schedules its requests."""

import contextlib
import functools
import gc
import json
import logging
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform

import spiralformer.vllm
from spiralformer import SpiralConfig
from spiralformer.accounting import forward_flops, kv_bytes
from spiralformer.errors import UserError
from spiralformer.vllm import config as start_up
from spiralformer.vllm import layers
from spiralformer.vllm.model import SpiralFormerForCausalLM

ROOT = Path(__file__).parents[2]
VOCAB = 61
NEW = 24
SPIRAL = "1+1x{1/8,1/4,1/2,1}+1"

gc.freeze()  # vLLM collects garbage again and again, over all that was imported

# Once a process is enough; vLLM's search for kernels stumbles over numba, which n-grams load.
CpuPlatform.register_triton_kernel_overrides = staticmethod(
    functools.cache(CpuPlatform.register_triton_kernel_overrides)
)


def config(layout: str, **fields) -> SpiralConfig:
    sizes = {"hidden_size": 64, "num_heads": 2, "vocab_size": VOCAB, "intermediate_size": 96}
    return SpiralConfig(layout=layout, max_length=512, rotary_fraction=0.5, **sizes, **fields)


def random_config(seed: int) -> SpiralConfig:
    """Any legal loop of up to three iterations."""
    rng = random.Random(seed)
    chunks = [rng.choice([1, 2, 3, 4, 5, 6, 7, 9]) for _ in range(rng.randint(1, 3))]
    resolutions = ",".join("1" if g == 1 else f"1/{g}" for g in chunks)
    return config(
        f"{rng.randint(0, 1)}+{rng.randint(1, 2)}x{{{resolutions}}}+{rng.randint(0, 1)}",
        offset=tuple(rng.randrange(g) for g in chunks),
        shift=tuple(rng.randint(g - 1, 2 * g + 2) for g in chunks),
        topology=rng.choice(["none", "anchor", "mesh"]),
        downscale=rng.choice(["self_aggregation", "mean", "attention"]),
        upscale=rng.choice(["output_dependent", "uniform", "input_dependent"]),
        norm=rng.choice(["rmsnorm", "layernorm"]),
        parallel_residual=rng.random() < 0.5,
        scale_embeddings=rng.random() < 0.5,
        tie_embeddings=rng.random() < 0.5,
    )


FAMILY = {
    "baseline": config("2"),
    "looped-none": config("1+1x{1,1}+1", topology="none"),
    "looped-anchor": config("1+1x{1,1}+1", topology="anchor", norm="layernorm"),
    "untied-mesh": config("1+1+1+1", topology="mesh", tie_embeddings=True),
    "spiral-mesh": config(SPIRAL),
    "spiral-parallel": config(SPIRAL, topology="anchor", shift="parallel"),
    "spiral-operators": config(
        "1+1x{1/4,1/2,1}+0", downscale="attention", upscale="input_dependent", topology="none"
    ),
    "spiral-plain": config("0+2x{1/4,1/3,1}+1", downscale="mean", upscale="uniform", offset="zero"),
    "odd-offsets": config("0+1x{1/6,1/3,1}+1", offset=(5, 1, 0), shift=(17, 2, 3)),
}
RANDOM = {f"random-{seed}": random_config(seed) for seed in range(8)}


# ---------------------------------------------------------------------------- engines


@functools.cache
def references() -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.vllm.references"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes)


class Case:
    """A model folder, prompts, and what our decoder makes of them."""

    def __init__(self, folder: Path, config: SpiralConfig, prompts, *, new=NEW, **more) -> None:
        self.config, self.new = config, new
        self.model, self.exported = folder / "model", folder / "exported"
        case = {"asks": [], "export": False, **more, "config": config.to_dict(), "new": new}
        case |= {"folder": str(folder), "prompts": prompts}
        print(json.dumps(case), file=references().stdin, flush=True)
        self.turns = json.loads(references().stdout.readline())

    def differences(self, llm: LLM, turn: int = 0, **sampling) -> tuple[int, float]:
        """How many requests got other tokens than ours, and how far log-probabilities lie apart."""
        want = self.turns[turn]
        outputs = ask(llm, want["prompts"], self.new, logprobs=0, **sampling)
        wrong, apart = 0, 0.0
        for output, tokens, logprobs in zip(outputs, want["tokens"], want["logprobs"], strict=True):
            said = output.outputs[0]
            if list(said.token_ids) != tokens:
                wrong += 1
                continue
            got = [place[t].logprob for place, t in zip(said.logprobs, tokens, strict=True)]
            apart = max(apart, *(abs(a - b) for a, b in zip(got, logprobs, strict=True)))
        return wrong, apart


def ask(llm: LLM, prompts, new: int = NEW, **sampling):
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": new}
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(prompts, SamplingParams(**greedy, **sampling), use_tqdm=False)


@contextlib.contextmanager
def serving(folder: Path, **options):
    options = {"max_num_seqs": 64, "enable_prefix_caching": False, **options}
    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def counted(llm: LLM) -> Counter:
    """vLLM's counters, which go on over the engines of a process."""
    return Counter({m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")})


def ragged(rows: int, seed: int = 0, longest: int = 150) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randint(1, longest) for _ in range(rows - 2))]
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


# ---------------------------------------------------------------------------- laws


@pytest.mark.parametrize("name", [*FAMILY, *RANDOM])
def test_64_ragged_requests_in_small_steps_get_the_tokens_of_generate(tmp_path, name):
    case = Case(tmp_path, {**FAMILY, **RANDOM}[name], ragged(64))
    budget = 100
    assert max(map(len, case.turns[0]["prompts"])) > budget
    with serving(case.model, max_num_batched_tokens=budget) as llm:
        wrong, apart = case.differences(llm)
    assert wrong == 0
    assert apart <= 1e-4


@pytest.mark.parametrize("name", ["baseline", "spiral-mesh", "spiral-parallel", "odd-offsets"])
def test_preempted_requests_get_the_same_tokens(tmp_path, name):
    case = Case(tmp_path, FAMILY[name], ragged(32, longest=200), new=100)
    with serving(case.model, num_gpu_blocks_override=12) as llm:
        before = counted(llm)
        wrong, apart = case.differences(llm)
        assert (counted(llm) - before)["vllm:num_preemptions"] > 0
    assert wrong == 0
    assert apart <= 1e-4


@pytest.mark.parametrize("name", ["spiral-mesh", "odd-offsets"])
def test_cached_prefixes_give_the_same_tokens_over_two_turns(tmp_path, name):
    shared = ragged(2, seed=5, longest=210)[1]
    prompts = [shared + tail for tail in ragged(16, seed=6, longest=60)]
    case = Case(tmp_path, FAMILY[name], prompts, asks=[[7, 8, 9] * 5])
    with serving(case.model, enable_prefix_caching=True, max_num_seqs=4) as llm:
        for turn in range(2):
            before = counted(llm)
            wrong, apart = case.differences(llm, turn)
            assert (counted(llm) - before)["vllm:prefix_cache_hits"] > 0
            assert wrong == 0
            assert apart <= 1e-4


@pytest.mark.parametrize("name", ["spiral-mesh", "spiral-operators", "odd-offsets"])
def test_guessed_tokens_change_nothing(tmp_path, name):
    prompts = [(prompt * 150)[:90] for prompt in ragged(16, longest=9)]
    case = Case(tmp_path, FAMILY[name], prompts, new=40)
    guess = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2}
    with serving(case.model, speculative_config=guess) as llm:
        before = counted(llm)
        wrong, apart = case.differences(llm)
        counts = counted(llm) - before
    drafted = counts["vllm:spec_decode_num_draft_tokens"]
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens"] < drafted
    assert wrong == 0
    assert apart <= 1e-4


@pytest.mark.parametrize("name", ["spiral-mesh", "odd-offsets"])
def test_entries_that_pass_through_each_iteration_are_those_of_the_accounting(
    tmp_path, name, monkeypatch
):
    case, entries = Case(tmp_path, FAMILY[name], ragged(16)), Counter()
    run_core = SpiralFormerForCausalLM.run_core

    def counting(model, iteration, z, positions):
        entries[iteration.index] += z.shape[1]
        return run_core(model, iteration, z, positions)

    with serving(case.model, max_num_batched_tokens=100) as llm:
        monkeypatch.setattr(SpiralFormerForCausalLM, "run_core", counting)
        assert case.differences(llm)[0] == 0
    expected: Counter = Counter()
    for prompt in case.turns[0]["prompts"]:
        length = len(prompt) + case.new - 1  # the last token is said, not read
        for part in forward_flops(case.config, length).parts:
            if part.part == "core":
                expected[part.iteration] += part.entries
    assert entries == expected


@pytest.mark.parametrize("name", ["spiral-mesh", "odd-offsets"])
def test_a_page_holds_keys_and_values_at_each_iterations_resolution(tmp_path, name):
    case = Case(tmp_path, FAMILY[name], [[1]], new=1)
    with serving(case.model) as llm:
        caches = [*llm.apply_model(lambda model: [c.kv_cache for c in model.cached.values()])[0]]
        tokens = llm.llm_engine.vllm_config.cache_config.block_size
    (pages,) = {len(cache) for cache in caches}
    page = sum(cache.nbytes for cache in caches) // pages
    states = [i for i in case.config.iterations if i.chunk > 1 or i.shift]
    of_token = sum(4 * (case.config.hidden_size + i.chunk) for i in states)
    assert page == kv_bytes(case.config, tokens, 4).total + of_token * tokens


@pytest.mark.parametrize("trusted", [False, True])
def test_an_exported_folder_is_served_as_well(tmp_path, trusted):
    case = Case(tmp_path, FAMILY["spiral-mesh"], ragged(4), export=True)
    with serving(case.exported, trust_remote_code=trusted) as llm:
        assert case.differences(llm)[0] == 0


# ---------------------------------------------------------------------------- the laws can fail


def phase_off_by_one(monkeypatch):
    coarse, state = layers.coarse_backend, layers.chunk_state_backend
    monkeypatch.setattr(layers, "coarse_backend", lambda b, g, at: coarse(b, g, (at + 1) % g))
    monkeypatch.setattr(layers, "chunk_state_backend", lambda g, at, s: state(g, (at + 1) % g, s))


def one_member_dropped(monkeypatch):
    read = layers.ChunkState.read

    def dropping(self, slots, *numbers):
        x = read(self, slots, *numbers)
        if slots.dim() == 2:
            x[:, 0] = 0
        return x

    monkeypatch.setattr(layers.ChunkState, "read", dropping)


def one_name_for_all(monkeypatch):
    monkeypatch.setattr(layers, "backend_name", lambda *geometry: "Spiral")


@pytest.mark.parametrize("break_it", [phase_off_by_one, one_member_dropped, one_name_for_all])
def test_a_break_is_seen(tmp_path, monkeypatch, break_it):
    # two iterations of one chunk size: without their geometry in its name they share a backend
    case = Case(tmp_path, config("1+1x{1/4,1/4,1}+1", offset=(0, 3, 0)), ragged(4))
    made = [layers.coarse_backend, layers.chunk_state_backend]
    for cached in made:
        cached.cache_clear()
    break_it(monkeypatch)
    try:
        with serving(case.model) as llm:
            assert case.differences(llm)[0] > 0
    finally:
        for cached in made:
            cached.cache_clear()


# ---------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Case(tmp_path_factory.mktemp("refused"), FAMILY["odd-offsets"], [[1]], new=1).model


def start(folder: Path, **options):
    options = {"dtype": "float32", "skip_tokenizer_init": True, **options}
    return EngineArgs(model=str(folder), **options).create_engine_config()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2 is not supported; leave out"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2 is not supported; leave out"),
        ({"quantization": "fp8"}, "quantization 'fp8' is not supported; leave out"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8' is not supported; leave out"),
        ({"enable_lora": True}, "LoRA is not supported; leave out --enable-lora"),
        ({"block_size": 64}, "block_size 64 does not hold .* use --block-size 96"),
        ({"block_size": 128}, "block_size 128 does not hold .* use --block-size 192"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(folder, options, words):
    with pytest.raises(UserError, match=words) as refusal:
        start(folder, **options)
    assert "\n" not in str(refusal.value)


def test_a_block_size_that_fits_is_chosen(folder):
    assert start(folder).cache_config.block_size == 192
    assert start(folder, block_size=288).cache_config.block_size == 288


def test_cuda_graphs_are_refused_where_there_are_any(folder):
    vllm_config = start(folder, enforce_eager=False)
    assert not start_up.refusals(vllm_config, on_cpu=True)
    assert start_up.refusals(vllm_config, on_cpu=False) == [("CUDA graphs", "add --enforce-eager")]


def test_a_head_size_without_a_kernel_is_refused(tmp_path):
    odd = config("1").replace(hidden_size=48)
    with pytest.raises(UserError, match="heads of 24 are not supported by vLLM on CPUs"):
        start(Case(tmp_path, odd, [[1]], new=1).model)


def test_another_vllm_is_refused_in_one_line(folder, monkeypatch):
    monkeypatch.setattr(start_up, "version", lambda package: "0.33.1")
    with pytest.raises(UserError, match=r"vllm 0\.33\.1: .* install vllm==0\.32\.\*"):
        start(folder)


def test_a_wrong_configuration_is_refused_in_one_line(folder, tmp_path):
    fields = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "shift": [0, 2, 3]}))
    with pytest.raises(UserError, match=r"config\.json: shift 0 of iteration 0 would leak"):
        start(tmp_path)


def test_registering_never_raises(monkeypatch, caplog):
    logger = logging.getLogger("vllm.spiralformer")  # its parent lets nothing through to caplog
    caplog.set_level(logging.WARNING, logger.name)
    logger.addHandler(caplog.handler)
    try:
        spiralformer.vllm.register()
        spiralformer.vllm.register()
        assert not caplog.records
        monkeypatch.setitem(sys.modules, "vllm.model_executor.models.config", None)
        spiralformer.vllm.register()
        assert "cannot be served" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
