"""What goes wrong beside a save in the background: it must not look like another thing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit import fake_dcp
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from everstep import snapshot
from everstep.tiers import lanes, parts
from everstep.tiers.dcp import TieredWriter
from everstep.tiers.files import FileStore
from everstep.tiers.lanes import SaveWarning
from everstep.tiers.names import new_attempt
from everstep.tiers.policy import DURABLE, MEMORY, Failure, Standing, Wish, decide
from everstep.tiers.series import SaveFailed, Series
from everstep.tiers.settings import TierSettings
from everstep.tiers.staging import Own, Staging
from everstep.tiers.store import Full

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is :UserWarning")

PATIENCE_S = 30.0


@pytest.fixture
def settings(tmp_path: Path) -> TierSettings:
    return TierSettings(series="run", destination=str(tmp_path), durable_every=1)


@pytest.fixture
def writers(settings: TierSettings) -> Iterator[list[fake_dcp.Writer]]:
    made = [fake_dcp.Writer(settings) for _ in range(2)]
    yield made
    for writer in made:
        writer.own.close(PATIENCE_S)


def save(writers: list[fake_dcp.Writer], step: int) -> None:
    fake_dcp.save([{"step": step, "w": torch.ones(1)}] * len(writers), writers, step)
    for writer in writers:
        assert writer.wait(PATIENCE_S)


def steps(settings: TierSettings) -> list[int]:
    return Series(FileStore(Path(settings.destination)), settings.series).steps()


def refusing(error: Exception) -> Callable[..., Any]:
    def refuse(*args: Any, **more: Any) -> Any:
        raise error

    return refuse


def test_no_memory_for_the_next_save_is_not_this_ones_failure(
    settings: TierSettings, writers: list[fake_dcp.Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Staging, "warm", refusing(Full("no room for one more")))
    save(writers, 1)
    assert steps(settings) == [1]
    for writer in writers:
        writer.check()


def test_a_committer_that_fails_tells_the_others_why(
    writers: list[fake_dcp.Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for ten minutes, and hear of the time-out."""
    monkeypatch.setattr(parts, "origin", refusing(OSError("the disk is on fire")))
    save(writers, 1)
    for writer in writers:
        with pytest.raises(SaveFailed, match=r"rank 0.*the disk is on fire"):
            writer.check()


def test_what_cannot_be_removed_is_a_remark_and_the_save_is_done(
    settings: TierSettings, writers: list[fake_dcp.Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    writers[0].own.on_commit = lambda tier, step: done.append(step)
    monkeypatch.setattr(Series, "prune", refusing(OSError("not yours")))
    save(writers, 1)
    assert (steps(settings), done) == ([1], [1])
    writers[0].check()
    with pytest.warns(SaveWarning, match="could not be removed: not yours"):
        save(writers, 2)
    assert writers[0].own.committed == 2
    with pytest.warns(SaveWarning, match="could not be removed: not yours"):
        writers[0].own.close(PATIENCE_S)


def test_what_a_training_that_went_back_saves_stays(
    settings: TierSettings, writers: list[fake_dcp.Writer]
) -> None:
    assert settings.durable_retained == 3
    for step in (100, 110, 120, 50):
        save(writers, step)
    assert steps(settings) == [50, 100, 110, 120]
    save(writers, 60)
    assert steps(settings) == [60, 100, 110, 120]


def test_the_training_waits_for_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in one tier is given up by the training, while the other tier's lane digests."""
    inside, go_on = threading.Event(), threading.Event()
    staging = Staging(Own, again=True)
    layout = snapshot.Layout(())
    staged = staging.take(layout.nbytes)
    save = lanes.Save(
        attempt=new_attempt("run", 1),
        rank=0,
        tiers=(MEMORY, DURABLE),
        staged=staged,
        layout=layout,
        about=snapshot.About(run_id="run", rank=0, world=1, shard="rank 0", step=1),
        commits=False,
    )
    staged.release()
    describe = snapshot.describe

    def slow(*args: Any) -> snapshot.Manifest:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        return describe(*args)

    monkeypatch.setattr(snapshot, "describe", slow)
    digesting = threading.Thread(target=lambda: save.manifest(MEMORY, signed=False))
    digesting.start()
    assert inside.wait(PATIENCE_S)
    training = threading.Thread(target=lambda: save.let_go(DURABLE))
    training.start()
    training.join(PATIENCE_S / 2)
    waited = training.is_alive()
    go_on.set()
    for thread in (training, digesting):
        thread.join(PATIENCE_S)
    save.let_go(MEMORY)
    staging.close()
    assert not waited


@pytest.mark.parametrize("answer", ["raise", "warn"])
def test_what_has_not_ended_with_the_grace_has_failed(
    answer: Any, settings: TierSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = FileStore.put

    def stuck(store: FileStore, key: str, *args: Any, **how: Any) -> None:
        if key.endswith(".safetensors"):
            assert how["stop"].wait(PATIENCE_S)
        put(store, key, *args, **how)

    monkeypatch.setattr(FileStore, "put", stuck)
    chosen = replace(settings, grace_s=0.1, on_save_error=answer)
    writer = TieredWriter(chosen)
    saver = writer.saver
    dcp_save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id="1")
    words = r"the save of step 1 to the durable tier failed: it had not ended after 0 s"
    if answer == "raise":
        with pytest.raises(SaveFailed, match=words):
            writer.close()
    else:
        with pytest.warns(SaveWarning, match=words):
            writer.close()
    assert (saver.counts.failed, saver.committed, steps(settings)) == (1, 0, [])


def test_no_room_for_a_copy_is_a_failed_save_for_all(
    settings: TierSettings, writers: list[fake_dcp.Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not an error on one rank, which would leave the others alone in the next step."""
    monkeypatch.setattr(writers[1].own, "take", refusing(Full("all of it is taken")))
    save(writers, 1)
    assert steps(settings) == []
    for writer in writers:
        with pytest.raises(SaveFailed, match=r"step 1 .*rank 1.*all of it is taken"):
            writer.check()


def test_why_a_save_failed_is_told_also_where_it_is_given_up(
    settings: TierSettings, writers: list[fake_dcp.Writer]
) -> None:
    """One rank waits for the part of another that has failed, when the next save comes."""
    failure = Failure(step=1, tier=DURABLE, attempt="a", rank=1, why="full")
    busy = {DURABLE: Standing(under_way="a")}
    wishes = [
        Wish(rank=0, step=2, standing=busy),
        Wish(rank=1, step=2, standing={}, known=(failure,)),
    ]
    order = decide(wishes, settings, "b")
    assert order.lost == ((DURABLE, "a"),)
    for writer in writers:
        assert writer.own.obey(order) == [failure]
        assert writer.own.obey(order) == []
