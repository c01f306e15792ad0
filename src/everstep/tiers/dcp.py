"""torch.distributed.checkpoint over the tiers: what `dcp.save`, `async_save` and `load` are given.

Theory of operation. DCP plans a save in two rounds: every rank makes a plan, and one rank makes the
plans of all. What the ranks must agree on rides on them: a rank's `Wish` goes out with its plan,
the `Order` for all comes back with it (`policy.py`). So there is no collective of our own. Then
each rank copies what its plan says into warm memory, and returns; the rest is the `Saver`'s affair,
in the background, without the training's groups. Where each piece lies travels back with DCP's
results, and the rank that commits makes the checkpoint's manifest of them.

A save on the main thread returns when the copy is taken. On another thread, or in a process that
the writer was sent to (`async_save`), nobody's training waits, and who holds the future wants to
know: there it returns when the checkpoint exists.

Values that are no tensors are encoded at once, as data (`values.py`). DCP's planners would pickle
them; so they are asked for the object itself.

It does not know what a checkpoint's bytes go through (`lanes.py`), nor how they are read
(`resharding.py`).
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from everstep import snapshot
from everstep.errors import EverstepError, UserError
from everstep.tiers import names, policy, tensors
from everstep.tiers.again import Again
from everstep.tiers.lanes import Contents, Save, SaveWarning
from everstep.tiers.names import Attempt
from everstep.tiers.newest import load_newest
from everstep.tiers.parts import MAX_KEY_CHARS, contents_of, lay_out
from everstep.tiers.policy import Failure, Order, Wish
from everstep.tiers.resharding import TieredReader
from everstep.tiers.saver import Saver
from everstep.tiers.series import SaveFailed
from everstep.tiers.settings import TierSettings
from everstep.tiers.stack import Stack
from everstep.tiers.staging import Staged
from everstep.tiers.steps import step_of

__all__ = ["TieredReader", "TieredWriter", "load_newest"]

_SAVERS: dict[TierSettings, Saver] = {}
_savers_lock = threading.Lock()


def saver_of(settings: TierSettings) -> Saver:
    """This process's saver for `settings`; made at its first use, and closed when the process
    ends."""
    with _savers_lock:
        if settings not in _SAVERS:
            if not _SAVERS:
                Finalize(None, _close_all, exitpriority=10)
            _SAVERS[settings] = Saver(Stack(settings))
        return _SAVERS[settings]


def failed(failures: Sequence[Failure]) -> SaveFailed:
    """The error that tells of them."""
    first = failures[0]
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return SaveFailed(f"{first}{more}", first.rank if first.rank >= 0 else None)


class TieredWriter(StorageWriter):
    """Saves through DCP to the tiers of `settings`. `checkpoint_id` is the step. Keep one for the
    whole training, on every rank, and `close` it at the end.

    `wait`: whether a save returns only when the checkpoint exists; None: on the main thread not,
    elsewhere yes. `config`: plain data about the training, which the checkpoint keeps; `run_id`,
    `parent`: as in `catalog.Origin`."""

    def __init__(
        self,
        settings: TierSettings,
        *,
        wait: bool | None = None,
        config: Mapping[str, Any] | None = None,
        run_id: str = "",
        parent: str = "",
    ) -> None:
        super().__init__()
        self.settings = settings
        self._wait = wait
        self.everywhere = False
        """Save to all tiers, whatever the cadences say."""
        cadences = {
            name: getattr(settings, name) for name in ("memory_every", "durable_every", "copies")
        }
        self._about = {
            "config": {"everstep": cadences, **(config or {})},
            "run_id": run_id,
            "parent": parent,
        }
        self._home = os.getpid()
        self._again: Again | None = None
        self._now = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_now": None, "_again": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._now = threading.local()

    # ------------------------------------------------------------ for the script

    @property
    def saver(self) -> Saver:
        """What works in the background."""
        return saver_of(self.settings)

    def due(self, step: int) -> bool:
        """Whether `step` is to be saved, by the cadences of the settings."""
        return bool(policy.due(self.settings, step))

    def save(self, state: dict[str, Any], step: int) -> None:
        """Save as `dcp.save` does with this writer, all ranks of the world together; but the plan
        is kept from one save to the next while the state keeps its shape (`again.py`). Blocks for
        the copy, and an exchange between the ranks. Raises what is wrong with an earlier save or
        with the state, on all ranks. Main thread."""
        if self._again is None:
            self._again = Again(self)
        self._again.save(state, step)

    def check(self) -> None:
        """Raise SaveFailed, or warn (`on_save_error`), if a save is known to have failed. Does not
        block; main thread."""
        self.tell(self.saver.news())

    def tell(self, failures: Sequence[Failure]) -> None:
        """What becomes of failures: an error or warnings, by `on_save_error`."""
        if failures and self.settings.on_save_error == "raise":
            raise failed(failures)
        for failure in failures:
            warnings.warn(str(failure), SaveWarning, stacklevel=3)

    def remark(self, text: str) -> None:
        """Something a person should know, said once."""
        warnings.warn(text, SaveWarning, stacklevel=3)

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until nothing is on its way from this rank; whether that is so."""
        return self.saver.wait(self.settings.deadline_s if deadline_s is None else deadline_s)

    def close(self) -> None:
        """Wait for what is on its way, up to `grace_s`, and let go of everything. A process that
        ends does so by itself. Raises SaveFailed for saves that failed, or had not ended."""
        with _savers_lock:
            saver = _SAVERS.pop(self.settings, None)
        if saver is not None:
            try:
                saver.end(self.settings.grace_s)
                self.tell(saver.news())
            finally:
                saver.close(self.settings.grace_s)

    # ------------------------------------------------------------ for DCP

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """A save begins, of this step."""
        self._now.step = None if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises UserError for a save that the ranks do not make together, and without a step."""
        if not kwargs.get("use_collectives", True):
            raise UserError(
                "a checkpoint has one manifest, which use_collectives=False would not make; leave "
                "it out"
            )
        if getattr(self._now, "step", None) is None:
            raise UserError("a save needs its step: dcp.save(..., checkpoint_id=STEP)")
        rank = kwargs.get("rank")
        self._now.rank = rank if rank is not None else _rank()
        self._now.commits = is_coordinator
        self._now.save = self._now.planned = self._now.contents = None
        if is_coordinator:
            self.saver.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, with how this rank stands."""
        for item in plan.items:
            if not 0 < len(item.index.fqn) <= MAX_KEY_CHARS:
                raise UserError(
                    f"the key {item.index.fqn[:80]!r} has {len(item.index.fqn)} characters; up to "
                    f"{MAX_KEY_CHARS} fit a checkpoint"
                )
        return replace(plan, storage_data=self.wish())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, with the one order for all. Coordinator only."""
        wishes = [plan.storage_data for plan in plans]
        if not all(isinstance(wish, Wish) for wish in wishes):
            raise UserError(
                "this planner keeps plans from one save to the next, so that a rank would take an "
                "old order for a new one; leave enable_plan_caching out"
            )
        attempt = names.new_attempt(self.settings.series, wishes[0].step)
        self.saver.begin(attempt.name)
        order = policy.decide(wishes, self.settings, attempt.name, tuple(self.saver.raised))
        return [replace(plan, storage_data=order) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy what the plan says; the rest is done in the background. Raises SaveFailed for an
        earlier save, UserError for what can't be saved."""
        order = plan.storage_data
        assert isinstance(order, Order)
        self.obey(order)
        future: Future[list[WriteResult]] = Future()
        if not order.tiers:
            future.set_result([])
            return future
        with self.said(order):
            results, layout, sources = lay_out(plan.items, planner, self._now.rank)
            self.copy(order, layout, sources)
        self._now.planned = order.attempt, plan.items, results
        if self._waits():
            self._now.save.wait_put(self.settings.deadline_s)
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All ranks have copied. Coordinator only. Raises SaveFailed where the save is waited for
        and does not become a checkpoint."""
        self._now.contents = contents_of(metadata, results, self._about)
        self.saver.finish(self._now.contents)
        if self._now.save is not None and self._waits():
            self._now.save.wait(self.settings.deadline_s)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        """Never chosen by its name."""
        return False

    # ------------------------------------------------------------ one save

    def wish(self) -> Wish:
        """How this rank stands."""
        saver = self.saver
        return Wish(
            rank=self._now.rank,
            step=self._now.step,
            standing=saver.standing(),
            known=saver.known(),
            card=saver.stack.card(),
            met=saver.met,
            everywhere=self.everywhere,
        )

    def planned(self) -> tuple[str, list[WriteItem], list[WriteResult], Contents | None] | None:
        """The plan of this thread's last save: its attempt, what this rank wrote where, and, on the
        rank that commits, the checkpoint's contents. None where nothing was saved."""
        done = self._now.planned
        return (*done, self._now.contents) if done is not None else None

    def obey(self, order: Order) -> None:
        """Do what all do before a save. Raises as `write_data`."""
        failures = self.saver.obey(order)
        for text in self.saver.remarks():
            self.remark(text)
        self.tell(failures)

    @contextmanager
    def said(self, order: Order) -> Iterator[None]:
        """What is raised inside is told to the other ranks, as why there is no part of this one."""
        try:
            yield
        except BaseException as error:
            broken = f"{type(error).__name__}: {error}"
            self.saver.add(self._save(order, broken=broken, raised=True))
            raise

    def copy(
        self, order: Order, layout: snapshot.Layout, sources: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy the tensors (by their names in the part), and let the save go on. Blocks for the
        copy. In a tier that has no room for it the save has failed, as others fail later on."""
        tiers = order.tiers
        while tiers:
            try:
                staged = self.saver.take(tiers, layout.nbytes)
            except (EverstepError, OSError) as error:
                self._now.save = self._save(order, tiers=tiers[:1], broken=str(error))
                self.saver.add(self._now.save)
                tiers = tiers[1:]  # a destination must not wait for memory that is full
            else:
                self._fill(staged, order, tiers, layout, sources)
                return

    def _fill(
        self,
        staged: Staged,
        order: Order,
        tiers: Sequence[str],
        layout: snapshot.Layout,
        sources: Mapping[str, torch.Tensor],
    ) -> None:
        began = time.perf_counter()
        try:
            area = staged.area
            area[: len(layout.header)] = layout.header
            for tensor, start, end in layout.spans():
                tensors.fill(area[start:end], sources[tensor.name])
            save = self._now.save = self._save(order, tiers=tiers, layout=layout, staged=staged)
        finally:
            staged.release()  # the save holds it
        self.saver.counts.nbytes += layout.nbytes
        self.saver.counts.copy_s += time.perf_counter() - began
        self.saver.add(save)

    def _waits(self) -> bool:
        if self._wait is not None:
            return self._wait
        main = threading.current_thread() is threading.main_thread()
        return not main or os.getpid() != self._home

    def _save(self, order: Order, **more: Any) -> Save:
        rank = self._now.rank
        about = snapshot.About(
            run_id=self.settings.series,
            rank=rank,
            world=order.world,
            shard=f"rank {rank}",
            step=order.step,
        )
        return Save(
            attempt=Attempt(series=self.settings.series, step=order.step, name=order.attempt),
            rank=rank,
            about=about,
            commits=self._now.commits,
            **{"tiers": order.tiers, "layout": None, "staged": None, **more},
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _close_all() -> None:
    """The process ends: wait for what is on its way."""
    with _savers_lock:
        savers = list(_SAVERS.items())
        _SAVERS.clear()
    for settings, saver in savers:
        saver.close(settings.grace_s)
