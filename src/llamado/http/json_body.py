"""Request bodies as JSON, or a 400 that says where it is not."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request

from llamado.engine.sampling.params import MAX_SEED
from llamado.http.bodies import body_of
from llamado.http.errors import invalid

# Arrays and objects inside of each other; schemas of tools nest a few dozen. What walks a body by recursion relies on
# this.
MAX_DEPTH = 200
# How often a character may come, in texts too. While a body is parsed nothing else is answered, and arrays, objects and
# numbers take a hundred times as long as text, and 20 times their size; escapes take ten times as long. With these
# limits it is 30 ms at most. The longest prompts, in numbers, as a table or in Chinese, have fewer.
MAX_COUNTS = {b"[": 60_000, b"{": 60_000, b",": 300_000, b"\\u": 600_000}
# Quotation marks that are not part of a text: two for each key and each string.
MAX_QUOTES = 100_000
# A seed too long for 64 bits, where it is a key's value: an unescaped quotation mark before the name begins or ends no
# other text, since a text is never followed by a colon unless it is a key.
_SEED = b'"seed"'
_LONG_SEED = re.compile(rb'("seed"\s*:\s*)(-?[0-9]{19,}+)(?![.eE])')
# Bytes above which a thread does what can be done without the interpreter's lock.
LONG_BODY = 64 * 1024


# One at a time: each keeps the interpreter for a while, and the event loop shall get it between two of them.
_parser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-json")


def parse_json(body: bytes) -> Any:
    """A body as JSON. Raises ApiError where it is none, or deeper or more split up than anything real."""
    if not body:
        raise invalid("parse error at line 1, column 1: attempting to parse an empty input")
    counts = {character: _count(body, character) for character in MAX_COUNTS}
    for character, most in MAX_COUNTS.items():
        if counts[character] > most:
            raise invalid(f"the request body has more than {most} times '{character.decode()}'")
    if _count(body, b'"') - _count(body, b'\\"') > MAX_QUOTES:
        raise invalid(f"the request body has more than {MAX_QUOTES // 2} strings")
    # The collector of cycles would look through what is there of the value again and again.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = _with_whole_seed(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"parse error at line {error.lineno}, column {error.colno}: {error.msg}") from None
    finally:
        if collects:
            gc.enable()
    if counts[b"["] + counts[b"{"] > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise invalid(f"the request body is nested more than {MAX_DEPTH} levels deep")
    return value


def _count(body: bytes, what: bytes) -> int:
    """How often one or two characters come. `bytes.count` holds the interpreter for 30 ms of 10 MB; numpy does not."""
    if len(body) < LONG_BODY:
        return body.count(what)
    seen = np.frombuffer(body, np.uint8)
    if len(what) == 1:
        return int(np.count_nonzero(seen == what[0]))
    return int(np.count_nonzero((seen[:-1] == what[0]) & (seen[1:] == what[1])))


def _with_whole_seed(body: bytes) -> Any:
    """JSON as orjson reads it, but for a seed of more digits than fit 64 bits: all of them count."""
    numbers: list[bytes] = []

    def shorten(match: re.Match[bytes]) -> bytes:
        numbers.append(match[2])
        return match[1] + (match[2] if len(match[2]) <= 300 else match[2][:300])  # beyond, orjson finds an infinity

    def place(match: re.Match[bytes]) -> bytes:
        numbers.append(match[2])
        return match[1] + b"%d" % (len(numbers) - 1)

    value = orjson.loads(_with_seeds(body, shorten))
    if numbers and isinstance(value, dict) and isinstance(value.get("seed"), float):
        numbers.clear()
        number = orjson.loads(_with_seeds(body, place))["seed"]
        if isinstance(number, int):  # else it is written as a fraction or with an exponent
            if len(numbers[number]) > MAX_SEED:
                raise invalid(f"Field 'seed': more than {MAX_SEED} digits")
            value["seed"] = int(numbers[number])
    return value


def _with_seeds(body: bytes, write: Callable[[re.Match[bytes]], bytes]) -> bytes:
    """A body with its long seeds written anew. A regular expression alone would look at every byte, one by one."""
    parts: list[bytes] = []
    done, at = 0, body.find(_SEED)
    while at >= 0:
        match = None if body[at - 1 : at] == b"\\" else _LONG_SEED.match(body, at)
        if match is not None:
            parts += [body[done:at], write(match)]
            done = match.end()
        at = body.find(_SEED, at + len(_SEED))
    return b"".join([*parts, body[done:]]) if parts else body


def is_deeper(value: Any, levels: int) -> bool:
    """Whether arrays and objects are nested more than `levels` deep; without recursion."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(levels):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is list or type(inner) is dict
        ]
    return bool(level)


async def read_json(request: Request) -> Any:
    """The body as JSON. Raises ApiError."""
    return await parse_body(await body_of(request.scope).read(request.scope, request.receive))


async def parse_body(body: bytes) -> Any:
    """A body as JSON; of a long one, others are answered meanwhile. Raises ApiError."""
    if len(body) <= LONG_BODY:
        return parse_json(body)
    return await asyncio.get_running_loop().run_in_executor(_parser, parse_json, body)


async def read_object(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object without the fields that are null: they count as absent, whatever the endpoint.

    Null and an empty array count as an empty object. Raises ApiError.
    """
    value = await read_json(request)
    if value is None or value == []:
        return {}
    if not isinstance(value, dict):
        raise invalid("the request body must be a JSON object")
    return {name: given for name, given in value.items() if given is not None}
