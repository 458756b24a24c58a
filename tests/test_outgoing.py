"""Answers of other servers are bounded."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from odd_json import bent

import llamado
from llamado.client.health import judge
from llamado.numerals import whole_number
from llamado.outgoing import AnswerTooLarge, Maybe, fit, limits, open_async_client, open_client, read_json
from llamado.text.dialects.values import resolve


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


MIB = bytes(1 << 20)


@pytest.mark.parametrize(
    ("headers", "body", "extensions", "error"),
    [
        ({}, [MIB] * 16, {}, ""),
        ({}, [MIB] * 17, {}, "more than 16777216 bytes"),
        ({}, [MIB] * 17, limits(20 << 20), ""),
        ({}, [b"x", b"y"], limits(1), "more than 1 bytes"),
        ({}, [b"x"], limits(max_seconds=-1.0), "longer than"),
        ({"content-length": "9" * 18}, [], {}, "more than"),
        *(({"content-length": length}, [], {}, "announces") for length in ("9" * 5000, "-1", "+1", "0x1")),
        ({"content-encoding": "gzip"}, [zlib.compress(MIB, wbits=31)], {}, "compressed"),
        ({"content-encoding": "identity"}, [b"x"], {}, ""),
    ],
)
def test_bodies_are_bounded(headers: dict[str, str], body: list[bytes], extensions: dict[str, Any], error: str) -> None:
    streams: list[Body] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        streams.append(Body(body))
        return httpx.Response(200, headers=headers, stream=streams[-1])

    async def asynchronous() -> bytes:
        async with open_async_client(transport=httpx.MockTransport(answer)) as client:
            return (await client.get("http://x/", extensions=extensions)).content

    def synchronous() -> bytes:
        with open_client(transport=httpx.MockTransport(answer)) as client:
            return client.get("http://x/", extensions=extensions).content

    for ask in (synchronous, lambda: asyncio.run(asynchronous())):
        if error:
            with pytest.raises(AnswerTooLarge, match=error):
                ask()
        else:
            assert ask() == b"".join(body)
        assert streams[-1].closed


def test_redirects_are_bounded() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"location": "/other"}, stream=Body([MIB] * 17))

    client = open_client(transport=httpx.MockTransport(answer), follow_redirects=True)
    with client, pytest.raises(AnswerTooLarge):
        client.get("http://x/")


FORM = {
    "n": 1,
    "x": 0.5,
    "on": False,
    "text": "?",
    "list": [{"n": Maybe(0)}],
    "deep": {"text": "-"},
    "maybe": Maybe({"n": 2}),
}


@pytest.mark.parametrize(
    ("value", "fitted"),
    [
        ({"n": 3, "x": 1, "on": True, "text": "a", "list": [{"n": 5}, {}], "deep": {"text": "b"}, "maybe": {}, "m": 1},
         {"n": 3, "x": 1, "on": True, "text": "a", "list": [{"n": 5}, {"n": None}], "deep": {"text": "b"},
          "maybe": {"n": 2}}),
        (None, EMPTY := {"n": 1, "x": 0.5, "on": False, "text": "?", "list": [], "deep": {"text": "-"}, "maybe": None}),
        ({"n": True, "x": float("nan"), "on": 1, "text": 5, "list": {}, "deep": [], "maybe": []}, EMPTY),
        ({"n": 10**30, "x": float("inf"), "on": None, "text": None, "list": "abc", "deep": "x", "maybe": 0}, EMPTY),
        ({"n": 2.5}, EMPTY),
    ],
)  # fmt: skip
def test_json_gets_the_form_of_an_example(value: Any, fitted: Any) -> None:
    assert fit(value, FORM) == fitted


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1), ("9" * 19, None), ("9" * 5000, None), ("²", None), ("٣", None),
     ("", None), ("+1", None), ("1_0", None)],
)  # fmt: skip
def test_numbers_in_untrusted_texts(text: str, number: int | None) -> None:
    assert whole_number(text) == number
    assert resolve(f"#/list/{text}", {"list": ["a"]}) == ("a" if number == 0 else None)
    assert judge(503, {"retry-after": text}, b"").retry_after == (None if number is None else min(number, 3600))


def test_json_is_bounded() -> None:
    assert len(fit(["x" * 10_000] * 10_000, [""])) == len(fit("x" * 10_000, "")) == 4096
    for body in bent(FORM | {"list": [{"n": 1}], "maybe": {"n": 1}}):
        found = fit(body, FORM)
        assert fit(found, FORM) == found and found.keys() == FORM.keys()


def test_answers_are_read_as_json_in_one_way() -> None:
    """`response.json()` raises RecursionError for JSON that is nested too deep."""
    root = Path(llamado.__file__).parent
    other = [path.name for path in root.rglob("*.py") if re.search(r"\.json\(\)", path.read_text())]
    assert other == []
    for body in (b"[" * 100_000, b'"\\ud800"', b"", b"<html>", b"\xff", b"NaN"):
        with pytest.raises(ValueError):
            read_json(httpx.Response(200, content=body))


@pytest.mark.slow
def test_all_clients_are_bounded() -> None:
    """Exceptions: a client library of its own, the demo's own server, and the proxy, which passes pieces on."""
    own = {"outgoing.py", "client/asynchronous.py", "client/synchronous.py", "commands/demo.py", "tools/proxy.py"}
    root = Path(llamado.__file__).parent
    unbounded = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"httpx\.(Async)?Client\(|httpx\.(get|post|stream)\(|urlopen\(", path.read_text())
    }
    assert unbounded - {"cluster/deploy/containers.py"} == own
