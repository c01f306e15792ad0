"""Which device a worker finds; there is no GPU where these run, or none is used."""

from __future__ import annotations

import os

import pytest
import torch

from everstep.errors import UserError
from everstep.worker import devices


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count", lambda: 0)


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_without_a_gpu_it_is_the_cpu_and_nothing_is_set(wanted: str) -> None:
    before, notes = dict(os.environ), []
    found = devices.find(wanted, 0, 2, lambda key, text: notes.append(key))
    assert found is None
    assert notes == []
    assert dict(os.environ) == before


def test_what_was_asked_for_and_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="device = cuda: 2 ranks on this machine"):
        devices.find("cuda", 0, 2, lambda *_: None)


def test_an_unprotected_rank_chooses_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_DEVICE", "auto")
    assert devices.unprotected(0) == torch.device("cpu")
    monkeypatch.setenv("EVERSTEP_DEVICE", "cuda")
    with pytest.raises(UserError):
        devices.unprotected(0)
