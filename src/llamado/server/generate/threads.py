"""What may take long is done beside the event loop, so that it keeps answering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from llamado.server.errors import invalid

T = TypeVar("T")

# Above this many characters, tokenizing or rendering is done by a thread, so that the event loop keeps answering.
LONG_TEXT = 4096

# Above this many characters, a chat waits only behind others of its kind.
LONG_CHAT = 1 << 16

_workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="llamado-text")
# For work that may take a minute and that no answer waits for.
_patient = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-long-text")
# For grammars: the first one waits until the vocabulary is made ready for all of them.
_grammars = ThreadPoolExecutor(max_workers=2, thread_name_prefix="llamado-grammar")
# For chats, which wait for a process that renders their template: long ones behind each other, short ones beside them.
_chats = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-chat")
_long_chats = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-long-chat")


def use_threads(n: int) -> None:
    """Work on long texts with `n` threads (`--threads-http`)."""
    global _workers
    _workers = ThreadPoolExecutor(max_workers=n, thread_name_prefix="llamado-text")


async def off_loop(work: Callable[[], T], size: float, *, patient: bool = False) -> T:
    """Run `work` here when `size` characters are few, else in a thread."""
    return _shallow(work) if size <= LONG_TEXT else await in_thread(work, patient=patient)


async def in_thread(work: Callable[[], T], *, patient: bool = False) -> T:
    """Run `work` in a thread, so that the event loop keeps answering; `patient` work waits for others of its kind."""
    return await _in(_patient if patient else _workers, work)


async def off_loop_grammar(work: Callable[[], T]) -> T:
    """Run `work`, which compiles a grammar, in a thread where nothing but grammars waits for it."""
    return await _in(_grammars, work)


async def off_loop_chat(work: Callable[[], T], body: Mapping[str, Any]) -> T:
    """Run `work`, which renders the chat of a body, in a thread: a template may take its time."""
    size = max(map(size_of, body.values()), default=0)
    return await _in(_long_chats if size > LONG_CHAT else _chats, work)


async def _in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: _shallow(work))


def _shallow(work: Callable[[], T]) -> T:
    try:
        return work()
    except RecursionError:
        # orjson reads up to 1,024 levels; what walks through them in Python gives up earlier.
        raise invalid("the request's JSON is nested too deeply") from None


def size_of(value: Any) -> int:
    """Roughly how many characters of text a JSON value holds; what is beyond LONG_TEXT does not count."""
    size, todo = 0, [value]
    while todo and size <= LONG_TEXT:
        item = todo.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, (list, dict)):
            size += len(item)
            todo += (item if isinstance(item, list) else item.values()) if len(item) <= LONG_TEXT else ()
        else:
            size += 1
    return size
