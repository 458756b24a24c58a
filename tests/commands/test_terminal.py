"""`llamado run`: one question, from a flag or standard input, and a conversation in a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_llama

from llamado.commands import cli, run
from llamado.engine.errors import EngineError


class FakeLlama:
    """Answers with a number, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []
        self.during: Callable[[], None] = lambda: None

    def __enter__(self) -> FakeLlama:
        return self

    def __exit__(self, *_: object) -> None: ...

    def chat(self, messages: list[dict[str, Any]], *, stream: bool, **options: Any) -> Iterator[str]:
        assert stream
        self.asked.append([*messages])
        self.options.append(options)
        yield "answer "
        self.during()
        yield str(len(self.asked))


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    fake = FakeLlama()
    monkeypatch.setattr(run, "_load", lambda flags, spec: fake)
    monkeypatch.setattr(run.logs, "configure", lambda **_: None)
    return fake


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Standard input is a terminal; what is to be typed there is given before."""
    master, slave = pty.openpty()
    stdin = os.fdopen(slave, "r", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    done = threading.Event()

    def drain() -> None:  # what the terminal echoes
        while not done.is_set():
            try:
                os.read(master, 4096)
            except OSError:
                return

    threading.Thread(target=drain, daemon=True).start()

    def type_(text: str) -> None:
        os.write(master, text.encode())

    yield type_
    done.set()
    stdin.close()
    os.close(master)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_conversation_is_remembered_until_it_is_cleared(
    llama: FakeLlama, typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("first\n\nsecond\n/clear\nthird\nfourth\n/exit\nnever\n")
    assert cli.main(["run", "-sys", "be brief", "model"]) == 0
    system = {"role": "system", "content": "be brief"}
    assert llama.asked == [
        [system, user("first")],
        [system, user("first"), assistant("answer 1"), user("second")],
        [system, user("third")],
        [system, user("third"), assistant("answer 3"), user("fourth")],
    ]
    out, err = capsys.readouterr()
    assert [line.removeprefix("> ") for line in out.replace("> ", "").splitlines()] == [
        f"answer {i}" for i in range(1, 5)
    ]
    assert "/clear forgets the conversation" in err


def test_commands_that_are_none_are_explained_and_the_end_of_input_leaves(
    llama: FakeLlama, typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("/help\n/nonsense\nhello\n\x04")
    assert cli.main(["run", "model"]) == 0
    assert llama.asked == [[user("hello")]] and llama.options == [{}]
    assert capsys.readouterr().err.count("/exit leaves") == 3


def test_an_answer_that_is_interrupted_or_fails(
    llama: FakeLlama, typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        if len(llama.asked) == 1:
            raise KeyboardInterrupt
        if len(llama.asked) == 2:
            raise EngineError("it is too long")

    llama.during = interrupt
    typed("one\ntwo\nthree\n/quit\n")
    assert cli.main(["run", "model"]) == 0
    # what was there stays, and a question without an answer is forgotten
    assert llama.asked[1] == [user("one"), assistant("answer "), user("two")]
    assert llama.asked[2] == [user("one"), assistant("answer "), user("three")]
    assert "llamado: it is too long" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["-p", "-"], []], ids=["-p -", "a pipe"])
def test_a_question_from_standard_input(
    llama: FakeLlama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Explain this:\n\n/clear\nline two\n"))
    assert cli.main(["run", "model", "-n", "7", *arguments]) == 0
    assert llama.asked == [[user("Explain this:\n\n/clear\nline two")]] and llama.options == [{"n_predict": 7}]
    assert capsys.readouterr().out == "answer 1\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert cli.main(["run", "model", *arguments]) == 2
    assert "standard input is empty" in capsys.readouterr().err and len(llama.asked) == 1


def test_a_question_from_a_flag_leaves_standard_input_alone(llama: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouched(io.StringIO):
        def read(self, *_: Any) -> str:
            raise AssertionError("nobody may be there to write it")

        readline = read  # type: ignore[assignment]

    monkeypatch.setattr(sys, "stdin", Untouched())
    assert cli.main(["run", "model", "-p", "hi", "-n", "-1"]) == 0
    assert llama.asked == [[user("hi")]] and llama.options == [{"n_predict": -1}]


@pytest.mark.slow
def test_the_whole_command_with_a_model(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "tiny.gguf", n_vocab=320)
    command = [sys.executable, "-m", "llamado", "run", str(path), "-n", "5", "-s", "1"]
    one = subprocess.run([*command, "-p", "-"], input="Hello", capture_output=True, text=True, timeout=300)
    other = subprocess.run([*command, "-p", "Hello"], stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    assert one.returncode == other.returncode == 0 and one.stdout.strip()
    assert one.stdout == other.stdout.decode("utf-8", "replace")
