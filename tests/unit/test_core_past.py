"""What a journal tells of the nodes that may have to hear of the job's end."""

from __future__ import annotations

from everstep.core.past import recall


def test_nodes_that_joined_and_were_not_lost_may_still_be_there() -> None:
    joined = [{"event": "node_joined", "node": node, "host": "h"} for node in range(4)]
    lost = {"event": "node_lost", "node": 1, "host": "h", "slot": 1, "ranks": [1], "text": "gone"}
    spare_lost = {"event": "node_lost", "node": 2, "host": "h", "slot": None, "ranks": []}
    displaced = {"event": "node_displaced", "node": 3, "name": "a", "host": "h", "text": "late"}
    assert recall([*joined, lost, spare_lost, displaced]).here == {0}
