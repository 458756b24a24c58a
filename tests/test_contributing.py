"""The examples of CONTRIBUTING.md, applied to a copy of the sources; what stands there is what is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
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


def test_names_of_test_files_are_unique() -> None:
    """pytest imports a file outside of packages by its bare name."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.name for path in files)
    assert len(files) > 100
    assert [str(path) for path in files if names[path.name] > 1] == []


def test_every_extension_point_has_an_example() -> None:
    found = examples()
    assert [*found] == [
        "An architecture", "A media encoder", "A weight type", "A device", "An RPC message", "A sampler",
        "A tool dialect", "An endpoint",
    ]  # fmt: skip
    for steps in found.values():
        assert any(step.path.startswith("tests/") for step in steps)
        assert any(step.path.startswith("src/") for step in steps)


def copy(root: Path, names: Sequence[str]) -> Path:
    """A copy of the sources with the tests of some examples."""
    ignore = shutil.ignore_patterns("captures", "*.svg")
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, root)
    for name in names:
        for step in examples()[name]:
            if step.path.startswith("tests/"):
                apply(step, root)
    return root


def own_tests(name: str) -> list[str]:
    """The test files of an example, without those that they import."""
    paths = [step.path for step in examples()[name]]
    return [path for path in paths if path.startswith("tests/") and Path(path).name.startswith("test_")]


def run(root: Path, *arguments: str) -> tuple[int, str]:
    """A module as a program in a copy; compiled kernels are found, and kept, where those of the sources are."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-rA")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return pytest's output for the tests of all examples without their sources."""
    root = copy(tmp_path_factory.mktemp("without"), [*examples()])
    return run(root, *PYTEST, *(path for name in examples() for path in own_tests(name)))[1]


@pytest.mark.full
@pytest.mark.parametrize("name", examples())
def test_the_example_works(name: str, without: str, tmp_path: Path) -> None:
    """Its changes fit, its sources are typed and sorted as ours, its test passes, and fails without them."""
    for path in own_tests(name):  # an error is a test that cannot be collected
        assert re.search(rf"^(FAILED|ERROR) {re.escape(path)}\b", without, re.MULTILINE), without
    root = copy(tmp_path, [name])
    steps = [step for step in examples()[name] if not step.path.startswith("tests/")]
    for step in steps:
        apply(step, root)
    status, said = run(root, *PYTEST, *own_tests(name))
    assert status == 0, said
    changed = sorted({step.path for step in steps if step.path.startswith("src/")})
    for command in (("check",), ("format", "--check")):
        status, said = run(root, "ruff", *command, *changed)
        assert status == 0, said
