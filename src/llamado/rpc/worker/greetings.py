"""In which version each client is greeted: HELLO does not tell which one it speaks, but that it hangs up does."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass

from llamado.rpc.wire import PROTOCOLS, Protocol

log = logging.getLogger("llamado.rpc.worker.server")

_REMEMBERED = 1024
_TOGETHER = 10.0
"""Seconds within which connections are of the same start of a program: llama-server opens a dozen, and uses most."""


@dataclass
class _Spoken:
    """What a client speaks; it went on after being greeted so at these times, if ever."""

    protocol: Protocol
    first: float | None = None
    last: float = 0.0


class Greetings:
    """What is spoken with whom, by address. A client of ggml's that is greeted in another major version than its own
    hangs up, and is greeted in the other one when it comes again.
    """

    def __init__(self, default: Protocol) -> None:
        """`default`: for those who were never here."""
        self._default = default
        self._of: OrderedDict[str, _Spoken] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, host: str) -> Protocol:
        """In which version a client is greeted."""
        known = self._of.get(host)
        return self._default if known is None else known.protocol

    def understood(self, host: str, protocol: Protocol, now: float) -> None:
        """A client went on after a greeting. Times are those of one clock, whichever."""
        with self._lock:
            known = self._of.get(host)
            if known is None or known.protocol is not protocol:
                known = _Spoken(protocol)
            known.first, known.last = now if known.first is None else known.first, now
            self._remember(host, known)

    def refused(self, host: str, protocol: Protocol, opened: float) -> None:
        """A client hung up after a greeting; `opened` is when it came. It may be that it had no use for one connection
        of many.
        """
        with self._lock:
            known = self._of.get(host)
            if known is not None and known.protocol is not protocol:
                return
            first = None if known is None else known.first
            if known is not None and first is not None and first - _TOGETHER < opened < known.last + _TOGETHER:
                return
            other = next(one for one in PROTOCOLS.values() if one is not protocol)
            log.info("%s hung up when it was greeted with RPC %s: next time it is %s", host, protocol, other)
            self._remember(host, _Spoken(other))

    def _remember(self, host: str, known: _Spoken) -> None:
        self._of[host] = known
        self._of.move_to_end(host)
        while len(self._of) > _REMEMBERED:
            self._of.popitem(last=False)
