"""Bad input is refused before anything is lost, with what to do."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.integration.joblab import TINY, Result, run_script

pytestmark = pytest.mark.slow

HEAD = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import everstep

torch.set_num_threads(1)
run = everstep.init()
torch.manual_seed(1)
net = nn.Linear(4, 1)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.data(lambda step, rank, world: torch.ones(2, 4))

def step(batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""

CASES = {
    "protect without an optimizer": ("run.protect(model=model)", "no optimizer"),
    "protect without a module": ("run.protect(optimizer=optimizer)", "no module"),
    "protect twice": (
        "run.protect(model=model, optimizer=optimizer)\n" * 2,
        "called twice",
    ),
    "protect after the first step": (
        """
train = run.step(step)
run.protect(model=model, optimizer=optimizer)
for batch in run.batches(until=3):
    train(batch)
    run.protect(model=model, optimizer=optimizer)
""",
        "after the first step",
    ),
    "an optimizer of unprotected parameters": (
        "run.protect(model=nn.Linear(2, 2), optimizer=optimizer)",
        "belongs to no protected module",
    ),
    "what has no state": (
        "run.protect(model=model, optimizer=optimizer, thing=object())",
        "has no state_dict",
    ),
    "a state that is no data": (
        """
class Odd:
    def state_dict(self):
        return {"f": print}
    def load_state_dict(self, state):
        pass
run.protect(model=model, optimizer=optimizer, odd=Odd())
""",
        "only plain data",
    ),
    "a step inside a step": (
        """
run.protect(model=model, optimizer=optimizer)
@run.step
def outer(batch):
    return outer(batch)
for batch in run.batches(until=3):
    outer(batch)
""",
        "inside a step",
    ),
    "two step functions": (
        "run.protect(model=model, optimizer=optimizer)\nrun.step(step)\nrun.step(step)",
        "used twice",
    ),
    "a step outside of the loop": (
        "run.protect(model=model, optimizer=optimizer)\nrun.step(step)(torch.ones(2, 4))",
        "one batch of run.batches",
    ),
    "a step twice for one batch": (
        """
run.protect(model=model, optimizer=optimizer)
train = run.step(step)
for batch in run.batches(until=3):
    train(batch)
    train(batch)
""",
        "one batch of run.batches",
    ),
    "a batch that no step took": (
        """
run.protect(model=model, optimizer=optimizer)
train = run.step(step)
for batch in run.batches(until=3):
    pass
""",
        "given to no step function",
    ),
    "an iterator for a batch": (
        """
run.protect(model=model, optimizer=optimizer)
train = run.step(step)
for batch in run.batches(until=3):
    train(iter([batch]))
""",
        "iterator",
    ),
    "a loop before protect": (
        "run.step(step)\nnext(iter(run.batches(until=3)))",
        "call run.protect",
    ),
    "no data": (
        "run2 = everstep.init()\nrun2._worker.source = None\nrun2.batches(until=2)",
        "call run.data",
    ),
    "until 0": ("run.batches(until=0)", "must be 1 or more"),
    "a communication hook": (
        """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
model.register_comm_hook(None, allreduce_hook)
run.protect(model=model, optimizer=optimizer)
""",
        "communication hook",
    ),
    "an optimizer that lets the ranks part": (
        """
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
averager = PeriodicModelAverager(period=4)
run.protect(model=model, optimizer=PostLocalSGDOptimizer(optimizer, averager))
""",
        "PostLocalSGDOptimizer",
    ),
    "a group after the first step": (
        """
run.protect(model=model, optimizer=optimizer)
train = run.step(step)
for batch in run.batches(until=5):
    train(batch)
    torch.distributed.new_group([0])
""",
        "was made after the first step",
    ),
    "parameters changed between the steps": (
        """
run.protect(model=model, optimizer=optimizer)
train = run.step(step)
for batch in run.batches(until=5):
    train(batch)
    with torch.no_grad():
        net.weight.clamp_(-1, 1).mul_(0.99)
""",
        "model/module.weight was changed between the steps",
    ),
    "a result of once that is no data": ("run.once(lambda: print)", "only plain data"),
}


def _run(folder: Path, body: str, nproc: int = 1) -> Result:
    script = folder / "script.py"
    script.write_text(HEAD + textwrap.dedent(body) + "\n")
    runs = folder / "runs"
    runs.mkdir()
    return run_script(runs, script=script, nproc=nproc, lift_budgets=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_misuse_is_refused(case: str, tmp_path: Path) -> None:
    body, says = CASES[case]
    result = _run(tmp_path, body)
    assert result.exit_code == 2, result.lines
    assert says in result.text, result.text
    assert "script.py" in result.text  # where in the script
    assert len(result.of("spawned")) == 1  # nobody tried it again


@pytest.mark.slow
def test_a_collective_in_the_body_is_named_and_not_done_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    body = """
    run.protect(model=model, optimizer=optimizer)
    train = run.step(step)
    for batch in run.batches(until=8):
        loss = train(batch)
        torch.distributed.all_reduce(loss)
    """
    script.write_text(HEAD + textwrap.dedent(body))
    runs = tmp_path / "runs"
    runs.mkdir()
    clean = run_script(runs, script=script, nproc=2)
    assert clean.exit_code == 0
    assert "collective-outside" in {note["key"] for note in clean.of("note")}
    faulted = run_script(
        runs,
        script=script,
        nproc=2,
        faults=("kill:rank=1,step=4,at=between",),
        lift_budgets=False,
    )
    assert faulted.exit_code != 0
    said = faulted.text + str(faulted.of("incident_cause")) + str(faulted.of("incident_opened"))
    assert "collective (allreduce)" in said


@pytest.mark.slow
def test_an_average_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    """BatchNorm's buffers are each rank's own, and so is an average of them."""
    result = run_script(tmp_path, "--ema", "--batchnorm", nproc=2, lift_budgets=False)
    assert result.exit_code == 2
    assert "are no replicas" in result.text
    assert "BatchNorm" in result.text


def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    result = _run(
        tmp_path,
        """
        with torch.no_grad():
            net.bias += float(run.rank == 1)  # after DDP made them equal
        run.protect(model=model, optimizer=optimizer)
        """,
        nproc=3,
    )
    assert result.exit_code == 2
    assert "model/module.bias" in result.text
    assert "rank 1" in result.text
    assert not result.of("step")


def test_the_same_error_twice_is_the_scripts(tmp_path: Path) -> None:
    result = run_script(tmp_path, "--fail-at", "4", nproc=2, lift_budgets=False)
    assert result.exit_code == 1
    assert "ValueError: a bug of the script" in result.text
    ended = result.of("job_ended")[0]
    assert "Traceback" in ended["cause"]["detail"]
    assert "tiny.py" in ended["cause"]["detail"]
    assert len(result.of("incident_opened")) == 1


def test_the_same_error_in_setup_twice_is_the_scripts(tmp_path: Path) -> None:
    result = _run(tmp_path, "raise KeyError('setup')", nproc=2)
    assert result.exit_code == 1
    assert "KeyError: 'setup'" in result.text


@pytest.mark.parametrize(("code", "expected"), [("7", 7), ("0", 1)])
def test_leaving_early_twice_ends_with_the_scripts_code(
    code: str, expected: int, tmp_path: Path
) -> None:
    result = _run(tmp_path, f"import os\nos._exit({code})", nproc=2)
    assert result.exit_code == expected
    assert "exited" in result.text


def test_a_script_that_leaves_its_loop_ends_well(tmp_path: Path) -> None:
    result = _run(
        tmp_path,
        """
        run.protect(model=model, optimizer=optimizer)
        train = run.step(step)
        for batch in run.batches(until=100):
            train(batch)
            if run.committed == 4:
                break
        print("left at", run.committed)
        """,
        nproc=2,
    )
    assert result.exit_code == 0, result.text
    assert sum("left at 4" in line for line in result.lines) == 2


def test_plain_python_runs_unprotected(tmp_path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, str(TINY), "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr.count("not protected") == 1
    assert "rank 0 done, 3 steps" in done.stderr
