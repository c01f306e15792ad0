"""A copy on its way from one agent's shelf to another's, as the agents will do it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from everstep import snapshot
from everstep.agent.budget import Budget
from everstep.agent.shelf import Area, Shelf, StillNeeded
from everstep.snapshot import About, Layout, Tensor
from everstep.wire.bulk import Caller, Listener, Offer, Sink, Source, fetch, push

KEY = b"the secret of the job, 32 bytes."
HOST = "127.0.0.1"
LAYOUT = Layout(
    [
        Tensor(name=f"layer.{i}", dtype="torch.bfloat16", item_bytes=2, shape=(1000, 700))
        for i in range(5)
    ]
)


def written(shelf: Shelf, step: int, acknowledged: int) -> Area:
    area = shelf.begin(rank=2, incarnation=1, nbytes=LAYOUT.nbytes, acknowledged=acknowledged)
    about = About(run_id="run", rank=2, world=4, shard="2", step=step)
    with area.bytes() as view:
        buffers = {tensor.name: bytes([step]) * tensor.nbytes for tensor in LAYOUT.tensors}
        manifest = snapshot.write(view, LAYOUT, about, buffers)
    shelf.commit(area, manifest)
    return area


@pytest.mark.parametrize("way", ["fetch", "push"])
def test_copies_travel_step_by_step(tmp_path: Path, way: str) -> None:
    budget = Budget(limit_bytes=4 * LAYOUT.nbytes)
    home, away = Shelf(tmp_path, "run", 0, budget), Shelf(tmp_path, "run", 1, budget)
    refused: list[str] = []
    listener = Listener(
        host=HOST, ports=[0], key=KEY, on_refused=lambda _, why: refused.append(why)
    )
    caller = Caller(key=KEY, node=1)
    for step in range(1, 6):
        there = written(home, step, acknowledged=step - 1)
        manifest = snapshot.decode(snapshot.encode(there.manifest))  # type: ignore[arg-type]
        here = away.begin(rank=2, incarnation=1, nbytes=manifest.nbytes, acknowledged=step - 1)
        with there.bytes() as data, here.bytes() as room:
            sink = Sink(room, manifest.block_bytes, manifest.blocks)
            ended = threading.Event()
            terms = {"node": 1, "lifetime_s": 30.0, "on_end": lambda _, ended=ended: ended.set()}
            if way == "fetch":
                ticket = listener.lend(Source(data), **terms)  # type: ignore[arg-type]
                offer = Offer(host=HOST, port=listener.port, ticket=ticket)
                fetch(sink, [offer], caller, deadline_s=30)
            else:
                ticket = listener.take_in(sink, **terms)  # type: ignore[arg-type]
                offer = Offer(host=HOST, port=listener.port, ticket=ticket)
                push(Source(data), offer, caller, deadline_s=30)
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
    """The step goes on without a copy rather than spoil the one on its way."""
    home = Shelf(tmp_path, "run", 0, Budget(limit_bytes=4 * LAYOUT.nbytes))
    first = written(home, 1, acknowledged=0)
    written(home, 2, acknowledged=1)
    with first.bytes(), pytest.raises(StillNeeded):
        written(home, 3, acknowledged=2)
    written(home, 3, acknowledged=2)
    home.close()
