"""The versions of the protocol that are spoken, and what differs between them.

8.0 (ggml-rpc.cpp of llama.cpp b11450, with tensor parallelism) gives graphs names, so that many can be run again, and
has five more commands. All else, HELLO above all, is as in 7.0 (b11434). Ours are part of both.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamado.rpc.wire.messages import Command


@dataclass(frozen=True)
class Protocol:
    """One version.

    `graphs`: how many of a device can be run again; before one more is sent, both sides forget all of them.
    `names_graphs`: GRAPH_COMPUTE and GRAPH_RECOMPUTE have a uid behind the device, 0 for one that is not run again.
    """

    version: tuple[int, int, int]
    commands: frozenset[Command]
    graphs: int
    names_graphs: bool

    @property
    def major(self) -> int:
        """The part that both sides must have in common."""
        return self.version[0]

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


_OF_8 = frozenset(
    {Command.SET_TENSOR_2D, Command.GET_TENSOR_2D, Command.COMM_INIT, Command.COMM_ALLREDUCE, Command.COMM_FREE}
)
V7 = Protocol((7, 0, 0), frozenset(Command) - _OF_8, graphs=1, names_graphs=False)
V8 = Protocol((8, 0, 0), frozenset(Command), graphs=1024, names_graphs=True)
PROTOCOLS = {protocol.major: protocol for protocol in (V7, V8)}
LATEST = V8
"""Two of our own programs speak it."""
FIRST = V7
"""Version in which a worker greets clients that were never there. A ggml client aborts if the major version is not its
own, and its HELLO does not hold it; our clients take either, and then send UPGRADE.
"""
SPOKEN = " and ".join(map(str, PROTOCOLS.values()))


def spoken(version: tuple[int, int, int]) -> Protocol | None:
    """What is spoken with a worker that greets with this version; None where the two do not understand each other.

    As in ggml, the worker must not have a higher minor version of the same major one.
    """
    protocol = PROTOCOLS.get(version[0])
    return protocol if protocol is not None and version[1] <= protocol.version[1] else None
