"""Checkpoints of a run, under faults: the run is the same, and so is what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import Result, assert_same_run, assert_survived, run_script

from everstep.tiers.files import FileStore
from everstep.tiers.find import Tier
from everstep.tiers.load import Opened, load
from everstep.tiers.series import Series
from everstep.tiers.values import decode


def _series(folder: Path, name: str) -> Series:
    return Series(FileStore(folder), name)


def _contents(folder: Path, name: str, step: int) -> dict[str, Any]:
    """Everything in a checkpoint but what says who wrote it where: whole tensors, and values."""

    def read(opened: Opened) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, whole in opened.checkpoint.tensors.items():
            boxes = {}
            for piece in whole.pieces:
                spans = {
                    t.name: (start, end) for t, start, end in opened.layout(piece.rank).spans()
                }
                boxes[piece.place, piece.shape] = opened.read(piece.rank, *spans[piece.name])
            found[key] = (whole.dtype, whole.shape, boxes)
        return found | {k: decode(v) for k, v in opened.checkpoint.values.items()}

    return load([Tier.durable(_series(folder, name))], read, step=step)[0]


def _steps(folder: Path, name: str) -> list[int]:
    return _series(folder, name).steps()


@pytest.mark.slow
def test_faults_change_neither_the_run_nor_its_checkpoints(tmp_path: Path) -> None:
    faults = (
        "kill:rank=1,step=2,at=section",
        "kill:rank=0,step=4,at=section",  # the rank that commits
        "kill:rank=2,step=5,at=between",
        "kill:rank=1,step=7,at=backward",
    )

    def run(folder: Path, faults: tuple[str, ...] = ()) -> Result:
        folder.mkdir()
        kept = ("--checkpoint", str(folder / "kept"), "--steps", "9", "--batchnorm")
        return run_script(folder / "runs", *kept, nproc=3, faults=faults)

    clean, faulted = run(tmp_path / "clean"), run(tmp_path / "faulted", faults)
    assert_same_run(clean, faulted)
    assert_survived(faulted, *faults)
    assert _steps(tmp_path / "clean/kept", "tiny") == [2, 4, 6, 8, 9]
    there = _steps(tmp_path / "faulted/kept", "tiny")
    assert set(there) <= {2, 4, 6, 8, 9}  # one that was on its way went with its rank
    assert there[-1] == 9
    for step in there:
        one, other = (
            _contents(tmp_path / each / "kept", "tiny", step) for each in ("clean", "faulted")
        )
        for each in (one, other):
            for key in [key for key in each if key.startswith("everstep.rank.")]:
                each[key] = len(each[key])  # the random key is drawn anew in each run
        assert one == other, f"step {step}"
