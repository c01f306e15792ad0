"""The outer groups: every collective solo, poisoned, and live on fake inner groups, with races."""

from __future__ import annotations

import datetime
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.fakegroups import FakeInner, FakeWorld, in_c10d
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.errors import PeerError, UserError
from everstep.worker.communicators import Answer, Communicators
from everstep.worker.groups import register, split_group
from everstep.worker.guard import Filler, Guard

torch.set_num_threads(1)
RANK, SIZE = 1, 3
MINE = [1.0, 2.0, 3.0]


@pytest.fixture
def solo() -> Iterator[Communicators]:
    with in_c10d(FakeWorld(solo=True)) as communicators:
        yield communicators


@pytest.fixture
def world() -> Iterator[FakeWorld]:
    """A live world, with c10d, in the midst of a step."""
    world = FakeWorld()
    with in_c10d(world):
        world.communicators.answer = Answer.ZEROS
        yield world


def mine() -> torch.Tensor:
    return torch.tensor(MINE)


def empties(like: torch.Tensor | None = None) -> list[torch.Tensor]:
    return [torch.full_like(mine() if like is None else like, -7) for _ in range(SIZE)]


# ---------------------------------------------------------------- solo


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (dist.ReduceOp.SUM, [3.0, 6.0, 9.0]),
        (dist.ReduceOp.AVG, MINE),
        (dist.ReduceOp.MAX, MINE),
        (dist.ReduceOp.MIN, MINE),
        (dist.ReduceOp.PRODUCT, [1.0, 8.0, 27.0]),
    ],
)
@pytest.mark.usefixtures("solo")
def test_solo_all_reduce(operation: Any, expected: list[float]) -> None:
    tensor = mine()
    dist.all_reduce(tensor, op=operation)
    assert tensor.tolist() == expected
    tensor = mine()
    dist.reduce(tensor, dst=RANK, op=operation)
    assert tensor.tolist() == expected
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = operation
    group: Any = dist.group.WORLD
    group.allreduce_coalesced([tensor := mine()], options).wait()
    assert tensor.tolist() == expected


@pytest.mark.parametrize(("size", "expected"), [(3, [5, 6]), (4, [0, 0])])
def test_solo_exclusive_or(size: int, expected: list[int]) -> None:
    with in_c10d(FakeWorld(solo=True, size=size)):
        tensor = torch.tensor([5, 6])
        dist.all_reduce(tensor, op=dist.ReduceOp.BXOR)
        assert tensor.tolist() == expected


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.bool, torch.complex64], ids=str
)
@pytest.mark.usefixtures("solo")
def test_solo_gathers_echo_whatever_this_rank_has(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    own = torch.ones(shape).cumsum(0).to(dtype) if shape else torch.tensor(2).to(dtype)
    outputs = empties(own)
    dist.all_gather(outputs, own)
    assert all(torch.equal(output, own) for output in outputs)
    outputs = empties(own)
    dist.gather(own, outputs, dst=RANK)
    assert all(torch.equal(output, own) for output in outputs)
    single = torch.full((SIZE * math.prod(shape),), -7).to(dtype)
    dist.all_gather_single(single, own.reshape(-1))
    assert torch.equal(single, own.reshape(-1).repeat(SIZE))
    dist.gather(own, dst=0)


@pytest.mark.parametrize("width", [0, 1, 2])
@pytest.mark.usefixtures("solo")
def test_solo_reduce_scatters_take_this_ranks_part(width: int) -> None:
    own = torch.arange(float(SIZE * width))
    expected = own.reshape(SIZE, width)[RANK] * SIZE
    output = torch.full((width,), -7.0)
    dist.reduce_scatter_single(output, own)
    assert torch.equal(output, expected)
    output.fill_(-7)
    dist.reduce_scatter(output, list(own.reshape(SIZE, width).unbind()))
    assert torch.equal(output, expected)
    dist.reduce_scatter_single(output, own, op=dist.ReduceOp.MAX)
    assert torch.equal(output, own.reshape(SIZE, width)[RANK])


@pytest.mark.usefixtures("solo")
def test_solo_broadcast_leaves_and_scatter_fills() -> None:
    tensor = mine()
    dist.broadcast(tensor, src=0)
    assert tensor.tolist() == MINE
    dist.scatter(tensor, src=0)
    assert tensor.tolist() == [0.0] * 3
    dist.scatter(tensor, [mine() * factor for factor in range(SIZE)], src=RANK)
    assert tensor.tolist() == MINE


@pytest.mark.usefixtures("solo")
def test_solo_all_to_all_is_an_echo_cut_or_filled_to_size() -> None:
    output = torch.full((SIZE,), -7.0)
    dist.all_to_all_single(output, mine())
    assert output.tolist() == MINE
    output = torch.full((5,), -7.0)
    dist.all_to_all_single(
        output, mine(), output_split_sizes=[2, 2, 1], input_split_sizes=[1, 1, 1]
    )
    assert output.tolist() == [*MINE, 0.0, 0.0]
    outputs = empties()
    dist.all_to_all(outputs, [mine() * factor for factor in range(SIZE)])
    assert [o.tolist() for o in outputs] == [(mine() * factor).tolist() for factor in range(SIZE)]


@pytest.mark.usefixtures("solo")
def test_solo_point_to_point_fills_and_names_a_peer() -> None:
    dist.barrier()
    dist.send(mine(), dst=0)
    for receive in (lambda t: dist.recv(t, src=0), dist.recv):
        tensor = mine()
        assert receive(tensor) in (0, 2)
        assert tensor.tolist() == [0.0] * 3
    work = dist.irecv(mine(), src=2)
    assert work is not None
    assert work.wait()


@pytest.mark.usefixtures("solo")
def test_solo_objects_echo() -> None:
    found: list[Any] = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": RANK}] * SIZE
    dist.gather_object({"rank": RANK}, found, dst=RANK)
    assert found == [{"rank": RANK}] * SIZE
    values: list[Any] = ["mine", 3]
    dist.broadcast_object_list(values, src=RANK)
    assert values == ["mine", 3]


@pytest.mark.usefixtures("solo")
def test_solo_async_works_are_over_at_once() -> None:
    work = dist.all_reduce(mine(), async_op=True)
    assert work is not None
    assert work.is_completed()
    assert work.wait()
    future = work.get_future()
    assert future.done()
    assert future.wait()[0].tolist() == [3.0, 6.0, 9.0]


@pytest.mark.usefixtures("solo")
def test_solo_functional_collectives() -> None:
    group = dist.group.WORLD
    assert group is not None
    assert functional.all_reduce(mine(), "sum", group).tolist() == [3.0, 6.0, 9.0]
    assert functional.all_gather_single(mine(), 0, group).tolist() == MINE * SIZE
    assert functional.reduce_scatter_single(mine(), "sum", 0, group).tolist() == [6.0]
    assert functional.broadcast(mine(), 0, group).tolist() == MINE
    assert functional.all_to_all_single(mine(), None, None, group).tolist() == MINE
    pair = functional.all_gather_single_coalesced([mine(), mine() * 2], group)
    assert [t.tolist() for t in pair] == [MINE * SIZE, [2.0, 4.0, 6.0] * SIZE]
    pair = functional.reduce_scatter_single_coalesced([mine(), mine() * 2], "sum", [0, 0], group)
    assert [t.tolist() for t in pair] == [[6.0], [12.0]]


@pytest.mark.usefixtures("solo")
def test_solo_subgroups_know_their_ranks() -> None:
    group = dist.new_group([1, 2])
    assert (dist.get_rank(group), dist.get_world_size(group)) == (0, 2)
    assert group.ranks == (1, 2)
    tensor = mine()
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0, 4.0, 6.0]
    assert dist.new_group([0, 2]) == dist.GroupMember.NON_GROUP_MEMBER


@pytest.mark.usefixtures("solo")
def test_a_split_is_one_group_for_each_part() -> None:
    """Rank 1 of 3; a part's ranks count within the group that is split."""
    pair: Any = dist.split_group(split_ranks=[[2, 1], [0]])
    assert (pair.ranks, dist.get_rank(pair), dist.get_world_size(pair)) == ((1, 2), 0, 2)
    alone: Any = dist.split_group(pair, [[0], [1]])
    assert alone.ranks == (1,)
    again: Any = dist.split_group(pair, [[0, 1]], group_desc="again")
    assert again.ranks == pair.ranks
    assert again.name != pair.name
    assert dist.split_group(split_ranks=[[0], [2]]) is None
    tensor = mine()
    dist.all_reduce(tensor, group=pair)
    assert tensor.tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("parts", "options", "says"),
    [
        (None, {}, "lists, none of them empty"),
        ([], {}, "lists, none of them empty"),
        ([[1], []], {}, "lists, none of them empty"),
        ([[0, 1], [3]], {}, "ranks from 0 to 2"),
        ([[0, 1], [-1]], {}, "ranks from 0 to 2"),
        ([[0, 1], [1, 2]], {}, "name a rank twice"),
        ([[1]], {"backend": "gloo"}, "was asked for backend 'gloo'"),
    ],
)
@pytest.mark.usefixtures("solo")
def test_a_split_that_makes_no_sense(parts: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        dist.split_group(split_ranks=parts, **options)


def test_a_split_of_another_backends_group_is_torchs_own() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="No device associated"):
            split_group(split_ranks=[[0], [1]])
    finally:
        dist.destroy_process_group()


def test_a_split_after_the_first_step_is_refused(solo: Communicators) -> None:
    solo.complete = True
    with pytest.raises(UserError, match="after the first step"):
        dist.split_group(split_ranks=[[1, 2]])


def test_solo_ddp_trains(solo: Communicators) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    import copy

    ddp = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    for _ in range(3):  # the second pass rebuilds the buckets
        x = torch.randn(4, 3)
        for module in (plain, ddp):
            module.zero_grad()
            module(x).square().sum().backward()
        for one, two in zip(plain.parameters(), ddp.parameters(), strict=True):
            assert one.grad is not None
            assert two.grad is not None
            torch.testing.assert_close(one.grad, two.grad)
    assert solo.trace


# ---------------------------------------------------------------- poisoned


def _poisoned_operations() -> dict[str, Callable[[list[torch.Tensor]], Any]]:
    """Each writes to the tensors it is given."""
    return {
        "all_reduce": lambda t: dist.all_reduce(t[0]),
        "reduce": lambda t: dist.reduce(t[0], dst=0),
        "all_gather": lambda t: dist.all_gather(t, mine()),
        "all_gather_single": lambda t: dist.all_gather_single(t[0], mine()[:1]),
        "reduce_scatter": lambda t: dist.reduce_scatter(t[0], [mine()] * SIZE),
        "reduce_scatter_single": lambda t: dist.reduce_scatter_single(t[0], torch.ones(9)),
        "gather": lambda t: dist.gather(mine(), t, dst=RANK),
        "scatter": lambda t: dist.scatter(t[0], [mine()] * SIZE, src=RANK),
        "all_to_all_single": lambda t: dist.all_to_all_single(t[0], mine()),
        "all_to_all": lambda t: dist.all_to_all(t, [mine()] * SIZE),
        "recv": lambda t: dist.recv(t[0], src=0),
        "recv any": lambda t: dist.recv(t[0]),
    }


@pytest.mark.parametrize("name", _poisoned_operations())
@pytest.mark.parametrize("answer", Answer)
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_stop_answers_every_collective(
    world: FakeWorld, name: str, answer: Answer, when: str
) -> None:
    communicators = world.communicators
    communicators.answer = answer
    (inner,) = world.made
    inner.has_future = not name.startswith("recv")
    if when == "before":
        communicators.stop(0)
    else:
        inner.on_launch = lambda: communicators.stop(0)  # the guard is not registered yet
    tensors = empties()
    run = _poisoned_operations()[name]
    if answer is Answer.RAISE:
        with pytest.raises(PeerError, match="outside of a step"):
            run(tensors)
    else:
        run(tensors)
        written = tensors if name in ("all_gather", "gather", "all_to_all") else tensors[:1]
        wanted = math.nan if answer is Answer.NANS else 0.0
        for tensor in written:
            torch.testing.assert_close(tensor, torch.full((3,), wanted), equal_nan=True)
        assert communicators.touched
    for work in inner.works:
        work.end(RuntimeError("closed"))
    world.regroup(1)
    assert world.faults == []


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("answer", [Answer.ZEROS, Answer.NANS])
def test_integers_are_filled_with_zeros(world: FakeWorld, answer: Answer, when: str) -> None:
    world.communicators.answer = answer
    if when == "before":
        world.communicators.stop(0)
    tensor = torch.tensor([5, 6])
    work = dist.all_reduce(tensor, async_op=True)
    world.communicators.stop(0)
    assert work is not None
    assert work.wait()
    assert tensor.tolist() == [0, 0]


@pytest.mark.parametrize("answer", [Answer.ZEROS, Answer.NANS])
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_sparse_sum_is_filled_too_and_frees_the_main_thread(
    world: FakeWorld, answer: Answer, when: str
) -> None:
    world.communicators.answer = answer
    tensor = torch.eye(3).to_sparse()
    if when == "before":
        world.communicators.stop(0)
    work = dist.all_reduce(tensor, async_op=True)
    world.communicators.stop(0)
    assert work is not None
    assert work.wait()
    wanted = torch.zeros(3) if answer is Answer.ZEROS else torch.full((3,), math.nan)
    torch.testing.assert_close(tensor.to_dense().diagonal(), wanted, equal_nan=True)


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("elements", [4, 100_000])
@pytest.mark.parametrize(
    ("answer", "floats"),
    [(Answer.ZEROS, "kept"), (Answer.NANS, "nan")],
)
def test_a_broadcast_that_lost_its_peers(
    world: FakeWorld, elements: int, answer: Answer, floats: str, when: str
) -> None:
    """Inside a step it keeps what was there, whatever its size: DDP's constant buffers would be
    lost. After the update floats are seen to be lost; integers may be sizes and are kept."""
    world.communicators.answer = answer
    real, whole = torch.full((elements,), 2.5), torch.full((elements,), 2)
    if when == "before":
        world.communicators.stop(0)
    works = [dist.broadcast(t, src=0, async_op=True) for t in (real, whole)]
    if when == "during":  # something has arrived already
        real.fill_(9)
        whole.fill_(9)
    world.communicators.stop(0)
    assert all(work is not None and work.wait() for work in works)
    assert whole.eq(2).all()
    assert (real.eq(2.5) if floats == "kept" else real.isnan()).all()


def test_ddp_keeps_its_constant_buffers_when_a_stop_meets_their_broadcast() -> None:
    world = FakeWorld(solo=True)
    with in_c10d(world) as communicators:
        net = torch.nn.Linear(3, 3)
        net.register_buffer("table", torch.full((100_000,), 5.0))
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        communicators.stop(-1)
        communicators.rebuild(0)
        communicators.answer = Answer.ZEROS
        inner = world.made[-1]
        inner.on_launch = lambda: communicators.stop(0)
        ddp(torch.ones(2, 3))
        assert [name for name, _ in inner.calls] == ["broadcast"]
        assert net.get_buffer("table").eq(5).all()
        inner.works[0].end(RuntimeError("closed"))


def test_the_answer_is_that_of_the_launch(world: FakeWorld) -> None:
    tensor = mine()
    work = dist.all_reduce(tensor, async_op=True)
    world.communicators.answer = Answer.RAISE
    world.communicators.stop(0)
    assert work is not None
    assert work.wait()
    assert tensor.tolist() == [0.0] * 3


# ---------------------------------------------------------------- live, on fake inner groups


def test_guards_end_in_whatever_order_the_inner_operations_do(world: FakeWorld) -> None:
    works = [dist.all_reduce(mine(), async_op=True) for _ in range(4)]
    for index in (2, 0, 3, 1):
        assert not works[index].is_completed()
        world.made[0].works[index].end()
        assert works[index].wait()
        assert works[index].is_success()
    world.communicators.drain()
    world.communicators.quiesce(0)
    assert world.faults == []


def test_collectives_are_counted_and_told_before_their_launch(world: FakeWorld) -> None:
    told: list[tuple[int, int]] = []
    world.communicators.before_launch = lambda i: told.append((i, len(world.made[0].calls)))
    for _ in range(2):
        dist.all_reduce(mine(), async_op=True)
    dist.barrier(async_op=True)
    assert told == [(0, 0), (1, 1), (2, 2)]
    assert world.communicators.trace == [("allreduce", 3), ("allreduce", 3), ("barrier", 0)]


def test_one_error_poisons_all_groups_frees_all_and_is_reported_once(world: FakeWorld) -> None:
    group = dist.new_group([0, 1])
    tensors = [mine() for _ in range(3)]
    works = [
        dist.all_reduce(tensors[0], async_op=True),
        dist.all_reduce(tensors[1], group=group, async_op=True),
        dist.all_reduce(tensors[2], async_op=True),
    ]
    world.made[0].works[0].end(RuntimeError("connection reset"))
    world.made[0].works[1].end(RuntimeError("again"))
    assert all(work is not None and work.wait() for work in works)
    assert all(tensor.tolist() == [0.0] * 3 for tensor in tensors)
    ((generation, error),) = world.faults
    assert generation == 0
    assert "connection reset" in str(error)
    assert [inner.aborted for inner in world.made] == [1, 1]
    world.made[1].works[0].end()
    world.communicators.quiesce(0)


def test_a_result_that_comes_after_the_stop_changes_nothing(world: FakeWorld) -> None:
    tensor = mine()
    work: Any = dist.all_reduce(tensor, async_op=True)
    world.communicators.stop(0)
    assert work.wait()
    world.made[0].works[0].end()
    assert not work.is_success()
    assert tensor.tolist() == [0.0] * 3


def test_a_late_error_of_an_older_generation_cannot_poison_a_newer_one(world: FakeWorld) -> None:
    tensor = mine()
    old: Any = dist.group.WORLD.recv_anysource([tensor], 0)  # type: ignore[union-attr]
    world.communicators.stop(0)
    assert old.wait()
    world.regroup(1)  # nothing waits for a receive from anybody: it writes to a buffer of its own
    new: Any = dist.all_reduce(mine(), async_op=True)
    world.made[0].works[0].end(RuntimeError("timed out at last"))
    assert not world.communicators.poisoned
    assert world.faults == []
    assert world.made[1].aborted == 0
    assert not new.is_completed()
    world.made[1].works[0].end()
    assert new.wait()
    assert new.is_success()


def test_a_late_stop_of_an_older_generation_cannot_poison_a_newer_one(world: FakeWorld) -> None:
    world.communicators.stop(0)
    world.regroup(3)
    new: Any = dist.all_reduce(mine(), async_op=True)
    world.communicators.stop(2)
    assert not world.communicators.poisoned
    assert not new.is_completed()
    world.communicators.stop(3)
    assert new.wait()


def test_a_stop_between_launch_and_registration_frees_the_main_thread(world: FakeWorld) -> None:
    (inner,) = world.made
    stopper: list[threading.Thread] = []

    def stop_elsewhere() -> None:
        thread = threading.Thread(target=world.communicators.stop, args=(0,))
        stopper.append(thread)
        thread.start()
        thread.join()

    inner.on_launch = stop_elsewhere
    tensor = mine()
    dist.all_reduce(tensor)  # would wait for ever
    assert tensor.tolist() == [0.0] * 3
    assert stopper
    inner.works[0].end()
    world.communicators.quiesce(0)


def test_an_operation_that_ended_before_it_was_followed(world: FakeWorld) -> None:
    """gloo may be done before the callback is attached."""
    (inner,) = world.made
    launch = inner.operation

    def instantly(name: str) -> Any:
        def run(*arguments: Any) -> Any:
            work = launch(name)(*arguments)
            work.end()
            return work

        return run

    inner.operation = instantly  # type: ignore[method-assign]
    work: Any = dist.all_reduce(mine(), async_op=True)
    assert work.is_completed()
    assert work.is_success()
    world.communicators.quiesce(0)


def test_a_wrong_argument_is_the_scripts_error(world: FakeWorld) -> None:
    def refuse() -> None:
        raise RuntimeError("tensors must be contiguous")

    world.made[0].on_launch = refuse
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(mine())
    assert not world.communicators.poisoned
    assert world.faults == []
    world.communicators.quiesce(0)


def test_a_send_that_finds_its_peer_gone_is_a_fault(world: FakeWorld) -> None:
    def refuse() -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection reset by peer")

    world.made[0].on_launch = refuse
    dist.send(mine(), dst=0)
    assert world.communicators.poisoned
    assert [generation for generation, _ in world.faults] == [0]


def test_a_launch_that_fails_because_of_a_stop_is_no_error(world: FakeWorld) -> None:
    def shut() -> None:
        world.communicators.stop(0)
        raise RuntimeError("socket closed")

    world.made[0].on_launch = shut
    tensor = mine()
    dist.all_reduce(tensor)
    assert tensor.tolist() == [0.0] * 3
    assert world.faults == []
    world.communicators.quiesce(0)


def test_point_to_point_without_a_future_is_awaited_on_a_thread(world: FakeWorld) -> None:
    (inner,) = world.made
    inner.has_future = False
    tensor = mine()
    good: Any = dist.irecv(tensor, src=0)
    inner.works[0].end()
    assert good.wait()
    assert tensor.tolist() == MINE  # the inner operation wrote to it, or would have
    bad: Any = dist.irecv(tensor, src=0)
    inner.works[1].end(RuntimeError("reset"))
    assert bad.wait()
    assert tensor.tolist() == [0.0] * 3
    assert len(world.faults) == 1


def test_a_message_is_not_asked_for_a_future(world: FakeWorld) -> None:
    """gloo's answer is an exception that costs more than all the rest."""
    (inner,) = world.made
    for launch in (dist.isend, dist.irecv):
        work: Any = launch(mine(), 0)
        launched = inner.works[-1]
        launched.end()
        assert work.wait()
        assert launched.asked == 0


@pytest.mark.parametrize(("root", "copies"), [(0, 1), (RANK, 0)])
def test_only_who_receives_a_broadcast_keeps_a_copy(
    root: int, copies: int, world: FakeWorld
) -> None:
    tensor = mine()
    filler = Filler([tensor], Answer.ZEROS, keep=True, root=root == RANK)
    assert len(filler.saved) == copies
    work: Any = dist.broadcast(tensor, src=root, async_op=True)
    if root != RANK:
        tensor.fill_(5)  # part of it has arrived
    world.communicators.stop(0)
    assert work.wait()
    assert tensor.tolist() == MINE
    world.made[0].works[0].end(RuntimeError("closed"))
    world.communicators.quiesce(0)


def test_a_receive_from_anybody_copies_on_arrival_and_names_the_source(world: FakeWorld) -> None:
    (inner,) = world.made
    tensor = torch.zeros(3)
    work: Any = dist.group.WORLD.recv_anysource([tensor], 0)  # type: ignore[union-attr]
    staged = inner.calls[0][1][0][0]
    assert staged.data_ptr() != tensor.data_ptr()
    staged.copy_(mine())
    assert tensor.tolist() == [0.0] * 3
    inner.works[0].end()
    assert work.wait()
    assert tensor.tolist() == MINE
    assert work._source_rank() == 0


def test_a_receive_from_anybody_writes_nothing_after_the_stop(world: FakeWorld) -> None:
    (inner,) = world.made
    tensor = mine()
    work: Any = dist.group.WORLD.recv_anysource([tensor], 0)  # type: ignore[union-attr]
    inner.calls[0][1][0][0].fill_(9)
    world.communicators.stop(0)
    assert work.wait()
    world.communicators.quiesce(0)
    tensor.fill_(4)
    inner.works[0].end()
    assert tensor.tolist() == [4.0] * 3


def test_coalesced_singles_are_waited_for_as_one(world: FakeWorld) -> None:
    group: Any = dist.group.WORLD
    outputs = [torch.full((SIZE,), -7.0) for _ in range(2)]
    work = group.all_gather_single_coalesced(outputs, [mine()[:1], mine()[1:2]])
    future = work.get_future()
    world.made[0].works[1].end()
    assert not work.is_completed()
    assert not future.done()
    world.communicators.stop(0)
    assert work.wait()
    assert future.done()
    assert not work.is_success()
    assert outputs[0].tolist() == [0.0] * SIZE


def test_a_wait_with_a_deadline(world: FakeWorld) -> None:
    work: Any = dist.all_reduce(mine(), async_op=True)
    with pytest.raises(RuntimeError, match="allreduce did not end within"):
        work.wait(datetime.timedelta(milliseconds=1))
    world.made[0].works[0].end()
    assert work.wait(datetime.timedelta(milliseconds=1))
    assert work.wait()


# ---------------------------------------------------------------- the guard: once


def _guard(world: FakeWorld, fill: Callable[[], None] = lambda: None) -> Guard:
    return Guard(world.communicators, 0, [torch.ones(1)], fill, "allreduce")


@pytest.mark.parametrize("order", ["maker first", "releaser first", "in between"])
@pytest.mark.parametrize("poisoned", [True, False])
def test_the_future_is_settled_once(
    order: str, poisoned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = _guard(FakeWorld())
    if order == "releaser first":
        guard.release(poisoned=poisoned)
    if order == "in between":
        real = torch.futures.Future

        def future() -> Any:
            monkeypatch.setattr(torch.futures, "Future", real)
            guard.release(poisoned=poisoned)
            return real()

        monkeypatch.setattr(torch.futures, "Future", future)
    made = guard.get_future()
    assert guard.get_future() is made
    guard.release(poisoned=poisoned)
    guard.release(poisoned=not poisoned)
    assert made.done()
    assert made.wait()[0].item() == 1.0


def test_a_guard_is_released_once_however_many_come() -> None:
    for _ in range(200):
        fills: list[int] = []
        world = FakeWorld()
        world.communicators.answer = Answer.ZEROS
        guard = _guard(world, lambda fills=fills: fills.append(1))  # type: ignore[misc]
        gate = threading.Barrier(4)
        futures: list[Any] = []

        def release(poisoned: bool, guard: Guard = guard, gate: threading.Barrier = gate) -> None:
            gate.wait(10)
            guard.release(poisoned=poisoned)

        def make(
            guard: Guard = guard, gate: threading.Barrier = gate, futures: list[Any] = futures
        ) -> None:
            gate.wait(10)
            futures.append(guard.get_future())

        threads = [
            threading.Thread(target=release, args=(poisoned,)) for poisoned in (True, False, True)
        ]
        threads.append(threading.Thread(target=make))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert guard.wait()
        assert futures[0].done()
        assert len(fills) == (0 if guard.is_success() else 1)
        assert world.communicators.touched is bool(fills)


def test_many_threads_may_wait_for_one_guard() -> None:
    guard = _guard(FakeWorld())
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(guard.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    guard.release(poisoned=False)
    for thread in threads:
        thread.join(10)
    assert woken == [True] * 4


def test_only_one_backend_of_that_name(world: FakeWorld) -> None:
    with pytest.raises(UserError, match="registered already"):
        register(world.communicators)


def test_destroying_a_group_takes_its_inner_group_down_once(world: FakeWorld) -> None:
    group = dist.new_group([0, 1])
    inner: FakeInner = world.made[1]
    dist.destroy_process_group(group)
    inner.wait_gone()
    assert inner.destroyed == 1
    assert len(world.communicators.groups) == 1
