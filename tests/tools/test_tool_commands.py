"""Commands run by tools: time limit, output limit, and no processes left behind."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import GUARD, until

from llamado.flags import FLAGS
from llamado.tools import commands as module
from llamado.tools.commands import CommandRunner


@pytest.fixture
def commands() -> Iterator[CommandRunner]:
    found = CommandRunner()
    yield found
    found.close()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pid: int) -> bool:
    until(lambda: not is_running(pid))
    return True


def test_output_and_exit_code(commands: CommandRunner) -> None:
    ran = commands.run(["sh", "-c", "echo out; echo err >&2; exit 3"], limit=100, seconds=GUARD)
    assert (ran.output, ran.code, ran.ok) == (b"out\nerr\n", 3, False)
    assert (
        commands.run(["sh", "-c", "echo err >&2; echo out"], limit=100, seconds=GUARD, merge_stderr=False).output
        == b"out\n"
    )
    assert commands.run(["cat"], limit=100, seconds=GUARD, input_bytes=b"given").output == b"given"
    assert commands.run(["sh", "-c", "kill -9 $$"], limit=9, seconds=GUARD).code == 1
    assert commands.run(["sh", "-c", "exit 130"], limit=9, seconds=GUARD).code == 130
    assert commands.run(["/no/such/command"], limit=9, seconds=GUARD).code == -1


def test_output_is_truncated(commands: CommandRunner) -> None:
    ran = commands.run(["sh", "-c", "seq 1 100000"], limit=6, seconds=GUARD)
    assert (ran.text, ran.code) == ("1\n2\n3\n\n[output truncated]", 0)


def test_endless_output_ends_at_the_deadline(commands: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    ran = commands.run(["yes"], limit=1000, seconds=1)
    assert len(ran.output) == 1000 and ran.cut and ran.timed_out
    assert len(pauses) == pytest.approx(1 / module._AFTER_LIMIT, abs=1)  # one after each read


@pytest.mark.parametrize("script", ["sleep 600 & echo $!", "sleep 600 & echo $!; sleep 600"])
def test_child_processes_end_with_the_command(
    commands: CommandRunner, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """This includes processes that left the group and the session, and commands that run out of time."""
    pieces: list[str] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: len("".join(pieces))))
    ran = commands.run(["sh", "-c", script], limit=100, seconds=1, on_output=pieces.append)
    assert ran.timed_out or not script.endswith("600")
    assert gone(int(ran.output))


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
@pytest.mark.parametrize("ending", ["exit 3", "sleep 600"])
def test_daemons_end_with_the_command(commands: CommandRunner, tmp_path: Path, ending: str) -> None:
    """This includes daemons without a parent, a session or an environment of the command."""
    script = f"mkfifo said; (env -i setsid sh -c 'echo $$; echo > said; exec sleep 600' &); read line < said; {ending}"
    pieces: list[str] = []

    def stopped() -> bool:
        return ending == "sleep 600" and bool(pieces)

    ran = commands.run(
        ["sh", "-c", script], limit=100, seconds=GUARD, cwd=str(tmp_path), on_output=pieces.append, is_stopped=stopped
    )
    assert gone(int(ran.output))
    assert ran.code == (3 if ending == "exit 3" else 1)


def test_a_missing_program_is_reported(commands: CommandRunner, tmp_path: Path) -> None:
    ran = commands.run(["no-such-program"], limit=9, seconds=GUARD)
    assert (ran.output, ran.code) == (b"failed to spawn process", -1)


def test_a_command_ends_when_its_client_disconnects(commands: CommandRunner) -> None:
    looks = itertools.count()
    ran = commands.run(["sleep", "600"], limit=100, seconds=2 * GUARD, is_stopped=lambda: next(looks) > 1)
    assert not ran.timed_out and ran.code == 1


def test_output_is_split_at_characters(commands: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 1)
    pieces: list[str] = []
    commands.run(["printf", r"a\303\251"], limit=100, seconds=GUARD, on_output=pieces.append)
    assert pieces == ["a", "é"]


def test_commands_do_not_inherit_keys(commands: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in FLAGS:
        for name in flag.env if flag.secret else ():
            monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("PLAIN", "word")
    output = commands.run(["env"], limit=100_000, seconds=GUARD).output
    assert b"sesame" not in output and b"PLAIN=word" in output


@pytest.mark.slow
def test_commands_end_when_the_server_is_killed(tmp_path: Path) -> None:
    program = """
import sys
from llamado.tools.commands import CommandRunner
CommandRunner().run(["sh", "-c", "echo $$ > " + sys.argv[1] + "; sleep 600"], limit=10, seconds=500)
"""
    note = tmp_path / "pid"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen([sys.executable, "-c", program, str(note)], env=environment)
    until(lambda: note.exists() and note.read_text().strip())
    server.kill()
    server.wait()
    assert gone(int(note.read_text()))
