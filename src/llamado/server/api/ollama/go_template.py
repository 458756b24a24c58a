"""The subset of Go's template language for the `template` of a body of Ollama's API.

Prompts of one turn consist of text, `.System`, `.Prompt`, `.Suffix`, `.Response`, and `if`, `else`, `end` around them.
Templates of whole conversations (`range`, `.Messages`, functions) are rejected; models have their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llamado.server.errors import invalid

_VARIABLE = re.compile(r"[.$]\.?(\w+)")
_NAMES = ("System", "Prompt", "Suffix", "Response", "First")
MOST_TEMPLATE = 1 << 16


def render(template: str, values: Mapping[str, str]) -> str:
    """Return the text of a template with these variables, up to `.Response`. Raises ApiError."""
    if len(template) > MOST_TEMPLATE:
        raise invalid(f"template: {len(template)} characters; at most {MOST_TEMPLATE} are allowed")
    shown: list[str] = []
    open_: list[tuple[bool, bool]] = []  # for each open `if`: a branch was taken so far; this branch is taken
    at = 0

    def visible() -> bool:
        return all(showing for _, showing in open_)

    trim = False  # remove white space after the last action
    while (start := template.find("{{", at)) >= 0:
        end = template.find("}}", start)
        if end < 0:
            raise invalid("template: '{{' has no '}}'")
        action = template[start + 2 : end]
        before = template[at:start].lstrip() if trim else template[at:start]
        if visible():
            shown.append(before.rstrip() if action[:1] == "-" and action[1:2].isspace() else before)
        at, trim = end + 2, action[-1:] == "-" and action[-2:-1].isspace()
        action = action.strip("-").strip()
        words = action.split()
        if words[:1] == ["if"] and len(words) >= 2:
            holds = _holds(words[1:], values)
            open_.append((holds, holds))
        elif words == ["end"] and open_:
            open_.pop()
        elif words[:1] == ["else"] and open_ and (len(words) == 1 or words[1] == "if"):
            done, _ = open_.pop()
            holds = not done and (len(words) == 1 or _holds(words[2:], values))
            open_.append((done or holds, holds))
        elif len(words) == 1 and (name := _name(words[0])):
            if name == "Response" and visible():
                return "".join(shown)
            if visible():
                shown.append(values.get(name, ""))
        elif not action.startswith("/*"):
            raise _unsupported(action)
    if open_:
        raise invalid("template: an 'if' has no 'end'")
    rest = template[at:]
    return "".join([*shown, rest.lstrip() if trim else rest])


def _name(word: str) -> str:
    match = _VARIABLE.fullmatch(word)
    return match[1] if match is not None and match[1] in _NAMES else ""


def _holds(words: Sequence[str], values: Mapping[str, str]) -> bool:
    """Return the value of a condition: a variable, or `and`, `or`, `not` of variables. Raises ApiError."""
    operator = words[0] if words[0] in ("and", "or", "not") else "and"
    names = [_name(word) for word in (words[1:] if words[0] in ("and", "or", "not") else words)]
    if not names or not all(names) or (words[0] not in ("and", "or") and len(names) > 1):
        raise _unsupported("if " + " ".join(words))
    operands = [bool(values.get(name)) or name == "First" for name in names]
    return not operands[0] if operator == "not" else any(operands) if operator == "or" else all(operands)


def _unsupported(action: str) -> Exception:
    return invalid(
        f"template: {{{{ {action[:100]} }}}} is not supported; a body's own template may use .System, .Prompt, "
        ".Suffix and .Response, with if, else and end"
    )
