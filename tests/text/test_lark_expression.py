"""Lark grammars written as one regular expression, and held to as the text of a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from guided import Vocabulary, bytes_tokenizer
from test_dialects import ready
from test_dialects_grammar import fits

from llamado.text.grammar.lark_expression import MAX_LENGTH, lark_expression
from llamado.text.grammar.source import GrammarError

# The shape of a patch, as agents that edit files have it.
PATCH = """
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: add | delete | update   // one file each
add: "*** Add File: " name LF added+
delete: "*** Delete File: " name LF
update: "*** Update File: " name LF change?
name: /(.+)/
added: "+" /(.*)/ LF -> line
change: (context | line)+ [last]
context: ("@@" | "@@ " /(.+)/) LF
?line.2: ( "+" | "-"
         | " "
         ) /(.*)/ LF
last: "*** End of File" LF
%import common.LF
"""
SUM = """
start: expr
expr: term (SP ADD SP term)* -> add
    // products come first
    | term
!term: factor (SP MUL SP factor)* | factor
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
QUERY = r"""
start: "select"i NAME ("," NAME)~0..2 ["where" cond]
cond: NAME "=" (NUMBER | TEXT | STRING)
NAME: "a".."z"+
TEXT: /'[^'\/]*'/i
%import common (NUMBER, WS)
%import common.ESCAPED_STRING -> STRING
%ignore WS
"""
NESTED = """
start: expr
expr: expr "+" term | term
term: term "*" factor | factor
factor: "1".."9" | "(" expr ")" | "[" expr "]"
"""
CASES: list[tuple[str, list[str], list[str]]] = [
    (
        PATCH,
        [
            '*** Begin Patch\n*** Add File: a.py\n+x = "1"\n+\n*** End Patch',
            "*** Begin Patch\n*** Update File: b\n@@ f\n-a\n+b\\\n*** Delete File: é\n*** End Patch\n",
        ],
        ["", "*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\n*** End Patch"],
    ),
    (SUM, ["1", "12 + 3 * 4"], ["1+2", "+", "1 + "]),
    (QUERY, ["SELECT a , b\n where a = 'x y'", " select ab", 'select a where b="\\""'], ["select a,b,c,d", "select A"]),
    ('start: "a"{2} "b"{1,3} "c"{1,}', ["aabc", "aabbbccc"], ["abc", "aabbbbc", "aab"]),
    ('start: item\nitem: item "," "x" | "x"', ["x", ",".join("x" * 50)], ["", "x,", ",x"]),
    ('start: "x" start | "y"', ["y", "x" * 50 + "y"], ["x", "yx"]),
    (NESTED, ["1", "((1)+2*[(3)])", "(" * 3 + "1" + ")" * 3], ["(1", "1)", "(1]", "()", "1+"]),
    ('start: "\\n\\t\\"\\u00e9" /\\x41/', ['\n\t"éA'], ["n"]),
    ("start: A\nA: B B\nB: \"x\"\n%ignore \" \"", ["xx", " xx "], ["x x"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(bytes_tokenizer())


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES, ids=range(len(CASES)))
def test_the_expression_has_the_grammar_s_texts(
    vocabulary: Vocabulary, grammar: str, good: list[str], bad: list[str]
) -> None:
    expression = lark_expression(grammar)
    constraint = vocabulary.constraint("regex", expression)
    assert [text for text in good + bad if vocabulary.accepts(constraint, text)] == good
    schema = {"type": "object", "properties": {"input": {"type": "string", "pattern": f"^(?:{expression})$"}}}
    constraint = vocabulary.constraint("json_schema", json.dumps(schema | {"required": ["input"]}))
    written = [
        text for text in good + bad if vocabulary.accepts(constraint, json.dumps({"input": text}, ensure_ascii=False))
    ]
    assert written == good


CALLS = {
    "hermes": lambda text: (
        "<tool_call>\n" + json.dumps({"name": "t", "arguments": {"input": text}}, ensure_ascii=False) + "\n</tool_call>"
    ),
    "coder": lambda text: (
        f"<tool_call>\n<function=t>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ),
}


@pytest.mark.parametrize("family", CALLS)
def test_calls_are_held_to_it(family: str) -> None:
    what: dict[str, Any] = {"type": "string", "pattern": f"^(?:{lark_expression(PATCH)})$"}
    parameters = {"type": "object", "properties": {"input": what}, "required": ["input"]}
    tool = {"type": "function", "function": {"name": "t", "description": "d", "parameters": parameters}}
    grammar = ready(family, tools=[tool], strict_tools={"t": None}, tool_choice="function:t").grammar
    _, good, bad = CASES[0]
    assert [text for text in good + bad if fits(grammar, CALLS[family](text))] == good


def test_long_grammars_are_read_in_linear_time() -> None:
    """Quadratic time would be minutes."""
    assert lark_expression("\n" * 50_000 + 'start: "a"' + "\n// x" * 20_000 + "\n" * 20_000 + '| "b"').count("a") == 1


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("", "no rule 'start'"),
        ('start: "(" start ")"', "no text that ends"),
        ("start: a\na: b\nb: a", "no text that ends"),
        ("start: x", "no rule 'x'"),
        ('start: "a"\n%declare X', "line 2 of the grammar: %declare is not supported"),
        ("start: X\n%import python.X", "only terminals of 'common'"),
        ("start: X\n%import common.X", "common.X is not supported"),
        ('start: %json {"type": "null"}', "unexpected '%json'"),
        ('start "a"', "expected ':' behind 'start'"),
        ('start: "a', "line 1 of the grammar"),
        ('start: ("a"', r"expected '\)'"),
        ('start: "a"~99999', "a number of up to 4 digits"),
        (
            "\n".join(f"r{i}: {' | '.join(f'r{j}' for j in range(30))}" for i in range(30)) + "\nstart: r0",
            "no text|steps",
        ),
        ("start: " + "(" * 50_000, "nested too deep"),
        ("\n".join([*(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)), 'r40: "x"', "start: r0"]), str(MAX_LENGTH)),
    ],
    ids=range(15),
)
def test_unconvertible_grammars_give_the_reason(grammar: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        lark_expression(grammar)
