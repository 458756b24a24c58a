"""Records of a tap: each message as a line of JSON, and a summary table."""

from __future__ import annotations

import random
import statistics
import threading
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.table import Table

from llamado.errors import LlamadoError
from llamado.ggml.ops import Op
from llamado.gguf.types import TensorType
from llamado.rpc import wire
from llamado.rpc.tap.framing import GRAPHS, RESPONSE_HEAD, Message, command_name

_KEPT_TIMES = 20_000
_RATE_BYTES = 1 << 20


class TraceError(LlamadoError):
    """The trace file cannot be written."""


class RequestDecoder:
    """Decodes the requests of one connection, in order, to fields of the trace."""

    def __init__(self) -> None:
        self._reader = wire.RequestReader()

    def greeted(self, response: Message) -> None:
        """Take the protocol version of later requests from HELLO's response."""
        try:
            version = tuple(response.payload[:3])
            protocol = wire.negotiate((version[0], version[1], version[2]))
        except IndexError:
            return
        if protocol is not None:
            self._reader.protocol = protocol

    def describe(self, message: Message) -> dict[str, Any]:
        """Return the fields of a request, or a `note` with its fault."""
        try:
            self._reader.feed(message.kept)
            request = self._reader.next()
            if request is None:
                raise wire.WireError(f"{command_name(message.command)} of {message.size} bytes is not complete")
            self._reader.drop()
            self._reader.bypass(self._reader.bulk)
            return request_fields(request)
        except wire.WireError as error:
            # The reader cannot go on after an error, but later requests may be valid: start a new one past HELLO.
            self._reader = wire.RequestReader(protocol=self._reader.protocol)
            self._reader.feed(wire.write_request(wire.Hello()))
            self._reader.next()
            return {"note": str(error)}


def request_fields(request: wire.Request) -> dict[str, Any]:
    """Return the fields of a request by name; graphs as counts and a histogram of their operations."""
    if isinstance(request, wire.GraphCompute):
        counts = {"n_nodes": len(request.nodes), "n_tensors": len(request.tensors)}
        return {"device": request.device, "uid": request.uid, **counts, "ops": op_histogram(request)}
    if isinstance(request, wire.Offer | wire.Bind):
        return {"weights": len(request.weights)}
    if isinstance(request, wire.Hello):
        return {"caps": request.caps.hex()} if any(request.caps) else {}
    if isinstance(request, wire.GetAllocSize):
        # Unused places are tensors of zeros.
        sources = [_tensor(source) for source in request.srcs if source.ne != (0, 0, 0, 0)]
        return {"device": request.device, "tensor": _tensor(request.tensor), "sources": sources}
    fields = request._asdict()
    fields.pop("ticket", None)  # a secret
    for name, value in fields.items():
        if isinstance(value, wire.WireTensor):
            fields[name] = _tensor(value)
        elif isinstance(value, bytes):
            fields[name] = value.decode("utf-8", "replace")
    return fields


def _tensor(tensor: wire.WireTensor) -> dict[str, Any]:
    try:
        type_ = TensorType(tensor.type).name
    except ValueError:
        type_ = f"type {tensor.type}"
    return {"name": tensor.name.decode(errors="replace"), "type": type_, "ne": tensor.ne, "buffer": tensor.buffer}


def op_histogram(graph: wire.GraphCompute) -> dict[str, int]:
    """Return the number of nodes by operation. `missing`: nodes whose tensor was not sent."""
    ids = graph.tensors["id"]
    order = np.argsort(ids, kind="stable")
    found: Counter[str] = Counter()
    if len(ids):
        at = order[np.minimum(np.searchsorted(ids, graph.nodes, sorter=order), len(ids) - 1)]
        known = ids[at] == graph.nodes
        numbers, counts = np.unique(graph.tensors["op"][at[known]], return_counts=True)
        found.update({_op_name(n): c for n, c in zip(numbers.tolist(), counts.tolist(), strict=True)})
        missing = int(len(known) - known.sum())
    else:
        missing = len(graph.nodes)
    if missing:
        found["missing"] = missing
    return dict(found.most_common())


def _op_name(number: int) -> str:
    try:
        return Op(number).name
    except ValueError:
        return f"op {number}"


def response_fields(message: Message) -> dict[str, Any]:
    """Return the `value` of a response other than data, or a `note` with its fault."""
    if message.command is None or message.command in wire.DATA:
        return {}
    form = wire.response_form(wire.Command(message.command))
    assert form is not None
    size = message.size - RESPONSE_HEAD.size
    if size != form.layout.size:
        return {"note": f"{command_name(message.command)} was answered with {size} bytes; it is {form.layout.size}"}
    response = form.kind(*form.layout.unpack(message.payload))
    if isinstance(response, wire.Number):
        return {"value": response.value}
    if isinstance(response, wire.HelloResponse):
        version = f"{response.major}.{response.minor}.{response.patch}"
        return {"value": {"version": version, "llamado": response.is_ours}}
    if isinstance(response, wire.InletTicket):
        return {"value": response.number}
    return {"value": response._asdict()}


class Trace:
    """A file of JSON lines. Raises TraceError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise TraceError(f"--trace {path}: {error.strerror}") from None
        self._since = time.time() - time.perf_counter()

    def write(self, at: float, connection: int, **fields: Any) -> None:
        """Write one line. `at`: a time of `time.perf_counter`, written as seconds since 1970."""
        line = {"time": round(self._since + at, 6), "connection": connection, **fields}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        self._file.close()


class CommandTotals:
    """Totals of one command."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self.seconds = array("d")
        """Seconds from a request's last byte to its response's: a random sample of at most _KEPT_TIMES."""
        self._answered = 0
        self._streamed, self._streaming = 0, 0.0

    def add(self, message: Message) -> None:
        """Count a complete request or response."""
        self.bytes += message.size
        # The bytes of the first read arrived before its time was taken.
        self._streamed += message.size - message.first
        self._streaming += message.ended - message.began
        if message.request is None:
            self.count += 1
            return
        self._answered += 1
        seconds = message.due - message.request.ended
        if len(self.seconds) < _KEPT_TIMES:
            self.seconds.append(seconds)
        elif (place := random.randrange(self._answered)) < _KEPT_TIMES:
            self.seconds[place] = seconds

    @property
    def mean(self) -> float | None:
        """Mean seconds to the response."""
        return statistics.fmean(self.seconds) if self.seconds else None

    @property
    def most(self) -> float | None:
        """95th percentile of the seconds to the response."""
        return sorted(self.seconds)[(95 * len(self.seconds) - 1) // 100] if self.seconds else None

    @property
    def rate(self) -> float | None:
        """Bytes per second of messages too large for one read."""
        return self._streamed / self._streaming if self._streamed >= _RATE_BYTES and self._streaming > 0 else None


class Summary:
    """Totals by command, safe to use from several threads."""

    def __init__(self) -> None:
        self.rows: dict[int, CommandTotals] = {}
        self.connections = 0
        self.first_graph: float | None = None
        self.last_graph = 0.0
        self._lock = threading.Lock()

    def add(self, message: Message) -> None:
        """Count a complete request or response."""
        if message.command is None:
            return
        with self._lock:
            self.rows.setdefault(message.command, CommandTotals()).add(message)
            if message.command in GRAPHS:
                self.first_graph = message.ended if self.first_graph is None else self.first_graph
                self.last_graph = message.ended

    def opened(self) -> int:
        """Return the number of a new connection, from 1 on."""
        with self._lock:
            self.connections += 1
            return self.connections

    def table(self) -> Table:
        """Return the table. Its caption has the rate of graphs, about the rate of tokens during generation."""
        table = Table(title="Traffic", caption_justify="left")
        table.add_column("command")
        for name in ("count", "bytes", "mean ms", "95 % ms", "MB/s"):
            table.add_column(name, justify="right")
        with self._lock:
            for command, row in sorted(self.rows.items()):
                times = ["" if s is None else f"{1e3 * s:.2f}" for s in (row.mean, row.most)]
                rate = "" if row.rate is None else f"{1e-6 * row.rate:.0f}"
                table.add_row(command_name(command), f"{row.count:,}", f"{row.bytes:,}", *times, rate)
            first, again = (self.rows[c].count if c in self.rows else 0 for c in sorted(GRAPHS))
            caption = f"{self.connections} connections; {first} graphs, {again} runs of graphs sent before"
            if self.first_graph is not None and self.last_graph > self.first_graph:
                seconds = self.last_graph - self.first_graph
                caption += f" (about one a token): {(first + again - 1) / seconds:.1f} a second over {seconds:.1f} s"
            table.caption = caption
        return table
