"""Lark grammars as one regular expression, for texts that stand inside of something else.

The text of a tool call is a JSON string with most models, so its grammar has to go through JSON's escapes. llguidance
does that for regular expressions alone. Rules and terminals are put in place of their names; `%ignore` may stand before
and after every terminal of a rule. A rule that refers to itself at one end is a repetition; one that does so in its
middle, such as an expression in brackets, is nested a few times at most: no text outside of the grammar fits, but not
all of its texts do.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from llamado.text.grammar.source import GrammarError

MAX_LENGTH = 100_000
"""Characters of an expression: each use of a rule writes it out again."""

_MAX_STEPS = 20_000
_MOST_NESTED = 6
"""Times that a rule may stand inside of itself; fewer if the expression would be too long."""

_COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+(?:[eE][+-]?[0-9]+)?)",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[a-zA-Z]", "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+", "CR": r"\r", "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+", "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"//[^\n]*", "SQL_COMMENT": r"--[^\n]*",
}  # fmt: skip
_COMMON |= {f"SIGNED_{name}": f"[+-]?{_COMMON[name]}" for name in ("FLOAT", "NUMBER")}

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r]+|//[^\n]*)
    | (?P<line>\n)
    | (?P<string>"(?:[^"\\\n]|\\.)*+"i?)
    | (?P<regex>/(?:[^/\\\n]|\\.)++/[a-z]*)
    | (?P<directive>%[a-z_]+)
    | (?P<number>[0-9]+)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<mark>->|\.\.|[][(){}|:?*+~.,!-])
    """,
    re.VERBOSE,
)


def lark_expression(text: str) -> str:
    """Return a regular expression, without anchors, for the texts of a Lark grammar. Raises GrammarError."""
    try:
        grammar = _Reader(text).grammar()
        for nesting in range(_MOST_NESTED, -1, -1):
            try:
                return _Writer(grammar, nesting).whole()
            except _TooLongError:
                if not nesting:
                    raise
    except RecursionError:
        raise GrammarError("the grammar is nested too deep") from None
    raise AssertionError


class _TooLongError(GrammarError):
    """The expression would be too long."""


@dataclass
class _Grammar:
    rules: dict[str, _Node] = field(default_factory=dict)
    ignored: list[_Node] = field(default_factory=list)


@dataclass(frozen=True)
class _Node:
    """Part of a rule: `kind` is text, name, sequence, choice or repeat."""

    kind: str
    text: str = ""
    """An expression, a name, or how often the part comes: `{2,3}`, `*`."""
    parts: tuple[_Node, ...] = ()


class _Reader:
    """Reads a grammar."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        self._line = 1
        self._lines: list[int] = []
        at = depth = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise GrammarError(f"line {text.count(chr(10), 0, at) + 1} of the grammar: {text[at : at + 20]!r}")
            depth += found[0] in ("(", "[") and found.lastgroup == "mark"
            depth -= found[0] in (")", "]") and found.lastgroup == "mark"
            if found.lastgroup != "space" and not (found.lastgroup == "line" and depth > 0):
                self._tokens.append((str(found.lastgroup), found[0]))
                self._lines.append(self._line)
            self._line += found[0].count("\n")
            at = found.end()
        self._join_alternatives()
        self._at = 0

    def _join_alternatives(self) -> None:
        """Leave out the ends of lines before alternatives: these belong to the rule above."""
        kept: list[int] = []
        is_before_choice = False
        for i in reversed(range(len(self._tokens))):
            if self._tokens[i][0] == "line":
                if is_before_choice:
                    continue
            else:
                is_before_choice = self._tokens[i] == ("mark", "|")
            kept.append(i)
        self._tokens = [self._tokens[i] for i in reversed(kept)]
        self._lines = [self._lines[i] for i in reversed(kept)]

    def _fail(self, why: str) -> GrammarError:
        line = self._lines[min(self._at, len(self._lines) - 1)] if self._lines else 1
        return GrammarError(f"line {line} of the grammar: {why}")

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("line", "\n")

    def _take(self, *texts: str) -> bool:
        if self._at < len(self._tokens) and self._peek()[1] in texts and self._peek()[0] in ("mark", "line"):
            self._at += 1
            return True
        return False

    def _name(self) -> str:
        kind, text = self._peek()
        if kind != "name":
            raise self._fail(f"expected a name, got {text!r}")
        self._at += 1
        return text

    def grammar(self) -> _Grammar:
        found = _Grammar()
        while self._at < len(self._tokens):
            if self._take("\n"):
                continue
            kind, text = self._peek()
            if kind == "directive":
                self._at += 1
                self._directive(text, found)
            else:
                while self._take("?", "!"):
                    pass
                name = self._name()
                if self._take("."):
                    self._at += 1  # a priority
                if not self._take(":"):
                    raise self._fail(f"expected ':' behind {name!r}, got {self._peek()[1]!r}")
                found.rules[name] = self._choice()
            if not (self._take("\n") or self._at >= len(self._tokens)):
                raise self._fail(f"unexpected {self._peek()[1]!r}")
        if "start" not in found.rules:
            raise GrammarError("the grammar has no rule 'start'")
        return found

    def _directive(self, text: str, found: _Grammar) -> None:
        if text == "%ignore":
            found.ignored.append(self._choice())
        elif text == "%import":
            if self._name() != "common":
                raise self._fail("only terminals of 'common' can be imported")
            if self._take("."):
                name = self._name()
                self._import(name, self._name() if self._take("->") else name, found)
            elif self._take("("):
                while not self._take(")"):
                    name = self._name()
                    self._import(name, name, found)
                    self._take(",")
        else:
            raise self._fail(f"{text} is not supported")

    def _import(self, name: str, called: str, found: _Grammar) -> None:
        if name not in _COMMON:
            raise self._fail(f"common.{name} is not supported")
        found.rules[called] = _Node("text", _COMMON[name])

    def _choice(self) -> _Node:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Node("choice", parts=tuple(parts))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while (part := self._part()) is not None:
            parts.append(self._repeated(part))
        if self._take("->"):
            self._name()
        return parts[0] if len(parts) == 1 else _Node("sequence", parts=tuple(parts))

    def _part(self) -> _Node | None:
        kind, text = self._peek()
        if kind == "string":
            self._at += 1
            if self._take(".."):
                last = self._peek()[1]
                self._at += 1
                return _Node("text", f"[{_written(self._text(text))}-{_written(self._text(last))}]")
            written = _written(self._text(text.removesuffix("i")))
            return _Node("text", f"(?i:{written})" if text.endswith("i") else written)
        if kind == "regex":
            self._at += 1
            body, _, flags = text[1:].rpartition("/")
            flags = "".join(flag for flag in flags if flag in "imsx")
            body = body.replace("\\/", "/")
            return _Node("text", f"(?{flags}:{body})" if flags else f"(?:{body})")
        if kind == "name":
            self._at += 1
            return _Node("name", text)
        for opening, closing in (("(", ")"), ("[", "]")):
            if self._take(opening):
                inner = self._choice()
                if not self._take(closing):
                    raise self._fail(f"expected {closing!r}, got {self._peek()[1]!r}")
                return inner if opening == "(" else _Node("repeat", "?", (inner,))
        return None

    def _text(self, literal: str) -> str:
        try:
            found = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            raise self._fail(f"{literal} is no text") from None
        return str(found)

    def _repeated(self, part: _Node) -> _Node:
        while True:
            if self._peek()[0] == "mark" and self._peek()[1] in ("?", "*", "+"):
                part = _Node("repeat", self._peek()[1], (part,))
                self._at += 1
            elif self._take("~"):
                least = self._number()
                most = self._number() if self._take("..") else least
                part = _Node("repeat", f"{{{least},{most}}}", (part,))
            elif self._take("{"):
                least = self._number()
                many = f"{least},{least}"
                if self._take(","):
                    many = f"{least}," + (str(self._number()) if self._peek()[0] == "number" else "")
                if not self._take("}"):
                    raise self._fail("expected '}'")
                part = _Node("repeat", f"{{{many}}}", (part,))
            else:
                return part

    def _number(self) -> int:
        kind, text = self._peek()
        if kind != "number" or len(text) > 4:
            raise self._fail(f"expected a number of up to 4 digits, got {text!r}")
        self._at += 1
        return int(text)


class _Writer:
    """Writes a grammar as an expression; a rule inside of itself at most `nesting` times."""

    def __init__(self, grammar: _Grammar, nesting: int) -> None:
        self._rules = {name: _unrolled(name, node) for name, node in grammar.rules.items()}
        self._nesting = nesting
        self._recursive = {name for name in self._rules if name in _reached(self._rules, name)}
        self._open: Counter[str] = Counter()
        self._steps = 0
        self._known: dict[tuple[str, bool, frozenset[tuple[str, int]]], str | None] = {}
        self._ignored = ""
        ignored = [self._write(node, in_terminal=True) for node in grammar.ignored]
        self._ignored = f"(?:{'|'.join(one for one in ignored if one)})*" if ignored else ""

    def whole(self) -> str:
        found = self._write(_Node("name", "start"), in_terminal=False)
        if found is None:
            raise GrammarError("the grammar has no text that ends: its rules refer to themselves")
        return self._ignored + found

    def _write(self, node: _Node, *, in_terminal: bool) -> str | None:
        """An expression; None where nothing fits, for rules are nested deep enough."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise _TooLongError(f"the grammar takes more than {_MAX_STEPS} steps to be written out")
        out: str | None = None
        if node.kind == "text":
            out = node.text + ("" if in_terminal else self._ignored)
        elif node.kind == "name":
            out = self._named(node.text, in_terminal)
        else:
            parts = [self._write(part, in_terminal=in_terminal) for part in node.parts]
            some = [part for part in parts if part is not None]
            if node.kind == "repeat":
                may_be_none = node.text in ("?", "*") or node.text.startswith("{0")
                out = f"(?:{some[0]}){node.text}" if some else "" if may_be_none else None
            elif node.kind == "sequence":
                out = "".join(some) if len(some) == len(parts) else None
            elif some:
                out = f"(?:{'|'.join(some)})"
        if out is not None and len(out) > MAX_LENGTH:
            raise _TooLongError(f"the grammar takes an expression of more than {MAX_LENGTH} characters")
        return out

    def _named(self, name: str, in_terminal: bool) -> str | None:
        if name not in self._rules:
            raise GrammarError(f"the grammar has no rule {name[:100]!r}")
        if self._open[name] > self._nesting:
            return None
        is_terminal = name.lstrip("_")[:1].isupper()
        key = name, in_terminal, frozenset((one, n) for one, n in self._open.items() if n and one in self._recursive)
        if key not in self._known:
            self._open[name] += 1
            inner = self._write(self._rules[name], in_terminal=in_terminal or is_terminal)
            self._open[name] -= 1
            behind = self._ignored if is_terminal and not in_terminal else ""
            self._known[key] = None if inner is None else f"(?:{inner}){behind}"
        return self._known[key]


def _unrolled(name: str, node: _Node) -> _Node:
    """A rule that refers to itself at one end alone, as lists do, written as a repetition."""
    options = node.parts if node.kind == "choice" else (node,)
    itself = _Node("name", name)
    left = [one.parts for one in options if one.kind == "sequence" and one.parts[:1] == (itself,)]
    right = [one.parts for one in options if one.kind == "sequence" and len(one.parts) > 1 and one.parts[-1] == itself]
    looped, cut = (left, slice(1, None)) if left else (right, slice(None, -1))
    others = [one for one in options if not (one.kind == "sequence" and one.parts in looped)]
    rest = [_Node("sequence", parts=parts[cut]) for parts in looped]
    if not looped or not others or any(name in _names(one) for one in (*rest, *others)):
        return node
    loop = _Node("repeat", "*", (_Node("choice", parts=tuple(rest)),))
    end = _Node("choice", parts=tuple(others))
    return _Node("sequence", parts=(end, loop) if left else (loop, end))


def _names(node: _Node) -> set[str]:
    """The rules that a part refers to."""
    return {node.text} if node.kind == "name" else set().union(*map(_names, node.parts))


def _reached(rules: Mapping[str, _Node], name: str) -> set[str]:
    """The rules that a rule leads to."""
    found: set[str] = set()
    todo = [name]
    while todo:
        for other in _names(rules[todo.pop()]) - found:
            found.add(other)
            if other in rules:
                todo.append(other)
    return found


def _written(text: str) -> str:
    """A text as an expression."""
    return "".join(c if (c.isalnum() and c.isascii()) or c == " " else f"\\x{{{ord(c):X}}}" for c in text)
