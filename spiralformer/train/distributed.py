"""One process or many: what `torchrun` started, who they are, and the model they share.

With several processes the model is wrapped by DDP or sharded by FSDP2. Everything else in the
trainer is written once, for any number of processes."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.benchmark import Timer

from spiralformer.errors import UserError
from spiralformer.model import SpiralFormer
from spiralformer.model_folder import usable_device

TIMEOUT = datetime.timedelta(minutes=30)  # for what one process does while the others wait


@dataclass(frozen=True)
class Processes:
    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def gather(self, value) -> list:
        """Every process's value, on all. From host to host: no device waits for it."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def from_main(self, value):
        """The main process's value, on all."""
        return self.gather(value)[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All leave this together. What the user did wrong on one process ends all of them, rather
        than leave the others waiting for it."""
        problem = None
        try:
            yield
        except UserError as error:
            if self.world == 1:
                raise
            problem = str(error)
        for known in filter(None, self.gather(problem)):
            raise SharedError(known)


class SharedError(UserError):
    """What every process knows, so that the main one alone need say it."""


@contextlib.contextmanager
def start_processes(device: str) -> Iterator[Processes]:
    """Joins the other processes, if `torchrun` started any or the caller has a group of them."""
    chosen = choose_device(device)
    ours = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if ours:
        # Gloo carries what the hosts tell each other, NCCL what the devices do.
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        if not dist.is_initialized():
            yield Processes(0, 1, chosen)
        else:
            yield Processes(dist.get_rank(), dist.get_world_size(), chosen)
    except BaseException as error:
        if ours:
            _clear_frames(error)
        raise
    finally:
        if ours:
            # The model must be gone by now. A DDP model that is the last to hold the group waits
            # for the group's threads while it holds the lock that they need to end.
            gc.collect()
            dist.destroy_process_group()


def _clear_frames(error: BaseException | None) -> None:
    """Frees what the functions that an error went through still hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name += f":{os.environ.get('LOCAL_RANK', '0')}"
    device = usable_device(name, "device")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@functools.cache
def bfloat16_is_fast(device: torch.device) -> bool:
    """Whether this device multiplies bfloat16 faster than float32. Elsewhere than on CUDA, which
    can tell, it is measured: the dtypes take turns and the best time of each counts, on one thread
    of the host, since threads wait for each other where other processes keep the cores busy."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        times = [
            [_seconds(dtype, device) for dtype in (torch.float32, torch.bfloat16)] for _ in range(5)
        ]
    except (RuntimeError, TypeError):  # no such product on this device
        return False
    float32, bfloat16 = map(min, zip(*times, strict=True))
    return bfloat16 < float32


def _seconds(dtype: torch.dtype, device: torch.device, size: int = 512) -> float:
    """Of a product of two matrices; `item` waits for the device."""
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    timer = Timer("(matrix @ matrix)[0, 0].item()", globals={"matrix": matrix}, num_threads=1)
    return timer.timeit(1).median


# ---------------------------------------------------------------------------- the model


def parallelize(
    model: SpiralFormer, kind: str, processes: Processes, elastic: bool = False
) -> nn.Module:
    """The model as one of several processes trains it: a copy (ddp) or a share (fsdp). Elastic: not
    every step uses every parameter."""
    if processes.world == 1:
        return model
    if kind == "ddp":
        devices = [processes.device] if processes.device.type == "cuda" else None
        return DistributedDataParallel(
            model,
            device_ids=devices,
            gradient_as_bucket_view=True,
            find_unused_parameters=elastic,
        )
    for stack in model.stacks():
        # The core runs again and again in one pass: gather its weights once and keep them for it.
        core = any(stack is core for core in model.cores)
        for block in stack.blocks:
            fully_shard(block, reshard_after_forward=not core)
    fully_shard(model)
    return model


def accumulating(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
    """DDP exchanges gradients after the last micro-batch only. FSDP does so after each: keeping
    whole gradients in between would undo the sharding."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def whole_model(model: nn.Module, processes: Processes) -> SpiralFormer | None:
    """The model with all its weights on the main process, to sample from or to export; None on the
    others. To be called on all."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not isinstance(model, FSDPModule):
        return model if processes.main else None  # type: ignore[return-value]
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if not processes.main:
        return None
    with torch.device("meta"):
        whole = SpiralFormer(model.config)  # type: ignore[arg-type]
    weights.setdefault("head.weight", weights["embedding.weight"])
    whole.load_state_dict(weights, assign=True)
    if whole.config.tie_embeddings:
        whole.head.weight = whole.embedding.weight
    return whole.to(processes.device)
