"""The store that is a directory, on a disk or shared between the hosts.

Theory of operation. An object is written to a file that has no name yet (O_TMPFILE; where the file
system has none, one whose name begins with a dot, which no key does). When its bytes are on the
disk it gets its name by link(2), which fails where there is one already: so it is seen whole or
not at all, and of several who put with `absent` one succeeds, on NFS too. Then the directory is
flushed, as are those that were made on the way. An object's file is never written to again.

No name in the directory is believed: each folder on the way to an object is opened by itself, and
none that is a symbolic link. The root may be one.

A file system that does not answer keeps its caller: the kernel knows no deadline. Between two
pieces it is looked at.

It does not know what the bytes are, nor who else has the directory mounted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from everstep.tiers.names import check_key, check_prefix, is_key
from everstep.tiers.store import Denied, Entry, Exists, Full, Missing, StoreError
from everstep.tiers.waiting import Deadline
from everstep.wire.bulk_throttle import UNLIMITED, Throttle

PIECE_BYTES = 8 << 20
"""Most bytes of one write: between two it can be stopped."""
_UNNAMED = ".put-"
_TRIES = 5  # to put into a folder that somebody else finds empty and removes
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}


class FileStore:
    """Objects as files below `root`, which is made when something is put. `throttle`: of writes."""

    def __init__(self, root: Path, *, throttle: Throttle = UNLIMITED) -> None:
        self._root = root.absolute()
        self._throttle = throttle

    @property
    def where(self) -> str:
        """The directory."""
        return str(self._root)

    def put(
        self,
        key: str,
        pieces: Sequence[memoryview],
        *,
        absent: bool = False,
        deadline_s: float,
        stop: threading.Event | None = None,
    ) -> None:
        """See `Store.put`."""
        check_key(key)
        deadline = Deadline(deadline_s, stop=stop)
        with self._telling(key, "put"):
            for _ in range(_TRIES):
                try:
                    return self._put(key, pieces, absent, deadline)
                except FileNotFoundError:
                    deadline.check()
            raise StoreError("its folder is removed again and again")

    def _put(
        self, key: str, pieces: Sequence[memoryview], absent: bool, deadline: Deadline
    ) -> None:
        with self._folder(key, make=True) as (folder, name):
            with _new_file(folder) as (fd, unnamed):
                for piece in pieces:
                    self._write(fd, piece, deadline)
                os.fsync(fd)
                _give_name(fd, unnamed, folder, name, replace=not absent)
            os.fsync(folder)

    def get(self, key: str, *, start: int = 0, end: int | None = None, deadline_s: float) -> bytes:
        """See `Store.get`."""
        check_key(key)
        with self._telling(key, "get"), self._opened(key) as (fd, nbytes):
            end = nbytes if end is None else end
            if not 0 <= start <= end <= nbytes:
                raise StoreError(f"it has {nbytes} bytes; {start} to {end} were asked for")
            area = bytearray(end - start)
            _read(fd, memoryview(area), start, Deadline(deadline_s))
            return bytes(area)

    def get_into(self, key: str, area: memoryview, *, start: int = 0, deadline_s: float) -> None:
        """See `Store.get_into`."""
        check_key(key)
        with self._telling(key, "get"), self._opened(key) as (fd, nbytes):
            if start + area.nbytes > nbytes:
                raise StoreError(f"it has {nbytes} bytes, {start + area.nbytes} were asked for")
            with area.cast("B") as raw:
                _read(fd, raw, start, Deadline(deadline_s))

    def size(self, key: str, *, deadline_s: float) -> int:
        """See `Store.size`."""
        check_key(key)
        with self._telling(key, "size"), self._opened(key) as (_, nbytes):
            return nbytes

    def list(self, prefix: str, *, deadline_s: float) -> Iterator[Entry]:
        """See `Store.list`."""
        check_prefix(prefix)
        deadline = Deadline(deadline_s)
        with self._telling(prefix, "list"):
            try:
                folder = self._enter(prefix.split("/")[:-1], make=False)
            except FileNotFoundError:
                return
            yield from _walk(folder, prefix, deadline)

    def delete(self, key: str, *, deadline_s: float) -> None:
        """See `Store.delete`. Folders that it leaves empty go too."""
        check_key(key)
        with self._telling(key, "delete"):
            try:
                with self._folder(key, make=False) as (folder, name):
                    os.unlink(name, dir_fd=folder)
                    os.fsync(folder)
            except FileNotFoundError:
                return
            self._remove_empty(key.split("/")[:-1])

    def sweep(self, *, older_than_s: float, deadline_s: float) -> int:
        """See `Store.sweep`: files that never got their name, where O_TMPFILE is missing."""
        deadline = Deadline(deadline_s)
        removed = 0
        with self._telling("", "sweep"):
            for path, _, files in os.walk(self._root):
                deadline.check()
                for file in files:
                    if file.startswith(_UNNAMED):
                        removed += _remove_old(Path(path, file), older_than_s)
        return removed

    def close(self) -> None:
        """See `Store.close`: nothing is kept open."""

    def _write(self, fd: int, piece: memoryview, deadline: Deadline) -> None:
        size = min(self._throttle.piece_bytes or PIECE_BYTES, PIECE_BYTES)
        with piece.cast("B") as raw:
            start = 0
            while start < raw.nbytes:
                deadline.wait(self._throttle.book(min(size, raw.nbytes - start)))
                start += os.write(fd, raw[start : start + size])

    @contextlib.contextmanager
    def _telling(self, key: str, what: str) -> Iterator[None]:
        """Errors of the system in the words of a store."""
        try:
            yield
        except FileNotFoundError as error:
            raise Missing(f"{self._root}/{key}: {what}: there is no such object") from error
        except FileExistsError as error:
            raise Exists(f"{self._root}/{key}: {what}: it is there already") from error
        except OSError as error:
            kind = _kind(error)
            room = f" ({_room(self._root)})" if kind is Full else ""
            raise kind(f"{self._root}/{key}: {what}: {error.strerror or error}{room}") from error
        except StoreError as error:
            raise type(error)(f"{self._root}/{key}: {what}: {error}") from error

    @contextlib.contextmanager
    def _folder(self, key: str, *, make: bool) -> Iterator[tuple[int, str]]:
        *folders, name = key.split("/")
        folder = self._enter(folders, make=make)
        try:
            yield folder, name
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """A descriptor of an object, and its bytes."""
        with self._folder(key, make=False) as (folder, name):
            # A pipe that somebody laid there would block the open.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=folder)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise StoreError("it is not a regular file")
            yield fd, about.st_size
        finally:
            os.close(fd)

    def _enter(self, folders: Sequence[str], *, make: bool) -> int:
        """A descriptor of a folder below the root, which is made and flushed if need be."""
        if make:
            _make_root(self._root)
        folder = os.open(self._root, _FOLDER)
        for name in folders:
            parent = folder
            try:
                folder = _enter_one(parent, name, make=make)
            finally:
                os.close(parent)
        return folder

    def _remove_empty(self, folders: Sequence[str]) -> None:
        for depth in range(len(folders), 0, -1):
            try:
                with self._folder("/".join(folders[:depth]), make=False) as (parent, name):
                    os.rmdir(name, dir_fd=parent)
            except OSError:
                return  # not empty, or gone already: both are fine


def _enter_one(parent: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    os.fsync(parent)  # whoever made it: what is put below is lost with it
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)


def _make_root(root: Path) -> None:
    """Make the root, and flush the folders in which something was made."""
    above = root
    made = []
    while not above.exists():
        made.append(above)
        above = above.parent
    root.mkdir(parents=True, exist_ok=True)
    for folder in made:
        fd = os.open(folder.parent, _FOLDER)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _new_file(folder: int) -> Iterator[tuple[int, str | None]]:
    """A new file that nobody sees, and the name that it has all the same where the file system
    can't do without; it is gone at the end unless it was given another."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    unnamed = None
    try:
        fd = os.open(".", flags | os.O_TMPFILE, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        unnamed = _UNNAMED + secrets.token_hex(8)
        fd = os.open(unnamed, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    try:
        yield fd, unnamed
    finally:
        os.close(fd)
        if unnamed is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unnamed, dir_fd=folder)


def _give_name(fd: int, unnamed: str | None, folder: int, name: str, *, replace: bool) -> None:
    """The one moment at which an object comes to be."""
    try:
        _link(fd, unnamed, folder, name)
    except FileExistsError:
        if not replace:
            raise
        away = unnamed
        if away is None:
            away = _UNNAMED + secrets.token_hex(8)
            _link(fd, None, folder, away)
        os.rename(away, name, src_dir_fd=folder, dst_dir_fd=folder)


def _link(fd: int, unnamed: str | None, folder: int, name: str) -> None:
    try:
        if unnamed is None:  # Python then calls linkat, which follows what /proc shows
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)
        else:
            os.link(unnamed, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK):
            raise StoreError(
                "this file system makes no hard links, without which two commits can't be told "
                "apart: name a directory on another, or the object store itself (s3://...)"
            ) from error
        raise


def _read(fd: int, area: memoryview, start: int, deadline: Deadline) -> None:
    """Fill `area` with the bytes from `start` on."""
    done = 0
    while done < area.nbytes:
        deadline.check()
        got = os.preadv(fd, [area[done : done + PIECE_BYTES]], start + done)
        if not got:
            raise StoreError(f"it ends at byte {start + done}; it was longer a moment ago")
        done += got


def _walk(folder: int, prefix: str, deadline: Deadline) -> Iterator[Entry]:
    """The objects below an open folder, which is closed, in order of their keys."""
    try:
        deadline.check()
        with os.scandir(folder) as found:
            entries = [
                (entry.name + ("/" if entry.is_dir(follow_symlinks=False) else ""), entry)
                for entry in found
                if is_key(prefix + entry.name)
            ]
        for name, entry in sorted(entries, key=lambda pair: pair[0]):
            try:
                if name.endswith("/"):
                    below = os.open(entry.name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                    yield from _walk(below, prefix + name, deadline)
                    continue
                about = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue  # deleted while we looked
            if stat.S_ISREG(about.st_mode):
                yield Entry(
                    key=prefix + name, nbytes=about.st_size, changed_s=about.st_mtime_ns / 1e9
                )
    finally:
        os.close(folder)


def _remove_old(path: Path, older_than_s: float) -> int:
    """1 if it was so old, and is removed."""
    try:
        if time.time() - path.lstat().st_mtime < older_than_s:
            return 0
        path.unlink()
    except FileNotFoundError:
        return 0
    return 1


def _kind(error: OSError) -> type[StoreError]:
    if error.errno in _FULL:
        return Full
    return Denied if error.errno in _DENIED else StoreError


def _room(root: Path) -> str:
    """What is free there, for an error."""
    with contextlib.suppress(OSError):
        about = os.statvfs(root)
        free, whole = (blocks * about.f_frsize for blocks in (about.f_bavail, about.f_blocks))
        return f"{free} of {whole} bytes are free, {about.f_favail} files"
    return "what is free there can't be read"
