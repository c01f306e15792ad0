"""Quantities as people write them: bytes a second."""

from __future__ import annotations

import re
from typing import Final

_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)([Bb]|bit)?(?:/s)?")
_POWERS: Final = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def bytes_per_s(text: str) -> float:
    """A rate in bytes a second: "2GiB/s", "800MB/s", "25Gbit/s", "0". Units of 1000, with an i of
    1024; a number alone is bytes. Raises ValueError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no rate like 2GiB/s")
    number, prefix, binary, unit = match.groups()
    scale = float((1024 if binary else 1000) ** _POWERS[prefix])
    return float(number) * scale / (8 if unit in ("b", "bit") else 1)
