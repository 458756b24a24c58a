"""The shapes of teams: threads for each item of work, by its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from llamado.devices.compile.program import Operation
from llamado.devices.cuda.driver import CardProperties
from llamado.devices.cuda.kernel import Shape, ShapedOperation
from llamado.devices.cuda.lanes import GROUP
from llamado.devices.cuda.simt import WARP
from llamado.devices.cuda.teams import Team, TeamKernel
from llamado.devices.kernels import rows

_MOST_THREADS = 512
"""Threads of the largest team: in blocks of 512, a thread may have 128 registers."""
_MOST_THREADS_OF_SMALL_KERNELS = 1024
_BLOCK_THREADS = 128
"""Threads of a block of several teams."""
_MOST_TURNS = 8
"""Vectors that each group loads together."""
_PART = 1024
"""Elements of an item of work where rows can be divided."""
_MOST_SORTED = 1024
"""Longest row that is sorted by comparing each element with all others."""


def in_teams(operation: Operation, card: CardProperties, n_groups: int) -> Operation:
    """Return an operation in its form for many threads, if its kernel has one. `n_groups`: teams that scratch has room
    for.
    """
    shape = _SHAPES.get(operation.kernel.name)
    return operation if shape is None else shape(operation, card, n_groups)


def _rows(operation: Operation, card: CardProperties, n_groups: int) -> Operation:
    """Chains: a thread for eight elements, and the row in shared memory if it fits. Many rows get less threads each:
    while the first group of one adds up, others use the processor.
    """
    n, n_items = _number(operation, "n"), _items(operation)
    part = _PART if n > _PART and rows.is_divisible(operation.parameters["stages"]) else 0
    if part:
        n, n_items = part, n_items * -(-n // part)
    threads = _threads(max(WARP, -(-n // 8)) if n > WARP else 1)
    crowd = _power_of_two(-(-n_items // card.processors))
    groups = max(min(threads, _BLOCK_THREADS), threads // crowd) // GROUP
    vectors = -(-n // (8 * groups))
    rounds = max(1, -(-vectors // _MOST_TURNS))
    team = Team(groups, max(1, -(-vectors // rounds)), max(256, _power_of_two(4 * n)))
    if team.shared_bytes * _teams_of_block(team) > card.shared_bytes:
        team, n_items = team._replace(row_bytes=0), min(n_items, n_groups)
    return _operation(operation, team, n_items, part=part)


def _copy(operation: Operation, card: CardProperties, n_groups: int) -> Operation:
    """Copies of elements: a thread for each element of a row."""
    return _operation(operation, Team(_threads(_number(operation, "n0")) // GROUP), _items(operation))


def _rope_table(operation: Operation, card: CardProperties, n_groups: int) -> Operation:
    """Rotation angles: a thread for each pair."""
    team = Team(_threads(_number(operation, "n_pairs")) // GROUP)
    return _operation(operation, team, _number(operation, "n_tokens"))


def _sort(operation: Operation, card: CardProperties, n_groups: int) -> Operation:
    """Short rows: a group for each element. Longer ones are sorted by one group."""
    n = _number(operation, "n")
    if n > _MOST_SORTED:
        return operation
    team = Team(_threads(GROUP * n, _MOST_THREADS_OF_SMALL_KERNELS) // GROUP)
    return _operation(operation, team, _items(operation), by_team=True)


def _group_by_expert(operation: Operation, card: CardProperties, n_groups: int) -> Operation:
    """Routes: a group for each expert."""
    team = Team(_threads(GROUP * _number(operation, "n_experts"), _MOST_THREADS_OF_SMALL_KERNELS) // GROUP)
    return _operation(operation, team, 1, by_team=True)


def _scan_heads(operation: Operation, card: CardProperties, n_groups: int) -> Operation:
    """Scans: a group for some rows of a head. There are fewer heads than groups."""
    return replace(operation, parameters={**operation.parameters, "divided": True})


def _operation(operation: Operation, team: Team, n_items: int, **more: int) -> Operation:
    """Return an operation with a team for each of `n_items`."""
    kernel, teams = operation.kernel, _teams_of_block(team)
    shape = Shape((max(1, -(-n_items // teams)), 1), teams * team.threads, teams * team.shared_bytes)
    return ShapedOperation(
        TeamKernel(kernel.name, kernel.fields, kernel.trace),
        {**operation.parameters, **more, "team": team},
        operation.fields,
        operation.reads,
        operation.writes,
        label=operation.label,
        shape=shape,
    )


def _teams_of_block(team: Team) -> int:
    """Teams of a block: several if they are small, because a processor has room for few blocks."""
    return _BLOCK_THREADS // team.threads if team.threads <= WARP else 1


def _threads(n: int, most: int = _MOST_THREADS) -> int:
    """Threads of a team for n iterations: a group, a warp, or a power of two of warps."""
    return GROUP if n <= GROUP else max(WARP, min(most, _power_of_two(n)))


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def _items(operation: Operation) -> int:
    """Rows of an operation."""
    return prod(_number(operation, name) for name in ("n1", "n2", "n3"))


def _number(operation: Operation, name: str) -> int:
    value = operation.fields[name]
    assert isinstance(value, int)
    return value


_SHAPES: dict[str, Callable[[Operation, CardProperties, int], Operation]] = {
    "rows": _rows,
    "copy": _copy,
    "rope_table": _rope_table,
    "scan_heads": _scan_heads,
    "sort": _sort,
    "group_by_expert": _group_by_expert,
}
"""Shapes by names of kernels."""
