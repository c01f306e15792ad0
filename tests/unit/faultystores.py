"""Stores in which things go wrong on purpose, over any other store."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.tiers.store import Entry, Store


class Killed(BaseException):
    """The process that called has died: nothing of it goes on."""


@dataclass
class Rule:
    """What happens to the next `times` calls of `method` whose key matches `key`: `before`: is
    raised, and nothing is done; `after`: it is done, and this is raised. `hide`: a listing, which
    lags behind, lacks the key."""

    method: str
    key: str = ""
    times: int = 1
    before: BaseException | None = None
    after: BaseException | None = None
    hide: bool = False


class FaultyStore:
    """`store`, where what `rules` say goes wrong. With `dies_at`, the process dies at that write
    (put or delete, counted from 1), before it is done or, with `done`, just after. `writes`: how
    many there were."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rules: list[Rule] = []
        self.dies_at = 0
        self.done = False
        self.writes = 0

    @property
    def where(self) -> str:
        return self.store.where

    def put(
        self,
        key: str,
        pieces: Sequence[memoryview],
        *,
        absent: bool = False,
        deadline_s: float,
        stop: threading.Event | None = None,
    ) -> None:
        rule = self._enter("put", key)
        self.store.put(key, pieces, absent=absent, deadline_s=deadline_s, stop=stop)
        self._leave(rule)

    def get(self, key: str, *, start: int = 0, end: int | None = None, deadline_s: float) -> bytes:
        rule = self._enter("get", key)
        data = self.store.get(key, start=start, end=end, deadline_s=deadline_s)
        self._leave(rule)
        return data

    def get_into(self, key: str, area: memoryview, *, start: int = 0, deadline_s: float) -> None:
        rule = self._enter("get_into", key)
        self.store.get_into(key, area, start=start, deadline_s=deadline_s)
        self._leave(rule)

    def size(self, key: str, *, deadline_s: float) -> int:
        rule = self._enter("size", key)
        nbytes = self.store.size(key, deadline_s=deadline_s)
        self._leave(rule)
        return nbytes

    def list(self, prefix: str, *, deadline_s: float) -> Iterator[Entry]:
        self._leave(self._enter("list", prefix))
        for entry in self.store.list(prefix, deadline_s=deadline_s):
            if not any(rule.hide and re.search(rule.key, entry.key) for rule in self.rules):
                yield entry

    def delete(self, key: str, *, deadline_s: float) -> None:
        rule = self._enter("delete", key)
        self.store.delete(key, deadline_s=deadline_s)
        self._leave(rule)

    def sweep(self, *, older_than_s: float, deadline_s: float) -> int:
        return self.store.sweep(older_than_s=older_than_s, deadline_s=deadline_s)

    def close(self) -> None:
        self.store.close()

    def _enter(self, method: str, key: str) -> Rule | None:
        if method in ("put", "delete"):
            self.writes += 1
            if self.dies_at and self.writes >= self.dies_at + self.done:
                raise Killed
        elif self.dies_at and self.writes >= self.dies_at and self.done:
            raise Killed
        for rule in self.rules:
            if rule.method == method and rule.times and re.search(rule.key, key):
                rule.times -= 1
                if rule.before is not None:
                    raise rule.before
                return rule
        return None

    def _leave(self, rule: Rule | None) -> None:
        if rule is not None and rule.after is not None:
            raise rule.after
