"""Layers that a device cannot run, found from a model's graph before anything is placed."""

from __future__ import annotations

from collections.abc import Callable

from llamado.devices.device import Device
from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor

ItemOf = Callable[[Tensor, Tensor], int | None]
"""Return the layer of a weight or cache (the first tensor) that an operation (the second) reads, the number of layers
for the head; None for other tensors.
"""


def lacking(graph: Graph, item_of: ItemOf, device: Device) -> dict[int, str]:
    """Return the layers with an operation that a device does not support, and the operation.

    An operation without weights belongs to the layers before and behind it: it may run on the device of either.
    """
    nodes = [node for node in graph.nodes if not node.is_noop]
    items = [_item(node, item_of) for node in nodes]
    found: dict[int, str] = {}
    before: int | None = None
    waiting: list[str] = []  # operations without weights since `before`
    for node, item in zip(nodes, items, strict=True):
        type = (node.source(0) or node).type
        problem = "" if device.supports(node.op, type) else f"{node.op.name} for {type.name}"
        if item is None:
            if problem:
                waiting.append(problem)
            continue
        for text in waiting:
            found.setdefault(item, text)
            if before is not None:
                found.setdefault(before, text)
        if problem:
            found.setdefault(item, problem)
        before, waiting = item, []
    if before is not None and waiting:
        found.setdefault(before, waiting[0])
    return found


def _item(node: Tensor, item_of: ItemOf) -> int | None:
    """Return the layer, or the head, that an operation's first weight or cache belongs to."""
    for source in node.src:
        if source is not None and (item := item_of(source.root()[0], node)) is not None:
            return item
    return None
