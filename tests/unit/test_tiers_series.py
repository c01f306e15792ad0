"""A series of checkpoints: how one comes to be, whoever dies, and what is never believed."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.unit.checkpoints import KEY, DictStore
from tests.unit.faultystores import FaultyStore, Rule

from everstep import snapshot
from everstep.errors import UserError
from everstep.tiers import catalog, names, signing
from everstep.tiers.catalog import Checkpoint, Origin, Piece, Whole
from everstep.tiers.names import Attempt
from everstep.tiers.series import Committed, Failed, SaveFailed, Series, Taken
from everstep.tiers.store import Denied, Exists, Full, Missing, Refused, Stopped, Store, StoreError

LONG_S = 60.0


class Clock:
    """Time that goes on only when somebody waits. `on_pause`: what happens meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_pause: list[Callable[[], object]] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if self.on_pause:
            self.on_pause.pop(0)()


def series(store: Store, clock: Clock | None = None, **options: Any) -> Series:
    clock = clock or Clock()
    return Series(store, "run", clock=clock, pause=clock.pause, **options)


def put_part(to: Series, attempt: Attempt, rank: int, world: int, fill: bytes = b"x") -> None:
    """One float32 tensor `w` of three elements, of rank's rows of the whole."""
    layout = snapshot.Layout(
        [snapshot.Tensor(name="w", dtype="torch.float32", item_bytes=4, shape=(3,))]
    )
    about = snapshot.About(
        run_id="r", rank=rank, world=world, shard=f"rank {rank}", step=attempt.step
    )
    area = memoryview(bytearray(layout.nbytes))
    manifest = snapshot.write(area, layout, about, {"w": fill * 12})
    to.put_part(attempt, rank, area, manifest, deadline_s=LONG_S)


def whole(world: int) -> dict[str, Whole]:
    pieces = tuple(Piece(rank=r, name="w", place=(3 * r,), shape=(3,)) for r in range(world))
    return {"w": Whole(dtype="torch.float32", shape=(3 * world,), pieces=pieces)}


def commit(
    to: Series,
    attempt: Attempt,
    world: int = 2,
    *,
    run_id: str = "",
    deadline_s: float = LONG_S,
    stop: threading.Event | None = None,
) -> Checkpoint:
    return to.commit(
        attempt,
        world=world,
        tensors=whole(world),
        values={"lr": b"1"},
        origin=Origin(run_id=run_id),
        deadline_s=deadline_s,
        stop=stop,
    )


def save(to: Series, step: int, world: int = 2, fill: bytes = b"x") -> Checkpoint:
    attempt = to.begin(step)
    for rank in range(world):
        put_part(to, attempt, rank, world, fill)
    return commit(to, attempt, world)


def attempt_of(checkpoint: Checkpoint) -> Attempt:
    return Attempt(series=checkpoint.series, step=checkpoint.step, name=checkpoint.attempt)


def test_a_checkpoint_exists_when_it_is_committed() -> None:
    store = DictStore()
    to = series(store)
    attempt = to.begin(7)
    for rank in range(2):
        put_part(to, attempt, rank, 2)
        assert to.steps() == []
        with pytest.raises(Missing):
            to.read(7)
    made = commit(to, attempt)
    assert to.steps() == [7]
    assert to.read(7) == made
    assert to.missing(made) == {}
    assert to.outcome(attempt, deadline_s=LONG_S) == Committed(attempt=attempt)
    assert to.part_manifest(made, 1).snapshot.about.rank == 1


def test_the_committer_waits_for_parts_that_are_late() -> None:
    clock = Clock()
    to = series(DictStore(), clock)
    attempt = to.begin(7)
    put_part(to, attempt, 1, 2)
    clock.on_pause = [lambda: None, lambda: put_part(to, attempt, 0, 2)]
    assert commit(to, attempt).step == 7
    assert clock.on_pause == []


def test_ranks_wait_for_the_commit() -> None:
    clock = Clock()
    to = series(DictStore(), clock)
    attempt = to.begin(7)
    for rank in range(2):
        put_part(to, attempt, rank, 2)
    clock.on_pause = [lambda: None, lambda: commit(to, attempt)]
    assert to.outcome(attempt, deadline_s=LONG_S) == Committed(attempt=attempt)


def test_who_was_not_heard_of_is_named() -> None:
    to = series(DictStore())
    attempt = to.begin(7)
    put_part(to, attempt, 1, 4)
    with pytest.raises(SaveFailed, match="nothing was heard of ranks 0, 2, 3 within 5 s") as caught:
        commit(to, attempt, 4, deadline_s=5)
    assert caught.value.rank == 0
    outcome = to.outcome(attempt, deadline_s=LONG_S)
    assert isinstance(outcome, Failed)
    assert "ranks 0, 2, 3" in outcome.why


def test_the_first_cause_ends_it_at_once_and_reaches_all() -> None:
    clock = Clock()
    to = series(DictStore(), clock)
    attempt = to.begin(7)
    put_part(to, attempt, 0, 2)
    to.fail(attempt, 1, "no space left on /data", deadline_s=LONG_S)
    to.fail(attempt, 1, "and then much else", deadline_s=LONG_S)
    with pytest.raises(SaveFailed, match=r"rank 1 could not .* no space left on /data") as caught:
        commit(to, attempt)
    assert caught.value.rank == 1
    outcome = to.outcome(attempt, deadline_s=LONG_S)
    assert isinstance(outcome, Failed)
    assert outcome.rank == 1
    assert "no space left" in outcome.why
    assert clock.now == 0.0
    assert to.steps() == []


def test_without_a_committer_the_deadline_ends_it_with_the_first_cause_there_is() -> None:
    to = series(DictStore())
    attempt = to.begin(7)
    outcome = to.outcome(attempt, deadline_s=5)
    assert isinstance(outcome, Failed)
    assert "rank 0, which commits step 7, did not say" in outcome.why
    assert outcome.rank is None
    to.fail(attempt, 3, "killed", deadline_s=LONG_S)
    outcome = to.outcome(attempt, deadline_s=5)
    assert outcome == Failed(attempt=attempt, why="killed", rank=3)


def test_what_a_stranger_says_moves_no_cursor_and_fills_no_memory() -> None:
    store = DictStore()
    to = series(store)
    attempt = to.begin(7)
    to.fail(attempt, 0, "\x1b[2J" + "x" * 10_000, deadline_s=LONG_S)
    outcome = to.outcome(attempt, deadline_s=5)
    assert isinstance(outcome, Failed)
    assert outcome.why.isprintable()
    assert len(outcome.why) < 3000
    store.objects[attempt.part(0, "failed")] = b"{" * 1000
    assert "can't be read" in getattr(to.outcome(attempt, deadline_s=5), "why", "")
    store.objects[attempt.part(0, "failed")] = b"x" * 100_000
    assert "more than the" in getattr(to.outcome(attempt, deadline_s=5), "why", "")


@pytest.mark.parametrize("wait", ["commit", "outcome"])
def test_a_wait_can_be_stopped(wait: str) -> None:
    to = Series(DictStore(), "run")
    attempt = to.begin(7)
    stop = threading.Event()
    stop.set()
    ask: dict[str, Callable[[], object]] = {
        "commit": lambda: commit(to, attempt, stop=stop),
        "outcome": lambda: to.outcome(attempt, deadline_s=LONG_S, stop=stop),
    }
    with pytest.raises(Stopped):
        ask[wait]()


def test_a_stopped_commit_is_told_to_the_others() -> None:
    store = DictStore()
    to = Series(store, "run")
    attempt = to.begin(7)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        commit(to, attempt, stop=stop)
    outcome = to.outcome(attempt, deadline_s=LONG_S)
    assert isinstance(outcome, Failed)
    assert "told to stop" in outcome.why


def test_of_two_committers_one_wins_and_the_other_is_told() -> None:
    to = series(DictStore())
    first, second = to.begin(7), to.begin(7)
    for attempt, fill in ((first, b"x"), (second, b"y")):
        for rank in range(2):
            put_part(to, attempt, rank, 2, fill)
    won = commit(to, first)
    with pytest.raises(Taken, match=r"saved before.*other bytes in rank 0's part.*nothing is over"):
        commit(to, second)
    assert to.read(7) == won
    assert to.outcome(first, deadline_s=LONG_S) == Committed(attempt=first)
    assert isinstance(to.outcome(second, deadline_s=LONG_S), Failed)


def test_a_server_that_ignores_conditions_does_not_lose_what_is_there() -> None:
    class Careless(DictStore):
        def put(self, *args: Any, absent: bool = False, **options: Any) -> None:
            super().put(*args, **options)

    to = series(Careless())
    first, second = to.begin(7), to.begin(7)
    for attempt, fill in ((first, b"x"), (second, b"y")):
        for rank in range(2):
            put_part(to, attempt, rank, 2, fill)
    made = commit(to, first)
    with pytest.raises(Taken):
        commit(to, second)
    assert to.read(7) == made


def test_the_same_content_again_is_no_failure() -> None:
    to = series(DictStore())
    first = save(to, 7)
    again = to.begin(7)
    for rank in range(2):
        put_part(to, again, rank, 2)
    assert commit(to, again) == first
    assert to.outcome(again, deadline_s=LONG_S) == Committed(attempt=attempt_of(first))


def test_the_same_run_again_is_no_failure() -> None:
    """A section that is done again, with a clock among its values."""
    to = series(DictStore())
    first, again = to.begin(7), to.begin(7)
    for attempt, fill in ((first, b"x"), (again, b"y")):
        for rank in range(2):
            put_part(to, attempt, rank, 2, fill)
    made = commit(to, first, run_id="r1")
    assert commit(to, again, run_id="r1") == made
    with pytest.raises(Taken):
        commit(to, again, run_id="r2")


def test_a_step_whose_checkpoint_is_broken_is_taken_until_it_is_set_aside() -> None:
    store = DictStore()
    to = series(store)
    broken = save(to, 7)
    del store.objects[attempt_of(broken).part(1, "safetensors")]
    again = to.begin(7)
    for rank in range(2):
        put_part(to, again, rank, 2)
    with pytest.raises(Taken, match="not whole: rank 1's part: it is not there"):
        commit(to, again)
    to.set_aside(broken)
    to.set_aside(broken)
    assert to.steps() == []
    better = save(to, 7)
    to.set_aside(broken)
    assert to.read(7) == better
    assert attempt_of(broken).aside in store.objects
    to.prune(keep=1, older_than_s=0, now=1e12)
    assert to.read(7) == better
    assert {names.part_of(key) is None for key in store.objects if "/parts/" in key} == {False}
    assert [key for key in store.objects if "/aside/" in key] == []


@pytest.mark.parametrize("error", [StoreError("the answer was lost"), Exists("a second try")])
@pytest.mark.parametrize("key", ["commits/", r"00001\.json"])
def test_a_put_whose_answer_was_lost_has_been_done(error: StoreError, key: str) -> None:
    faulty = FaultyStore(DictStore())
    to = series(faulty)
    faulty.rules = [Rule("put", key, after=error)]
    made = save(to, 7)
    assert faulty.rules[0].times == 0
    assert to.read(7) == made


@pytest.mark.parametrize("error", [Full("no room"), Denied("not yours"), StoreError("503")])
def test_a_commit_that_fails_is_never_done(error: StoreError) -> None:
    faulty = FaultyStore(DictStore())
    to = series(faulty)
    attempt = to.begin(7)
    for rank in range(2):
        put_part(to, attempt, rank, 2)
    faulty.rules = [Rule("put", "commits/", before=error)]
    with pytest.raises(type(error), match=str(error)):
        commit(to, attempt)
    assert to.steps() == []
    assert to.outcome(attempt, deadline_s=LONG_S) == Failed(attempt=attempt, why=str(error), rank=0)


def test_a_cause_that_can_not_be_told_does_not_hide_the_first() -> None:
    faulty = FaultyStore(DictStore())
    to = series(faulty)
    attempt = to.begin(7)
    faulty.rules = [
        Rule("list", before=StoreError("the first cause")),
        Rule("put", "failed", before=StoreError("and this one too")),
    ]
    with pytest.raises(StoreError, match="the first cause"):
        commit(to, attempt)


def test_a_listing_that_lags_is_waited_for() -> None:
    clock = Clock()
    faulty = FaultyStore(DictStore())
    to = series(faulty, clock)
    attempt = to.begin(7)
    for rank in range(2):
        put_part(to, attempt, rank, 2)
    faulty.rules = [Rule("list", "00001.safetensors", hide=True)]
    clock.on_pause = [lambda: None, faulty.rules.clear]
    assert to.missing(commit(to, attempt)) == {}


def test_a_part_that_a_listing_lacks_is_asked_for_by_name() -> None:
    faulty = FaultyStore(DictStore())
    to = series(faulty)
    made = save(to, 7)
    faulty.rules = [Rule("list", "0000", hide=True)]
    assert to.missing(made) == {}


def test_a_zombie_changes_nothing() -> None:
    store = DictStore()
    to = series(store)
    zombie = to.begin(7)
    put_part(to, zombie, 0, 2)
    made = save(to, 7)
    before = dict(store.objects)
    with pytest.raises(Exists):
        put_part(to, attempt_of(made), 1, 2, b"z")
    store.objects[attempt_of(made).part(1, "safetensors")] = before[
        attempt_of(made).part(1, "safetensors")
    ]
    put_part(to, zombie, 1, 2)
    with pytest.raises(Taken):
        to.commit(zombie, world=2, tensors=whole(2), values={}, origin=Origin(), deadline_s=LONG_S)
    assert to.read(7) == made
    assert to.missing(made) == {}
    assert {key: store.objects[key] for key in before} == before


def test_a_torn_part_is_not_committed() -> None:
    store = DictStore()
    to = series(store)
    attempt = to.begin(7)
    for rank in range(2):
        put_part(to, attempt, rank, 2)
    key = attempt.part(1, "safetensors")
    store.objects[key] = store.objects[key][:-1]
    with pytest.raises(Refused, match=r"00001.json: the part has \d+ bytes, its manifest \d+"):
        commit(to, attempt)
    assert to.steps() == []


def test_what_is_lost_after_the_commit_is_named() -> None:
    store = DictStore()
    to = series(store)
    made = save(to, 7, world=4)
    parts = [attempt_of(made).part(rank, "safetensors") for rank in range(4)]
    del store.objects[parts[0]]
    store.objects[parts[1]] += b"!"
    del store.objects[attempt_of(made).part(2, "json")]
    wrong = to.missing(made)
    assert sorted(wrong) == [0, 1, 2]
    assert wrong[0] == "it is not there"
    assert "should have" in wrong[1]
    assert wrong[2] == "its manifest is not there"


def test_parts_must_be_of_the_step_and_rank_they_are_put_as() -> None:
    to = series(DictStore())
    attempt = to.begin(7)
    put_part(to, attempt, 0, 2)
    manifest = to.begin(8)
    layout = snapshot.Layout([])
    about = snapshot.About(run_id="r", rank=1, world=2, shard="s", step=8)
    area = memoryview(bytearray(layout.nbytes))
    described = snapshot.write(area, layout, about, {})
    with pytest.raises(ValueError, match="rank 1 at step 8"):
        to.put_part(attempt, 1, area, described, deadline_s=LONG_S)
    with pytest.raises(ValueError, match="rank 1 at step 8"):
        to.put_part(manifest, 0, area, described, deadline_s=LONG_S)


def test_pieces_must_be_in_the_parts() -> None:
    to = series(DictStore())
    for name, dtype, message in (
        ("other", "torch.float32", "no tensor 'other'"),
        ("w", "torch.int32", r"a piece of torch.int32 \(3,\) is torch.float32"),
    ):
        attempt = to.begin(7)
        for rank in range(2):
            put_part(to, attempt, rank, 2)
        pieces = tuple(Piece(rank=r, name=name, place=(3 * r,), shape=(3,)) for r in range(2))
        tensors = {"w": Whole(dtype=dtype, shape=(6,), pieces=pieces)}
        with pytest.raises(Refused, match=message):
            to.commit(
                attempt, world=2, tensors=tensors, values={}, origin=Origin(), deadline_s=LONG_S
            )
    assert to.steps() == []


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a" * 65, "a\n", "ä"])
def test_a_name_that_is_a_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="can't name a series"):
        Series(DictStore(), name)


def with_commit(
    store: DictStore, change: Callable[[dict[str, Any]], object], step: int = 7
) -> None:
    """Change the manifest in a commit."""
    key = names.commit_key("run", step)
    envelope = msgspec.json.decode(store.objects[key])
    change(envelope["manifest"])
    store.objects[key] = msgspec.json.encode(envelope)


def name_part(sha256: str, manifest: dict[str, Any]) -> None:
    manifest["parts"][1]["manifest_sha256"] = sha256


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown field": (lambda m: m.update(evil=1), "unknown field"),
    "format": (lambda m: m.update(format=2), "format"),
    "attempt as a path": (lambda m: m.update(attempt="../../../../etc"), "attempt"),
    "attempt with more": (lambda m: m.update(attempt=m["attempt"] + "\n"), "attempt"),
    "another series": (lambda m: m.update(series="other"), "of 'other'"),
    "another step": (lambda m: m.update(step=8), "step 8"),
    "negative step": (lambda m: m.update(step=-1), "step"),
    "rank twice": (lambda m: m["parts"][1].update(rank=0), "ranks 0 to 1"),
    "rank left out": (lambda m: m["parts"].pop(0), "ranks 0 to 0"),
    "rank absurd": (lambda m: m["parts"][0].update(rank=10**9), "rank"),
    "length absurd": (lambda m: m["parts"][0].update(nbytes=1 << 62), "nbytes"),
    "digest as a path": (lambda m: m["parts"][0].update(manifest_sha256="../x"), "sha256"),
    "overlap": (lambda m: m["tensors"]["w"]["pieces"][1].update(place=[2]), "overlap"),
    "outside": (lambda m: m["tensors"]["w"]["pieces"][1].update(place=[4]), "reaches out"),
    "hole": (lambda m: m["tensors"]["w"].update(shape=[9]), "elements"),
    "dimensions": (lambda m: m["tensors"]["w"].update(shape=[6, 1]), "is in no"),
    "piece elsewhere": (lambda m: m["tensors"]["w"]["pieces"][1].update(rank=5), "rank 5"),
    "both": (lambda m: m["values"].update(w="YQ=="), "a tensor and a value"),
    "shape absurd": (lambda m: m["tensors"]["w"].update(shape=[1 << 46]), "elements"),
    "shape too deep": (lambda m: m["tensors"]["w"].update(shape=[1] * 65), "length"),
    "a pickle": (lambda m: m["values"].update(evil={"__reduce__": ["os.system"]}), "values"),
}


@pytest.mark.parametrize("name", sorted(SPOILT))
def test_a_spoilt_manifest_is_refused_in_words(name: str) -> None:
    store = DictStore()
    to = series(store)
    save(to, 7)
    change, words = SPOILT[name]
    with_commit(store, change)
    with pytest.raises(Refused, match=words) as caught:
        to.read(7)
    assert "dict/run/commits/0000000007.json" in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"", b"[" * 100_000, b"\x80\x04\x95", b"null", b"{}", b'"\\ud800"']
)
def test_what_is_no_envelope_is_refused(text: bytes) -> None:
    store = DictStore()
    store.objects[names.commit_key("run", 7)] = text
    with pytest.raises(Refused):
        series(store).read(7)


def test_what_is_too_long_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictStore()
    to = series(store)
    made = save(to, 7)
    store.asked.clear()
    monkeypatch.setattr(signing, "MAX_ENVELOPE_BYTES", 100)
    monkeypatch.setattr(catalog, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(Refused, match="more than the 100 allowed"):
        to.read(7)
    with pytest.raises(Refused, match="more than the 100 allowed"):
        to.part_manifest(made, 0)
    assert store.asked == []
    with pytest.raises(Refused, match="exceeds 100"):
        save(to, 8)


def test_a_part_manifest_is_the_one_that_was_committed() -> None:
    store = DictStore()
    to = series(store)
    made = save(to, 7)
    key = attempt_of(made).part(1, "json")
    store.objects[key] = store.objects[attempt_of(made).part(0, "json")]
    with pytest.raises(Refused, match="not the manifest that the checkpoint was made with"):
        to.part_manifest(made, 1)


def test_a_forged_part_manifest_can_not_contradict_itself() -> None:
    """A forger who may write the commit, too, where nothing is signed."""
    store = DictStore()
    to = series(store)
    made = save(to, 7)
    key = attempt_of(made).part(1, "json")
    manifest = msgspec.json.decode(store.objects[key])
    for change, words in (
        ({"nbytes": 1 << 40}, "gives its file"),
        ({"blocks": []}, "0 digests"),
        ({"about": {**manifest["snapshot"]["about"], "rank": 0}}, "of rank 0"),
        ({"about": {**manifest["snapshot"]["about"], "step": 9}}, "at step 9"),
    ):
        forged = {**manifest, "snapshot": {**manifest["snapshot"], **change}}
        store.objects[key] = msgspec.json.encode(forged)
        sha256 = hashlib.sha256(store.objects[key]).hexdigest()
        with_commit(store, partial(name_part, sha256))
        with pytest.raises(Refused, match=words):
            to.part_manifest(to.read(7), 1)


def test_blocks_are_checked_by_both_digests() -> None:
    to = series(DictStore(), key=KEY)
    made = save(to, 7)
    manifest = to.part_manifest(made, 0)
    data = bytearray(to.store.get(attempt_of(made).part(0, "safetensors"), deadline_s=LONG_S))
    catalog.check_block(manifest, 0, memoryview(data), signed=True)
    data[-1] ^= 1
    with pytest.raises(Refused, match="XXH3"):
        catalog.check_block(manifest, 0, memoryview(data), signed=False)
    forged = msgspec.structs.replace(
        manifest,
        snapshot=msgspec.structs.replace(
            manifest.snapshot, blocks=(snapshot.digest(memoryview(data)),)
        ),
    )
    catalog.check_block(forged, 0, memoryview(data), signed=False)
    with pytest.raises(Refused, match="SHA-256"):
        catalog.check_block(forged, 0, memoryview(data), signed=True)
    with pytest.raises(Refused, match="anybody can forge"):
        catalog.check_block(
            msgspec.structs.replace(forged, block_sha256=()), 0, memoryview(data), signed=True
        )


def test_signatures() -> None:
    store = DictStore()
    signed = series(store, key=KEY)
    made = save(signed, 7)
    assert signed.examine(7) == (made, "valid")
    assert series(store).examine(7) == (made, "unchecked")
    assert series(store, key=KEY, require_signature=True).read(7) == made
    with pytest.raises(Refused, match="another key, or it was changed"):
        series(store, key=bytes(32)).read(7)
    with_commit(store, lambda m: m["values"].update(lr="Mg=="))
    with pytest.raises(Refused, match="another key, or it was changed"):
        signed.read(7)
    assert series(store).read(7).values == {"lr": b"2"}


def test_what_is_not_signed_is_refused_where_it_must_be() -> None:
    store = DictStore()
    save(series(store), 7)
    must = series(store, key=KEY, require_signature=True)
    with pytest.raises(Refused, match="not signed"):
        must.read(7)
    assert series(store, key=KEY).examine(7)[1] == "absent"
    with pytest.raises(UserError, match="no key"):
        series(store, require_signature=True)


def test_a_signed_commit_can_not_stand_for_another_step() -> None:
    store = DictStore()
    to = series(store, key=KEY)
    save(to, 7)
    store.objects[names.commit_key("run", 9)] = store.objects[names.commit_key("run", 7)]
    with pytest.raises(Refused, match="manifest of step 7"):
        to.read(9)


def test_a_signature_speaks_for_parts_only_by_sha256() -> None:
    store = DictStore()
    to = series(store)
    attempt = to.begin(7)
    for rank in range(2):
        put_part(to, attempt, rank, 2)
    made = commit(series(store, key=KEY), attempt)
    with pytest.raises(Refused, match="no SHA-256"):
        series(store, key=KEY, require_signature=True).part_manifest(made, 0)
    series(store, key=KEY).part_manifest(made, 0)


def prune(to: Series, keep: int, older_than_s: float = 0.0, now: float = 1e12) -> Any:
    return to.prune(keep=keep, older_than_s=older_than_s, now=now)


def test_the_newest_stay() -> None:
    store = DictStore()
    to = series(store)
    made = [save(to, step) for step in (1, 2, 3, 4)]
    pruned = prune(to, 2)
    assert pruned.steps == (1, 2)
    assert pruned.leftovers == ()
    assert pruned.nbytes > 0
    assert to.steps() == [3, 4]
    assert to.missing(made[2]) == to.missing(made[3]) == {}
    assert len(store.objects) == 2 * 5
    assert prune(to, 2).steps == ()
    assert prune(to, 0).steps == ()
    assert to.steps() == [3, 4]


def test_the_newest_whole_one_stays_whatever_is_above_it() -> None:
    store = DictStore()
    to = series(store)
    made = [save(to, step) for step in (1, 2, 3)]
    del store.objects[attempt_of(made[2]).part(0, "safetensors")]
    with_commit(store, lambda m: m.update(evil=1), step=3)
    broken = save(to, 4)
    del store.objects[attempt_of(broken).part(0, "safetensors")]
    assert prune(to, 1).steps == (1,)
    assert to.steps() == [2, 3, 4]
    assert to.missing(made[1]) == {}


def test_of_none_that_is_whole_nothing_goes() -> None:
    store = DictStore()
    to = series(store)
    for step in (1, 2):
        del store.objects[attempt_of(save(to, step)).part(0, "safetensors")]
    before = dict(store.objects)
    prune(to, 1)
    assert store.objects == before


def test_leftovers_go_by_age() -> None:
    store = DictStore()  # everything was put at 0
    to = series(store)
    save(to, 5)
    left = to.begin(9)
    put_part(to, left, 0, 2)
    assert prune(to, 1, older_than_s=100, now=99).leftovers == ()
    assert prune(to, 1, older_than_s=100, now=101).leftovers == (left,)
    assert to.steps() == [5]
    assert len(store.objects) == 5


def test_leftovers_that_were_overtaken_go_at_once() -> None:
    store = DictStore()
    to = series(store)
    old, same, new = to.begin(4), to.begin(5), to.begin(6)
    for attempt in (old, same, new):
        put_part(to, attempt, 0, 2)
        to.fail(attempt, 1, "killed", deadline_s=LONG_S)
    save(to, 5)
    assert prune(to, 1, older_than_s=100, now=50).leftovers == (old,)
    assert prune(to, 2, older_than_s=100, now=150).leftovers == (same, new)


def test_a_commit_that_the_listing_lacks_keeps_its_parts() -> None:
    faulty = FaultyStore(DictStore())
    to = series(faulty)
    made = [save(to, step) for step in (1, 2)]
    faulty.rules = [Rule("list", "commits/0000000002", hide=True)]
    assert prune(to, 1).leftovers == ()
    faulty.rules = [Rule("list", "commits/", hide=True)]
    assert prune(to, 1).leftovers == ()
    faulty.rules = []
    assert [to.missing(each) for each in made] == [{}, {}]


def test_what_is_not_ours_is_not_touched() -> None:
    store = DictStore()
    to = series(store)
    save(to, 1)
    save(to, 2)
    other = Series(store, "run2")
    store.objects["run/notes.txt"] = b"mine"
    store.objects["run/parts/readme"] = b"mine"
    store.objects[other.begin(1).part(0, "safetensors")] = b"theirs"
    prune(to, 1)
    assert {b"mine", b"theirs"} <= set(store.objects.values())
    assert to.steps() == [2]
