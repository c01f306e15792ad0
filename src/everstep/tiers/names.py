"""Names of objects: a checkpoint's in its series, and what they say. Pure.

    NAME/commits/0000000042.json                    the checkpoint of step 42: exists when this does
    NAME/parts/0000000042/ATTEMPT/00003.safetensors what rank 3 saved in one attempt
    NAME/parts/0000000042/ATTEMPT/00003.json        its manifest, written after it
    NAME/parts/0000000042/ATTEMPT/00003.failed      in their place: why rank 3 could not
    NAME/parts/0000000042/ATTEMPT/00000.same        the step was there already, with this content
    NAME/aside/0000000042/ATTEMPT.json              a commit that counts no more, and why

A series (NAME) is what one training saves, usually a run. Steps have ten digits, so that order of
keys is order of steps. Attempts are random, so that nothing is ever overwritten.

Whatever is read from a store is parsed by the patterns here, and by nothing else.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from everstep.tiers.store import MAX_KEY_CHARS

MAX_STEP = 10**10 - 1
MAX_RANK = 10**5 - 1
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_SERIES = re.compile(_NAME)
_COMMIT = re.compile(rf"({_NAME})/commits/(\d{{10}})\.json")
_PART = re.compile(
    rf"({_NAME})/parts/(\d{{10}})/([0-9a-f]{{16}})/(\d{{5}})\.(safetensors|json|failed|same)"
)
_ASIDE = re.compile(rf"({_NAME})/aside/(\d{{10}})/([0-9a-f]{{16}})\.json")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Attempt:
    """One attempt to save step `step` of `series`. `name`: 16 hexadecimal digits."""

    series: str
    step: int
    name: str

    @property
    def prefix(self) -> str:
        """Under which all its objects are."""
        return f"{self.series}/parts/{self.step:010}/{self.name}/"

    @property
    def aside(self) -> str:
        """Where its commit is kept when it counts no more."""
        return f"{self.series}/aside/{self.step:010}/{self.name}.json"

    def part(self, rank: int, what: str) -> str:
        """The key of rank's `safetensors`, `json`, `failed` or `same`."""
        return f"{self.prefix}{rank:05}.{what}"


def check_series(name: str) -> None:
    """Raises ValueError for what can't be the name of a series."""
    if not _SERIES.fullmatch(name):
        raise ValueError(
            f"{name!r} can't name a series of checkpoints: up to 64 letters, digits, dots, "
            "underscores and hyphens, the first a letter or a digit"
        )


def new_attempt(series: str, step: int) -> Attempt:
    """An attempt that nobody else has. Raises ValueError for a bad name or step."""
    check_series(series)
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"a checkpoint can't be of step {step}")
    return Attempt(series=series, step=step, name=secrets.token_hex(8))


def commit_key(series: str, step: int) -> str:
    """The key whose object makes the checkpoint of `step` exist."""
    return f"{series}/commits/{step:010}.json"


def step_of(key: str) -> tuple[str, int] | None:
    """Series and step of a commit's key; None for any other key."""
    match = _COMMIT.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def part_of(key: str) -> tuple[Attempt, int, str] | None:
    """Attempt, rank and kind of a part's key; None for any other key."""
    match = _PART.fullmatch(key)
    if match is None:
        return None
    return Attempt(series=match[1], step=int(match[2]), name=match[3]), int(match[4]), match[5]


def aside_of(key: str) -> Attempt | None:
    """The attempt whose commit is kept aside under this key; None for any other key."""
    match = _ASIDE.fullmatch(key)
    return Attempt(series=match[1], step=int(match[2]), name=match[3]) if match else None


def is_key(key: str) -> bool:
    """Whether this can be a key of a store."""
    return len(key) <= MAX_KEY_CHARS and _KEY.fullmatch(key) is not None


def check_key(key: str) -> None:
    """Raises ValueError for what is no key of a store: it never becomes a path unchecked."""
    if not is_key(key):
        raise ValueError(f"{key[:80]!r} is no key of an object")


def check_prefix(prefix: str) -> None:
    """Raises ValueError for what can't be listed: neither empty nor a key with a slash behind."""
    if prefix and not (prefix.endswith("/") and is_key(prefix[:-1])):
        raise ValueError(f"{prefix[:80]!r} is no prefix of keys: it must end in a slash")
