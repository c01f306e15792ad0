"""What is kept of a rank, against a naive keeper that hears all in order; and that the order in
which it is told again makes no difference."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.keepsakes import Belongings, Keepsakes
from everstep.wire import messages as m

Said = tuple[int, m.Keepsake]


@dataclass
class Rank:
    """A rank's processes, one after the other, as they speak."""

    incarnation: int = 1
    step: int = 0
    turn: int = 0
    since: int = -1
    said: list[Said] = field(default_factory=list)

    def say(self, message: m.Keepsake) -> None:
        self.said.append((self.incarnation, message))

    def capsule(self, step: int, section: str = "") -> None:
        self.turn += 1
        payload = f"{self.incarnation}/{self.turn}".encode()
        self.say(
            m.Capsule(step=step, payload=payload, section=section, turn=self.turn, since=self.since)
        )

    def do(self, what: str, amount: int) -> None:
        match what:
            case "step":
                self.step += 1
                self.capsule(self.step)
            case "settle":  # the ranks will not go back any further
                self.since = max(self.since, self.step - 3 * amount)
            case "again":  # the attempt failed
                self.capsule(self.step)
            case "section":
                self.capsule(self.step, section=f"s{amount}")
            case "once":
                self.say(m.Once(key=f"k{amount}", value=b"%d" % self.incarnation))
            case "tape":
                told = m.Told(key=f"c{amount}", value=b"%d" % self.turn)
                self.say(m.Tape(items=(told,)))
            case "die":  # a replacement goes on from where the job goes on
                self.incarnation += 1
                self.turn = 0
                self.step = max(0, self.since, self.step - amount)
                self.say(m.Protect(shard="", manifest="", digests={}, rng_key=b"k"))
            case "begin":
                self.incarnation += 1
                self.turn = self.step = 0
                self.since = -1
                self.say(m.Tape(items=()))


@st.composite
def histories(draw: st.DrawFn) -> list[Said]:
    """What all processes of a rank said, in order. Sections come after their step alone: it has
    committed then, and is not attempted again by the same process."""
    kinds = ["step", "step", "again", "section", "tape", "die", "begin", "once", "settle"]
    rank = Rank()
    recorder, sections = 1, False
    for what, amount in draw(
        st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 2)), min_size=3, max_size=40)
    ):
        if (what == "again" and (sections or not rank.step)) or (
            what == "tape" and rank.incarnation != recorder
        ):
            continue
        rank.do(what, amount)
        recorder = rank.incarnation if what == "begin" else recorder
        sections = (sections and what not in ("step", "die", "begin")) or what == "section"
        if what == "die":
            sections = True  # it takes its step from others
    return rank.said


class Naive:
    """Hears all, in order, and thinks of nothing else."""

    def __init__(self) -> None:
        self.once: dict[str, bytes] = {}
        self.tape: dict[str, m.Told] = {}
        self.recorder = 0
        self.capsules: dict[int, dict[str, bytes]] = {}

    def hear(self, incarnation: int, message: m.Keepsake) -> None:
        match message:
            case m.Once():
                self.once[message.key] = message.value
            case m.Tape():
                if incarnation != self.recorder:
                    self.tape, self.recorder = {}, incarnation
                for item in message.items:
                    self.tape[item.key] = item
            case m.Capsule(step=step, section=""):
                self.capsules[step] = {"": message.payload}
                self.cut(step, message.since)
            case m.Capsule(step=step, section=section):
                self.capsules.setdefault(step, {})[section] = message.payload
                self.cut(step, message.since)

    def cut(self, step: int, since: int) -> None:
        usable = sorted(s for s in self.capsules if s <= step)
        needed = {*usable[-4:], *(s for s in usable if 0 <= since <= s)}
        self.capsules = {s: self.capsules[s] for s in sorted(needed)}


def capsules_of(kept: Belongings) -> dict[int, dict[str, bytes]]:
    found: dict[int, dict[str, bytes]] = {}
    for _, message in kept.listed():
        if isinstance(message, m.Capsule):
            found.setdefault(message.step, {})[message.section] = message.payload
    return found


def keep(*parts: list[Said]) -> Belongings:
    kept = Belongings()
    for part in parts:
        for incarnation, message in part:
            kept.take(incarnation, message)
    return kept


@given(histories())
@settings(max_examples=200)
def test_who_hears_all_in_order_keeps_what_the_naive_keeper_does(said: list[Said]) -> None:
    naive, kept = Naive(), Belongings()
    for incarnation, message in said:
        naive.hear(incarnation, message)
        kept.take(incarnation, message)
        assert capsules_of(kept) == naive.capsules
        assert kept.once == naive.once
        assert kept.tape == tuple(naive.tape.values())
        for step in range(12):
            sections = dict(naive.capsules.get(step, {}))
            assert kept.after(step) == (sections.pop("", None), sections)
            assert kept.newest(step) == max((s for s in naive.capsules if s <= step), default=None)


@given(histories())
def test_what_is_listed_is_what_is_kept(said: list[Said]) -> None:
    kept = keep(said)
    assert keep(kept.listed()).listed() == kept.listed()


@given(histories(), st.data())
@settings(max_examples=200)
def test_what_is_told_again_changes_nothing(said: list[Said], data: st.DataObject) -> None:
    """Some who heard the beginning tell it, and one who heard all, in any order: nothing is
    displaced by what is older."""
    cuts = data.draw(st.lists(st.integers(0, len(said)), max_size=3))
    parts = [keep(said[:cut]).listed() for cut in cuts]
    whole = keep(said)
    parts.insert(data.draw(st.integers(0, len(parts))), whole.listed())
    merged = keep(*parts)
    assert (merged.once, merged.rng_key) == (whole.once, whole.rng_key)
    assert {item.key for item in merged.tape} == {item.key for item in whole.tape}
    expected, found = capsules_of(whole), capsules_of(merged)
    newer = {step: kept for step, kept in found.items() if step >= min(expected, default=0)}
    if expected:
        assert newer == expected  # what is older than all that must be kept is harmless


@given(histories(), st.data())
@settings(max_examples=200)
def test_a_half_told_list_takes_nothing_away(said: list[Said], data: st.DataObject) -> None:
    """A connection may end in the middle of it."""
    before = data.draw(st.integers(0, len(said)))
    kept = keep(said[:before])
    listed = keep(said).listed()
    again = keep(kept.listed(), kept.listed()[: data.draw(st.integers(0, 9))])
    assert again.listed() == kept.listed()
    merged = keep(kept.listed(), listed[: data.draw(st.integers(0, len(listed)))], listed)
    for step, sections in capsules_of(keep(said)).items():
        assert capsules_of(merged)[step] == sections


def test_a_tape_that_is_long_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.keepsakes._TAPE_PART_BYTES", 100)
    items = tuple(m.Told(key=str(n), value=bytes(nbytes)) for n, nbytes in enumerate((60, 60, 300)))
    kept = keep([(2, m.Tape(items=items))])
    assert kept.listed() == [(2, m.Tape(items=(item,))) for item in items]
    assert keep(kept.listed()).tape == items
    assert keep([(2, m.Tape(items=()))]).listed() == [(2, m.Tape(items=()))]


def test_what_a_process_is_born_with_is_not_told_its_agent_twice() -> None:
    keepsakes = Keepsakes()
    tape, once = (m.Told(key="a", value=b"1"),), m.Once(key="k", value=b"2")
    capsule = m.Capsule(step=1, payload=b"")
    for message in (m.Tape(items=tape), once, capsule):
        keepsakes.take(0, 1, message)
    heritage = keepsakes.heritage(0, ())
    assert (heritage.tape, heritage.once) == (tape, {"k": b"2"})
    assert heritage.kept == ((1, capsule),)
