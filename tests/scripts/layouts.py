"""A small job in many layouts: `everstep run layouts.py LAYOUT [--steps N]`.

Each layout is a way in which people spread a model over ranks, or write its update; steps take a
few milliseconds. What a rank computes depends on its data-parallel place alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("layout")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--checkpoint", help="a directory for checkpoints, every third step")
parser.add_argument("--memory-every", type=int, default=0, help="steps between saves to memory")
args = parser.parse_args()
torch.set_num_threads(1)
run = everstep.init()
torch.manual_seed(11)
WIDTH = 16
Step = Callable[[Any], Any]


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden


def build(blocks: int = 2) -> Any:
    return nn.Sequential(
        nn.Linear(8, WIDTH), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, 4)
    )


def batch_at(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + replica)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def ordinary(model: Any, optimizer: Any, *, clip: bool = True) -> Callable[[Any], Any]:
    def train_step(batch: Any) -> Any:
        x, y = batch
        loss: Any = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


def by_closure(model: Any, optimizer: Any, *, alike: bool = False) -> Step:
    """`alike`: the optimizer decides by the loss, so it must be every rank's."""

    def train_step(batch: Any) -> Any:
        x, y = batch

        def closure() -> Any:
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if alike:
                loss = loss.detach().clone()
                dist.all_reduce(loss)
            return loss

        return optimizer.step(closure).detach()

    return train_step


def shard(model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model[1:-1]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


class Experts(nn.Module):
    """A mixture of experts, one a rank of `group`, with data-dependent sizes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.size = dist.get_world_size(group)
        self.gate = nn.Linear(WIDTH, self.size)
        torch.manual_seed(50 + dist.get_rank(group))
        self.expert = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn import functional

        all_to_all_single: Any = functional.all_to_all_single

        weight, choice = torch.softmax(self.gate(x), -1).max(-1)
        order = torch.argsort(choice, stable=True)
        sent = torch.bincount(choice, minlength=self.size)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        arrived = all_to_all_single(
            torch.empty(int(got.sum()), WIDTH), x[order], got.tolist(), sent.tolist(), self.group
        )
        back = all_to_all_single(
            torch.empty_like(x), self.expert(arrived), sent.tolist(), got.tolist(), self.group
        )
        return x + weight.unsqueeze(-1) * torch.zeros_like(x).index_copy(0, order, back)


class SyncedNorm(nn.Module):
    """What SyncBatchNorm does, which torch has for accelerators only."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn import functional

        all_reduce: Any = functional.all_reduce
        sums: torch.Tensor = all_reduce(torch.cat([x.sum(0), (x * x).sum(0)])) / (
            len(x) * run.world_size
        )
        mean, square = sums[:WIDTH], sums[WIDTH:]
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
        normed: torch.Tensor = (x - mean) * torch.rsqrt(square - mean * mean + 1e-5)
        return normed


layout = args.layout
things: dict[str, Any] = {}
replicas: Any = None
undo: dict[str, Any] = {}
replica = run.rank
world = run.world_size
function: Step
net: Any
model: Any
optimizer: Any

if layout.startswith("fsdp"):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options: dict[str, Any] = {}
    if layout == "fsdp-keep":
        options["reshard_after_forward"] = False
    if layout == "fsdp-mixed":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    options["mesh"] = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    net = build()
    model = shard(net, **options)
    if layout == "fsdp-prefetch":
        net[1].set_modules_to_forward_prefetch([net[2]])
        net[2].set_modules_to_backward_prefetch([net[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    function = ordinary(model, optimizer)
elif layout.startswith("hsdp"):
    mesh = init_device_mesh("cpu", (run.world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    if layout == "hsdp-tp":
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    net = build()
    if layout == "hsdp-tp":
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        for block in net[1:-1]:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        replica = run.rank // 2
    keep = {"reshard_after_forward": False} if layout == "hsdp-keep" else {}
    model = shard(net, mesh=mesh["replicate", "shard"], **keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if layout == "hsdp-accumulate":

        def function(batch: Any) -> Any:
            total = torch.zeros(())
            for part in range(3):
                model.set_requires_gradient_sync(part == 2)
                x, y = batch
                loss: Any = nn.functional.cross_entropy(model(x[part::3]), y[part::3])
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

    elif layout == "hsdp-tail":

        def function(batch: Any) -> Any:
            x, y = batch
            loss: Any = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            return total

        undo = {"undo": True}
    else:  # the norm of gradients on two meshes is more than torch can do
        function = ordinary(model, optimizer, clip=layout != "hsdp-tp")
elif layout == "tp":
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = build()
    for block in net[1:-1]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    replica = run.rank // 2
    replicas = mesh["dp"]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = net

    def function(batch: Any) -> Any:
        x, y = batch
        loss: Any = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        for parameter in net.parameters():
            grad = parameter.grad
            assert grad is not None
            stored = grad.to_local() if hasattr(grad, "to_local") else grad
            dist.all_reduce(stored, group=mesh["dp"].get_group())
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

elif layout == "pipeline":
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stage_index = mesh["pp"].get_local_rank()
    whole = build()
    part = whole[:2] if stage_index == 0 else whole[2:]
    replica = run.rank // 2
    model = part
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.01)
    stage = PipelineStage(part, stage_index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.cross_entropy)
    replicas = mesh["dp"]

    def function(batch: Any) -> Any:
        x, y = batch
        losses: list[torch.Tensor] = []
        if stage_index == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        total = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        for parameter in part.parameters():
            dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        optimizer.step()
        optimizer.zero_grad()
        return total

elif layout == "experts":
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    experts = Experts(mesh["ep"].get_group())
    net = nn.Sequential(nn.Linear(8, WIDTH), experts, nn.Linear(WIDTH, 4))
    model = net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    replicas = mesh["dp"]

    def function(batch: Any) -> Any:
        x, y = batch
        loss: Any = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        for name, parameter in net.named_parameters():
            group = mesh["dp"].get_group() if "expert" in name else None
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

else:
    net = build()
    if layout == "tied":
        net[3].weight = nn.Parameter(torch.randn(4, WIDTH))
        net.add_module("again", nn.Linear(4, WIDTH, bias=False))
        net.again.weight = nn.Parameter(net[3].weight.detach().t().clone())
        net[2].up.weight = net[1].up.weight
    if layout == "frozen":
        net[1].up.weight.requires_grad_(False)
    if layout == "syncbn":
        net = nn.Sequential(nn.Linear(8, WIDTH), SyncedNorm(), nn.ReLU(), nn.Linear(WIDTH, 4))
    if layout == "checkpointed":
        from torch.utils.checkpoint import checkpoint

        first, second, third, last = net

        class Checkpointed(nn.Module):
            """Its blocks' activations are computed again in the backward pass."""

            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ModuleList([first, second, third, last])
                self.drop = nn.Dropout(0.1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.parts[0](x)
                for block in self.parts[1:-1]:
                    x = checkpoint(lambda v, b=block: self.drop(b(v)), x, use_reentrant=False)
                out: torch.Tensor = self.parts[-1](x)
                return out

        inner: nn.Module = Checkpointed()
    else:
        inner = net
    if layout == "compiled":
        inner = torch.compile(inner, backend="aot_eager")  # type: ignore[assignment]
    if layout == "compiled-ddp":
        inner.register_buffer("seen", torch.zeros(1))  # so that DDP broadcasts in the forward pass
    model = DistributedDataParallel(
        inner,
        find_unused_parameters=layout == "unused",
        static_graph=layout == "static",
    )
    if layout == "compiled-ddp":
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    function = ordinary(model, optimizer, clip=layout != "static")
    if layout == "undo":
        undo = {"undo": True}
    if layout == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        function = by_closure(model, optimizer, alike=True)
    elif layout == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
        )
        function = ordinary(model, optimizer, clip=False)
    elif layout == "gan":
        critic = DistributedDataParallel(
            nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        )
        critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
        things |= {"critic": critic, "critic_optimizer": critic_optimizer}

        def function(batch: Any) -> Any:
            x, y = batch
            real = nn.functional.one_hot(y, 4).float()
            made = model(x)
            judged = critic(torch.cat([made.detach(), real]))
            critic_loss = judged[: len(x)].mean() - judged[len(x) :].mean()
            critic_loss.backward()
            critic_optimizer.step()
            critic_optimizer.zero_grad()
            loss = -critic(made).mean()
            loss.backward()
            both = torch.stack([critic_loss.detach(), loss.detach()])
            optimizer.step()
            optimizer.zero_grad()
            critic_optimizer.zero_grad()
            return both

    elif layout == "closure":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        function = by_closure(model, optimizer)
    elif layout == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        things["scaler"] = scaler

        def function(batch: Any) -> Any:
            x, y = batch
            loss: Any = nn.functional.cross_entropy(model(x), y)
            if run.committed % 4 == 2:
                loss = loss * float("inf")  # this update is skipped
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

    elif layout == "no-sync":

        def function(batch: Any) -> Any:
            x, y = batch
            with model.no_sync():
                half: Any = nn.functional.cross_entropy(model(x[:3]), y[:3])
                half.backward()
            loss: Any = nn.functional.cross_entropy(model(x[3:]), y[3:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    elif layout == "objects":

        def function(batch: Any) -> Any:
            x, y = batch
            said: list[Any] = [None] * world
            dist.all_gather_object(said, {"rank": run.rank, "step": run.committed})
            loss: Any = nn.functional.cross_entropy(model(x), y) * (1 + said[-1]["rank"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    elif layout == "split":
        dist.new_group([0, 1])  # so that ranks 2 and 3 count their groups otherwise
        half: Any = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        alone: Any = dist.split_group(half, [[0], [1]])  # c10d has one name for two of these
        gone: Any = dist.split_group(half, [[0, 1]])
        dist.barrier()  # until all have it
        dist.destroy_process_group(gone)

        def function(batch: Any) -> Any:
            x, y = batch
            loss: Any = nn.functional.cross_entropy(model(x), y)
            told = torch.full((), float(run.rank))
            for group in (half, alone, half):
                dist.all_reduce(told, group=group)
            (loss * told).backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()


run.data(lambda step, rank, world: batch_at(step, replica))
run.protect(model=model, optimizer=optimizer, replicas=replicas, **things)
if args.checkpoint:
    cadence = {"memory_every": args.memory_every, "durable_every": 3}
    run.checkpoint(args.checkpoint, **cadence, durable_retained=0, on_busy="wait")
train_step = run.step(**undo)(function) if undo else run.step(function)
for batch in run.batches(until=args.steps):
    loss = train_step(batch)
    run.log(loss=float(loss.sum()))
