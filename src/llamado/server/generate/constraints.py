"""The constraints of a request on its output: a grammar or schema, the triggers of a lazy one, a reasoning budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamado.server.errors import invalid
from llamado.server.generate.json_values import MOST_ITEMS, check_length, json_text, type_name, wrong_type
from llamado.server.model import ServedTokenizer
from llamado.text.grammar.source import GrammarSource, Trigger

LONGEST_TOKEN = 1024  # characters; the longest tokens of real vocabularies have less than a quarter of it
# `common_grammar_trigger_type` (common/common.h, b11434).
_TRIGGER_NUMBERS = {"token": 0, "word": 1, "pattern": 2}
_PATTERN_OF_ALL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBudget:
    """The limit of a model's reasoning, and the text that ends it."""

    start: str
    """The text that opens reasoning."""
    end: str
    """The text that closes it; written behind `message` when the budget is used up."""
    open: bool = False
    """The answer begins inside of the reasoning: the prompt has opened it."""
    budget: int = -1
    """Tokens; -1: no limit."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConstraints:
    """Everything that constrains the tokens of an answer, before compilation."""

    source: GrammarSource | None = None
    field: str = ""
    """The JSON field of `source`; "" for a grammar made by the server, such as one for tool calls."""
    optional: bool = False
    """Generate without `source` if it cannot be compiled, instead of failing the request."""
    lazy: bool = False
    """`source` is enforced only from the first of `triggers` on."""
    triggers: tuple[Trigger, ...] = ()
    preserved: frozenset[int] = frozenset()
    """Special tokens that are written as text."""
    reasoning: ReasoningBudget | None = None

    def settings(self) -> dict[str, Any]:
        """Return the fields of `generation_settings` for the constraints."""
        return {
            "grammar": "" if self.source is None else self.source.text,
            "grammar_lazy": self.lazy,
            "grammar_triggers": [_trigger_json(t) for t in self.triggers],
            "preserved_tokens": sorted(self.preserved),
        }


def _trigger_json(trigger: Trigger) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": _TRIGGER_NUMBERS[trigger.kind], "value": trigger.value}
    if trigger.kind == "token":
        shown["token"] = trigger.token
    return shown


def single_token(text: str, tokenizer: ServedTokenizer) -> int | None:
    """Return the token that is exactly this text, or None."""
    if len(text) > LONGEST_TOKEN:
        return None
    tokens = tokenizer.encode(text, add_special=False, parse_special=True)
    return tokens[0] if len(tokens) == 1 else None


def preserved_tokens(texts: Any, tokenizer: ServedTokenizer) -> frozenset[int]:
    """Return the ids of the texts that are one token each; like llama-server, skip the others. Raises ApiError."""
    if not isinstance(texts, list):
        texts = list(texts.values()) if isinstance(texts, dict) else [texts]
    found = set()
    check_length(MOST_ITEMS, texts, "preserved_tokens")
    for text in texts:
        if not isinstance(text, str):
            raise wrong_type("preserved_tokens", "string", text)
        token = single_token(text, tokenizer)
        if token is not None:
            found.add(token)
    return frozenset(found)


def _trigger(given: Any, preserved: frozenset[int], tokenizer: ServedTokenizer) -> Trigger:
    name = "Field 'grammar_triggers'"
    if not isinstance(given, dict):
        raise invalid(f"{name}: type must be object, but is {type_name(given)}")
    number, value = given.get("type"), given.get("value")
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise invalid(f"{name}: key 'type' must be a number")
    if not isinstance(value, str):
        raise invalid(f"{name}: key 'value' must be a string")
    number = int(number)
    if number == _TRIGGER_NUMBERS["word"]:
        token = single_token(value, tokenizer)
        if token is None:
            return Trigger("word", value)
        if token not in preserved:
            raise invalid(f"{name}: Grammar trigger word should be marked as preserved token: {value}")
        return Trigger("token", value, token)
    if number == _TRIGGER_NUMBERS["token"]:
        token = given.get("token")
        if isinstance(token, bool) or not isinstance(token, (int, float)):
            raise invalid(f"{name}: key 'token' must be a number")
        return Trigger("token", value, int(token))
    if number == _TRIGGER_NUMBERS["pattern"]:
        return Trigger("pattern", value)
    if number == _PATTERN_OF_ALL:
        return Trigger("pattern", f"^{value}$")
    raise invalid(f"{name}: there is no trigger type {number}")


def _source(body: Mapping[str, Any]) -> tuple[GrammarSource | None, str]:
    """Return the grammar or the schema of a body, and its field; as in llama-server, a grammar wins over a schema."""
    grammar, schema = body.get("grammar"), body.get("json_schema")
    if grammar is not None:
        return (GrammarSource("gbnf", grammar), "grammar") if isinstance(grammar, str) and grammar else (None, "")
    if schema is None:
        return None, ""
    return GrammarSource("json_schema", schema_text(schema)), "json_schema"


def schema_text(schema: Any) -> str:
    """Return a JSON schema as text; an empty one means any object."""
    return '{"type":"object"}' if schema == {} else json_text(schema)


def _texts(value: Any, name: str) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not isinstance(item, str):
            raise wrong_type(name, "string", item)
    return tuple(item for item in items if item)


def _reasoning(body: Mapping[str, Any]) -> ReasoningBudget | None:
    """Return the budget from a native body, which has the texts around the reasoning, too. Raises ApiError."""
    budget = body.get("reasoning_budget_tokens")
    if budget is None:
        budget = -1
    elif not isinstance(budget, (bool, int, float)):
        raise wrong_type("reasoning_budget_tokens", "number", budget)
    if not -1 <= budget < 2**31:
        message = f"Value must be between -1 <= value <= {2**31 - 1}, but got {int(budget)}"
        raise invalid(f"Field 'reasoning_budget_tokens': {message}")
    control = body.get("reasoning_control")
    if control is not None and not isinstance(control, bool):
        raise wrong_type("reasoning_control", "boolean", control)
    texts = {}
    for name in ("reasoning_budget_start_tag", "reasoning_budget_message"):
        value = body.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong_type(name, "string", value)
        texts[name] = value or ""
    ends: tuple[str, ...] = ()
    for name in ("reasoning_budget_end_tags", "reasoning_budget_end_tag"):
        if body.get(name) is not None:
            ends = _texts(body[name], name)
            break
    if not ends or not texts["reasoning_budget_start_tag"] or (budget < 0 and not control):
        return None
    return ReasoningBudget(
        start=texts["reasoning_budget_start_tag"],
        end=ends[0],
        budget=int(budget),
        message=texts["reasoning_budget_message"],
    )


def read_constraints(body: Mapping[str, Any], tokenizer: ServedTokenizer) -> OutputConstraints:
    """Read the constraints of a native body. Raises ApiError."""
    source, name = _source(body)
    lazy = body.get("grammar_lazy")
    if lazy is not None and not isinstance(lazy, bool):
        raise wrong_type("grammar_lazy", "boolean", lazy)
    preserved: frozenset[int] = frozenset()
    if body.get("preserved_tokens") is not None:
        preserved = preserved_tokens(body["preserved_tokens"], tokenizer)
    triggers: tuple[Trigger, ...] = ()
    if body.get("grammar_triggers") is not None:
        given = body["grammar_triggers"]
        given = given if isinstance(given, list) else list(given.values()) if isinstance(given, dict) else [given]
        check_length(MOST_ITEMS, given, "grammar_triggers")
        triggers = tuple(_trigger(t, preserved, tokenizer) for t in given)
        if lazy and not triggers:
            raise invalid("Field 'grammar_triggers': Error: no triggers set for lazy grammar!")
    return OutputConstraints(
        source=source,
        field=name,
        lazy=bool(lazy),
        triggers=triggers,
        preserved=preserved,
        reasoning=_reasoning(body),
    )
