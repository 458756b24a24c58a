"""Long strings of bodies: parsed values and errors are those of orjson, whatever is in the bodies."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest

from llamado.http import json_body, long_strings
from llamado.http.errors import ApiError
from llamado.http.json_body import parse_json
from llamado.http.long_strings import take_long_strings

BASE64 = "ABCDwxyz0189+/=="


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out strings of more than 20 bytes, and search pieces of 7."""
    monkeypatch.setattr(long_strings, "LONG", 20)
    monkeypatch.setattr(json_body, "LONG", 20)
    monkeypatch.setattr(long_strings, "_PIECE", 7)


def plain(body: bytes) -> Any:
    """Return what orjson says of a body."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return f"parse error at line {error.lineno}, column {error.colno}: {error.msg}"


def parsed(body: bytes) -> Any:
    try:
        return parse_json(body)
    except ApiError as error:
        return error.message


def string(rng: random.Random) -> str:
    alphabet = rng.choice([BASE64, BASE64, 'ab"', "ab\\", "a\n\r\t/", "a\b", 'ab\\"n/', "aé", "aé\n€😀", "a\x7f"])
    return "".join(rng.choices(alphabet, k=rng.choice([0, 1, 15, 21, 22, 40, 90])))


def value(rng: random.Random, depth: int) -> Any:
    match rng.randrange(6 if depth else 3):
        case 0 | 1:
            return string(rng)
        case 2:
            return rng.choice([None, True, -1.5e3, 7])
        case 3 | 4:
            return {string(rng): value(rng, depth - 1) for _ in range(rng.randrange(4))}
        case _:
            return [value(rng, depth - 1) for _ in range(rng.randrange(4))]


def body(rng: random.Random) -> bytes:
    """Return a body with spaces, line ends and needless escapes."""
    text = orjson.dumps(value(rng, 4), option=rng.choice([0, orjson.OPT_INDENT_2]))
    if rng.random() < 0.3:
        text = text.replace(b"/", b"\\/")
    if rng.random() < 0.3:
        text = text.replace(b":", b" \n:\t ")
    return text


def damaged(rng: random.Random, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(3):
            case 0:
                data[at:at] = rng.choice([b'"', b"\\", b"\\\\", b"\n", b"\xff", b",", b"}", b"x", b"\0"])
            case 1:
                del data[at : at + rng.randrange(1, 30)]
            case _:
                data[at:at] = data[at : at + 30]
    return bytes(data)


@pytest.mark.usefixtures("short")
def test_values_and_errors_are_those_of_orjson() -> None:
    rng = random.Random(1)
    n_taken = n_wrong = 0
    for i in range(1500):
        text = body(rng)
        if i % 2 and not text.isspace():
            text = damaged(rng, text)
        if not text:
            continue
        expected, found = plain(text), parsed(text)
        assert found == expected and repr(found) == repr(expected), text
        n_taken += bool(take_long_strings(text)[1].texts)
        n_wrong += isinstance(expected, str) and expected.startswith("parse error")
    assert n_taken > 300 and n_wrong > 200


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "text",
    [
        b'{"a":"%b"}',
        b'"%b"',
        b'["%b","x","%b"]',
        b'{"a":"%b","b":{"c":["%b"]}}',
        b'{"a":"\\\\","b":"%b"}',
        b'{"a":"\\"","b":"%b"}',
        b'{"a":"\\\\\\"","b":"%b"}',
    ],
)
@pytest.mark.parametrize(
    "inside", [b"A" * 40, b"A/" * 20, b"A\\/" * 20, b"A\\r\\n" * 20, b"A" * 30 + b'\\"' * 9, "Aé€😀\\n".encode() * 9]
)
def test_long_strings_are_taken_out(text: bytes, inside: bytes) -> None:
    whole = text.replace(b"%b", inside)
    shorter, found = take_long_strings(whole)
    assert len(found.texts) == text.count(b"%b") and inside not in shorter
    assert parse_json(whole) == orjson.loads(whole)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("text", ['{"%b":1}', '{"%b" \n :1}'])
def test_keys_stay(text: str) -> None:
    assert not take_long_strings(text.replace("%b", "A" * 40).encode())[1].texts


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("inside", ["A" * 40 + "\\u0041", "A" * 40 + "\\\\n", "A" * 40 + "\n"])
def test_other_strings_stay(inside: str) -> None:
    assert not take_long_strings(f'["{inside}"]'.encode())[1].texts


@pytest.mark.usefixtures("short")
def test_errors_name_the_column_of_the_whole_body() -> None:
    text = '{"a":1,\n"b":"' + "Aé€😀\\n" * 10 + '", "c":"' + "B" * 60 + '" x}\n'
    assert parsed(text.encode()) == plain(text.encode()) and "line 2, column 136" in plain(text.encode())


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("wrong", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
@pytest.mark.parametrize("at", [0, 13, 40])
def test_strings_that_are_not_utf_8_are_refused(wrong: bytes, at: int) -> None:
    text = b"A" * at + wrong + b"A" * (40 - at)
    assert "not valid UTF-8" in parsed(b'["' + text + b'"]')


@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 127, 128, 255, 256, 257, 5000, 5001])
def test_escaped_quotation_marks_behind_many_backslashes(n: int) -> None:
    for before in (b"", b"x"):
        text = before + b"\\" * n + b'"'
        assert long_strings._is_escaped(text, len(text) - 1) == bool(n % 2)


def test_a_picture_is_taken_out() -> None:
    text = b'{"a":"' + b"A" * (1 << 20) + b'"}'
    shorter, found = take_long_strings(text)
    assert len(shorter) < 100 and found.restore(orjson.loads(shorter)) == {"a": "A" * (1 << 20)}
