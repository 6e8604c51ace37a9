"""What runs the parts of a decode step that read weights: stacks of blocks and the head.

`algorithm` says what happens to a token; a runner makes its stacks fast. Here they run eagerly, in
`compiled` through `torch.compile`, in `native` in C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from spiralformer.decode.state import CacheWrite
from spiralformer.errors import UserError
from spiralformer.model import SpiralFormer
from spiralformer.model.blocks import Stack

RunnerName = Literal["auto", "eager", "compile", "native"]
PACKAGED = __name__.startswith("spiralformer.")  # False in the copy that an exported folder carries
LONG = 4096  # tokens to be decoded from which on a build of a minute pays off


class Runner:
    """The eager one."""

    name = "eager"
    capacity = 0  # tokens that a state should have room for from the start

    def stack(
        self,
        stack: Stack,
        inputs: Sequence[Tensor],
        writes: Sequence[CacheWrite],
        at: Tensor | None = None,
    ) -> list[Tensor]:
        """One pass of a stack over several groups of rows, each with a cache of its own.

        The groups go through the layers as one batch, so the weights are read once; only attention
        looks at them one by one. All groups must bring the same number of entries a row. `at` is
        the last entry of each row, if no other is wanted (of one group only).
        """
        if len(inputs) == 1:
            only = writes[0]
            caches = [partial(only, layer) for layer in range(len(stack.blocks))]
            return [stack(inputs[0], only.positions, caches, at)]
        sizes = [write.batch for write in writes]

        def attend_in_groups(layer: int, attend: nn.Module, *qkv: Tensor) -> Tensor:
            parts = zip(writes, *(x.split(sizes) for x in qkv), strict=True)
            return torch.cat([write(layer, attend, *group) for write, *group in parts])

        caches = [partial(attend_in_groups, layer) for layer in range(len(stack.blocks))]
        positions = torch.cat([write.positions for write in writes])
        return list(stack(torch.cat(list(inputs)), positions, caches).split(sizes))

    def head(self, model: SpiralFormer, hidden: Tensor) -> Tensor:
        return model.head(hidden)


EAGER = Runner()


def runner_for(
    model: SpiralFormer,
    runner: RunnerName | Runner = "auto",
    *,
    rows: int = 1,
    tokens: int = 0,  # to be decoded for each row
    capacity: int = 1024,
) -> Runner:
    """The runner of this name for this model; one that is given comes back as it is.

    "native" builds its C++ if it must; "auto" takes it if that was built before, or if there is
    so much to decode that building pays off, and is eager otherwise: a first short generation
    never waits for a compiler.
    """
    if isinstance(runner, Runner):
        return runner
    if runner not in get_args(RunnerName):
        raise UserError(f"runner {runner!r} is unknown; choose {', '.join(get_args(RunnerName))}")
    if runner == "eager":
        return EAGER
    if runner == "compile":
        from spiralformer.decode.compiled import CompiledRunner

        return CompiledRunner(model, capacity, rows)
    asked = runner == "native"
    if not PACKAGED:
        reason: str | None = "this folder carries no C++; install spiralformer"
    else:
        native = import_module("spiralformer.decode.native")
        reason = native.unfit(model)
        if reason is None and (asked or rows * tokens >= LONG or native.is_built()):
            reason = native.load()
            if reason is None:
                return native.NativeRunner(model)
            if not asked:
                native.say_once(f"decoding eagerly: {reason}")
    if asked:
        raise UserError(f"runner 'native' cannot serve this model: {reason}; use 'eager'")
    return EAGER
