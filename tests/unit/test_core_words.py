"""How things are named in sentences."""

from __future__ import annotations

import pytest

from everstep.core.words import name_break

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] {} [127.0.0.1]:39329: "
    "{}. This is typically caused by a remote worker crashing. Check the logs. GLHF!"
)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (
            GLOO.format("Read error", "Connection reset by peer"),
            "lost touch with a peer (connection reset)",
        ),
        (
            "[/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:27799",
            "lost touch with a peer (connection closed)",
        ),
        (GLOO.format("Write error", "Broken pipe"), "lost touch with a peer (connection closed)"),
        ("Connection refused", "lost touch with a peer (connection refused)"),
        ("[x] Timed out waiting 600000ms for recv", "lost touch with a peer (timed out)"),
        ("Wait timeout", "lost touch with a peer (timed out)"),
        (
            "[enforce fail at /gloo/pair.cc:423] op.length <= 8. 24 vs 8\nframe 1",
            "failed in a collective (op.length <= 8)",
        ),
        ("\n  tensors differ in size\n", "failed in a collective (tensors differ in size)"),
        ("", "failed in a collective"),
    ],
)
def test_a_break_is_named_in_one_short_line(error: str, named: str) -> None:
    assert name_break(error) == named


def test_no_error_makes_a_long_line() -> None:
    assert len(name_break("x" * 5000)) < 150
