"""Looking at a run between its steps: validation and samples."""

from __future__ import annotations

import itertools
import math

import torch

from spiralformer.data.windows import IGNORED
from spiralformer.decode import Sampling, generate
from spiralformer.decode.generate import NotFiniteError
from spiralformer.train import log
from spiralformer.train.distributed import whole_model
from spiralformer.train.log import Record
from spiralformer.train.run import Run


def look_at(run: Run) -> None:
    """Validation and samples, where they are due."""
    plan, config, step = run.plan, run.plan.config, run.state.step
    if plan.corpus.valid is not None and plan.due(step, plan.valid_every):
        run.progress.say(log.valid_line(run.record("valid", **validate(run))))
    wanted = plan.corpus.tokenizer is not None and config.sample.tokens > 0
    if wanted and plan.due(step, config.sample.every or plan.valid_every):
        texts = sample(run)
        run.record("sample", texts=texts)
        if texts and step < plan.steps:
            run.progress.say(log.sample_lines(texts, limit=200))


@torch.no_grad()
def validate(run: Run) -> Record:
    """Over the first windows of the validation split; bits per byte are of the text in them."""
    plan, processes, valid = run.plan, run.plan.processes, run.plan.corpus.valid
    assert valid is not None
    batches = valid.data.in_order(plan.micro_batch, valid.windows)
    total, count = 0.0, 0
    run.model.eval()
    for shares in itertools.zip_longest(*[batches] * processes.world):
        # With nothing left, a process takes part all the same: sharded weights need everyone.
        ids, wanted = shares[processes.rank] or shares[0]
        loss = run.mean_loss(ids, wanted)
        if shares[processes.rank]:
            targets = int((wanted != IGNORED).sum())
            total, count = total + loss.item() * targets, count + targets
    run.model.train()
    total, count = processes.sum(torch.tensor([total, count], dtype=torch.float64)).tolist()
    mean, size = total / count, valid.text_bytes
    return {
        "valid_loss": mean,
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
        "bits_per_byte": total / math.log(2) / size if size else None,
        "valid_tokens": int(count),
    }


def sample(run: Run) -> list[str]:
    """The prompts with their continuations, on the main process."""
    tokenizer, settings = run.plan.corpus.tokenizer, run.plan.config.sample
    model = whole_model(run.model, run.plan.processes)
    if model is None or tokenizer is None:
        return []
    model.eval()
    try:
        continuations = generate(
            model,
            [tokenizer.encode(prompt) or [tokenizer.eot_id] for prompt in settings.prompts],
            max_new_tokens=settings.tokens,
            sampling=Sampling(
                temperature=settings.temperature, top_k=settings.top_k, seed=run.plan.config.seed
            ),
            stop_ids=[tokenizer.eot_id],
        )
    except NotFiniteError as error:
        run.progress.say(f"step {run.state.step:,}: no sample: {error}")
        return []
    finally:
        model.train()
    return [
        prompt + tokenizer.decode(ids)
        for prompt, ids in zip(settings.prompts, continuations, strict=True)
    ]
