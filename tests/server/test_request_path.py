"""The path of a body to the engine enters each file once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import fakes
import pytest
from fakes import FakeEngine, client, run

import llamado
from llamado.server.generate import threads

ROOT = Path(llamado.__file__).parent
# Files on the path and the functions that other files call in them. Not counted: access to JSON values, thread pools,
# the server's state, and the text packages behind `prepare`.
CHAT = [
    ("server/api/completions.py", "chat_completions"),
    ("http/json_body.py", "read_object"),
    ("server/generate/generator.py", "chat"),
    ("server/generate/chat_request.py", "read_chat"),
    ("text/dialects/prepare.py", "prepare"),
    ("server/generate/fields.py", "read_fields"),
    ("server/generate/prompts.py", "chat_in_context"),
    ("server/generate/constraints.py", "preserved_tokens"),
    ("server/generate/request.py", "make_request"),
    ("engine/request.py", "params"),
    ("server/generate/submission.py", "engine_requests"),
    ("server/generate/formats.py", "__init__"),
    ("server/generate/streaming.py", "begin"),
]
NATIVE = [
    ("server/api/completions.py", "completion"),
    ("http/json_body.py", "read_object"),
    ("server/generate/generator.py", "complete"),
    ("server/generate/completion_request.py", "read_completion"),
    ("server/generate/prompts.py", "prompts_in_context"),
    ("server/generate/fields.py", "read_fields"),
    ("server/generate/constraints.py", "read_constraints"),
    ("server/generate/request.py", "make_request"),
    ("engine/request.py", "params"),
    ("server/generate/submission.py", "engine_requests"),
    ("server/generate/formats.py", "__init__"),
    ("server/generate/streaming.py", "begin"),
]
COUNTED = {file for file, _ in CHAT + NATIVE}


def file_of(frame: FrameType | None) -> str:
    """Return the project's file of a call, or of its nearest caller in the project."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            return path.relative_to(ROOT).as_posix()
        frame = frame.f_back
    return ""


def is_property(frame: FrameType) -> bool:
    owner, _, name = frame.f_code.co_qualname.rpartition(".")
    return isinstance(getattr(frame.f_globals.get(owner), name, None), property)


@contextmanager
def calls_until_submitted() -> Iterator[list[tuple[str, str]]]:
    """Record calls between files, in order, until a request is submitted to the engine."""
    calls: list[tuple[str, str]] = []
    seen: list[FrameType] = []  # a coroutine resumes in the same frame
    submitted = False

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal submitted
        name = frame.f_code.co_name
        if event != "call" or submitted:
            return
        submitted = name == "submit" and frame.f_code.co_filename == fakes.__file__
        own = name.startswith("<") or (name.startswith("_") and name != "__init__")
        if own or not Path(frame.f_code.co_filename).is_relative_to(ROOT) or any(frame is known for known in seen):
            return
        file = file_of(frame)
        if file in COUNTED and file != file_of(frame.f_back) and not is_property(frame):
            seen.append(frame)
            calls.append((file, name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.parametrize(
    ("path", "body", "way"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}, CHAT),
        ("/completion", {"prompt": "Hi", "n_predict": 5}, NATIVE),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_file_on_the_path_is_entered_once(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], way: list[tuple[str, str]], stream: bool
) -> None:
    async def work() -> list[tuple[str, str]]:
        async with client(FakeEngine("ab")) as http:
            with calls_until_submitted() as calls:
                assert (await http.post(path, json=body | {"stream": stream})).status_code == 200
            return calls

    for pool in ("_workers", "_chats"):  # only threads started now are profiled
        monkeypatch.setattr(threads, pool, ThreadPoolExecutor(1))
    calls = run(work())
    assert calls == way
    assert len({file for file, _ in calls}) == len(calls)
