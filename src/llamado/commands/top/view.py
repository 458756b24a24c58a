"""Full-screen view of `llamado top`: redrawn at intervals and on resize; keys sort, scroll, pause and quit."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable

from prompt_toolkit.application import Application
from prompt_toolkit.data_structures import Size
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import Layout, Window
from prompt_toolkit.layout.controls import FormattedTextControl
from prompt_toolkit.output import Output
from rich.console import Group
from rich.text import Text

from llamado.commands.top.screen import Snapshot
from llamado.errors import LlamadoError
from llamado.terminal.console import Console

_KEYS = "q quit · p pause · ← → sort · r reverse · ↑ ↓ scroll"


class View:
    """Show snapshots until the user quits. `fetch` raises LlamadoError if the server cannot be reached."""

    def __init__(
        self,
        first: Snapshot,
        fetch: Callable[[], Snapshot],
        interval: float,
        *,
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        self._fetch, self._interval = fetch, interval
        self._snapshot = first
        self._error = ""  # of the last fetch
        self._paused = self._reverse = False
        self._sort = -1
        self._scroll = 0  # lines above the screen
        self._ended = threading.Event()
        self._app: Application[None] = Application(
            layout=Layout(Window(FormattedTextControl(self._text, show_cursor=False))),
            key_bindings=self._bindings(),
            full_screen=True,
            input=input,
            output=output,
        )

    def run(self) -> None:
        """Run until the user quits."""
        # A daemon, so that a server that hangs does not block the terminal.
        threading.Thread(target=self._poll, name="llamado-top", daemon=True).start()
        try:
            self._app.run()
        finally:
            self._ended.set()

    def _poll(self) -> None:
        while not self._ended.wait(self._interval):
            if self._paused:
                continue
            try:
                self._snapshot, self._error = self._fetch(), ""
            except LlamadoError as error:  # it may be temporary
                self._error = str(error)
            if not self._ended.is_set():
                self._app.invalidate()

    def _text(self) -> ANSI:
        size = self._app.output.get_size()
        lines = self._lines(size)
        height = max(1, size.rows - 1)
        self._scroll = max(0, min(self._scroll, len(lines) - height))
        visible = lines[self._scroll : self._scroll + height]
        visible += [""] * (height - len(visible))
        return ANSI("\n".join([*visible, self._footer(size)]))

    def _lines(self, size: Size) -> list[str]:
        now = self._snapshot
        shown = now.draw(now.columns[self._sort] if self._sort >= 0 else "", self._reverse)
        parts = [Text(self._error, style="red"), shown] if self._error else [shown]
        return _render(Group(*parts), size)

    def _footer(self, size: Size) -> str:
        ago = time.time() - self._snapshot.at
        state = "paused" if self._paused else f"every {self._interval:g} s"
        old = f", {ago:.0f} s old" if ago > 2 * self._interval + 1 else ""
        line = Text(f"{state}{old} · {_KEYS}", style="reverse", no_wrap=True, overflow="ellipsis")
        return _render(line, size)[0]

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("q")
        @keys.add("c-c")
        @keys.add("c-d")
        def _(event: KeyPressEvent) -> None:
            event.app.exit()

        @keys.add("p")
        @keys.add("space")
        def _(_: KeyPressEvent) -> None:
            self._paused = not self._paused

        @keys.add("right")
        def _(_: KeyPressEvent) -> None:
            self._sort = self._sort + 1 if self._sort + 1 < len(self._snapshot.columns) else -1

        @keys.add("left")
        def _(_: KeyPressEvent) -> None:
            self._sort = self._sort - 1 if self._sort >= 0 else len(self._snapshot.columns) - 1

        @keys.add("r")
        def _(_: KeyPressEvent) -> None:
            self._reverse = not self._reverse

        @keys.add("down")
        def _(_: KeyPressEvent) -> None:
            self._scroll += 1

        @keys.add("up")
        def _(_: KeyPressEvent) -> None:
            self._scroll -= 1

        return keys


def _render(what: Group | Text, size: Size) -> list[str]:
    """Return lines with color codes, as wide as the terminal."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="256", width=size.columns, highlight=False)
    console.print(what)
    return file.getvalue().rstrip("\n").split("\n")
