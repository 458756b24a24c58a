"""Thread pools for work that would block the event loop: tokenizing, rendering of chats, grammars, files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from llamado.server.errors import invalid

T = TypeVar("T")

# Texts of more than this many characters are tokenized and written in a thread, the others in the event loop.
LONG_TEXT = 4096

# Chats of more than this many characters have a thread of their own, so that short ones do not wait for them.
LONG_CHAT = 1 << 16

_workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="llamado-text")
# Work of up to a minute that delays no generation.
_background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-long-text")
# Grammars: compiling the first one includes preparing the vocabulary for all of them.
_grammars = ThreadPoolExecutor(max_workers=2, thread_name_prefix="llamado-grammar")
# Chats, whose thread waits for the process that renders their template.
_chats = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-chat")
_long_chats = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-long-chat")


def use_threads(n: int) -> None:
    """Set the number of threads for long texts (`--threads-http`)."""
    global _workers
    _workers = ThreadPoolExecutor(max_workers=n, thread_name_prefix="llamado-text")


async def off_loop(work: Callable[[], T], size: float, *, background: bool = False) -> T:
    """Run `work` in the event loop if `size` is at most LONG_TEXT characters, else in a thread."""
    return _run(work) if size <= LONG_TEXT else await in_thread(work, background=background)


async def in_thread(work: Callable[[], T], *, background: bool = False) -> T:
    """Run `work` in a thread; `background`: in the one thread for work of up to a minute."""
    return await _run_in(_background if background else _workers, work)


async def off_loop_grammar(work: Callable[[], T]) -> T:
    """Run `work`, which compiles a grammar, in a thread for grammars: it may take seconds."""
    return await _run_in(_grammars, work)


async def off_loop_chat(work: Callable[[], T], body: Mapping[str, Any]) -> T:
    """Run `work`, which renders the chat of a body, in a thread for chats: a template may be slow."""
    size = max(map(size_of, body.values()), default=0)
    return await _run_in(_long_chats if size > LONG_CHAT else _chats, work)


async def _run_in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: _run(work))


def _run(work: Callable[[], T]) -> T:
    try:
        return work()
    except RecursionError:
        # orjson reads up to 1,024 levels; Python code that recurses through them fails earlier.
        raise invalid("the request's JSON is nested too deeply") from None


def size_of(value: Any) -> int:
    """Return roughly the number of characters of text in a JSON value; stops counting above LONG_TEXT."""
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
