"""`edit_file`: texts are found exactly, or ignoring trailing blanks and the style of quotation marks and dashes."""

from __future__ import annotations

import pytest

from llamado.tools.builtin.edit import apply_edits, normalize
from llamado.tools.errors import ToolFailed


def test_exact_matches() -> None:
    assert apply_edits("one two\nthree\n", [("three", "3"), ("one", "1")], "f") == "1 two\n3\n"


def test_untouched_lines_stay_unchanged() -> None:
    text = "keep  \nsay “hi” \nkeep — too\t\nend"
    assert apply_edits(text, [('say "hi"', "said")], "f") == "keep  \nsaid\nkeep — too\t\nend"
    assert apply_edits(text, [('say "hi"\nkeep - too', "a\nb")], "f") == "keep  \na\nb\nend"
    assert apply_edits(text, [("keep - too", "x"), ("end", "y")], "f") == "keep  \nsay “hi” \nx\ny"
    assert apply_edits("say “a”\nkeep  \n", [('say "a"\n', "b\n")], "f") == "b\nkeep  \n"
    assert apply_edits("a\r\nb\r\n", [("a\nb", "c\nd")], "f") == "c\nd\n"
    assert apply_edits("x “q” y “r” z", [('"q"', "1"), ('"r"', "2")], "f") == "x 1 y 2 z"


@pytest.mark.parametrize(
    ("text", "edits", "why"),
    [
        ("a", [("b", "c")], r"could not find edits\[0\]"),
        ("a a", [("a", "c")], r"found 2 occurrences of edits\[0\]"),
        ("a b\na b \n", [("a b \n", "c")], "found 2 occurrences"),
        ("abc", [("bc", "1"), ("ab", "2")], r"edits\[1\] and edits\[0\] overlap"),
        ("a “x” ", [('"x"', "1"), ("  ", "2")], "could not find|must be unique"),
    ],
)
def test_invalid_edits(text: str, edits: list[tuple[str, str]], why: str) -> None:
    with pytest.raises(ToolFailed, match=why):
        apply_edits(text, edits, "f")


def test_normalization() -> None:
    assert normalize("‘a’ “b” – c d  \t\r\ne") == "'a' \"b\" - c d\ne"
