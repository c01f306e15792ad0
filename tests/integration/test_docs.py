"""The examples in the docs run, under faults as well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.integration.joblab import assert_survived, run_script

ROOT = Path(__file__).parents[2]


def _code(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.slow
def test_the_library_page_runs_under_a_fault(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(_code(ROOT / "docs" / "reference" / "library.md"))
    runs = tmp_path / "runs"
    runs.mkdir()
    fault = "kill:rank=1,step=9,at=backward"
    result = run_script(runs, script=script, nproc=2, faults=(fault,))
    assert result.exit_code == 0, result.text + "\n".join(result.lines)
    assert_survived(result, fault)
