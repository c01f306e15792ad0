"""Checkpoints of torch's own distributed format, to and from ours: a process of its own.

Theory of operation. `python -m everstep.tiers.foreign` reads what it has to do from its standard
input and says on its standard output what it did; so whoever starts it needs no torch. Both ways
go through torch's planners, one tensor at a time: out, each tensor has a file of its own, as torch
keeps all tensors of a file in memory while it writes it; in, each is read right into the part.

That format's metadata is a pickle, which runs whatever its writer put into it. Who imports one
trusts its writer like code (`--trust-pickle`); values in it are read with torch's restricted
unpickler all the same, for they must be plain data to be kept here. Names of files in the metadata
must be plain names.

It does not know who trusts whom.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.errors import EverstepError, UserError
from everstep.settings import has_secret, secret_of
from everstep.tiers import places, tensors, values
from everstep.tiers.catalog import Origin
from everstep.tiers.foreign_task import Done, Task
from everstep.tiers.incoming import Incoming, bring_in
from everstep.tiers.load import open_newest
from everstep.tiers.origin import packages
from everstep.tiers.slabs import Reading

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}")


def export_to(reading: Reading, folder: Path) -> Done:
    """Write a checkpoint to `folder` as torch's `FileSystemWriter` does. Blocks. Raises UserError
    when something is there, PartLost, Refused."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty, and nothing is overwritten")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is meant so
        save(
            {},
            storage_writer=FileSystemWriter(folder, single_file_per_rank=False, thread_count=1),
            planner=_Export(reading),
            no_dist=True,
        )
    held = reading.checkpoint
    return Done(step=held.step, tensors=len(held.tensors), values=len(held.values))


class _Export(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each when it is written."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self._reading = reading

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        held = self._reading.checkpoint
        keys = [*held.tensors, *held.values]
        self.mappings = {key: held.paths.get(key, (key,)) for key in keys}
        self.state_dict = {
            key: torch.empty(whole.shape, dtype=tensors.dtype_named(whole.dtype), device="meta")
            for key, whole in held.tensors.items()
        }
        for key, value in held.values.items():
            self.state_dict[key] = values.decode(value, tensors.word)
        self.is_coordinator = is_coordinator

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        key = write_item.index.fqn
        like = self.state_dict[key]
        made = torch.empty(like.shape, dtype=like.dtype)
        area = tensors.direct(made, made.dtype)
        assert area is not None
        if area.nbytes != math.prod(like.shape) * max(1, self._reading.item_bytes(key)):
            raise UserError(f"{key}: elements of {like.dtype} have another size in the checkpoint")
        self._reading.read(key, ((0,) * like.ndim, tuple(like.shape)), area)
        return made


def import_from(task: Task) -> Done:
    """Make a checkpoint of the one in `task.folder`. Runs what its pickles say. Blocks. Raises
    UserError for what it can't hold."""
    reader = FileSystemReader(task.folder)
    try:
        metadata = reader.read_metadata()
    except FileNotFoundError:
        raise UserError(f"{task.folder} has no .metadata: it is no such checkpoint") from None
    _check_names(metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    incoming, encoded = [], {}
    for key, about in metadata.state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata):
            dtype = about.properties.dtype
            incoming.append(
                Incoming(
                    key=key,
                    dtype=str(dtype),
                    item_bytes=dtype.itemsize,
                    shape=tuple(about.size),
                    fill=_Fill(reader, metadata, key, about),
                )
            )
        else:
            encoded[key] = values.encode(_value(reader, metadata, key), key)
    with places.opened(task.addresses, key=_signing_key()) as found:
        series = found.reader(found.places[0], task.series)
        assert task.step is not None
        checkpoint = bring_in(
            series,
            task.step,
            incoming,
            encoded,
            paths=metadata.planner_data or {},
            origin=Origin(config={"imported": task.folder}, packages=packages()),
            part_bytes=task.part_bytes,
        )
    return Done(step=checkpoint.step, tensors=len(incoming), values=len(encoded))


def _check_names(metadata: Metadata) -> None:
    for info in (metadata.storage_data or {}).values():
        if not _PLAIN.fullmatch(info.relative_path):
            raise UserError(f"its metadata names the file {info.relative_path[:80]!r}")


class _Fill:
    """A tensor of such a checkpoint, read into memory."""

    def __init__(
        self, reader: FileSystemReader, metadata: Metadata, key: str, about: TensorStorageMetadata
    ) -> None:
        self._reader, self._metadata = reader, metadata
        self._key, self._about = key, about

    def __call__(self, area: memoryview) -> None:
        dtype, shape = self._about.properties.dtype, self._about.size
        if area.nbytes:
            target = torch.frombuffer(area, dtype=torch.uint8).view(dtype).view(shape)
            _read(self._reader, self._metadata, _Tensor(), {self._key: target})


class _Tensor(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


class _Values(_Tensor):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _value(reader: FileSystemReader, metadata: Metadata, key: str) -> Any:
    found: dict[str, Any] = {key: None}
    try:
        _read(reader, metadata, _Values(), found)
    except Exception as error:
        raise UserError(f"{key} is no plain data, and can't be kept: {error}") from error
    return found[key]


def _read(
    reader: FileSystemReader, metadata: Metadata, planner: DefaultLoadPlanner, into: dict[str, Any]
) -> None:
    planner.set_up_planner(into, metadata, is_coordinator=True)
    [plan] = planner.create_global_plan([planner.create_local_plan()])
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _signing_key() -> bytes | None:
    return secret_of(os.environ).checkpoint_key() if has_secret(os.environ) else None


def perform(task: Task) -> Done:
    """Do it."""
    if task.do == "import":
        return import_from(task)
    with places.opened(
        task.addresses, key=_signing_key(), require_signature=task.require_signature
    ) as found:
        step = task.step
        with open_newest(found.tiers(task.series), step=step) as opened:
            return export_to(Reading(opened), Path(task.folder))


def main() -> int:
    """Do what standard input says."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    try:
        done = perform(task)
    except EverstepError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(msgspec.json.encode(done).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
