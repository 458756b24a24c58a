"""`edit_file`: replace texts in a file.

A text is searched exactly first. If that fails, typical deviations of models are ignored: trailing blanks, and
typographic quotation marks, dashes and spaces. Rules and errors are llama-server's (tools/server/server-tools.cpp,
b11434).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from llamado.tools.builtin.tool import BuiltinTool
from llamado.tools.errors import InvalidCall, ToolFailed
from llamado.tools.host import ToolHost
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
    """One replacement, with its position in the file's text."""

    number: int
    begin: int
    end: int
    text: str


def normalize(text: str) -> str:
    """Return a text without trailing blanks, and with plain quotation marks, dashes and spaces."""
    # In this order: typographic spaces at the end of a line are kept.
    return _BLANKS_AT_END.sub("", text).translate(_PLAIN)


def apply_edits(text: str, edits: list[tuple[str, str]], path: str) -> str:
    """Return a file's text with all replacements. Raises ToolFailed."""
    loose = normalize(text)
    exact = True
    for i, (old, _) in enumerate(edits):
        if old in text:
            continue
        if normalize(old) not in loose:
            raise ToolFailed(
                f"could not find edits[{i}].old_text in {path}, it must match the file's current content exactly"
            )
        exact = False
    base = text if exact else loose
    found = []
    for i, (old, new) in enumerate(edits):
        # A text of blanks only becomes "", which occurs everywhere.
        count = loose.count(normalize(old)) if normalize(old) else text.count(old)
        if count > 1 or (not exact and not normalize(old)):
            raise ToolFailed(f"found {count} occurrences of edits[{i}].old_text in {path}, it must be unique")
        old = old if exact else normalize(old)
        begin = base.find(old)
        found.append(Edit(i, begin, begin + len(old), new))
    found.sort(key=lambda edit: edit.begin)
    for one, two in pairwise(found):
        if one.end > two.begin:
            raise ToolFailed(
                f"edits[{one.number}] and edits[{two.number}] overlap in {path}; "
                "merge them into one edit or target disjoint regions"
            )
    return _apply(base, found, 0) if exact else _apply_to_lines(text, base, found)


def _apply(text: str, edits: list[Edit], begins: int) -> str:
    """Apply edits to a piece of the text that begins at offset `begins`."""
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.begin - begins], edit.text]
        at = edit.end - begins
    return "".join([*parts, text[at:]])


def _apply_to_lines(text: str, loose: str, edits: list[Edit]) -> str:
    """Apply edits to the loose text, but keep the original of all lines that no edit touches."""
    lines, loose_lines = text.split("\n"), loose.split("\n")
    begins = [0, *accumulate(len(line) + 1 for line in loose_lines)]  # line offsets; both texts have as many lines
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
        piece = loose[begins[first] : begins[last + 1]]  # includes the last line's end, if it has one
        parts.append(_apply(piece, inner, begins[first]))
        at = last + 1
    return "".join(parts) + "\n".join(lines[at:])


class EditFile(BuiltinTool):
    """Replaces texts in a file."""

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

    def run_on(self, host: ToolHost, call: Call) -> dict[str, Any]:
        path, requested = call.text("path"), call.params.get("edits")
        if "edits" not in call.params:
            raise InvalidCall('"edits" is missing')
        if not isinstance(requested, list) or not requested:
            raise ToolFailed('"edits" must be a non-empty array')
        if len(requested) > _MOST_EDITS:
            raise ToolFailed(f"more than {_MOST_EDITS} edits")
        edits = []
        for i, one in enumerate(requested):
            if not isinstance(one, dict):
                raise InvalidCall('"edits" must hold objects')
            old, new = text_of(one, "old_text"), text_of(one, "new_text")
            if not old:
                raise ToolFailed(f"edits[{i}].old_text must not be empty")
            edits.append((old, new))
        try:
            with host.read(path) as file:
                data = file.read(_FILE_BYTES + 1)
        except OSError:
            raise ToolFailed(f"failed to open file: {path}") from None
        if len(data) > _FILE_BYTES:
            raise ToolFailed(f"file too large to edit (max {_FILE_BYTES} bytes): {path}")
        # surrogateescape keeps bytes that are not UTF-8.
        text = data.decode("utf-8", "surrogateescape")
        changed = apply_edits(text, edits, path)
        if changed == text:
            raise ToolFailed("no changes made: the replacement(s) produced identical content")
        try:
            host.write(path, changed.encode("utf-8", "surrogateescape"))
        except (OSError, UnicodeEncodeError):
            raise ToolFailed(f"failed to write file: {path}") from None
        return {"result": "file edited successfully", "path": path, "edits_applied": len(edits)}
