"""GBNF, llama.cpp's grammar format (grammars/README.md, src/llama-grammar.cpp), parsed to a tree.

Grammars that llama.cpp refuses are refused here: undefined rules, left recursion, more than 2,000 repetitions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llamado.text.grammar.source import GrammarError

MAX_REPETITIONS = 2_000  # MAX_REPETITION_THRESHOLD
MAX_DEPTH = 200  # of parentheses
MAX_CODE_POINT = 0x10FFFF
FAILED = "Failed to initialize samplers: failed to parse grammar"  # the whole message in llama-server

_SPACES = re.compile(r"(?:[ \t]|#[^\r\n]*)*+")
_BLANKS = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*+")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_NUMBER = re.compile(r"[0-9]+")
_PLAIN = re.compile(r"[^\\\"]+")
_SURROGATE = re.compile("[\ud800-\udfff]")

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Literal:
    """A text."""

    text: str


@dataclass(frozen=True, eq=False)
class Chars:
    """One character of these code points: ascending inclusive ranges without surrogates."""

    ranges: Ranges


@dataclass(frozen=True, eq=False)
class Ref:
    """Another rule."""

    name: str


@dataclass(frozen=True, eq=False)
class TokenRef:
    """One token by its id, or any other token."""

    token: int
    negated: bool


@dataclass(frozen=True, eq=False)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    """At least `least` and at most `most` repetitions (None: no limit)."""

    item: Node
    least: int
    most: int | None


Node = Literal | Chars | Ref | TokenRef | Sequence | Choice | Repeat


Rules = dict[str, Node]
"""Rules by their names; an answer is an instance of `root`."""


def parse(text: str, token: Callable[[str], int | None]) -> Rules:
    """Return the rules of a GBNF grammar; `token` returns the id of a token written `<like this>`, or None.

    Raises GrammarError with the line number.
    """
    return _Parser(text, token).parse()


class _Parser:
    def __init__(self, text: str, token: Callable[[str], int | None]) -> None:
        self._text = text
        self._at = 0
        self._token = token
        self._rules: Rules = {}
        self._depth = 0
        self._synthetic = 0  # rules that llama.cpp would have created of groups and repetitions so far
        self._references: dict[str, int] = {}  # where a rule is first referenced
        self._places: dict[str, int] = {}  # where a rule begins

    def parse(self) -> Rules:
        self._space(newlines=True)
        while self._at < len(self._text):
            self._rule()
        rules = self._rules
        for name, place in self._references.items():
            if name not in rules:
                raise self._error(f"rule '{name}' is not defined", place)
        if "root" not in rules:
            raise GrammarError(f"{FAILED}: it has no rule named 'root'")
        looping = left_recursion(rules)
        if looping:
            raise self._error(f"rule '{looping}' begins with itself (left recursion)", self._places[looping])
        return rules

    # --- the text

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _error(self, what: str, place: int | None = None) -> GrammarError:
        line = self._text.count("\n", 0, self._at if place is None else place) + 1
        return GrammarError(f"{FAILED}: line {line}: {what}")

    def _here(self) -> str:
        rest = self._text[self._at : self._at + 20].split("\n")[0]
        return f"at {rest!r}" if rest else "at the end of the line" if self._peek() else "at the end"

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise self._error(f"expecting {text!r} {self._here()}")
        self._at += len(text)

    def _space(self, newlines: bool) -> None:
        self._at = (_BLANKS if newlines else _SPACES).match(self._text, self._at).end()  # type: ignore[union-attr]

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._error(f"expecting a rule's name {self._here()}")
        self._at = found.end()
        return found[0]

    def _number(self) -> int:
        found = _NUMBER.match(self._text, self._at)
        if found is None:
            raise self._error(f"expecting a number {self._here()}")
        self._at = found.end()
        if len(found[0]) > 18:
            raise self._error(f"the number {found[0][:20]}… is too large")
        return int(found[0])

    def _char(self) -> str:
        if self._at >= len(self._text):
            raise self._error("unexpected end of the grammar inside a text or a set of characters")
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        escape = self._peek()
        self._at += 1
        digits = {"x": 2, "u": 4, "U": 8}.get(escape)
        if digits:
            code = self._text[self._at : self._at + digits]
            if len(code) < digits or not all(c in "0123456789abcdefABCDEF" for c in code):
                raise self._error(f"expecting {digits} hexadecimal digits behind \\{escape} {self._here()}")
            self._at += digits
            if int(code, 16) > MAX_CODE_POINT:
                raise self._error(f"\\{escape}{code} is not a character")
            return chr(int(code, 16))
        plain = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}.get(escape)
        if plain is None:
            raise self._error(f"unknown escape \\{escape}")
        return plain

    # --- the rules

    def _rule(self) -> None:
        place = self._at
        name = self._name()
        self._space(newlines=False)
        self._expect("::=")
        self._space(newlines=True)
        self._rules[name] = self._choice(nested=False)
        self._places[name] = place
        if self._at < len(self._text) and self._peek() not in "\r\n":
            raise self._error(f"expecting a new line or the end {self._here()}")
        self._space(newlines=True)

    def _choice(self, nested: bool) -> Node:
        options = [self._sequence(nested)]
        while self._peek() == "|":
            self._at += 1
            self._space(newlines=True)
            options.append(self._sequence(nested))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, nested: bool) -> Node:
        items: list[Node] = []
        weight = 1  # number of rules that llama.cpp would repeat
        repeatable = False
        while self._at < len(self._text):
            char = self._peek()
            if char in "*+?{":
                least, most = self._quantifier(nested)
                if not repeatable:
                    raise self._error(f"expecting something to repeat before '{char}'")
                weight = self._repeat(items, least, most, weight)
                continue
            before = self._synthetic
            item = self._item(nested)
            if item is None:
                break
            weight = max(1, self._synthetic - before) if char == "(" else 1
            repeatable = item is not _NOTHING
            if repeatable:
                items.append(item)
            self._space(newlines=nested)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self, nested: bool) -> Node | None:
        char = self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return self._set()
        if char == ".":
            self._at += 1
            return Chars(_clean([(0, MAX_CODE_POINT)]))
        if char in "<!":
            return self._token_reference()
        if char == "(":
            return self._group()
        if _is_word(char):
            place = self._at
            name = self._name()
            self._references.setdefault(name, place)
            return Ref(name)
        return None

    def _literal(self) -> Node:
        self._at += 1
        parts = []
        while self._peek() != '"':
            plain = _PLAIN.match(self._text, self._at)
            if plain:
                parts.append(plain[0])
                self._at = plain.end()
            else:
                parts.append(self._char())
        self._at += 1
        text = "".join(parts)
        if _SURROGATE.search(text):
            raise self._error("a surrogate is not a character")
        return Literal(text) if text else _NOTHING

    def _set(self) -> Node:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            low = high = ord(self._char())
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = ord(self._char())
            if low > high:
                raise self._error(f"the range from {chr(low)!r} to {chr(high)!r} is reversed")
            ranges.append((low, high))
        self._at += 1
        if not ranges and not negated:
            return _NOTHING
        chars = Chars(_complement(_clean(ranges)) if negated else _clean(ranges))
        if not chars.ranges:
            raise self._error("this set of characters is empty")
        return chars

    def _token_reference(self) -> Node:
        negated = self._peek() == "!"
        self._at += negated
        start = self._at
        self._expect("<")
        if self._peek() == "[":
            self._at += 1
            number = self._number()
            self._expect("]>")
            name = f"<[{number}]>"
            token = self._token(name)
        else:
            end = self._text.find(">", self._at)
            if end < 0:
                raise self._error("expecting '>' at the end of a token's name")
            self._at = end + 1
            name = self._text[start : self._at]
            token = self._token(name)
        if token is None:
            raise self._error(f"{name[:100]} is not one token of this model")
        return TokenRef(token, negated)

    def _group(self) -> Node:
        self._at += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} nested parentheses")
        self._synthetic += 1
        self._space(newlines=True)
        node = self._choice(nested=True)
        self._expect(")")
        self._depth -= 1
        return node if isinstance(node, Choice) else Choice((node,))

    def _quantifier(self, nested: bool) -> tuple[int, int | None]:
        char = self._peek()
        self._at += 1
        self._space(newlines=nested)
        if char != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        least = self._number()
        most: int | None = least
        self._space(newlines=nested)
        if self._peek() == ",":
            self._at += 1
            self._space(newlines=nested)
            most = None
            if self._peek().isdigit():
                most = self._number()
                self._space(newlines=nested)
        self._expect("}")
        self._space(newlines=nested)
        if least > MAX_REPETITIONS:
            raise self._error(f"{least} repetitions are too many; at most {MAX_REPETITIONS} are allowed")
        if most is not None and most > MAX_REPETITIONS:
            most = None
        if most is not None and most < least:
            raise self._error(f"at least {least} and at most {most} repetitions are impossible")
        return least, most

    def _repeat(self, items: list[Node], least: int, most: int | None, weight: int) -> int:
        total = most or least or 1
        if weight * total > MAX_REPETITIONS:
            raise self._error(
                f"repetitions inside repetitions make more than {MAX_REPETITIONS}; reduce their number or the rule"
            )
        self._synthetic += 1 if most is None else most - least
        if most == 0:
            items[-1] = Sequence(())
        else:
            items[-1] = Repeat(items[-1], least, most)
        return weight * total


_NOTHING = Sequence(())


def _is_word(char: str) -> bool:
    return char == "-" or (char.isascii() and char.isalnum())


def _clean(ranges: list[tuple[int, int]]) -> Ranges:
    """Sort and merge ranges, and remove surrogates, which are not characters."""
    out: list[tuple[int, int]] = []
    parts = [(low, min(high, 0xD7FF)) for low, high in ranges] + [(max(low, 0xE000), high) for low, high in ranges]
    for low, high in sorted(part for part in parts if part[0] <= part[1]):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def _complement(ranges: Ranges) -> Ranges:
    out = []
    next_low = 0
    for low, high in ranges:
        if next_low < low:
            out.append((next_low, low - 1))
        next_low = high + 1
    out.append((next_low, MAX_CODE_POINT))
    return _clean([part for part in out if part[0] <= part[1]])


def children(node: Node) -> tuple[Node, ...]:
    """Return the direct parts of a node."""
    if isinstance(node, Sequence):
        return node.items
    if isinstance(node, Choice):
        return node.options
    return (node.item,) if isinstance(node, Repeat) else ()


def left_recursion(rules: Rules) -> str | None:
    """Return a rule that can begin with itself, or None.

    As in llama.cpp, a rule counts as possibly empty if one of its own alternatives is empty.
    """
    begins = {name: list(dict.fromkeys(_leftmost(node, rules))) for name, node in rules.items()}
    done: set[str] = set()
    for first in begins:
        path: list[tuple[str, Iterator[str]]] = []
        on_path: set[str] = set()
        pending: str | None = first
        while pending is not None or path:
            if pending is not None:
                if pending in on_path:
                    return pending
                if pending not in done:
                    path.append((pending, iter(begins[pending])))
                    on_path.add(pending)
                pending = None
                continue
            name, rest = path[-1]
            pending = next(rest, None)
            if pending is None:
                path.pop()
                on_path.discard(name)
                done.add(name)
    return None


def _leftmost(node: Node, rules: Rules) -> Iterator[str]:
    """Yield the rules that an instance of the node may begin with."""
    if isinstance(node, Ref):
        yield node.name
    elif isinstance(node, Choice):
        for option in node.options:
            yield from _leftmost(option, rules)
    elif isinstance(node, Repeat):
        yield from _leftmost(node.item, rules)
    elif isinstance(node, Sequence):
        for item in node.items:
            yield from _leftmost(item, rules)
            if not _may_be_empty(item, rules):
                break


def _may_be_empty(node: Node, rules: Rules) -> bool:
    if isinstance(node, Ref):
        node = rules[node.name]
    if isinstance(node, Repeat):
        return node.least == 0
    options = node.options if isinstance(node, Choice) else (node,)
    return any(isinstance(option, Sequence) and not option.items for option in options)
