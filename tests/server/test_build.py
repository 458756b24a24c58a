"""The build name that clients compare, and the source of its commit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from fakes import client, run

from llamado import __version__
from llamado.build import BUILD, commit, head


def test_the_name_begins_with_the_build_of_llama_cpp() -> None:
    assert re.fullmatch(rf"b11434-llamado-{re.escape(__version__)}(\+[0-9a-f]{{9}})?", BUILD)

    async def work() -> list[Any]:
        async with client() as http:
            answers = [(await http.get("/props")).json()["build_info"]]
            for path in ("/v1/completions", "/v1/chat/completions"):
                body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
                answers.append((await http.post(path, json=body)).json()["system_fingerprint"])
                stream = await http.post(path, json={**body, "stream": True})
                answers += re.findall('"system_fingerprint":"([^"]*)"', stream.text)
            return answers

    assert set(run(work())) == {BUILD}


def git(folder: Path, *arguments: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_of_a_working_tree(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    assert head(one) == ""
    git(one, "init", "-q", "-b", "trunk")
    assert head(one) == ""  # no commit yet
    git(one, "commit", "-q", "--allow-empty", "-m", "a")
    expected = git(one, "rev-parse", "HEAD")
    assert head(one) == expected
    git(one, "worktree", "add", "-q", str(other))
    git(other, "commit", "-q", "--allow-empty", "-m", "b")
    assert head(other) == git(other, "rev-parse", "HEAD") != expected
    git(one, "pack-refs", "--all")
    assert head(one) == expected
    git(one, "checkout", "-q", "--detach")
    assert head(one) == expected


def test_a_commit_in_the_wheel_wins(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "llamado"
    package.mkdir(parents=True)
    assert commit(package) == ""
    (package / "commit.txt").write_text("0123456789abcdef\n")
    assert commit(package) == "012345678"
