"""The pages that people read, as blocks of code, commands and links."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
PAGES += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    """A fenced block: where it begins, its language, its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file that it is, where its first line is a comment with a name; else ""."""
        found = re.match(r"# ([\w./-]+\.\w+)\n", self.text)
        return found[1] if found else ""

    def commands(self) -> Iterator[str]:
        """Its commands, each whole however many lines it has."""
        begun = ""
        for line in self.text.splitlines(keepends=True):
            begun += line
            if not begun.strip() or begun.lstrip().startswith("#"):
                begun = ""
            elif not begun.endswith("\\\n") and is_whole(begun):
                yield begun.strip()
                begun = ""
        assert not begun, f"{self.place}: this command has no end: {begun}"


@cache
def is_whole(command: str) -> bool:
    """Return True if bash accepts the command without a further line."""
    return subprocess.run(["bash", "-n", "-c", command], capture_output=True).returncode == 0


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in their order."""
    found: list[Block] = []
    begun: tuple[int, str, list[str]] | None = None
    for number, line in enumerate(text_of(page).splitlines(keepends=True), 1):
        if line.startswith("```"):
            if begun is None:
                begun = number, line[3:].strip(), []
            else:
                found.append(Block(page, begun[0], begun[1], "".join(begun[2])))
                begun = None
        elif begun is not None:
            begun[2].append(line)
    assert begun is None, f"{page}: a block has no end"
    return found


def prose(page: str) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def spans(page: str) -> list[str]:
    """Return the texts between single backticks in a page's prose."""
    return [span.replace("\\|", "|").replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose(page))]


def words(command: str) -> list[str]:
    """The words of a command's first program, without what is redirected or piped on."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            break
        found.append(word)
    while found and re.fullmatch(r"[A-Z_]+\d*=.*", found[0]):
        found.pop(0)
    return found


def anchors(page: str) -> set[str]:
    """Return the targets of `#…` links to a page: its headings as both GitHub and mkdocs spell them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Return a page's links within the repository."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
