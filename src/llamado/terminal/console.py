"""Rich output without control characters, but those that Rich itself makes."""

from __future__ import annotations

from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from llamado.terminal.text import printable


class Console(rich.console.Console):
    """Rich's console; texts cannot bring escape sequences of their own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of an object, parts of tables and panels among them."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
