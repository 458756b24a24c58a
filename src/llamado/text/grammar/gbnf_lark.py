"""Translate a GBNF grammar to llguidance's Lark, which has a lexer between the bytes and the rules.

llguidance cuts the text into lexemes that are as long as possible; GBNF has no lexemes. Regular parts of the grammar
become lexemes, which are as large as possible because they are fast: thousands of tokens pass through one state of an
automaton. If the longest lexeme is not always the right one, because the grammar could continue with a character that a
lexeme could also take, the lexemes that could take it are cut smaller, in the end into single characters. So the
language is exactly GBNF's for every grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from llamado.text.grammar.gbnf import (
    FAILED,
    Chars,
    Choice,
    Literal,
    Node,
    Ref,
    Repeat,
    Rules,
    Sequence,
    TokenRef,
    children,
    parse,
)
from llamado.text.grammar.source import GrammarError
from llamado.text.grammar.vocabulary import GuidedVocabulary

MAX_TEXT = 1 << 18  # characters
MAX_POSITIONS = (
    1_200  # of characters in lexemes that are checked for overlaps; above that, all become single characters
)
MAX_ROUNDS = 60
MAX_STEPS = 500_000  # from one position or part to the next in all these rounds: about half a second
MAX_PARTS = 5_000  # of rules, after all regular parts have become lexemes
MAX_RULES = 3_000
MAX_LEXEME = 1_000_000  # characters of a lexeme with everything in it expanded
MAX_REFERENCES = 100  # consecutive references of regular rules
_NESTED = 6  # nested parentheses that Lark parses without problems


def gbnf_grammar(text: str, vocabulary: GuidedVocabulary) -> str:
    """Return llguidance's Lark for a GBNF grammar. Raises GrammarError."""
    if len(text) > MAX_TEXT:
        raise GrammarError(f"{FAILED}: {len(text)} characters are too many; at most {MAX_TEXT} are allowed")
    rules = parse(text, vocabulary.named_token)
    if len(rules) > MAX_RULES:
        raise GrammarError(f"{FAILED}: {len(rules)} rules are too many; at most {MAX_RULES} are allowed")
    rules = {name: _with_controls(node, vocabulary) for name, node in rules.items()}
    lexing = _LexemePlan(rules)
    try:
        lexing.refine()
    except (RecursionError, _TooLarge):
        lexing = _LexemePlan(rules)
        lexing.all_single = True
    if sum(map(_size, lexing.parts().values())) > MAX_PARTS:
        raise GrammarError(f"{FAILED}: it is too large for a grammar that is not a regular expression")
    return _Writer(lexing, vocabulary).grammar()


class _TooLarge(Exception):
    """Overlaps cannot be found in reasonable time."""


def _with_controls(node: Node, vocabulary: GuidedVocabulary) -> Node:
    """Return the node so that texts that spell a control token also accept the token."""
    if isinstance(node, Literal):
        parts: list[Node] = []
        for part in vocabulary.control_parts(node.text):
            if isinstance(part, str):
                parts.append(Literal(part))
            else:
                written, token = part
                parts.append(Choice((Literal(written), TokenRef(token, False))))
        if len(parts) == 1 and isinstance(parts[0], Literal):
            return node
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))
    if isinstance(node, Sequence):
        return Sequence(tuple(_with_controls(item, vocabulary) for item in node.items))
    if isinstance(node, Choice):
        return Choice(tuple(_with_controls(option, vocabulary) for option in node.options))
    if isinstance(node, Repeat):
        return Repeat(_with_controls(node.item, vocabulary), node.least, node.most)
    return node


def _walk(node: Node) -> Iterator[Node]:
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        todo += children(node)


def _regular(rules: Rules) -> dict[str, tuple[int, int]]:
    """Return the rules that are regular expressions, with their extents: without recursion and tokens, and not too
    large.
    """
    waiting: dict[str, int] = {}
    users: dict[str, list[str]] = {}
    ready = []
    for name, body in rules.items():
        refs = {node.name for node in _walk(body) if isinstance(node, Ref)}
        if any(isinstance(node, TokenRef) for node in _walk(body)):
            continue
        waiting[name] = len(refs)
        for ref in refs:
            users.setdefault(ref, []).append(name)
        if not refs:
            ready.append(name)
    found: dict[str, tuple[int, int]] = {}
    while ready:
        name = ready.pop()
        size, depth = _extent(rules[name], found)
        if size > MAX_LEXEME or depth > MAX_REFERENCES:
            continue
        found[name] = size, depth
        for user in users.get(name, ()):
            if user in waiting:
                waiting[user] -= 1
                if not waiting[user]:
                    ready.append(user)
    return found


def _extent(node: Node, known: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Return the characters of an expanded regular expression, and its number of nested references."""
    if isinstance(node, Ref):
        size, depth = known[node.name]
        return size, depth + 1
    if isinstance(node, Literal):
        return len(node.text), 0
    parts = [_extent(part, known) for part in children(node)]
    size = sum(size for size, _ in parts) + 1
    times = max(node.most or node.least, 1) if isinstance(node, Repeat) else 1
    return size * times, max((depth for _, depth in parts), default=0)


# Parts of a rule after its regular parts have become lexemes.


@dataclass(frozen=True)
class _Lexeme:
    node: Node


@dataclass(frozen=True)
class _Rule:
    name: str


@dataclass(frozen=True)
class _Token:
    node: TokenRef


@dataclass(frozen=True)
class _Row:
    items: tuple[_Part, ...]


@dataclass(frozen=True)
class _Options:
    options: tuple[_Part, ...]


@dataclass(frozen=True)
class _Times:
    item: _Part
    least: int
    most: int | None


_Part = _Lexeme | _Rule | _Token | _Row | _Options | _Times


class _LexemePlan:
    """Decides which parts of a grammar are lexemes."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.regular = _regular(rules)
        self.all_single = False
        self.steps = 0  # taken in the search for overlaps
        self._cut: set[int] = set()  # ids of nodes that must not be a lexeme as a whole
        self._joined: dict[tuple[int, ...], Node] = {}
        self._chars: dict[str, Node] = {}
        self._is_regular: dict[int, bool] = {}

    def refine(self) -> None:
        """Cut lexemes until the longest one is always right."""
        for _ in range(MAX_ROUNDS):
            overlapping = _Overlaps(self).find()
            if not overlapping:
                return
            self._cut.update(map(id, overlapping))
        raise _TooLarge

    def parts(self) -> dict[str, _Part]:
        """Return the parts of the rules that `root` needs."""
        out: dict[str, _Part] = {}
        todo = ["root"]
        while todo:
            name = todo.pop()
            if name in out:
                continue
            out[name] = part = self._part(self.rules[name])
            todo += _rules_in(part)
        return out

    def _may_be_lexeme(self, node: Node) -> bool:
        if isinstance(node, Chars):
            return True
        if self.all_single or id(node) in self._cut:
            return isinstance(node, Literal) and len(node.text) == 1
        known = self._is_regular.get(id(node))
        if known is None:
            known = self._is_regular[id(node)] = all(
                not isinstance(part, TokenRef) and (not isinstance(part, Ref) or part.name in self.regular)
                for part in _walk(node)
            ) and (isinstance(node, Literal) or _extent(node, self.regular)[0] <= MAX_LEXEME)
        return known

    def _part(self, node: Node) -> _Part:
        if self._may_be_lexeme(node):
            return _Lexeme(node)
        if isinstance(node, Literal):
            return _Row(tuple(_Lexeme(self._char(char)) for char in node.text))
        if isinstance(node, Ref):
            return _Rule(node.name)
        if isinstance(node, TokenRef):
            return _Token(node)
        if isinstance(node, Repeat):
            return _Times(self._part(node.item), node.least, node.most)
        separate = self.all_single or id(node) in self._cut
        if isinstance(node, Choice):
            options = node.options if separate else self._together(node.options, Choice)
            return _Options(tuple(map(self._part, options)))
        assert isinstance(node, Sequence)
        return _Row(tuple(map(self._part, node.items if separate else self._neighbors(node.items))))

    def _char(self, char: str) -> Node:
        return self._chars.setdefault(char, Chars(((ord(char), ord(char)),)))

    def _neighbors(self, items: tuple[Node, ...]) -> list[Node]:
        """Return the items with runs of lexemes merged."""
        out: list[Node] = []
        run: list[Node] = []
        for item in items:
            if self._may_be_lexeme(item):
                run.append(item)
                continue
            out += self._join(run, Sequence)
            run = []
            out.append(item)
        return out + self._join(run, Sequence)

    def _together(self, options: tuple[Node, ...], kind: type[Choice]) -> list[Node]:
        lexemes = [option for option in options if self._may_be_lexeme(option)]
        return self._join(lexemes, kind) + [option for option in options if not self._may_be_lexeme(option)]

    def _join(self, nodes: list[Node], kind: type[Sequence] | type[Choice]) -> list[Node]:
        if len(nodes) < 2:
            return nodes
        key = (kind is Choice, *map(id, nodes))
        joined = self._joined.get(key)
        if joined is None:
            joined = self._joined[key] = kind(tuple(nodes))
        return [joined] if self._may_be_lexeme(joined) else nodes


def _rules_in(part: _Part) -> Iterator[str]:
    if isinstance(part, _Rule):
        yield part.name
    elif isinstance(part, _Row):
        for item in part.items:
            yield from _rules_in(item)
    elif isinstance(part, _Options):
        for option in part.options:
            yield from _rules_in(option)
    elif isinstance(part, _Times):
        yield from _rules_in(part.item)


def _size(part: _Part) -> int:
    if isinstance(part, _Row):
        return 1 + sum(map(_size, part.items))
    if isinstance(part, _Options):
        return 1 + sum(map(_size, part.options))
    return 1 + _size(part.item) if isinstance(part, _Times) else 1


@dataclass
class _Automaton:
    """A lexeme's positions: Glushkov's automaton, with sets of positions as bits of an int."""

    nullable: bool
    first: int
    last: int


@dataclass
class _Follow:
    """The lexemes that may be first in a rule and follow it, as bits."""

    nullable: bool = False
    first: int = 0
    after: int = 0


@dataclass
class _Overlaps:
    """Finds the lexemes that could take a character that the grammar may also assign to what follows another.

    All lexemes are considered in parallel: two positions belong together if the same text leads to both. If one of them
    ends its lexeme, and the other can continue with a character that may follow that lexeme, the longest one is not
    always right.
    """

    lexing: _LexemePlan
    _lexemes: list[Node] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _automata: list[_Automaton] = field(default_factory=list)
    _classes: list[int] = field(default_factory=list)  # of each position: its characters, as bits of classes
    _owner: list[int] = field(default_factory=list)
    _next: list[int] = field(default_factory=list)  # positions after each position

    def find(self) -> list[Node]:
        parts = self.lexing.parts()
        if isinstance(parts["root"], _Lexeme):
            return []
        for part in parts.values():
            self._collect(part)
        class_of = self._class_bits()
        for number, node in enumerate(self._lexemes):
            self._automata.append(self._automaton(node, number, class_of))
        after = self._after(parts)
        together = self._together()
        guilty: set[int] = set()
        for number, automaton in enumerate(self._automata):
            following = 0
            for other in _bits(after[number]):
                for position in _bits(self._automata[other].first):
                    following |= self._classes[position]
            if following:
                for end in _bits(automaton.last):
                    for position in _bits(self._successors(together[end])):
                        if self._classes[position] & following:
                            guilty.add(self._owner[position])
        return [self._lexemes[number] for number in guilty]

    def _collect(self, part: _Part) -> None:
        if isinstance(part, _Lexeme):
            if id(part.node) not in self._numbers:
                self._numbers[id(part.node)] = len(self._lexemes)
                self._lexemes.append(part.node)
        elif isinstance(part, _Row):
            for item in part.items:
                self._collect(item)
        elif isinstance(part, _Options):
            for option in part.options:
                self._collect(option)
        elif isinstance(part, _Times):
            self._collect(part.item)

    def _class_bits(self) -> dict[tuple[tuple[int, int], ...], int]:
        """Return the bits of each set of characters in the lexemes: characters that no set separates share a bit."""
        sets: set[tuple[tuple[int, int], ...]] = set()
        seen: set[str] = set()
        todo = list(self._lexemes)
        while todo:
            node = todo.pop()
            if isinstance(node, Ref):
                if node.name not in seen:
                    seen.add(node.name)
                    todo.append(self.lexing.rules[node.name])
            elif isinstance(node, Chars):
                sets.add(node.ranges)
            elif isinstance(node, Literal):
                sets.update(((ord(char), ord(char)),) for char in node.text)
            todo += children(node)
        edges = sorted({edge for ranges in sets for low, high in ranges for edge in (low, high + 1)})
        place = {edge: i for i, edge in enumerate(edges)}
        return {ranges: sum((1 << place[high + 1]) - (1 << place[low]) for low, high in ranges) for ranges in sets}

    def _position(self, number: int, classes: int) -> _Automaton:
        bit = 1 << len(self._owner)
        if len(self._owner) >= MAX_POSITIONS:
            raise _TooLarge
        self._owner.append(number)
        self._classes.append(classes)
        self._next.append(0)
        return _Automaton(False, bit, bit)

    def _automaton(self, node: Node, number: int, class_of: dict[tuple[tuple[int, int], ...], int]) -> _Automaton:
        if isinstance(node, Chars):
            return self._position(number, class_of[node.ranges])
        if isinstance(node, Literal):
            out = _Automaton(True, 0, 0)
            for char in node.text:
                out = self._row(out, self._position(number, class_of[((ord(char), ord(char)),)]))
            return out
        if isinstance(node, Ref):
            return self._automaton(self.lexing.rules[node.name], number, class_of)
        if isinstance(node, Sequence):
            out = _Automaton(True, 0, 0)
            for item in node.items:
                out = self._row(out, self._automaton(item, number, class_of))
            return out
        if isinstance(node, Choice):
            options = [self._automaton(option, number, class_of) for option in node.options]
            out = _Automaton(False, 0, 0)
            for option in options:
                out.nullable |= option.nullable
                out.first |= option.first
                out.last |= option.last
            return out
        assert isinstance(node, Repeat)
        if node.most is not None and node.most <= 4:
            out = _Automaton(True, 0, 0)
            for i in range(node.most):
                copy = self._automaton(node.item, number, class_of)
                copy.nullable |= i >= node.least
                out = self._row(out, copy)
            return out
        # counts above 4 count as unlimited: that only finds more overlaps
        out = self._automaton(node.item, number, class_of)
        for position in _bits(out.last):
            self._next[position] |= out.first
        out.nullable |= node.least == 0
        return out

    def _row(self, a: _Automaton, b: _Automaton) -> _Automaton:
        for position in _bits(a.last):
            self._next[position] |= b.first
        return _Automaton(
            a.nullable and b.nullable,
            a.first | (b.first if a.nullable else 0),
            b.last | (a.last if b.nullable else 0),
        )

    def _step(self, n: int) -> None:
        self.lexing.steps += n
        if self.lexing.steps > MAX_STEPS:
            raise _TooLarge

    def _successors(self, positions: int) -> int:
        self._step(positions.bit_count())
        out = 0
        for position in _bits(positions):
            out |= self._next[position]
        return out

    def _together(self) -> list[int]:
        """Return for each position those that the same text may lead to."""
        having: dict[int, int] = {}
        for position, classes in enumerate(self._classes):
            for number in _bits(classes):
                having[number] = having.get(number, 0) | 1 << position
        shares = []
        for classes in self._classes:
            mates = 0
            for number in _bits(classes):
                mates |= having[number]
            shares.append(mates)
        first = 0
        for automaton in self._automata:
            first |= automaton.first
        together = [0] * len(self._owner)
        todo = list(_bits(first))
        for position in todo:
            together[position] = first & shares[position]
        waiting = set(todo)
        while waiting:
            position = waiting.pop()
            reach = self._successors(together[position])
            for following in _bits(self._next[position]):
                new = reach & shares[following] & ~together[following]
                if new:
                    together[following] |= new
                    waiting.add(following)
        return together

    def _after(self, parts: dict[str, _Part]) -> list[int]:
        """Return for each lexeme those that may follow it."""
        rules = {name: _Follow() for name in parts}
        changed = True
        while changed:
            changed = False
            for name, part in parts.items():
                nullable, first = self._first(part, rules)
                if (nullable, first) != (rules[name].nullable, rules[name].first):
                    rules[name].nullable, rules[name].first = nullable, first
                    changed = True
        after = [0] * len(self._lexemes)
        changed = True
        while changed:
            before = [rule.after for rule in rules.values()]
            for name, part in parts.items():
                self._spread(part, rules[name].after, rules, after)
            changed = before != [rule.after for rule in rules.values()]
        return after

    def _first(self, part: _Part, rules: dict[str, _Follow]) -> tuple[bool, int]:
        self._step(1)
        if isinstance(part, _Lexeme):
            number = self._numbers[id(part.node)]
            return self._automata[number].nullable, 1 << number
        if isinstance(part, _Rule):
            return rules[part.name].nullable, rules[part.name].first
        if isinstance(part, _Token):
            return False, 0
        if isinstance(part, _Times):
            nullable, first = self._first(part.item, rules)
            return nullable or not part.least, first
        if isinstance(part, _Options):
            options = [self._first(option, rules) for option in part.options]
            return any(nullable for nullable, _ in options), _union(first for _, first in options)
        out = 0
        for item in part.items:
            nullable, first = self._first(item, rules)
            out |= first
            if not nullable:
                return False, out
        return True, out

    def _spread(self, part: _Part, follow: int, rules: dict[str, _Follow], after: list[int]) -> None:
        """Propagate the lexemes that may follow a part to everything in it."""
        if isinstance(part, _Lexeme):
            after[self._numbers[id(part.node)]] |= follow
        elif isinstance(part, _Rule):
            rules[part.name].after |= follow
        elif isinstance(part, _Times):
            again = self._first(part.item, rules)[1] if part.most != 1 else 0
            self._spread(part.item, follow | again, rules, after)
        elif isinstance(part, _Options):
            for option in part.options:
                self._spread(option, follow, rules, after)
        elif isinstance(part, _Row):
            for item in reversed(part.items):
                self._spread(item, follow, rules, after)
                nullable, first = self._first(item, rules)
                follow = first | (follow if nullable else 0)


def _union(values: Iterable[int]) -> int:
    out = 0
    for value in values:
        out |= value
    return out


def _bits(value: int) -> Iterator[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


class _Writer:
    """Writes the Lark grammar."""

    def __init__(self, lexing: _LexemePlan, vocabulary: GuidedVocabulary) -> None:
        self._lexing = lexing
        self._vocabulary = vocabulary
        self._lexemes: dict[str, str] = {}  # text of a lexeme → its name
        self._numbers = {name: i for i, name in enumerate(lexing.rules)}
        self._needed: set[str] = set()  # regular rules that lexemes are composed of
        self._lines: list[str] = []

    def grammar(self) -> str:
        lines = ['%llguidance {"no_forcing": true}']
        for name, part in self._lexing.parts().items():
            lines.append(f"{self._rule(name)}: {self._part(part)}")
        done: set[str] = set()
        while self._needed - done:
            for name in sorted(self._needed - done):
                done.add(name)
                lines.append(f"R{self._numbers[name]}: {self._regular(self._lexing.rules[name])}")
        lines += self._lines
        lines += [f"{name}: {text}" for text, name in self._lexemes.items()]
        return "\n".join(lines) + "\n"

    def _rule(self, name: str) -> str:
        return "start" if name == "root" else f"r{self._numbers[name]}"

    def _part(self, part: _Part) -> str:
        if isinstance(part, _Lexeme):
            text = self._regular(part.node)
            return self._lexeme(text)
        if isinstance(part, _Rule):
            return self._rule(part.name)
        if isinstance(part, _Token):
            return self._token(part.node)
        if isinstance(part, _Times):
            return self._shallow(f"({self._part(part.item)}){_count(part.least, part.most)}", "p")
        if isinstance(part, _Options):
            return self._shallow("(" + " | ".join(map(self._part, part.options)) + ")", "p")
        return self._shallow("(" + " ".join(map(self._part, part.items)) + ")", "p") if part.items else '""'

    def _lexeme(self, text: str) -> str:
        return self._lexemes.setdefault(text, f"T{len(self._lexemes)}")

    def _shallow(self, text: str, prefix: str) -> str:
        """Return the text, or the name of a new rule if it is nested too deeply."""
        depth = deepest = 0
        for char in _QUOTED.sub("", text):
            depth += (char == "(") - (char == ")")
            deepest = max(deepest, depth)
        if deepest < _NESTED:
            return text
        if prefix == "T":
            return self._lexeme(text)
        self._lines.append(f"{prefix}{len(self._lines)}: {text}")
        return f"{prefix}{len(self._lines) - 1}"

    def _token(self, node: TokenRef) -> str:
        if not node.negated:
            return f"<[{node.token}]>"
        n_vocab = self._vocabulary.tokenizer.n_vocab
        ranges, low = [], 0
        for token in [*sorted({node.token, *self._vocabulary.tokenizer.eog}), n_vocab]:
            if low < token:
                ranges.append(f"{low}-{token - 1}")
            low = token + 1
        return f"<[{','.join(ranges)}]>"

    def _regular(self, node: Node) -> str:
        """Return a lexeme's definition."""
        if isinstance(node, Literal):
            return json.dumps(node.text, ensure_ascii=False)
        if isinstance(node, Chars):
            return "/[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in node.ranges) + "]/"
        if isinstance(node, Ref):
            self._needed.add(node.name)
            return f"R{self._numbers[node.name]}"
        if isinstance(node, Repeat):
            return self._shallow(f"({self._regular(node.item)}){_count(node.least, node.most)}", "T")
        if isinstance(node, Choice):
            return self._shallow("(" + " | ".join(map(self._regular, node.options)) + ")", "T")
        assert isinstance(node, Sequence)
        return self._shallow("(" + " ".join(map(self._regular, node.items)) + ")", "T") if node.items else '""'


def _count(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"
