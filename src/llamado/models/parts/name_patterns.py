"""Regular expressions of weight names, as accepted by `-ot`, for flags that name groups of weights."""

from __future__ import annotations

from llamado.models.keys import MOST_LAYERS

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Matrices of experts."""
NETWORKS = r"\.ffn_(up|down|gate)\."
"""Matrices of dense feed-forward networks and shared experts."""


def of_first_layers(weights: str, n: int) -> str:
    """Restrict a pattern to the first `n` layers."""
    return rf"^blk\.({'|'.join(map(str, range(min(n, MOST_LAYERS))))}){weights}"
