"""State from peers: a rank that lacks it fetches it from all that hold it, striped, and checks the
receipt.

Theory of operation: the state is one stream of bytes, all replica tensors in manifest order. Of k
sources, the i-th sends the i-th k-th of it, in chunks, point to point over the world's inner group
of the new generation. The receiver asks each source for its part; a source sends a header, to which
the first adds the manifest and the leaves, then its part, and then the digest of the whole state
that it holds, which it makes while its bytes travel on. When all are there, the receiver digests
what it now holds: it must equal every source's digest, or the receipt fails, and nothing is trained
on it. A source sends from the state's own memory; a receiver takes bytes in beside it, since gloo
may still write for a moment after a stop.

Runs on its own thread (recovery.py); blocks until done or until the sockets are shut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from everstep.errors import EverstepError, UserError
from everstep.worker.codec import buffer_of, tensor_bytes
from everstep.worker.copies import Copies, CopyError
from everstep.worker.state import Leaves, Spec, State, digest_of, put

_TAG = 0x5E
CHUNK_BYTES = 8 << 20


class ReceiptError(EverstepError):
    """What was fetched is not what the sources hold. `held`: where these do not agree, what each
    says that it holds."""

    def __init__(self, text: str, held: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.held = dict(held or {})


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a source says before its stripe. `manifest`, `leaves` and `modes` (which parts of the
    modules evaluate) come from the first source only."""

    nbytes: int
    manifest: list[Spec] | None
    leaves: Leaves | None
    modes: dict[str, list[str]] | None = None


def stripe(nbytes: int, index: int, count: int) -> tuple[int, int]:
    """Start and end of the `index`-th of `count` stripes of `nbytes` bytes."""
    return nbytes * index // count, nbytes * (index + 1) // count


def chunks(start: int, end: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """The range cut into chunks."""
    for first in range(start, end, chunk_bytes):
        yield first, min(first + chunk_bytes, end)


class Stream:
    """The bytes of several tensors as one range, read and written by piece."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._starts: list[int] = []
        self.nbytes = 0
        for tensor in tensors:
            self._starts.append(self.nbytes)
            self.nbytes += tensor.numel() * tensor.element_size()

    def _pieces(self, start: int, end: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """(tensor, first byte in it, last byte in it, offset in the range)."""
        for tensor, first in zip(self._tensors, self._starts, strict=True):
            last = first + tensor.numel() * tensor.element_size()
            low, high = max(first, start), min(last, end)
            if low < high:
                yield tensor, low - first, high - first, low - start

    def read(self, start: int, end: int) -> torch.Tensor:
        """A flat uint8 CPU tensor of bytes `start` to `end`; where they lie in one, a part of it,
        else a copy."""
        for tensor, low, high, _ in self._pieces(start, end):
            if high - low == end - start and tensor.is_cpu and tensor.is_contiguous():
                return tensor_bytes(tensor)[low:high]
            break
        out = torch.empty(end - start, dtype=torch.uint8)
        for tensor, low, high, offset in self._pieces(start, end):
            out[offset : offset + high - low].copy_(tensor_bytes(tensor)[low:high])
        return out

    def write(self, start: int, data: torch.Tensor) -> None:
        """Put `data` at `start`."""
        for tensor, low, high, offset in self._pieces(start, start + data.numel()):
            piece = data[offset : offset + high - low]
            if tensor.is_contiguous():
                tensor_bytes(tensor)[low:high].copy_(piece)
            else:
                flat = tensor_bytes(tensor)
                flat[low:high].copy_(piece)
                put(tensor, flat.view(tensor.dtype).reshape(tensor.shape))


class _Lane:
    """The stripe that comes from one source. While a piece is put in its place, the next one is
    under way; two buffers are used in turn, since fresh memory costs more than what is copied."""

    def __init__(self, group: Any, source: int, parts: Iterator[tuple[int, int]]) -> None:
        self._group, self._source, self._parts = group, source, parts
        self._buffers: list[torch.Tensor] = []
        self._posted: tuple[int, torch.Tensor, Any] | None = None
        self._post()

    def _post(self) -> None:
        part = next(self._parts, None)
        if part is None:
            self._posted = None
            return
        start, end = part
        if len(self._buffers) < 2:  # a source's first pieces are its largest
            self._buffers.append(torch.empty(end - start, dtype=torch.uint8))
        else:
            self._buffers.reverse()
        data = self._buffers[-1][: end - start]
        self._posted = start, data, self._group.recv([data], self._source, _TAG)

    def take(self) -> tuple[int, torch.Tensor] | None:
        """The next piece and where it begins; None at the end. It holds until the next call.
        Blocks."""
        if self._posted is None:
            return None
        start, data, work = self._posted
        work.wait()
        self._post()
        return start, data


def _send_bytes(group: Any, data: bytes, to: int) -> None:
    size = torch.tensor([len(data)], dtype=torch.int64)
    group.send([size], to, _TAG).wait()
    group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], to, _TAG).wait()


def _receive_bytes(group: Any, source: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], source, _TAG).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    group.recv([data], source, _TAG).wait()
    return bytes(buffer_of(data))


def _load(state: State, leaves: Leaves) -> None:
    """Raises UserError where an object of the script's does not take its own state."""
    try:
        state.load_leaves(leaves)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"a protected object does not load the state that it gave on another rank: "
            f"{type(error).__name__}: {error}"
        ) from error


def serve(group: Any, state: State, sinks: tuple[int, ...], *, gradients: bool) -> str:
    """Send every rank in `sinks` the stripe that it asks for. Returns the digest of the state held
    here."""
    replicas = state.replicas(gradients)
    tensors = [tensor for _, tensor in replicas]
    leaves = state.leaves(state.at_commit)
    digest = ""
    stream = Stream(tensors)
    for sink in sorted(sinks):
        request = torch.zeros(2, dtype=torch.int64)
        group.recv([request], sink, _TAG).wait()
        index, count = request.tolist()
        header = Header(
            nbytes=stream.nbytes,
            manifest=[spec for spec, _ in replicas] if index == 0 else None,
            leaves=leaves if index == 0 else None,
            modes=state.modes() if index == 0 else None,
        )
        _send_bytes(group, msgspec.msgpack.encode(header), sink)
        for start, end in chunks(*stripe(stream.nbytes, index, count)):
            group.send([stream.read(start, end)], sink, _TAG).wait()
        digest = digest or digest_of(tensors, leaves.digest())
        _send_bytes(group, digest.encode(), sink)
    return digest


def recall(copies: Copies, state: State, step: int, generation: int) -> tuple[str, int]:
    """Take the state of `step` from the rank's own copy in memory. Returns as `fetch` does. Raises
    ReceiptError if there is none, or it is not what was written."""
    try:
        targets, rest, nbytes = copies.fetch(state, step, generation)
    except CopyError as error:
        raise ReceiptError(str(error)) from error
    return _settle(state, targets, rest.leaves, rest.modes), nbytes


def _settle(
    state: State, targets: list[torch.Tensor], leaves: Leaves, modes: dict[str, list[str]]
) -> str:
    """The tensors are there: take all else, too. Returns the digest of what is held now."""
    _load(state, leaves)
    state.set_modes(modes)
    state.at_commit = state.steering()
    return digest_of(targets, state.leaves().digest())


def fetch(group: Any, state: State, sources: tuple[int, ...]) -> tuple[str, int]:
    """Take the state from `sources`. Returns the digest of what is held now and the bytes fetched.
    Raises ReceiptError if it is not what each source holds."""
    for index, source in enumerate(sources):
        group.send([torch.tensor([index, len(sources)], dtype=torch.int64)], source, _TAG).wait()
    headers = [
        msgspec.msgpack.decode(_receive_bytes(group, source), type=Header) for source in sources
    ]
    manifest, leaves = headers[0].manifest, headers[0].leaves
    assert manifest is not None and leaves is not None  # the first source always sends them
    state.check_trained(manifest)
    targets = state.adopt(manifest)
    stream = Stream(targets)
    if any(header.nbytes != stream.nbytes for header in headers):
        raise ReceiptError(
            f"the sources hold {[h.nbytes for h in headers]} bytes, this rank {stream.nbytes}"
        )
    lanes = [
        _Lane(group, source, chunks(*stripe(stream.nbytes, index, len(sources))))
        for index, source in enumerate(sources)
    ]
    with torch.no_grad():
        while pieces := [piece for lane in lanes if (piece := lane.take()) is not None]:
            for start, data in pieces:
                stream.write(start, data)
    held = {source: _receive_bytes(group, source).decode() for source in sources}
    if len(set(held.values())) > 1:  # only now: the sources have sent all, and none waits
        said = ", ".join(f"rank {source}: {digest[:12]}" for source, digest in held.items())
        raise ReceiptError(
            f"the ranks that hold the state do not hold the same ({said}): a copy is corrupt, or "
            "they are no replicas",
            held,
        )
    digest = _settle(state, targets, leaves, headers[0].modes or {})
    if held[sources[0]] != digest:
        raise ReceiptError(
            f"the state fetched from ranks {list(sources)} has digest {digest[:12]}, but they hold "
            f"{held[sources[0]][:12]}: a copy is corrupt, or the ranks are no replicas"
        )
    return digest, stream.nbytes
