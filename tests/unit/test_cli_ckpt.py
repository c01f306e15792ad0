"""`everstep ckpt`: what it prints, and the exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from tests.unit import checkpoints
from tests.unit.checkpoints import DictStore, Draft, Made, draft

from everstep import cli
from everstep.tiers import values
from everstep.tiers.catalog import Origin
from everstep.wire.secret import make_secret


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory, and no settings from outside."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("EVERSTEP"):
            monkeypatch.delenv(name)
    return tmp_path


def everstep(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["ckpt", *arguments])


def answer(*arguments: str, code: int = 0) -> Any:
    result = everstep(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def saved(place: Path, step: int, *, key: bytes | None = None, changed: int = 0) -> Draft:
    shape = (30, 40)
    data = bytearray(b"".join(number.to_bytes(4, "little") for number in range(1200)))
    data[77] += changed
    made = Made(
        shape=shape,
        data=bytes(data),
        boxes=checkpoints.rows(shape, 2, along=step % 2),
        dtype="torch.int32",
    )
    store = DictStore()
    put = draft(
        step,
        {"model.w": made},
        {"epoch": values.encode(3, "epoch")},
        world=2,
        signed=key is not None,
        origin=Origin(run_id="r1", commit="c" * 40, world=2, mesh={"dp": 2}, written_s=1.0),
    ).put(store, key)
    for name, data_ in store.objects.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data_)
    return put


def part(place: Path, made: Draft, rank: int) -> Path:
    return place / made.attempt.part(rank, "safetensors")


def test_a_list_has_every_tier_and_names_what_is_not_whole(here: Path) -> None:
    saved(here / "near", 1)
    made = saved(here / "near", 2)
    part(here / "near", made, 1).unlink()
    saved(here / "far", 2)
    torn = saved(here / "far", 3)
    (here / "far/run/commits/0000000003.json").unlink()
    result = everstep("ls", "near", "far")
    assert result.exit_code == 0
    assert "run/1" in result.stdout
    assert "durable (not whole), durable" in result.stdout
    assert "rank 1's part: it is not there" in result.stdout
    assert torn.checkpoint.attempt in result.stdout
    listed = answer("ls", "near", "far")
    assert [one["step"] for one in listed["checkpoints"]] == [1, 2]
    assert [one["step"] for one in listed["attempts"]] == [3]


def test_nothing_there_is_code_3(here: Path) -> None:
    assert everstep("ls", "none").exit_code == 3
    saved(here / "far", 2)
    assert everstep("verify", "far#run/9").exit_code == 3
    assert everstep("show", "far#other").exit_code == 3


@pytest.mark.parametrize("arguments", [["ls", "a#../b"], ["ls", "ftp://x"], ["import", ".", "far"]])
def test_what_is_refused_is_code_2(arguments: list[str]) -> None:
    assert everstep(*arguments).exit_code == 2


def test_show_prints_where_it_comes_from_and_what_is_in_it(here: Path) -> None:
    saved(here / "far", 1)
    saved(here / "far", 2)
    result = everstep("show", "far")
    assert result.exit_code == 0
    for text in ("step 2 of run", "r1", "c" * 40, "dp 2", "model.w", "int32", "30x40", "epoch"):
        assert text in result.stdout
    assert answer("show", "far#run/1")["checkpoint"]["step"] == 1


def test_names_in_a_checkpoint_cant_steer_the_terminal(here: Path) -> None:
    store = DictStore()
    name = "w\x1b[2J\x9b31m\r\n"
    draft(1, {name: Made(shape=(2,), data=bytes(8))}, {name + "v": values.encode("x", "")}).put(
        store
    )
    for key, data in store.objects.items():
        (here / "far" / key).parent.mkdir(parents=True, exist_ok=True)
        (here / "far" / key).write_bytes(data)
    shown = everstep("show", "far").stdout
    assert "w[2J31m" in shown
    assert not set(shown) & {"\x1b", "\x9b", "\r"}


def test_verify_finds_a_flipped_bit(here: Path) -> None:
    made = saved(here / "far", 1)
    assert everstep("verify", "far").exit_code == 0
    path = part(here / "far", made, 1)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 4
    path.write_bytes(raw)
    result = everstep("verify", "far")
    assert result.exit_code == 1
    assert "corrupt: rank 1" in result.stdout
    assert "model.w" in result.stdout
    found = answer("verify", "far", code=1)
    assert [finding["rank"] for one in found["verdicts"] for finding in one["findings"]] == [1]


def test_verify_checks_signatures(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, other = make_secret(), make_secret()
    saved(here / "far", 1, key=secret.checkpoint_key())
    assert "no key" in everstep("verify", "far").stdout
    assert everstep("verify", "--require-signature", "far").exit_code == 2
    monkeypatch.setenv("EVERSTEP_SECRET", secret.reveal())
    assert "signature: valid" in everstep("verify", "--require-signature", "far").stdout
    monkeypatch.setenv("EVERSTEP_SECRET", other.reveal())
    assert everstep("verify", "far").exit_code == 1
    saved(here / "far", 2)
    assert everstep("verify", "--require-signature", "far#run/2").exit_code == 1


def test_diff_compares_bits(here: Path) -> None:
    saved(here / "far", 1)
    saved(here / "far", 2)
    saved(here / "other", 2, changed=1)
    assert everstep("diff", "far#run/1", "far#run/2").exit_code == 0
    result = everstep("diff", "far#run/1", "other")
    assert result.exit_code == 1
    assert "model.w: tensor: 1 of 1200 elements differ, by 256 at most" in result.stdout
    assert answer("diff", "far", "other", code=1)["differences"][0]["elements"] == 1


def test_prune_keeps_what_is_asked_for(here: Path) -> None:
    for step in (1, 2, 3):
        saved(here / "far", step)
    assert "removed 2 checkpoints (1, 2)" in everstep("prune", "--keep", "1", "far").stderr
    assert [one["step"] for one in answer("ls", "far")["checkpoints"]] == [3]
    assert answer("prune", "--keep", "1", "far")["run"]["steps"] == []
    assert everstep("prune", "--keep", "1", "none").exit_code == 3


def test_safetensors_there_and_back(here: Path) -> None:
    saved(here / "far", 1)
    done = answer("export", "--prefix", "model.", "far", "out")
    assert done == {"step": 1, "files": ["out/model.safetensors"]}
    assert everstep("export", "far", "out").exit_code == 2
    assert torch.equal(load_file("out/model.safetensors")["w"].view(-1), torch.arange(1200))
    made = answer("import", "--prefix", "model.", "out", "far#again/5")
    assert made["tensors"] == 1
    again = answer("diff", "far#run/1", "far#again/5", code=1)  # the value is not in it
    assert [found["key"] for found in again["differences"]] == ["epoch"]


def test_a_pickle_is_imported_only_by_who_trusts_it(here: Path) -> None:
    folder = here / "theirs"
    folder.mkdir()
    trap = here / "trap"
    (folder / ".metadata").write_bytes(f"cos\nsystem\n(S'touch {trap}'\ntR.".encode())
    result = everstep("import", "theirs", "far#run/1")
    assert result.exit_code == 2
    assert "--trust-pickle" in result.output
    assert not trap.exists()


@pytest.mark.slow
def test_torchs_own_format_there_and_back(here: Path) -> None:
    saved(here / "far", 1)
    done = answer("export", "--format", "dcp", "far", "theirs")
    assert done == {"step": 1, "files": ["theirs"]}
    made = answer("import", "--trust-pickle", "theirs", "far#again/1")
    assert (made["tensors"], made["values"]) == (1, 1)
    assert everstep("diff", "far#run/1", "far#again/1").exit_code == 0


def test_no_command_imports_torch(here: Path) -> None:
    made = saved(here / "far", 1)
    save_file({"w": torch.zeros(2)}, here / "w.safetensors")
    program = (
        "import sys; from everstep.cli import main; main(sys.argv[1:], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    for arguments in (["show", "far"], ["verify", "far"], ["import", "w.safetensors", "far#n/1"]):
        done = subprocess.run(
            [sys.executable, "-c", program, "ckpt", *arguments],
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
    assert made.checkpoint.step == 1
