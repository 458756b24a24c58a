"""Names of tensors are known where files and architectures are; everything else goes by what weights are for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import llamado

SOURCE = Path(llamado.__file__).parent
KNOWING = {"models", "gguf", "quantize"}
NAMES = re.compile(
    r"token_embd|token_types|position_embd|rope_freqs|output_norm|output\\?\.(weight|bias)|blk\\?\."
    r"|(attn|ffn|ssm)_(q|k|v|qkv|output|up|down|gate|norm)|_exps|cls\\?\.(weight|output)|^output$"
)
# The source of every such text matches: one search is quicker than reading the tree. Backslashes may be doubled.
SUSPECT = re.compile(NAMES.pattern.replace(r"\\?", r"\\*").replace("^output$", "[\"']output[\"']"))
# The API's own words.
OTHERS = {("server/api/responses.py", "output"), ("server/api/openapi.py", "output")}


def spoken(source: str) -> Iterator[str]:
    """The texts in a module that are not its documentation, if one of them may be a name."""
    if not SUSPECT.search(source):
        return
    nodes = [*ast.walk(ast.parse(source))]
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


@pytest.mark.slow
def test_tensors_are_not_identified_by_name() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {text!r}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in KNOWING
        for text in spoken(path.read_text())
        if NAMES.search(text) and (path.relative_to(SOURCE).as_posix(), text) not in OTHERS
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        'home = 0 if name == "token_embd.weight" else 1',
        'tied = "output.weight" not in weights',
        'LAYER = re.compile(r"blk\\.(\\d+)\\.")',
        'head = name.startswith("output")',
        'experts = "ffn_up_exps" in name',
        'name = f"blk.{i}.attn_q.weight"',
    ],
)
def test_comparisons_are_noticed(line: str) -> None:
    assert any(NAMES.search(text) for text in spoken(line))


def test_devices_and_the_language_know_no_models() -> None:
    for room in ("devices", "ggml"):
        for path in (SOURCE / room).rglob("*.py"):
            assert "llamado.models" not in path.read_text(), path
