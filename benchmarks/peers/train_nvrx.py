"""The workload under NVRx's in-process restart, with one spare process, going back to the newest
DCP checkpoint.

Started by jobs.py, one process for each rank and one for the spare. When a process dies, the
wrapper stops the function in the others and calls it again with the ranks given out anew; the spare
takes the dead one's. What can outlive a call is made once in a process: the store, through which
the ranks meet, each time under another prefix.

NVRx stops nccl's collectives, not gloo's: those would sit out their timeout. `CloseSockets` is an
`Abort` of ours, a documented point of extension, that ends them at once, so that NVRx is compared
at what it could be.

Annotations are not postponed here: the wrapper looks for its own class among them."""

import datetime
import os
import socket

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist
from benchmarks.peers.checkpoints import Checkpoints, latest
from benchmarks.peers.workload import RANKS, STEPS, Events, batch_at, loss_of, prepare
from torch.nn.parallel import DistributedDataParallel

_TIMEOUT = datetime.timedelta(seconds=60)
_FIRST_RANK = int(os.environ["RANK"])  # the wrapper changes the variable
_HOST = os.environ["MASTER_ADDR"]
_PORT, _GROUP_PORT = int(os.environ["MASTER_PORT"]), int(os.environ["PEERS_GROUP_PORT"])


def _seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


def connected_sockets() -> set[int]:
    """Descriptors of this process that are connected sockets, but for those of the stores."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            with socket.socket(fileno=os.dup(number)) as link:
                ends = {link.getsockname()[1], link.getpeername()[1]}
        except (OSError, IndexError):  # gone, no socket, not TCP, or it only listens
            continue
        if not ends & {_PORT, _GROUP_PORT}:
            found.add(number)
    return found


class CloseSockets(inprocess.abort.Abort):  # type: ignore[misc]  # NVRx has no types
    """Shuts down the sockets that came with the process group, so that no collective waits on."""

    def __init__(self) -> None:
        self.sockets: set[int] = set()

    def __call__(self, state: inprocess.state.FrozenState) -> inprocess.state.FrozenState:
        """Called by the wrapper's monitor thread."""
        for number in self.sockets:
            try:
                with socket.socket(fileno=os.dup(number)) as link:
                    link.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed meanwhile
                pass
        self.sockets.clear()
        return state


class Training:
    """What of a process lives through restarts."""

    def __init__(self) -> None:
        self.close_sockets = CloseSockets()
        self.checkpoints: Checkpoints | None = None
        self.events = Events(f"process{_FIRST_RANK}")
        self.store = dist.TCPStore(
            _HOST, _GROUP_PORT, is_master=_FIRST_RANK == 0, wait_for_workers=False, timeout=_TIMEOUT
        )

    def start_from(self, rank: int, store: dist.Store) -> int:
        """The step to go on after: rank 0 tells, when its save under way is done."""
        if rank == 0:
            if self.checkpoints is not None:
                self.checkpoints.finish()
            store.set("from", str(latest()))
        return int(store.get("from"))

    def run(self, attempt: int) -> None:
        """All steps from the newest checkpoint on."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.PrefixStore(str(attempt), self.store)
        before = connected_sockets()
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
        )
        self.close_sockets.sockets = connected_sockets() - before
        done = self.start_from(rank, store)
        model, optimizer = prepare(values=not done)
        self.checkpoints = Checkpoints(model, optimizer)
        if done:
            self.checkpoints.load(done)
        parallel = DistributedDataParallel(model)
        for step in range(done + 1, STEPS + 1):
            model.fuse.step, model.fuse.rank = step, _FIRST_RANK
            optimizer.zero_grad()
            loss = loss_of(parallel, batch_at(step, rank))
            loss.backward()
            optimizer.step()
            self.events.say(
                "step", step=step, rank=rank, world=world_size, attempt=attempt, loss=loss.item()
            )
            if rank == 0:
                self.checkpoints.save(step)
        self.events.end(rank, model, optimizer)
        self.checkpoints.finish()
        dist.destroy_process_group()


training = Training()


@inprocess.Wrapper(
    store_kwargs={"host_name": _HOST, "port": _PORT},
    abort=inprocess.Compose(inprocess.abort.AbortTorchDistributed(), training.close_sockets),
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(RANKS),
        inprocess.rank_assignment.ShiftRanks(),
    ),
    # All intervals much below their defaults of a second and more; the rest as short as fits.
    monitor_thread_interval=_seconds(0.05),
    monitor_process_interval=_seconds(0.05),
    heartbeat_interval=_seconds(0.1),
    heartbeat_timeout=_seconds(3),
    progress_watchdog_interval=_seconds(0.1),
    soft_timeout=_seconds(10),
    hard_timeout=_seconds(15),
    barrier_timeout=_seconds(60),
    completion_timeout=_seconds(60),
    last_call_wait=_seconds(0),
    termination_grace_time=_seconds(0),
)
def main(call: inprocess.CallWrapper = None) -> None:
    training.run(call.iteration)


if __name__ == "__main__":
    main()
