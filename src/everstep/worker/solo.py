"""How each collective answers with no peers: as if every peer held what this rank holds.

Theory of operation: a process that joins runs the script's setup and one rehearsed step alone, so
its collectives must end at once with outputs of the right shape and sane values; what they hold is
replaced by the state of a survivor. Each function writes to the outputs in place. What is not here
needs no answer (broadcast, barrier, send) or gets zeros (recv).

`size` and `rank` are those of the group. Main thread, or whichever the script calls a collective
on; nothing blocks. Does not know: groups, guards, poison."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import ReduceOp

from everstep.worker.communicators import Answer, tensors_of
from everstep.worker.guard import fill


def reduce(tensors: Any, opts: Any, size: int) -> None:
    """As if all peers held the same: a sum is `size` times, a product a power, everything else
    stays."""
    operation = getattr(opts, "reduceOp", None)
    kind = ReduceOp.SUM if operation is None else operation
    for tensor in tensors_of(tensors):
        if kind == ReduceOp.SUM:
            tensor.detach().mul_(size)
        elif kind == ReduceOp.PRODUCT:
            tensor.detach().pow_(size)
        elif kind == ReduceOp.BXOR and size % 2 == 0:
            tensor.detach().zero_()


def gather(outputs: Any, inputs: Any) -> None:
    """Every row is `size` copies of this rank's tensor."""
    for row, own in zip(outputs, inputs, strict=False):
        for tensor in row:
            tensor.detach().copy_(own)


def gather_coalesced(outputs: Any, inputs: Any) -> None:
    """Several gathers; each row of `outputs` has one tensor for each of `inputs`."""
    for row in outputs:
        gather([[tensor] for tensor in row], inputs)


def gather_single(output: Any, own: Any, size: int) -> None:
    """Like `gather`, into one tensor; an empty one stays so."""
    if output.numel():
        output.detach().view(size, -1).copy_(own.detach().reshape(1, -1).expand(size, -1))


def reduce_scatter(outputs: Any, inputs: Any, opts: Any, size: int, rank: int) -> None:
    """This rank's part of its own rows, reduced."""
    for output, row in zip(outputs, inputs, strict=True):
        output.detach().copy_(row[rank])
    reduce(outputs, opts, size)


def reduce_scatter_single(output: Any, own: Any, opts: Any, size: int, rank: int) -> None:
    """Like `reduce_scatter`, from one tensor; an empty one stays so."""
    if output.numel():
        output.detach().view(-1).copy_(own.detach().reshape(size, -1)[rank])
    reduce(output, opts, size)


def scatter(outputs: Any, inputs: Any, rank: int) -> None:
    """This rank's part of its own rows, or zeros where another rank has them."""
    if inputs and inputs[0]:
        for output, row in zip(outputs, inputs, strict=True):
            output.detach().copy_(row[rank])
    else:
        fill(outputs, Answer.ZEROS)


def all_to_all(outputs: Any, inputs: Any) -> None:
    """This rank's own data, cut or filled with zeros to the output's size."""
    for output, own in zip(outputs, inputs, strict=True):
        piece = own.detach().reshape(-1)[: output.numel()]
        output.detach().zero_()
        output.detach().view(-1)[: piece.numel()].copy_(piece)
