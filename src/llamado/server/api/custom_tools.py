"""Custom tools of the Responses API: tools whose input is one text, free or in a grammar.

The model gets a function with the single argument `input`, which it calls in its usual form. The client gets the
argument as the text of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llamado.server.errors import invalid
from llamado.server.generate.json_values import mapping, text
from llamado.text.grammar.lark_expression import lark_expression
from llamado.text.grammar.source import GrammarError

_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Characters of a JSON string up to an incomplete escape.
_CHARACTERS = re.compile(
    r"""(?:[^"\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"""
)


def custom_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool as a function for the model. Raises ApiError."""
    name, form = text(tool, "name"), _format(tool)
    if not name:
        raise invalid("a custom tool needs a 'name'")
    kind, syntax, definition = text(form, "type", "text"), text(form, "syntax"), text(form, "definition")
    schema: dict[str, Any] = {"type": "string"}
    if kind == "grammar":
        if not definition:
            raise invalid(f"the grammar of the tool {name[:100]!r} needs a 'definition'")
        if syntax not in _SYNTAXES:
            raise invalid(f"the syntax of the tool {name[:100]!r} must be 'lark' or 'regex', not {syntax[:100]!r}")
        schema["description"] = f"A text of this {_SYNTAXES[syntax]}:\n{definition}"
    elif kind != "text":
        raise invalid(f"the format of the tool {name[:100]!r} must be 'text' or 'grammar', not {kind[:100]!r}")
    function: dict[str, Any] = {"name": name, "parameters": _parameters(schema)}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return function


def enforced_input(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of a custom tool's arguments by its grammar, or None without a grammar. Raises ApiError."""
    form = _format(tool)
    if text(form, "type") != "grammar":
        return None
    definition = text(form, "definition")
    if text(form, "syntax") == "regex":
        expression = _without_anchors(definition)
    else:
        try:
            expression = lark_expression(definition)
        except GrammarError as error:
            raise invalid(f"the tool {text(tool, 'name')[:100]!r}: {error}") from None
    return _parameters({"type": "string", "pattern": f"^(?:{expression})$"})


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"input": schema}, "required": ["input"], "additionalProperties": False}


def _format(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool's format; the chat API nests the grammar one level deeper, which is accepted, too."""
    form = mapping(tool, "format")
    return {**form, **mapping(form, "grammar")}


def _without_anchors(expression: str) -> str:
    """Remove `^` and `$` at the ends, since the whole text must match anyway.

    An expression with alternatives is returned unchanged: there the anchors belong to one of them.
    """
    if "|" in expression:
        return expression
    expression = expression.removeprefix("^")
    ends = re.search(r"(?<!\\)(?:\\\\)*\$$", expression)
    return expression[:-1] if ends else expression


class CustomInput:
    """Incremental reader of the `input` of a call from its streamed arguments."""

    def __init__(self) -> None:
        self._raw = ""
        self._begun = self._over = False

    def push(self, arguments: str) -> str:
        """Add a piece of the arguments; return the next piece of the input."""
        if self._over:
            return ""
        self._raw += arguments
        if not self._begun:
            head = _HEAD.match(self._raw)
            if head is None:
                return ""
            self._begun, self._raw = True, self._raw[head.end() :]
        found = _CHARACTERS.match(self._raw)
        assert found is not None
        self._raw = self._raw[found.end() :]
        self._over = self._raw[:1] == '"'
        return _decoded(found[0])

    def finish(self) -> str:
        """Return the rest of the input: all of the arguments if they are no object with `input`."""
        if self._over:
            return ""
        return "" if self._begun else whole_input(self._raw)


def whole_input(arguments: str) -> str:
    """Return the input of a call from its arguments, which may be cut off; arguments without `input` are the input."""
    try:
        given = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        reader = CustomInput()
        found = reader.push(arguments)
        return found if reader._begun else arguments
    if isinstance(given, dict) and isinstance(given.get("input"), str):
        return _printable(given["input"])
    return arguments


def _decoded(characters: str) -> str:
    try:
        return _printable(str(json.loads(f'"{characters}"', strict=False)))
    except ValueError:  # an escape that JSON does not have
        return characters


def _printable(given: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot represent."""
    return given.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
