"""The script that bench_step.py runs under everstep: the example's training step protected, and
beside it the same step with DDP over plain gloo, in pairs.

Both models start equal, get the same batches and the same random numbers, and must end equal, bit
for bit: else they did not do the same work. Each rank writes its times to DIRECTORY/rankN.json.

    everstep run --nproc-per-node 4 benchmarks/steppairs.py --pairs 1000 --out DIRECTORY
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import everstep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.figures import EXAMPLE
from benchmarks.meter import Meter

from everstep.data.loader import DatasetSource
from everstep.worker import entry, fence, forecast, gate, groups, guard, process, rng, transaction
from everstep.worker.communicators import Communicators
from everstep.worker.control import Control
from everstep.worker.inner import GlooInner
from everstep.worker.runtime import Worker
from everstep.worker.state import local

_TIMEOUT = datetime.timedelta(seconds=60)
_WARM_UP = 10
_PARTS: tuple[tuple[str, Any, str], ...] = (
    ("entry", entry.Entry, "__init__"),
    ("seeding", rng, "seed_all"),
    ("batch (reading it costs the plain step the same)", Worker, "draw"),
    ("batch, its order", DatasetSource, "samples"),
    ("begin, rest", transaction.Step, "_begin"),
    ("agreement on the fence", gate.Gate, "agree"),
    ("collective", groups.OuterGroup, "_run"),
    ("before a collective, rest", gate.Gate, "before_collective"),
    ("capsule", forecast.Forecast, "capture"),
    ("capsule, settled", forecast.Forecast, "settle"),
    ("gate", gate.Gate, "meet"),
    ("fence, waiting for the others", fence.Fence, "enter"),
    ("gate, waiting for collectives", Communicators, "drain"),
    ("learning", transaction.Step, "_learn"),
    ("commit, rest", transaction.Step, "_commit"),
    ("finish, rest", transaction.Step, "_finish"),
    ("messages sent", Control, "send"),
    ("collective ended", guard.Guard, "_end"),
)


def load_example() -> Any:
    """The example as a module, from its file."""
    spec = importlib.util.spec_from_file_location("gpt_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_group(rank: int, size: int) -> dist.ProcessGroup:
    """A process group over gloo as torch makes it, with a TCP store of its own. Blocks for all
    ranks."""
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, size, rank == 0, timeout=_TIMEOUT)
    maker: Any = ProcessGroupGloo  # torch's stubs lack its options
    options = maker._Options()
    options._devices = [maker.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
    group = dist.ProcessGroup(PrefixStore("plain", store), rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name("plain")  # type: ignore[arg-type]
    return group


class Training:
    """A model, its optimizer and scheduler, and the example's step over them."""

    def __init__(self, gpt: Any, group: dist.ProcessGroup | None, optimizer: str) -> None:
        self.model: Any
        if optimizer == "fsdp":
            mesh = mesh_over(group)
            for block in gpt.blocks:
                fully_shard(block, mesh=mesh)
            self.model = fully_shard(gpt, mesh=mesh)
        else:
            self.model = DistributedDataParallel(gpt, process_group=group)
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer
        self.scheduler: LambdaLR | None = None
        if optimizer != "sgd":
            self.optimizer = torch.optim.AdamW(parameters, lr=3e-3)
            self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=1e-2)

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """What the example's train_step does."""
        tokens, targets = batch
        loss: Any = cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        detached: Tensor = loss.detach()
        return detached


def mesh_over(group: dist.ProcessGroup | None) -> DeviceMesh:
    """A mesh over the world, or over `group`, which c10d did not make and so does not know."""
    if group is None:
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    world: Any = dist.distributed_c10d._world
    world.pg_map[group] = ("gloo", None)
    world.pg_names[group] = group.group_name
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    world.pg_backend_config[group] = "cpu:gloo"
    dist.distributed_c10d._register_process_group(group.group_name, group)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))


class Pairs:
    """The two ways of one step, and the clock over both."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        run = everstep.init()
        self.rank = run.rank
        example = load_example()
        torch.manual_seed(0 if args.optimizer == "fsdp" else run.rank)  # FSDP2 broadcasts nothing
        gpt = example.GPT(width=160, layers=3, heads=4, context=64, dropout=0.1)
        self.group = plain_group(run.rank, run.world_size)
        self.plain = Training(copy.deepcopy(gpt), self.group, args.optimizer)
        self.protected = Training(gpt, None, args.optimizer)
        self.dataset = example.TextDataset(64, limit_bytes=2_000_000)
        self.source: Any = run.data(self.dataset, batch_size=2, seed=0)
        things: dict[str, Any] = {
            "model": self.protected.model,
            "optimizer": self.protected.optimizer,
            "data": self.source,
        }
        if self.protected.scheduler is not None:
            things["scheduler"] = self.protected.scheduler
        run.protect(**things)
        self.train_step = run.step(self.protected.step)
        steps = _WARM_UP + args.pairs * args.block + args.metered
        self.batches: Iterator[Any] = iter(run.batches(until=steps))
        assert process._worker is not None
        self.rng_key = process._worker.rng_key
        self.forget_times()

    def forget_times(self) -> None:
        """Begin new lists of times."""
        self.seconds: dict[str, list[float]] = {"everstep": [], "plain": []}
        self.cpu_s: dict[str, list[float]] = {"everstep": [], "plain": []}

    def everstep_block(self, first: int, count: int) -> None:
        """Steps `first` and on, protected."""

        def steps() -> None:
            for _ in range(count):
                self.train_step(next(self.batches))

        self._timed("everstep", steps)

    def plain_block(self, first: int, count: int) -> None:
        """The same steps unprotected. That they draw the same random numbers costs them nothing."""
        assert isinstance(self.source, DatasetSource)
        numbers = [self.source.samples(first + i) for i in range(count)]

        def steps() -> None:
            for samples in numbers:
                pieces = [self.dataset[number] for number in samples]
                self.plain.step(torch.utils.data.default_collate(pieces))

        if count == 1:  # in longer blocks the streams run on; nothing is compared then
            rng.seed_all(self.rng_key, first, "step")
        self._timed("plain", steps)

    def _timed(self, kind: str, steps: Callable[[], None]) -> None:
        self.group.barrier().wait()
        cpu, begin = time.process_time(), time.perf_counter()
        steps()
        end = time.perf_counter()
        self.seconds[kind].append(end - begin)
        self.cpu_s[kind].append(time.process_time() - cpu)

    def check_equal(self) -> bool:
        """Whether both trainings have the same parameters, bit for bit."""
        pairs = zip(self.protected.model.parameters(), self.plain.model.parameters(), strict=True)
        return all(torch.equal(local(a.detach()), local(b.detach())) for a, b in pairs)

    def state_bytes(self) -> int:
        """What this rank's part of the protected state takes."""
        assert process._worker is not None
        assert process._worker.state is not None
        return sum(tensor.nbytes for _, tensor in process._worker.state.replicas())


def agent_cpu_s() -> float:
    """CPU seconds of the agent's process so far: the parent of the zygote that forked this one."""
    status = Path(f"/proc/{os.getppid()}/status").read_text().split("PPid:", 1)[1].split()[0]
    fields = Path(f"/proc/{status}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--block", type=int, default=1, help="steps of each kind in a pair")
    parser.add_argument("--metered", type=int, default=200, help="steps for the breakdown")
    parser.add_argument("--optimizer", choices=("adamw", "sgd", "fsdp"), default="adamw")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for _, owner, name in _PARTS:  # known before the long measurement, not after it
        if not hasattr(owner, name):
            parser.error(f"{owner.__name__} has no {name} any more: correct _PARTS")
    pairs = Pairs(args)
    for number in range(_WARM_UP):
        pairs.everstep_block(number + 1, 1)
        pairs.plain_block(number + 1, 1)
    pairs.forget_times()
    agent_s = agent_cpu_s()
    for number in range(args.pairs):
        first = _WARM_UP + number * args.block + 1
        order = (pairs.everstep_block, pairs.plain_block)
        for block in order if number % 2 == 0 else reversed(order):
            block(first, args.block)
    agent_s = agent_cpu_s() - agent_s
    figures = {
        "seconds": pairs.seconds,
        "cpu_s": pairs.cpu_s,
        "equal": pairs.check_equal(),
        "state_bytes": pairs.state_bytes(),
        "agent_cpu_s_per_step": agent_s / (args.pairs * args.block),
    }
    pairs.forget_times()  # what the meter itself costs is no figure
    meter = Meter()
    for part, owner, name in _PARTS:
        meter.wrap(part, owner, name)
    meter.wrap_made("collective, gloo's launch (the plain step's, too)", GlooInner, "operation")
    first = _WARM_UP + args.pairs * args.block + 1
    for number in range(args.metered):
        pairs.everstep_block(first + number, 1)
    meter.unwrap()
    figures["parts"] = meter.per_step(max(1, args.metered))
    (args.out / f"rank{pairs.rank}.json").write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
