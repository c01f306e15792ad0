"""Which device this worker trains on, and its inner groups there.

Does not know: how either is used (streams.py, nccl.py)."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from everstep.worker.accelerator import Cuda, choose
from everstep.worker.inner import Exchange, GlooInner, Inner
from everstep.worker.nccl import DeviceInner, NcclInner, prepare
from everstep.worker.streams import Device

CPU = torch.device("cpu")
Note = Callable[[str, str], None]
MakeGloo = Callable[[Callable[[Inner], None]], GlooInner]


def count() -> int:
    """How many CUDA devices nccl can use here. Sets up none of them."""
    return torch.cuda.device_count() if dist.is_nccl_available() else 0


def find(wanted: str, local_rank: int, local_size: int, note: Note) -> Device | None:
    """The device of this rank, made current on the calling thread; None for the CPU. `wanted`: the
    setting. Sets torch's variables for nccl. Raises UserError where it can't be had, or can't be
    protected. Main thread, before the first group."""
    index = choose(
        wanted,
        devices=count() if wanted != "cpu" else 0,
        local_rank=local_rank,
        local_size=local_size,
    )
    if index is None:
        return None
    changed = prepare(os.environ)
    if changed:
        note(
            "nccl-variables",
            f"{', '.join(changed)}: set by everstep for its workers, so that torch does not end a "
            "process that can recover; your value is not used",
        )
    accelerator = Cuda(index)
    accelerator.enter()
    return Device(accelerator)


def unprotected(local_rank: int) -> torch.device:
    """The device of a rank that nothing protects, chosen as `find` does, and made current."""
    wanted = os.environ.get("EVERSTEP_DEVICE", "auto")
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = count() if wanted != "cpu" else 0
    index = choose(wanted, devices=devices, local_rank=local_rank, local_size=local_size)
    if index is None:
        return CPU
    Cuda(index).enter()
    return torch.device("cuda", index)


def build(
    device: Device,
    gloo: MakeGloo,
    exchange: Exchange,
    *,
    rank: int,
    size: int,
    name: str,
    generation: int,
    build_timeout_s: float,
    collective_timeout_s: float,
    on_begin: Callable[[Inner], None],
    on_error: Callable[[Exception], None],
) -> DeviceInner:
    """Both inner groups of one outer group. Blocks; on a builder thread. `exchange` is nccl's own
    round; `gloo` makes the other group and announces it."""

    def nccl(begun: Callable[[Inner], None]) -> NcclInner:
        return NcclInner(
            rank,
            size,
            exchange,
            name=f"{name}@{generation}",
            generation=generation,
            device=device,
            build_timeout_s=build_timeout_s,
            collective_timeout_s=collective_timeout_s,
            on_begin=begun,
            on_error=on_error,
        )

    return DeviceInner(gloo, nccl, on_begin)
