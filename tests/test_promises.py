"""docs/promises.md: figures are those of its rows, commands are taken, and the tests that it names are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from parsers import parser_of

from llamado.commands import cli
from llamado.flags import parse

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "promises.md").read_text()


class Row(NamedTuple):
    guide: str
    shown: str
    here: str
    checks: list[str]

    @property
    def works(self) -> bool:
        return self.here.startswith("**works**")


def cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def rows() -> list[Row]:
    found = []
    for section in PAGE.split("\n## ")[1:]:
        for line in section.splitlines():
            if line.startswith("| ") and not line.startswith("| shown "):
                shown, here, checks = cells(line)
                found.append(Row(section.partition("\n")[0], shown, here, re.findall("`([^`]+)`", checks)))
    return found


ROWS = rows()


def test_the_figures_are_those_of_the_rows() -> None:
    expected = []
    for guide in dict.fromkeys(row.guide for row in ROWS):
        own = [row for row in ROWS if row.guide == guide]
        works = sum(row.works for row in own)
        expected.append([f"[{guide}](#{guide.lower().replace(' ', '-')})", len(own), works, len(own) - works])
    expected.append(["all", *(sum(int(line[i]) for line in expected) for i in (1, 2, 3))])
    told = [cells(line) for line in PAGE.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert told[1:] == [[str(cell) for cell in line] for line in expected]


def test_a_row_says_why_and_how_it_is_checked() -> None:
    for row in ROWS:
        assert re.match(r"\*\*works\*\*($|[:;] .)|\*\*differs\*\*: .", row.here), row
        assert any(check.startswith("tests/") for check in row.checks), row


@cache
def names_of(path: Path) -> set[str]:
    """The tests of a file, as pytest names them."""
    found, group = set(), ""
    for inner, function, name in re.findall(r"^(    )?(?:async )?(def|class) (\w+)", path.read_text(), re.MULTILINE):
        if function == "def":
            found.add(f"{group}::{name}" if inner and group else name)
        if not inner:
            group = name if function == "class" else ""
    return found


@pytest.mark.slow
def test_tests_that_are_named_are_there() -> None:
    for row in ROWS:
        for check in row.checks:
            if check.startswith("tests/"):
                path, _, name = check.partition("::")
                assert (ROOT / path).exists() and name in names_of(ROOT / path), (row.shown, check)
            else:
                assert check.startswith("llamado "), (row.shown, check)


def commands() -> Iterator[str]:
    """Whole commands that guides show, and those that check them."""
    program = r"(?:\./)?(?:bin/)?(?:llama-server|rpc-server) .*"
    for row in ROWS:
        for text in re.findall("`([^`]+)`", row.shown):
            text = re.sub(r'^cmd: "(.*)"$', r"\1", text)
            if re.fullmatch(program, text) and "…" not in text:
                yield text
        yield from (check for check in row.checks if check.startswith("llamado "))


@pytest.mark.parametrize("line", dict.fromkeys(commands()))
def test_commands_are_taken(line: str) -> None:
    name, *words = shlex.split(line)
    if name == "llamado":
        command, *words = words
    else:
        command = cli.PROGRAMS[Path(name).name]
    own, behind = cli.split_server_flags(words)
    parse(parser_of(command), command, own, {})
    if behind:
        parse(parser_of("serve"), "serve", behind, {})


def test_enough_commands_are_looked_at() -> None:
    assert sum("-server" in line for line in commands()) > 30
