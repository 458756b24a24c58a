"""Patterns of weights' names, as `-ot` takes them, for what flags say of them together."""

from __future__ import annotations

from llamado.models.keys import MOST_LAYERS

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""The matrices of experts."""
NETWORKS = r"\.ffn_(up|down|gate)\."
"""The matrices of feed-forward networks that every token goes through."""


def of_first_layers(weights: str, n: int) -> str:
    """Those of the first `n` layers alone."""
    return rf"^blk\.({'|'.join(map(str, range(min(n, MOST_LAYERS))))}){weights}"
