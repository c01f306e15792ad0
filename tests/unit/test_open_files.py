"""The limit of descriptors is raised as far as it may be, and refused where that is too little."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from everstep.agent.open_files import raise_limit
from everstep.errors import UserError


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit, with a soft one below."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_becomes_the_hard_one(hard: int) -> None:
    assert raise_limit(hard) == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert raise_limit(hard) == hard


def test_too_few_are_refused_with_the_numbers(hard: int) -> None:
    with pytest.raises(UserError, match=rf"may open {hard} files, and may need {hard + 1}"):
        raise_limit(hard + 1)
