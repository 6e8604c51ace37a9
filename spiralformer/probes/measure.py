"""The probes: what is measured in a forward pass, and how it is averaged over sequences.

A probe is a class in `PROBES`. It gives numbers for each sequence of a batch; only then are
sequences averaged, in float64 and by a mean that is the same in any order. A batch is only a way to
run several sequences at once.

Shapes: B batch, L tokens, N chunks, G chunk size, D width, H heads, T iterations, S = T+1 states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spiralformer.config import Iteration, SpiralConfig
from spiralformer.console import count
from spiralformer.model import SpiralFormer
from spiralformer.probes import GAMMA, metrics
from spiralformer.probes.capture import (
    Trace,
    aggregation_weights,
    allocation_weights,
    mesh_routing,
    watching,
)
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
    settings = Settings(config, gamma, grids, decode)
    probes = {key: kind(settings) for key, kind in PROBES.items() if kind.applies(config)}
    for ids in batches(sequences, batch):
        ids = ids.to(model.embedding.weight.device)
        with watching(model, gamma) as trace:
            model.hidden(model.embed(ids))
        settings.lengths += [ids.shape[1]] * len(ids)
        seen = Pass(model, trace, ids)
        for each in probes.values():
            each.add(each.measure(seen), len(ids))
        progress(len(settings.lengths))
    return ModelResult(
        name=name,
        fields=config.to_dict(),
        sequences=len(settings.lengths),
        lengths=(min(settings.lengths), max(settings.lengths)),
        parameters=sum(p.numel() for p in model.parameters()),
        skipped=skipped(config, settings.lengths),
        values={key: each.result() for key, each in probes.items()},
    )


def chunkings(config: SpiralConfig) -> set[Grid]:
    return {(each.chunk, each.offset) for each in config.iterations if each.chunk > 1}


def batches(sequences: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Neighbours of equal length, up to `size` of them, stacked."""
    held: list[Tensor] = []
    for ids in sequences:
        if held and (len(held) == size or len(held[0]) != len(ids)):
            yield torch.stack(held)
            held = []
        held.append(ids)
    if held:
        yield torch.stack(held)


def skipped(config: SpiralConfig, lengths: list[int]) -> list[str]:
    """What some sequences were too short for."""
    notes = []
    for iteration in config.iterations:
        chunks = [iteration.chunks(length) for length in lengths]
        place = (
            f"iteration {iteration.index} (resolution {iteration.resolution}, chunks of "
            f"{iteration.chunk})"
        )
        where = f"of {count(len(lengths), 'sequence')}"
        if none := chunks.count(0):
            notes.append(
                f"{place} ran on nothing in {none} {where}: {min(lengths)} tokens make no complete "
                "chunk"
            )
        if one := chunks.count(1):
            notes.append(f"{place} saw a single chunk in {one} {where}: an entropy needs two")
    return notes


# ---------------------------------------------------------------------------- what a probe is


@dataclass
class Settings:
    """Of one run of all probes over a model."""

    config: SpiralConfig
    gamma: int
    grids: list[Grid]
    decode: Callable[[int], str]

    def __post_init__(self) -> None:
        self.lengths: list[int] = []  # of the sequences so far


@dataclass
class Pass:
    """One forward pass, as a probe sees it."""

    model: SpiralFormer
    trace: Trace
    ids: Tensor  # B L


class Probe:
    """One measured quantity. Its result is kept in numbers.json under its key in `PROBES`."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.config = settings, settings.config
        self.rows: list[dict[str, np.ndarray]] = []  # what each sequence gave

    @staticmethod
    def applies(config: SpiralConfig) -> bool:
        return config.num_iterations > 0

    def measure(self, seen: Pass) -> Columns:
        """The numbers of each sequence of a batch; a column may be absent, or NaN, where the
        sequences are too short for it."""
        raise NotImplementedError

    def result(self) -> Any:
        """All sequences together: unless said otherwise, the mean of each column. "a/b" becomes b
        in a dictionary a."""
        nested: dict[str, Any] = {}
        for key in dict.fromkeys(key for row in self.rows for key in row):
            *folders, name = key.split("/")
            place = nested
            for folder in folders:
                place = place.setdefault(folder, {})
            place[name] = self.mean(key)
        return nested

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


# ---------------------------------------------------------------------------- attention


class Attention(Probe):
    """Entropy and local mass of every head: stage → metric → (layers, H)."""

    @staticmethod
    def applies(config: SpiralConfig) -> bool:
        return True

    def measure(self, seen: Pass) -> Columns:
        layout = self.config.parsed_layout
        depths = {"pre": layout.pre, **{str(t): n for t, n in enumerate(layout.cores)}}
        depths["post"] = layout.post
        empty = torch.full(
            (len(seen.ids), self.config.num_heads), torch.nan, device=seen.ids.device
        )
        columns = {}
        for stage, depth in depths.items():
            for k, metric in enumerate(("entropy", "local_mass") if depth else ()):
                layers = [
                    seen.trace.attention.get((stage, n), (empty, empty))[k] for n in range(depth)
                ]
                columns[f"{stage}/{metric}"] = torch.stack(layers, 1)
        return columns


class Reference(Probe):
    """What uniform attention gives at the longest length: metric → (T)."""

    @staticmethod
    def applies(config: SpiralConfig) -> bool:
        return True

    def measure(self, seen: Pass) -> Columns:
        return {}

    def result(self) -> Any:
        longest, gamma = max(self.settings.lengths), self.settings.gamma
        pairs = [
            metrics.uniform_reference(each.chunks(longest), metrics.window(each.resolution, gamma))
            for each in self.config.iterations
        ]
        return {
            metric: np.array([pair[k] for pair in pairs])
            for k, metric in enumerate(("entropy", "local_mass"))
        }


# ---------------------------------------------------------------------------- losses and answers


def read_out(model: SpiralFormer, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and most likely token (n) of normalised states (n, D)."""
    losses, tops = [], []
    for h, target in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
        logits = model.head(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(logits, target, reduction="none").double())
        tops.append(logits.argmax(-1))
    return torch.cat(losses), torch.cat(tops)


class Loss(Probe):
    """mean; error; edges and by_position (one number per bin of positions); phases, a list of
    {chunk, offset, excess (G), error (G)}: loss by place in a chunk, less the mean."""

    @staticmethod
    def applies(config: SpiralConfig) -> bool:
        return True

    def measure(self, seen: Pass) -> Columns:
        rows = []
        for out, ids in zip(seen.trace.out, seen.ids, strict=True):
            losses, _ = read_out(seen.model, out[:-1], ids[1:])
            rows.append(self.by_place(losses))
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def by_place(self, losses: Tensor) -> Columns:
        """By position, and by place in a chunk once every iteration can reach the token."""
        edges = position_edges(len(losses))
        row = {"mean": losses.mean()}
        for start, stop in zip(edges, [*edges[1:], len(losses)], strict=True):
            row[f"position/{start}"] = losses[start:stop].mean()
        positions = torch.arange(len(losses), device=losses.device)
        reached = [each.shift for each in self.config.iterations]
        first = max([*reached, *(g for g, _ in self.settings.grids)], default=0)
        for g, offset in self.settings.grids:
            phase = (positions + offset) % g
            used = [losses[(phase == place) & (positions >= first)] for place in range(g)]
            means = torch.stack([part.mean() for part in used])  # NaN where there is none
            row[f"phase/{g}/{offset}"] = means - means.mean()
        return row

    def result(self) -> dict[str, Any]:
        last = max(self.settings.lengths) - 1
        edges = position_edges(last)
        phases = []
        for g, offset in self.settings.grids:
            key = f"phase/{g}/{offset}"
            phase = {"chunk": g, "offset": offset, "excess": self.mean(key)}
            phases.append({**phase, "error": self.error(key), "each": self.values(key)})
        return {
            "mean": float(self.mean("mean")),
            "error": float(np.nan_to_num(self.error("mean"))),
            "edges": np.array([*edges, last], np.float64),
            "by_position": np.array([float(self.mean(f"position/{e}")) for e in edges]),
            "phases": phases,
        }


def position_edges(count: int) -> list[int]:
    """Where the bins of `count` positions begin: 0, 1, 2-3, 4-7, …"""
    return [0, *(1 << k for k in range((count - 1).bit_length()))]


class Lens(Probe):
    """What the model would answer if the loop ended at each state, (S) each: loss and accuracy
    through f_post (the last state's answer is the model's own) and without it (direct_…); settled
    and settled_right: the share of positions whose answer appears, to stay, at each state."""

    def measure(self, seen: Pass) -> Columns:
        rows = [self.one(seen, b) for b in range(len(seen.ids))]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def one(self, seen: Pass, b: int) -> Columns:
        model, states = seen.model, seen.trace.states
        chosen = metrics.positions(seen.ids.shape[1] - 1, metrics.LENS_POSITIONS)
        chosen = chosen.to(seen.ids.device)
        targets = seen.ids[b, 1:][chosen]
        ends = [model.norm(model.post(state[b : b + 1]))[0] for state in states[:-1]]
        answers = {
            "": [out[chosen] for out in (*ends, seen.trace.out[b])],
            "direct_": [model.norm(state[b, chosen]) for state in states],
        }
        row = {}
        for prefix, outs in answers.items():
            losses, tops = zip(*(read_out(model, out, targets) for out in outs), strict=True)
            predictions = torch.stack(tops)  # S positions
            row[f"{prefix}loss"] = torch.stack(losses).mean(1)
            row[f"{prefix}accuracy"] = (predictions == targets).double().mean(1)
            if not prefix:
                at, right = metrics.settled(predictions), predictions[-1] == targets
                for name, where in (("settled", at), ("settled_right", at[right])):
                    counts = torch.bincount(where, minlength=len(states)).double()
                    row[name] = counts / counts.sum()  # NaN where none is right
        return row


# ---------------------------------------------------------------------------- states and updates


class Updates(Probe):
    """How far each iteration moves the state, over the tokens that it can reach (i ≥ s): size
    ‖ũ‖/‖h‖, change ‖h′-h‖/‖h‖, cosine of h and h′, the error of each: (T)."""

    def measure(self, seen: Pass) -> Columns:
        columns: dict[str, list[Tensor]] = {"size": [], "change": [], "cosine": []}
        for iteration, update in zip(self.config.iterations, seen.trace.updates, strict=True):
            t, reached = iteration.index, slice(iteration.shift, None)
            before, after, u = (
                x[:, reached].double() for x in (*seen.trace.states[t : t + 2], update)
            )
            norm = before.norm(dim=-1)
            columns["size"].append((u.norm(dim=-1) / norm).mean(1))
            columns["change"].append(((after - before).norm(dim=-1) / norm).mean(1))
            columns["cosine"].append(F.cosine_similarity(before, after, dim=-1).mean(1))
        return {key: torch.stack(values, 1) for key, values in columns.items()}

    def result(self) -> Any:
        errors = {f"{key}_error": self.error(key) for key in ("size", "change", "cosine")}
        return super().result() | errors


class Similarity(Probe):
    """CKA of the states, (S, S)."""

    def measure(self, seen: Pass) -> Columns:
        chosen = metrics.positions(seen.ids.shape[1], metrics.CKA_POSITIONS)
        each = [
            metrics.hsic([state[b, chosen] for state in seen.trace.states])
            for b in range(len(seen.ids))
        ]
        return {"hsic": torch.from_numpy(np.stack(each))}

    def result(self) -> np.ndarray:
        return metrics.cka(self.mean("hsic"))


class Routing(Probe):
    """MeSH: write and read (S, M); coefficients, their spread over tokens, and the share of the
    state that each term makes up (S, T+2): x, v, ũ⁽⁰⁾, …"""

    @staticmethod
    def applies(config: SpiralConfig) -> bool:
        return config.topology == "mesh"

    def measure(self, seen: Pass) -> Columns:
        terms = [seen.trace.x, seen.trace.v, *seen.trace.updates]
        norms = torch.stack([term.double().norm(dim=-1) for term in terms], -1)  # B L T+2
        columns: dict[str, list[Tensor]] = {}
        for route in mesh_routing(seen.model, seen.trace):
            c = F.pad(route.coefficients.double(), (0, len(terms) - route.coefficients.shape[-1]))
            weight = c * norms
            for key, values in (
                ("write", route.write.double()),
                ("read", route.read.double()),
                ("coefficients", c),
                ("squares", c.square()),
                ("share", weight / weight.sum(-1, keepdim=True)),
            ):
                columns.setdefault(key, []).append(values.mean(1))
        return {key: torch.stack(values, 1) for key, values in columns.items()}

    def result(self) -> Any:
        means = super().result()
        del means["squares"]
        return means | {"spread": self.deviation("coefficients", "squares")}


# ---------------------------------------------------------------------------- inside a chunk


class Aggregation(Probe):
    """What each place of a chunk gives to its latent: for each iteration that learns it, mean and
    spread of α (G), evenness (0 … 1), and tokens, [text, lift, count] each: those with the highest
    and those with the lowest mean of g·α over their occurrences."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.totals: dict[int, Tensor] = {}  # iteration → (2, V): sum of g·α, occurrences

    def measure(self, seen: Pass) -> Columns:
        columns: Columns = {}
        for iteration in self.config.iterations:
            alpha = aggregation_weights(seen.model, seen.trace, iteration.index)
            if alpha is not None:
                if iteration.offset:  # the first chunk has fewer members
                    alpha = alpha[:, 1:]
                self.count(iteration, seen.ids, alpha)
                columns |= profile(iteration.index, alpha)
        return columns

    def count(self, iteration: Iteration, ids: Tensor, alpha: Tensor) -> None:
        g, first = iteration.chunk, (iteration.chunk - iteration.offset) % iteration.chunk
        members = ids[:, first : first + alpha.shape[1] * g].flatten().cpu()
        lift = (g * alpha.double()).flatten().cpu()
        vocab = self.config.vocab_size
        totals = self.totals.setdefault(iteration.index, torch.zeros(2, vocab).double())
        totals[0] += torch.bincount(members, lift, minlength=vocab)
        totals[1] += torch.bincount(members, minlength=vocab)

    def result(self) -> Any:
        profiles = collect_profiles(self)
        for t, (total, occurrences) in self.totals.items():
            often = torch.nonzero(occurrences >= TOKENS_SEEN).flatten()
            lift = total / occurrences
            order = often[lift[often].argsort(descending=True, stable=True)].tolist()
            if len(order) > 2 * TOKENS_SHOWN:
                order = order[:TOKENS_SHOWN] + order[-TOKENS_SHOWN:]
            if (found := profiles[t]) is not None:
                found["tokens"] = [
                    [self.settings.decode(i), float(lift[i]), int(occurrences[i])] for i in order
                ]
        return profiles


class Allocation(Probe):
    """How much of the update each place is dealt: for each iteration that learns it, mean and
    spread of β (G), evenness."""

    def measure(self, seen: Pass) -> Columns:
        columns: Columns = {}
        for t in range(self.config.num_iterations):
            beta = allocation_weights(seen.model, seen.trace, t)
            if beta is not None:
                columns |= profile(t, beta)
        return columns

    def result(self) -> Any:
        return collect_profiles(self)


def profile(t: int, weights: Tensor) -> Columns:
    """Of weights (B, N, G): their mean and mean square by place, and how even they are."""
    weights = weights.double()
    even = torch.special.entr(weights).sum(-1) / math.log(weights.shape[-1])
    values = {"mean": weights, "square": weights.square(), "even": even}
    return {f"{t}/{key}": v.mean(1) for key, v in values.items()}


def collect_profiles(probe: Probe) -> list[dict[str, Any] | None]:
    """Of each iteration; None where there is none, or no sequence has a complete chunk."""
    profiles: list[dict[str, Any] | None] = []
    for t in range(probe.config.num_iterations):
        mean = probe.mean(f"{t}/mean")
        if not mean.shape or np.isnan(mean).any():
            profiles.append(None)
        else:
            spread = probe.deviation(f"{t}/mean", f"{t}/square")
            even = float(probe.mean(f"{t}/even"))
            profiles.append({"mean": mean, "spread": spread, "evenness": even})
    return profiles


PROBES: dict[str, type[Probe]] = {
    "attention": Attention,
    "reference": Reference,
    "loss": Loss,
    "updates": Updates,
    "cka": Similarity,
    "lens": Lens,
    "routing": Routing,
    "aggregation": Aggregation,
    "allocation": Allocation,
}
