"""Lark grammars without recursion as one regular expression, for texts that stand inside of something else.

The text of a tool call is a JSON string with most models, so its grammar has to go through JSON's escapes. llguidance
does that for regular expressions alone. Rules and terminals are put in place of their names; `%ignore` may stand before
and after every terminal of a rule.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from llamado.text.grammar.source import GrammarError

MAX_LENGTH = 100_000
"""Characters of an expression: each use of a rule writes it out again."""

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
    (?P<space>(?:[ \t\r]|//[^\n]*|\n[ \t\r\n]*(?://[^\n]*\n[ \t\r\n]*)*(?=\|))+)
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
        return _Writer(_Reader(text).grammar()).whole()
    except RecursionError:
        raise GrammarError("the grammar is nested too deep") from None


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
        self._at = 0

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
    """Writes a grammar as an expression."""

    def __init__(self, grammar: _Grammar) -> None:
        self._grammar = grammar
        self._open: list[str] = []
        self._written: dict[tuple[str, bool], str] = {}
        self._ignored = ""
        ignored = [self._write(node, in_terminal=True) for node in grammar.ignored]
        self._ignored = f"(?:{'|'.join(ignored)})*" if ignored else ""

    def whole(self) -> str:
        return self._ignored + self._write(_Node("name", "start"), in_terminal=False)

    def _write(self, node: _Node, *, in_terminal: bool) -> str:
        behind = "" if in_terminal else self._ignored
        if node.kind == "text":
            out = node.text + behind
        elif node.kind == "name":
            out = self._named(node.text, in_terminal)
        elif node.kind == "repeat":
            out = f"(?:{self._write(node.parts[0], in_terminal=in_terminal)}){node.text}"
        else:
            parts = [self._write(part, in_terminal=in_terminal) for part in node.parts]
            out = "".join(parts) if node.kind == "sequence" else f"(?:{'|'.join(parts)})"
        if len(out) > MAX_LENGTH:
            raise GrammarError(f"the grammar takes an expression of more than {MAX_LENGTH} characters")
        return out

    def _named(self, name: str, in_terminal: bool) -> str:
        is_terminal = name.lstrip("_")[:1].isupper()
        key = name, in_terminal
        if key not in self._written:
            if name not in self._grammar.rules:
                raise GrammarError(f"the grammar has no rule {name[:100]!r}")
            if name in self._open:
                raise GrammarError(f"the rule {name[:100]!r} refers to itself: a grammar of a tool cannot be recursive")
            self._open.append(name)
            inner = self._write(self._grammar.rules[name], in_terminal=in_terminal or is_terminal)
            self._open.pop()
            self._written[key] = f"(?:{inner})" + (self._ignored if is_terminal and not in_terminal else "")
        return self._written[key]


def _written(text: str) -> str:
    """A text as an expression."""
    return "".join(c if (c.isalnum() and c.isascii()) or c == " " else f"\\x{{{ord(c):X}}}" for c in text)
