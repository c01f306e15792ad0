"""Savers that are killed: kill_saves.py URL KILLS SEED.

A process saves checkpoint after checkpoint, prunes, and is killed with signal 9 after a random
time; another, which knows what the dead one has said, then loads all that is there, to the last
byte. Prints how many were killed, how many of them between the first byte of a save and its commit,
and how many checkpoints were loaded. This process itself never opens the store: a library's threads
would not survive the forks.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time

from everstep import snapshot
from everstep.tiers.catalog import Origin, Piece, Whole
from everstep.tiers.open import open_store
from everstep.tiers.reading import attempt_of
from everstep.tiers.series import Series

WORLD = 2
FLOATS = 50_000
KEEP = 3
LONG_S = 60.0
_LONGEST_S = 0.15  # of a saver's life once its first save has begun


def fill(step: int, rank: int) -> bytes:
    return random.Random(step * WORLD + rank).randbytes(4 * FLOATS)


def save(url: str, said: int) -> None:
    """Save until killed. Says which step has begun, and which was committed."""
    to = Series(open_store(url), "run")
    step = max(to.steps(), default=0)
    while True:
        step += 1
        attempt = to.begin(step)
        os.write(said, b"begun %d\n" % step)
        for rank in range(WORLD):
            layout = snapshot.Layout(
                [snapshot.Tensor(name="w", dtype="torch.float32", item_bytes=4, shape=(FLOATS,))]
            )
            about = snapshot.About(
                run_id="kill", rank=rank, world=WORLD, shard=f"rank {rank}", step=step
            )
            area = memoryview(bytearray(layout.nbytes))
            manifest = snapshot.write(area, layout, about, {"w": fill(step, rank)})
            to.put_part(attempt, rank, area, manifest, deadline_s=LONG_S)
        pieces = tuple(
            Piece(rank=r, name="w", place=(FLOATS * r,), shape=(FLOATS,)) for r in range(WORLD)
        )
        whole = Whole(dtype="torch.float32", shape=(FLOATS * WORLD,), pieces=pieces)
        to.commit(
            attempt,
            world=WORLD,
            tensors={"w": whole},
            values={},
            origin=Origin(),
            deadline_s=LONG_S,
        )
        os.write(said, b"committed %d\n" % step)
        if step % 4 == 0:
            to.prune(keep=KEEP, older_than_s=3600, now=time.time())


def verify(url: str, committed: int) -> int:
    """Twice the number of checkpoints, which are all whole and of which one is the last that was
    said; and one more when there is a newer one: its saver died before it could say so."""
    to = Series(open_store(url), "run")
    steps = to.steps()
    newest = max(steps, default=0)
    assert newest in (committed, committed + 1), f"{newest} is there, {committed} was said"
    for step in steps:
        checkpoint = to.read(step)
        assert to.missing(checkpoint) == {}
        for rank in range(WORLD):
            manifest = to.part_manifest(checkpoint, rank)
            area = memoryview(bytearray(manifest.snapshot.nbytes))
            key = attempt_of(checkpoint).part(rank, "safetensors")
            to.store.get_into(key, area, deadline_s=LONG_S)
            snapshot.verify(manifest.snapshot, area)
            assert area[-4 * FLOATS :] == fill(step, rank)
    assert len(steps) >= min(KEEP, committed)
    return 2 * len(steps) + newest - committed


def forked(job: str, url: str, number: int) -> int:
    """A process that does `job`. Its exit code is what `verify` found, or 255."""
    pid = os.fork()
    if pid:
        return pid
    code = 255
    try:
        if job == "save":
            save(url, number)
        else:
            code = verify(url, number)
    finally:
        sys.stderr.flush()
        os._exit(code)


def kill_one(url: str, dice: random.Random, committed: int) -> tuple[int, bool]:
    """The last step that is said to be committed now, and whether a save was under way."""
    says, said = os.pipe()
    pid = forked("save", url, said)
    os.close(said)
    ready, _, _ = select.select([says], [], [], LONG_S)
    assert ready, "the saver says nothing"
    select.select([], [], [], dice.uniform(0, _LONGEST_S))  # the moment is what is drawn
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(says) as file:
        lines = [line.split() for line in file]
    done = [int(step) for what, step in lines if what == "committed"]
    return max([committed, *done]), lines[-1][0] == "begun"


def main(url: str, kills: int, seed: int) -> None:
    dice = random.Random(seed)
    committed = under_way = loaded = 0
    for number in range(kills):
        committed, busy = kill_one(url, dice, committed)
        under_way += busy
        _, status = os.waitpid(forked("verify", url, committed), 0)
        found = os.waitstatus_to_exitcode(status)
        if not 0 <= found < 255:
            sys.exit(f"kill {number} of seed {seed}: see above")
        loaded += found // 2
        committed += found % 2
    print(f"{kills} killed, {under_way} in a save, {loaded} checkpoints loaded")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
