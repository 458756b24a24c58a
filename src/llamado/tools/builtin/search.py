"""`file_glob_search` and `grep_search`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from llamado.patterns import LinearPattern, PatternError
from llamado.tools.builtin.tool import BuiltinTool
from llamado.tools.errors import OutsideFolder, ToolFailed
from llamado.tools.globs import Glob
from llamado.tools.host import ToolHost
from llamado.tools.listing import SECONDS, Entry
from llamado.tools.tool import Call, schema

_MOST = 100
"""Most results of one search (tools/server/server-tools.cpp, b11434)."""
_LINE_BYTES = 64 << 10  # longer lines are searched in parts: matching one cannot be interrupted
_SHOWN_BYTES = 1 << 20  # of all returned lines
_CONTEXT_BYTES = 32 << 20  # of a file searched with context lines: its lines are held in memory
_SKIPPED = (
    "Skips what .gitignore names (in a git repository), or else the usual junk (.git, node_modules, build, dist …). "
    'A pattern without "/" (e.g. "*.cpp") is about the last name of a path, at any depth; one with "/" about the whole '
    'relative path, with "**/" in front unless it begins so or with "/". '
)


def _files(host: ToolHost, path: str, depth: int, kind: str, call: Call) -> tuple[list[Entry], bool]:
    """Return the entries below a folder that match `include` and not `exclude`, and True if some are missing."""
    try:
        include = Glob(call.option("include", "**"))
        exclude = Glob(call.params["exclude"]) if call.option("exclude", "") else None
    except PatternError as error:
        raise ToolFailed(f"invalid glob pattern: {error}") from None
    listing = host.entries(path, depth, kind)
    deadline = time.monotonic() + SECONDS
    found: list[Entry] = []
    for entry in listing.entries:
        if time.monotonic() > deadline or call.is_stopped():
            return found, True
        shown = shown_path(entry.path)
        if include.matches(shown) and not (exclude and exclude.matches(shown)):
            found.append(entry)
    return found, listing.cut


class FileGlobSearch(BuiltinTool):
    """Finds paths that match a pattern."""

    name, title = "file_glob_search", "File search"
    description = (
        "Search a directory and all below it for files that fit a glob pattern. " + _SKIPPED
        + 'type="dir" or "all" lists directories too, with "/" behind them; .gitignore does not count there.'
    )  # fmt: skip
    parameters = schema(
        "path",
        path=("string", "Directory to search in"),
        include=("string", 'Glob pattern of files to list (e.g. "*.cpp" or "src/**/*.cpp"). Default: **'),
        exclude=("string", "Glob pattern of files to leave out"),
        type=("string", 'What to list: "file" (default), "dir" or "all"'),
        max_depth=("integer", "Levels to go down (default: 0, all; 1: only what lies in the directory itself)"),
        limit=("integer", f"Most results, up to {_MOST} (default {_MOST})"),
    )

    def run_on(self, host: ToolHost, call: Call) -> dict[str, Any]:
        path, kind, limit = call.text("path"), call.option("type", "file"), call.number("limit", _MOST)
        if limit < 1:
            raise ToolFailed(f"invalid limit: {limit} (expected 1 or more)")
        if kind not in ("file", "dir", "all"):
            raise ToolFailed(f'invalid type: {kind} (expected "file", "dir" or "all")')
        base = host.absolute(path)
        if host.kind(path) != "dir":
            raise ToolFailed(f"path does not exist or is not a directory: {path}")
        found, cut = _files(host, path, max(0, call.number("max_depth", 0)), kind, call)
        shown = found[: min(limit, _MOST)]
        lines = [shown_path(entry.path) + ("/" if entry.is_dir else "") + "\n" for entry in shown]
        lines.append(f"\n---\nTotal matches: {len(found)}\n")
        if len(found) > len(shown):
            lines.append(
                f"[{len(shown)} results limit reached ({len(found)} total matches). "
                "Refine the glob pattern to narrow the search.]\n"
            )
        if cut:
            lines.append("[results truncated: time budget or unreadable directory]\n")
        entries = [{"path": shown_path(entry.path), "type": "dir" if entry.is_dir else "file"} for entry in shown]
        return {"plain_text_response": "".join(lines), "entries": entries, "base": base}


def shown_path(path: str) -> str:
    """Return a path for JSON: file names are bytes, and not always UTF-8."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class GrepSearch(BuiltinTool):
    """Finds lines that match a pattern."""

    name, title = "grep_search", "Grep search"
    description = (
        "Search for a pattern in the files below a path. Gives the lines that fit, with their files' paths (relative "
        "to the directory). " + _SKIPPED
    )
    parameters = schema(
        "path pattern",
        path=("string", "File or directory to search in"),
        pattern=("string", "What to search for (a regular expression, unless literal is true)"),
        include=("string", "Glob pattern of files to search (default: **)"),
        exclude=("string", "Glob pattern of files to leave out"),
        return_line_numbers=("boolean", "Give the numbers of lines, too"),
        literal=("boolean", "The pattern is a text, not a regular expression (default: false)"),
        ignore_case=("boolean", "Capital and small letters are the same (default: false)"),
        context_lines=("integer", "Lines to show before and after each match (default: 0)"),
    )

    def run_on(self, host: ToolHost, call: Call) -> dict[str, Any]:
        path, expression = call.text("path"), call.text("pattern")
        context = min(max(0, call.number("context_lines", 0)), 1000)
        numbered = call.flag("return_line_numbers") or context > 0
        try:
            pattern = LinearPattern(expression, literal=call.flag("literal"), ignore_case=call.flag("ignore_case"))
        except PatternError as error:
            raise ToolFailed(f"invalid regex: {error}") from None
        kind, cut = host.kind(path), False
        host.absolute(path)
        if kind == "file":
            files = [(path, path)]
        elif kind == "dir":
            chosen, cut = _files(host, path, 0, "file", call)
            files = [(f"{host.absolute(path)}/{entry.path}", shown_path(entry.path)) for entry in chosen]
        else:
            raise ToolFailed(f"path does not exist: {path}")
        out, total, n_bytes, full, late = [], 0, 0, False, False
        deadline = time.monotonic() + SECONDS
        for file, shown in files:
            if full or late:
                break
            lines = list(_lines(host, file, _CONTEXT_BYTES)) if context else _lines(host, file)
            for i, line in enumerate(lines):
                full = total >= _MOST or n_bytes > _SHOWN_BYTES
                late = time.monotonic() > deadline or call.is_stopped()
                if full or late:
                    break
                if not pattern.matches(line.encode()):
                    continue
                total += 1
                around = range(i, i + 1)
                if context and isinstance(lines, list):
                    around = range(max(0, i - context), min(len(lines), i + context + 1))
                for j in around:
                    mark = ":" if j == i else "-"
                    text = lines[j] if isinstance(lines, list) else line
                    out.append(f"{shown}{mark}{f'{j + 1}{mark}' if numbered else ''}{text}\n")
                    n_bytes += len(out[-1])
                if context:
                    out.append("--\n")
        out.append(f"\n---\nTotal matches: {total}\n")
        if full:
            out.append(f"[{total} matches limit reached. Narrow the path/pattern/include to see more.]\n")
        elif late or cut:
            out.append("[results truncated: time budget or unreadable directory]\n")
        return {"plain_text_response": "".join(out)}


def _lines(host: ToolHost, path: str, most: int = 0) -> Iterator[str]:
    """Yield the lines of a file, of its first `most` bytes only; 0: all."""
    n_bytes = 0
    try:
        with host.read(path) as file:
            while (not most or n_bytes < most) and (line := file.readline(_LINE_BYTES)):
                n_bytes += len(line)
                yield line.removesuffix(b"\n").decode("utf-8", "replace")
    except (OSError, OutsideFolder):
        return  # deleted, unreadable, or a link out of the folder
