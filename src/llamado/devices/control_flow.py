"""Control flow in LLVM IR, for the languages of kernels. Conditions are i1 values of llvmlite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def repeated_while(builder: Any, condition: Callable[[], Any]) -> Iterator[None]:
    """Emit a loop that runs the body while the condition, which is emitted before each turn, holds."""
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    builder.cbranch(condition(), body, after)
    builder.position_at_end(body)
    yield
    builder.branch(head)
    builder.position_at_end(after)


@contextmanager
def repeated(builder: Any) -> Iterator[Any]:
    """Emit an endless loop; `leave` inside it ends it."""
    body, after = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    yield after
    builder.branch(body)
    builder.position_at_end(after)


def leave(builder: Any, loop: Any, condition: Any) -> None:
    """Leave a loop of `repeated` if the condition holds."""
    on = builder.append_basic_block("on")
    builder.cbranch(condition, loop, on)
    builder.position_at_end(on)


@contextmanager
def run_if(builder: Any, condition: Any) -> Iterator[None]:
    """Run the body if the condition holds."""
    body, after = builder.append_basic_block("then"), builder.append_basic_block("after")
    builder.cbranch(condition, body, after)
    builder.position_at_end(body)
    yield
    builder.branch(after)
    builder.position_at_end(after)
