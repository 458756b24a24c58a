"""Readiness check of a worker by HELLO. An open port is not enough: a frozen process also accepts connections."""

from __future__ import annotations

import socket
import ssl
import time

from llamado.client.health import Phase, State
from llamado.rpc.wire import (
    COMMANDS,
    LATEST,
    SPOKEN,
    DeviceCount,
    Hello,
    HelloResponse,
    ResponseReader,
    Upgrade,
    WireError,
    spoken,
    write_request,
)


def greet(address: tuple[str, int], timeout: float, tls: ssl.SSLContext | None = None) -> State:
    """Return the state of a worker: ready if it answers HELLO within `timeout` seconds. With `tls`, connect by TLS."""
    deadline = time.monotonic() + timeout
    accepted = False
    try:
        with socket.create_connection(address, timeout) as plain:
            accepted = True
            with plain if tls is None else tls.wrap_socket(plain, server_hostname=address[0]) as connection:
                reader = ResponseReader()
                reader.expect(COMMANDS[Hello])
                connection.sendall(write_request(Hello()))
                while (found := reader.next()) is None:
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
                    data = connection.recv(256)
                    if not data:
                        return State(Phase.UNHEALTHY, "closes the connection instead of greeting: no ggml RPC worker?")
                    reader.feed(data)
                if isinstance(found[1], HelloResponse) and found[1].ours:
                    # A client that disconnects right after HELLO looks like one of ggml's that needs another version.
                    connection.sendall(write_request(Upgrade(LATEST.major)) + write_request(DeviceCount()))
                    connection.recv(256)
    except TimeoutError:
        if not accepted:
            return State(Phase.CONNECTING, f"no connection within {timeout:.2g} s; is the address right?")
        return State(
            Phase.CONNECTING,
            f"accepts connections, but does not greet within {timeout:.2g} s (ggml's worker serves one client at a "
            "time: is another one connected?)",
        )
    except WireError as error:
        return State(Phase.UNHEALTHY, f"something else answers there: {error}")
    except OSError as error:
        return State(Phase.CONNECTING, f"cannot connect: {error.strerror or error}")
    hello = found[1]
    assert isinstance(hello, HelloResponse)
    version = (hello.major, hello.minor, hello.patch)
    if spoken(version) is None:
        theirs = ".".join(map(str, version))
        return State(Phase.UNHEALTHY, f"it speaks RPC {theirs}, this program {SPOKEN}: use a llama.cpp of one of these")
    return State(Phase.READY, "ready")
