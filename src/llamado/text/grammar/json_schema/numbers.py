"""The numbers in a JSON schema, brought into the range in which llguidance counts right.

It takes every number for a 64-bit float and makes 64-bit integers of bounds: what a float rounds changes its meaning,
and from 2⁶³ on it recurses without end, which ends the process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any

MOST = 2**63 - 1024
"""The largest float below 2⁶³."""
FAR = 10**16 - 1
"""llama.cpp allows integers of 16 digits; models that count on and on stop there."""
MAX_COUNT = 2**31 - 1  # no answer has so many characters, items or properties
MAX_MULTIPLE = 1_000  # `multipleOf` in units of its last digit: so many states an automaton needs
MAX_DECIMALS = 9  # of `multipleOf`
_SMALLEST = 1e-100  # the least bound but 0: its zeros are written out

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

Number = int | float


def limits(node: Mapping[str, Any]) -> dict[str, Number]:
    """The bounds, lengths and counts that a schema gives, none wider than given. Raises ValueError."""
    out: dict[str, Number] = {}
    for bound, inward, tighter in (("minimum", 1, max), ("maximum", -1, min)):
        exclusive = "exclusive" + bound.capitalize()
        given = {key: node[key] for key in (bound, exclusive) if key in node}
        if isinstance(given.get(exclusive), bool) and given.pop(exclusive) and bound in given:  # as draft 4 has it
            given[exclusive] = given.pop(bound)
        for key, value in given.items():
            near = _bound(key, value, inward)
            if key == exclusive and abs(near) >= 2**53:  # where one more would be rounded away
                key, near = bound, _bound(key, int(near) + inward, inward) if near == value else near
                near = tighter(near, out.get(key, near))
            out[key] = near
    # Where one bound alone is so far out, the powers of ten beyond it have more than 64 bits.
    least, most = out.keys() & {"minimum", "exclusiveMinimum"}, out.keys() & {"maximum", "exclusiveMaximum"}
    if not most and any(out[key] >= FAR for key in least):
        out["maximum"] = MOST
    if not least and any(out[key] <= -FAR for key in most):
        out["minimum"] = -MOST
    for key in _COUNTS:
        if key in node:
            count = _count(key, node[key])
            if count is not None:
                out[key] = count
    if "multipleOf" in node:
        out["multipleOf"] = node["multipleOf"]
    return out


def multiple(value: Number) -> Decimal:
    """`multipleOf` as it is written. Raises ValueError."""
    if not isinstance(value, bool) and 0 < value <= MAX_MULTIPLE:
        exact = Decimal(str(value)).normalize()
        decimals = max(0, -int(exact.as_tuple().exponent))
        if decimals <= MAX_DECIMALS and exact.scaleb(decimals) <= MAX_MULTIPLE:
            return exact
    raise ValueError(f"keyword 'multipleOf' is not supported with {_shown(value)}")


def units(multiples: Collection[Decimal]) -> int:
    """Return the least common multiple of decimals, in units of the last digit of any of them."""
    decimals = max((-int(each.as_tuple().exponent) for each in multiples), default=0)
    return math.lcm(*(int(each.scaleb(max(0, decimals))) for each in multiples))


def check_literal(value: object) -> None:
    """Raise ValueError for a fixed value with a number in it that would be written as another."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list):
            todo += item
        elif isinstance(item, (int, float)) and not (-MOST <= item <= MOST and float(item) == item):
            raise ValueError(f"the number {_shown(item)} has more digits than can be held; use a string instead")


def _bound(key: str, value: Number, inward: int) -> Number:
    """The bound, or the nearest float on its inner side (`inward`: 1 upwards, -1 downwards)."""
    if value * inward < -MOST:
        return -MOST * inward
    if not isinstance(value, bool) and value * inward <= MOST and (value == 0 or abs(value) >= _SMALLEST):
        near = float(value)
        if near * inward < value * inward:
            near = math.nextafter(near, inward * math.inf)
        if near * inward <= MOST:
            return int(near) if abs(near) >= 2**53 else value
    raise ValueError(f"keyword '{key}' is not supported with {_shown(value)}")


def _count(key: str, value: Number) -> int | None:
    """A count; None where it limits nothing."""
    if isinstance(value, bool) or not value >= 0 or (isinstance(value, float) and value != value // 1):
        raise ValueError(f"keyword '{key}' must be a whole number, not {_shown(value)}")
    if value <= MAX_COUNT:
        return int(value)
    if key.startswith("max"):
        return None
    raise ValueError(f"keyword '{key}' is not supported with {_shown(value)}: no answer is that long")


def _shown(value: Number) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:30]}…"
