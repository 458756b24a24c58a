"""Handlers of requests, grouped by concept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from llamado.rpc import wire

Handler = Callable[[Any], wire.Response | None]
R = TypeVar("R")
S = TypeVar("S")
Method = Callable[[S, R], wire.Response | None]


def handles(kind: type[R]) -> Callable[[Method[S, R]], Method[S, R]]:
    """Mark a method of `Handlers` as the handler of one class of requests."""

    def mark(method: Method[S, R]) -> Method[S, R]:
        method.kind = kind  # type: ignore[attr-defined]
        return method

    return mark


class Handlers:
    """The part of a session that serves the requests about one concept, and holds its state.

    A handler returns the response, or None if the request has none or the handler has sent it. A WireError closes the
    connection.
    """

    _names: ClassVar[dict[type[Any], str]] = {}

    def __init_subclass__(cls) -> None:
        cls._names = {method.kind: name for name, method in vars(cls).items() if hasattr(method, "kind")}

    def handlers(self) -> dict[type[Any], Handler]:
        """Return the handlers by the class of their requests."""
        return {kind: getattr(self, name) for kind, name in self._names.items()}

    def interrupt(self) -> None:
        """Make handlers return that wait for another worker; from any thread."""

    def release(self) -> None:
        """Free what the client holds, once no handler runs any more."""
