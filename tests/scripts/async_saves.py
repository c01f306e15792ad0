"""`dcp.async_save` into tiers, by a thread and by a process: `async_saves.py FOLDER`. One rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore as Meeting
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from everstep.tiers import TieredWriter, TierSettings, load_newest
from everstep.tiers.files import FileStore
from everstep.tiers.series import Series

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    settings = TierSettings(series="run", destination=str(folder / "tier"), durable_every=1)
    store = Meeting(str(folder / "meet"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    writer = TieredWriter(settings)
    for step, kind in enumerate((AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS), 1):
        state: dict[str, Any] = {"w": torch.full((1000,), float(step)), "values": [step]}
        future: Any = async_save(
            state,
            checkpoint_id=str(step),
            storage_writer=writer,
            async_checkpointer_type=kind,
        )
        state["w"].zero_()
        state["values"].append("later")
        future.result(60)  # then the checkpoint is there, and not only on its way
        assert Series(FileStore(folder / "tier"), "run").steps()[-1] == step, kind
        target: dict[str, Any] = {"w": torch.zeros(1000), "values": []}
        load_newest(target, settings)
        assert target["values"] == [step]
        assert torch.equal(target["w"], torch.full((1000,), float(step)))
    refused: Any = async_save({"odd": object()}, checkpoint_id="3", storage_writer=writer)
    assert "odd is a builtins.object" in str(refused.exception(60))
    writer.close()
    dist.destroy_process_group()
    print("thread and process")
