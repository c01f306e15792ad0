"""The device's gate in a whole job: fused updates that are launched before it is known whether they
may happen. The device is the CPU, which says that it is one (tests/scripts/deviced.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.integration.joblab import (
    SCRIPTS,
    Result,
    assert_same_run,
    assert_survived,
    run_script,
)

DEVICED = SCRIPTS / "deviced.py"
STEPS, WORLD = 10, 4


def _told(result: Result, word: str) -> list[str]:
    pattern = re.compile(rf"{word}=(\S.*?)(?: \w+=|$)")
    found = [pattern.search(line) for line in result.lines]
    return [match[1] for match in found if match]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "faults"),
    [
        ("ddp", ("kill:rank=1,step=4", "kill:rank=2,step=7,at=optimizer")),
        ("ddp", ("kill:rank=3,step=4,at=fence", "raise:rank=0,step=7,at=optimizer")),
        ("hsdp", ("kill:rank=1,step=4", "kill:rank=2,step=7,at=optimizer")),
        ("hsdp", ("kill:rank=3,step=4,at=fence", "kill:rank=0,step=7,at=commit")),
        ("zeroed", ("kill:rank=1,step=5,at=fence", "kill:rank=2,step=7,at=commit")),
        ("average", ("kill:rank=1,step=5,at=fence", "kill:rank=2,step=7")),
        ("scaler", ("kill:rank=1,step=4", "kill:rank=2,step=7,at=fence")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_is_the_same_run(case: str, faults: tuple[str, ...], tmp_path: Path) -> None:
    clean = run_script(tmp_path / "clean", case, script=DEVICED)
    result = run_script(tmp_path / "faulted", case, script=DEVICED, faults=faults)
    assert_same_run(clean, result)
    assert_survived(result, *faults)
    # The first step is the host's: it makes the optimizer's state, and shows how a step is.
    assert _told(clean, "opened") == [str(STEPS - 1)] * WORLD


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hsdp", "ddp"])
def test_an_update_that_one_device_left_out_and_others_made(case: str, tmp_path: Path) -> None:
    """With a fence the rank has all it needs and makes the update after all. Without one it is a
    rank whose own collectives were cut: it takes the state from a peer."""
    faults = ("kill:rank=1,step=6,at=commit",)
    clean = run_script(tmp_path / "clean", case, script=DEVICED)
    result = run_script(tmp_path / "faulted", case, "--deny", "6", script=DEVICED, faults=faults)
    assert_same_run(clean, result)
    assert_survived(result, *faults)
    redone = ["[6]" if case == "hsdp" else "[]", "[]"]
    assert sorted(set(_told(result, "redone"))) == sorted(set(redone))
