"""Glob patterns of paths."""

from __future__ import annotations

from llamado.patterns import MAX_LENGTH, LinearPattern, PatternError, quoted

_NOTHING = r"[^\x00-\x{10FFFF}]"


class Glob:
    """A compiled glob: `*` is any part of a name, `**` anything, `?` a character, `[a-z]` one of these, `[!a]` another.

    A pattern without a slash is matched against the last name of a path. One with a slash is matched against the whole
    path, beginning at any folder unless the pattern begins with `/`.
    """

    def __init__(self, pattern: str) -> None:
        """Raises PatternError."""
        if len(pattern) > MAX_LENGTH:
            raise PatternError(f"the glob pattern has {len(pattern)} characters; at most {MAX_LENGTH} are allowed")
        self._last_name = "/" not in pattern
        if not self._last_name and not pattern.startswith(("**/", "/")):
            pattern = "**/" + pattern
        self._any = pattern == "**"
        self._compiled = LinearPattern(_expression(pattern), dot_matches_newline=True)

    def matches(self, path: str) -> bool:
        """Return True if the pattern matches the path."""
        if self._any:
            return True
        return self._compiled.matches_all((path.rpartition("/")[2] if self._last_name else path).encode())


def _expression(pattern: str) -> str:
    parts, i = [], 0
    while i < len(pattern):
        c = pattern[i]
        if c == "*":
            end = i + 1
            while pattern[end : end + 1] == "*":
                end += 1
            parts.append(".*" if end > i + 1 else "[^/]*")
            i = end
            continue
        if c == "?":
            parts.append("[^/]")
        elif c == "[" and (found := character_class(pattern, i)):
            expression, i = found
            parts.append(expression)
        else:
            parts.append(quoted(c))
        i += 1
    return "".join(parts)


def character_class(pattern: str, start: int, negations: str = "!") -> tuple[str, int] | None:
    """Return the expression for the `[...]` that begins at `start`, and its last index; None if it is not closed."""
    first = start + 1
    negated = pattern[first : first + 1] in tuple(negations)
    end = pattern.find("]", first + negated + 1)
    if end < 0:
        return None
    chosen = pattern[first + negated : end]
    parts, i = [], 0
    while i < len(chosen):
        low = high = chosen[i]
        if chosen[i + 1 : i + 2] == "-" and i + 2 < len(chosen):
            high = chosen[i + 2]
            i += 2
        i += 1
        if low > high:
            return _NOTHING, end
        parts.append(rf"\x{{{ord(low):x}}}-\x{{{ord(high):x}}}")
    return f"[{'^/' * negated}{''.join(parts)}]", end
