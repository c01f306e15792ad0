"""Checkpoints as others keep them on disk: `model.safetensors`, in several files with an index.

Theory of operation. Out: tensors are written slab by slab to files that get their names when they
are whole; the index last. In: headers are read and checked before a byte of a tensor is, lengths
before memory is taken; names of files come from the index, and must be plain names of that folder.
No pickle is read or written. safetensors has no word for some types of torch's; a tensor of such a
type is named in the error.

It does not know torch.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from everstep.errors import UserError
from everstep.snapshot import MAX_HEADER_BYTES, MAX_TENSORS
from everstep.tiers.incoming import Incoming
from everstep.tiers.slabs import Reading
from everstep.tiers.store import Refused

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 256 << 20
SHARD_BYTES = 5 * 10**9
_LENGTH = struct.Struct("<Q")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.safetensors")
_TYPES = {
    "torch.bool": ("BOOL", 1),
    "torch.uint8": ("U8", 1),
    "torch.int8": ("I8", 1),
    "torch.float8_e4m3fn": ("F8_E4M3", 1),
    "torch.float8_e5m2": ("F8_E5M2", 1),
    "torch.float8_e8m0fnu": ("F8_E8M0", 1),
    "torch.int16": ("I16", 2),
    "torch.uint16": ("U16", 2),
    "torch.float16": ("F16", 2),
    "torch.bfloat16": ("BF16", 2),
    "torch.int32": ("I32", 4),
    "torch.uint32": ("U32", 4),
    "torch.float32": ("F32", 4),
    "torch.int64": ("I64", 8),
    "torch.uint64": ("U64", 8),
    "torch.float64": ("F64", 8),
    "torch.complex64": ("C64", 8),
}
_NAMES = {word: (dtype, size) for dtype, (word, size) in _TYPES.items()}
Size = Annotated[int, Meta(ge=0, le=1 << 62)]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]
    data_offsets: tuple[Size, Size]


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    weight_map: dict[str, str]


# ---------------------------------------------------------------- out


def write(
    reading: Reading,
    folder: Path,
    *,
    prefix: str = "",
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Write the tensors whose keys begin with `prefix`, without it, to files of at most
    `shard_bytes` (a larger tensor has its own). `say`: is told of what is left out. Returns the
    files. Raises UserError for a type that safetensors lacks, for files that are there already;
    PartLost, Refused."""
    keys = [key for key in reading.checkpoint.tensors if key.startswith(prefix)]
    if not keys:
        raise UserError(f"no tensor's key begins with {prefix!r}; `everstep ckpt show` has them")
    left_out = len(reading.checkpoint.values)
    if left_out:
        say(f"{left_out} values that are no tensors are left out: safetensors holds none")
    named = {key: key.removeprefix(prefix) for key in keys}
    if "" in named.values() or "__metadata__" in named.values():
        raise UserError(f"with the prefix {prefix!r} a tensor would have no name of its own")
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(reading, keys, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else _shard_names(len(shards))
    taken = [name for name in (*names, INDEX) if (folder / name).exists()]
    if taken:
        raise UserError(f"{folder / taken[0]} is there already, and nothing is overwritten")
    written = []
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, reading, shard, named)
        written.append(folder / name)
    if len(shards) > 1:
        where = {
            named[key]: name for name, shard in zip(names, shards, strict=True) for key in shard
        }
        total = sum(_nbytes(reading, key) for key in keys)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        text = msgspec.json.format(msgspec.json.encode(index, order="sorted"))
        _put(folder / INDEX, [text])
        written.append(folder / INDEX)
    return written


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _nbytes(reading: Reading, key: str) -> int:
    whole = reading.checkpoint.tensors[key]
    return math.prod(whole.shape) * _word(key, whole.dtype)[1]


def _word(key: str, dtype: str) -> tuple[str, int]:
    try:
        return _TYPES[dtype]
    except KeyError:
        raise UserError(
            f"{key} is of {dtype}, which safetensors has no word for; export it with --format dcp, "
            "or choose others with --prefix"
        ) from None


def _shards(reading: Reading, keys: Sequence[str], shard_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    held = 0
    for key in keys:
        nbytes = _nbytes(reading, key)
        if shard and held + nbytes > shard_bytes:
            yield shard
            shard, held = [], 0
        shard.append(key)
        held += nbytes
    yield shard


def _write_file(path: Path, reading: Reading, keys: list[str], named: dict[str, str]) -> None:
    tensors = reading.checkpoint.tensors
    order = sorted(keys, key=lambda key: (-_word(key, tensors[key].dtype)[1], named[key]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        start, end = end, end + _nbytes(reading, key)
        word, size = _word(key, tensors[key].dtype)
        if reading.item_bytes(key) not in (0, size):  # 0: it has no elements
            raise Refused(f"{key}: an element of {word} has not {reading.item_bytes(key)} bytes")
        header[named[key]] = _Entry(dtype=word, shape=tensors[key].shape, data_offsets=(start, end))
    text = msgspec.json.encode(header)
    text += b" " * (-(_LENGTH.size + len(text)) % 64)
    if len(text) > MAX_HEADER_BYTES:
        raise UserError(f"{path} would need a header of {len(text)} bytes; make smaller shards")
    slabs = (area for key in order for _, area in reading.slabs(key))
    _put(path, [_LENGTH.pack(len(text)), text], slabs)


def _put(path: Path, head: Sequence[bytes], rest: Iterable[bytearray] = ()) -> None:
    """A file that has its name when it is whole."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "xb") as file:
            file.writelines(head)
            file.writelines(rest)
            file.flush()
            os.fsync(file.fileno())
        os.link(beside, path)  # refuses a name that somebody took meanwhile
    finally:
        beside.unlink(missing_ok=True)


# ---------------------------------------------------------------- in


def read(source: Path) -> list[Incoming]:
    """The tensors of a `.safetensors` file, or of a folder with `model.safetensors` or an index and
    the files that it names. Reads the headers; the bytes when they are asked for. Raises UserError
    for what is none of these."""
    if source.is_file():
        return _tensors(source)
    if (source / INDEX).is_file():
        return _indexed(source)
    if (source / SINGLE).is_file():
        return _tensors(source / SINGLE)
    raise UserError(f"{source} has neither {SINGLE} nor {INDEX}, and is no safetensors file")


def _indexed(folder: Path) -> list[Incoming]:
    path = folder / INDEX
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise UserError(f"{path} is larger than {MAX_INDEX_BYTES} bytes: no index is")
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"{path} is no index of safetensors files: {error}") from error
    files = sorted(set(index.weight_map.values()))
    strange = [name for name in files if not _PLAIN.fullmatch(name)]
    if strange:
        raise UserError(f"{path} names {strange[0][:80]!r}, which is no file beside it")
    found: list[Incoming] = []
    for name in files:
        if not (folder / name).is_file():
            raise UserError(f"{path} names {name}, which is not there")
        inside = _tensors(folder / name)
        found += [one for one in inside if index.weight_map.get(one.key) == name]
    lacking = index.weight_map.keys() - {one.key for one in found}
    if lacking:
        raise UserError(f"{path} names {min(lacking)[:80]!r}, which is in none of its files")
    return found


def _tensors(path: Path) -> list[Incoming]:
    """The tensors of one file, whose header is checked: they fill the file without gap or
    overlap."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
        if not 0 <= length <= min(MAX_HEADER_BYTES, size - _LENGTH.size):
            raise UserError(f"{path} is no safetensors file: its header has no such length")
        text = file.read(length)
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        if len(raw) > MAX_TENSORS:
            raise UserError(f"{path} has {len(raw)} tensors, more than {MAX_TENSORS}")
        entries = {key: msgspec.json.decode(entry, type=_Entry) for key, entry in raw.items()}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"{path} is no safetensors file: {error}") from error
    begin, at = _LENGTH.size + length, 0
    found = []
    for key, entry in sorted(entries.items(), key=lambda pair: pair[1].data_offsets):
        dtype, item = _NAMES.get(entry.dtype, ("", 0))
        start, end = entry.data_offsets
        if not dtype:
            raise UserError(f"{path}: {key[:80]!r} is of {entry.dtype[:20]!r}, unknown here")
        if start != at or end - start != math.prod(entry.shape) * item:
            raise UserError(f"{path}: the bytes of {key[:80]!r} are not where they should be")
        at = end
        fill = _Fill(path, begin + start)
        found.append(Incoming(key=key, dtype=dtype, item_bytes=item, shape=entry.shape, fill=fill))
    if begin + at != size:
        raise UserError(f"{path} has {size} bytes, its tensors end at {begin + at}")
    return found


class _Fill:
    """Bytes of a file from some place on."""

    def __init__(self, path: Path, start: int) -> None:
        self._path, self._start = path, start

    def __call__(self, area: memoryview) -> None:
        with open(self._path, "rb", buffering=0) as file:
            file.seek(self._start)
            done = 0
            while done < area.nbytes:
                count = file.readinto(area[done : done + (8 << 20)])
                if not count:
                    raise UserError(f"{self._path} has become shorter")
                done += count
