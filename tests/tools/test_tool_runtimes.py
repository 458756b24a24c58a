"""Tools in containers and over ssh; fake docker and ssh programs run the commands locally."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiers import first_of

from llamado.tools.errors import InvalidCall, ToolsError
from llamado.tools.runtime import command_wrapper
from llamado.tools.settings import ToolSettings
from llamado.tools.tool import Call
from llamado.tools.toolbox import Toolbox

DOCKER = """#!/bin/sh
echo "$@" >> "$NOTES"
if [ "$1" = run ]; then
  [ "$6" = there ] || exit 125
  echo "box-$$" > "$5"; exec sh
fi
shift
[ "$1" = -i ] && { shift; exec 3<&0; }
shift
exec "$@"
"""
SSH = """#!/bin/sh
echo "$@" >> "$NOTES"
while [ "$1" != host ]; do shift; done
exec sh -c "$2"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("docker", DOCKER), ("ssh", SSH)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    (tmp_path / "there" / "sub").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    return tmp_path / "there"


def using(place: Path, test: Callable[[Any], Any], runtime: str = "", builtin: tuple[str, ...] = ("all",)) -> None:
    async def work() -> None:
        box = Toolbox(ToolSettings(builtin=builtin, folder=str(place.parent / "here"), runtime=runtime))

        async def use(name: str, runtime: str = "", **params: Any) -> Any:
            tool = await box.find(name)
            assert tool is not None
            return await box.use(tool, Call(params=params, cwd=str(place), runtime=runtime))

        try:
            await test(use)
        finally:
            await asyncio.to_thread(box.close)

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("runtime", first_of(["ssh:host", "docker-container:box", "docker:there"], 2))
def test_tools_work_on_remote_hosts(place: Path, runtime: str) -> None:
    async def test(use: Any) -> None:
        odd = "it's $HOME `x`.txt"
        written = await use("write_file", path=f"new/{odd}", content="one\ntwo\n")
        assert written["bytes"] == 8 and (place / "new" / odd).read_text() == "one\ntwo\n"
        assert await use("read_file", path=f"new/{odd}", start_line=2) == {"plain_text_response": "two\n"}
        edits = [{"old_text": "two", "new_text": "2"}]
        assert (await use("edit_file", path=f"new/{odd}", edits=edits))["edits_applied"] == 1
        found = await use("grep_search", path=".", pattern="^2$")
        assert found["plain_text_response"] == f"new/{odd}:2\n\n---\nTotal matches: 1\n"
        found = await use("file_glob_search", path=".", type="all")
        assert [entry["path"] for entry in found["entries"]] == ["new", "sub", f"new/{odd}"]
        assert await use("exec_shell_command", command="pwd; echo 'a b'; exit 3") == {
            "plain_text_response": f"{place}\na b\n\n[exit code: 3]"
        }
        assert (await use("get_info"))["cwd"] == str(place)
        assert await use("read_file", path="none") == {"error": "cannot stat file: none"}

    using(place, test, runtime)
    assert list((place.parent / "here").iterdir()) == []
    assert (place.parent / "notes").read_text()


@pytest.mark.slow
def test_an_exited_container_is_restarted(place: Path) -> None:
    async def test(use: Any) -> None:
        notes = place.parent / "notes"
        first = (await use("exec_shell_command", command="true"), notes.read_text().split("box-")[1].split()[0])[1]
        os.kill(int(first), 9)
        while len(notes.read_text().split("run --rm")) < 3:
            await use("exec_shell_command", command="true")

    using(place, test, "docker:there")


def test_choosing_a_runtime_needs_shell_access(place: Path) -> None:
    async def everywhere(use: Any) -> None:
        assert (await use("get_info", "ssh:host"))["cwd"] == str(place)
        with pytest.raises(ToolsError, match="unknown tool runtime: foo:bar; expected one of docker:IMAGE"):
            await use("get_info", "foo:bar")

    async def nowhere(use: Any) -> None:
        with pytest.raises(InvalidCall, match="exec_shell_command"):
            await use("read_file", "ssh:host", path="/etc/passwd")

    using(place, everywhere)
    using(place, nowhere, builtin=("read_file",))


@pytest.mark.parametrize(
    "spec",
    ["foo:x", "docker:image", "docker-container:", "docker-container:--privileged", "podman-container:a b",
     "ssh:", "ssh:-oProxyCommand=x", "ssh:a b", "ssh:a;b"],
)  # fmt: skip
def test_invalid_runtimes(spec: str) -> None:
    with pytest.raises(ToolsError):
        command_wrapper(spec)


def test_invalid_images(place: Path) -> None:
    for spec in ("docker:none", "docker:", "docker:--privileged", "podman:x"):
        with pytest.raises(ToolsError):
            Toolbox(ToolSettings(builtin=("all",), folder=str(place), runtime=spec))


def test_a_failed_container_start_is_explained(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = place / "docker"
    program.write_text("#!/bin/sh\necho >&2\necho 'no daemon is there' >&2\necho more >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    with pytest.raises(ToolsError, match=r"docker run there: the container did not start: no daemon is there$"):
        Toolbox(ToolSettings(builtin=("all",), folder=str(place), runtime="docker:there"))


@pytest.mark.slow
def test_a_missing_engine_is_explained(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(ToolsError, match="docker cannot be run: No such file or directory; is it installed"):
        Toolbox(ToolSettings(builtin=("all",), folder=str(place), runtime="docker:there"))
