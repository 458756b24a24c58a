"""The versions of the protocol that this program speaks.

8.0 (ggml-rpc.cpp of llama.cpp b11450, with tensor parallelism) names graphs, so that many can be run again, and has
five more commands. The rest, HELLO above all, is as in 7.0 (b11434). Our own commands are part of both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llamado.rpc.wire.messages import Command
from llamado.rpc.wire.table import MESSAGES, Message

__all__ = ["DEFAULT_GREETING", "LATEST", "PROTOCOLS", "SUPPORTED_VERSIONS", "V7", "V8", "Protocol", "negotiate"]


@dataclass(frozen=True, eq=False)
class Protocol:
    """One version.

    `graphs`: graphs of a device that can be run again; before one more is sent, both sides forget all of them.
    `names_graphs`: GRAPH_COMPUTE and GRAPH_RECOMPUTE have a uid behind the device, 0 for a graph that runs once.
    """

    version: tuple[int, int, int]
    graphs: int
    names_graphs: bool
    messages: dict[int, Message] = field(init=False, repr=False)
    """Rows of the table by command."""
    by_kind: dict[type[Any], Message] = field(init=False, repr=False)
    """Rows by the class of their request; also those of other versions, which only a worker of that version reads."""

    def __post_init__(self) -> None:
        rows = [message for message in MESSAGES if self.major in message.majors]
        object.__setattr__(self, "messages", {message.command: message for message in rows})
        object.__setattr__(self, "by_kind", {message.kind: message for message in [*MESSAGES, *rows]})

    @property
    def major(self) -> int:
        """The part of the version that both sides must share."""
        return self.version[0]

    @property
    def commands(self) -> frozenset[Command]:
        """Commands of this version."""
        return frozenset(message.command for message in self.messages.values())

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


V7 = Protocol((7, 0, 0), graphs=1, names_graphs=False)
V8 = Protocol((8, 0, 0), graphs=1024, names_graphs=True)
PROTOCOLS = {protocol.major: protocol for protocol in (V7, V8)}
LATEST = V8
"""The version between two of our own programs."""
DEFAULT_GREETING = V7
"""The version of a worker's greeting for a client it has not seen before.

A ggml client aborts if the major version is not its own, and its HELLO does not hold it. Our clients accept either and
then send UPGRADE.
"""
SUPPORTED_VERSIONS = " and ".join(map(str, PROTOCOLS.values()))


def negotiate(version: tuple[int, int, int]) -> Protocol | None:
    """Return the protocol to speak with a worker that greets with `version`, None if there is none in common.

    As in ggml, the worker must not have a higher minor version of the same major one.
    """
    protocol = PROTOCOLS.get(version[0])
    return protocol if protocol is not None and version[1] <= protocol.version[1] else None
