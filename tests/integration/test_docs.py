"""The examples in the docs run, under faults as well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.integration.joblab import assert_survived, run_script

ROOT = Path(__file__).parents[2]


def _code(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.slow
def test_the_library_page_runs_under_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"
    script.write_text(_code(ROOT / "docs" / "reference" / "library.md"))
    runs = tmp_path / "runs"
    runs.mkdir()
    fault = "kill:rank=1,step=9,at=backward"
    result = run_script(runs, script=script, nproc=2, faults=(fault,))
    assert result.exit_code == 0, result.text + "\n".join(result.lines)
    assert_survived(result, fault)


# What the how-to pages take for granted.
SET_UP = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep

run = everstep.init()
torch.manual_seed(1)
x = torch.linspace(0, 1, 64)[:, None]
heldout = (x, x.square())
model = DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.data(lambda step, rank, world: (x[step : step + 8], x[step : step + 8].square()))
run.protect(model=model, optimizer=optimizer)
"""
STEP = """
@run.step
def train_step(batch):
    loss = (model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""


SHARDED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import everstep

run = everstep.init()
torch.manual_seed(1)
x = torch.linspace(0, 1, 64)[:, None]
dataset = TensorDataset(x, x.square())
"""
LOOP = """
for batch in run.batches(until=20):
    train_step(batch)
"""


@pytest.mark.slow
def test_the_page_on_sharding_runs_under_a_fault(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(SHARDED + _code(ROOT / "docs" / "howto" / "shard-a-model.md") + STEP + LOOP)
    runs = tmp_path / "runs"
    runs.mkdir()
    fault = "kill:rank=1,step=9,at=commit"
    result = run_script(runs, script=script, nproc=4, faults=(fault,))
    assert result.exit_code == 0, result.text + "\n".join(result.lines)
    assert_survived(result, fault)
    told = [*result.of("incident_opened"), *result.of("incident_cause")]
    stood = [one["cause"]["where"] for one in told if one["cause"]["kind"] == "signal"]
    assert stood == ["in step 9 (after an update)"]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["evaluate", "accumulate-gradients", "save-a-checkpoint"])
def test_a_how_to_page_runs_under_a_fault_in_its_body(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = _code(ROOT / "docs" / "howto" / f"{page}.md")
    script = tmp_path / "page.py"
    script.write_text(SET_UP + ("" if "@run.step" in code else STEP) + code)
    runs = tmp_path / "runs"
    runs.mkdir()
    faults = ("kill:rank=0,step=10,at=between", "kill:rank=1,step=15,at=backward")
    result = run_script(runs, script=script, nproc=2, faults=faults)
    assert result.exit_code == 0, result.text + "\n".join(result.lines)
    assert_survived(result, *faults)
    if page == "evaluate":
        assert {step for (_, step), row in result.metrics.items() if "heldout" in row}
    if page == "save-a-checkpoint":
        assert torch.load("checkpoint.pt", weights_only=True)["step"] == 20
        assert list(tmp_path.glob("checkpoints/page/commits/*20.json"))
