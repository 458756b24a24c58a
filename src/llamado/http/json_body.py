"""JSON request bodies. Malformed or hostile ones raise 400 with the position or the limit."""

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
from llamado.http.long_strings import LONG, NO_STRINGS, take_long_strings

# Nesting depth; tool schemas nest a few dozen levels. Recursive code over bodies relies on this limit.
MAX_DEPTH = 200
# Most occurrences of a character, including inside strings that are parsed (see long_strings). Parsing holds the GIL:
# arrays, objects and numbers take a hundred times as long as text (and 20 times their size in memory), escapes ten
# times. These limits keep it below 30 ms. The longest prompts (as numbers, a table, or in Chinese) stay below them.
MAX_COUNTS = {b"[": 60_000, b"{": 60_000, b",": 300_000, b"\\u": 600_000}
# Unescaped quotation marks: two for each key and each string.
MAX_QUOTES = 100_000
# Bytes above which a body may not consist mostly of white space: parsing that takes twice as long as text.
MOST_SPACE = 4 << 20
# A "seed" value of more than 64 bits. The unescaped quotation mark proves that it is a key: in JSON no string is
# followed by a colon unless it is a key.
_SEED = b'"seed"'
_LONG_SEED = re.compile(rb'("seed"\s*:\s*)(-?[0-9]{19,}+)(?![.eE])')
# Bytes above which work that can release the GIL is done in a thread.
LONG_BODY = 64 * 1024


# One thread: each parse holds the GIL for a while, and the event loop should run between two of them.
_parser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llamado-json")


def parse_json(body: bytes) -> Any:
    """Parse a body. Raises ApiError for malformed JSON, and for bodies deeper or more fragmented than the limits."""
    if not body:
        raise invalid("parse error at line 1, column 1: attempting to parse an empty input")
    body, strings = take_long_strings(body) if len(body) > LONG else (body, NO_STRINGS)
    if len(body) > MOST_SPACE and np.count_nonzero(np.frombuffer(body, np.uint8) <= 0x20) > len(body) // 2:
        raise invalid("the request body is mostly white space")
    counts = {character: _count(body, character) for character in MAX_COUNTS}
    for character, most in MAX_COUNTS.items():
        if counts[character] > most:
            raise invalid(f"the request body has more than {most} times '{character.decode()}'")
    if _count(body, b'"') - _count(body, b'\\"') > MAX_QUOTES:
        raise invalid(f"the request body has more than {MAX_QUOTES // 2} strings")
    # The cyclic garbage collector would scan the growing value again and again.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = strings.restore(_loads_exact_seed(body))
    except orjson.JSONDecodeError as error:
        column = error.colno + strings.shift(error.doc, error.pos)
        raise invalid(f"parse error at line {error.lineno}, column {column}: {error.msg}") from None
    finally:
        if collects:
            gc.enable()
    if counts[b"["] + counts[b"{"] > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise invalid(f"the request body is nested more than {MAX_DEPTH} levels deep")
    return value


def _count(body: bytes, what: bytes) -> int:
    """Count one or two characters. `bytes.count` holds the GIL for 30 ms per 10 MB; numpy does not."""
    if len(body) < LONG_BODY:
        return body.count(what)
    seen = np.frombuffer(body, np.uint8)
    if len(what) == 1:
        return int(np.count_nonzero(seen == what[0]))
    return int(np.count_nonzero((seen[:-1] == what[0]) & (seen[1:] == what[1])))


def _loads_exact_seed(body: bytes) -> Any:
    """Parse with orjson, but keep all digits of a top-level seed that exceeds 64 bits."""
    numbers: list[bytes] = []

    def shorten(match: re.Match[bytes]) -> bytes:
        numbers.append(match[2])
        return match[1] + (match[2] if len(match[2]) <= 300 else match[2][:300])  # orjson reads longer ones as infinity

    def place(match: re.Match[bytes]) -> bytes:
        numbers.append(match[2])
        return match[1] + b"%d" % (len(numbers) - 1)

    value = orjson.loads(_replace_seeds(body, shorten))
    if numbers and isinstance(value, dict) and isinstance(value.get("seed"), float):
        numbers.clear()
        number = orjson.loads(_replace_seeds(body, place))["seed"]
        if isinstance(number, int):  # otherwise it has a fraction or an exponent
            if len(numbers[number]) > MAX_SEED:
                raise invalid(f"Field 'seed': more than {MAX_SEED} digits")
            value["seed"] = int(numbers[number])
    return value


def _replace_seeds(body: bytes, write: Callable[[re.Match[bytes]], bytes]) -> bytes:
    """Replace long seeds by `write(match)`. `find` skips through the body faster than a regular expression."""
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
    """Return True if arrays and objects are nested more than `levels` deep. Does not recurse."""
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
    """Read and parse the body. Raises ApiError."""
    return await parse_body(await body_of(request.scope).read(request.scope, request.receive))


async def parse_body(body: bytes) -> Any:
    """Parse a body, a long one in a thread. Raises ApiError."""
    if len(body) <= LONG_BODY:
        return parse_json(body)
    return await asyncio.get_running_loop().run_in_executor(_parser, parse_json, body)


async def read_object(request: Request) -> dict[str, Any]:
    """Read the body as a JSON object without its null fields: in all endpoints null means absent.

    A body of null or [] counts as an empty object. Raises ApiError.
    """
    value = await read_json(request)
    if value is None or value == []:
        return {}
    if not isinstance(value, dict):
        raise invalid("the request body must be a JSON object")
    return {name: given for name, given in value.items() if given is not None}
