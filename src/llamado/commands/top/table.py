"""Tables of `llamado top` that omit columns on a narrow terminal instead of truncating all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

WRAPPED_WIDTH = 16
"""Minimum terminal columns of a column whose text is wrapped."""


class FittingTable:
    """A table of as many columns as fit.

    `optional`: names of columns to omit, in this order. `make`: returns the table of the columns with these names;
    its second argument is the width of columns whose text is wrapped, None: as wide as possible.
    """

    def __init__(
        self, names: Sequence[str], optional: Sequence[str], make: Callable[[Sequence[str], int | None], Table]
    ) -> None:
        self.names, self._optional, self.make = names, optional, make

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, unlimited = [*self.names], options.update(max_width=10_000)
        for name in self._optional:
            if self.make(names, WRAPPED_WIDTH).__rich_measure__(console, unlimited).maximum <= options.max_width:
                break
            names = [one for one in names if one != name]
        yield self.make(names, None)


def add_column(table: Table, name: str, *, number: bool, wraps: bool = False, width: int | None = None) -> None:
    """Add a column. `wraps`: its text is wrapped, to `width` columns; None: as wide as possible."""
    width = width if wraps else None
    table.add_column(
        name,
        justify="right" if number else "left",
        no_wrap=not wraps,
        overflow="fold" if wraps else "ellipsis",
        min_width=width,
        max_width=width,
    )
