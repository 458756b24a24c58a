"""The text of one answer: decodes the bytes of tokens to complete characters, and cuts at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class AnswerText:
    """Assembles the text of one answer.

    Stop strings are found anywhere: inside a token, across tokens, across the bytes of a character. The text ends
    before the stop string that begins first (if several begin together, the one listed first), as in llama-server. Text
    that may still become a stop string is held back.
    """

    def __init__(self, stop: Sequence[str] = (), n_indent: int = 0) -> None:
        self._stop = tuple(word for word in stop if word)
        self._n_indent = n_indent
        self._indent: int | None = None
        """Indentation seen in the current line; None if it is irrelevant now."""
        # invalid UTF-8 becomes U+FFFD at once, an incomplete character waits
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._whole = True
        """True if no character is incomplete."""
        self._held = ""
        self._parts: list[str] = []
        self.length = 0
        """Characters so far, including held ones."""
        self.stopping_word = ""
        self.outdented = False
        """A line began with fewer than `n_indent` blanks; the text ends before its first other character."""
        self.has_new_line = False

    @property
    def content(self) -> str:
        """All text released so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, piece: bytes) -> str:
        """Add the next token's bytes; return the text that is certain now. Sets `stopping_word` at a stop string."""
        if self._whole and piece.isascii():
            text = piece.decode("ascii")
        else:
            text = self._decoder.decode(piece)
            self._whole = not self._decoder.getstate()[0]
        if not text and not self._held:
            return ""
        self.length += len(text)
        held = self._held + text
        if not self._stop:
            return self._release(held)
        found = -1
        for word in self._stop:
            at = held.find(word, max(0, len(self._held) - len(word) + 1))
            if at >= 0 and (found < 0 or at < found):
                found, self.stopping_word = at, word
        if found >= 0:
            self._held = ""
            self._decoder.reset()
            self._whole = True
            return self._release(held[:found])
        n_open = max(_open_match(held, word) for word in self._stop)
        self._held = held[len(held) - n_open :]
        return self._release(held[: len(held) - n_open])

    def finish(self) -> str:
        """End the answer: return the held text, with an incomplete character as U+FFFD."""
        text = self._held + ("" if self.stopping_word else self._decoder.decode(b"", True))
        self._held = ""
        return self._release(text)

    def _release(self, text: str) -> str:
        if not text or self.outdented:
            return ""
        if self._n_indent:
            text = self._check_indent(text)
        if "\n" in text:
            self.has_new_line = True
        self._parts.append(text)
        return text

    def _check_indent(self, text: str) -> str:
        for i, char in enumerate(text):
            if self._indent is not None:
                if char in " \t":
                    self._indent += 1
                elif self._indent < self._n_indent:
                    self.outdented = True
                    return text[:i]
                else:
                    self._indent = None
            if char == "\n":
                self._indent = 0
        return text


def _open_match(text: str, word: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `word`."""
    for n in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:n]):
            return n
    return 0
