"""`llamado run`: one prompt from flags or standard input, chat sessions and their commands."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from rich.text import Text
from tiny_models import make_llama

from llamado.commands import cli
from llamado.commands.chat import run
from llamado.commands.chat.backend import AnswerPiece, AnswerStats, partial_stats
from llamado.commands.chat.conversation import SETTABLE, Chat
from llamado.commands.chat.keyboard import CommandCompleter, PromptReader, is_open, unfenced
from llamado.commands.chat.markdown import MarkdownScreen, _Tail, blocks
from llamado.commands.chat.screen import PlainScreen, ShownAnswer
from llamado.commands.chat.session import CHAT_COMMANDS, ChatSession, stats_line
from llamado.engine.errors import EngineError
from llamado.terminal.text import printable

STATS = AnswerStats(n_prompt=20, n_cached=15, n_predicted=4, tokens_per_second=50.0, first_seconds=0.25)


class FakeBackend:
    """Answers with the number of the question, and records the messages and settings."""

    name, notes = "fake", ("mind the gap",)

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.settings: list[dict[str, Any]] = []
        self.before: Callable[[], None] = lambda: None
        self.during: Callable[[], None] = lambda: None
        self.ended = 0

    def answer(
        self, messages: Sequence[dict[str, Any]], settings: Mapping[str, Any]
    ) -> Generator[AnswerPiece, None, AnswerStats]:
        self.asked.append([*messages])
        self.settings.append(dict(settings))
        try:
            self.before()
            yield AnswerPiece("hm", is_reasoning=True)
            yield AnswerPiece("answer ")
            self.during()
            yield AnswerPiece(str(len(self.asked)))
            return STATS
        finally:
            self.ended += 1

    def close(self) -> None: ...


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": "hm"}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


class RecordedSession:
    """A chat session that records the lines it shows."""

    def __init__(self, backend: FakeBackend, chat: Chat | None = None) -> None:
        self.lines: list[str] = []
        self.session = ChatSession(backend, chat or Chat(), PlainScreen(io.StringIO()), self.lines.append)

    def __call__(self, *texts: str) -> list[str]:
        """Handle inputs and return the lines shown."""
        self.lines.clear()
        for text in texts:
            self.session.handle(text)
        return [*self.lines]


def test_messages_accumulate_until_clear(backend: FakeBackend) -> None:
    handle = RecordedSession(backend, Chat(system="be brief"))
    handle("first", "second", "/system be long", "third", "/clear", "fourth")
    brief, long = ({"role": "system", "content": f"be {how}"} for how in ("brief", "long"))
    turns = [user("first"), assistant("answer 1"), user("second"), assistant("answer 2"), user("third")]
    assert backend.asked == [[brief, turns[0]], [brief, *turns[:3]], [long, *turns], [brief, user("fourth")]]
    assert handle("/system") == ["system: be brief"] and handle("/system none") == ["system: (none)"]


def test_attached_files_go_with_the_next_question(backend: FakeBackend, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG-")
    (tmp_path / "b.wav").write_bytes(b"RIFF1234WAVE")
    (tmp_path / "c.mp3").write_bytes(b"ID3" + bytes(12))
    handle = RecordedSession(backend)
    assert handle(f"/image {tmp_path / 'a.png'}") == [f"{tmp_path / 'a.png'} goes with the next question"]
    handle(f"/audio {tmp_path / 'b.wav'}", f"/audio {tmp_path / 'c.mp3'}", "what?", "and now?")
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORy0="}},
        {"type": "input_audio", "input_audio": {"data": "UklGRjEyMzRXQVZF", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": "SUQzAAAAAAAAAAAAAAAA", "format": "mp3"}},
        {"type": "text", "text": "what?"},
    ]
    first = {"role": "user", "content": parts}
    assert backend.asked == [[first], [first, assistant("answer 1"), user("and now?")]]
    # The whole conversation can be saved and loaded, and the question asked again.
    handle(f"/save {tmp_path / 'chat.json'}", "/clear")
    assert handle(f"/load {tmp_path / 'chat.json'}")[0] == "4 messages loaded"
    assert handle.session.chat.messages[0] == first
    handle.session.chat.messages = handle.session.chat.messages[:2]
    handle("/regen")
    assert backend.asked[-1] == [first]
    assert "expected a file" in handle("/image")[0] and "cannot be read" in handle("/image none.png")[0]
    handle(f"/image {tmp_path / 'a.png'}", "/clear", "plain")
    assert backend.asked[-1] == [user("plain")]


def test_stopped_answer_is_kept_in_part(backend: FakeBackend) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    handle = RecordedSession(backend)
    backend.during = interrupt
    assert handle("one") == []
    backend.during, backend.before = lambda: None, interrupt
    assert "dropped" in handle("two")[0]
    backend.before = lambda: None
    handle("three")
    assert backend.asked[2] == [user("one"), assistant("answer "), user("three")]
    assert backend.ended == 3, "each answer is closed"


def test_statistics_count_a_stopped_answer() -> None:
    class StoppingBackend:
        name, notes = "fake", ()

        def answer(self, messages: Any, settings: Any) -> Generator[AnswerPiece, None, AnswerStats]:
            for n in (1, 2):
                yield AnswerPiece("word ", so_far=partial_stats(n, 1.0, 2.0, n_prompt=7))
            raise KeyboardInterrupt

        def close(self) -> None: ...

    handle = RecordedSession(StoppingBackend())
    handle("one")
    said = handle("/stats")
    assert said[1] == "messages: 2, answers: 1, generated tokens: 2" and said[3] == "last prompt: 7 tokens"


def test_failed_answer_leaves_the_conversation_unchanged(backend: FakeBackend) -> None:
    def fail() -> None:
        raise EngineError("it is too long")

    handle = RecordedSession(backend)
    handle("one")
    backend.during = fail
    assert handle("two") == ["llamado: it is too long"] == handle("/regen")
    assert handle.session.chat.messages == [user("one"), assistant("answer 1")]


def test_regen_replaces_the_last_answer(backend: FakeBackend) -> None:
    handle = RecordedSession(backend)
    assert "no answer yet" in handle("/regen")[0]
    handle("one", "two", "/regen")
    assert backend.asked[1] == backend.asked[2] == [user("one"), assistant("answer 1"), user("two")]
    assert handle.session.chat.messages[-1] == assistant("answer 3") and len(handle.session.chat.messages) == 4
    handle("/set seed 5")
    assert "the seed is fixed" in handle("/regen")[0]


def test_set_accepts_the_parameters_of_the_table(backend: FakeBackend) -> None:
    handle = RecordedSession(backend)
    assert handle("/set temperature 0.25", "/set top-k 7", "/set stop END", "/set samplers top_k;temperature") == [
        "temperature = 0.25", "top_k = 7", "stop = ['END']", "samplers = ['top_k', 'temperature']",
    ]  # fmt: skip
    handle("/set ignore_eos on", "/set seed 3", "one")
    assert backend.settings[0] == {
        "temperature": 0.25, "top_k": 7, "stop": ["END"], "samplers": ["top_k", "temperature"], "ignore_eos": True,
        "seed": 3,
    }  # fmt: skip
    handle("/set top_k default", "/set seed -1", "two")
    assert not backend.settings[1].keys() & {"top_k", "seed"}
    for wrong, reason in (
        ("temperature warm", "expected a number"), ("top_k 1.5", "expected a whole number"),
        ("ignore_eos perhaps", "on or off"), ("samplers guess", "guess"), ("color red", "no parameter color"),
        ("n_keep -7", "n_keep must be -1"), ("temprature 1", "did you mean temperature?"),
    ):  # fmt: skip
        assert reason in handle(f"/set {wrong}")[0], wrong
    # Names of flags and request fields work as well.
    assert handle("/set temp 0", "/set max_tokens 9", "/set n 8", "/set num-predict") == [
        "temperature = 0.0", "n_predict = 9", "n_predict = 8",
        f"  {'n_predict':20} {8!s:10} {SETTABLE['n_predict'].help}",
    ]  # fmt: skip
    handle("/set temperature 0.25")
    listed = handle("/set")
    assert len(listed) == len(SETTABLE) and any("temperature" in line and "0.25" in line for line in listed)


def test_save_and_load(backend: FakeBackend, tmp_path: Path) -> None:
    path = tmp_path / "a chat.json"
    handle = RecordedSession(backend, Chat(system="be brief"))
    handle("/set temperature 0.5", "one", f"/save {path}")
    kept = json.loads(path.read_text())
    assert kept["model"] == "fake" and kept["messages"] == [user("one"), assistant("answer 1")]
    other = RecordedSession(backend)
    said = other(f"/load {path}")
    assert said == ["2 messages loaded", "assistant: answer 1"]
    other("two")
    assert backend.asked[1] == [{"role": "system", "content": "be brief"}, *kept["messages"], user("two")]
    assert backend.settings[1] == {"temperature": 0.5}
    before = [*other.session.chat.messages]
    for text in ("no JSON", "[]", '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "x", "content": ""}]}',
                 '{"messages": [], "settings": {"temperature": "hot"}}'):  # fmt: skip
        path.write_text(text)
        assert other(f"/load {path}")[0].startswith(f"llamado: {path}"), text
    assert "No such file" in other("/load /nowhere/x")[0] and "No such file" in other("/save /nowhere/x")[0]
    assert "expected a file" in other("/load")[0] and "expected a file" in other("/save")[0]
    assert other.session.chat.messages == before


def test_statistics_of_answers(backend: FakeBackend) -> None:
    handle = RecordedSession(backend)
    assert handle("one") == ["4 tokens, 50.0 tokens/s, first after 0.25 s"]
    assert stats_line(AnswerStats(cut=True)) == "cut at the token limit"
    said = "\n".join(handle("/stats"))
    for text in ("model: fake", "messages: 2", "generated tokens: 4", "20 tokens, 15 of them", "50.0 tokens/s on av"):
        assert text in said, text
    assert handle("/thoughts") == ["hm"]


def test_help_and_multi_line_text_that_starts_with_a_slash(backend: FakeBackend) -> None:
    handle = RecordedSession(backend)
    said = "\n".join(handle("/help"))
    assert all(command.name in said and command.help in said for command in CHAT_COMMANDS)
    assert "no command /nonsense" in handle("/nonsense x")[0] and not backend.asked
    handle("/usr/bin/env python\nprint()")
    assert backend.asked == [[user("/usr/bin/env python\nprint()")]]
    for word in ("/exit", "/quit", "/bye"):
        handle = RecordedSession(backend)
        handle(word)
        assert handle.session.is_over


# --- input ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("typed", "read"), [
    ("one\r", ["one"]), ("one\x1b\rtwo\r", ["one\ntwo"]), ("\x1b[200~a\nb\n\nc\x1b[201~\r", ["a\nb\n\nc"]),
    ('"""\ra\r\rb\r"""\r', ["a\n\nb"]), ('"""x"""\r', ["x"]), ("  \r", [""]),
], ids=["a line", "Alt-Enter", "paste", "quotes", "quotes in a line", "nothing"])  # fmt: skip
def test_line_editing(tmp_path: Path, typed: str, read: list[str]) -> None:
    with create_pipe_input() as pipe:
        reader = PromptReader(tmp_path / "history", input=pipe, output=DummyOutput())
        pipe.send_text(typed + "\x04")
        assert [reader.read() for _ in read] == read
        assert reader.read() is None


def test_history_is_kept_and_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    for typed, read in (("secret\r", "secret"), ("\x1b[A\r", "secret")):
        with create_pipe_input() as pipe:
            pipe.send_text(typed)
            assert PromptReader(path, input=pipe, output=DummyOutput()).read() == read
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_history_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with create_pipe_input() as pipe:
        pipe.send_text("one\r")
        assert PromptReader(tmp_path / "file" / "history", input=pipe, output=DummyOutput()).read() == "one"
    assert "no history is kept" in capsys.readouterr().err


def test_three_quotes() -> None:
    assert [is_open(text) for text in ('"""', '"""a', '"""a"""', '""""""', "a", '""" """')] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
    assert unfenced('"""\na\n"""') == "a" and unfenced('"""a') == '"""a'


def test_completion_of_commands_parameters_and_files(tmp_path: Path) -> None:
    (tmp_path / "chat.json").touch()

    def completed(text: str) -> list[str]:
        return [text + one.text[-one.start_position :] for one in CommandCompleter().get_completions(
            Document(text), CompleteEvent(completion_requested=True))]  # fmt: skip

    assert completed("/s") == ["/system", "/save", "/set", "/stats"] and completed("hello") == []
    assert completed("/set temp") == ["/set temperature"] and completed("/set temperature 1") == []
    assert completed(f"/load {tmp_path}/ch") == [f"/load {tmp_path}/chat.json"]


# --- screens ----------------------------------------------------------------------------------------------------------
def pieces(*said: AnswerPiece | str, interrupt: bool = False) -> Generator[AnswerPiece, None, AnswerStats]:
    for one in said:
        yield AnswerPiece(one) if isinstance(one, str) else one
    if interrupt:
        raise KeyboardInterrupt
    return STATS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_answers() -> None:
    for out, expected in (
        (io.StringIO(), "a\x1b[31m**b**\n"), (Terminal(), "\x1b[2mhm\x1b[0m\n\na\\x1b[31m**b**\n"),
    ):  # fmt: skip
        shown = PlainScreen(out).show(pieces(AnswerPiece("hm", is_reasoning=True), "a\x1b[31m", "**b**"))
        assert out.getvalue() == expected
        assert shown == ShownAnswer("a\x1b[31m**b**", "hm", STATS), "the text is kept without escapes"


@pytest.mark.parametrize("found", [
    [], ["one"], ["one\n\n", "two"], ["# a\n", "b\n"], ["- a\n- b\n\n- c\n"], ["```\na\n\nb\n\nc\n"],
    ["```\na\n```\n", "b\n"], ["1. a\n\n2. b\n\n", "c"], ["a\n\n", "- b\n\n", "c\n"], ["a\n---\n"],
    ["\n\na\n\n", "b"], ["|a|\n|-|\n|b|\n\n", "c"], ["> a\x0bd\u2028e\nb\n\n", "c\n"],
])  # fmt: skip
def test_blocks(found: list[str]) -> None:
    assert blocks("".join(found)) == found


def test_markdown_looks_the_same_for_any_piece_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.commands.chat.markdown._FRAME", 0.0)
    monkeypatch.setattr("llamado.commands.chat.markdown._PAUSE", 0)
    text = (
        "# Title\n\nSome **bold** <b>text</b>, [a link](http://x.y).\n\n- one\n- two\n\n```\ncode\n\nmore\n```\n\nend"
    )
    screens = []
    for step in (1, 7, len(text)):
        console = Console(file=Terminal(), width=60, height=40, force_terminal=True, record=True)
        shown = MarkdownScreen(console).show(pieces(*(text[i : i + step] for i in range(0, len(text), step))))
        assert shown.text == text
        screens.append(last_screen(console))
    assert screens[0] == screens[1] == screens[2]
    for part in ("Title", "bold", "<b>text</b>", "http://x.y", "• one", "code", "end"):
        assert part in screens[0], part
    assert "**" not in screens[0]


def last_screen(console: Console) -> str:
    """Return the final content of the terminal."""
    import pyte

    screen = pyte.Screen(console.width, console.height)
    file = console.file
    assert isinstance(file, Terminal)
    pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


def test_complete_blocks_are_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.commands.chat.markdown._FRAME", 0.0)
    monkeypatch.setattr("llamado.commands.chat.markdown._PAUSE", 0)
    console = Console(file=Terminal(), width=60, height=40, force_terminal=True)
    MarkdownScreen(console).show(pieces(*"first block\n\nsecond block\nis longer\n\nthird block\nend\n"))
    file = console.file
    assert isinstance(file, Terminal)
    after = file.getvalue().rpartition("second block")[2]
    assert "first block" not in after.partition("third")[0] and last_screen(console).count("first block") == 1


def test_block_higher_than_the_terminal() -> None:
    console = Console(file=Terminal(), width=40, height=8, force_terminal=True)
    text = "\n".join(f"    line {i}" for i in range(50))
    MarkdownScreen(console).show(pieces(*(f"{line}\n" for line in text.splitlines())))
    shown = last_screen(console).splitlines()
    assert [line.strip() for line in shown] == [f"line {i}" for i in range(50)][-len(shown) :]


def test_tail_shows_the_last_lines() -> None:
    console = Console(file=io.StringIO(), width=40, height=8)
    console.print(_Tail(Text("\n".join(f"line {i}" for i in range(50)))))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split("\n")[:6] == [f"line {i}" for i in range(44, 50)]


def test_failed_output_closes_the_answer(backend: FakeBackend) -> None:
    class InterruptedOutput(io.StringIO):
        def write(self, text: str) -> int:
            if text == "answer ":
                raise KeyboardInterrupt
            return super().write(text)

    answer = backend.answer([], {})
    shown = PlainScreen(InterruptedOutput()).show(answer)
    assert shown.text == "answer " and shown.stats is None and backend.ended == 1


@pytest.mark.parametrize("markdown", [False, True])
def test_interrupt_that_python_drops_ends_the_answer(markdown: bool) -> None:
    """Python drops KeyboardInterrupt in destructors, so the answer could not be stopped."""

    def answer() -> Generator[AnswerPiece, None, AnswerStats]:
        yield AnswerPiece("begun")
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        for _ in range(100):
            yield AnswerPiece(" and on")
        return STATS

    before = signal.getsignal(signal.SIGINT)
    console = Console(file=Terminal(), width=60, height=40, force_terminal=True)
    shown = (MarkdownScreen(console) if markdown else PlainScreen(Terminal())).show(answer())
    assert shown.stats is None and shown.text.startswith("begun") and shown.text.count("and on") <= 1
    assert signal.getsignal(signal.SIGINT) is before


def test_reasoning_is_folded_and_a_stop_is_marked() -> None:
    console = Console(file=Terminal(), width=60, height=40, force_terminal=True)
    shown = MarkdownScreen(console).show(
        pieces(AnswerPiece("let me see", is_reasoning=True), "so it is", interrupt=True)
    )
    assert shown == ShownAnswer("so it is", "let me see", None)
    screen = last_screen(console)
    assert "let me see" not in screen and "3 words" in screen and "so it is …" in screen


def test_stop_drops_text_after_the_last_redraw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.commands.chat.markdown._FRAME", 60.0)
    for before in ("", "first\n\nsecond\n\n"):
        console = Console(file=Terminal(), width=60, height=40, force_terminal=True)
        ahead = (" hidden", "\n\nhidden block\n\n", "hidden end")
        shown = MarkdownScreen(console).show(pieces(f"{before}seen", *ahead, interrupt=True))
        assert shown == ShownAnswer(f"{before}seen", "", None)
        screen = last_screen(console)
        assert "seen …" in screen and "hidden" not in screen and screen.count("first") == bool(before)


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b]0;x\x07\r\n\tb\x9b") == "a\\x1b]0;x\\x07\\x0d\n\tb\\u009b"
    console = Console(file=Terminal(), width=60, height=40, force_terminal=True)
    MarkdownScreen(console).show(pieces("\x1b[2J\x1b]52;c;x\x07"))
    file = console.file
    assert isinstance(file, Terminal)
    assert "\x1b[2J" not in file.getvalue() and "\x1b]" not in file.getvalue()


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, backend: FakeBackend) -> Iterator[FakeBackend]:
    monkeypatch.setattr(run, "_here", lambda flags, spec: backend)
    monkeypatch.setattr(run.logs, "configure", lambda **_: None)
    yield backend


@pytest.mark.parametrize("arguments", [["-p", "-"], []], ids=["-p -", "a pipe"])
def test_prompt_from_standard_input(
    command: FakeBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Explain this:\n\n/clear\nline two\n"))
    assert cli.main(["run", "model", "-n", "7", *arguments]) == 0
    assert command.asked == [[user("Explain this:\n\n/clear\nline two")]] and command.settings == [{"n_predict": 7}]
    assert capsys.readouterr().out == "answer 1\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert cli.main(["run", "model", *arguments]) == 2
    assert "standard input is empty" in capsys.readouterr().err and len(command.asked) == 1


def test_standard_input_is_appended_to_the_prompt(
    command: FakeBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("line one\nline two\n")
    with open(tmp_path / "text") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert cli.main(["run", "model", "-p", "sum up"]) == 0
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert cli.main(["run", "model", "-p", "hi", "-n", "-1"]) == 0
    assert command.asked == [[user("sum up\n\nline one\nline two")], [user("hi")]]
    assert command.settings == [{}, {"n_predict": -1}]


def test_hint_while_waiting_for_a_pipe(
    command: FakeBackend, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_PATIENCE", 0.01)
    read, write = os.pipe()

    def say(line: str) -> None:
        os.write(write, b"late")
        os.close(write)

    monkeypatch.setattr("builtins.print", lambda text, **_: say(text) if "waiting for the end" in text else None)
    with os.fdopen(read) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert cli.main(["run", "model", "-p", "hi"]) == 0
    assert command.asked == [[user("hi\n\nlate")]]


def test_exit_code_of_an_interrupted_answer(command: FakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    command.during = interrupt
    assert cli.main(["run", "model", "-p", "hi"]) == 130
    assert capsys.readouterr().out == "answer  …\n"


@pytest.mark.slow
def test_command_with_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(make_llama(tmp_path / "tiny.gguf", n_vocab=320)), "-n", "5", "-s", "1", "-c", "256"]
    answers = []
    for prompt, typed in (("-", "Hello"), ("Hello", "")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert cli.main([*command, "-p", prompt]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and answers[0].strip()
