"""Custom tools of the Responses API: tools that take one text, with a grammar or without one.

A model is offered a function with the one argument `input`, which its family writes as any other; what it calls with
is shown as a text again.
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
# Characters of a JSON string, without an escape that is not complete yet.
_CHARACTERS = re.compile(
    r"""(?:[^"\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"""
)


def custom_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function that a custom tool is shown as to the model. Raises ApiError."""
    name, form = text(tool, "name"), _format(tool)
    if not name:
        raise invalid("a custom tool needs a 'name'")
    kind, syntax, definition = text(form, "type", "text"), text(form, "syntax"), text(form, "definition")
    what: dict[str, Any] = {"type": "string"}
    if kind == "grammar":
        if not definition:
            raise invalid(f"the grammar of the tool {name[:100]!r} needs a 'definition'")
        if syntax not in _SYNTAXES:
            raise invalid(f"the syntax of the tool {name[:100]!r} must be 'lark' or 'regex', not {syntax[:100]!r}")
        what["description"] = f"A text of this {_SYNTAXES[syntax]}:\n{definition}"
    elif kind != "text":
        raise invalid(f"the format of the tool {name[:100]!r} must be 'text' or 'grammar', not {kind[:100]!r}")
    function: dict[str, Any] = {"name": name, "parameters": _parameters(what)}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return function


def enforced_input(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema of a custom tool's arguments by its grammar; None for one without a grammar. Raises ApiError."""
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


def _parameters(what: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"input": what}, "required": ["input"], "additionalProperties": False}


def _format(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool's format: one level down as well, as the chat API has it."""
    form = mapping(tool, "format")
    return {**form, **mapping(form, "grammar")}


def _without_anchors(expression: str) -> str:
    """The whole text has to match, so anchors at its ends say nothing; with alternatives they belong to one of them."""
    if "|" in expression:
        return expression
    expression = expression.removeprefix("^")
    ends = re.search(r"(?<!\\)(?:\\\\)*\$$", expression)
    return expression[:-1] if ends else expression


class CustomInput:
    """The input of a call as it comes, from arguments as they come."""

    def __init__(self) -> None:
        self._raw = ""
        self._begun = self._over = False

    def push(self, arguments: str) -> str:
        """Take more of the arguments; returns more of the input."""
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
        """The rest of the input: that of arguments which are no object with it, and of an escape that was cut."""
        if self._over:
            return ""
        return "" if self._begun else whole_input(self._raw)


def whole_input(arguments: str) -> str:
    """The input of a call whose arguments are all there, or cut; those without one are the input themselves."""
    try:
        given = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        reading = CustomInput()
        found = reading.push(arguments)
        return found if reading._begun else arguments
    if isinstance(given, dict) and isinstance(given.get("input"), str):
        return _printable(given["input"])
    return arguments


def _decoded(characters: str) -> str:
    try:
        return _printable(str(json.loads(f'"{characters}"', strict=False)))
    except ValueError:  # an escape that JSON does not have
        return characters


def _printable(given: str) -> str:
    """A text whose lone surrogates, which UTF-8 does not have, are replaced."""
    return given.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
