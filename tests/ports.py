"""Ports for what a test starts and cannot ask for the port it got."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import ExitStack

# Below the ephemeral ports (Linux: 32,768 on), so the system gives none of these to another process between choice and
# use. Every process begins at another number, so that tests that run side by side choose different ports.
_FIRST, _COUNT = 10_000, 20_000
_numbers = itertools.count(os.getpid() * 997)


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free TCP ports of the loopback interface; different ones at each call."""
    while True:
        ports = [_FIRST + next(_numbers) % _COUNT for _ in range(count)]
        with ExitStack() as probes:
            try:
                for port in ports:
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        if ports[-1] - ports[0] == count - 1:
            return ports[0]


def free_port() -> int:
    """Return a free TCP port of the loopback interface; a different one at each call."""
    return free_ports(1)
