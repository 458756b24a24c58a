"""Prompts in all shapes llama-server takes: text, tokens, both mixed, objects, and arrays of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from llamado.server.errors import invalid
from llamado.server.generate.json_values import type_name
from llamado.server.loaded_model import Tokenizer

T = TypeVar("T")

# Above this many characters, tokenizing or rendering is done by a thread, so that the event loop keeps answering.
LONG_TEXT = 4096

# Above this many characters, a chat waits only behind others of its kind.
LONG_CHAT = 1 << 16

# Characters of one text. A prompt of a million tokens has about half as many; a single word of this length, which no
# text has but a hostile one, takes a minute.
MOST_TEXT = 1 << 23

_SHAPES = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt string, or a list of '
    "mixed strings & tokens."
)
_workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="llamado-text")
# For work that may take a minute and that no answer waits for.
_patient = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-long-text")
# For chats, which wait for a process that renders their template: long ones behind each other, short ones beside them.
_chats = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-chat")
_long_chats = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-long-chat")


def use_threads(n: int) -> None:
    """Work on long texts with `n` threads (`--threads-http`)."""
    global _workers
    _workers = ThreadPoolExecutor(max_workers=n, thread_name_prefix="llamado-text")


async def off_loop(work: Callable[[], T], size: int, *, patient: bool = False) -> T:
    """Run `work` here when `size` characters are few, else in a thread."""
    return _shallow(work) if size <= LONG_TEXT else await in_thread(work, patient=patient)


async def in_thread(work: Callable[[], T], *, patient: bool = False) -> T:
    """Run `work` in a thread, so that the event loop keeps answering; `patient` work waits for others of its kind."""
    return await _in(_patient if patient else _workers, work)


async def off_loop_chat(work: Callable[[], T], size: int) -> T:
    """Run `work`, which renders a chat of `size` characters, in a thread: a template may take its time."""
    return await _in(_long_chats if size > LONG_CHAT else _chats, work)


async def _in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: _shallow(work))


def _shallow(work: Callable[[], T]) -> T:
    try:
        return work()
    except RecursionError:
        # orjson reads up to 1,024 levels; what walks through them in Python gives up earlier.
        raise invalid("the request's JSON is nested too deeply") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def encode(text: str, tokenizer: Tokenizer, *, add_special: bool, parse_special: bool) -> list[int]:
    """A text's tokens. Raises ApiError where it is longer than any prompt."""
    if len(text) > MOST_TEXT:
        raise invalid(f"a text of {len(text)} characters is too long; at most {MOST_TEXT} are allowed")
    return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)


def tokenize_mixed(content: Any, tokenizer: Tokenizer, *, add_special: bool, parse_special: bool) -> list[int]:
    """A string, or a list of strings and tokens; only a string that comes first gets BOS. Raises ApiError."""
    if isinstance(content, str):
        return encode(content, tokenizer, add_special=add_special, parse_special=parse_special)
    if not isinstance(content, list):
        raise invalid(f"type must be string, but is {type_name(content)}")
    tokens: list[int] = []
    for i, item in enumerate(content):
        if isinstance(item, str):
            tokens += encode(item, tokenizer, add_special=add_special and i == 0, parse_special=parse_special)
        elif isinstance(item, (int, float)):
            tokens.append(int(item))
        else:
            raise invalid(f"type must be number, but is {type_name(item)}")
    return tokens


def _one(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return encode(prompt, tokenizer, add_special=True, parse_special=True)
    if isinstance(prompt, list):
        if all(_is_int(item) for item in prompt):
            return list(prompt)
        if any(_is_int(item) for item in prompt) and any(isinstance(item, str) for item in prompt):
            return tokenize_mixed(prompt, tokenizer, add_special=True, parse_special=True)
    elif isinstance(prompt, dict) and "prompt_string" in prompt:
        if prompt.get("multimodal_data") is not None:
            raise invalid("Multimodal data provided, but model does not support multimodal requests.")
        return tokenize_mixed(prompt["prompt_string"], tokenizer, add_special=True, parse_special=True)
    raise invalid(_SHAPES)


def tokenize_prompts(prompt: Any, tokenizer: Tokenizer, *, most: int) -> list[list[int]]:
    """All prompts of a request, `most` of them, as tokens.

    Raises ApiError for a wrong shape, too many prompts, or a token outside the vocabulary.
    """
    if isinstance(prompt, list) and not any(_is_int(item) for item in prompt):
        if len(prompt) > most:
            raise invalid(f"{len(prompt)} prompts in one request; at most {most} are allowed")
        prompts = [_one(item, tokenizer) for item in prompt]
    else:
        prompts = [_one(prompt, tokenizer)]
    if not prompts:
        raise invalid('"prompt" must not be empty')
    n_vocab = tokenizer.n_vocab
    for tokens in prompts:
        if tokens and not (min(tokens) >= 0 and max(tokens) < n_vocab):
            raise invalid("Prompt contains invalid tokens")
    return prompts


def characters(prompt: Any) -> int:
    """How many characters of text a prompt in one of its shapes holds at most."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, dict):
        return characters(prompt.get("prompt_string"))
    return sum(len(item) for item in prompt if isinstance(item, str)) if isinstance(prompt, list) else 0


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
