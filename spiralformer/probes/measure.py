"""The probes: what is measured in a forward pass, and how it is averaged over sequences.

A probe is a subclass of `Probe`. It gives numbers for each sequence of a batch; only then are
sequences averaged, in float64 and by a mean that is the same in any order. A batch is only a way to
run several sequences at once.

Shapes: B batch, L tokens, N chunks, G chunk size, D width, H heads, T iterations, S = T+1 states,
P positions looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spiralformer.config import Iteration, SpiralConfig
from spiralformer.console import count
from spiralformer.model import SpiralFormer
from spiralformer.probes import GAMMA, capture, metrics
from spiralformer.probes.capture import Trace, watching
from spiralformer.probes.metrics import METRICS
from spiralformer.probes.result import TOKENS_SEEN, ModelResult

HEAD_ROWS = 256  # rows of logits that exist at once
TOKENS_SHOWN = 10  # of the highest and of the lowest aggregation weight

Grid = tuple[int, int]  # chunk size and offset
Columns = dict[str, Tensor]  # name → a number or an array for each sequence, (B, …)


@torch.no_grad()
def probe(
    model: SpiralFormer,
    sequences: Iterable[Tensor],
    *,
    name: str = "model",
    gamma: int = GAMMA,
    batch: int = 1,
    grids: Iterable[Grid] | None = None,
    decode: Callable[[int], str] = lambda token: f"#{token}",
    progress: Callable[[int], None] = lambda done: None,
) -> ModelResult:
    """Probes a model on sequences of token ids, each of at least two tokens.

    `grids` are the chunkings by whose places the loss is averaged, by default the model's own: a
    control without chunks is held against those of the model it is a control for.
    """
    config = model.config
    grids = sorted(set(chunkings(config) if grids is None else grids))
    run = Run(model, gamma, grids, decode)
    probes = {key: kind(run) for key, kind in PROBES.items() if kind.applies(model)}
    for ids in batches(sequences, batch):
        ids = ids.to(model.embedding.weight.device)
        with watching(model, gamma) as trace:
            model.hidden(model.embed(ids))
        run.lengths += [ids.shape[1]] * len(ids)
        for each in probes.values():
            each.add(each.measure(trace, ids), len(ids))
        progress(len(run.lengths))
    return ModelResult(
        name=name,
        fields=config.to_dict(),
        sequences=len(run.lengths),
        lengths=(min(run.lengths), max(run.lengths)),
        parameters=sum(p.numel() for p in model.parameters()),
        skipped=skipped(config, run.lengths),
        values={key: each.result() for key, each in probes.items()},
    )


def chunkings(config: SpiralConfig) -> set[Grid]:
    return {(each.chunk, each.offset) for each in config.iterations if each.chunk > 1}


def batches(sequences: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Neighbours of equal length, up to `size` of them, stacked."""
    for _, neighbours in groupby(sequences, key=len):
        alike = list(neighbours)
        for start in range(0, len(alike), size):
            yield torch.stack(alike[start : start + size])


def skipped(config: SpiralConfig, lengths: list[int]) -> list[str]:
    """What some sequences were too short for."""
    happened = (
        f"ran on nothing: {min(lengths)} tokens make no complete chunk",
        "saw a single chunk: an entropy needs two",
    )
    notes = []
    for each in config.iterations:
        place = f"iteration {each.index} (resolution {each.resolution}, chunks of {each.chunk})"
        for number, words in enumerate(happened):
            if times := [each.chunks(length) for length in lengths].count(number):
                notes.append(f"{place}, in {times} of {count(len(lengths), 'sequence')}, {words}")
    return notes


# ---------------------------------------------------------------------------- what a probe is


@dataclass
class Run:
    """All probes over one model."""

    model: SpiralFormer
    gamma: int
    grids: list[Grid]
    decode: Callable[[int], str]
    lengths: list[int] = field(default_factory=list)  # of the sequences so far


def has_loop(model: SpiralFormer) -> bool:
    return model.config.num_iterations > 0


def always(model: SpiralFormer) -> bool:
    return True


class Probe:
    """One measured quantity. Its result is kept in numbers.json under its key."""

    applies: Callable[[SpiralFormer], bool]

    def __init_subclass__(
        cls, key: str = "", applies: Callable[[SpiralFormer], bool] = has_loop
    ) -> None:
        if key:
            PROBES[key] = cls
        cls.applies = staticmethod(applies)

    def __init__(self, run: Run) -> None:
        self.run, self.model, self.config = run, run.model, run.model.config
        self.rows: list[dict[str, np.ndarray]] = []  # what each sequence gave

    def measure(self, trace: Trace, ids: Tensor) -> Columns:
        """The numbers of each sequence of a batch; a column may be absent, or NaN, where the
        sequences are too short for it."""
        return {}

    def result(self) -> Any:
        """All sequences together: unless said otherwise, the mean of each column."""
        return {
            key: self.mean(key) for key in dict.fromkeys(key for row in self.rows for key in row)
        }

    def add(self, columns: Columns, sequences: int) -> None:
        arrays = {key: v.detach().double().cpu().numpy() for key, v in columns.items()}
        self.rows += [{key: v[b] for key, v in arrays.items()} for b in range(sequences)]

    def values(self, key: str) -> np.ndarray:
        """(sequences, …), NaN where a sequence has none."""
        shape = next((row[key].shape for row in self.rows if key in row), ())
        missing = np.full(shape, np.nan)
        return np.stack([row.get(key, missing) for row in self.rows])

    def mean(self, key: str) -> np.ndarray:
        return metrics.mean(self.values(key))

    def error(self, key: str) -> np.ndarray:
        return metrics.standard_error(self.values(key))

    def deviation(self, key: str, square: str) -> np.ndarray:
        """Standard deviation over all tokens or chunks, from the mean of their squares."""
        return np.sqrt(np.maximum(self.mean(square) - self.mean(key) ** 2, 0))


PROBES: dict[str, type[Probe]] = {}


# ---------------------------------------------------------------------------- attention


class Attention(Probe, key="attention", applies=always):
    """Entropy and local mass of every head: stage → metric → (layers, H)."""

    def measure(self, trace: Trace, ids: Tensor) -> Columns:
        columns = {}
        nothing = torch.full((2, len(ids), self.config.num_heads), torch.nan)
        for stage, depth in capture.stages(self.config).items():
            layers = trace.attention.get(stage, [nothing] * depth)
            for metric, values in zip(METRICS, torch.stack(layers, 2), strict=True):
                columns[f"{stage}/{metric}"] = values
        return columns

    def result(self) -> Any:
        stages = capture.stages(self.config)
        return {s: {metric: self.mean(f"{s}/{metric}") for metric in METRICS} for s in stages}


class Reference(Probe, key="reference", applies=always):
    """What uniform attention gives at the longest length: metric → (T)."""

    def result(self) -> Any:
        gamma, longest = self.run.gamma, max(self.run.lengths)
        pairs = [
            metrics.uniform_reference(each.chunks(longest), metrics.window(each.resolution, gamma))
            for each in self.config.iterations
        ]
        return dict(zip(METRICS, np.array(pairs).reshape(-1, 2).T, strict=True))


# ---------------------------------------------------------------------------- losses and answers


def read_out(model: SpiralFormer, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and most likely token (B, P) of normalised states (B, P, D)."""
    losses, tops = [], []
    rows = hidden.flatten(0, 1).split(HEAD_ROWS)
    for h, target in zip(rows, targets.flatten().split(HEAD_ROWS), strict=True):
        logits = model.head(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(logits, target, reduction="none").double())
        tops.append(logits.argmax(-1))
    return torch.cat(losses).view_as(targets), torch.cat(tops).view_as(targets)


class Loss(Probe, key="loss", applies=always):
    """mean; error; edges and by_position (one number per bin of positions); phases, a list of
    {chunk, offset, excess (G), error (G)}: loss by place in a chunk, less the mean."""

    def measure(self, trace: Trace, ids: Tensor) -> Columns:
        losses, _ = read_out(self.model, trace.out[:, :-1], ids[:, 1:])
        return self.by_place(losses)

    def by_place(self, losses: Tensor) -> Columns:
        """By position, and by place in a chunk once every iteration can reach the token."""
        columns = {"mean": losses.mean(1)}
        for start, stop in pairwise(position_edges(losses.shape[1])):
            columns[f"position/{start}"] = losses[:, start:stop].mean(1)
        positions = torch.arange(losses.shape[1], device=losses.device)
        reached = [each.shift for each in self.config.iterations]
        first = max([*reached, *(g for g, _ in self.run.grids)], default=0)
        for g, offset in self.run.grids:
            phase = torch.where(positions >= first, (positions + offset) % g, -1)
            means = [losses[:, phase == place].mean(1) for place in range(g)]  # NaN of nothing
            excess = torch.stack(means, 1)
            columns[f"phase/{g}/{offset}"] = excess - excess.mean(1, keepdim=True)
        return columns

    def result(self) -> dict[str, Any]:
        edges = position_edges(max(self.run.lengths) - 1)
        phases = []
        for g, offset in self.run.grids:
            key = f"phase/{g}/{offset}"
            phase = {"chunk": g, "offset": offset, "excess": self.mean(key)}
            phases.append({**phase, "error": self.error(key), "each": self.values(key)})
        return {
            "mean": float(self.mean("mean")),
            "error": float(np.nan_to_num(self.error("mean"))),
            "edges": np.array(edges, np.float64),
            "by_position": np.array([self.mean(f"position/{start}") for start in edges[:-1]]),
            "phases": phases,
        }


def position_edges(count: int) -> list[int]:
    """Where the bins 0, 1, 2-3, 4-7, … of `count` positions begin, and the last one ends."""
    return [0, *(1 << k for k in range((count - 1).bit_length())), count]


def ended_early(model: SpiralFormer, trace: Trace) -> list[Tensor]:
    """What the model would give (B, L, D) if the loop ended at each state; the last is its own."""
    return [*(model.norm(model.post(state)) for state in trace.states[:-1]), trace.out]


@torch.no_grad()
def read_line(model: SpiralFormer, ids: Tensor, decode: Callable[[int], str]) -> dict[str, Any]:
    """A short text token by token: what would follow each token if the loop ended at each state,
    and the probability of what does follow."""
    with watching(model) as trace:
        model.hidden(model.embed(ids[None]))
    readings = [read_out(model, out[:, :-1], ids[None, 1:]) for out in ended_early(model, trace)]
    return {
        "tokens": [decode(token) for token in ids.tolist()],
        "answers": [[decode(token) for token in tops[0].tolist()] for _, tops in readings],
        "probability": np.array([losses[0].neg().exp().cpu().numpy() for losses, _ in readings]),
    }


class Lens(Probe, key="lens"):
    """What the model would answer if the loop ended at each state, (S) each: loss and accuracy
    through f_post (the last state's answer is the model's own) and without it (direct_…); settled
    and settled_right: the share of positions whose answer appears, to stay, at each state."""

    def measure(self, trace: Trace, ids: Tensor) -> Columns:
        chosen = metrics.positions(ids.shape[1] - 1, metrics.LENS_POSITIONS).to(ids.device)
        targets = ids[:, 1:][:, chosen]
        answers = {
            "direct_": [self.model.norm(state[:, chosen]) for state in trace.states],
            "": [out[:, chosen] for out in ended_early(self.model, trace)],
        }
        columns = {}
        for prefix, outs in answers.items():
            readings = (read_out(self.model, out, targets) for out in outs)
            losses, tops = zip(*readings, strict=True)
            predictions = torch.stack(tops)  # S B P
            columns[f"{prefix}loss"] = torch.stack(losses).mean(2).T
            columns[f"{prefix}accuracy"] = (predictions == targets).double().mean(2).T
        settled = F.one_hot(metrics.settled(predictions), len(predictions)).double()  # B P S
        right = (predictions[-1] == targets).double()[..., None]
        columns["settled"] = settled.mean(1)
        columns["settled_right"] = (settled * right).sum(1) / right.sum(1)  # NaN if none is right
        return columns


# ---------------------------------------------------------------------------- states and updates


class Updates(Probe, key="updates"):
    """How far each iteration moves the state, over the tokens that it can reach (i ≥ s): size
    ‖ũ‖/‖h‖, change ‖h′-h‖/‖h‖, cosine of h and h′, the error of each: (T)."""

    def measure(self, trace: Trace, ids: Tensor) -> Columns:
        columns: dict[str, list[Tensor]] = {"size": [], "change": [], "cosine": []}
        for iteration, update in zip(self.config.iterations, trace.updates, strict=True):
            terms = (*trace.states[iteration.index : iteration.index + 2], update)
            before, after, u = (term[:, iteration.shift :].double() for term in terms)
            norm = before.norm(dim=-1)
            columns["size"].append((u.norm(dim=-1) / norm).mean(1))
            columns["change"].append(((after - before).norm(dim=-1) / norm).mean(1))
            columns["cosine"].append(F.cosine_similarity(before, after, dim=-1).mean(1))
        return {key: torch.stack(values, 1) for key, values in columns.items()}

    def result(self) -> Any:
        means = super().result()
        return means | {f"{key}_error": self.error(key) for key in means}


class Similarity(Probe, key="cka"):
    """CKA of the states, (S, S)."""

    def measure(self, trace: Trace, ids: Tensor) -> Columns:
        chosen = metrics.positions(ids.shape[1], metrics.CKA_POSITIONS).to(ids.device)
        states = torch.stack([state[:, chosen] for state in trace.states], 1)  # B S P D
        return {"hsic": torch.stack([metrics.hsic(each) for each in states])}

    def result(self) -> np.ndarray:
        return metrics.cka(self.mean("hsic"))


class Routing(Probe, key="routing", applies=capture.has_routing):
    """MeSH: write and read (S, M); coefficients, their spread over tokens, and the share of the
    state that each term makes up (S, T+2): x, v, ũ⁽⁰⁾, …"""

    def measure(self, trace: Trace, ids: Tensor) -> Columns:
        terms = [trace.x, trace.v, *trace.updates]
        norms = torch.stack([term.double().norm(dim=-1) for term in terms], -1)  # B L T+2
        columns: dict[str, list[Tensor]] = {}
        for write, read, coefficients in capture.mesh_routing(self.model, trace):
            c = F.pad(coefficients.double(), (0, len(terms) - coefficients.shape[-1]))
            share = c * norms / (c * norms).sum(-1, keepdim=True)
            route = {"write": write, "read": read, "coefficients": c, "share": share}
            for key, values in {**route, "squares": c.square()}.items():
                columns.setdefault(key, []).append(values.double().mean(1))
        return {key: torch.stack(values, 1) for key, values in columns.items()}

    def result(self) -> Any:
        means = super().result()
        del means["squares"]
        return means | {"spread": self.deviation("coefficients", "squares")}


# ---------------------------------------------------------------------------- inside a chunk


class Profile(Probe):
    """Weights (B, N, G) over the places of a chunk: for each iteration that learns them, mean and
    spread (G) and evenness (0 … 1); None where there are none, or no complete chunk."""

    weights: Callable[[SpiralFormer, Trace, int], Tensor | None]

    def measure(self, trace: Trace, ids: Tensor) -> Columns:
        columns: Columns = {}
        for iteration in self.config.iterations:
            t = iteration.index
            weights = self.weights(self.model, trace, t)
            if weights is not None:
                first = 1 if iteration.offset else 0  # that chunk has fewer members
                weights = weights[:, first:].double()
                self.look(iteration, ids, weights)
                columns[f"{t}/mean"] = weights.mean(1)
                columns[f"{t}/square"] = weights.square().mean(1)
                entropy = torch.special.entr(weights).sum(-1)
                columns[f"{t}/even"] = entropy.mean(1) / math.log(iteration.chunk)
        return columns

    def look(self, iteration: Iteration, ids: Tensor, weights: Tensor) -> None:
        """At the weights of the chunks that are all tokens."""

    def result(self) -> list[dict[str, Any] | None]:
        return [self.profile(t) for t in range(self.config.num_iterations)]

    def profile(self, t: int) -> dict[str, Any] | None:
        mean = self.mean(f"{t}/mean")
        if not mean.shape or np.isnan(mean).any():
            return None
        spread = self.deviation(f"{t}/mean", f"{t}/square")
        return {"mean": mean, "spread": spread, "evenness": float(self.mean(f"{t}/even"))}


class Allocation(Profile, key="allocation"):
    """β: how much of the update each place is dealt."""

    weights = staticmethod(capture.allocation_weights)


class Aggregation(Profile, key="aggregation"):
    """α: what each place of a chunk gives to its latent. And tokens, [text, lift, count] each:
    those with the highest and those with the lowest mean of g·α over their occurrences."""

    weights = staticmethod(capture.aggregation_weights)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        shape = (run.model.config.num_iterations, 2, run.model.config.vocab_size)
        self.totals = torch.zeros(shape, dtype=torch.float64)  # T 2 V: sum of g·α, occurrences

    def look(self, iteration: Iteration, ids: Tensor, weights: Tensor) -> None:
        first = -iteration.offset % iteration.chunk
        members = ids[:, first : first + weights[0].numel()].flatten().cpu()
        totals, vocab = self.totals[iteration.index], self.config.vocab_size
        lift = (iteration.chunk * weights).flatten().cpu()
        totals[0] += torch.bincount(members, lift, minlength=vocab)
        totals[1] += torch.bincount(members, minlength=vocab)

    def profile(self, t: int) -> dict[str, Any] | None:
        profile = super().profile(t)
        if profile is not None:
            total, occurrences = self.totals[t]
            often = torch.nonzero(occurrences >= TOKENS_SEEN).flatten()
            lift = total / occurrences
            order = often[lift[often].argsort(descending=True, stable=True)].tolist()
            if len(order) > 2 * TOKENS_SHOWN:
                order = order[:TOKENS_SHOWN] + order[-TOKENS_SHOWN:]
            profile["tokens"] = [
                [self.run.decode(i), float(lift[i]), int(occurrences[i])] for i in order
            ]
        return profile
