"""Adapt grammars in llguidance's Lark dialect to a vocabulary and to this package's JSON schemas."""

from __future__ import annotations

import json
import re

from llamado.text.grammar.json_schema.schema import json_rule
from llamado.text.grammar.source import GrammarError
from llamado.text.grammar.vocabulary import GuidedVocabulary

_PIECE = re.compile(
    r"""
    (?P<comment>//[^\n]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*+"i?)
    | (?P<regex>/(?:[^/\\\n]|\\.)++/[a-z]*)
    | %(?P<directive>json|llguidance)\b[ \t]*
    | ^[ \t]*[!?]*(?P<rule>[A-Za-z_]\w*)(?=[ \t]*(?:[\[{.][^\n:"]*)?:)
    """,
    re.VERBOSE | re.MULTILINE,
)
_FIRST_LINE = '%llguidance {"no_forcing": true}\n'


def lark_grammar(text: str, vocabulary: GuidedVocabulary) -> str:
    """Return the grammar with JSON schemas treated as in `schema_grammar`, and special tokens where texts spell them.

    A string in a rule (not in a terminal) that contains the text of a control token matches both the letters and the
    token. Raises GrammarError.
    """
    out: list[str] = []
    at = 0
    terminal = False
    options = False
    while found := _PIECE.search(text, at):
        out.append(text[at : found.start()])
        at = found.end()
        if found["rule"]:
            terminal = found["rule"].lstrip("_")[:1].isupper()
            out.append(found[0])
        elif found["directive"]:
            value, at = _json(text, at)
            if found["directive"] == "json":
                out.append(json_rule(value))
            else:
                options = True
                if not isinstance(value, dict):
                    raise GrammarError(f"%llguidance must be followed by an object, not {json.dumps(value)[:100]}")
                out.append("%llguidance " + json.dumps({"no_forcing": True, **value}))
        elif found["string"] and not terminal and not found[0].endswith("i"):
            out.append(_with_controls(found[0], vocabulary))
        else:
            out.append(found[0])
    out.append(text[at:])
    return ("" if options else _FIRST_LINE) + "".join(out)


def regex_grammar(text: str) -> str:
    """Return Lark for the texts that match a regular expression as a whole."""
    from llguidance import LLMatcher

    grammars = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
    return _FIRST_LINE + str(grammars[0]["lark_grammar"])


def lark_error(text: str) -> str:
    """Return llguidance's error message without lines of a generated grammar, which the author has not seen."""
    lines = [line for line in text.splitlines() if " | " not in line and line.strip(" ^") and line[:1] != "<"]
    return re.sub(r"^(at )?\d+\(\d+\): ", "", " ".join(lines))[:500] or text[:500]


def _json(text: str, at: int) -> tuple[object, int]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"line {text.count(chr(10), 0, at) + 1} of the grammar: {error}") from None


def _with_controls(string: str, vocabulary: GuidedVocabulary) -> str:
    try:
        text = json.loads(string)
    except ValueError:  # an escape that only Lark has
        return string
    parts = vocabulary.control_parts(text)
    if all(isinstance(part, str) for part in parts):
        return string
    written = []
    for part in parts:
        if isinstance(part, str):
            written.append(json.dumps(part, ensure_ascii=False))
        else:
            spelled, token = part
            written.append(f"({json.dumps(spelled, ensure_ascii=False)} | <[{token}]>)")
    return "(" + " ".join(written) + ")"
