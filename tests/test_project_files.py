"""Project files: the pre-commit configuration runs the checks of test.sh, and the changelog keeps its form."""

from __future__ import annotations

import re
from pathlib import Path

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
