"""Compile on a thread with a deep stack: llguidance recurses into nested grammars and could overflow the stack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from llamado.text.grammar.source import GrammarError

_STACK = 1 << 27  # bytes

_T = TypeVar("_T")
_one_at_a_time = threading.Lock()


def with_deep_stack(work: Callable[[], _T]) -> _T:
    """Run a function on a new thread with a large stack; one at a time, so that malicious grammars cost one
    core only.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    with _one_at_a_time:
        before = threading.stack_size(_STACK)
        thread = threading.Thread(target=run, name="grammar")
        try:
            thread.start()
        finally:
            threading.stack_size(before)
        thread.join()
    if not errors:
        return results[0]
    if isinstance(errors[0], Exception):
        raise errors[0]
    raise GrammarError(f"the grammar cannot be compiled: {str(errors[0])[:500]}")  # a bug in llguidance
