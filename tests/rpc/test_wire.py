"""The wire codec: written messages are read back from any cuts, and no received bytes do harm."""

from __future__ import annotations

import dataclasses
import lzma
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamado.ggml.ops import MAX_NAME, MAX_SRC, OP_PARAMS_BYTES
from llamado.rpc import wire

CAPTURES = sorted((Path(__file__).parents[1] / "ggml" / "captures").glob("*.bin.xz"))

u8, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 32, 64))
i32 = st.integers(-(2**31), 2**31 - 1)
tickets = st.binary(min_size=wire.TICKET_BYTES, max_size=wire.TICKET_BYTES)
digests = st.binary(min_size=wire.SHA256_BYTES, max_size=wire.SHA256_BYTES)
caps = st.binary(min_size=wire.CAPS_BYTES, max_size=wire.CAPS_BYTES)
# A name ends at its first zero.
names = st.binary(max_size=MAX_NAME - 1).map(lambda name: name.replace(b"\0", b"0"))
params = st.binary(min_size=OP_PARAMS_BYTES, max_size=OP_PARAMS_BYTES)


def same(number: st.SearchStrategy[int], n: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(number, min_size=n, max_size=n).map(tuple)


tensors = st.builds(
    wire.WireTensor,
    id=u64, type=u32, buffer=u64, ne=same(u32, 4), nb=same(u32, 4), data=u64, op=u32, op_params=params, flags=i32,
    src=same(u64, MAX_SRC), view_src=u64, view_offs=u64, name=names, use_count=i32,
)  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn) -> wire.GraphCompute:
    nodes = np.array(draw(st.lists(u64, max_size=5)), np.uint64)
    records = b"".join(tensor.pack() for tensor in draw(st.lists(tensors, max_size=4)))
    return wire.graph_request(draw(u32), nodes, np.frombuffer(records, wire.TENSOR), draw(u64))


@st.composite
def pieces(draw: st.DrawFn) -> wire.SetTensor2D:
    small = st.integers(1, 50)
    return wire.SetTensor2D(draw(tensors), draw(u64), draw(small), draw(small), draw(u64))


REQUESTS: dict[wire.Command, st.SearchStrategy[Any]] = {
    wire.Command.HELLO: st.builds(wire.Hello, caps),
    wire.Command.DEVICE_COUNT: st.just(wire.DeviceCount()),
    wire.Command.ALLOC_BUFFER: st.builds(wire.AllocBuffer, u32, u64),
    wire.Command.GET_ALIGNMENT: st.builds(wire.GetAlignment, u32),
    wire.Command.GET_MAX_SIZE: st.builds(wire.GetMaxSize, u32),
    wire.Command.GET_DEVICE_MEMORY: st.builds(wire.GetDeviceMemory, u32),
    wire.Command.GRAPH_RECOMPUTE: st.builds(wire.GraphRecompute, u32, u64),
    wire.Command.BUFFER_GET_BASE: st.builds(wire.BufferGetBase, u64),
    wire.Command.FREE_BUFFER: st.builds(wire.FreeBuffer, u64),
    wire.Command.BUFFER_CLEAR: st.builds(wire.BufferClear, u64, u8),
    wire.Command.SET_TENSOR: st.builds(wire.SetTensor, tensors, u8, u64, st.integers(0, 3000)),
    wire.Command.SET_TENSOR_HASH: st.builds(wire.SetTensorHash, tensors, u64, u64),
    wire.Command.GET_TENSOR: st.builds(wire.GetTensor, tensors, u64, u64),
    wire.Command.COPY_TENSOR: st.builds(wire.CopyTensor, tensors, tensors),
    wire.Command.GRAPH_COMPUTE: graphs(),
    wire.Command.INIT_TENSOR: st.builds(wire.InitTensor, tensors),
    wire.Command.GET_ALLOC_SIZE: st.builds(wire.GetAllocSize, u32, tensors, st.lists(tensors, max_size=10).map(tuple)),
    wire.Command.MEMSET_TENSOR: st.builds(wire.MemsetTensor, tensors, u64, u64, u8),
    wire.Command.SET_TENSOR_2D: pieces(),
    wire.Command.GET_TENSOR_2D: st.builds(wire.GetTensor2D, tensors, u64, u64, u64, u64),
    wire.Command.COMM_INIT: st.builds(wire.CommInit, u32, u32, u32, u32, names),
    wire.Command.COMM_ALLREDUCE: st.builds(wire.CommAllReduce, u32, tensors),
    wire.Command.COMM_FREE: st.builds(wire.CommFree, u32),
    wire.Command.GET_NUMERICS: st.builds(wire.GetNumerics, u32),
    wire.Command.UPGRADE: st.builds(wire.Upgrade, st.sampled_from([*wire.PROTOCOLS])),
    wire.Command.OPEN_INLET: st.just(wire.OpenInlet()),
    wire.Command.CONNECT_NEXT: st.builds(wire.ConnectNext, tickets, st.binary(min_size=1, max_size=wire.MAX_ENDPOINT)),
    wire.Command.ATTACH: st.builds(wire.Attach, tickets),
    wire.Command.PUSH: st.builds(wire.Push, tensors, u32, u64, u64),
    wire.Command.AWAIT: st.builds(wire.Await, tensors, u32, u64, u64),
    wire.Command.DELIVER: st.builds(wire.Deliver, u64, u64, st.integers(0, 3000)),
    wire.Command.CLOSE_INLET: st.builds(wire.CloseInlet, tickets),
    wire.Command.OFFER: st.builds(
        wire.Offer, st.lists(st.builds(wire.OfferedWeight, names, u64), min_size=1).map(tuple)
    ),
    wire.Command.BIND: st.builds(
        wire.Bind, st.lists(st.builds(wire.BoundWeight, u64, u64, u64, digests, names), min_size=1).map(tuple)
    ),
}
WITH_DATA = wire.SetTensor | wire.SetTensor2D | wire.Deliver


def in_version(request: wire.Request, protocol: wire.Protocol) -> wire.Request:
    """Return a request as it is read in a version without names for graphs."""
    if protocol.names_graphs or not isinstance(request, wire.GraphCompute | wire.GraphRecompute):
        return request
    if isinstance(request, wire.GraphRecompute):
        return wire.GraphRecompute(request.device)
    return dataclasses.replace(request, uid=0)


_NUMBERS = {
    wire.Command.GET_ALIGNMENT: u64,
    wire.Command.GET_MAX_SIZE: u64,
    wire.Command.BUFFER_GET_BASE: u64,
    wire.Command.GET_ALLOC_SIZE: u64,
    wire.Command.DEVICE_COUNT: u32,
    wire.Command.SET_TENSOR_HASH: u8,
    wire.Command.COPY_TENSOR: u8,
    wire.Command.CONNECT_NEXT: u32,
    wire.Command.ATTACH: u8,
    wire.Command.COMM_INIT: u8,
}
RESPONSES: dict[wire.Command, st.SearchStrategy[Any]] = {
    wire.Command.HELLO: st.builds(wire.HelloResponse, u8, u8, u8, u8, caps),
    wire.Command.ALLOC_BUFFER: st.builds(wire.AllocResponse, u64, u64),
    wire.Command.GET_DEVICE_MEMORY: st.builds(wire.DeviceMemory, u64, u64),
    wire.Command.OPEN_INLET: st.builds(wire.InletTicket, u32, tickets),
    wire.Command.AWAIT: st.builds(wire.AwaitResponse, u8, u64),
    wire.Command.GET_NUMERICS: st.builds(wire.Numerics, st.binary(min_size=128, max_size=128)),
}
RESPONSES |= {command: st.builds(wire.Number, number) for command, number in _NUMBERS.items()}
RESPONSES |= {command: st.builds(wire.TensorData, st.integers(0, 3000)) for command in wire.DATA}

requests = st.one_of(
    *(s for command, s in REQUESTS.items() if command not in (wire.Command.HELLO, wire.Command.UPGRADE))
)
answers = st.one_of(*(st.tuples(st.just(command), s) for command, s in RESPONSES.items()))


def test_the_strategies_cover_the_protocol() -> None:
    assert set(REQUESTS) == set(wire.Command)
    assert {c for c in wire.Command if wire.has_response(c)} == set(RESPONSES)


def data_of(n: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(n)


def cuts(stream: bytes, at: list[int]) -> Iterator[bytes]:
    """Yield a stream in pieces, cut at `at` (modulo its length)."""
    places = sorted({a % (len(stream) + 1) for a in at})
    yield from (stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True))


def equal(a: wire.Request, b: wire.Request) -> bool:
    """Compare messages. A graph has no equality, and a missing source is one of zeros."""
    if isinstance(a, wire.GraphCompute):
        assert isinstance(b, wire.GraphCompute)
        same = (a.device, a.uid, a.payload, a.nodes.tolist()) == (b.device, b.uid, b.payload, b.nodes.tolist())
        return same and bool((a.tensors == b.tensors).all())
    if isinstance(a, wire.GetAllocSize) and isinstance(b, wire.GetAllocSize):
        nothing = wire.WireTensor.unpack(bytes(296))
        a, b = (r._replace(srcs=r.srcs + (nothing,) * (MAX_SRC - len(r.srcs))) for r in (a, b))
    return type(a) is type(b) and a == b


def read_requests(
    pieces: Iterator[bytes], bulks: list[bytearray], protocol: wire.Protocol = wire.LATEST
) -> list[wire.Request]:
    """Return all requests of a stream, and append their data to `bulks`."""
    reader = wire.RequestReader(protocol=protocol)
    found: list[wire.Request] = []
    for piece in pieces:
        reader.feed(piece)
        while True:
            while reader.bulk and reader.held:
                part = bytearray(min(reader.bulk, 7))
                n = reader.take(memoryview(part))
                bulks[-1] += part[:n]
            message = reader.next()
            if message is None:
                break
            found.append(message)
            if isinstance(message, WITH_DATA):
                bulks.append(bytearray())
    assert reader.held == 0 and reader.bulk == 0
    return found


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    protocol=st.sampled_from([*wire.PROTOCOLS.values()]),
    hello=REQUESTS[wire.Command.HELLO],
    sent=st.lists(requests, max_size=4),
    at=st.lists(st.integers(0, 2**20)),
)
def test_requests_are_read_as_written(
    protocol: wire.Protocol, hello: wire.Hello, sent: list[wire.Request], at: list[int]
) -> None:
    sent = [hello, *(in_version(r, protocol) for r in sent if wire.COMMANDS[type(r)] in protocol.commands)]
    stream, written = bytearray(), []
    for i, request in enumerate(sent):
        stream += wire.write_request(request, protocol)
        if isinstance(request, WITH_DATA):
            written.append(data_of(request.size, i))
            stream += written[-1]
    bulks: list[bytearray] = []
    read = read_requests(cuts(bytes(stream), at), bulks, protocol)
    assert len(read) == len(sent) and all(map(equal, read, sent))
    assert bulks == written


@pytest.mark.parametrize("command", [c for c in wire.Command if c is not wire.Command.HELLO])
def test_requests_are_read_byte_by_byte(command: wire.Command) -> None:

    @settings(max_examples=3, deadline=None)
    @given(request=REQUESTS[command])
    def one(request: wire.Request) -> None:
        stream = wire.write_request(wire.Hello()) + wire.write_request(request)
        n = request.size if isinstance(request, WITH_DATA) else 0
        stream += bytes(n)
        bulks: list[bytearray] = []
        read = read_requests((stream[i : i + 1] for i in range(len(stream))), bulks)
        assert len(read) == 2 and equal(read[1], request)
        text = wire.describe(request)
        assert text.split()[0] == command.name and text.isprintable()

    one()


def test_descriptions_keep_tickets_secret() -> None:
    ticket = b"0123456789abcdef"
    for request in (wire.Attach(ticket), wire.CloseInlet(ticket), wire.ConnectNext(ticket, b"host:1")):
        assert ticket.decode() not in wire.describe(request)
    assert wire.describe(wire.ConnectNext(ticket, b"host:1\n")) == "CONNECT_NEXT host:1?"


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(sent=st.lists(answers, max_size=6), at=st.lists(st.integers(0, 2**16)))
def test_responses_are_read_as_written(sent: list[tuple[wire.Command, wire.Response]], at: list[int]) -> None:
    reader, stream, written = wire.ResponseReader(), bytearray(), []
    for i, (command, response) in enumerate(sent):
        size = response.size if isinstance(response, wire.TensorData) else 0
        reader.expect(command, size)
        stream += wire.write_response(command, response)
        if command in wire.DATA:
            written.append(data_of(size, i))
            stream += written[-1]
    assert reader.n_expected == len(sent)
    read, bulks = [], []
    for piece in cuts(bytes(stream), at):
        reader.feed(piece)
        while True:
            while reader.bulk and reader.held:
                part = bytearray(min(reader.bulk, 5))
                bulks[-1] += part[: reader.take(memoryview(part))]
            message = reader.next()
            if message is None:
                break
            read.append(message)
            if message[0] in wire.DATA:
                bulks.append(bytearray())
    assert read == sent and bulks == written and reader.n_expected == 0 and reader.held == 0


@pytest.mark.slow
@settings(deadline=None)
@given(
    size=st.integers(0, 5000),
    fed=st.integers(0, 6000),
    steps=st.lists(st.tuples(st.sampled_from(["take", "drop", "bypass", "feed"]), st.integers(0, 2000)), max_size=12),
)
def test_bulk_moves_in_any_mixture(size: int, fed: int, steps: list[tuple[str, int]]) -> None:
    """Every byte of the data is taken, dropped or bypassed exactly once; then follows the next message."""
    reader = wire.RequestReader()
    request = wire.SetTensor(wire.WireTensor(1, 0, 1, (1, 1, 1, 1), (4, 4, 4, 4), 0), 0, 0, size)
    after = wire.write_request(wire.GraphRecompute(7))
    head = wire.write_request(wire.Hello()) + wire.write_request(request)
    stream = data_of(size, 0) + after
    reader.feed(head + stream[:fed])
    at = min(fed, len(stream))  # bytes of the stream that were fed, or went around
    done = 0  # bytes of the data that have left the reader
    assert reader.next() == wire.Hello() and reader.next() == request
    for step, n in [*steps, ("feed", len(stream)), ("take", size), ("take", size)]:
        assert reader.bulk == size - done
        if reader.bulk:
            assert reader.next() is None
        if step == "feed":
            reader.feed(stream[at : at + n])
            at = min(len(stream), at + n)
        elif step == "take":
            target = bytearray(n)
            moved = reader.take(memoryview(target))
            assert target[:moved] == stream[done : done + moved] and not any(target[moved:])
            done += moved
        elif step == "drop":
            done += reader.drop()
        elif reader.held or n > reader.bulk:
            with pytest.raises(ValueError, match="cannot have come"):
                reader.bypass(n)
        else:
            reader.bypass(n)
            done += n
            at += n
    assert done == size and reader.bulk == 0
    assert reader.next() == wire.GraphRecompute(7) and reader.held == 0


@settings(deadline=None)
@given(st.binary(max_size=2000), st.booleans(), st.lists(st.integers(0, 2000), max_size=5))
def test_arbitrary_requests_raise_only_wire_errors(noise: bytes, greeted: bool, at: list[int]) -> None:
    reader = wire.RequestReader(max_message=10_000)
    if greeted:
        reader.feed(wire.write_request(wire.Hello()))
        reader.next()
    drain(reader, cuts(noise, at))


# A stream that begins like the protocol gets further than noise.
mutated = st.one_of(
    st.tuples(st.sampled_from(list(wire.Command)).map(int), st.integers(0, 4000), st.binary(max_size=4000)),
    st.tuples(st.sampled_from(list(wire.Command)).map(int), u64, st.binary(max_size=400)),
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(mutated, max_size=3), st.lists(st.integers(0, 4000), max_size=5))
def test_messages_of_any_size_raise_only_wire_errors(messages: list[tuple[int, int, bytes]], at: list[int]) -> None:
    stream = b"".join(struct.pack("<BQ", command, size) + payload for command, size, payload in messages)
    reader = wire.RequestReader(max_message=10_000)
    reader.feed(wire.write_request(wire.Hello()))
    drain(reader, cuts(stream, at))


def drain(reader: wire.RequestReader, pieces: Iterator[bytes]) -> None:
    try:
        for piece in pieces:
            reader.feed(piece)
            while reader.next() is not None or (reader.bulk and reader.drop()):
                pass
    except wire.WireError:
        pass


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(RESPONSES)), max_size=4), st.integers(0, 2**64 - 1), st.binary(max_size=200))
def test_arbitrary_responses_raise_only_wire_errors(expected: list[wire.Command], size: int, noise: bytes) -> None:
    reader = wire.ResponseReader()
    for command in expected:
        reader.expect(command, size if command in wire.DATA else 0)
    reader.feed(noise)
    try:
        while reader.next() is not None or (reader.bulk and reader.drop()):
            pass
    except wire.WireError:
        pass


@pytest.mark.parametrize("command", list(wire.Command))
def test_a_huge_size_takes_no_memory(command: wire.Command) -> None:
    """A request of 2^63 bytes is rejected by its head, or its data is bulk."""
    reader = wire.RequestReader()
    if command is not wire.Command.HELLO:
        reader.feed(wire.write_request(wire.Hello()))
        reader.next()
    reader.feed(struct.pack("<BQ", command, 2**63))
    tracemalloc.start()
    try:
        if command in (wire.Command.SET_TENSOR, wire.Command.SET_TENSOR_2D, wire.Command.DELIVER):
            assert reader.next() is None
        else:
            with pytest.raises(wire.WireError, match=command.name):
                reader.next()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_wrong_counts_of_a_graph_are_rejected() -> None:
    def payload(n_nodes: int, n_tensors: int, rest: int) -> bytes:
        nodes = bytes(8 * n_nodes) if n_nodes < 10 else b""
        return struct.pack("<II", 0, n_nodes) + nodes + struct.pack("<I", n_tensors) + bytes(rest)

    assert wire.read_graph(payload(2, 1, 296)).nodes.tolist() == [0, 0]
    for bad in (b"", bytes(11), payload(2**32 - 1, 0, 0), payload(0, 2**32 - 1, 296), payload(1, 1, 295),
                payload(1, 1, 297)):  # fmt: skip
        with pytest.raises(wire.WireError, match="GRAPH_COMPUTE"):
            wire.read_graph(bad)


def test_hello_comes_first_and_once() -> None:
    reader = wire.RequestReader()
    reader.feed(wire.write_request(wire.DeviceCount())[:1])
    with pytest.raises(wire.WireError, match="DEVICE_COUNT before HELLO"):
        reader.next()
    reader = wire.RequestReader()
    reader.feed(wire.write_request(wire.Hello()) * 2)
    assert reader.next() == wire.Hello()
    with pytest.raises(wire.WireError, match="second HELLO"):
        reader.next()


def test_an_unknown_command() -> None:
    reader = wire.RequestReader()
    reader.feed(b"\x20")
    with pytest.raises(wire.WireError, match="command 32"):
        reader.next()


def test_a_command_of_another_version() -> None:
    reader = wire.RequestReader(protocol=wire.V7)
    reader.feed(wire.write_request(wire.Hello()) + wire.write_request(wire.CommFree(0)))
    assert reader.next() == wire.Hello()
    with pytest.raises(wire.WireError, match=r"COMM_FREE is no command of RPC 7\.0\.0"):
        reader.next()


def test_rows_and_their_data_agree() -> None:
    tensor = wire.WireTensor(1, 0, 1, (9, 1, 1, 1), (4, 36, 36, 36), 0)
    for rows, row, came in ((3, 4, 12), (3, 4, 11), (0, 4, 0), (2**63, 2**63, 8)):
        payload = tensor.pack() + struct.pack("<QQQQ", 0, row, rows, 8) + bytes(came)
        reader = wire.RequestReader()
        reader.feed(wire.write_request(wire.Hello()) + struct.pack("<BQ", 18, len(payload)) + payload)
        reader.next()
        if rows * row == came and came:
            assert reader.next() == wire.SetTensor2D(tensor, 0, row, rows, 8) and reader.bulk == came
        else:
            with pytest.raises(wire.WireError, match="SET_TENSOR_2D"):
                reader.next()


def test_responses_to_no_request() -> None:
    reader = wire.ResponseReader()
    assert reader.next() is None
    reader.feed(b"\0")
    with pytest.raises(wire.WireError, match="no request"):
        reader.next()
    for command in set(wire.Command) - set(RESPONSES):
        with pytest.raises(ValueError, match=command.name):
            reader.expect(command)


def test_responses_of_another_size() -> None:
    for command, size in ((wire.Command.GET_TENSOR, 99), (wire.Command.GET_ALIGNMENT, 4), (wire.Command.HELLO, 2**63)):
        reader = wire.ResponseReader()
        reader.expect(command, 100)
        reader.feed(struct.pack("<Q", size))
        with pytest.raises(wire.WireError, match=command.name):
            reader.next()


def test_the_size_of_an_endpoint_is_checked() -> None:
    for n, good in ((0, False), (1, True), (wire.MAX_ENDPOINT, True), (wire.MAX_ENDPOINT + 1, False)):
        reader = wire.RequestReader()
        request = wire.ConnectNext(bytes(16), b"h" * n)
        reader.feed(wire.write_request(wire.Hello()) + wire.write_request(request))
        reader.next()
        if good:
            assert reader.next() == request
        else:
            with pytest.raises(wire.WireError, match="CONNECT_NEXT"):
                reader.next()


def test_sizes_of_the_protocol() -> None:
    tensor = wire.WireTensor(1, 2, 3, (1, 2, 3, 4), (5, 6, 7, 8), 9)
    head = 9
    assert len(tensor.pack()) == wire.TENSOR.itemsize == 296
    assert len(wire.write_request(wire.GetAllocSize(0, tensor, ()))) == head + 3260
    assert len(wire.write_request(wire.GetAllocSize(0, tensor, (tensor,) * 10))) == head + 3260
    assert len(wire.write_request(wire.Hello())) == head + 24
    assert len(wire.write_request(wire.SetTensor(tensor, 0, 0, 1000))) == head + 296 + 1 + 8
    assert len(wire.write_response(wire.Command.HELLO, wire.HelloResponse(7, 0, 0))) == 8 + 28
    assert wire.write_response(wire.Command.GET_TENSOR, wire.TensorData(5)) == struct.pack("<Q", 5)


def test_the_layout_of_a_tensor() -> None:
    """Offsets added up from the table of the protocol; dtype and struct agree."""
    tensor = wire.WireTensor(
        1, 2, 3, (4, 5, 6, 7), (8, 9, 10, 11), 12, 13, bytes(range(64)), -14, tuple(range(15, 25)), 25, 26, b"name", -27
    )
    record = np.frombuffer(tensor.pack(), wire.TENSOR)[0]
    for field in ("id", "type", "buffer", "data", "op", "flags", "view_src", "view_offs", "name", "use_count"):
        assert record[field] == getattr(tensor, field), field
    for field in ("ne", "nb", "src"):
        assert record[field].tolist() == list(getattr(tensor, field)), field
    assert record["op_params"].tobytes() == tensor.op_params
    fields = wire.TENSOR.fields
    assert fields is not None
    offsets = {name: fields[name][1] for name in ("type", "buffer", "ne", "op", "flags", "src", "data", "name")}
    assert offsets == {
        "type": 8, "buffer": 12, "ne": 20, "op": 52, "flags": 120, "src": 124, "data": 220, "name": 228
    }  # fmt: skip


def test_a_long_name_keeps_its_closing_zero() -> None:
    tensor = wire.WireTensor(1, 0, 0, (1, 1, 1, 1), (4, 4, 4, 4), 0, name=b"n" * 100)
    assert wire.WireTensor.unpack(tensor.pack()).name == b"n" * 63
    assert tensor.pack()[228 : 228 + 64] == b"n" * 63 + b"\0"


@pytest.mark.parametrize("protocol", wire.PROTOCOLS.values(), ids=str)
@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name.removesuffix(".bin.xz"))
def test_captured_graphs_keep_every_byte(path: Path, protocol: wire.Protocol) -> None:
    """Graphs of llama.cpp's server, in 8.0 with a uid behind the device: read, taken apart, put together again."""
    payload = lzma.decompress(path.read_bytes())
    uid = b"" if protocol is wire.V7 else bytes(range(1, 9))
    sent = payload[:4] + uid + payload[4:]
    stream = wire.write_request(wire.Hello()) + struct.pack("<BQ", 10, len(sent)) + sent
    (_, graph) = read_requests(cuts(stream, [1, 40, 45, 1000, 300_001]), [], protocol)
    assert isinstance(graph, wire.GraphCompute)
    assert graph.payload == payload and graph.uid == int.from_bytes(uid, "little")
    assert wire.write_request(graph, protocol) == stream[33:]
    rebuilt = wire.graph_request(graph.device, graph.nodes, graph.tensors, graph.uid)
    assert wire.write_request(rebuilt, protocol) == stream[33:]
    one_by_one = b"".join(
        wire.WireTensor.unpack(payload, len(payload) - 296 * (len(graph.tensors) - i)).pack()
        for i in range(len(graph.tensors))
    )
    assert one_by_one == graph.tensors.tobytes()


def test_captures_have_the_known_sizes() -> None:
    payloads = {path.name.removesuffix(".bin.xz"): lzma.decompress(path.read_bytes()) for path in CAPTURES}
    assert len(payloads) == 4
    graph = wire.read_graph(payloads["smollm2-135m-instruct-q4_1.graph_0"])
    assert (len(graph.payload), len(graph.nodes), len(graph.tensors)) == (404_036, 997, 1338)
    assert len(payloads["gemma-3-270m-q4_k_m.graph_0"]) == 316_628
