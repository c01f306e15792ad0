"""Where an object is, on this host or another.

Theory of operation. What this host has is read here. Of others it is asked who has it, all at once,
and that is remembered: a load that has listed a checkpoint asks those that have it and nobody else.
Hosts that can't be reached are left out: what only they have is not there, and the error says so.

Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from everstep.errors import TransientError
from everstep.tiers import names
from everstep.tiers.memory import talk
from everstep.tiers.memory.circle import Circle
from everstep.tiers.memory.plane import node_of
from everstep.tiers.memory.talk import Failed
from everstep.tiers.memory.vault import Vault
from everstep.tiers.store import Missing

Question = talk.Get | talk.Lend | talk.Size
_MOST_HINTS = 1 << 18


class Finding:
    """Finds objects. `own(question)`: the answer for one that is here."""

    def __init__(
        self, vault: Vault, circle: Circle, own: Callable[[Question], Awaitable[talk.Answer]]
    ) -> None:
        self._vault = vault
        self._circle = circle
        self._own = own
        self._hints: dict[str, tuple[str, ...]] = {}

    async def get(self, asked: Question) -> talk.Answer:
        """What a rank asks for. Raises Missing, StoreError."""
        names.check_key(asked.key)
        tried: list[str] = []
        if isinstance(asked, talk.Lend):
            tried += asked.beside
            asked = msgspec.structs.replace(asked, node=node_of(self._circle.name))
        if asked.at in ("", self._circle.name) and self._circle.name not in tried:
            if self._vault.find(asked.key) is not None:
                return self._with_key(await self._own(asked))
            tried.append(self._circle.name)
        failed: dict[str, str] = {}
        for holders in (self._hinted, self._search):
            for holder in await holders(asked):
                if holder in tried:
                    continue
                tried.append(holder)
                try:
                    answer = await self._circle.ask(holder, asked, asked.deadline_s)
                except TransientError as error:
                    failed[holder] = str(error)
                    continue
                if not isinstance(answer, Failed):
                    return self._with_key(answer)
                failed[holder] = answer.text
        told = "; ".join(f"{name}: {why}" for name, why in (self._circle.lost() | failed).items())
        raise Missing(f"no host that was reached has {asked.key}" + (f" ({told})" if told else ""))

    async def holders(self, key: str, deadline_s: float) -> list[str]:
        """The hosts that have an object, this one first."""
        names.check_key(key)
        own = [self._circle.name] if self._vault.find(key) is not None else []
        asked = talk.Size(key=key, deadline_s=deadline_s)
        answers = await self._circle.ask_all(self._circle.others(), asked, deadline_s)
        return own + [name for name, said in answers.items() if isinstance(said, talk.Sized)]

    async def names(self, asked: talk.Names) -> list[talk.Listed]:
        """All objects below a prefix, of all hosts that are reached, or of one (`at`)."""
        own = self._circle.name
        found: dict[str, talk.Listed] = {}
        if asked.at in ("", own):
            found = {entry.key: entry for entry in own_names(self._vault, asked.prefix)}
        others = self._circle.others()
        if asked.at:
            others = [asked.at] if asked.at != own else []
        here = set(found)
        hints: dict[str, list[str]] = {}
        listings = await asyncio.gather(*(self._names_at(name, asked) for name in others))
        for name, entries in zip(others, listings, strict=True):
            for entry in entries:
                found.setdefault(entry.key, entry)
                if entry.key not in here:
                    hints.setdefault(entry.key, []).append(name)
        if len(self._hints) + len(hints) > _MOST_HINTS:
            self._hints.clear()
        self._hints.update({key: tuple(where) for key, where in hints.items()})
        return [found[key] for key in sorted(found)]

    def forget(self, key: str) -> None:
        """An object is not where it was."""
        self._hints.pop(key, None)

    async def _hinted(self, asked: Question) -> list[str]:
        return [asked.at] if asked.at else list(self._hints.get(asked.key, ()))

    async def _search(self, asked: Question) -> list[str]:
        if asked.at:
            return []
        there = await self.holders(asked.key, asked.deadline_s)
        if there and len(self._hints) < _MOST_HINTS:
            self._hints[asked.key] = tuple(there)
        return there

    async def _names_at(self, name: str, asked: talk.Names) -> list[talk.Listed]:
        found: list[talk.Listed] = []
        more = True
        while more:
            after = found[-1].key if found else ""
            page: talk.Answer | None = None
            try:
                question = msgspec.structs.replace(asked, after=after, at=name)
                page = await self._circle.ask(name, question, asked.deadline_s)
            except TransientError:
                pass  # what it has is not there for us: `lost` tells
            if not isinstance(page, talk.Page):
                break
            found += page.entries
            more = page.more and bool(page.entries)
        return found

    def _with_key(self, answer: talk.Answer) -> talk.Answer:
        """A rank fetches for itself."""
        if isinstance(answer, talk.Lent):
            return msgspec.structs.replace(answer, key=self._circle.plane.key)
        return answer


def own_names(vault: Vault, prefix: str, after: str = "") -> list[talk.Listed]:
    """What is here below a prefix, behind a key."""
    return [
        talk.Listed(held.key, held.nbytes, held.changed_s)
        for held in vault.list(prefix)
        if held.key > after
    ]
