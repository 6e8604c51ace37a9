"""The training loop, top to bottom.

    train                   set up, resume; step, log, validate, sample, save; finish
    forward_and_backward    one global batch
    validate                loss, perplexity and bits per byte
    Corpus, Plan, Position  the data, what follows from the configuration, where the run stands

`train` leaves nothing behind in the process that calls it: no signal handlers, no process group, no
changed random state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import spiralformer
from spiralformer.accounting import parameters, training_flops_per_token
from spiralformer.data.prepare import MANIFEST
from spiralformer.data.tokenizer import TextTokenizer, load_tokenizer
from spiralformer.data.windows import IGNORED, Split, TokenDataset, open_split, read_texts
from spiralformer.decode.generate import Sampling, generate
from spiralformer.errors import UserError
from spiralformer.model import SpiralFormer
from spiralformer.model.precision import has_fast_bfloat16
from spiralformer.model_folder import read_json, save_model
from spiralformer.train import log as report
from spiralformer.train.checkpoint import Checkpoints, RunFolder, read_state, write_json, writing
from spiralformer.train.config import TrainConfig
from spiralformer.train.distributed import (
    Processes,
    accumulating,
    spread,
    start_processes,
    whole_model,
)
from spiralformer.train.log import Console, Metrics, Record
from spiralformer.train.optim import learning_rate, make_optimizer, update

RESUME = ("auto", "must", "never")
LARGEST_MICRO_BATCH = 8  # where the configuration does not say
COMPRESSED_TEXT = 1 << 26  # bytes of validation text that gzip and xz are tried on, at most


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run between two steps, and it was saved."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


@dataclass(frozen=True)
class TrainResult:
    """A finished run."""

    folder: Path
    record: Record  # the contents of result.json
    again: bool  # whether it was finished before this call

    @property
    def model(self) -> Path:
        return RunFolder(self.folder).model

    @property
    def valid_loss(self) -> float | None:
        return self.record["valid"]["loss"]

    @property
    def perplexity(self) -> float | None:
        return self.record["valid"]["perplexity"]

    @property
    def bits_per_byte(self) -> float | None:
        return self.record["valid"]["bits_per_byte"]

    def metrics(self) -> list[Record]:
        return report.read_metrics(RunFolder(self.folder).metrics)


def train(
    config: TrainConfig,
    *,
    resume: str = "auto",
    quiet: bool = False,
    watch: Callable[[Record], None] | None = None,
) -> TrainResult:
    """Trains to the end, from the last checkpoint in `config.out` if there is one.

    resume: "auto" goes on from a checkpoint of the same configuration, and starts where there is
    none; "must" does not start; "never" removes what is there and starts. `watch` is given each
    record of metrics.jsonl, on the main process."""
    with start_processes(config.device) as processes:
        return _train(config, processes, resume, quiet, watch)


def _train(
    config: TrainConfig,
    processes: Processes,
    resume: str,
    quiet: bool,
    watch: Callable[[Record], None] | None,
) -> TrainResult:
    with contextlib.ExitStack() as stack:
        console = Console(quiet or not processes.main)
        stack.callback(console.close)
        folder = RunFolder(Path(config.out))
        with processes.together():
            if processes.main:
                stack.enter_context(folder.locked())
                if resume == "never":
                    folder.clear()
        with processes.together():
            corpus = Corpus.open(config)
            plan = Plan.of(config, corpus, processes)
        with processes.together():
            finished = _finished(folder, plan) if processes.main else None
        finished = processes.from_main(finished)
        if finished:
            console.say(f"{folder.path} is finished ({finished['steps']:,} steps): nothing to do")
            return TrainResult(folder.path, finished, again=True)

        # ---- the model, the optimiser, and where they stand
        device = processes.device
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        torch.manual_seed(config.seed)
        model = SpiralFormer(config.model).to(device).train()
        model.set_checkpointing(config.checkpointing)
        if config.compile:
            for layers in model.stacks():
                for block in layers.blocks:
                    block.compile()  # in place, so that names and hooks stay what they are
        trained = spread(model, config.parallel, processes)
        optimizer = make_optimizer(trained, config.optim)
        checkpoints = Checkpoints(folder.checkpoints, config.save.keep, processes)
        for line in plan.describe(corpus):
            console.say(line)
        position = _resumed(checkpoints, plan, trained, optimizer, resume, console)

        with processes.together():
            metrics = None
            if processes.main:
                metrics = stack.enter_context(_metrics(folder, config, position.step))

        def record(kind: str, **values: Any) -> Record:
            found = {"kind": kind, "step": position.step, "tokens": position.tokens, **values}
            if metrics is not None:
                with writing(folder.metrics, checkpoints.note()):
                    metrics.write(found)
                if watch is not None:
                    watch(found)
            return found

        def save() -> Path:
            position.settle()
            if metrics is not None:
                metrics.sync()
            state = {**dataclasses.asdict(position), "run": plan.identity, "code": code_version()}
            return checkpoints.save(trained, optimizer, state)

        # ---- step by step
        signals = stack.enter_context(Signals(console))
        first, begun, saved_at = position.step, position.seconds, time.monotonic()
        while position.step < plan.steps:
            started = time.perf_counter()
            lr = learning_rate(position.step, plan.steps, config.optim)
            targets = corpus.train.targets_in(plan.samples(position.step))
            loss = forward_and_backward(trained, corpus.train, plan, position.step, targets)
            norm = update(optimizer, lr, config.optim.clip, loss)
            position.advance(loss, norm, targets)
            last = position.step == plan.steps
            logs = last or position.step % config.log.every == 0
            if logs:
                position.settle()  # waits for the device; nothing else in a step does
            position.seconds += time.perf_counter() - started

            if logs:
                found = record("train", lr=lr, **position.line(plan.flops_per_token))
                pace = (position.seconds - begun) / (position.step - first)
                left = pace * (plan.steps - position.step)
                console.progress(report.progress_line(found, plan.steps, left), always=last)
                if position.skipped_in_a_row >= config.nonfinite_limit:
                    raise _diverged(position, plan, corpus, checkpoints)
            validates = last or position.step % plan.valid_every == 0
            if validates and corpus.valid is not None:
                found = record("valid", **validate(trained, corpus, plan))
                console.say(report.valid_line(found))
            samples = position.step % config.sample.every == 0 if config.sample.every else validates
            if (samples or last) and corpus.tokenizer is not None and config.sample.tokens:
                texts = sample(trained, corpus.tokenizer, config, processes)
                record("sample", texts=texts)
                if not last:
                    console.say(report.sample_lines(texts, limit=200))

            due = config.save.minutes and time.monotonic() - saved_at > 60 * config.save.minutes
            stops, due = processes.any(signals.received != 0, bool(due))
            due = due or (config.save.every and position.step % config.save.every == 0)
            if stops or last or (due and not position.skipped_in_a_row):
                path = save()
                saved_at = time.monotonic()
                if stops and not last:
                    name = signal.Signals(signals.received or signal.SIGTERM).name
                    raise Interrupted(
                        f"stopped by {name} after step {position.step:,} of {plan.steps:,}, saved "
                        f"as {path}; the same command goes on from there",
                        signals.received or signal.SIGTERM,
                    )

        # ---- the end
        whole = whole_model(trained, processes)
        with processes.together():
            result: Record = {}
            if whole is not None:
                result = _finish(folder, plan, corpus, position, whole)
        result = processes.from_main(result)
        return TrainResult(folder.path, result, again=False)


# ---------------------------------------------------------------------------- a step


def forward_and_backward(
    model: nn.Module, data: TokenDataset, plan: Plan, step: int, targets: int
) -> Tensor:
    """Gradients of the mean loss over all `targets` of a global batch, and that loss.

    A micro-batch counts by its targets, so it does not matter how the batch is cut into them or
    spread over processes. Under autocast a weight is cast once in each forward pass, however often
    the loop uses it: autocast keeps the cast copy until the pass ends."""
    processes = plan.processes
    total = torch.zeros((), device=processes.device)
    for m, (ids, wanted) in enumerate(plan.micro_batches(data, step), 1):
        share = int((wanted != IGNORED).sum()) / targets
        with accumulating(model, last=m == plan.micro_batch_count):
            with plan.autocast():
                loss = model(plan.to_device(ids), plan.to_device(wanted)) * share
            (loss * processes.world).backward()  # the exchange of gradients takes their mean
        total += loss.detach()
    return processes.sum(total)


@torch.no_grad()
def validate(model: nn.Module, corpus: Corpus, plan: Plan) -> Record:
    """Over the first `valid.tokens` targets of the validation split, in windows of the training
    length. Bits per byte take the split's mean bytes per token."""
    assert corpus.valid is not None
    assert corpus.valid_split is not None
    data, processes = corpus.valid, plan.processes
    windows = min(len(data), math.ceil(plan.config.valid.tokens / data.length) or len(data))
    batches = data.in_order(plan.micro_batch, windows)
    mine = itertools.islice(batches, processes.rank, None, processes.world)
    rounds = math.ceil(windows / (plan.micro_batch * processes.world))
    total, count, batch = 0.0, 0, next(data.in_order(1))
    model.eval()
    for _ in range(rounds):
        # With nothing left, a process takes part all the same: sharded weights need everyone.
        found = next(mine, None)
        ids, wanted = batch = found or batch
        with plan.autocast():
            loss = model(plan.to_device(ids), plan.to_device(wanted))
        targets = int((wanted != IGNORED).sum()) if found else 0
        total, count = total + (loss.item() * targets if targets else 0), count + targets
    model.train()
    total, count = processes.sum(torch.tensor([total, count], dtype=torch.float64)).tolist()
    mean, per_token = total / count, corpus.valid_split.bytes_per_token
    return {
        "valid_loss": mean,
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
        "bits_per_byte": mean / math.log(2) / per_token if per_token else None,
        "valid_tokens": int(count),
    }


def sample(
    model: nn.Module, tokenizer: TextTokenizer, config: TrainConfig, processes: Processes
) -> list[str]:
    """The prompts with their continuations, on the main process."""
    whole = whole_model(model, processes)
    if whole is None:
        return []
    settings, eot = config.sample, tokenizer.eot_id
    whole.eval()
    found = generate(
        whole,
        [tokenizer.encode(prompt) or [eot] for prompt in settings.prompts],
        max_new_tokens=settings.tokens,
        sampling=Sampling(temperature=settings.temperature, top_k=settings.top_k, seed=config.seed),
        stop_ids=[eot],
    )
    whole.train()
    return [
        prompt + tokenizer.decode(ids) for prompt, ids in zip(settings.prompts, found, strict=True)
    ]


# ---------------------------------------------------------------------------- what a run is


@dataclass(frozen=True)
class Corpus:
    """The data of a run, opened."""

    train_split: Split
    train: TokenDataset
    valid_split: Split | None
    valid: TokenDataset | None
    tokenizer: TextTokenizer | None  # shards from elsewhere have none

    @classmethod
    def open(cls, config: TrainConfig) -> Corpus:
        data, vocab = config.data, config.model.vocab_size
        train = open_split(data.path, "train", holdout=data.holdout)
        valid = None
        if data.valid != "none":
            valid = (
                _open_valid(data.valid)
                if data.valid
                else open_split(data.path, "valid", holdout=data.holdout)
            )
        if train.vocab_size is not None and train.vocab_size > vocab:
            raise UserError(
                f"model.vocab_size {vocab} is too small: the tokenizer of {data.path} has "
                f"{train.vocab_size} tokens; set model.vocab_size={-(-train.vocab_size // 64) * 64}"
            )
        has_tokenizer = (Path(data.path) / "tokenizer.json").is_file()
        return cls(
            train,
            TokenDataset(train.stream, config.length, config.seed, vocab),
            valid,
            TokenDataset(valid.stream, config.length, config.seed, vocab) if valid else None,
            load_tokenizer(data.path) if has_tokenizer else None,
        )


def _open_valid(path: str) -> Split:
    """The validation split of a folder that has one, else all of it."""
    try:
        return open_split(path, "valid")
    except UserError:
        return open_split(path, "train")


@dataclass(frozen=True)
class Plan:
    """What follows from a configuration, its data and the processes at hand."""

    config: TrainConfig
    processes: Processes
    steps: int
    micro_batch: int
    bfloat16: bool
    identity: dict[str, Any]  # two runs with the same one learn the same

    @classmethod
    def of(cls, config: TrainConfig, corpus: Corpus, processes: Processes) -> Plan:
        per_step = config.batch * config.length
        tokens = config.tokens or math.ceil(config.epochs * corpus.train_split.tokens)
        steps = config.steps or max(1, math.ceil(tokens / per_step))
        share, rest = divmod(config.batch, processes.world)
        micro = config.micro_batch or next(
            m for m in range(LARGEST_MICRO_BATCH, 0, -1) if share % m == 0
        )
        if rest or share % micro or not share:
            raise UserError(
                f"batch {config.batch} cannot be spread over {processes.world} processes in "
                f"micro-batches of {micro}: make it a multiple of {processes.world * micro}"
            )
        fast = has_fast_bfloat16(processes.device)
        bfloat16 = config.precision == "bfloat16" or (config.precision == "auto" and fast)
        identity = {
            **{k: v for k, v in config.deciding().items() if k not in ("tokens", "epochs")},
            "steps": steps,
            "precision": "bfloat16" if bfloat16 else "float32",
            "training data": corpus.train_split.identity,
            "validation data": corpus.valid_split.identity if corpus.valid_split else None,
        }
        return cls(config, processes, steps, micro, bfloat16, identity)

    @property
    def micro_batch_count(self) -> int:
        """Of a step, on each process."""
        return self.config.batch // (self.micro_batch * self.processes.world)

    @property
    def valid_every(self) -> int:
        return self.config.valid.every or max(1, self.steps // 20)

    @functools.cached_property
    def flops_per_token(self) -> float:
        return training_flops_per_token(self.config.model, self.config.length)

    def micro_batches(self, data: TokenDataset, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        return data.micro_batches(
            step,
            global_batch=self.config.batch,
            micro_batch=self.micro_batch,
            rank=self.processes.rank,
            world=self.processes.world,
        )

    def samples(self, step: int) -> range:
        """The numbers of the sequences of a global batch."""
        return range(step * self.config.batch, (step + 1) * self.config.batch)

    def to_device(self, batch: Tensor) -> Tensor:
        if self.processes.device.type == "cuda":
            batch = batch.pin_memory()  # so that the copy does not stop the host
        return batch.to(self.processes.device, non_blocking=True)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.bfloat16)

    def describe(self, corpus: Corpus) -> Iterator[str]:
        config, processes = self.config, self.processes
        counts = parameters(config.model)
        yield (
            f"model: {config.model.layout} {config.model.topology}, {counts.total:,} parameters "
            f"({counts.non_embedding:,} without embeddings)"
        )
        valid = corpus.valid_split
        yield f"data: {config.data.path}, {corpus.train_split.tokens:,} tokens" + (
            f" and {valid.tokens:,} for validation" if valid else ", no validation"
        )
        tokens = self.steps * config.batch * config.length
        yield (
            f"plan: {self.steps:,} steps of {config.batch} × {config.length} tokens, "
            f"{tokens:,} in all ({tokens / corpus.train_split.tokens:.2f} epochs)"
        )
        count, chosen = processes.world, "bfloat16" if self.bfloat16 else "float32"
        why = ""
        if config.precision == "auto":
            fast = "fast" if self.bfloat16 else "not fast"
            why = f" (auto: bfloat16 is {fast} on this device)"
        yield (
            f"run: {config.out}, {chosen}{why}, {processes.device}, "
            + (f"{count} processes ({config.parallel})" if count > 1 else "1 process")
            + f", micro-batches of {self.micro_batch} × {self.micro_batch_count}"
        )


@dataclass
class Position:
    """Where a run stands: what a checkpoint holds beside tensors. The learning rate and the data of
    a step follow from the number of finished steps."""

    step: int = 0
    tokens: int = 0  # targets trained on
    seconds: float = 0.0  # spent in steps
    skipped: int = 0  # steps without an update, their loss or gradient not being finite
    skipped_in_a_row: int = 0
    # Since the last line of metrics.jsonl:
    line_tokens: int = 0
    line_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._unread: list[Tensor] = []  # loss and norm of steps that the device may still be at

    def advance(self, loss: Tensor, norm: Tensor, targets: int) -> None:
        self.step += 1
        self.tokens += targets
        self._unread.append(torch.stack((loss, norm.to(loss))))

    def settle(self) -> None:
        """Reads what the steps since the last time came to, in one transfer."""
        found = torch.stack(self._unread).tolist() if self._unread else []
        self._unread = []
        for loss, norm in found:
            if math.isfinite(loss) and math.isfinite(norm):
                self.skipped_in_a_row = 0
                self.losses.append(loss)
                self.norms.append(norm)
            else:
                self.skipped += 1
                self.skipped_in_a_row += 1

    def line(self, flops_per_token: float) -> Record:
        """What metrics.jsonl says of the steps since its last line; skipped ones have no loss."""
        seconds, tokens = self.seconds - self.line_seconds, self.tokens - self.line_tokens
        speed = tokens / seconds if seconds else 0.0
        mean = lambda values: math.fsum(values) / len(values) if values else None
        found = {
            "loss": mean(self.losses),
            "grad_norm": mean(self.norms),
            "skipped": self.skipped,
            "seconds": self.seconds,
            "tokens_per_second": speed,
            "flops_per_second": speed * flops_per_token,
        }
        self.line_seconds, self.line_tokens, self.losses, self.norms = (
            self.seconds,
            self.tokens,
            [],
            [],
        )
        return found


class Signals:
    """Notes SIGINT and SIGTERM so that a step can be finished; the second stops at once.

    Launchers signal a process and its group, or twice in a row: within a second that is one.
    """

    SAME = 1.0
    HANDLED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, console: Console) -> None:
        self.console, self.received, self.at = console, 0, 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            self.before = {number: signal.signal(number, self._note) for number in self.HANDLED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received and now - self.at < self.SAME:
            return
        if self.received:
            raise KeyboardInterrupt
        self.received, self.at = number, now
        self.console.say("stopping after this step; a second signal stops at once, without saving")


# ---------------------------------------------------------------------------- beginning and end


def _finished(folder: RunFolder, plan: Plan) -> Record | None:
    if not folder.result.exists():
        return None
    result = read_json(folder.result)
    _refuse_another(folder.path, result["run"], plan)
    return result


def _resumed(
    checkpoints: Checkpoints,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    resume: str,
    console: Console,
) -> Position:
    path, state = None, None
    with plan.processes.together():
        if plan.processes.main:
            path = checkpoints.newest(console.say)
            state = path and read_state(path)
            if state:
                _refuse_another(checkpoints.folder.parent, state["run"], plan)
            elif resume == "must":
                raise UserError(f"{checkpoints.folder}: no checkpoint to resume from")
    path, state = plan.processes.from_main((path, state))
    if path is None:
        return Position()
    checkpoints.load(path, model, optimizer)
    if state["code"] != code_version():
        console.say(f"note: {path} was written by {state['code']}; this is {code_version()}")
    console.say(f"resuming from {path}")
    return Position(**{k: v for k, v in state.items() if k not in ("run", "code")})


def _refuse_another(folder: Path, stored: dict[str, Any], plan: Plan) -> None:
    here = plan.identity
    names = [name for name in {**stored, **here} if stored.get(name) != here.get(name)]
    if names:
        listed = "; ".join(f"{k}: {stored.get(k)} there, {here.get(k)} here" for k in names)
        raise UserError(
            f"{folder} holds another run ({listed}); choose another out, or start anew with --fresh"
        )


@contextlib.contextmanager
def _metrics(folder: RunFolder, config: TrainConfig, step: int) -> Iterator[Metrics]:
    with writing(folder.path):
        write_json(folder.config, config.to_dict())
        metrics = Metrics(folder.metrics, step)
    try:
        if config.log.tensorboard:
            metrics.add_tensorboard(folder.tensorboard, step)
        if config.log.wandb:
            metrics.add_wandb(config.log.wandb, folder.path, config.to_dict())
        yield metrics
    finally:
        metrics.close()


def _diverged(
    position: Position, plan: Plan, corpus: Corpus, checkpoints: Checkpoints
) -> UserError:
    first = position.step - position.skipped_in_a_row  # steps finished before it
    samples = plan.samples(first)
    windows = [corpus.train.window_of(sample) for sample in samples]
    shown = ", ".join(map(str, windows[:8])) + (", …" if len(windows) > 8 else "")
    return UserError(
        f"loss or gradient was not finite in {position.skipped_in_a_row} steps in a row, first in "
        f"step {first + 1:,} (samples {samples[0]}–{samples[-1]}, windows {shown} of "
        f"{plan.config.data.path}); {checkpoints.note()}; lower optim.lr or look at these windows"
    )


def _finish(
    folder: RunFolder, plan: Plan, corpus: Corpus, position: Position, model: SpiralFormer
) -> Record:
    """Writes the model's folder, the pictures and, last of all, the result."""
    config, records = plan.config, report.read_metrics(folder.metrics)
    last = {record["kind"]: record for record in records}
    valid, counts = last.get("valid", {}), parameters(config.model)
    tokenizer, extra = corpus.tokenizer, {}
    if tokenizer is not None:
        extra = {"bos_token_id": tokenizer.eot_id, "eos_token_id": tokenizer.eot_id}
    texts = last.get("sample", {}).get("texts", [])
    speed = position.tokens / position.seconds if position.seconds else 0.0
    with writing(folder.path):
        save_model(model, folder.model, tokenizer=config.data.path if tokenizer else None, **extra)
        title = f"{config.model.layout} {config.model.topology}, {counts.total / 1e6:.1f} M"
        report.draw_curve(records, folder.curve, title)
        folder.samples.write_text(report.sample_lines(texts) + "\n", encoding="utf-8")
        result = {
            "layout": config.model.layout,
            "topology": config.model.topology,
            "width": config.model.hidden_size,
            "parameters": {"total": counts.total, "non_embedding": counts.non_embedding},
            "steps": plan.steps,
            "tokens": position.tokens,
            "train_loss": last["train"]["loss"],
            "valid": {
                "loss": valid.get("valid_loss"),
                "perplexity": valid.get("perplexity"),
                "bits_per_byte": valid.get("bits_per_byte"),
                "tokens": valid.get("valid_tokens"),
            },
            "compressors": _compressors(config.data.path, config.data.valid, corpus),
            "skipped": position.skipped,
            "seconds": position.seconds,
            "tokens_per_second": speed,
            "flops_per_second": speed * plan.flops_per_token,
            "flops_per_token": plan.flops_per_token,
            "samples": texts,
            "run": plan.identity,
            "config": config.to_dict(),
            "code": code_version(),
        }
        write_json(folder.result, result)
    return result


def _compressors(path: str, valid: str, corpus: Corpus) -> dict[str, float]:
    """Bits per byte of gzip and xz on the validation text, where the text is at hand."""
    size = corpus.valid_split.text_bytes if corpus.valid_split else None
    if valid or not size or size > COMPRESSED_TEXT or not (Path(path) / MANIFEST).is_file():
        return {}
    return report.compressed_bits_per_byte([text.encode() for text in read_texts(path, "valid")])


@functools.cache
def code_version() -> str:
    """spiralformer 0.1.0 (commit …), torch …, Python …"""
    root = Path(spiralformer.__file__).parent.parent
    commit = ""
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
            found = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
            commit = f" ({found.stdout.strip()})"
    return (
        f"spiralformer {spiralformer.__version__}{commit}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
