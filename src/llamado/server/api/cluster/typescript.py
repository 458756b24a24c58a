"""TypeScript types of the bodies of `/cluster` and `/lab`, generated for the web page.

`python -m llamado.server.api.cluster.typescript > web/src/api/schema.ts` writes the file anew.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from llamado.engine.topology.layout import LayoutPart, LayoutPrediction
from llamado.server.api.cluster.bodies import ClusterBody
from llamado.server.api.cluster.events import ViewChange, WholeView
from llamado.server.api.cluster.lab_routes import LabBody

BODIES = (ClusterBody, WholeView, ViewChange, LayoutPart, LayoutPrediction, LabBody)
_HEADER = """\
// Bodies of /cluster and /lab. Generated from the server's records, which explain them:
// python -m llamado.server.api.cluster.typescript > web/src/api/schema.ts
"""
_NAMES = {str: "string", bool: "boolean", int: "number", float: "number", NoneType: "null", Any: "unknown"}


def typescript() -> str:
    """Return the module: an interface for each record that the bodies consist of."""
    interfaces: dict[str, str] = {}
    for body in BODIES:
        _name(body, interfaces)
    return "\n".join([_HEADER, *interfaces.values()])


def _name(annotation: Any, interfaces: dict[str, str]) -> str:
    """Return the TypeScript of a type, and add the interfaces it needs."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if is_dataclass(annotation) and isinstance(annotation, type):
        if annotation.__name__ not in interfaces:
            hints = get_type_hints(annotation)
            lines = [f"  {field.name}: {_name(hints[field.name], interfaces)};\n" for field in fields(annotation)]
            interfaces[annotation.__name__] = f"export interface {annotation.__name__} {{\n{''.join(lines)}}}\n"
        return annotation.__name__
    if origin is tuple:
        return f"{_name(arguments[0], interfaces)}[]"
    if origin is Literal:
        return " | ".join(f'"{value}"' for value in arguments)
    if origin is UnionType:
        names = dict.fromkeys(_name(argument, interfaces) for argument in arguments)  # int | float is one type here
        return " | ".join(names)
    return _NAMES[annotation]


if __name__ == "__main__":
    print(typescript(), end="")
