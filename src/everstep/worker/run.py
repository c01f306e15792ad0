"""What the script sees of a protected run.

`Run` is made by `everstep.init()`. It is thin: a step is transaction.py's, a recovery
recovery.py's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from everstep.data.loader import BatchSource, make_source
from everstep.errors import UserError
from everstep.wire import messages
from everstep.worker import codec, devices, rng
from everstep.worker.between import Between
from everstep.worker.control import Stopped
from everstep.worker.groups import BACKEND
from everstep.worker.mean import mean_over_ranks
from everstep.worker.own import Own
from everstep.worker.progress import Phase
from everstep.worker.recovery import PATIENCE_S, Recovery
from everstep.worker.runtime import Drawn, Worker
from everstep.worker.section import Sections
from everstep.worker.shards import said_ranks, shard_key
from everstep.worker.state import State
from everstep.worker.transaction import Step

if TYPE_CHECKING:
    from everstep.worker.saves import Saves

T = TypeVar("T")


class Run:
    """A protected run, seen from one rank. All methods are for the main thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._step: Step | None = None
        self._recovery, self._between = Recovery(worker), Between(worker)
        self._sections = Sections(worker, self._recovery, self._between, self._is_in_step)
        self._looping = False
        self._saves: Saves | None = None
        if dist.is_initialized():
            raise UserError(
                "torch.distributed is set up already; everstep.init() stands where "
                "dist.init_process_group stood: remove that call"
            )
        spec = worker.spec
        worker.device = devices.find(
            spec.device, spec.local_rank, spec.local_world_size, worker.note
        )
        store = HashStore()  # c10d wants one; addresses travel through the control plane instead
        dist.init_process_group(
            BACKEND, store=store, rank=worker.spec.rank, world_size=worker.spec.world_size
        )

    @property
    def in_step(self) -> bool:
        """Whether a step function or a section was left by what ends the process."""
        return self._sections.left_open or (self._step is not None and self._step.left_open)

    def _is_in_step(self) -> bool:
        return self._step is not None and self._step.under_way

    # ------------------------------------------------------------ where this is

    @property
    def rank(self) -> int:
        """This worker's rank in the world."""
        return self._worker.spec.rank

    @property
    def local_rank(self) -> int:
        """This worker's rank on its node."""
        return self._worker.spec.local_rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._worker.spec.world_size

    @property
    def device(self) -> torch.device:
        """The device to put the model on."""
        device = self._worker.device
        return devices.CPU if device is None else device.accelerator.device

    @property
    def committed(self) -> int:
        """Steps committed so far; 0 before the first. During step k it is k-1."""
        return self._worker.committed

    @property
    def protected(self) -> bool:
        """Whether failures are recovered from."""
        return True

    @property
    def state(self) -> dict[str, Any]:
        """Plain values that steer the script (a best loss, a patience counter). What is in it when
        a step commits is what a replacement of this rank finds in it."""
        return self._worker.values

    # ------------------------------------------------------------ set-up

    def data(
        self,
        source: Any,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> BatchSource:
        """Where batches come from: a map-style dataset, read in an order keyed by (seed, epoch),
        `batch_size` samples a rank; or a function `batch_at(step, rank, world_size)`.

        Raises UserError for anything else. `run.batches` uses the source last made.
        """
        worker = self._worker
        worker.source = make_source(
            source,
            batch_size=batch_size,
            seed=seed,
            rank=worker.spec.rank,
            world_size=worker.spec.world_size,
            collate=collate,
        )
        return worker.source

    def protect(self, *, replicas: Any = None, local: Any = (), **things: Any) -> None:
        """Name the state that must survive: modules, optimizers, lists of them, any object with
        `state_dict`/`load_state_dict`, and the source of `run.data`.

        Which ranks hold the same is worked out from DDP, FSDP2 and DTensors; what none of them
        wraps is taken to be alike on all ranks. `replicas`: the ranks that hold the same as this
        one (a process group, a DeviceMesh, or global ranks), where no wrapper says it: stages of a
        pipeline, experts. `local`: objects with `state_dict`/`load_state_dict` that belong to this
        rank alone (statistics of its samples, a loader's cursor), by name or in a list; their
        states are plain data of at most 1 MiB each, written to the agent in every step.

        Blocks until all ranks have called it and hold the same. Raises UserError for what can't be
        protected, when called twice or after the first step; the job ends if ranks that should be
        replicas differ."""
        worker = self._worker
        worker.faults.fire("setup")
        if worker.committed or (self._step is not None and self._step.began):
            raise UserError("protect() was called after the first step; call it before")
        if worker.state is not None:
            raise UserError("protect() was called twice; name everything in one call")
        sources = [name for name, thing in things.items() if isinstance(thing, BatchSource)]
        if len(sources) > 1:
            raise UserError(
                f"protect() got several data sources ({', '.join(sources)}); a run reads from one"
            )
        for name in sources:
            worker.source = things.pop(name)
        state = State(things)
        state.own = Own(local)
        state.said = said_ranks(replicas, worker.spec.rank)
        worker.wrappers.check()
        state.shard = shard_key(
            state.modules,
            state.optimizers,
            replicas,
            rank=worker.spec.rank,
            world_size=worker.spec.world_size,
        )
        if worker.communicators.tape is not None:
            worker.communicators.tape.protect(tensor for _, tensor in state.replicas())
        worker.rng_key = worker.spec.rng_key or rng.make_key()
        data = worker.source.identity if worker.source is not None else ""
        worker.control.send(
            messages.Protect(
                shard=state.shard,
                manifest=state.manifest_digest(data),
                digests={} if worker.joining else state.digests(),
                rng_key=worker.rng_key,
            )
        )
        go = worker.control.take(messages.Go, PATIENCE_S)
        worker.copies.begin(go)
        worker.state = state
        worker.faults.attach(next(iter(state.modules.values())))

    @overload
    def step(self, function: Callable[..., T]) -> Callable[..., T]: ...

    @overload
    def step(self, *, undo: bool) -> Callable[[Callable[..., T]], Callable[..., T]]: ...

    def step(self, function: Any = None, *, undo: bool = False) -> Any:
        """Make `function` a step: it commits on all ranks, or is done again as if it had not begun.

        The function takes the batch and may return plain data or tensors. It is called once for
        each batch of `run.batches`. Decorator; once a run.

        `undo`: what the updates change is copied before the first, and the ranks meet at the end of
        the function, so that also what follows an update (a collective whose result must be exact)
        is done again. Costs a copy of the state in memory and in time. An update that communicates
        or runs the model by itself (LBFGS, ZeroRedundancyOptimizer) has it without being asked."""
        if function is None:
            return functools.partial(self.step, undo=undo)
        if self._step is not None:
            raise UserError("run.step was used twice; put all updates of a step into one function")
        self._step = Step(self._worker, function, self._recovery, self._between, undo=undo)
        return self._step

    @overload
    def section(self, function: Callable[..., T]) -> Callable[..., T]: ...

    @overload
    def section(self, *, undo: bool = ...) -> Callable[[Callable[..., T]], Callable[..., T]]: ...

    @overload
    def section(
        self, *, ranks: Sequence[int]
    ) -> Callable[[Callable[..., T]], Callable[..., T | None]]: ...

    def section(
        self, function: Any = None, *, ranks: Sequence[int] | None = None, undo: bool = False
    ) -> Any:
        """Make `function` a section: work with collectives between the steps (an evaluation, a
        save), which is done on all ranks, or again as if it had not begun. Decorator.

        Called after `protect`, before, in or after the loop, by all ranks in the same order. It
        returns plain data or tensors, at most 1 MiB: a replacement that comes by later gets what
        was returned. It must not change protected state, but for buffers that are each rank's own;
        `undo`: it may, since a copy of the state is taken first.

        `ranks`: only these ranks do it, each by itself and once, without collectives; the others
        get None."""
        if function is None:
            return functools.partial(self.section, ranks=ranks, undo=undo)
        return self._sections.make(function, ranks=ranks, undo=undo)

    def checkpoint(
        self,
        destination: str = "",
        *,
        memory_every: int = 0,
        durable_every: int = 0,
        series: str = "",
        **more: Any,
    ) -> None:
        """Keep checkpoints of what is protected: every `memory_every` steps in the memory of the
        hosts, every `durable_every` steps, and at the end, at `destination` (a directory that all
        hosts share, or an object store's address). From then on `run.batches` saves by itself.

        `series`: under which name (the script's, if none is given); `more`: any other field of
        `everstep.tiers.TierSettings`. Called once, after `protect`, before the loop, on all ranks
        alike. Raises UserError elsewhere, and for settings that can't be."""
        worker = self._worker
        if worker.state is None or self._looping or self._saves is not None:
            raise UserError(
                "run.checkpoint(...) is called once, after run.protect(...) and before the loop"
            )
        if worker.place.called:
            raise UserError("a section was called before run.checkpoint(...); call it after")
        from everstep.tiers.settings import TierSettings
        from everstep.worker.restoring import restore
        from everstep.worker.saves import Saves  # takes torch's distributed checkpoint along

        script = Path(worker.spec.script.target).stem
        settings = TierSettings(
            series=worker.spec.run_id if worker.spec.own_series else series or script,
            destination=destination,
            memory_every=memory_every,
            durable_every=durable_every,
            **more,
        )
        restore(worker, settings)
        self._saves = Saves(
            worker, self._sections, settings, gradients=lambda: self._recovery.gradients
        )

    # ------------------------------------------------------------ the loop

    def batches(self, *, until: int) -> Iterator[Any]:
        """The batches of the steps that are still to be done, up to step `until`. Ends on all ranks
        at once: nobody goes on before all have committed the last step."""
        if self._worker.source is None:
            raise UserError(
                "run.batches needs to know where batches come from; call run.data(...) first"
            )
        if self._looping:
            raise UserError(
                "run.batches was called twice: a run has one loop, so that a replacement can find "
                "its place in it; put epochs into it, by run.committed"
            )
        self._looping = True
        if until < 1:
            raise UserError(f"run.batches(until={until}): the last step must be 1 or more")
        return _Batches(self, until)

    def _draw(self, until: int) -> Any:
        worker = self._worker
        if self._step is None or worker.state is None:
            raise UserError(
                "call run.protect(...) and decorate a function with @run.step before "
                "run.batches(...)"
            )
        if worker.drawn is not None and not worker.joining and worker.committed < worker.drawn.step:
            raise UserError(f"the batch of step {worker.drawn.step} was given to no step function")
        worker.faults.fire("between")
        if self._saves is not None and not worker.joining:
            self._saves.between(last=worker.committed >= until)
        if worker.joining:
            worker.control.send(messages.Wait())
            position = worker.control.take(messages.Position, PATIENCE_S)
            step = position.step
            self._step.enter_after(step - 1, position.capsule, position.kept)
        else:
            if worker.communicators.poisoned:
                self._step.recover_between()
            step = worker.committed + 1
            if step > until:
                self._close()
                raise StopIteration
        batch = worker.draw(step)
        worker.drawn = Drawn(step, batch)
        worker.place.draw()
        return batch.value

    def _close(self) -> None:
        """The closing fence: wait until every rank has left its loop."""
        worker = self._worker
        if worker.closed or self._step is None or worker.state is None:
            return
        worker.phase(Phase.CLOSING)
        worker.communicators.replaying = False
        while True:
            generation = worker.communicators.generation
            if not worker.communicators.poisoned:
                log, worker.log = worker.log, {}
                worker.control.send(
                    messages.Close(generation=generation, step=worker.committed, log=log)
                )
                try:
                    worker.control.take(messages.Closed, PATIENCE_S, generation=generation)
                    break
                except Stopped:
                    pass
            self._step.recover_between()
        worker.closed = True
        worker.copies.closing()
        worker.phase(Phase.BETWEEN)

    def _finish(self) -> None:
        """The script has ended: keep the state for those who may still need it, until everybody has
        ended."""
        worker = self._worker
        self._close()
        if self._saves is not None:
            self._saves.close()
        if worker.closed and worker.log:  # of what came after the loop
            log, worker.log = worker.log, {}
            generation = worker.communicators.generation
            worker.control.send(
                messages.Close(generation=generation, step=worker.committed, log=log)
            )
        digests = {}
        if worker.spec.record and worker.state is not None:
            from everstep.worker.state import digest_of

            digests = worker.state.digests()
            digests |= {name: digest_of([buffer]) for name, buffer in worker.state.buffers()}
        worker.phase(Phase.FINISHED)
        worker.control.send(messages.Finish(digests=digests))
        while True:
            generation = worker.communicators.generation
            try:
                worker.control.take(messages.Bye, PATIENCE_S, generation=generation)
                return
            except Stopped:
                if self._step is None:
                    raise
                self._step.recover_between()

    # ------------------------------------------------------------ what happens once, and what is
    # told

    def once(self, function: Callable[[], T]) -> T:
        """Run `function` once in the whole run on this rank, not once in a process: a replacement
        gets the recorded result. For opening a tracker, truncating a log. The result must be plain
        data (UserError else).

        Calls are told apart by the step after which they come, the function's name, and their
        order. In a step or a section, a second attempt gets what the first recorded.
        """
        worker = self._worker
        name = getattr(function, "__qualname__", type(function).__qualname__)
        inside = self._is_in_step() or bool(worker.place.inside)
        key = worker.place.once_key(name, worker.committed, inside=inside)
        if key in worker.once:
            recorded: T = codec.decode(worker.once[key])
            return recorded
        result = function()
        worker.once[key] = codec.encode(result, f"the result of run.once({name})")
        worker.control.send(messages.Once(key=key, value=worker.once[key]))
        return result

    def mean(self, value: Any, group: Any = None) -> Any:
        """The mean of a number or a small tensor over the ranks of `group` (None: all), in float64:
        a float for a number, else a tensor of the same shape.

        Inside a step before its last update, or in a section; all ranks of the group call it.
        Exact under faults. One all-reduce; the cheapest place is before `backward()`. Raises
        UserError elsewhere, or for more than 1024 values."""
        if self._step is not None and self._step.under_way:
            self._step.check_mean()
        elif not self._worker.place.inside:
            raise UserError(
                "run.mean was called outside of a step and a section, where it could not be done "
                "again; call it in the step, before the update, or in a section"
            )
        return mean_over_ranks(value, group)

    def log(self, **scalars: float) -> None:
        """Note scalars for the step under way, or the one just done; they are written with the next
        commit, once, however often a step was tried. Reads tensors' values, which waits for a
        device."""
        worker = self._worker
        in_step = self._step is not None and self._step.under_way
        entry = worker.log.setdefault(worker.committed + in_step, {})
        for name, value in scalars.items():
            entry[name] = float(value)


class _Batches(Iterator[Any]):
    """The iterator of `run.batches`."""

    def __init__(self, run: Run, until: int) -> None:
        self._next = functools.partial(run._draw, until)

    def __next__(self) -> Any:
        return self._next()
