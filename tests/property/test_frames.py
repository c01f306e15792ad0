"""Frames and accounts of the network against naive models."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire.channel import ChannelError
from everstep.wire.frames import (
    Beat,
    Bye,
    Control,
    FrameDecoder,
    Hello,
    LeaseClock,
    Ledger,
    Sparingly,
    Welcome,
    decode_control,
    encode_control,
    encode_data,
)


class Word(msgspec.Struct, frozen=True, tag=True):
    text: str
    data: bytes = b""


CONTROLS: st.SearchStrategy[Control] = st.one_of(
    st.builds(Hello, st.integers(0, 2**31)),
    st.builds(Welcome, st.floats(0.1, 100), st.integers(1, 2**40), st.integers(1, 2**40)),
    st.builds(Beat, st.integers(0, 2**63)),
    st.builds(Bye, st.text()),
)


@given(CONTROLS)
def test_a_control_frame_comes_back(control: Control) -> None:
    back = decode_control(encode_control(control))
    assert back == control or (isinstance(control, Bye) and len(control.why) > 1000)


@given(st.text(), st.binary())
def test_a_message_comes_back_below_the_cap_and_is_refused_above(text: str, data: bytes) -> None:
    word = Word(text, data)
    size = len(msgspec.msgpack.encode(word))
    decoder: FrameDecoder[Word] = FrameDecoder(Word, size)
    assert decoder.data(encode_data(word, size)) == word
    with pytest.raises(ChannelError):
        encode_data(word, size - 1)
    with pytest.raises(ChannelError):
        FrameDecoder(Word, size - 1).data(encode_data(word, size))


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"\x01" + tail))
def test_any_bytes_are_a_message_or_a_channel_error(frame: bytes) -> None:
    for decode in (FrameDecoder[Word](Word, 100).data, decode_control):
        try:
            assert isinstance(decode(frame), Word | Control)
        except ChannelError:
            pass


@given(
    st.integers(1000, 10_000),
    st.lists(st.tuples(st.sampled_from("srb"), st.integers(0, 900)), max_size=80),
)
def test_two_ledgers_agree_and_bound_what_is_under_way(
    backlog: int, script: list[tuple[str, int]]
) -> None:
    """One side sends, the other receives in order and tells; no more than the backlog, and one
    frame, is ever unread."""
    sender, receiver = Ledger(backlog, 0), Ledger(backlog, 0)
    under_way: list[bytes] = []
    for what, size in script:
        if what == "s":
            frame = bytes(size)
            fits = sum(len(f) + 128 for f in under_way) + size + 128 <= backlog
            if sender.take(frame):
                under_way.append(frame)
            else:
                assert sender.unread_bytes > 0
                assert sender.unread_bytes + size + 128 > backlog
            assert fits or not under_way or sender.unread_bytes <= backlog + size
        elif what == "r" and under_way:
            if receiver.receive(under_way.pop(0)):
                sender.acknowledge(receiver.beat())
            # What is untold is less than an eighth, so a reader is never taken for one who isn't.
            assert sender.unread_bytes <= sum(len(f) + 128 for f in under_way) + backlog // 8
        elif what == "b":
            sender.acknowledge(receiver.beat())
            assert sender.unread_bytes == sum(len(f) + 128 for f in under_way)


@given(st.integers(0, 1000), st.integers(-1000, 2000))
def test_only_what_was_sent_can_be_acknowledged(sent: int, said: int) -> None:
    ledger = Ledger(10_000, 0)
    assert ledger.take(bytes(sent))
    if 0 <= said <= sent + 128:
        ledger.acknowledge(Beat(said))
        with pytest.raises(ChannelError):
            ledger.acknowledge(Beat(said - 1))
    else:
        with pytest.raises(ChannelError):
            ledger.acknowledge(Beat(said))


@given(st.lists(st.floats(0, 100), max_size=50), st.floats(0.01, 10))
def test_a_lease_clock_counts_no_gap_for_more_than_its_most(
    gaps: list[float], most_s: float
) -> None:
    now_s, clock = 5.0, LeaseClock(5.0, most_s)
    shown = 0.0
    for gap in gaps:
        now_s += gap
        before, shown = shown, clock.look(now_s)
        assert -1e-9 <= shown - before <= min(gap, most_s) + 1e-9


@given(st.integers(1, 10), st.lists(st.floats(0, 40), max_size=100))
def test_sparingly_lets_so_many_through_a_minute_and_counts_the_rest(
    per_minute: int, gaps: list[float]
) -> None:
    now_s, sparingly = 0.0, Sparingly(per_minute)
    passed_at: list[float] = []
    passed = held_back = 0
    for count, gap in enumerate(gaps):
        now_s += gap
        answer = sparingly.admit(now_s)
        if answer is not None:
            passed += 1
            held_back += answer
            assert passed + held_back == count + 1
            passed_at.append(now_s)
            # Two windows of a minute may touch.
            assert sum(at > now_s - 60 for at in passed_at) <= 2 * per_minute
