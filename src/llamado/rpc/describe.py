"""Requests in words, for the log (`GGML_RPC_DEBUG=1`)."""

from __future__ import annotations

import logging
import os

from llamado.rpc.wire import (
    COMMANDS,
    Attach,
    Await,
    Bind,
    CloseInlet,
    CommAllReduce,
    CommInit,
    ConnectNext,
    CopyTensor,
    GetAllocSize,
    GetTensor,
    GetTensor2D,
    GraphCompute,
    Hello,
    InitTensor,
    MemsetTensor,
    Offer,
    Protocol,
    Push,
    Request,
    RequestReader,
    SetTensor,
    SetTensor2D,
    SetTensorHash,
    WireTensor,
)

log = logging.getLogger("llamado.rpc")


def debugging() -> bool:
    """Whether every request is to be logged, as ggml has it: `GGML_RPC_DEBUG` is set, and not 0."""
    return os.environ.get("GGML_RPC_DEBUG", "") not in ("", "0")


class SentRequests:
    """Logs the requests in a stream of bytes to a worker."""

    def __init__(self, to: str) -> None:
        self._to = to
        self._reader = RequestReader()

    @property
    def protocol(self) -> Protocol:
        """What is spoken; to be set once that is known."""
        return self._reader.protocol

    @protocol.setter
    def protocol(self, protocol: Protocol) -> None:
        self._reader.protocol = protocol

    def take(self, sent: bytes | memoryview) -> None:
        """Bytes as they are sent, cut anywhere."""
        reader, data = self._reader, memoryview(sent)
        while len(data):
            n = min(reader.bulk, len(data))
            if n:  # a tensor's bytes: nothing is said of them
                reader.bypass(n)
            else:
                n = len(data)
                reader.feed(data)
                while (request := reader.next()) is not None:
                    log.info("to %s: %s", self._to, describe(request))
                    reader.drop()
            data = data[n:]


def describe(request: Request) -> str:
    """A request in one line; names in it come from strangers, and none of them writes a line of the log."""
    return printable(_words(request))


def _words(request: Request) -> str:
    name = COMMANDS[type(request)].name
    match request:
        case GraphCompute():
            counts = f"{len(request.nodes)} nodes, {len(request.tensors)} tensors"
            return f"{name} device {request.device}, uid {request.uid}, {counts}"
        case SetTensor() | GetTensor():
            return f"{name} {_where(request.tensor)}, {request.size} bytes at {request.offset}"
        case SetTensor2D() | GetTensor2D():
            pieces = f"{request.rows} times {request.row} bytes, {request.stride} apart, from {request.offset}"
            return f"{name} {_where(request.tensor)}, {pieces}"
        case CommAllReduce():
            return f"{name} device {request.device}, {_where(request.tensor)}"
        case CommInit():
            where = f"{request.host.decode('utf-8', 'replace')}:{request.port}"
            return f"{name} device {request.device} is {request.rank} of {request.world} at {where}"
        case Offer() | Bind():
            return f"{name} {len(request.weights)} weights"
        case MemsetTensor():
            return f"{name} {_where(request.tensor)}, {request.size} bytes at {request.offset} to {request.value}"
        case SetTensorHash():
            return f"{name} {_where(request.tensor)}, hash {request.hash:016x} at {request.offset}"
        case InitTensor() | GetAllocSize():
            return f"{name} {_where(request.tensor)}"
        case CopyTensor():
            return f"{name} {_where(request.src)} to {_where(request.dst)}"
        case Push():
            return f"{name} {_where(request.tensor)}, {request.size} bytes by link {request.link}: {request.sequence}"
        case Await():
            return f"{name} {_where(request.tensor)}, {request.size} bytes by inlet {request.inlet}: {request.sequence}"
        case ConnectNext():
            return f"{name} {request.endpoint.decode('utf-8', 'replace')}"
        case Hello() | Attach() | CloseInlet():  # a ticket is a secret
            return name
        case _:
            return " ".join([name, *(f"{key} {value}" for key, value in request._asdict().items())])


def _where(tensor: WireTensor) -> str:
    return f"{name_of(tensor)} (type {tensor.type}, {list(tensor.ne)}, buffer {tensor.buffer}, data {tensor.data:#x})"


def name_of(tensor: WireTensor) -> str:
    """A tensor's name as text, "?" where it has none."""
    return tensor.name.decode("utf-8", "replace") or "?"


def printable(text: str) -> str:
    """Names come from strangers: none of them writes a line of the log."""
    return "".join([c if c.isprintable() else "?" for c in text])
