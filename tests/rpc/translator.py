"""A translator between protocols 7.0 and 8.0, from the public description alone: it uses no line of the codec.

| 7.0 | 8.0 |
|---|---|
| HELLO's response begins with 7 | 8 |
| GRAPH_COMPUTE: device u32, nodes… | device u32, uid u64, nodes…; kept under its uid unless that is 0 |
| GRAPH_RECOMPUTE: device u32, the last graph | device u32, uid u64 |

Before a graph with a uid is kept while 1,024 of its device are, all of them are forgotten. FREE_BUFFER makes all kept
graphs unusable, and an unknown graph ends the connection.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from types import TracebackType

FREE_BUFFER, GRAPH_COMPUTE, HELLO, GRAPH_RECOMPUTE, UPGRADE = 4, 10, 14, 16, 0x4A
MOST = 1024


class Translator:
    """`newer`: a worker of 8.0 in front of one of 7.0 at `port`; otherwise a worker of 7.0 in front of one of 8.0.

    `seen` counts commands of the client.
    """

    def __init__(self, port: int, *, newer: bool) -> None:
        self.target, self.newer = port, newer
        self.seen: Counter[int] = Counter()
        self.refused: list[str] = []
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Translator:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for sock in (self._listener, *self._open):
            _end(sock)

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            try:
                worker = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # it is about to start
                client.close()
                continue
            for sock in (client, worker):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open += [client, worker]
            threading.Thread(target=self._requests, args=(client, worker), daemon=True).start()
            threading.Thread(target=self._answers, args=(worker, client), daemon=True).start()

    def _answers(self, worker: socket.socket, client: socket.socket) -> None:
        try:
            said = bytearray(_exactly(worker, 8 + 28))
            said[8] = 8 if self.newer else 7
            client.sendall(said)
            while data := worker.recv(1 << 16):
                client.sendall(data)
        except OSError:
            pass
        _end(client)

    def _requests(self, client: socket.socket, worker: socket.socket) -> None:
        kept: dict[int, dict[int, bytes | None]] = {}
        last = 0
        try:
            while True:
                command, size = struct.unpack("<BQ", _exactly(client, 9))
                payload = _exactly(client, size)
                if command == UPGRADE:  # of our clients, which would leave the version that is made here
                    continue
                self.seen[command] += 1
                if self.newer:
                    if command == FREE_BUFFER:
                        for graphs in kept.values():
                            graphs.update(dict.fromkeys(graphs))
                    if command == GRAPH_COMPUTE:
                        device, uid = struct.unpack_from("<IQ", payload)
                        payload = payload[:4] + payload[12:]
                        graphs = kept.setdefault(device, {})
                        if uid:
                            if len(graphs) >= MOST:
                                graphs.clear()
                            graphs[uid] = payload
                    elif command == GRAPH_RECOMPUTE:
                        device, uid = struct.unpack("<IQ", payload)
                        graph = kept.get(device, {}).get(uid)
                        if graph is None:
                            self.refused.append(f"graph {uid} of device {device} is not there")
                            break
                        command, payload = GRAPH_COMPUTE, graph
                elif command == GRAPH_COMPUTE:
                    last += 1
                    payload = payload[:4] + struct.pack("<Q", last) + payload[4:]
                elif command == GRAPH_RECOMPUTE:
                    payload += struct.pack("<Q", last)
                worker.sendall(struct.pack("<BQ", command, len(payload)) + payload)
        except OSError:
            pass
        _end(worker)
        _end(client)


def _exactly(sock: socket.socket, n: int) -> bytes:
    found = bytearray()
    while len(found) < n:
        data = sock.recv(min(n - len(found), 1 << 20))
        if not data:
            raise ConnectionResetError
        found += data
    return bytes(found)


def _end(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()
