"""A worker's end of one connection, over a pair of sockets in one process."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from llamado.rpc import wire
from llamado.rpc.worker import connection as connection_module
from llamado.rpc.worker.connection import ClientConnection, _tls_reason


@pytest.fixture
def pair() -> Iterator[tuple[ClientConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ClientConnection(ours, "127.0.0.1", "client", wire.V8), theirs


def greeted(pair: tuple[ClientConnection, socket.socket]) -> tuple[ClientConnection, socket.socket]:
    connection, client = pair
    client.sendall(wire.write_request(wire.Hello(), wire.V8))
    assert isinstance(connection.greet(None), wire.Hello)
    return pair


def test_a_slow_greeting_is_overdue(
    pair: tuple[ClientConnection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _ = pair
    clock = [connection.began]
    monkeypatch.setattr(connection_module.time, "monotonic", lambda: clock[0])
    for seconds, is_overdue in ((0.0, False), (20.0, False), (20.1, True)):
        clock[0] = connection.began + seconds
        assert connection.is_overdue is is_overdue
    greeted(pair)
    assert not connection.is_overdue and connection.sock.gettimeout() is None


def test_requests_are_read_ahead_by_kind(pair: tuple[ClientConnection, socket.socket]) -> None:
    connection, client = greeted(pair)
    requests = [wire.GetAlignment(0), wire.GetAlignment(1), wire.DeviceCount(), wire.GetAlignment(2)]
    data = b"".join(wire.write_request(request, wire.V8) for request in requests)
    client.sendall(data[:-1])
    assert connection.next_request() == requests[0]
    assert connection.following(wire.GetAlignment) == requests[1]
    assert connection.following(wire.GetAlignment) is None and connection.next_request() == requests[2]
    assert connection.following(wire.GetAlignment) is None and connection.has_partial_request
    client.sendall(data[-1:])
    assert connection.next_request() == requests[3] and not connection.has_partial_request
    client.close()
    assert connection.next_request() is None


class RemoteRegion:
    """A region of memory that this process cannot reach."""

    memory = None

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []

    def write(self, start: int, data: memoryview) -> None:
        self.writes.append((start, bytes(data)))


def noise(n: int) -> NDArray[np.uint8]:
    return np.random.default_rng(n).integers(0, 256, n, np.uint8)


def test_data_is_received_in_pieces(
    pair: tuple[ClientConnection, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_CHUNK_BYTES", 4)
    connection, client = greeted(pair)
    request = wire.Deliver(1, 0, 10)
    data = bytes(range(10))
    for _ in range(3):
        client.sendall(wire.write_request(request, wire.V8) + data)
    region = RemoteRegion()
    assert connection.next_request() == request
    connection.receive(cast(Any, region), 100, 10)
    assert region.writes == [(100, data[:4]), (104, data[4:8]), (108, data[8:])]
    assert connection.next_request() == request
    connection.skip()
    assert connection.next_request() == request
    memory = memoryview(bytearray(16))
    connection.receive(cast(Any, SimpleNamespace(memory=memory)), 3, 10)
    assert bytes(memory) == bytes(3) + data + bytes(3)
    client.sendall(wire.write_request(request, wire.V8) + data[:5])
    client.close()
    assert connection.next_request() == request
    with pytest.raises(ConnectionResetError, match="middle of a tensor"):
        connection.receive(cast(Any, region), 0, 10)


@pytest.mark.parametrize("size", [0, 10, 16 << 10, (16 << 10) + 1, 1 << 20])
@pytest.mark.parametrize("accepted", [None, 0, 5, 7, 20_000])
def test_heads_and_data_are_sent_whole(
    pair: tuple[ClientConnection, socket.socket], size: int, accepted: int | None
) -> None:
    """The socket may accept any part of them: `accepted` bytes, or as many as fit."""
    connection, client = pair
    head, data = b"a header", noise(size)

    class Socket:
        def sendmsg(self, parts: tuple[bytes, memoryview]) -> int:
            whole = b"".join(parts)
            return client_end.send(whole if accepted is None else whole[:accepted])

        def sendall(self, part: bytes) -> None:
            client_end.sendall(part)

    client_end = connection.sock
    found = bytearray()

    def receive() -> None:
        while len(found) < len(head) + size:
            found.extend(client.recv(1 << 20))

    thread = threading.Thread(target=receive)
    thread.start()
    connection.sock = cast(Any, Socket())
    connection.send(head, memoryview(data))
    thread.join()
    connection.sock = client_end
    assert found == head + data.tobytes()


def test_shutting_is_seen_by_both_sides(pair: tuple[ClientConnection, socket.socket]) -> None:
    connection, client = greeted(pair)
    assert not connection.is_shut and connection.fileno() == connection.sock.fileno() > 0
    connection.shut()
    assert connection.is_shut and client.recv(1) == b"" and connection.next_request() is None
    connection.shut()
    connection.close()
    assert connection.fileno() == -1


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "the client shows no certificate"),
        ("TLSV13_ALERT_NO_CERTIFICATE", "the client shows no certificate"),
        ("HTTP_REQUEST", "the client does not speak TLS"),
        ("WRONG_VERSION_NUMBER", "the client does not speak TLS"),
        ("UNKNOWN_PROTOCOL", "the client does not speak TLS"),
        ("BAD_RECORD", "bad record"),
    ],
)
def test_reasons_of_failed_tls(reason: str, text: str) -> None:
    error = ssl.SSLError(1, "some text")
    error.reason = reason
    assert _tls_reason(error) == text
    untrusted = ssl.SSLCertVerificationError(1, "x")
    untrusted.reason, untrusted.verify_message = "CERTIFICATE_VERIFY_FAILED", "expired"
    assert _tls_reason(untrusted) == "the client's certificate is not trusted (expired)"
