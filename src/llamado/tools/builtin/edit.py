"""`edit_file`: texts of a file replaced by others.

A text is found as it stands, or else with what models tend to change left out of account: blanks at the ends of lines,
typographic quotation marks, dashes and spaces. Rules and errors are llama-server's (tools/server/server-tools.cpp,
b11434).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from llamado.tools.builtin.tool import BuiltinTool
from llamado.tools.errors import BadCall, ToolFailed
from llamado.tools.machine import ToolMachine
from llamado.tools.tool import Call, schema, text_of

_FILE_BYTES = 16 << 20
_MOST_EDITS = 1000
_PLAIN = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛", "'"),
        **dict.fromkeys("“”„‟", '"'),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
    }
)
_BLANKS_AT_END = re.compile(r"[ \t\r]+(?=\n|\Z)")


class Edit(NamedTuple):
    """One replacement, at a place of the file's text."""

    number: int
    begin: int
    end: int
    text: str


def plain(text: str) -> str:
    """A text without blanks at the ends of lines, and with plain quotation marks, dashes and spaces."""
    # In this order: typographic spaces at the end of a line stay.
    return _BLANKS_AT_END.sub("", text).translate(_PLAIN)


def edited(text: str, edits: list[tuple[str, str]], path: str) -> str:
    """A file's text with all replacements. Raises ToolFailed."""
    loose = plain(text)
    exact = True
    for i, (old, _) in enumerate(edits):
        if old in text:
            continue
        if plain(old) not in loose:
            raise ToolFailed(
                f"could not find edits[{i}].old_text in {path}, it must match the file's current content exactly"
            )
        exact = False
    base = text if exact else loose
    found = []
    for i, (old, new) in enumerate(edits):
        # An empty text is left of one that is nothing but blanks: it is everywhere.
        count = loose.count(plain(old)) if plain(old) else text.count(old)
        if count > 1 or (not exact and not plain(old)):
            raise ToolFailed(f"found {count} occurrences of edits[{i}].old_text in {path}, it must be unique")
        old = old if exact else plain(old)
        begin = base.find(old)
        found.append(Edit(i, begin, begin + len(old), new))
    found.sort(key=lambda edit: edit.begin)
    for one, two in pairwise(found):
        if one.end > two.begin:
            raise ToolFailed(
                f"edits[{one.number}] and edits[{two.number}] overlap in {path}; "
                "merge them into one edit or target disjoint regions"
            )
    return _replaced(base, found, 0) if exact else _keeping_other_lines(text, base, found)


def _replaced(text: str, edits: list[Edit], begins: int) -> str:
    """A piece of the text, which begins at `begins`, with its replacements."""
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.begin - begins], edit.text]
        at = edit.end - begins
    return "".join([*parts, text[at:]])


def _keeping_other_lines(text: str, loose: str, edits: list[Edit]) -> str:
    """The text with its replacements; lines that none of them touches stay as they were."""
    lines, loose_lines = text.split("\n"), loose.split("\n")
    begins = [0, *accumulate(len(line) + 1 for line in loose_lines)]  # of each line; both texts have as many
    groups: list[tuple[int, int, list[Edit]]] = []
    for edit in edits:
        first = bisect_right(begins, edit.begin) - 1
        last = bisect_right(begins, max(edit.begin, edit.end - 1)) - 1
        if groups and first <= groups[-1][1]:
            first, _, inner = groups.pop()
            groups.append((first, last, [*inner, edit]))
        else:
            groups.append((first, last, [edit]))
    parts: list[str] = []
    at = 0
    for first, last, inner in groups:
        parts += [line + "\n" for line in lines[at:first]]
        piece = loose[begins[first] : begins[last + 1]]  # with the end of its last line, where it has one
        parts.append(_replaced(piece, inner, begins[first]))
        at = last + 1
    return "".join(parts) + "\n".join(lines[at:])


class EditFile(BuiltinTool):
    """Texts of a file, replaced by others."""

    name, title, writes = "edit_file", "Edit file", True
    description = (
        "Edit a file by replacing exact texts. Each edits[].old_text must be in the file once; it is looked for in the "
        "file as it is, not as earlier edits leave it. Texts must not overlap: make one edit of neighboring changes. "
        "See write_file to replace the whole file."
    )
    parameters = schema(
        "path edits", path=("string", "Path to the file to edit"), edits=("array", "Texts to replace, at least one")
    )
    parameters["properties"]["edits"]["items"] = schema(
        "old_text new_text",
        old_text=("string", "Exact text to find, which is in the file once and does not overlap with another"),
        new_text=("string", "Text to put in its place"),
    )

    def on(self, machine: ToolMachine, call: Call) -> dict[str, Any]:
        path, asked = call.text("path"), call.params.get("edits")
        if "edits" not in call.params:
            raise BadCall('"edits" is missing')
        if not isinstance(asked, list) or not asked:
            raise ToolFailed('"edits" must be a non-empty array')
        if len(asked) > _MOST_EDITS:
            raise ToolFailed(f"more than {_MOST_EDITS} edits")
        edits = []
        for i, one in enumerate(asked):
            if not isinstance(one, dict):
                raise BadCall('"edits" must hold objects')
            old, new = text_of(one, "old_text"), text_of(one, "new_text")
            if not old:
                raise ToolFailed(f"edits[{i}].old_text must not be empty")
            edits.append((old, new))
        try:
            with machine.read(path) as file:
                data = file.read(_FILE_BYTES + 1)
        except OSError:
            raise ToolFailed(f"failed to open file: {path}") from None
        if len(data) > _FILE_BYTES:
            raise ToolFailed(f"file too large to edit (max {_FILE_BYTES} bytes): {path}")
        # Bytes that are no text stay what they are.
        text = data.decode("utf-8", "surrogateescape")
        changed = edited(text, edits, path)
        if changed == text:
            raise ToolFailed("no changes made: the replacement(s) produced identical content")
        try:
            machine.write(path, changed.encode("utf-8", "surrogateescape"))
        except (OSError, UnicodeEncodeError):
            raise ToolFailed(f"failed to write file: {path}") from None
        return {"result": "file edited successfully", "path": path, "edits_applied": len(edits)}
