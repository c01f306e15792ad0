"""Two ranks on two hosts save one checkpoint after the other, from the step that is given on, until
they are killed. Arguments: the two desks' sockets, the step before the first."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from everstep import snapshot
from everstep.errors import EverstepError
from everstep.tiers.catalog import Origin
from everstep.tiers.memory.client import connect
from everstep.tiers.names import Attempt
from everstep.tiers.series import Series

NBYTES = 2 << 20
S = 30.0
stores = [connect(where, copies=2, retained=2, patience_s=20) for where in sys.argv[1:3]]
cards = [store.card() for store in stores]
for store in stores:
    store.introduce(cards)
series = [Series(store, "run", key=None) for store in stores]
layout = snapshot.Layout(
    [snapshot.Tensor(name="x", dtype="torch.uint8", item_bytes=1, shape=(NBYTES,))]
)


def save(attempt: Attempt, rank: int) -> None:
    about = snapshot.About(run_id="r", rank=rank, world=2, shard=f"s{rank}", step=attempt.step)
    data = bytes([attempt.step % 251]) * NBYTES
    with stores[rank].reserve(layout.nbytes, deadline_s=S) as reserved:
        manifest = snapshot.write(reserved.area, layout, about, {"x": data})
        series[rank].put_part(attempt, rank, reserved.area, manifest, deadline_s=S)


step = int(sys.argv[3])
with ThreadPoolExecutor(2) as ranks:
    while True:
        step += 1
        attempt = series[0].begin(step)
        try:
            list(ranks.map(save, [attempt, attempt], range(2)))
            series[0].commit(
                attempt, world=2, tensors={}, values={}, origin=Origin(world=2), deadline_s=S
            )
        except EverstepError as error:
            print("failed", step, error, flush=True)
        else:
            print("committed", step, flush=True)
