"""Work between the steps (evaluation, saves, early stopping) under faults: the same run, bit for
bit, wherever in it a rank fails."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.joblab import SCRIPTS, Result, assert_same_run, assert_survived, run_script

SECTIONS = SCRIPTS / "sections.py"


def _run(folder: Path, case: str, *own: str, faults: tuple[str, ...] = ()) -> Result:
    """Run the script; what it writes is in `folder`/files."""
    (folder / "files").mkdir(parents=True)
    files = str(folder / "files")
    return run_script(folder / "runs", case, files, *own, script=SECTIONS, nproc=3, faults=faults)


def _said(result: Result) -> set[str]:
    """The last words of each rank: its state, and what no other rank knows."""
    return {line.split(": ", 1)[1] for line in result.lines if ": rank " in line}


def _assert_exact(
    tmp_path: Path, case: str, *own: str, faults: tuple[str, ...] = ()
) -> tuple[Result, Result]:
    clean = _run(tmp_path / "clean", case)
    faulted = _run(tmp_path / "faulted", case, *own, faults=faults)
    assert_same_run(clean, faulted)
    assert_survived(faulted, *faults)
    assert len(list((tmp_path / "faulted/files").glob("fired-*"))) == len(own)
    assert _said(clean) == _said(faulted)
    assert len(_said(clean)) == 3
    return clean, faulted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "faults"),
    [
        (
            "before-top-every-two-note-after",
            (
                "kill:rank=1,step=3,at=section",
                "raise:rank=2,step=4,at=section",
                "kill:rank=0,step=6,at=section",
                "kill:rank=2,step=7,at=between",
                "kill:rank=0,step=8,at=backward",
                "kill:rank=1,step=9,at=section",
            ),
        ),
        (
            "carry-every-two-note-stop",
            (
                "kill:rank=1,step=3,at=section",
                "raise:rank=2,step=4,at=backward",
                "kill:rank=0,step=5,at=section",
                "kill:rank=2,step=5,at=between",
            ),
        ),
    ],
)
def test_evaluation_that_steers_the_script(
    case: str, faults: tuple[str, ...], tmp_path: Path
) -> None:
    clean, _ = _assert_exact(tmp_path, case, faults=faults)
    if "stop" in case:
        assert clean.of("closed")[-1]["step"] < 9
    if "after" in case:  # what is logged after the loop is written, too
        assert all("final" in clean.metrics[rank, 9] for rank in range(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "own"),
    [
        (
            "every-note",
            ("kill:1:2:begin", "kill:2:4:middle", "raise:0:4:end", "raise:1:6:middle",
             "kill:0:6:note", "kill:2:8:end", "kill:0:8:late"),
        ),
        (
            "before-after-borrow-jolt",
            ("kill:1:4:borrowed", "raise:0:6:borrowed", "kill:2:7:body", "kill:2:9:begin",
             "raise:0:9:end", "kill:0:9:note"),
        ),
        ("dcp", ("kill:1:3:saved", "kill:0:6:saved", "raise:2:9:saved")),
    ],
)  # fmt: skip
def test_every_place_of_a_section(case: str, own: tuple[str, ...], tmp_path: Path) -> None:
    _assert_exact(tmp_path, case, *own)


@pytest.mark.slow
def test_a_save_of_a_failed_attempt_never_ends_after_the_next_has_begun(tmp_path: Path) -> None:
    own = ("kill:1:2:written", "raise:2:4:written", "kill:0:6:renamed", "kill:2:8:written")
    _assert_exact(tmp_path, "save", *own)
    files = [{p.name: p for p in (tmp_path / f / "files").iterdir()} for f in ("clean", "faulted")]
    parts = [sorted(name for name in found if "part" in name) for found in files]
    assert parts[0] == parts[1]
    assert len(parts[0]) == 4 * 3  # and nothing half-written
    for name in parts[0]:
        one, other = (torch.load(found[name], weights_only=True) for found in files)
        assert str(one) == str(other), name
    _assert_orderly((tmp_path / "faulted/files/diary").read_text())


def _assert_orderly(diary: str) -> None:
    """No rank ends an attempt after one has begun the next."""
    newest: dict[str, int] = {}
    again = False
    for line in diary.splitlines():
        attempt, step, _, what = line.split()
        if what == "begins":
            again |= int(attempt) > newest.get(step, int(attempt))
            newest[step] = max(newest.get(step, 0), int(attempt))
        else:
            assert int(attempt) == newest[step], (line, diary)
    assert again, "nothing was done again"


HEAD = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import everstep

torch.set_num_threads(1)
run = everstep.init()
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.data(lambda step, rank, world: torch.ones(2, 4))
run.protect(model=model, optimizer=optimizer)

def step(batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""

REFUSED = {
    "a mean after the update": (
        """
        def late(batch):
            loss = step(batch)
            return run.mean(loss)

        train = run.step(late)
        for batch in run.batches(until=3):
            train(batch)
        """,
        "run.mean was called after the update of step 2",
    ),
    "a mean between the steps": ("run.mean(1.0)", "run.mean was called outside of a step"),
    "sections in another order": (
        """
        one, two = run.section(lambda: dist.barrier()), run.section(dist.barrier)
        (one if run.rank else two)()
        """,
        "another rank is in another one",
    ),
    "a collective of some ranks": (
        """
        train = run.step(step)
        for batch in run.batches(until=3):
            train(batch)
            run.section(lambda: dist.barrier(), ranks=[0])()
        """,
        "called a collective, and only ranks [0] are in it",
    ),
    "weights that a section changes": (
        """
        train = run.step(step)

        def clip():
            with torch.no_grad():
                model.module.weight.clamp_(-0.1, 0.1)

        for batch in run.batches(until=3):
            train(batch)
            run.section(clip)()
        """,
        "the section clip changes model/module.weight",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(case: str, tmp_path: Path) -> None:
    code, says = REFUSED[case]
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(code))
    result = run_script(tmp_path / "runs", script=script, nproc=2, lift_budgets=False)
    assert result.exit_code == 2, result.text + "\n".join(result.lines)
    assert says in result.text


@pytest.mark.slow
@pytest.mark.parametrize("case", ["before-top-every-two-note-borrow-after", "carry-every-two"])
def test_an_unprotected_run_is_the_same_run(case: str, tmp_path: Path) -> None:
    """Sections seed alike where nothing protects them."""
    protected, plain = tmp_path / "protected", tmp_path / "plain"
    for folder in (protected, plain):
        folder.mkdir()
    result = run_script(tmp_path / "runs", case, str(protected), script=SECTIONS, nproc=1)
    assert result.exit_code == 0, result.text
    done = subprocess.run(
        [sys.executable, str(SECTIONS), case, str(plain)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    said = {line for line in done.stdout.splitlines() if line.startswith("rank ")}
    assert said == _said(result)


def test_the_diary_that_shows_a_zombie_is_found_out() -> None:
    told: Any = "0 1 0 begins\n0 1 1 begins\n1 1 1 begins\n0 1 0 ends\n"
    with pytest.raises(AssertionError):
        _assert_orderly(told)
