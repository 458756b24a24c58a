"""A log line for every request to or from a worker (`GGML_RPC_DEBUG=1`)."""

from __future__ import annotations

import logging
import os

from llamado.rpc import wire

log = logging.getLogger("llamado.rpc")


def is_debugging() -> bool:
    """Return True if every request is to be logged: as in ggml, `GGML_RPC_DEBUG` is set and not 0."""
    return os.environ.get("GGML_RPC_DEBUG", "") not in ("", "0")


class SentRequestLog:
    """Logs the requests in a stream of bytes to a worker."""

    def __init__(self, to: str) -> None:
        self._to = to
        self._reader = wire.RequestReader()

    @property
    def protocol(self) -> wire.Protocol:
        """The protocol of the stream, to be set after the greeting."""
        return self._reader.protocol

    @protocol.setter
    def protocol(self, protocol: wire.Protocol) -> None:
        self._reader.protocol = protocol

    def add(self, sent: bytes | memoryview) -> None:
        """Log the requests in bytes that are sent, cut anywhere. Bulk data is skipped."""
        reader, data = self._reader, memoryview(sent)
        while len(data):
            n = min(reader.bulk, len(data))
            if n:
                reader.bypass(n)
            else:
                n = len(data)
                reader.feed(data)
                while (request := reader.next()) is not None:
                    log.info("to %s: %s", self._to, wire.describe(request))
                    reader.drop()
            data = data[n:]
