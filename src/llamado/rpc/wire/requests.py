"""Requests to bytes, and bytes to requests."""

from __future__ import annotations

from typing import cast

from llamado.rpc.wire.buffer import MessageBuffer
from llamado.rpc.wire.graph import HEAD
from llamado.rpc.wire.messages import MAX_MESSAGE, Command, Request, Upgrade, WireError
from llamado.rpc.wire.protocols import LATEST, PROTOCOLS, SUPPORTED_VERSIONS, Protocol

__all__ = ["RequestReader", "write_request"]


def write_request(request: Request, protocol: Protocol = LATEST) -> bytes:
    """Return the bytes of a request. The caller sends its `size` bytes of bulk data, if it has any.

    Only GRAPH_COMPUTE and GRAPH_RECOMPUTE differ between versions.

    >>> from llamado.rpc import wire
    >>> write_request(wire.GetAlignment(0)).hex()
    '01040000000000000000000000'
    """
    return protocol.by_kind[type(request)].encode(request)


class RequestReader(MessageBuffer):
    """The worker's side: requests from bytes.

    `max_message`: most bytes of one request held in memory. `protocol`: the version; it may be set until the request
    after HELLO arrives, and UPGRADE sets it, too.
    """

    def __init__(self, max_message: int = MAX_MESSAGE, protocol: Protocol = LATEST) -> None:
        super().__init__()
        self.protocol = protocol
        self._max_message = max_message
        self._greeted = self._follows_hello = False

    def next(self) -> Request | None:
        """Return the next request, None until more bytes are fed. The reader is of no use after a WireError."""
        held = self._held
        if self.bulk or not held:
            return None
        message = self.protocol.messages.get(held[0])
        if message is None or not (self._greeted or message.command is Command.HELLO):
            raise self._refusal(held[0])
        if len(held) < HEAD.size:
            return None
        size = HEAD.unpack_from(held)[1]
        fault = message.fault(size)
        if fault is not None:
            raise WireError(f"{message.command.name} of {size} bytes; {fault}")
        bulk = 0
        if message.has_data:
            bulk = size - cast(int, message.layout.size)
            size -= bulk
        elif size > self._max_message:
            raise WireError(f"{message.command.name} of {size} bytes; at most {self._max_message} are accepted")
        end = HEAD.size + size
        if len(held) < end:
            return None
        payload = bytes(memoryview(held)[HEAD.size : end])
        del held[:end]
        self.bulk = bulk
        request: Request = message.decode(payload, bulk)
        if message.command is Command.HELLO:
            if self._greeted:
                raise WireError("a second HELLO")
            self._greeted = self._follows_hello = True
            return request
        if isinstance(request, Upgrade):
            if not self._follows_hello or request.major not in PROTOCOLS:
                raise WireError(
                    f"UPGRADE to RPC {request.major}; this program speaks {SUPPORTED_VERSIONS}, from HELLO on"
                )
            self.protocol = PROTOCOLS[request.major]
        self._follows_hello = False
        return request

    def _refusal(self, number: int) -> WireError:
        """Return the error for the first byte of a request that must not come now."""
        try:
            command = Command(number)
        except ValueError:
            return WireError(f"command {number} is not known")
        if not self._greeted and command is not Command.HELLO:
            return WireError(f"{command.name} before HELLO")
        return WireError(f"{command.name} is no command of RPC {self.protocol}, which the two sides agreed on")
