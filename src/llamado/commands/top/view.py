"""The full screen of `llamado top`: drawn anew at times and when the terminal's size changes; keys sort and stop it."""

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

from llamado.commands.top.screen import Look
from llamado.errors import LlamadoError
from llamado.terminal.console import Console

_KEYS = "q leaves · p pauses · ← → sort · r turns the order · ↑ ↓ scroll"


class View:
    """Shows looks at a server until the user leaves. `look` raises LlamadoError where it cannot be asked."""

    def __init__(
        self,
        first: Look,
        look: Callable[[], Look],
        interval: float,
        *,
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        self._look, self._interval = look, interval
        self._shown = first
        self._why = ""  # it cannot be asked now
        self._paused = self._reverse = False
        self._sort = -1
        self._above = 0  # lines that are scrolled away
        self._ended = threading.Event()
        self._app: Application[None] = Application(
            layout=Layout(Window(FormattedTextControl(self._text, show_cursor=False))),
            key_bindings=self._bindings(),
            full_screen=True,
            input=input,
            output=output,
        )

    def run(self) -> None:
        """Until the user leaves."""
        # Not waited for at the end: a server that hangs must not hold the terminal.
        threading.Thread(target=self._ask, name="llamado-top", daemon=True).start()
        try:
            self._app.run()
        finally:
            self._ended.set()

    def _ask(self) -> None:
        while not self._ended.wait(self._interval):
            if self._paused:
                continue
            try:
                self._shown, self._why = self._look(), ""
            except LlamadoError as error:  # it may come back
                self._why = str(error)
            if not self._ended.is_set():
                self._app.invalidate()

    def _text(self) -> ANSI:
        size = self._app.output.get_size()
        lines = self._lines(size)
        room = max(1, size.rows - 1)
        self._above = max(0, min(self._above, len(lines) - room))
        seen = lines[self._above : self._above + room]
        seen += [""] * (room - len(seen))
        return ANSI("\n".join([*seen, self._footer(size)]))

    def _lines(self, size: Size) -> list[str]:
        look = self._shown
        shown = look.draw(look.columns[self._sort] if self._sort >= 0 else "", self._reverse)
        parts = [Text(self._why, style="red"), shown] if self._why else [shown]
        return _drawn(Group(*parts), size)

    def _footer(self, size: Size) -> str:
        ago = time.time() - self._shown.at
        state = "paused" if self._paused else f"every {self._interval:g} s"
        old = f", {ago:.0f} s old" if ago > 2 * self._interval + 1 else ""
        line = Text(f"{state}{old} · {_KEYS}", style="reverse", no_wrap=True, overflow="ellipsis")
        return _drawn(line, size)[0]

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
            self._sort = self._sort + 1 if self._sort + 1 < len(self._shown.columns) else -1

        @keys.add("left")
        def _(_: KeyPressEvent) -> None:
            self._sort = self._sort - 1 if self._sort >= 0 else len(self._shown.columns) - 1

        @keys.add("r")
        def _(_: KeyPressEvent) -> None:
            self._reverse = not self._reverse

        @keys.add("down")
        def _(_: KeyPressEvent) -> None:
            self._above += 1

        @keys.add("up")
        def _(_: KeyPressEvent) -> None:
            self._above -= 1

        return keys


def _drawn(what: Group | Text, size: Size) -> list[str]:
    """Lines with colors, as wide as the terminal."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="256", width=size.columns, highlight=False)
    console.print(what)
    return file.getvalue().rstrip("\n").split("\n")
