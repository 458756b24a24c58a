"""`llamado run`: one question from flags or standard input, a conversation and its commands."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
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
from llamado.commands.chat.conversation import SETTABLE, Chat
from llamado.commands.chat.keyboard import Keyboard, OrderCompleter, is_open, unfenced
from llamado.commands.chat.markdown import MarkdownScreen, _Tail, blocks
from llamado.commands.chat.screen import PlainScreen, Shown
from llamado.commands.chat.speaker import Figures, Said
from llamado.commands.chat.talk import ORDERS, Talk, told
from llamado.engine.errors import EngineError
from llamado.terminal.text import printable

FIGURES = Figures(n_prompt=20, n_cached=15, n_predicted=4, tokens_per_second=50.0, first_seconds=0.25)


class FakeSpeaker:
    """Answers with a number, and keeps what it was asked."""

    name, notes = "fake", ("mind the gap",)

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.settings: list[dict[str, Any]] = []
        self.before: Callable[[], None] = lambda: None
        self.during: Callable[[], None] = lambda: None
        self.ended = 0

    def answer(self, messages: Sequence[dict[str, Any]], settings: Mapping[str, Any]) -> Generator[Said, None, Figures]:
        self.asked.append([*messages])
        self.settings.append(dict(settings))
        try:
            self.before()
            yield Said("hm", thought=True)
            yield Said("answer ")
            self.during()
            yield Said(str(len(self.asked)))
            return FIGURES
        finally:
            self.ended += 1

    def close(self) -> None: ...


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": "hm"}


@pytest.fixture
def speaker() -> FakeSpeaker:
    return FakeSpeaker()


class Talking:
    """A conversation whose lines are kept."""

    def __init__(self, speaker: FakeSpeaker, chat: Chat | None = None) -> None:
        self.said: list[str] = []
        self.talk = Talk(speaker, chat or Chat(), PlainScreen(io.StringIO()), self.said.append)

    def __call__(self, *texts: str) -> list[str]:
        """What is said to some texts."""
        self.said.clear()
        for text in texts:
            self.talk.hear(text)
        return [*self.said]


def test_a_conversation_is_remembered_until_it_is_cleared(speaker: FakeSpeaker) -> None:
    hear = Talking(speaker, Chat(system="be brief"))
    hear("first", "second", "/system be long", "third", "/clear", "fourth")
    brief, long = ({"role": "system", "content": f"be {how}"} for how in ("brief", "long"))
    turns = [user("first"), assistant("answer 1"), user("second"), assistant("answer 2"), user("third")]
    assert speaker.asked == [[brief, turns[0]], [brief, *turns[:3]], [long, *turns], [brief, user("fourth")]]
    assert hear("/system") == ["system: be brief"] and hear("/system none") == ["system: (none)"]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(speaker: FakeSpeaker) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    hear = Talking(speaker)
    speaker.during = interrupt
    assert hear("one") == []
    speaker.during, speaker.before = lambda: None, interrupt
    assert "forgotten" in hear("two")[0]
    speaker.before = lambda: None
    hear("three")
    assert speaker.asked[2] == [user("one"), assistant("answer "), user("three")]
    assert speaker.ended == 3, "the engine is told that nobody listens"


def test_an_answer_that_fails_leaves_the_conversation_as_it_was(speaker: FakeSpeaker) -> None:
    def fail() -> None:
        raise EngineError("it is too long")

    hear = Talking(speaker)
    hear("one")
    speaker.during = fail
    assert hear("two") == ["llamado: it is too long"] == hear("/regen")
    assert hear.talk.chat.messages == [user("one"), assistant("answer 1")]


def test_an_answer_given_again_takes_the_place_of_the_last(speaker: FakeSpeaker) -> None:
    hear = Talking(speaker)
    assert "no answer yet" in hear("/regen")[0]
    hear("one", "two", "/regen")
    assert speaker.asked[1] == speaker.asked[2] == [user("one"), assistant("answer 1"), user("two")]
    assert hear.talk.chat.messages[-1] == assistant("answer 3") and len(hear.talk.chat.messages) == 4
    hear("/set seed 5")
    assert "the seed is fixed" in hear("/regen")[0]


def test_parameters_are_those_of_the_table(speaker: FakeSpeaker) -> None:
    hear = Talking(speaker)
    assert hear("/set temperature 0.25", "/set top-k 7", "/set stop END", "/set samplers top_k;temperature") == [
        "temperature = 0.25", "top_k = 7", "stop = ['END']", "samplers = ['top_k', 'temperature']",
    ]  # fmt: skip
    hear("/set ignore_eos on", "/set seed 3", "one")
    assert speaker.settings[0] == {
        "temperature": 0.25, "top_k": 7, "stop": ["END"], "samplers": ["top_k", "temperature"], "ignore_eos": True,
        "seed": 3,
    }  # fmt: skip
    hear("/set top_k default", "/set seed -1", "two")
    assert not speaker.settings[1].keys() & {"top_k", "seed"}
    for wrong, reason in (
        ("temperature warm", "expected a number"), ("top_k 1.5", "expected a whole number"),
        ("ignore_eos perhaps", "on or off"), ("samplers guess", "guess"), ("color red", "no parameter color"),
        ("n_keep -7", "n_keep must be -1"), ("temprature 1", "did you mean temperature?"),
    ):  # fmt: skip
        assert reason in hear(f"/set {wrong}")[0], wrong
    # Names of flags and of bodies are understood, too.
    assert hear("/set temp 0", "/set max_tokens 9", "/set n 8", "/set num-predict") == [
        "temperature = 0.0", "n_predict = 9", "n_predict = 8",
        f"  {'n_predict':20} {8!s:10} {SETTABLE['n_predict'].help}",
    ]  # fmt: skip
    hear("/set temperature 0.25")
    listed = hear("/set")
    assert len(listed) == len(SETTABLE) and any("temperature" in line and "0.25" in line for line in listed)


def test_conversations_are_kept_in_files(speaker: FakeSpeaker, tmp_path: Path) -> None:
    path = tmp_path / "a chat.json"
    hear = Talking(speaker, Chat(system="be brief"))
    hear("/set temperature 0.5", "one", f"/save {path}")
    kept = json.loads(path.read_text())
    assert kept["model"] == "fake" and kept["messages"] == [user("one"), assistant("answer 1")]
    other = Talking(speaker)
    said = other(f"/load {path}")
    assert said == ["2 messages are back", "assistant: answer 1"]
    other("two")
    assert speaker.asked[1] == [{"role": "system", "content": "be brief"}, *kept["messages"], user("two")]
    assert speaker.settings[1] == {"temperature": 0.5}
    before = [*other.talk.chat.messages]
    for text in ("no JSON", "[]", '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "x", "content": ""}]}',
                 '{"messages": [], "settings": {"temperature": "hot"}}'):  # fmt: skip
        path.write_text(text)
        assert other(f"/load {path}")[0].startswith(f"llamado: {path}"), text
    assert "No such file" in other("/load /nowhere/x")[0] and "No such file" in other("/save /nowhere/x")[0]
    assert "which file" in other("/load")[0] and "which file" in other("/save")[0]
    assert other.talk.chat.messages == before


def test_what_is_said_of_answers(speaker: FakeSpeaker) -> None:
    hear = Talking(speaker)
    assert hear("one") == ["4 tokens, 50.0 tokens/s, first after 0.25 s"]
    assert told(Figures(cut=True)) == "cut: it became too long"
    said = "\n".join(hear("/stats"))
    for text in ("model: fake", "messages: 2", "generated tokens: 4", "20 tokens, 15 of them", "50.0 tokens/s on av"):
        assert text in said, text
    assert hear("/thoughts") == ["hm"]


def test_commands_are_explained_and_only_a_single_line_is_one(speaker: FakeSpeaker) -> None:
    hear = Talking(speaker)
    said = "\n".join(hear("/help"))
    assert all(order.name in said and order.help in said for order in ORDERS)
    assert "no command /nonsense" in hear("/nonsense x")[0] and not speaker.asked
    hear("/usr/bin/env python\nprint()")
    assert speaker.asked == [[user("/usr/bin/env python\nprint()")]]
    for leaving in ("/exit", "/quit", "/bye"):
        talking = Talking(speaker)
        talking(leaving)
        assert talking.talk.over


# --- what is typed ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("typed", "read"), [
    ("one\r", ["one"]), ("one\x1b\rtwo\r", ["one\ntwo"]), ("\x1b[200~a\nb\n\nc\x1b[201~\r", ["a\nb\n\nc"]),
    ('"""\ra\r\rb\r"""\r', ["a\n\nb"]), ('"""x"""\r', ["x"]), ("  \r", [""]),
], ids=["a line", "Alt-Enter", "paste", "quotes", "quotes in a line", "nothing"])  # fmt: skip
def test_what_is_typed(tmp_path: Path, typed: str, read: list[str]) -> None:
    with create_pipe_input() as pipe:
        keyboard = Keyboard(tmp_path / "history", input=pipe, output=DummyOutput())
        pipe.send_text(typed + "\x04")
        assert [keyboard.ask() for _ in read] == read
        assert keyboard.ask() is None


def test_questions_are_kept_for_the_next_session_and_for_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    for typed, read in (("secret\r", "secret"), ("\x1b[A\r", "secret")):
        with create_pipe_input() as pipe:
            pipe.send_text(typed)
            assert Keyboard(path, input=pipe, output=DummyOutput()).ask() == read
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_place_for_questions_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with create_pipe_input() as pipe:
        pipe.send_text("one\r")
        assert Keyboard(tmp_path / "file" / "history", input=pipe, output=DummyOutput()).ask() == "one"
    assert "questions are not kept" in capsys.readouterr().err


def test_three_quotes() -> None:
    assert [is_open(text) for text in ('"""', '"""a', '"""a"""', '""""""', "a", '""" """')] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
    assert unfenced('"""\na\n"""') == "a" and unfenced('"""a') == '"""a'


def test_completion_knows_commands_parameters_and_files(tmp_path: Path) -> None:
    (tmp_path / "chat.json").touch()

    def completed(text: str) -> list[str]:
        return [text + one.text[-one.start_position :] for one in OrderCompleter().get_completions(
            Document(text), CompleteEvent(completion_requested=True))]  # fmt: skip

    assert completed("/s") == ["/system", "/save", "/set", "/stats"] and completed("hello") == []
    assert completed("/set temp") == ["/set temperature"] and completed("/set temperature 1") == []
    assert completed(f"/load {tmp_path}/ch") == [f"/load {tmp_path}/chat.json"]


# --- what is shown ----------------------------------------------------------------------------------------------------
def pieces(*said: Said | str, interrupt: bool = False) -> Generator[Said, None, Figures]:
    for one in said:
        yield Said(one) if isinstance(one, str) else one
    if interrupt:
        raise KeyboardInterrupt
    return FIGURES


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_answers() -> None:
    for out, expected in (
        (io.StringIO(), "a\x1b[31m**b**\n"), (Terminal(), "\x1b[2mhm\x1b[0m\n\na\\x1b[31m**b**\n"),
    ):  # fmt: skip
        shown = PlainScreen(out).show(pieces(Said("hm", thought=True), "a\x1b[31m", "**b**"))
        assert out.getvalue() == expected
        assert shown == Shown("a\x1b[31m**b**", "hm", FIGURES), "what is remembered is what the model said"


@pytest.mark.parametrize("found", [
    [], ["one"], ["one\n\n", "two"], ["# a\n", "b\n"], ["- a\n- b\n\n- c\n"], ["```\na\n\nb\n\nc\n"],
    ["```\na\n```\n", "b\n"], ["1. a\n\n2. b\n\n", "c"], ["a\n\n", "- b\n\n", "c\n"], ["a\n---\n"],
    ["\n\na\n\n", "b"], ["|a|\n|-|\n|b|\n\n", "c"], ["> a\x0bd\u2028e\nb\n\n", "c\n"],
])  # fmt: skip
def test_blocks(found: list[str]) -> None:
    assert blocks("".join(found)) == found


def test_markdown_answers_are_drawn_as_a_whole_text_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.commands.chat.markdown._FRAME", 0.0)
    monkeypatch.setattr("llamado.commands.chat.markdown._SHARE", 0)
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
    """What stands on the terminal at last."""
    import pyte

    screen = pyte.Screen(console.width, console.height)
    file = console.file
    assert isinstance(file, Terminal)
    pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


def test_finished_blocks_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.commands.chat.markdown._FRAME", 0.0)
    monkeypatch.setattr("llamado.commands.chat.markdown._SHARE", 0)
    console = Console(file=Terminal(), width=60, height=40, force_terminal=True)
    MarkdownScreen(console).show(pieces(*"first block\n\nsecond block\nis longer\n\nthird block\nend\n"))
    file = console.file
    assert isinstance(file, Terminal)
    after = file.getvalue().rpartition("second block")[2]
    assert "first block" not in after.partition("third")[0] and last_screen(console).count("first block") == 1


def test_a_block_higher_than_the_terminal_does_not_smear() -> None:
    console = Console(file=Terminal(), width=40, height=8, force_terminal=True)
    text = "\n".join(f"    line {i}" for i in range(50))
    MarkdownScreen(console).show(pieces(*(f"{line}\n" for line in text.splitlines())))
    shown = last_screen(console).splitlines()
    assert [line.strip() for line in shown] == [f"line {i}" for i in range(50)][-len(shown) :]


def test_of_a_high_block_its_end_is_shown() -> None:
    console = Console(file=io.StringIO(), width=40, height=8)
    console.print(_Tail(Text("\n".join(f"line {i}" for i in range(50)))))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split("\n")[:6] == [f"line {i}" for i in range(44, 50)]


def test_whoever_answers_is_told_when_nobody_listens(speaker: FakeSpeaker) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            if text == "answer ":
                raise KeyboardInterrupt
            return super().write(text)

    answer = speaker.answer([], {})
    shown = PlainScreen(Interrupted()).show(answer)
    assert shown.text == "answer " and shown.figures is None and speaker.ended == 1


@pytest.mark.parametrize("markdown", [False, True])
def test_an_interruption_that_python_dropped_ends_the_answer(markdown: bool) -> None:
    """As it drops those in destructors; the answer would go on, and nobody could stop it any more."""

    def answer() -> Generator[Said, None, Figures]:
        yield Said("begun")
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        for _ in range(100):
            yield Said(" and on")
        return FIGURES

    before = signal.getsignal(signal.SIGINT)
    console = Console(file=Terminal(), width=60, height=40, force_terminal=True)
    shown = (MarkdownScreen(console) if markdown else PlainScreen(Terminal())).show(answer())
    assert shown.figures is None and shown.text.startswith("begun") and shown.text.count("and on") <= 1
    assert signal.getsignal(signal.SIGINT) is before


def test_thoughts_are_folded_and_a_stop_is_marked() -> None:
    console = Console(file=Terminal(), width=60, height=40, force_terminal=True)
    shown = MarkdownScreen(console).show(pieces(Said("let me see", thought=True), "so it is", interrupt=True))
    assert shown == Shown("so it is", "let me see", None)
    screen = last_screen(console)
    assert "let me see" not in screen and "3 words" in screen and "so it is …" in screen


def test_a_stop_shows_nothing_that_was_not_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast model is ahead of its pictures: what came after the last one is neither shown nor kept."""
    monkeypatch.setattr("llamado.commands.chat.markdown._FRAME", 60.0)
    for before in ("", "first\n\nsecond\n\n"):
        console = Console(file=Terminal(), width=60, height=40, force_terminal=True)
        ahead = (" hidden", "\n\nhidden block\n\n", "hidden end")
        shown = MarkdownScreen(console).show(pieces(f"{before}seen", *ahead, interrupt=True))
        assert shown == Shown(f"{before}seen", "", None)
        screen = last_screen(console)
        assert "seen …" in screen and "hidden" not in screen and screen.count("first") == bool(before)


def test_models_do_not_steer_the_terminal() -> None:
    assert printable("a\x1b]0;x\x07\r\n\tb\x9b") == "a\\x1b]0;x\\x07\\x0d\n\tb\\u009b"
    console = Console(file=Terminal(), width=60, height=40, force_terminal=True)
    MarkdownScreen(console).show(pieces("\x1b[2J\x1b]52;c;x\x07"))
    file = console.file
    assert isinstance(file, Terminal)
    assert "\x1b[2J" not in file.getvalue() and "\x1b]" not in file.getvalue()


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, speaker: FakeSpeaker) -> Iterator[FakeSpeaker]:
    monkeypatch.setattr(run, "_here", lambda flags, spec: speaker)
    monkeypatch.setattr(run.logs, "configure", lambda **_: None)
    yield speaker


@pytest.mark.parametrize("arguments", [["-p", "-"], []], ids=["-p -", "a pipe"])
def test_a_question_from_standard_input(
    command: FakeSpeaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Explain this:\n\n/clear\nline two\n"))
    assert cli.main(["run", "model", "-n", "7", *arguments]) == 0
    assert command.asked == [[user("Explain this:\n\n/clear\nline two")]] and command.settings == [{"n_predict": 7}]
    assert capsys.readouterr().out == "answer 1\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert cli.main(["run", "model", *arguments]) == 2
    assert "standard input is empty" in capsys.readouterr().err and len(command.asked) == 1


def test_a_question_and_what_it_is_about(command: FakeSpeaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("line one\nline two\n")
    with open(tmp_path / "text") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert cli.main(["run", "model", "-p", "sum up"]) == 0
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert cli.main(["run", "model", "-p", "hi", "-n", "-1"]) == 0
    assert command.asked == [[user("sum up\n\nline one\nline two")], [user("hi")]]
    assert command.settings == [{}, {"n_predict": -1}]


def test_who_waits_for_a_pipe_says_so(
    command: FakeSpeaker, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
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


def test_an_interrupted_answer_has_its_exit_code(command: FakeSpeaker, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    command.during = interrupt
    assert cli.main(["run", "model", "-p", "hi"]) == 130
    assert capsys.readouterr().out == "answer  …\n"


@pytest.mark.slow
def test_the_whole_command_with_a_model(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "tiny.gguf", n_vocab=320)
    command = [sys.executable, "-m", "llamado", "run", str(path), "-n", "5", "-s", "1"]
    one = subprocess.run([*command, "-p", "-"], input="Hello", capture_output=True, text=True, timeout=300)
    other = subprocess.run([*command, "-p", "Hello"], stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    assert one.returncode == other.returncode == 0 and one.stdout.strip()
    assert one.stdout == other.stdout.decode("utf-8", "replace")
