from __future__ import annotations

import inspect
import random
import sys

import pytest
from guided import Vocabulary, bytes_tokenizer, pieces_tokenizer

from llamado.text.grammar import gbnf_lark
from llamado.text.grammar.gbnf import Chars, Choice, Literal, Node, Ref, Repeat, Rules, Sequence, parse
from llamado.text.grammar.source import GrammarError


@pytest.fixture(scope="module", params=[bytes_tokenizer, pieces_tokenizer])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(request.param())


@pytest.fixture(scope="module")
def bpe() -> Vocabulary:
    return Vocabulary(bytes_tokenizer())


GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "yes" | "no"', ["yes", "no"], ["", "y", "yess", "maybe"]),
    ('root ::= "a"? "b"* "c"+', ["c", "ac", "abbcc"], ["a", "ab", "aac"]),
    ('root ::= "a"{2} "b"{1,2} "c"{2,}', ["aabcc", "aabbccc"], ["abcc", "aabbbcc", "aabc"]),
    ('root ::= "ab"*', ["", "abab"], ["aba"]),
    ('root ::= ("a" | "b" "c")+', ["abca", "bc"], ["", "b", "ac"]),
    ("root ::= [a-cx]+", ["abcx"], ["d", ""]),
    ("root ::= [^a-c\\n]+", ["xé", " "], ["a", "x\n"]),
    ("root ::= [a-] [-a] [\\]\\-\\\\]", ["--]", "aa-", "-a\\"], ["b-]", "--a"]),
    ("root ::= .", ["x", "\n", "é", "😀"], ["", "xy"]),
    ('root ::= "\\x41\\u00e9\\U0001F600\\n\\t\\r\\"\\\\"', ['Aé😀\n\t\r"\\'], ["Aé😀"]),
    ('# comment\nroot ::= # more\n  x # end\n\n\nx ::= "x" # x', ["x"], ["# comment"]),
    ('root ::= (\n "a" # first\n | "b"\n)\n', ["a", "b"], ["ab"]),
    ('root ::= "a" |\n "b"\n', ["a", "b"], [""]),
    ('root ::= "a" |', ["a", ""], ["aa"]),
    ("root ::= x\r\nx ::= [0-9]\r\n", ["1"], ["a"]),
    ('root ::= rule-2\nrule-2 ::= "x"\nrule-2 ::= "y"', ["y"], ["x"]),
    ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "()"]),
    ('root ::= "a" root "b" |', ["", "aabb"], ["aab", "ba"]),
    # The longest lexeme is not the right one:
    ('root ::= [a-z]+ "x"', ["abcx", "xx"], ["x", "abc"]),
    ('root ::= "(" root ")" | [a-z]+ "x" tail\ntail ::= "1"', ["(abx1)", "xxx1"], ["(ab1)", "x1"]),
    ('root ::= num "\\n" root | "."\nnum ::= [0-9]+ ws\nws ::= [ \\n]*', ["1\n.", "1 \n\n2\n."], ["1.", "1 ."]),
    ('root ::= word (" " root)? | "[" root "]"\nword ::= "if" | [a-z]+', ["if", "[if ifs]", "iff"], ["[if", "if "]),
    ('root ::= "=" root | "==" "x" | "y"', ["==x", "===y", "====x"], ["=x"]),
    ('root ::= ([a-z]? [a-z]?){0,3} "!"', ["!", "abcdef!"], ["abcdefg!", "a"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS)
def test_language(vocabulary: Vocabulary, grammar: str, good: list[str], bad: list[str]) -> None:
    constraint = vocabulary.constraint("gbnf", grammar)
    for text in good:
        assert vocabulary.accepts(constraint, text), text
    for text in bad:
        assert not vocabulary.accepts(constraint, text), text


@pytest.mark.parametrize(
    ("grammar", "line", "what"),
    [
        ('root ::= "a', 1, "unexpected end"),
        ("root ::= [a", 1, "unexpected end"),
        ('root ::= "a"\nb ::= foo', 2, "rule 'foo' is not defined"),
        ('root = "a"', 1, "expecting '::='"),
        ('root ::= "a"\n\n_x ::= "b"', 3, "expecting a rule's name"),
        ('root ::= "a" )', 1, "expecting a new line"),
        ('root ::= ("a"', 1, "expecting ')'"),
        ("root ::= *", 1, "expecting something to repeat"),
        ('root ::= ""*', 1, "expecting something to repeat"),
        ('root ::= "\\q"', 1, "unknown escape"),
        ('root ::= "\\u12"', 1, "expecting 4 hexadecimal digits"),
        ('root ::= "\\U00110000"', 1, "not a character"),
        ('root ::= "\\ud800"', 1, "surrogate"),
        ('root ::= "a"{', 1, "expecting a number"),
        ('root ::= "a"{2', 1, "expecting '}'"),
        ('root ::= "a"{2,1}', 1, "repetitions are impossible"),
        ('root ::= "a"{2001}', 1, "too many"),
        ('root ::= (("a" | "b"){0,100} "c"){0,100}', 1, "repetitions inside repetitions"),
        ('root ::= "a"\nx ::= x "b"', 2, "left recursion"),
        ('root ::= y\ny ::= "a"? z\nz ::= root "b"', 1, "left recursion"),
        ("root ::= [^\\x00-\\U0010FFFF]", 1, "is empty"),
        ("root ::= [z-a]", 1, "is reversed"),
        ("root ::= <nothing>", 1, "not one token"),
        ("root ::= <[100000]>", 1, "not one token"),
        ("root ::= <abc", 1, "expecting '>'"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, 1, "parentheses"),
    ],
)
def test_errors_name_the_line(bpe: Vocabulary, grammar: str, line: int, what: str) -> None:
    with pytest.raises(GrammarError) as caught:
        bpe.constraint("gbnf", grammar)
    # What the real server answers, and more.
    assert str(caught.value).startswith(f"Failed to initialize samplers: failed to parse grammar: line {line}: ")
    assert what in str(caught.value)


@pytest.mark.parametrize("grammar", ["", "  \n# nothing\n", 'x ::= "a"'])
def test_no_root(bpe: Vocabulary, grammar: str) -> None:
    with pytest.raises(GrammarError, match="failed to parse grammar: it has no rule named 'root'"):
        bpe.constraint("gbnf", grammar)


def test_tokens(bpe: Vocabulary) -> None:
    ids = bpe.tokenizer.vocabulary.ids
    think, end = ids["<think>"], ids["</think>"]
    matcher = bpe.constraint("gbnf", 'root ::= <think> !</think>* </think> "x"').start()
    assert bpe.allowed(matcher) == [think]
    matcher.accept(think)
    everything = set(range(bpe.tokenizer.n_vocab)) - bpe.tokenizer.eog
    assert set(bpe.allowed(matcher)) == everything  # any token, or the closing one
    matcher.accept(think)
    matcher.accept(end)
    assert bpe.allowed(matcher) == bpe.spell("x")
    assert bpe.accepts(bpe.constraint("gbnf", f'root ::= "a" <[{think}]>'), "a<think>")
    assert end not in bpe.allowed(bpe.constraint("gbnf", f"root ::= !<[{end}]>").start())


def test_text_matches_control_tokens_only_by_spelling(bpe: Vocabulary) -> None:
    controls = set(bpe.tokenizer.vocabulary.with_attribute(8))
    assert not set(bpe.allowed(bpe.constraint("gbnf", "root ::= .+").start())) & controls
    assert not set(bpe.allowed(bpe.constraint("gbnf", "root ::= [<a]+").start())) & controls
    constraint = bpe.constraint("gbnf", 'root ::= "a<tool_call>\\n"+')
    assert bpe.accepts(constraint, "a<tool_call>\na<tool_call>\n")
    matcher = constraint.start()
    for token in bpe.compiler.vocabulary.spell_bytes(b"a<tool_call>\n"):  # the letters, one by one
        assert token in bpe.allowed(matcher)
        matcher.accept(token)
    assert bpe.may_end(matcher)


def test_every_end_of_generation_token_ends(bpe: Vocabulary) -> None:
    assert len(bpe.tokenizer.eog) == 2
    matcher = bpe.constraint("gbnf", 'root ::= "a"').start()
    assert not bpe.may_end(matcher)
    assert bpe.feed(matcher, "a")
    assert set(bpe.allowed(matcher)) == bpe.tokenizer.eog


def test_byte_tokens_of_a_character() -> None:
    """A character that the vocabulary has no token for is made of bytes, and only of its own."""
    vocabulary = Vocabulary(pieces_tokenizer())
    matcher = vocabulary.constraint("gbnf", "root ::= [😀-😂]").start()
    for byte in "😁".encode()[:3]:
        assert [vocabulary.tokenizer.piece(t) for t in vocabulary.allowed(matcher)] == [bytes([byte])]
        matcher.accept(vocabulary.allowed(matcher)[0])
    assert len(vocabulary.allowed(matcher)) == 3


def test_spaces_of_sentencepiece() -> None:
    vocabulary = Vocabulary(pieces_tokenizer())
    assert vocabulary.accepts(vocabulary.constraint("gbnf", 'root ::= " a the"'), " a the")
    assert not vocabulary.accepts(vocabulary.constraint("gbnf", 'root ::= "▁a"'), " a")


def test_after_a_generation_prompt(bpe: Vocabulary) -> None:
    grammar = 'root ::= "<|im_start|>assistant\\n" "yes"'
    constraint = bpe.constraint("gbnf", grammar, prompt="<|im_start|>assistant\n")
    assert bpe.accepts(constraint, "yes")
    assert bpe.accepts(bpe.constraint("gbnf", grammar), "<|im_start|>assistant\nyes")
    with pytest.raises(GrammarError, match="does not allow the end of the prompt"):
        bpe.constraint("gbnf", grammar, prompt="<think>")


# --- against an interpreter that knows nothing of lexemes


class Interpreter:
    """Return the ends of instances of a node that begin at `i`, found by iterating to a fixed point."""

    def __init__(self, rules: Rules, text: str) -> None:
        self.rules, self.text = rules, text
        self.known: dict[tuple[int, int], set[int]] = {}

    def matches(self) -> bool:
        while True:
            self.changed, self.seen = False, set[tuple[int, int]]()
            ends = self.ends(self.rules["root"], 0)
            if not self.changed:
                return len(self.text) in ends

    def ends(self, node: Node, i: int) -> set[int]:
        if isinstance(node, Ref):
            node = self.rules[node.name]
            if isinstance(node, Ref):
                return self.ends(node, i)
        key = (id(node), i)
        known = self.known.setdefault(key, set())
        if key not in self.seen:
            self.seen.add(key)
            new = self.find(node, i)
            self.changed |= not new <= known
            known |= new
        return known

    def find(self, node: Node, i: int) -> set[int]:
        if isinstance(node, Literal):
            return {i + len(node.text)} if self.text.startswith(node.text, i) else set()
        if isinstance(node, Chars):
            return {i + 1} if any(a <= ord(c) <= b for a, b in node.ranges for c in self.text[i : i + 1]) else set()
        if isinstance(node, Sequence):
            places = {i}
            for item in node.items:
                places = {end for place in places for end in set(self.ends(item, place))}
            return places
        if isinstance(node, Choice):
            return {end for option in node.options for end in set(self.ends(option, i))}
        assert isinstance(node, Repeat)
        places, found, n = {i}, set[int](), 0
        if not node.least:
            found.add(i)
        while places and (node.most is None or n < node.most):
            n += 1
            places = {end for place in places for end in set(self.ends(node.item, place))}
            if n >= node.least:
                places -= found
                found |= places
            elif n > 50:
                break
        return found


def random_rule(random: random.Random, depth: int) -> str:
    kind = random.random()
    if depth <= 0 or kind < 0.25:
        return random.choice(['"a"', '"b"', '"ab"', '"c"', "[ab]", "[bc]", '"abc"', '"d"', "[b-d]"] + ["x", "y"] * 3)
    parts = [random_rule(random, depth - 1) for _ in range(random.randint(2, 3))]
    if kind < 0.55:
        return " ".join(parts)
    if kind < 0.8:
        return "(" + " | ".join(parts) + random.choice(["", "", "", " | "]) + ")"
    return f"({parts[0]})" + random.choice(["*", "+", "?", "{2}", "{1,2}", "{2,}", "{0,3}"])


@pytest.mark.slow
def test_random_grammars_accept_their_language(bpe: Vocabulary) -> None:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 3000))
    chance = random.Random(7)
    compared = 0
    while compared < 80:
        grammar = "\n".join(
            f"{name} ::= {random_rule(chance, depth)}" for name, depth in (("root", 3), ("x", 2), ("y", 2))
        )
        try:
            rules = parse(grammar, lambda name: None)
        except GrammarError:
            continue  # left recursion, mostly
        constraint = bpe.constraint("gbnf", grammar)
        compared += 1
        for _ in range(12):
            text = "".join(chance.choice("abcd") for _ in range(chance.randint(0, 6)))
            assert bpe.accepts(constraint, text) == Interpreter(rules, text).matches(), (grammar, text)


def test_rules_that_overlap_in_many_ways_end_in_single_characters(
    bpe: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for overlaps is limited by its steps; the language is the same without its result."""
    rules = "".join(f'r{i} ::= r{i + 1}? "a"?\n' for i in range(12))
    grammar = "root ::= r0\n" + rules + 'r12 ::= "b" root?'
    for steps in (gbnf_lark.MAX_STEPS, 10):
        monkeypatch.setattr(gbnf_lark, "MAX_STEPS", steps)
        constraint = Vocabulary(bpe.tokenizer).constraint("gbnf", grammar)
        for text in ("b", "ba", "baaa", "aa", "bba"):
            assert bpe.accepts(constraint, text), (steps, text)
        assert not bpe.accepts(constraint, "a" * 13)
    lexing = gbnf_lark._LexemePlan({"root": Ref("r")} | {"r": Sequence((Literal("a"), Repeat(Ref("root"), 0, 1)))})
    with pytest.raises(gbnf_lark._TooLarge):
        lexing.refine()
    assert lexing.steps > 10


def test_groups_too_deep_for_the_reader_are_refused(bpe: Vocabulary) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 300)
    try:
        with pytest.raises(GrammarError, match="nested too deep"):
            bpe.constraint("gbnf", "root ::= " + "(" * 190 + '"a"' + ')? "b"' * 190)
    finally:
        sys.setrecursionlimit(limit)


def test_the_most_repetitions_are_still_counted() -> None:
    for most, counted in ((2000, 2000), (2001, None)):
        node = parse(f'root ::= "a"{{0,{most}}}', lambda name: None)["root"]
        assert isinstance(node, Repeat) and node.most == counted
