"""A copy on its way from one agent's shelf to another's, as the agents will do it."""

from __future__ import annotations

import threading
from pathlib import Path

from everstep import snapshot
from everstep.agent.shelf import Area, Shelf, create_locked
from everstep.shm.budget import Budget
from everstep.snapshot import About, Layout, Tensor
from everstep.wire.bulk import Caller, Listener, Offer, Sink, Source, fetch

KEY = b"the secret of the job, 32 bytes."
HOST = "127.0.0.1"
LAYOUT = Layout(
    [
        Tensor(name=f"layer.{i}", dtype="torch.bfloat16", item_bytes=2, shape=(1000, 700))
        for i in range(5)
    ]
)


def begin(shelf: Shelf, step: int) -> Area:
    area = shelf.begin(rank=2, incarnation=1, nbytes=LAYOUT.nbytes, keep=[step - 1])
    if area.fd < 0:
        assert shelf.furnish(area, create_locked(area.path, area.nbytes))
    return area


def written(shelf: Shelf, step: int) -> Area:
    area = begin(shelf, step)
    about = About(run_id="run", rank=2, world=4, shard="2", step=step)
    with area.bytes() as view:
        buffers = {tensor.name: bytes([step]) * tensor.nbytes for tensor in LAYOUT.tensors}
        manifest = snapshot.write(view, LAYOUT, about, buffers)
    shelf.commit(area, manifest)
    return area


def test_copies_travel_step_by_step(tmp_path: Path) -> None:
    budget = Budget(limit_bytes=4 * LAYOUT.nbytes)
    home, away = Shelf(tmp_path, "run", 0, budget), Shelf(tmp_path, "run", 1, budget)
    refused: list[str] = []
    listener = Listener(
        host=HOST, ports=[0], key=KEY, on_refused=lambda _, why: refused.append(why)
    )
    caller = Caller(key=KEY, node=1)
    for step in range(1, 6):
        there = written(home, step)
        manifest = snapshot.decode(snapshot.encode(there.manifest))  # type: ignore[arg-type]
        here = begin(away, step)
        with there.bytes() as data, here.bytes() as room:
            sink = Sink(room, manifest.block_bytes, manifest.blocks)
            ended = threading.Event()

            def on_end(_: object, ended: threading.Event = ended) -> None:
                ended.set()

            ticket = listener.lend(Source(data), node=1, lifetime_s=30.0, on_end=on_end)
            offer = Offer(host=HOST, port=listener.port, ticket=ticket)
            fetch(sink, [offer], caller, deadline_s=30)
            assert ended.wait(30)
        away.commit(here, manifest)
        newest = away.newest(2)
        assert newest is not None
        assert newest.step == step
        with newest.bytes() as view:
            snapshot.verify(manifest, view)
    assert [area.step for area in home.complete(2)] == [5, 4]
    listener.close()
    assert refused == []
    home.close()
    away.close()
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_is_being_sent_is_not_overwritten(tmp_path: Path) -> None:
    """Another area is taken rather than spoil the one on its way."""
    home = Shelf(tmp_path, "run", 0, Budget(limit_bytes=4 * LAYOUT.nbytes))
    first = written(home, 1)
    written(home, 2)
    with first.bytes() as view:
        before = bytes(view)
        third = written(home, 3)
        assert third is not first
        assert view == before
    assert written(home, 4) is not third
    assert home.nbytes == 2 * LAYOUT.nbytes
    home.close()
