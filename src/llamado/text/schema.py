"""JSON Schema → llguidance's grammar."""

from __future__ import annotations

import json

from llamado.text.grammar import GrammarError

# White space between two tokens of JSON: none, a space, or a new line and its indentation. Without a bound small
# models write blanks for ever. llama.cpp allows the same.
WHITESPACE = r" |\n[ \t]{0,20}"


def schema_grammar(text: str) -> str:
    """llguidance's Lark for the instances of a JSON schema. Raises GrammarError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from None
    return f'%llguidance {{"no_forcing": true}}\nstart: {schema_rule(schema)}\n'


def schema_rule(schema: object) -> str:
    """A rule's body for the instances of a JSON schema. Raises GrammarError."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}}
    return "%json " + json.dumps(schema)
