"""References inside a schema: `#`, JSON pointers (`#/$defs/name`) and anchors (`#name`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from llamado.numerals import whole_number


def objects(root: object) -> Iterator[dict[str, Any]]:
    """Yield every JSON object in a value, including itself."""
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            yield node
            todo += node.values()
        elif isinstance(node, list):
            todo += node


def anchors(root: object) -> dict[str, object]:
    """Return the named schemas by anchor."""
    return {node["$anchor"]: node for node in objects(root) if isinstance(node.get("$anchor"), str)}


def follow(pointer: str, root: Any) -> Any:
    """Return the target of a JSON pointer (`#/a/0`). Raises LookupError with the first step that does not exist."""
    at = root
    for step in pointer.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        index = whole_number(step)
        if isinstance(at, list) and index is not None and index < len(at):
            at = at[index]
        elif isinstance(at, dict) and step in at:
            at = at[step]
        else:
            raise LookupError(step)
    return at
