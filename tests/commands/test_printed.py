"""Output of commands contains no terminal control characters from untrusted text."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from llamado.commands import cli, verify
from llamado.commands.files import models
from llamado.gguf.sources.stored import StoredModel
from llamado.terminal.console import Console
from llamado.terminal.text import print as print_text
from llamado.terminal.text import printable

SOURCES = Path(cli.__file__).parents[1]
EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202e\x7f\r"
"""Writes to the clipboard, clears the screen, and reverses text."""
STEERS = ("\x1b", "\x07", "\x9b", "\u202e", "\x7f", "\r")


def harmless(text: str) -> bool:
    return r"\x1b]52" in text and not any(c in text for c in STEERS)


def test_control_characters_are_escaped_in_text() -> None:
    assert printable("a\tb\nc ü 漢 \u3000 👩\u200d🔬") == "a\tb\nc ü 漢 \u3000 👩\u200d🔬"
    assert printable("\x00\x1b\r\x7f\x9b\u2028\u202e\ud800") == r"\x00\x1b\x0d\u007f\u009b\u2028\u202e\ud800"
    assert json.loads(printable(json.dumps(EVIL, ensure_ascii=False))) == EVIL


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    print_text("a", EVIL, 3, sep=EVIL, end=f"{EVIL}\n")
    print_text(EVIL, file=sys.stderr, flush=True)
    print_text()
    out, err = capsys.readouterr()
    assert harmless(out) and out.count("x1b]52") == 4 and out.endswith("\n\n") and harmless(err)


def test_console_escapes_texts() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(Text(EVIL, style="bold"))
    for what in (table, Panel(EVIL), Text(EVIL), EVIL):
        console.print(what)
    shown = file.getvalue()
    assert "\x1b[1m" in shown and "\x1b]" not in shown and "\x1b[2J" not in shown
    assert not any(c in shown for c in STEERS if c != "\x1b")


def test_top(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": EVIL, "devices": [], "tokens_per_second": None, "token_seconds": None,
            "events": [{"at": 1.0, "kind": EVIL, "device": EVIL, "what": EVIL}]}  # fmt: skip
    real = httpx.Client
    answers = httpx.MockTransport(lambda _: httpx.Response(200, json=body))
    monkeypatch.setattr("llamado.commands.top.top.httpx.Client", lambda **given: real(transport=answers, **given))
    assert cli.main(["top", "h:1", "--once"]) == 0
    assert harmless(capsys.readouterr().out)


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    side = {"url": EVIL, "token": EVIL, "top": [], "repeats_itself": True}
    receipt = {"build": EVIL, "files": [{"name": EVIL, "sha256": EVIL}]}
    found: dict[str, Any] = {
        "servers": [{"url": EVIL, "receipt": receipt}], "conflicts": [EVIL], "notes": [EVIL], "prompts": 1,
        "differences": [{"number": 1, "seed": 2, "token": 3, "sides": [side, side]}], "different_answers": 1,
        "parallel": 1, "equal": False,
    }  # fmt: skip
    verify._print(found)
    assert harmless(capsys.readouterr().out)


def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"Failed to connect to 10.0.0.2:50052{EVIL}\n")
    assert cli.main(["doctor", str(log)]) == 1
    assert harmless(capsys.readouterr().out)


def test_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.gguf.part"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(models, "stored_models", lambda: [StoredModel(EVIL, file, (file,), EVIL)])
    assert cli.main(["list"]) == 0
    assert harmless(capsys.readouterr().out)


def test_error_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", f"/nowhere/{EVIL}.gguf"]) != 0
    assert harmless(capsys.readouterr().err)


# Modules that escape texts themselves, or write to another process.
DRAW = {"commands/chat/run.py", "commands/chat/markdown.py", "cluster/taps.py", "terminal/text.py"}


@pytest.mark.parametrize("folder", ["commands", "cluster", "gguf", "rpc", "router", "gateway", "terminal"])
def test_all_output_is_escaped(folder: str) -> None:
    past = []
    for path in (SOURCES / folder).rglob("*.py"):
        name = path.relative_to(SOURCES).as_posix()
        text = path.read_text()
        if not re.search(r"\b(print|Console)\(", text):
            continue
        tree = ast.parse(text)
        imported = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        }  # fmt: skip
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        prints = "print" in called and "llamado.terminal.text.print" not in imported
        draws = "Console" in called and "llamado.terminal.console.Console" not in imported
        if (prints or draws) and name not in DRAW:
            past.append(name)
    assert not past, "use llamado.terminal.text.print and llamado.terminal.console.Console"
