"""Plain words in the source: docstrings that open with the thing they describe, and the field's terms.

CONTRIBUTING.md has the rules. Packages join `REWRITTEN` once their words follow them.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import llamado

SOURCE = Path(llamado.__file__).parent
REWRITTEN = (
    "client",
    "cluster",
    "commands",
    "devices",
    "engine",
    "gateway",
    "ggml",
    "gguf",
    "http",
    "library",
    "media",
    "models",
    "page",
    "processes",
    "quantize",
    "router",
    "rpc",
    "server",
    "terminal",
    "text",
    "tools",
)

TESTS = Path(__file__).parent
REWRITTEN_TESTS = (
    "client",
    "clients",
    "commands",
    "devices",
    "engine",
    "ggml",
    "gguf",
    "interop",
    "media",
    "page",
    "quantize",
    "rpc",
    "server",
    "text",
    "tiny",
)

QUESTION_WORDS = ["What", "Whether", "Who", "Whose", "Whoever", "How", "Where", "Which"]
"""Words at the beginning of a docstring that asks instead of naming the thing."""
CONTINUATIONS = ["Those", "That which", "Also", "And", "But", "Else", "Otherwise", "Neither", "Not even", "Not only"]
"""Words that continue the name above a docstring, which readers have to put together then."""
_OPENING = re.compile(rf"({'|'.join(QUESTION_WORDS + CONTINUATIONS)})\b")
RIDDLES = [
    "nobody", "somebody", "anybody", "whoever", "what goes along", "goes elsewhere", "is told", "are told", "was told",
    "hear of", "hears of", "gets to know", "wants to", "does not know", "trust it", "trusts it",
]  # fmt: skip
"""Phrases that name no actor, or describe software as a person."""
_RIDDLES = re.compile(rf"\b({'|'.join(RIDDLES)})\b", re.IGNORECASE)
_TYPESCRIPT_COMMENT = re.compile(r"/\*\*?\s(?:\s*\* )?([\s\S]*?)\*/|(?<![:\"'`\w])//\s([^\n]*)")
_PARTICIPLE = re.compile(r"_?([A-Z][a-z]+(ed|ing)|Begun|Known|Made|Ran|Said|Told)\b")
_SUSPECT = re.compile(rf"[\"'](?:\\\n)?\s*{_OPENING.pattern}|class\s+{_PARTICIPLE.pattern}")
NOUNS = {
    "Building",
    "Drawing",
    "Embedding",
    "Encoding",
    "Finding",
    "Gating",
    "Greeting",
    "Lowering",
    "Mapping",
    "Padding",
    "Pooling",
    "Reasoning",
    "Sampling",
    "Setting",
    "String",
    "Thing",
    "Warning",
}
"""Class names with these endings that are nouns of the field."""


def _files() -> list[Path]:
    """Return the modules of rewritten packages and tests, the top-level modules, and the benchmarks."""
    folders = [
        *(SOURCE / name for name in REWRITTEN),
        *(TESTS / name for name in REWRITTEN_TESTS),
        TESTS.parent / "benchmarks",
    ]
    others = sorted(path for path in TESTS.glob("*.py") if path.name != Path(__file__).name)
    return [
        *sorted(SOURCE.glob("*.py")),
        *(path for folder in folders for path in sorted(folder.rglob("*.py"))),
        *others,
    ]


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements at any depth. Expressions hold none, and are most of a tree."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            children = getattr(node, field, None)
            if isinstance(children, list):  # the body of a lambda or of a conditional expression is no list
                waiting += children
        if isinstance(node, ast.stmt):
            yield node


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def typescript_faults(text: str) -> list[tuple[int, str]]:
    """Return line and reason of every comment in a TypeScript module that breaks the rules."""
    found = []
    for comment in _TYPESCRIPT_COMMENT.finditer(text):
        line, words = text.count("\n", 0, comment.start()) + 1, comment[1] or comment[2]
        if opening := _OPENING.match(words):
            found.append((line, f"the comment opens with {opening[0]!r}"))
        found += [(line, f"says {riddle[0]!r}") for riddle in _RIDDLES.finditer(words)]
    return found


def faults(text: str) -> list[tuple[int, str]]:
    """Return line and reason of everything in a module that breaks the rules, in the order of its lines."""
    # Searches of the text take a hundredth of the time that parsers do.
    lower = text.lower()
    may_riddle = any(riddle in lower for riddle in RIDDLES)
    if not (may_riddle or _SUSPECT.search(text)):
        return []
    statements = [*_statements(ast.parse(text))]
    found = []
    docstrings = [
        (node.lineno, node.value.value)
        for node in statements
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    for line, docstring in docstrings:
        if opening := _OPENING.match(docstring.lstrip()):
            found.append((line, f"the docstring opens with {opening[0]!r}"))
    for line, words in [*docstrings, *_comments(text)] if may_riddle else ():
        found += [(line, f"says {riddle[0]!r}") for riddle in _RIDDLES.finditer(words)]
    for node in statements:
        if isinstance(node, ast.ClassDef) and _PARTICIPLE.fullmatch(node.name) and node.name.lstrip("_") not in NOUNS:
            found.append((node.lineno, f"the class {node.name} is named by a participle"))
    return sorted(found)


def _name(path: Path) -> str:
    root = SOURCE if path.is_relative_to(SOURCE) else TESTS.parent
    return str(path.relative_to(root))


def test_words_are_plain() -> None:
    files = _files()
    assert len(files) > 1000
    assert not {_name(path): found for path in files if (found := faults(path.read_text()))}


def test_comments_of_the_page_are_plain() -> None:
    modules = sorted((TESTS.parent / "web" / "src").rglob("*.ts*"))
    assert modules and not {path.name: found for path in modules if (found := typescript_faults(path.read_text()))}


def test_faults_are_found() -> None:
    typescript = "/** Whether */\n// fine\n/**\n * Is told\n */\nx // trusts it"
    assert [line for line, _ in typescript_faults(typescript)] == [1, 3, 6]
    module = '''"""What a module does."""
class Answering:
    field: int
    """Whether it is told."""
# trusts it
'''
    assert [line for line, _ in faults(module)] == [1, 2, 4, 4, 5]
