"""Sessions of `llamado run` in a real terminal, key by key, with a model that the test makes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from ports import free_port
from record_terminal import lasting, recorded, shown
from terminals import Terminal
from tiny_models import make_llama
from waiting import until

pytestmark = pytest.mark.slow

Open = Callable[..., Terminal]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("sessions") / "tiny.gguf", n_vocab=320, n_ctx=16384)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(*arguments: str, **options: int) -> Terminal:
        opened.append(Terminal(["run", *arguments], environ={"XDG_STATE_HOME": str(tmp_path / "state")}, **options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.mark.full
def test_a_session(terminal: Open, model: Path, tmp_path: Path) -> None:
    """Several lines, commands, a saved chat, the history of the next session, and Ctrl-D."""
    one = terminal(str(model), "-n", "6", "-s", "1", "-c", "512")
    one.until("^tiny.gguf: /help .* Ctrl-D quits")
    one.prompt()
    one.paste("first line\nsecond line")
    one.until("second line")
    assert "tokens/s" not in one.text, "what is pasted is not sent before Enter"
    one.type("\r")
    one.until("6 tokens, .* tokens/s, first after .* s, cut")
    one.prompt()
    one.type('"""\rquoted\rlines\r"""\r')
    one.until("6 tokens", count=2)
    one.prompt()
    one.type("/set temp\t")
    one.until("/set temperature")
    one.type(" 0.5\r")
    one.until("temperature = 0.5")
    one.prompt()
    one.type("/regen\r")
    one.until("6 tokens", count=3)
    one.prompt()
    one.type("/stats\r")
    one.until("tokens/s on average")
    assert re.search(r"messages: 4, answers: 3, generated tokens: 18", one.text)
    assert re.search(r"last prompt: \d+ tokens, [1-9]\d* of them from the cache", one.text)
    one.prompt()
    one.type(f"/save {tmp_path}/chat.json\r")
    one.until("4 messages saved to")
    one.prompt()
    one.type("\x04")
    assert one.exit_code() == 0
    kept = json.loads((tmp_path / "chat.json").read_text())
    assert [message["content"] for message in kept["messages"][::2]] == ["first line\nsecond line", "quoted\nlines"]
    assert kept["settings"] == {"n_predict": 6, "temperature": 0.5}

    other = terminal(str(model), "-n", "6", "-s", "1", "-c", "512")
    other.prompt()
    other.type(f"/load {tmp_path}/chat.json\r")
    other.until("4 messages loaded")
    other.prompt()
    other.type("\x1b[A\x1b[A\r")  # the last entry is this session's /load, the one before /save
    other.until("4 messages saved to")
    other.prompt()
    other.type("/exit\r")
    assert other.exit_code() == 0


@pytest.mark.full
def test_stopped_answer_is_kept(terminal: Open, tmp_path: Path) -> None:
    # With a context for minutes, the answer is not complete before Ctrl-C.
    model = make_llama(tmp_path / "slow.gguf", n_vocab=320, n_ctx=16384, n_layer=60)
    one = terminal(str(model), "--ignore-eos", "-s", "1", "-n", "16000")
    one.prompt()
    one.type("a story\r")
    one.until("a story\n+.*\\w", 30)
    one.read(0.5)
    one.type("\x03")
    one.until("…")
    one.prompt()
    one.type("half a quest\x03")
    one.until("Ctrl-D or /exit quits")
    one.prompt()
    one.type("/stats\r")
    one.until("messages: 2, answers: 1, generated tokens: [1-9]")
    one.prompt()
    one.type("/set n_predict 4\r")
    one.until("n_predict = 4")
    one.prompt()
    one.type("and then?\r")
    one.until("4 tokens")
    one.prompt()
    one.type("/stats\r")
    one.until("messages: 4, answers: 2")
    one.type("\x04")
    assert one.exit_code() == 0


@pytest.mark.full
def test_a_file_before_a_terminal(model: Path) -> None:
    """Standard input is no terminal, standard output is one."""
    line = f"echo some text | {sys.executable} -m llamado run {model} -n 6 -s 1 -p 'sum up'; echo code $?"
    one = Terminal(["-c", line], program=["sh"])
    try:
        one.until("^code 0")
        assert len(one.text) > len("code 0") + 1
    finally:
        one.close()


@pytest.mark.full
def test_a_terminal_without_markdown(terminal: Open, model: Path) -> None:
    one = terminal(str(model), "-n", "6", "-s", "1", "--no-markdown")
    one.prompt()
    one.raw = b""
    one.type("hi\r")
    one.until("6 tokens")
    answer = one.raw.rpartition(b"6 tokens")[0]
    assert b"\x1b[2K" not in answer and b"\x1b[1A" not in answer, "nothing is drawn twice"
    one.type("/exit\r")
    assert one.exit_code() == 0


def is_well(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.full
def test_chat_with_a_server(terminal: Open, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "llamado", "serve", "-m", str(model), "--port", str(port), "--api-key", "sesame"]
    with subprocess.Popen([*command, "-c", "512", "-np", "1", "--log-disable"]) as server:
        try:
            until(lambda: is_well(url))
            here, far = ("run", str(model), "-c", "512"), ("run", "--url", url)
            monkeypatch.setenv("LLAMA_API_KEY", "sesame")
            same = []
            for way in (here, far):
                given = [sys.executable, "-m", "llamado", *way, "-p", "Hello", "-n", "8", "-s", "3"]
                done = subprocess.run(given, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=120)
                same.append(done.stdout)
            assert same[0] == same[1] != b"\n"
            one = terminal("--url", url, "-n", "5", "--ignore-eos")
            one.until(f"{model.stem}.*: /help")
            one.prompt()
            one.type("Hello\r")
            one.until("5 tokens, .* tokens/s")
            one.prompt()
            one.type("Hello again\r")
            one.until("5 tokens", count=2)
            one.prompt()
            one.type("/stats\r")
            one.until(r"last prompt: \d+ tokens, [1-9]\d* of them from the cache")
            one.type("\x04")
            assert one.exit_code() == 0
            monkeypatch.delenv("LLAMA_API_KEY")
            wrong = terminal("--url", url, "-p", "hi", "--api-key", "open")
            assert wrong.exit_code() == 1
            assert "401" in wrong.text and "give a key with --api-key" in wrong.text.replace("\n", "")
        finally:
            server.terminate()


@pytest.mark.full
def test_smollm2_in_a_terminal(terminal: Open, smollm2_path: Path) -> None:
    """A real model: Markdown is drawn, and every line of it stands there once."""
    one = terminal(str(smollm2_path), "-n", "60", "-s", "1", "--temp", "0", rows=20)
    one.prompt()
    one.type("Answer with a numbered list of three fruits, nothing else.\r")
    one.until(r"tokens/s", 120)
    answer = one.text.rpartition("nothing else.")[2]
    assert answer.count(" 1 ") == 1 and answer.count(" 2 ") == 1, answer
    one.type("/exit\r")
    assert one.exit_code() == 0


@pytest.mark.full
def test_session_of_the_page(smollm2_path: Path) -> None:
    assert lasting(recorded()) == lasting(shown()), "run: python tests/commands/record_terminal.py"
