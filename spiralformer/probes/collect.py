"""Running a model over sequences and averaging what the probes see.

Every number is first one per sequence, in float64; only then are sequences averaged, by a mean that
is the same in any order. A batch is only a way to run several sequences at once.

Shapes: B batch, L tokens, N chunks, G chunk size, D width, V vocabulary, S = T+1 states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spiralformer.config import Iteration, SpiralConfig
from spiralformer.model import SpiralFormer
from spiralformer.model.operators import OutputDependentAllocation, SelfAggregation, to_grid
from spiralformer.model.topology import MeSH
from spiralformer.probes import metrics
from spiralformer.probes.capture import Trace, mesh_routing, watching
from spiralformer.probes.findings import Findings

HEAD_ROWS = 256  # rows of logits that exist at once
TOKENS_SHOWN = 10  # of the highest and of the lowest aggregation weight
TOKENS_SEEN = 20  # how often a token must occur to be ranked

Grid = tuple[int, int]  # chunk size and offset
Row = dict[str, np.ndarray]  # what one sequence gave


@torch.no_grad()
def probe(
    model: SpiralFormer,
    sequences: Iterable[Tensor],
    *,
    name: str = "model",
    gamma: int = metrics.GAMMA,
    batch: int = 1,
    grids: Iterable[Grid] | None = None,
    decode: Callable[[int], str] = lambda token: f"#{token}",
    progress: Callable[[int], None] = lambda done: None,
) -> Findings:
    """Probes a model on sequences of token ids, each of at least two tokens.

    `grids` are the chunkings by whose places the loss is averaged, by default the model's own: a
    control without chunks is held against those of the model it is a control for.
    """
    grids = sorted(set(chunkings(model.config) if grids is None else grids))
    rows: list[Row] = []
    lengths: list[int] = []
    tokens = TokenWeights(model.config)
    device = model.embedding.weight.device
    for ids in batches(sequences, batch):
        ids = ids.to(device)
        with watching(model, gamma) as trace:
            model.hidden(model.embed(ids))
        rows.extend(measure(model, trace, ids, grids, tokens))
        lengths.extend([ids.shape[1]] * len(ids))
        progress(len(rows))
    return Averages(model.config, rows, lengths).findings(
        name, gamma, grids, tokens.ranked(decode), sum(p.numel() for p in model.parameters())
    )


def chunkings(config: SpiralConfig) -> set[Grid]:
    return {(it.chunk, it.offset) for it in config.iterations if it.chunk > 1}


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


# ---------------------------------------------------------------------------- one forward pass


def measure(
    model: SpiralFormer, trace: Trace, ids: Tensor, grids: list[Grid], tokens: TokenWeights
) -> Iterator[Row]:
    """The numbers of each sequence of a batch."""
    columns: dict[str, Any] = {}  # name → (B, …)
    for (stage, layer), (entropy, local_mass) in trace.attention.items():
        columns[f"entropy/{stage}/{layer}"] = entropy
        columns[f"local_mass/{stage}/{layer}"] = local_mass
    if model.config.num_iterations:
        columns |= measure_updates(model.config, trace)
        columns |= measure_chunks(model, trace, ids, tokens)
    if isinstance(model.topology, MeSH):
        columns |= measure_routing(model.topology, trace)
    arrays = {k: v.detach().double().cpu().numpy() for k, v in columns.items()}
    for b in range(len(ids)):
        row = {k: v[b] for k, v in arrays.items()}
        losses, lens = measure_lens(model, trace, ids, b)
        row |= lens | measure_losses(model.config, losses, grids)
        if model.config.num_iterations:
            chosen = metrics.positions(ids.shape[1], metrics.CKA_POSITIONS)
            row["hsic"] = metrics.hsic([state[b, chosen] for state in trace.states])
        yield row


def measure_updates(config: SpiralConfig, trace: Trace) -> dict[str, Tensor]:
    """How far each iteration moves the state, over the tokens that it can reach (i ≥ s)."""
    found: dict[str, list[Tensor]] = {"size": [], "change": [], "cosine": []}
    for it, u in zip(config.iterations, trace.updates, strict=True):
        before, after = (trace.states[it.index + k][:, it.shift :].double() for k in (0, 1))
        norm = before.norm(dim=-1)
        found["size"].append((u[:, it.shift :].double().norm(dim=-1) / norm).mean(1))
        found["change"].append(((after - before).norm(dim=-1) / norm).mean(1))
        found["cosine"].append(F.cosine_similarity(before, after, dim=-1).mean(1))
    return {f"update/{k}": torch.stack(v, 1) for k, v in found.items()}  # B T


def measure_chunks(
    model: SpiralFormer, trace: Trace, ids: Tensor, tokens: TokenWeights
) -> dict[str, Tensor]:
    """What each place of a chunk gives to the latent (α) and takes from its update (β)."""
    found: dict[str, Tensor] = {}
    for it, scaling in zip(model.config.iterations, model.scalings, strict=True):
        h, z = trace.states[it.index], trace.latents[it.index]
        if isinstance(scaling.downscale, SelfAggregation):
            alpha = scaling.downscale.weights(h)
            if it.offset:  # the first chunk has fewer members
                alpha = alpha[:, 1:]
            tokens.add(it, ids, alpha)
            found |= {f"alpha/{it.index}/{k}": v for k, v in _profile(alpha).items()}
        if isinstance(scaling.upscale, OutputDependentAllocation):
            beta = scaling.upscale.allocation(z, ()) / math.sqrt(it.chunk)
            found |= {f"beta/{it.index}/{k}": v for k, v in _profile(beta).items()}
    return found


def _profile(weights: Tensor) -> dict[str, Tensor]:
    """Of weights (B, N, G): their mean and mean square by place, and how even they are (0 … 1)."""
    weights = weights.double()
    evenness = torch.special.entr(weights).sum(-1) / math.log(weights.shape[-1])
    return {"mean": weights.mean(1), "square": weights.square().mean(1), "even": evenness.mean(1)}


def measure_routing(mesh: MeSH, trace: Trace) -> dict[str, Tensor]:
    """MeSH's write and read weights, and the coefficients of each state over what it is made of."""
    routes = mesh_routing(mesh, trace)
    terms = [trace.x, trace.v, *trace.updates]
    norms = torch.stack([term.double().norm(dim=-1) for term in terms], -1)  # B L T+2
    coefficients, squares, shares = [], [], []
    for route in routes:
        c = F.pad(route.coefficients.double(), (0, len(terms) - route.coefficients.shape[-1]))
        weight = c * norms
        coefficients.append(c.mean(1))
        squares.append(c.square().mean(1))
        shares.append((weight / weight.sum(-1, keepdim=True)).mean(1))
    return {
        "mesh/write": torch.stack([route.write.double().mean(1) for route in routes], 1),
        "mesh/read": torch.stack([route.read.double().mean(1) for route in routes], 1),
        "mesh/coefficients": torch.stack(coefficients, 1),
        "mesh/squares": torch.stack(squares, 1),
        "mesh/share": torch.stack(shares, 1),
    }


def measure_lens(model: SpiralFormer, trace: Trace, ids: Tensor, b: int) -> tuple[Tensor, Row]:
    """The model's own losses (L-1), and what it would answer if the loop ended at each state.

    Through f_post, the last state's answer is the model's own. `direct` leaves f_post out.
    """
    losses, tops = read_out(model, trace.out[b, :-1], ids[b, 1:])
    row: Row = {}
    if not model.config.num_iterations:
        return losses, row
    chosen = metrics.positions(len(losses), metrics.LENS_POSITIONS).to(ids.device)
    targets = ids[b, 1:][chosen]
    through, direct = [], []
    for state in trace.states[:-1]:
        out = model.norm(model.post(state[b : b + 1]))[0]
        through.append(read_out(model, out[chosen], targets))
    through.append((losses[chosen], tops[chosen]))
    for state in trace.states:
        direct.append(read_out(model, model.norm(state[b, chosen]), targets))
    for name, answers in (("", through), ("direct_", direct)):
        row[f"lens/{name}loss"] = np.array([float(loss.mean()) for loss, _ in answers])
        right = [float((top == targets).double().mean()) for _, top in answers]
        row[f"lens/{name}accuracy"] = np.array(right)
    predictions = torch.stack([top for _, top in through])  # S positions
    at, right_at_last = metrics.settled(predictions), predictions[-1] == targets
    for name, where in (("settled", at), ("settled_right", at[right_at_last])):
        counts = torch.bincount(where, minlength=len(through)).double()
        row[f"lens/{name}"] = (counts / counts.sum()).cpu().numpy()  # NaN where none is right
    return losses, row


def read_out(model: SpiralFormer, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and most likely token (n) of normalised states (n, D)."""
    losses, tops = [], []
    for h, target in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
        logits = model.head(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(logits, target, reduction="none").double())
        tops.append(logits.argmax(-1))
    return torch.cat(losses), torch.cat(tops)


def position_edges(length: int) -> list[int]:
    """Bins of positions: 0, 1, 2-3, 4-7, …"""
    return [0, *(1 << k for k in range(max(length - 1, 1).bit_length())), 1 << 62]


def measure_losses(config: SpiralConfig, losses: Tensor, grids: list[Grid]) -> Row:
    """The loss by position, and by place in a chunk once every iteration can reach the token."""
    each = losses.cpu().numpy()
    positions = np.arange(len(each))
    row: Row = {"loss/mean": np.array(each.mean())}
    edges = position_edges(len(each) + 1)
    for k in range(len(edges) - 1):
        inside = each[edges[k] : edges[k + 1]]
        if len(inside):
            row[f"loss/position/{edges[k]}"] = np.array(inside.mean())
    first = max([it.shift for it in config.iterations] + [g for g, _ in grids], default=0)
    for g, omega in grids:
        phase = (positions + omega) % g
        used = [each[(phase == rho) & (positions >= first)] for rho in range(g)]
        means = np.array([part.mean() if len(part) else np.nan for part in used])
        row[f"loss/phase/{g}/{omega}"] = means - means.mean()
    return row


class TokenWeights:
    """Which tokens self-aggregation prefers: the mean of g·α over each token's occurrences."""

    def __init__(self, config: SpiralConfig) -> None:
        self.vocab = config.vocab_size
        self.sums: dict[int, Tensor] = {}
        self.counts: dict[int, Tensor] = {}

    def add(self, it: Iteration, ids: Tensor, alpha: Tensor) -> None:
        """α (B, N, G) of the last N complete chunks."""
        members = to_grid(ids[..., None], it)[0].squeeze(-1)  # B chunks G
        members = members[:, members.shape[1] - alpha.shape[1] :].flatten().cpu()
        lift = (alpha.double() * it.chunk).flatten().cpu()
        total = self.sums.setdefault(it.index, torch.zeros(self.vocab, dtype=torch.float64))
        total += torch.bincount(members, lift, minlength=self.vocab)
        count = self.counts.setdefault(it.index, torch.zeros(self.vocab, dtype=torch.int64))
        count += torch.bincount(members, minlength=self.vocab)

    def ranked(self, decode: Callable[[int], str]) -> dict[int, list[list[Any]]]:
        """Per iteration the tokens with the highest and the lowest lift: [text, lift, count]."""
        found = {}
        for t, total in self.sums.items():
            count = self.counts[t]
            often = torch.nonzero(count >= TOKENS_SEEN).flatten()
            lift = total[often] / count[often]
            order = often[lift.argsort(descending=True, stable=True)].tolist()
            if len(order) > 2 * TOKENS_SHOWN:
                order = order[:TOKENS_SHOWN] + order[-TOKENS_SHOWN:]
            found[t] = [[decode(i), float(total[i] / count[i]), int(count[i])] for i in order]
        return found


# ---------------------------------------------------------------------------- over sequences


class Averages:
    """Means over sequences of what `measure` gave for each."""

    def __init__(self, config: SpiralConfig, rows: list[Row], lengths: list[int]) -> None:
        self.config, self.rows, self.lengths = config, rows, lengths

    def values(self, key: str) -> np.ndarray:
        """(sequences, …); NaN where a sequence was too short to have any."""
        shape = next((row[key].shape for row in self.rows if key in row), ())
        missing = np.full(shape, np.nan)
        return np.stack([row.get(key, missing) for row in self.rows])

    def mean(self, key: str) -> np.ndarray:
        return metrics.mean(self.values(key))

    def spread(self, mean: np.ndarray, key: str) -> np.ndarray:
        """Standard deviation over all tokens or chunks, from the mean of their squares."""
        return np.sqrt(np.maximum(self.mean(key) - mean**2, 0))

    def findings(
        self,
        name: str,
        gamma: int,
        grids: list[Grid],
        tokens: dict[int, list[list[Any]]],
        parameters: int,
    ) -> Findings:
        found = Findings(
            name=name,
            fields=self.config.to_dict(),
            sequences=len(self.rows),
            lengths=(min(self.lengths), max(self.lengths)),
            parameters=parameters,
            attention=self.attention(),
            reference=self.reference(gamma),
            loss=self.loss(grids),
            skipped=self.skipped(),
        )
        if self.config.num_iterations:
            found.updates = self.updates()
            found.cka = metrics.cka(self.mean("hsic"))
            keys = ("loss", "accuracy", "direct_loss", "direct_accuracy", "settled")
            found.lens = {key: self.mean(f"lens/{key}") for key in (*keys, "settled_right")}
            found.aggregation = [self.chunk("alpha", it, tokens) for it in self.config.iterations]
            found.allocation = [self.chunk("beta", it) for it in self.config.iterations]
        if self.config.topology == "mesh":
            found.routing = {k: self.mean(f"mesh/{k}") for k in ("write", "read", "coefficients")}
            found.routing["spread"] = self.spread(found.routing["coefficients"], "mesh/squares")
            found.routing["share"] = self.mean("mesh/share")
        return found

    def attention(self) -> dict[str, dict[str, np.ndarray]]:
        layout = self.config.parsed_layout
        depths = {"pre": layout.pre, **{str(t): n for t, n in enumerate(layout.cores)}}
        depths["post"] = layout.post
        empty = np.full(self.config.num_heads, np.nan)

        def heads(metric: str, stage: str, layer: int) -> np.ndarray:
            found = self.mean(f"{metric}/{stage}/{layer}")
            return found if found.shape else empty

        return {
            stage: {
                metric: np.stack([heads(metric, stage, layer) for layer in range(depth)])
                for metric in ("entropy", "local_mass")
            }
            for stage, depth in depths.items()
            if depth
        }

    def reference(self, gamma: int) -> dict[str, np.ndarray]:
        pairs = [
            metrics.uniform_reference(
                it.chunks(max(self.lengths)), metrics.window(it.resolution, gamma)
            )
            for it in self.config.iterations
        ]
        entropy, local_mass = (np.array([pair[k] for pair in pairs]) for k in (0, 1))
        return {"entropy": entropy, "local_mass": local_mass}

    def updates(self) -> dict[str, np.ndarray]:
        found = {}
        for key in ("size", "change", "cosine"):
            values = self.values(f"update/{key}")
            found[key] = metrics.mean(values)
            found[f"{key}_error"] = metrics.standard_error(values)
        return found

    def chunk(
        self, what: str, it: Iteration, tokens: dict[int, list[list[Any]]] | None = None
    ) -> dict[str, Any] | None:
        key = f"{what}/{it.index}"
        mean = self.mean(f"{key}/mean")
        if not mean.shape or np.isnan(mean).any():
            return None
        even = float(self.mean(f"{key}/even"))
        found = {"mean": mean, "spread": self.spread(mean, f"{key}/square"), "evenness": even}
        return found if tokens is None else {**found, "tokens": tokens.get(it.index, [])}

    def loss(self, grids: list[Grid]) -> dict[str, Any]:
        each = self.values("loss/mean")
        edges = position_edges(max(self.lengths))[:-1]
        phases = []
        for g, omega in grids:
            values = self.values(f"loss/phase/{g}/{omega}")
            error = metrics.standard_error(values)
            mean = metrics.mean(values)
            found = {"chunk": g, "offset": omega, "excess": mean, "error": error}
            phases.append({**found, "each": values})
        return {
            "mean": float(metrics.mean(each)),
            "error": float(np.nan_to_num(metrics.standard_error(each))),
            "edges": np.array([*edges, max(self.lengths) - 1], np.float64),
            "by_position": np.array([float(self.mean(f"loss/position/{e}")) for e in edges]),
            "phases": phases,
        }

    def skipped(self) -> list[str]:
        """What some sequences were too short for."""
        said = []
        total, shortest = len(self.lengths), min(self.lengths)
        for it in self.config.iterations:
            none = sum(it.chunks(length) < 1 for length in self.lengths)
            one = sum(it.chunks(length) == 1 for length in self.lengths)
            place = f"iteration {it.index} (resolution {it.resolution}, chunks of {it.chunk})"
            if none:
                said.append(
                    f"{place} ran on nothing in {none} of {total} sequences: {shortest} tokens "
                    "make no complete chunk"
                )
            if one:
                said.append(
                    f"{place} saw a single chunk in {one} of {total} sequences: an entropy needs "
                    "two"
                )
        return said
