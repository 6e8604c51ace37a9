"""Training, top to bottom: `train`, the steps, one global batch, validation, samples."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from typing import Literal

import torch

from spiralformer.console import Progress
from spiralformer.data.windows import IGNORED
from spiralformer.decode import Sampling, generate
from spiralformer.errors import UserError
from spiralformer.train import log
from spiralformer.train.config import TrainConfig
from spiralformer.train.distributed import Processes, accumulating, start_processes, whole_model
from spiralformer.train.log import Record, Sink
from spiralformer.train.optim import learning_rate, update
from spiralformer.train.run import Corpus, Earlier, Run, RunFolder, RunPlan, TrainResult, open_run

Resume = Literal["auto", "must", "never"]


def train(
    config: TrainConfig,
    *,
    resume: Resume = "auto",
    quiet: bool = False,
    watch: Sink | None = None,
    wait: bool = False,
) -> TrainResult:
    """Trains to the end, from the last checkpoint in `config.out` if there is one.

    To be called again and again with the same recipe, from any process: a run that was stopped goes
    on as if it never had been, a finished one returns its stored result (`again`), and while one
    process is at a folder another is refused (UserError). SIGINT and SIGTERM finish the step, save,
    and raise `Interrupted`. Nothing is left behind in the process that calls: no signal handlers,
    no process group, no changed random state.

    resume: "auto" goes on from a checkpoint of the same recipe, and starts where there is none;
    "must" does not start; "never" removes what is there and starts. `watch` is given each record of
    metrics.jsonl, on the main process. `wait`: for another process at the folder, in place of being
    refused."""
    with (
        start_processes(config.device) as processes,
        Progress("step", shown=processes.main and not quiet) as progress,
    ):
        # In a function of its own, so that the model is gone when the processes part.
        return _train(config, processes, progress, resume, watch, wait)


def _train(
    config: TrainConfig,
    processes: Processes,
    progress: Progress,
    resume: Resume,
    watch: Sink | None,
    wait: bool,
) -> TrainResult:
    folder, earlier = RunFolder(config.out), Earlier()
    with contextlib.ExitStack() as lock:
        with processes.together():
            corpus = Corpus.open(config)
            if processes.main:
                lock.enter_context(folder.locked(wait))
                if resume != "never":
                    earlier = Earlier.of(folder, progress.say)
                if resume == "must" and earlier.identity is None:
                    raise UserError(f"{folder.checkpoints}: no checkpoint to resume from")
        earlier = processes.from_main(earlier)
        with processes.together():
            plan = RunPlan.of(config, corpus, processes, earlier)
        if earlier.result:
            progress.say(f"{folder.path} is finished ({plan.steps:,} steps): nothing to do")
            return TrainResult(folder.path, earlier.result, again=True)
        for line in plan.describe(corpus):
            progress.say(line)
        if resume == "never" and processes.main:
            folder.clear()
        with open_run(folder, plan, corpus, earlier.checkpoint, progress, watch) as run:
            while run.state.step < plan.steps:
                take_step(run)
                look_at(run)
                run.save_or_stop()
            return TrainResult(folder.path, run.finish(), again=False)


# ---------------------------------------------------------------------------- a step


def take_step(run: Run) -> None:
    state, plan, optim = run.state, run.plan, run.plan.config.optim
    started = time.perf_counter()
    lr = learning_rate(state.step, plan.steps, optim)
    targets = run.corpus.train.targets_in(plan.samples(state.step))
    loss = forward_and_backward(run, targets)
    norm = update(run.optimizer, lr, optim.clip, loss)
    state.advance(loss, norm, targets, time.perf_counter() - started)
    if plan.due(state.step, plan.config.log.every):
        record = run.record("train", lr=lr, **state.line(plan.flops_per_token))
        run.progress.note = log.train_note(record)
        run.stop_if_diverged()
    run.progress.update(state.step)


def forward_and_backward(run: Run, targets: int) -> float:
    """Gradients of the mean loss over all `targets` of a global batch, and that loss.

    A micro-batch counts by its targets, so it does not matter how the batch is cut into them or
    divided among processes. Under autocast a weight is cast once in each forward pass, however
    often the loop uses it: autocast keeps the cast copy until the pass ends."""
    plan, processes = run.plan, run.plan.processes
    with processes.together():
        batches = list(plan.micro_batches(run.corpus.train, run.state.step))
    total = torch.zeros((), device=processes.device)
    for ids, wanted in batches:
        share = int((wanted != IGNORED).sum()) / targets
        with accumulating(run.model, last=wanted is batches[-1][1]):
            with plan.autocast():
                loss = run.model(plan.to_device(ids), plan.to_device(wanted)) * share
            (loss * processes.world).backward()  # the exchange of gradients takes their mean
        total += loss.detach()
    return processes.sum(total).item()


# ---------------------------------------------------------------------------- looking at it


def look_at(run: Run) -> None:
    """Validation and samples, where they are due."""
    plan, config, step = run.plan, run.plan.config, run.state.step
    if run.corpus.valid is not None and plan.due(step, plan.valid_every):
        run.progress.say(log.valid_line(run.record("valid", **validate(run))))
    wanted = run.corpus.tokenizer is not None and config.sample.tokens > 0
    if wanted and plan.due(step, config.sample.every or plan.valid_every):
        texts = sample(run)
        run.record("sample", texts=texts)
        if step < plan.steps:
            run.progress.say(log.sample_lines(texts, limit=200))


@torch.no_grad()
def validate(run: Run) -> Record:
    """Over the first `valid.tokens` targets of the validation split, in windows of the training
    length. Bits per byte take the split's mean bytes per token."""
    plan, processes, data = run.plan, run.plan.processes, run.corpus.valid
    assert data is not None
    assert run.corpus.valid_split is not None
    windows = min(len(data), math.ceil(plan.config.valid.tokens / data.length) or len(data))
    batches = data.in_order(plan.micro_batch, windows)
    total, count = 0.0, 0
    run.model.eval()
    for shares in itertools.zip_longest(*[batches] * processes.world):
        # With nothing left, a process takes part all the same: sharded weights need everyone.
        ids, wanted = shares[processes.rank] or shares[0]
        with plan.autocast():
            loss = run.model(plan.to_device(ids), plan.to_device(wanted))
        if shares[processes.rank]:
            targets = int((wanted != IGNORED).sum())
            total, count = total + loss.item() * targets, count + targets
    run.model.train()
    total, count = processes.sum(torch.tensor([total, count], dtype=torch.float64)).tolist()
    mean, per_token = total / count, run.corpus.valid_split.bytes_per_token
    return {
        "valid_loss": mean,
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
        "bits_per_byte": mean / math.log(2) / per_token if per_token else None,
        "valid_tokens": int(count),
    }


def sample(run: Run) -> list[str]:
    """The prompts with their continuations, on the main process."""
    tokenizer, settings = run.corpus.tokenizer, run.plan.config.sample
    model = whole_model(run.model, run.plan.processes)
    if model is None or tokenizer is None:
        return []
    model.eval()
    continuations = generate(
        model,
        [tokenizer.encode(prompt) or [tokenizer.eot_id] for prompt in settings.prompts],
        max_new_tokens=settings.tokens,
        sampling=Sampling(
            temperature=settings.temperature, top_k=settings.top_k, seed=run.plan.config.seed
        ),
        stop_ids=[tokenizer.eot_id],
    )
    model.train()
    return [
        prompt + tokenizer.decode(ids)
        for prompt, ids in zip(settings.prompts, continuations, strict=True)
    ]
