"""Tests notice mistakes in kernels and in the emulation (`mutations.txt`)."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from cuda.mutations import HERE, Mutation, mutated, mutations

LEAST = 0.95
"""Share of the mistakes that must be noticed."""


def part_of(mutation: Mutation) -> str:
    """Return the class or function with the mistake: two empty lines are around it."""
    text = mutated(mutation)
    at = mutated(mutation._replace(new="\0")).index("\0")
    return text[text.rfind("\n\n\n", 0, at) + 1 : text.find("\n\n\n", at)]


def test_each_mistake_can_be_made() -> None:
    """The texts occur once, and what replaces them is Python."""
    for mutation in mutations():
        compile(part_of(mutation), mutation.file, "exec")
        assert mutation.old != mutation.new and (HERE / mutation.tests.split()[0]).exists()


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_mistakes_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    command, n = [sys.executable, str(HERE / "mutations.py")], os.cpu_count() or 1
    with ThreadPoolExecutor(n) as pool:
        parts = [[*command, f"{i}/{n}"] for i in range(n)]
        runs = [pool.submit(subprocess.run, part, stdout=subprocess.PIPE, text=True) for part in parts]
    lines = [line for run in runs for line in run.result().stdout.splitlines()]
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert len(lines) == len(list(mutations())), "a run ended early"
    found = sum(line.startswith("found ") for line in lines)
    assert found >= LEAST * len(lines) and not any(line.startswith("ERROR") for line in lines), (
        f"{found} of {len(lines)}"
    )
