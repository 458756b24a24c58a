"""The examples of CONTRIBUTING.md, applied to a copy of the sources; what stands there is what is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


class Step(NamedTuple):
    """A block of an example: the file it is about, and what it becomes or how it changes."""

    path: str
    text: str
    changes: bool


def examples() -> dict[str, list[Step]]:
    """The steps of each example by its heading."""
    found: dict[str, list[Step]] = {}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```(python|diff)\n# (\S+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        found[section.split("\n", 1)[0]] = [Step(path, text, kind == "diff") for kind, path, text in blocks]
    return found


def apply(step: Step, root: Path) -> None:
    path = root / step.path
    if not step.changes:
        assert not path.exists(), f"{step.path} is there already"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(step.text)
        return
    lines = step.text.splitlines()
    assert all(line[:1] in " +-" for line in lines)
    old = "\n".join(line[1:] for line in lines if line[0] != "+")
    new = "\n".join(line[1:] for line in lines if line[0] != "-")
    text = path.read_text()
    assert text.count(old) == 1, f"{step.path} has no such place, or several: {old}"
    path.write_text(text.replace(old, new))


def test_each_kind_of_thing_has_an_example() -> None:
    found = examples()
    assert [*found] == [
        "An architecture", "A weight type", "A device", "A sampler", "A tool dialect", "An endpoint",
    ]  # fmt: skip
    for steps in found.values():
        assert any(step.path.startswith("tests/") for step in steps)
        assert any(step.path.startswith("src/") for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", examples())
def test_the_example_works(name: str, tmp_path: Path) -> None:
    """Its changes fit, its sources are typed and sorted as ours, its test passes, and fails without them."""
    steps = examples()[name]
    ignore = shutil.ignore_patterns("captures", "*.svg")
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src"), "LLAMADO_CACHE": str(tmp_path / "cache")}

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout + done.stderr

    for step in steps:
        if step.path.startswith("tests/"):
            apply(step, tmp_path)
    tests = [step.path for step in steps if step.path.startswith("tests/")]
    pytest_ = ("pytest", "-q", "-p", "no:cacheprovider", *tests)
    status, said = run(*pytest_)
    assert status in (1, 2), f"the test passes without the example:\n{said}"  # failed, or could not be collected
    for step in steps:
        if not step.path.startswith("tests/"):
            apply(step, tmp_path)
    status, said = run(*pytest_)
    assert status == 0, said
    changed = sorted({step.path for step in steps if step.path.startswith("src/")})
    status, said = run("ruff", "check", *changed)
    assert status == 0, said
    status, said = run("ruff", "format", "--check", *changed)
    assert status == 0, said
