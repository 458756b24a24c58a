"""The protocol version in which a worker greets each client.

HELLO does not hold a client's version, is equally long in every version, and a client of ggml ends its process if the
major version in the answer is not its own. So the first greeting is a guess, and the address of a client that turned
out to speak the other version is remembered, also on disk. Our own clients take any version and send UPGRADE.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llamado.rpc import wire

log = logging.getLogger("llamado.rpc.worker.server")

_REMEMBERED = 1024
_TOGETHER = 10.0
"""Seconds within which connections belong to one start of a program: llama-server opens a dozen and uses most."""
_SAVE_INTERVAL = 5.0
"""Least seconds between two writes of the file: clients decide when there is something to write."""


@dataclass
class _ClientProtocol:
    """The protocol of a client, and when the client first and last went on after a greeting in it."""

    protocol: wire.Protocol
    first: float | None = None
    last: float = 0.0


class Greetings:
    """Protocol versions by client address. Safe to use from several threads."""

    def __init__(self, default: wire.Protocol, file: Path | None = None) -> None:
        """`default`: for unknown addresses. `file`: stores the addresses that need another version."""
        self._default = default
        self._file = file
        self._of: OrderedDict[str, _ClientProtocol] = OrderedDict()
        self._lock = threading.Lock()
        self._saved = self._read()
        self._next_save = 0.0
        for host, protocol in self._saved.items():
            self._remember(host, _ClientProtocol(protocol))

    def of(self, host: str) -> wire.Protocol:
        """Return the protocol of a client's greeting."""
        known = self._of.get(host)
        return self._default if known is None else known.protocol

    def record_accepted(self, host: str, protocol: wire.Protocol, now: float) -> None:
        """Record that a client went on after a greeting. Times are seconds of one clock."""
        with self._lock:
            known = self._of.get(host)
            if known is None or known.protocol is not protocol:
                known = _ClientProtocol(protocol)
            known.first, known.last = now if known.first is None else known.first, now
            self._remember(host, known)
            self._save(host, protocol, now)

    def record_refused(self, host: str, protocol: wire.Protocol, opened: float) -> None:
        """Record that a client hung up after a greeting; `opened` is when it connected.

        It may also have had no use for one connection of many, so a version that this start of a client went on with
        is kept.
        """
        with self._lock:
            known = self._of.get(host)
            if known is not None and known.protocol is not protocol:
                return
            first = None if known is None else known.first
            if known is not None and first is not None and first - _TOGETHER < opened < known.last + _TOGETHER:
                return
            other = next(one for one in wire.PROTOCOLS.values() if one is not protocol)
            log.info("%s: hung up after a greeting with RPC %s; its next greeting is %s", host, protocol, other)
            self._remember(host, _ClientProtocol(other))

    def _remember(self, host: str, known: _ClientProtocol) -> None:
        self._of[host] = known
        self._of.move_to_end(host)
        while len(self._of) > _REMEMBERED:
            self._of.popitem(last=False)

    def _read(self) -> dict[str, wire.Protocol]:
        """Return the addresses in the file; none if it is missing or damaged."""
        if self._file is None:
            return {}
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(host): wire.PROTOCOLS[major] for host, major in list(found.items())[-_REMEMBERED:]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _save(self, host: str, protocol: wire.Protocol, now: float) -> None:
        """Store the protocol version of one address in the file."""
        if self._file is None or now < self._next_save or self._saved.get(host, self._default) is protocol:
            return
        self._next_save = now + _SAVE_INTERVAL
        self._saved = self._read()  # another worker of this machine may have written it
        self._saved.pop(host, None)
        if protocol is not self._default:
            self._saved[host] = protocol
        kept = dict(list(self._saved.items())[-_REMEMBERED:])
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({one: protocol.major for one, protocol in kept.items()}), encoding="utf-8")
            temporary.replace(self._file)
        except OSError as error:
            log.warning("%s: not written: %s; clients are greeted anew after a restart", self._file, error)
            with suppress(OSError):
                temporary.unlink()
