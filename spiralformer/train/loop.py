"""Training, top to bottom: `train`, the run, a step, a global batch."""

from __future__ import annotations

import contextlib
import time
from typing import Literal

import torch

from spiralformer.console import Progress
from spiralformer.data.windows import IGNORED
from spiralformer.errors import UserError
from spiralformer.train import log
from spiralformer.train.config import TrainConfig
from spiralformer.train.distributed import Processes, accumulating, start_processes
from spiralformer.train.log import Sink
from spiralformer.train.look import look_at
from spiralformer.train.optim import learning_rate, update
from spiralformer.train.plan import Corpus, RunPlan
from spiralformer.train.run import Earlier, Run, RunFolder, TrainResult, open_run

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
    process is at a folder another is refused (UserError). With more steps than it had, a run goes
    on to these. SIGINT, SIGTERM and SIGHUP finish the micro-batch, save, and raise `Interrupted`.
    Nothing is left behind in the process that calls: no signal handlers, no process group, no
    changed random state.

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
            plan = RunPlan.of(config, corpus, processes, earlier.identity, earlier.step)
            if earlier.result and plan.extends is not None:
                earlier = earlier.to_go_on(folder, progress.say)
        if earlier.result:
            progress.say(f"{folder.path} is finished ({plan.steps:,} steps): nothing to do")
            return TrainResult(folder.path, earlier.result, again=True)
        for line in plan.describe():
            progress.say(line)
        with open_run(folder, plan, earlier.checkpoint, progress, watch) as run:
            while run.state.step < plan.steps:
                take_step(run)
                look_at(run)
                run.save_or_stop()
            return TrainResult(folder.path, run.finish(), again=False)


def take_step(run: Run) -> None:
    state, plan, optim = run.state, run.plan, run.plan.config.optim
    started = time.perf_counter()
    lr = learning_rate(state.step, plan.steps, optim)
    targets = plan.corpus.train.targets_in(plan.samples(state.step))
    loss = forward_and_backward(run, targets)
    norm = update(run.optimizers, lr, optim.clip, loss)
    state.advance(loss, norm, targets, time.perf_counter() - started)
    if plan.due(state.step, plan.config.log.every):
        record = run.record("train", lr=lr, **state.line(plan.flops_per_token))
        run.progress.note = log.train_note(record)
    run.progress.update(state.step)
    run.stop_if_diverged()


def forward_and_backward(run: Run, targets: int) -> float:
    """Gradients of the mean loss over all `targets` of a global batch, and that loss.

    A micro-batch counts by its targets, so it does not matter how the batch is cut into them or
    divided among processes."""
    plan, processes = run.plan, run.plan.processes
    with processes.together():
        batches = plan.micro_batches(run.state.step)
    kept, total = plan.kept(run.state.step), torch.zeros((), device=processes.device)
    for m, (ids, wanted) in enumerate(batches, 1):
        if m > 1:
            # A step that is not finished leaves no trace: resumed, it is made from its start.
            run.stop_if_asked()
            run.progress.update(run.state.step + (m - 1) / len(batches))
        share = int((wanted != IGNORED).sum()) / targets
        with accumulating(run.model, last=m == len(batches)):
            loss = run.mean_loss(ids, wanted, kept) * share
            (loss * processes.world).backward()  # the exchange of gradients takes their mean
        total += loss.detach()
    if kept is not None:  # what was left out has a gradient of zero, so that every step is alike
        for parameter in run.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return processes.sum(total).item()
