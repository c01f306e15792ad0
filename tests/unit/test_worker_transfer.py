"""Stripes, chunks and the stream against a model of bytes; fetch and serve over real gloo."""

from __future__ import annotations

import datetime
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo

from everstep.errors import EverstepError
from everstep.worker import codec, transfer
from everstep.worker.state import Spec, State
from everstep.worker.transfer import ReceiptError, Stream, chunks, stripe

torch.set_num_threads(1)

# ---------------------------------------------------------------- ranges


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_stripes_cover_everything_once_and_evenly(nbytes: int, count: int) -> None:
    stripes = [stripe(nbytes, index, count) for index in range(count)]
    assert stripes[0][0] == 0
    assert stripes[-1][1] == nbytes
    assert all(one[1] == two[0] for one, two in itertools.pairwise(stripes))
    sizes = [end - start for start, end in stripes]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_chunks_cover_the_range_once(start: int, length: int, size: int) -> None:
    parts = list(chunks(start, start + length, size))
    assert [byte for a, b in parts for byte in range(a, b)] == list(range(start, start + length))
    assert all(0 < b - a <= size for a, b in parts)


# ---------------------------------------------------------------- the stream

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.int64,
]
LAYOUTS = ["contiguous", "transposed", "strided", "flipped", "offset", "channels_last"]


def _tensor(shape: list[int], dtype: torch.dtype, layout: str, seed: int) -> torch.Tensor:
    def plain(sizes: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 2, sizes, generator=generator).to(dtype)

    if layout == "transposed" and shape:
        return plain(shape[::-1]).permute(*reversed(range(len(shape))))
    if layout == "strided" and shape:
        return plain([*shape[:-1], shape[-1] * 2])[..., ::2]
    if layout == "flipped" and shape:
        return plain([shape[0] + 1, *shape[1:]])[1:]
    if layout == "offset":
        return plain([3, *shape])[1]
    if layout == "channels_last" and len(shape) == 4:
        return plain(shape).contiguous(memory_format=torch.channels_last)
    return plain(shape)


TENSORS = st.lists(
    st.builds(
        _tensor,
        st.lists(st.integers(0, 4), max_size=4),
        st.sampled_from(DTYPES),
        st.sampled_from(LAYOUTS),
        st.integers(0, 1000),
    ),
    max_size=5,
)


def _bytes(tensors: list[torch.Tensor]) -> bytes:
    """The naive model: every element's bytes, in logical order."""
    return b"".join(
        bytes(element.reshape(1).view(torch.uint8).tolist())
        for tensor in tensors
        for element in tensor.clone(memory_format=torch.contiguous_format).reshape(-1).unbind()
    )


@settings(deadline=None, max_examples=60)
@given(TENSORS, st.data())
def test_any_piece_reads_like_the_model(tensors: list[torch.Tensor], data: st.DataObject) -> None:
    stream, model = Stream(tensors), _bytes(tensors)
    assert stream.nbytes == len(model)
    end = data.draw(st.integers(0, len(model)), label="end")
    start = data.draw(st.integers(0, end), label="start")
    assert bytes(stream.read(start, end).tolist()) == model[start:end]


@settings(deadline=None, max_examples=60)
@given(TENSORS, st.data())
def test_any_piece_writes_like_the_model(tensors: list[torch.Tensor], data: st.DataObject) -> None:
    stream, model = Stream(tensors), bytearray(_bytes(tensors))
    addresses = [tensor.data_ptr() for tensor in tensors]
    for _ in range(3):
        end = data.draw(st.integers(0, len(model)), label="end")
        start = data.draw(st.integers(0, end), label="start")
        piece = data.draw(st.lists(st.integers(0, 1), min_size=end - start, max_size=end - start))
        stream.write(start, torch.tensor(piece, dtype=torch.uint8))
        model[start:end] = bytes(piece)
    assert _bytes(tensors) == bytes(model)
    assert [tensor.data_ptr() for tensor in tensors] == addresses


@settings(deadline=None, max_examples=30)
@given(TENSORS, st.integers(1, 5), st.integers(1, 7))
def test_stripes_in_chunks_carry_everything_over(
    tensors: list[torch.Tensor], count: int, size: int
) -> None:
    source = Stream(tensors)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    target = Stream(copies)
    for index in range(count):
        for start, end in chunks(*stripe(source.nbytes, index, count), size):
            target.write(start, source.read(start, end))
    assert _bytes(copies) == _bytes(tensors)


def test_an_expanded_tensor_is_written_once() -> None:
    source, target = torch.arange(4.0).expand(3, 4), torch.zeros(4).expand(3, 4)
    stream = Stream([source])
    Stream([target]).write(0, stream.read(0, stream.nbytes))
    assert torch.equal(target, source)


# ---------------------------------------------------------------- over gloo


class Box:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _state(seed: int, steps: int, box: Box | None = None) -> State:
    generator = torch.Generator().manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))
    net.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
    net.register_parameter("none", torch.nn.Parameter(torch.empty(0)))
    with torch.no_grad():
        net[0].weight = torch.nn.Parameter(torch.zeros(5, 7).t())  # not contiguous
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 / (seed + 1))
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step()
    return State({"model": net, "optimizer": optimizer, "box": box or Box(a=seed, b=[steps])})


def _groups(size: int) -> list[Any]:
    """A real gloo group for each of `size` threads."""
    store = HashStore()
    made: list[Any] = [None] * size
    options = []
    for _ in range(size):
        option = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        option._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        option._timeout = datetime.timedelta(seconds=20)
        options.append(option)

    def build(rank: int) -> None:
        made[rank] = ProcessGroupGloo(PrefixStore("t", store), rank, size, options[rank])

    _together([lambda rank=rank: build(rank) for rank in range(size)])  # type: ignore[misc]
    return made


def _together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run all at once; returns what each returned or raised."""
    results: list[Any] = [None] * len(jobs)

    def work(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except (EverstepError, RuntimeError) as error:
            results[index] = error

    threads = [
        threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(jobs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a transfer hangs"
    return results


def _exchange(
    states: list[State], sinks: dict[int, tuple[int, ...]], *, gradients: bool = False
) -> list[Any]:
    """`sinks[r]`: the sources of rank r, which fetches; all others serve those that name them."""
    groups = _groups(len(states))

    def job(rank: int) -> Any:
        if rank in sinks:
            return transfer.fetch(groups[rank], states[rank], sinks[rank])
        mine = tuple(sink for sink, sources in sinks.items() if rank in sources)
        return transfer.serve(groups[rank], states[rank], mine, gradients=gradients)

    return _together([lambda rank=rank: job(rank) for rank in range(len(states))])  # type: ignore[misc]


@pytest.fixture(params=[8 << 20, 64], ids=["one chunk", "many chunks"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.chunks, "__defaults__", (request.param,))


@pytest.mark.parametrize(
    "sinks",
    [
        {1: (0,)},
        {0: (1, 2)},
        {1: (0, 2, 3)},
        {0: (2, 3), 1: (2, 3)},
        {3: (0, 1), 2: (1, 0)},
        {1: (3, 0), 2: (0,)},
    ],
    ids=str,
)
@pytest.mark.usefixtures("chunk_bytes")
def test_every_sink_gets_the_state_whatever_it_held(sinks: dict[int, tuple[int, ...]]) -> None:
    states = [_state(9, 0) if rank in sinks else _state(1, 3) for rank in range(4)]
    good = _state(1, 3)
    results = _exchange(states, sinks)
    for rank, state in enumerate(states):
        assert not isinstance(results[rank], Exception), results[rank]
        assert state.digests() == good.digests()
    digests = {
        results[rank][0] if rank in sinks else results[rank]
        for rank in range(4)
        if _takes_part(rank, sinks)
    }
    assert len(digests) == 1
    nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in good.replicas())
    assert all(results[sink][1] == nbytes for sink in sinks)


def _takes_part(rank: int, sinks: dict[int, tuple[int, ...]]) -> bool:
    return rank in sinks or any(rank in sources for sources in sinks.values())


def test_carried_gradients_travel() -> None:
    states = [_state(1, 2), _state(2, 0)]
    _, result = _exchange(states, {1: (0,)}, gradients=True)
    assert not isinstance(result, Exception), result
    pairs = zip(states[0].parameters(), states[1].parameters(), strict=True)
    for (name, one), (_, two) in pairs:
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None and two.grad is not None:
            assert torch.equal(one.grad, two.grad), name


@pytest.mark.parametrize("corrupt", [0, 1])
@pytest.mark.parametrize("end", ["first", "last"])
def test_one_flipped_bit_in_a_source_fails_the_receipt(corrupt: int, end: str) -> None:
    """In the stripe that it sends, and in the one that it does not."""
    states = [_state(1, 3), _state(1, 3), _state(9, 0)]
    tensors = [tensor for _, tensor in states[corrupt].replicas() if tensor.numel()]
    raw = codec.tensor_bytes(tensors[0 if end == "first" else -1])
    if end == "first":
        tensors[0].copy_(tensors[0] + 1)
    else:
        raw[-1] ^= 1
    result = _exchange(states, {2: (0, 1)})[2]
    assert isinstance(result, ReceiptError)
    assert "corrupt" in str(result)


def test_sources_at_different_steps_fail_the_receipt() -> None:
    result = _exchange([_state(1, 3), _state(1, 2), _state(9, 0)], {2: (0, 1)})[2]
    assert isinstance(result, ReceiptError)


def test_sources_that_differ_only_in_what_is_no_tensor_fail_the_receipt() -> None:
    states = [_state(1, 3), _state(1, 3, Box(a=1, b=[4])), _state(9, 0)]
    result = _exchange(states, {2: (0, 1)})[2]
    assert isinstance(result, ReceiptError)


def test_an_object_that_loads_wrongly_fails_the_receipt() -> None:
    class Forgetful(Box):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.a = state["a"]

    result = _exchange([_state(1, 3), _state(9, 0, Forgetful(a=0, b=0))], {1: (0,)})[1]
    assert isinstance(result, ReceiptError)


def test_an_object_that_keeps_another_order_passes_the_receipt() -> None:
    states = [_state(1, 3, Box(a=1, b=2)), _state(9, 0, Box(b=0, a=0))]
    result = _exchange(states, {1: (0,)})[1]
    assert not isinstance(result, Exception), result


def test_headers_survive_the_wire() -> None:
    spec = Spec(name="model/w", dtype="torch.float32", shape=(2, 3), near=True)
    state = _state(1, 1)
    import msgspec

    header = transfer.Header(nbytes=3, manifest=[spec], leaves=state.leaves())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(header), type=transfer.Header) == header
