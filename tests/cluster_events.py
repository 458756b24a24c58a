"""A client of `/cluster/events`."""

from __future__ import annotations

from functools import reduce
from typing import Any


def after_message(view: Any, message: dict[str, Any]) -> Any:
    """Return the cluster view after a message of the stream."""
    return message["cluster"] if "cluster" in message else reduce(_replaced, message["patch"], view)


def _replaced(value: Any, change: dict[str, Any]) -> Any:
    keys = [key.replace("~1", "/").replace("~0", "~") for key in change["path"].split("/")[1:]]
    return _replaced_at(value, keys, change["value"])


def _replaced_at(value: Any, keys: list[str], part: Any) -> Any:
    if not keys:
        return part
    if isinstance(value, list):
        return [_replaced_at(one, keys[1:], part) if i == int(keys[0]) else one for i, one in enumerate(value)]
    return value | {keys[0]: _replaced_at(value[keys[0]], keys[1:], part)}
