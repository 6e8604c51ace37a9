"""A configuration as a picture: the stacks, the loop at its resolutions, which token reads which
chunk, and where decoding runs the core.

The SVG stands by itself and follows the reader's light or dark scheme. On the page one picks a
token and sees what reaches it.
"""

from __future__ import annotations

from spiralformer import accounting
from spiralformer.config import Iteration, SpiralConfig
from spiralformer.console import count
from spiralformer.templates import render

TOPOLOGIES = {
    "none": "each update replaces the state",
    "anchor": "Anchor: each update is added to the state before the loop",
    "mesh": "MeSH: updates are written to {slots} memory slots, states are read from them",
}
RAMP = ("#6558d3", "#2f7fc6", "#1899a0", "#3aa457", "#c99a12")  # coarse to fine; on white or black


def svg(config: SpiralConfig, *, pick: bool = False, dark: bool = True) -> str:
    """The picture, with one token traced or, to `pick` from, all of them (`trace.js` does the
    picking). Without `dark` it is light whatever the reader's scheme."""
    shown = length(config)
    return render(
        "diagram.svg",
        config=config,
        layout=config.parsed_layout,
        topology=TOPOLOGIES.get(config.topology, config.topology).format(slots=config.mesh_slots),
        cores=cores(config) if config.iterations else "",
        mean_passes=accounting.decode_cost(config).mean_passes if config.iterations else 0,
        tokens=range(shown),
        cell=20 if shown <= 32 else max(12, 640 // shown),
        traced=shown * 11 // 16,
        colours=ramp(config.num_iterations),
        pick=pick,
        dark=dark,
        batched=any(len(group) > 1 for group in config.pass_groups),
        reads=reads,
        members=members,
        reached=reached,
        batches=lambda i: accounting.batches_at(config, i),
        describe=lambda i: "\n".join(describe(config, i)),
        count=count,
    )


def page(config: SpiralConfig, name: str) -> str:
    """The picture with a token to pick, as a page that needs nothing else."""
    last, picture = length(config) - 1, svg(config, pick=True)
    return render("diagram.html", config=config, name=name, last=last, picture=picture)


def length(config: SpiralConfig) -> int:
    """Tokens that are drawn: enough to see the coarsest chunks made and read, within reason."""
    coarsest = max((each.chunk for each in config.iterations), default=1)
    return min(max(16, 3 * coarsest + 8), 64)


# ---------------------------------------------------------------------------- what reads what


def reads(iteration: Iteration, i: int) -> int | None:
    """The chunk whose latent token i reads, if any: up-scaling, then the right-shift."""
    return iteration.chunk_of(i - iteration.shift) if i >= iteration.shift else None


def members(iteration: Iteration, j: int) -> tuple[int, int]:
    """The first and the last token of chunk j."""
    end = (j + 1) * iteration.chunk - iteration.offset
    return max(end - iteration.chunk, 0), end - 1


def reached(iteration: Iteration, i: int) -> range:
    """The tokens whose states reach token i at this iteration. The chunk that it reads has attended
    in the core to all chunks before it."""
    j = reads(iteration, i)
    return range(0) if j is None else range(members(iteration, j)[1] + 1)


# ---------------------------------------------------------------------------- in words


def cores(config: SpiralConfig) -> str:
    """What runs in the loop."""
    layout, loops = config.parsed_layout, config.num_iterations
    if layout.tied:
        return f"loop: one core of {count(layout.cores[0], 'layer')}, run {count(loops, 'time')}"
    depths = " + ".join(map(str, layout.cores))
    return f"loop: {count(loops, 'core')} of {depths} layers"


def describe(config: SpiralConfig, i: int) -> list[str]:
    """What token i reads and what decoding it runs, a line each."""
    layout = config.parsed_layout
    before = f"attends to {span('token', 0, i)}."
    lines = [f"Token {i}"]
    if layout.pre:
        lines.append(f"{'pre' if config.iterations else 'every layer'}: {before}")
    for iteration in config.iterations:
        j, name = reads(iteration, i), f"iteration {iteration.index} at {iteration.resolution}"
        if j is None:
            lines.append(
                f"{name}: reads nothing; the first latent returns at token {iteration.shift}."
            )
            continue
        what = f"chunk {j} ({span('token', *members(iteration, j))})"
        if iteration.chunk == 1 and not iteration.shift:
            what = "itself"
        attended = span("chunk" if iteration.chunk > 1 else "token", 0, j)
        reach = f", so {span('token', 0, len(reached(iteration, i)) - 1)}" * (iteration.chunk > 1)
        lines.append(f"{name}: reads {what}, which attended to {attended}{reach}.")
    if layout.post:
        lines.append(f"post: {before}")
    if config.iterations:
        lines.append(f"Decoding it runs {passes(config, i)}.")
    return lines


def passes(config: SpiralConfig, i: int) -> str:
    """The runs of the core when token i is decoded."""
    batches = accounting.batches_at(config, i)
    if not batches:
        return "no pass of the core: it completes no chunk"
    runs = [" and ".join(map(str, batch)) + " at once" * (len(batch) > 1) for batch in batches]
    one = sum(map(len, batches)) == 1
    return f"the core for iteration{'' if one else 's'} {', then '.join(runs)}"


def span(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first}–{last}"


# ---------------------------------------------------------------------------- colours


def ramp(steps: int) -> list[str]:
    """A colour for each iteration, coarse to fine."""
    colours = []
    for step in range(steps):
        k, share = divmod(step * (len(RAMP) - 1) / max(steps - 1, 1), 1)
        pair = RAMP[int(k)], RAMP[min(int(k) + 1, len(RAMP) - 1)]
        ends = zip(*(bytes.fromhex(colour[1:]) for colour in pair), strict=True)
        colours.append("#" + bytes(round(a + share * (b - a)) for a, b in ends).hex())
    return colours
