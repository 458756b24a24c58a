"""Ports for what a test starts and cannot ask for the port it got."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import ExitStack

# Below those that the system gives to whoever asks for any (Linux: 32,768 on): nobody else gets one of these between
# its choice and its use. Every process begins elsewhere, so that tests side by side choose others.
_FIRST, _COUNT = 10_000, 20_000
_numbers = itertools.count(os.getpid() * 997)


def free_ports(count: int) -> int:
    """The first of `count` TCP ports in a row of the loopback interface that nobody listens on; others at each call."""
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
    """A TCP port of the loopback interface that nobody listens on; another one at each call."""
    return free_ports(1)
