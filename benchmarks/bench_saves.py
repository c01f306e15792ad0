"""How long a training waits for a save: 200 MB a rank, two ranks, from the call to its return.

In turns, round after round, so that what else the machine does falls on all alike: a bare memcpy
of the same tensors into shared memory that is warm; a save into the memory tier (an `everstep
agent` beside) by the writer, which keeps its plan, and by `dcp.save`; to a directory on disk;
`dcp.async_save` to a directory in /dev/shm and on disk. Before each the ranks meet, and nothing is
under way. A save's figure is that of the slower rank.

    python benchmarks/bench_saves.py [--rounds 15] [--mbytes 200] [--disk FOLDER]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
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
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.figures import median_interval, quantile, save, table

from everstep.tiers import TieredWriter, TierSettings

RANKS = 2
TENSORS = 64
WAYS = (
    "memcpy",
    "writer.save, memory",
    "dcp.save, memory",
    "writer.save, disk",
    "async_save, shm",
    "async_save, disk",
)
_PATIENCE_S = 120.0


def bare(state: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A memcpy of each tensor into one area that is mapped and has been written to."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        area = mmap.mmap(file.fileno(), nbytes)
    room = (ctypes.c_char * nbytes).from_buffer(area)
    start = ctypes.addressof(room)
    ctypes.memset(start, 0, nbytes)

    def copy() -> None:
        at = ctypes.addressof(room)
        for tensor in state.values():
            ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes

    return copy


class Rank:
    """One rank: its state, and its ways to save it."""

    def __init__(self, rank: int, folder: Path, disk: Path, mbytes: int) -> None:
        self.rank, self.folder, self.disk = rank, folder, disk
        count = mbytes * 10**6 // TENSORS // 4
        self.state = {f"rank{rank}.{i}": torch.randn(count) for i in range(TENSORS)}
        self.copy = bare(self.state)
        near = TierSettings(series="near", memory_every=1, memory_retained=1, copies=1)
        far = TierSettings(
            series="far", destination=str(disk / "tier"), durable_every=1, durable_retained=1
        )
        self.near, self.far = TieredWriter(near), TieredWriter(far)
        self.pending: Any = None

    def save(self, way: str, step: int) -> None:
        """The call that is timed."""
        if way == "memcpy":
            self.copy()
        elif way == "writer.save, memory":
            self.near.save({"model": self.state}, 2 * step)
        elif way == "dcp.save, memory":
            name = str(2 * step + 1)
            dcp_save({"model": self.state}, storage_writer=self.near, checkpoint_id=name)
        elif way == "writer.save, disk":
            self.far.save({"model": self.state}, step)
        else:
            where = Path("/dev/shm") / self.folder.name if way.endswith("shm") else self.disk
            self.pending = async_save(
                {"model": self.state}, checkpoint_id=str(where / f"dcp-{step}")
            )

    def settle(self, way: str, step: int) -> None:
        """Wait until nothing is under way, and make room."""
        if self.pending is not None:
            self.pending.result(_PATIENCE_S)
            self.pending = None
        for writer in (self.near, self.far):
            assert writer.wait(_PATIENCE_S)
            writer.check()
        dist.barrier()
        if self.rank == 0:
            for where in (Path("/dev/shm") / self.folder.name, self.disk):
                shutil.rmtree(where / f"dcp-{step}", ignore_errors=True)


def measure(rank: int, folder: Path, disk: Path, rounds: int, mbytes: int) -> None:
    """All ways in turn; the seconds of each are written down."""
    torch.set_num_threads(1)
    store = FileStore(str(folder / "meet"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    one = Rank(rank, folder, disk, mbytes)
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(1, rounds + 3):  # two to get warm
        for way in WAYS:
            dist.barrier()
            begun = time.perf_counter()
            one.save(way, step)
            took[way].append(time.perf_counter() - begun)
            one.settle(way, step)
    (folder / f"took-{rank}.json").write_text(json.dumps(took), encoding="utf-8")
    one.near.close()
    one.far.close()
    dist.destroy_process_group()


def run(folder: Path, disk: Path, rounds: int, mbytes: int) -> dict[str, list[float]]:
    """One agent and two ranks; by way, the slower rank's milliseconds, the first two left out."""
    command = [str(Path(sys.executable).with_name("everstep")), "agent"]
    agent = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        pids = []
        for rank in range(RANKS):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    measure(rank, folder, disk, rounds, mbytes)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        ended = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(ended):
            sys.exit("a rank failed")
    finally:
        agent.terminate()
        agent.wait(30)
    ranks = [json.loads((folder / f"took-{rank}.json").read_text()) for rank in range(RANKS)]
    return {
        way: [1e3 * max(both) for both in zip(*(r[way] for r in ranks), strict=True)][2:]
        for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a training waits for a save.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mbytes", type=int, default=200)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="everstep-saves-") as folder,
        tempfile.TemporaryDirectory(prefix="everstep-saves-", dir=args.disk) as disk,
    ):
        took = run(Path(folder), Path(disk), args.rounds, args.mbytes)
        shutil.rmtree(Path("/dev/shm") / Path(folder).name, ignore_errors=True)
    figures: dict[str, Any] = {}
    for way in WAYS:
        ratios = [one / base for one, base in zip(took[way], took["memcpy"], strict=True)]
        figures[way] = {
            "ms": statistics.median(took[way]),
            "ms_p90": quantile(took[way], 0.9),
            "ratio": statistics.median(ratios),
            "ratio_95": median_interval(ratios),
        }
    rows = [
        [way, f["ms"], f["ms_p90"], f["ratio"], "{:.2f} to {:.2f}".format(*f["ratio_95"])]
        for way, f in figures.items()
    ]
    print(table(["way", "ms", "p90", "x memcpy", "95 %"], rows))
    about = {"rounds": args.rounds, "mbytes": args.mbytes, "ranks": RANKS, "load_before": load}
    print(save("saves", {**about, "ways": figures}))


if __name__ == "__main__":
    main()
