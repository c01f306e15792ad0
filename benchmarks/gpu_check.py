"""What only a GPU can show: the nccl group, the update gated by the device, and whole jobs on it.

    python benchmarks/gpu_check.py [FILE.json]

One GPU is enough for the first half; two or more are needed for collectives between ranks, and so
for losing one. Prints what passed, what failed, and what could not be checked here, as JSON, and
writes it to FILE.json. Exits with 1 if a check failed. Without a GPU it says so and exits with 0,
so that it can stand in any list of checks.

The same file is the script that the jobs train (`gpu_check.py train`): fused AdamW under DDP, with
deterministic algorithms, so that runs can be compared by their bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from everstep.worker import devices
from everstep.worker.accelerator import Cuda
from everstep.worker.communicators import Answer, Communicators
from everstep.worker.foundinf import DeviceGate
from everstep.worker.groups import OuterGroup
from everstep.worker.nccl import NcclInner, prepare
from everstep.worker.streams import Device, StreamGuard

HERE = Path(__file__).resolve()
EXAMPLE = HERE.parents[1] / "examples" / "gpt.py"
MOST_RANKS = 4
WAIT_S = 60.0
BUSY_CYCLES = 1_000_000_000  # half a second and more, on any GPU of today
JOB_TIMEOUT_S = 600.0

Figures = dict[str, Any]


# ---------------------------------------------------------------- in this process, on one GPU


def flag_is_read_late() -> Figures:
    """A cell in host memory that is changed while the stream is busy is read as it is when the
    stream comes there. The fence's soundness rests on it."""
    device = Device(_accelerator())
    clean = device.clean(0)
    torch.cuda._sleep(BUSY_CYCLES)
    cell = clean.read()
    began = time.monotonic()
    clean.spoil()
    value = int(cell.item())
    busy_s = time.monotonic() - began
    device.watch.close()
    _expect(value == 0, f"the stream read {value}, the value of when it was launched")
    _expect(busy_s > 0.05, f"the stream was busy for {busy_s:.3f} s only: this shows nothing")
    return {"busy_s": round(busy_s, 3)}


def nccl_group() -> Figures:
    """A group of one rank is built, does not stop the host, is aborted from another thread while
    its stream is busy, and built again."""
    prepare(os.environ)
    device = Device(_accelerator())
    faults: list[BaseException] = []
    communicators = Communicators(
        _maker(device), lambda _, error: faults.append(error), generation=0, solo=False
    )
    began = time.monotonic()
    group = OuterGroup(communicators, 0, 1, "world", (0,))
    figures: Figures = {"build_s": round(time.monotonic() - began, 3)}
    communicators.answer = Answer.ZEROS
    for generation in (0, 1):
        tensor = torch.full((1 << 20,), 3.0, device=device.accelerator.device)
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        began = time.monotonic()
        guard: Any = group.allreduce([tensor])
        guard.wait()
        waited_s = time.monotonic() - began
        _expect(isinstance(guard, StreamGuard), f"the guard is a {type(guard).__name__}")
        _expect(not guard.is_completed(), "the collective had ended before its turn")
        figures[f"wait_us_{generation}"] = round(1e6 * waited_s)
        if generation == 0:
            began = time.monotonic()
            communicators.stop(0)
            figures["stop_us"] = round(1e6 * (time.monotonic() - began))
            communicators.quiesce(WAIT_S)
            figures["abort_s"] = round(time.monotonic() - began, 3)
            began = time.monotonic()
            communicators.rebuild(1)
            figures["rebuild_s"] = round(time.monotonic() - began, 3)
        else:
            communicators.drain()
            _expect(bool((tensor == 3.0).all()), "the sum of one rank is not what it had")
    _expect(not faults, f"a fault was reported: {faults[:1]}")
    communicators.stop(1)
    communicators.quiesce(WAIT_S)
    device.watch.close()
    return figures


def found_inf() -> Figures:
    """An update that the device lets through has the bits of the host's; one that it leaves out
    leaves no trace and can be made afterwards. torch's own fused kernels."""
    for kind, options in (
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ):
        expected = _updates(kind, options, left_out=None)
        _expect(_updates(kind, options, left_out=0) == expected, f"{kind.__name__}: other bits")
        redone = _updates(kind, options, left_out=2)
        _expect(redone == expected, f"{kind.__name__}: other bits after an update made late")
    return {}


def _updates(kind: Any, options: dict[str, Any], *, left_out: int | None) -> list[Any]:
    """Parameter and state after three updates. `left_out`: None: by the host alone; else by the
    device from the second on, which leaves out the update of that number."""
    device = Device(_accelerator())
    communicators = Communicators(_no_group, lambda *_: None, generation=0, solo=False)
    gate = DeviceGate(device, communicators, lambda cell: cell, world_size=1)
    parameter = torch.linspace(-1, 1, 1000, device=device.accelerator.device).requires_grad_()
    optimizer = kind([parameter], fused=True, **options)
    for number in (1, 2, 3):
        parameter.grad = parameter.detach() * number
        if left_out is None or number == 1:
            optimizer.step()
            continue
        _expect(gate.takes(optimizer), f"{kind.__name__}(fused=True) is not taken")
        device.clean(0)._cell.fill_(number != left_out)
        before = _state(parameter, optimizer)
        passage = gate.open(optimizer, fence=False)
        optimizer.step()
        passage.updated()
        passed = passage.confirm(WAIT_S)
        _expect(passed == (number != left_out), f"the verdict of update {number} is {passed}")
        if not passed:
            _expect(_state(parameter, optimizer) == before, "an update left out left a trace")
            passage.redo()
    device.watch.close()
    return _state(parameter, optimizer)


def _state(parameter: torch.Tensor, optimizer: Any) -> list[Any]:
    entry = optimizer.state[parameter]
    return [parameter.tolist(), {key: value.tolist() for key, value in entry.items()}]


def _accelerator() -> Cuda:
    accelerator = Cuda(0)
    accelerator.enter()
    return accelerator


def _no_group(_group: OuterGroup, _generation: int) -> Any:
    raise AssertionError("no group is made here")


def _maker(device: Device) -> Callable[[OuterGroup, int], Any]:
    def make(group: OuterGroup, generation: int) -> Any:
        return NcclInner(
            0,
            1,
            lambda own: {0: own},
            name=f"{group.name}@{generation}",
            generation=generation,
            device=device,
            build_timeout_s=WAIT_S,
            collective_timeout_s=WAIT_S,
        )

    return make


# ---------------------------------------------------------------- whole jobs


def job_raise(ranks: int) -> Figures:
    """A step that raised is done again in the same process: equal to the run without it."""
    return _prove(ranks, ["raise:rank=0,step=4,at=backward"])


def job_kill(ranks: int) -> Figures:
    """A rank dies in its backward pass, another is stopped: equal to the run without it."""
    return _prove(ranks, ["kill:rank=1,step=4,at=backward", "stop:rank=0,step=8,at=forward"])


def example(ranks: int) -> Figures:
    """The example goes on after a kill. Its attention and embeddings add in any order on a GPU, so
    its bits are not compared."""
    chaos = ["--chaos", "kill:rank=1,step=5"]
    _everstep(["run", "--nproc-per-node", str(ranks), *chaos, str(EXAMPLE), "--steps", "12"])
    return {}


def _prove(ranks: int, faults: list[str]) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder) / "verdict.json"
        options = [option for fault in faults for option in ("--fault", fault)]
        options += ["--nproc-per-node", str(ranks), "--json", str(verdict), "--log-dir", folder]
        _everstep(["prove", *options, str(HERE), "train"])
        told: Figures = json.loads(verdict.read_text(encoding="utf-8"))
    return told


def _everstep(arguments: list[str]) -> None:
    """Run the command, on GPUs. Raises AssertionError with its last lines if it fails."""
    environment = {
        **os.environ,
        "EVERSTEP_DEVICE": "cuda",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic algorithms
    }
    command = [sys.executable, "-c", "from everstep.cli import main; main()", *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=JOB_TIMEOUT_S, check=False
    )
    last = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
    _expect(done.returncode == 0, f"exit code {done.returncode} of {arguments}:\n{last}")


def train(steps: int = 12) -> None:
    """The script of the jobs."""
    import everstep

    torch.use_deterministic_algorithms(True)
    run = everstep.init()
    torch.manual_seed(run.rank)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 8)
    ).to(run.device)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)

    def batch_at(_step: int, _rank: int, _world_size: int) -> torch.Tensor:
        return torch.randn(32, 64)

    data = run.data(batch_at)
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler, data=data)

    @run.step
    def train_step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch.to(run.device)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    for batch in run.batches(until=steps):
        train_step(batch)
    print(f"rank {run.rank} trained on {run.device}, backend {dist.get_backend()}")


# ---------------------------------------------------------------- telling


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def main(target: Path | None) -> int:
    """Run what this machine can. Returns the exit code."""
    count = devices.count()
    told: dict[str, Any] = {"devices": count, "torch": torch.__version__}
    passed: dict[str, Any] = {}
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    ranks = min(count, MOST_RANKS)
    checks: list[tuple[str, int, Callable[[], Figures]]] = [
        ("flag_is_read_late", 1, flag_is_read_late),
        ("found_inf", 1, found_inf),
        ("nccl_group", 1, nccl_group),
        ("job_raise", 1, lambda: job_raise(ranks)),
        ("job_kill", 2, lambda: job_kill(ranks)),
        ("example", 2, lambda: example(ranks)),
    ]
    if count:
        told["gpu"] = torch.cuda.get_device_name(0)
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    else:
        print("no GPU that nccl can use: nothing checked")
    for name, needs, check in checks:
        if count < needs:
            skipped[name] = f"needs {needs} GPU{'s' * (needs > 1)}, this machine has {count}"
            continue
        try:
            passed[name] = check()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"{name}: {'failed' if name in failed else 'passed'}", flush=True)
    told |= {"passed": passed, "failed": failed, "not_checked": skipped}
    text = json.dumps(told, indent=1)
    print(text)
    if target is not None:
        target.write_text(text + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train()
    else:
        sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
