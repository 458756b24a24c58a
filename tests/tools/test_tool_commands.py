"""Commands of tools: their time, their output, and what they leave running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import GUARD, until

from llamado.flags import FLAGS
from llamado.tools.commands import Commands


@pytest.fixture
def commands() -> Iterator[Commands]:
    found = Commands()
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


def test_output_and_exit_code(commands: Commands) -> None:
    ran = commands.run(["sh", "-c", "echo out; echo err >&2; exit 3"], limit=100, seconds=GUARD)
    assert (ran.output, ran.code, ran.ok) == (b"out\nerr\n", 3, False)
    assert (
        commands.run(["sh", "-c", "echo err >&2; echo out"], limit=100, seconds=GUARD, merged=False).output == b"out\n"
    )
    assert commands.run(["cat"], limit=100, seconds=GUARD, given=b"given").output == b"given"
    assert commands.run(["sh", "-c", "kill -9 $$"], limit=9, seconds=GUARD).code == 1
    assert commands.run(["sh", "-c", "exit 130"], limit=9, seconds=GUARD).code == 130
    assert commands.run(["/no/such/command"], limit=9, seconds=GUARD).code == -1


def test_output_is_cut(commands: Commands) -> None:
    ran = commands.run(["sh", "-c", "seq 1 100000"], limit=6, seconds=GUARD)
    assert (ran.text, ran.code) == ("1\n2\n3\n\n[output truncated]", 0)


@pytest.mark.slow
def test_a_flood_ends_with_its_time_and_takes_no_memory(commands: Commands) -> None:
    busy = time.process_time()
    ran = commands.run(["yes"], limit=1000, seconds=1)
    assert len(ran.output) == 1000 and ran.cut and ran.timed_out
    assert time.process_time() - busy < 0.3


@pytest.mark.slow
def test_what_it_started_ends_with_it(commands: Commands) -> None:
    """Also what left the group and its session, and also when the time is over."""
    for script, seconds in (("sleep 60 & echo $!", 5.0), ("sleep 60 & echo $!; sleep 60", 0.5)):
        began = time.monotonic()
        ran = commands.run(["sh", "-c", script], limit=100, seconds=seconds)
        assert time.monotonic() - began < 30
        assert gone(int(ran.output))


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
@pytest.mark.parametrize("ending", ["exit 3", "sleep 60"])
def test_a_daemon_ends_with_its_command(commands: Commands, tmp_path: Path, ending: str) -> None:
    """Also one that left the session, lost its parent, and kept nothing of the environment."""
    script = f"mkfifo said; (env -i setsid sh -c 'echo $$; echo > said; exec sleep 60' &); read line < said; {ending}"
    pieces: list[str] = []

    def stopped() -> bool:
        return ending == "sleep 60" and bool(pieces)

    ran = commands.run(
        ["sh", "-c", script], limit=100, seconds=60, cwd=str(tmp_path), said=pieces.append, stopped=stopped
    )
    assert gone(int(ran.output))
    assert ran.code == (3 if ending == "exit 3" else 1)


def test_a_missing_program_is_said(commands: Commands, tmp_path: Path) -> None:
    ran = commands.run(["no-such-program"], limit=9, seconds=60)
    assert (ran.output, ran.code) == (b"failed to spawn process", -1)


@pytest.mark.slow
def test_it_ends_when_nobody_waits(commands: Commands) -> None:
    began = time.monotonic()
    commands.run(["sleep", "60"], limit=100, seconds=50, stopped=lambda: time.monotonic() - began > 0.2)
    assert time.monotonic() - began < 30


def test_output_comes_in_whole_characters(commands: Commands) -> None:
    pieces: list[str] = []
    script = r"printf '\303'; sleep 0.1; printf '\251'"
    commands.run(["sh", "-c", script], limit=100, seconds=GUARD, said=pieces.append)
    assert pieces == ["é"]


def test_keys_are_not_passed_on(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in FLAGS:
        for name in flag.env if flag.secret else ():
            monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("PLAIN", "word")
    output = commands.run(["env"], limit=100_000, seconds=60).output
    assert b"sesame" not in output and b"PLAIN=word" in output


@pytest.mark.slow
def test_commands_end_when_the_server_is_killed(tmp_path: Path) -> None:
    program = """
import sys
from llamado.tools.commands import Commands
Commands().run(["sh", "-c", "echo $$ > " + sys.argv[1] + "; sleep 60"], limit=10, seconds=50)
"""
    note = tmp_path / "pid"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen([sys.executable, "-c", program, str(note)], env=environment)
    while not (note.exists() and note.read_text().strip()):
        time.sleep(0.02)
    server.kill()
    server.wait()
    assert gone(int(note.read_text()))
