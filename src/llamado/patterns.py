"""Regular expressions from clients and models: matched by RE2, in time linear in the text.

Every pattern from a request or a model file is compiled here. A backtracking engine (`re`, `regex`) must not run such a
pattern: `(a+)+$` takes exponential time there, and memory grows with repeat counts.
"""

from __future__ import annotations

import re

import re2

from llamado.errors import LlamadoError

MAX_LENGTH = 4_000
"""Maximum bytes of a pattern."""
MAX_SIZE = 10_000
"""Maximum instructions of a compiled pattern. A search takes at most about 10 ns per instruction and byte of text."""
_MEMORY_BYTES = 1 << 20  # of a compiled pattern, including the states that a search caches
# RE2 refuses more than 1,000 repeats, but reads a count of nine digits as literal text.
_HUGE_COUNT = re.compile(rb"\{\d*,?\d{9}")
_UNICODE_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)


class PatternError(LlamadoError):
    """A pattern that cannot be compiled, or is too large."""


class LinearPattern:
    """A compiled pattern in RE2's syntax: Perl's without look-around and back-references, and with `\\uXXXX`."""

    def __init__(
        self, source: str, *, literal: bool = False, ignore_case: bool = False, dot_matches_newline: bool = False
    ) -> None:
        """Compile a pattern. Raises PatternError. `literal`: `source` is a text to find, not a pattern."""
        text = source.encode("utf-8", "replace")
        if len(text) > MAX_LENGTH:
            raise PatternError(f"the pattern has {len(text)} bytes; at most {MAX_LENGTH} are allowed")
        if not literal:
            if _HUGE_COUNT.search(text):
                raise PatternError("the pattern repeats too often: repeat counts are limited to 1000")
            text = _UNICODE_ESCAPE.sub(_hexadecimal, text)
        options = re2.Options()
        options.max_mem, options.log_errors = _MEMORY_BYTES, False
        options.literal, options.case_sensitive, options.dot_nl = literal, not ignore_case, dot_matches_newline
        try:
            self._compiled = re2.compile(text, options)
        except re2.error as error:
            raise PatternError(_reason(error)) from None
        finally:
            re2.purge()  # its cache would keep the patterns of other requests in memory
        self.size: int = self._compiled.programsize
        """Number of instructions."""
        if self.size > MAX_SIZE:
            raise PatternError(f"the pattern is too large: {self.size} instructions of at most {MAX_SIZE}")

    def matches(self, text: bytes) -> bool:
        """Return True if the pattern matches somewhere in the text."""
        return self._compiled.search(text) is not None

    def matches_all(self, text: bytes) -> bool:
        """Return True if the pattern matches the whole text."""
        return self._compiled.fullmatch(text) is not None

    def spans(self, text: bytes) -> list[tuple[int, int]]:
        """Return the spans of the first match and its groups; (-1, -1) for an unmatched group, [] for no match."""
        found = self._compiled.search(text)
        return [] if found is None else [found.span(i) for i in range(self._compiled.groups + 1)]


def quoted(text: str) -> str:
    """Return a pattern that matches exactly this text."""
    return str(re2.escape(text))


def _hexadecimal(match: re.Match[bytes]) -> bytes:
    return b"\\x{%b}" % match[1] if match[1] else match[0]


def _reason(error: Exception) -> str:
    (reason,) = error.args
    text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
    if text.startswith(("invalid perl operator", "invalid escape sequence")):
        text += " (look-around and back-references are not supported)"
    return text[:300]
