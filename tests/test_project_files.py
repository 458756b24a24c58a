"""Project files: the pre-commit configuration runs the checks of test.sh, and the changelog keeps its form."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from llamado import __version__

ROOT = Path(__file__).parent.parent
AREAS = [
    "Changed behavior", "Images and audio", "Graphics cards", "Models", "Speed and memory", "Prompt cache", "API",
    "Python", "Clusters", "Operation", "Command line", "Web page", "Fixes", "Development",
]  # fmt: skip


def test_pre_commit_does_the_quick_checks_of_test_sh() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert all(hook["language"] == "system" for hook in hooks)
    done = {tuple(hook["entry"].replace(" --force-exclude", "").split()) for hook in hooks}
    script = (ROOT / "test.sh").read_text()
    run = {tuple(line.split()) for line in re.findall(r"^(\.venv/bin/(?!python).*)$", script, re.MULTILINE)}
    assert {tuple(word for word in command if word != ".") for command in run} == done


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[0] == "Unreleased" and versions[1] == __version__
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        areas = re.findall(r"^### (.+)$", section, re.MULTILINE)
        assert areas and len(set(areas)) == len(areas) and set(areas) <= set(AREAS)
    for name in versions:
        assert f"\n[{name}]: " in text


def test_the_versions_of_all_test_packages_are_fixed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {_package(requirement) for requirement in [*project["dependencies"], *extras["dev"], *extras["full"]]}
    lines = (ROOT / "tests" / "constraints.txt").read_text().splitlines()
    fixed = {_package(line) for line in lines if re.fullmatch(r"[\w.-]+==[\w.]+", line)}
    assert not wanted - fixed


def _package(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name
    return name[0].lower().replace("_", "-")


@pytest.mark.parametrize(
    "commands, last",
    [
        ('step "one thing" true', "passed"),
        ('step "one thing" bash -c "echo no module >&2; exit 3"', "FAILED: one thing (exit status 3: no module)"),
        ('tests "ours" bash -c "echo first; echo failed: ruff; exit 1"', "FAILED: ours (exit status 1: failed: ruff)"),
        # What goes on in the background keeps the output open.
        pytest.param(
            'step "a server" bash -c "sleep 5 & echo no port; exit 1"',
            "FAILED: a server (exit status 1: no port)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_last_line_of_a_run_names_what_failed_and_why(commands: str, last: str, tmp_path: Path) -> None:
    script = f"set -euo pipefail\n. {ROOT}/tests/steps.sh\n{commands}\nfinish"
    output = tmp_path / "output"
    with output.open("w") as file:
        code = subprocess.run(["bash", "-c", script], cwd=tmp_path, stdout=file).returncode
    assert output.read_text().splitlines()[-1] == last
    assert code == (last != "passed")


@pytest.mark.slow
def test_a_crashed_test_process_fails_one_test(tmp_path: Path) -> None:
    """The others of its file run in another process, once."""
    text = (ROOT / "tests/conftest.py").read_text()
    hook = re.search(r"^@.*\ndef pytest_xdist_make_scheduler(.*\n)+?(?=\n\n)", text, re.M)
    assert hook is not None  # the rest of the file imports all that tests may need
    (tmp_path / "conftest.py").write_text(f"from typing import Any\nimport pytest\n\n{hook[0]}")
    (tmp_path / "test_crash.py").write_text(
        "import os\nimport pytest\n\n\n@pytest.mark.parametrize('i', range(4))\n"
        "def test_abort(i):\n    open(f'{i}', 'a').write('x')\n    i == 2 and os.abort()\n"
    )
    (tmp_path / "test_other.py").write_text("def test_nothing():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", "-n", "2", "--dist", "loadfile"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": "1"}
    run = subprocess.run([*command, "."], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    end = run.stdout.splitlines()[-2:]
    assert run.returncode == pytest.ExitCode.TESTS_FAILED and "1 failed, 4 passed" in end[1]
    assert re.fullmatch(r"FAILED test_crash.py::test_abort\[2\] - worker 'gw\d' crashed while running '.*'", end[0])
    assert [(tmp_path / str(i)).read_text() for i in range(4)] == ["x"] * 4


def test_the_end_of_a_run_gives_the_reasons_of_failed_tests(tmp_path: Path) -> None:
    """CI may keep only the end of the output."""
    script = f"""
        set -euo pipefail
        . {ROOT}/tests/steps.sh
        pytest=(bash -c "exit 1")
        python3() {{ echo "test_a.py::test_one"; }}
        tests "ours" bash -c "echo 'FAILED test_a.py::test_one - assert 1 == 2'; echo '1 failed in 3 s'; exit 1"
        step "further" seq 100
        finish"""
    run = subprocess.run(["bash", "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    end = run.stdout.splitlines()[-3:]
    assert run.returncode == 1 and end[0].endswith("flaky: 0")
    assert end[1] == "FAILED test_a.py::test_one - assert 1 == 2"
    assert end[2].startswith("FAILED: ours (exit status 1") and end[2].endswith("test_a.py::test_one")
