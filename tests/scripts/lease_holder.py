"""Holds a run's lease, and says when it is asked whether it would act.

`lease_holder.py LEASE RUN_ID RUN_DIR LEASE_S`: prints `holds TERM`; then for each line on standard
input `acts` or `refuses`; ends at the end of the input. Printed too: `lost`, when it is told. Each
line begins with the time on the leases' clock."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from everstep.launch.lease import make_lease, now_s

PATIENCE_S = 60


def say(text: str) -> None:
    print(f"{now_s():.6f} {text}", flush=True)


async def main() -> None:
    text, run_id, run_dir, lease_s = sys.argv[1:]
    tenancy = await make_lease(text, run_id, Path(run_dir), float(lease_s)).acquire(PATIENCE_S)
    tenancy.lost.add_done_callback(lambda _: say("lost"))
    ended = asyncio.Event()

    def asked() -> None:
        if sys.stdin.readline():
            say("acts" if tenancy.holds else "refuses")
        else:
            ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), asked)
    say(f"holds {tenancy.term}")
    await ended.wait()
    await tenancy.release()


asyncio.run(main())
