"""A job that is started on this machine, whichever way: on one node in this process (alone.py), or
on nodes that are processes of their own (supervisor.py), here or elsewhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from everstep.agent.leftovers import sweep
from everstep.agent.zygote import ZygotePlan
from everstep.launch.job import JobResult
from everstep.observe.view import View
from everstep.settings import RunSettings


def run_job(settings: RunSettings, view: View, *, plan: ZygotePlan | None = None) -> JobResult:
    """Run a job to its end. Main thread; blocks until every process of the job is gone.

    `plan`: what the workers are forked from; the default trains. Raises UserError for what must be
    changed before it can start, EverstepError when this machine does not let it run or end; then,
    too, nothing is left running.
    """
    return asyncio.run(_run(settings, view, plan or ZygotePlan(), dict(os.environ)))


async def _run(
    settings: RunSettings, view: View, plan: ZygotePlan, environ: Mapping[str, str]
) -> JobResult:
    # What dead jobs left. The command may be started again on a host of a job that goes on.
    sweep(Path(settings.shm_dir), settings.run_id if settings.on_nodes else "")
    # Each way imports what the other has no use for.
    if settings.on_nodes:
        from everstep.launch.supervisor import Supervisor

        return await Supervisor(settings, view, plan, environ).run()
    from everstep.launch.alone import run_alone

    return await run_alone(settings, view, plan, environ)
