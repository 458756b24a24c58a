"""Find the tokens that are matched as a whole, such as `<|im_start|>`, and cut a text into tokens and plain text.

llama.cpp iterates over these tokens from the longest (in bytes) to the shortest, and each takes every place that is
still free, from left to right. The result here is the same, but with less work: a vocabulary may have six thousand of
them and a text none, so one pass over the text finds the few that occur at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from heapq import merge

from llamado.text.tokenizer.parts import PART_LENGTH
from llamado.text.tokenizer.vocabulary import Attribute, Vocabulary

_SPACE = "\t\n\v\f\r "  # isspace() of C


class Partition:
    """Cuts texts at the given tokens of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary, tokens: Iterable[int]) -> None:
        texts = {vocabulary.text(token): token for token in tokens}
        by_size = sorted(texts, key=lambda text: (-len(text.encode("utf-8", "surrogateescape")), texts[text]))
        self._rank = {text: i for i, text in enumerate(by_size)}
        self._token = texts
        self._left = {vocabulary.text(token) for token in vocabulary.with_attribute(Attribute.LSTRIP)}
        self._right = {vocabulary.text(token) for token in vocabulary.with_attribute(Attribute.RSTRIP)}
        # The first two characters (or the only one) of every token, with the lengths of the tokens that begin with
        # them.
        lengths: dict[str, set[int]] = {}
        for text in texts:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {head: sorted(sizes) for head, sizes in lengths.items()}
        self._first = re.compile("[" + re.escape("".join({head[0] for head in lengths})) + "]") if lengths else None

    def parts(self, text: str) -> Iterator[str | int]:
        """Return `text` as stretches of plain text, none empty, and token ids between them."""
        found = self._found(text)
        if not found:
            if text:
                yield text
            return
        place = 0
        for start, stop, token, left, right in found:
            if place < start - left:
                yield text[place : start - left]
            yield token
            place = stop + right
        if place < len(text):
            yield text[place:]

    def _found(self, text: str) -> list[tuple[int, int, int, int, int]]:
        """Return matches in order: start, stop, token, and the whitespace that they take to the left and right."""
        seen = self._seen(text)
        if not seen:
            return []
        found = []
        taken = bytearray(len(text))
        for token_text in sorted(seen, key=self._rank.__getitem__):
            token, n = self._token[token_text], len(token_text)
            at, last = seen[token_text]
            matches: list[tuple[int, int, int, int, int]] = []
            found.append(matches)
            while at != -1:
                stop = at + n
                busy = taken.find(1, at, stop)
                if busy != -1:
                    free = taken.find(0, busy)
                    at = text.find(token_text, free, last + n) if free != -1 else -1
                    continue
                left = _run_left(text, taken, at) if token_text in self._left else 0
                right = _run_right(text, taken, stop) if token_text in self._right else 0
                taken[at - left : stop + right] = b"\1" * (left + n + right)
                matches.append((at, stop, token, left, right))
                at = text.find(token_text, stop + right, last + n)
        return list(merge(*found))

    def _seen(self, text: str) -> dict[str, tuple[int, int]]:
        """Return the tokens that occur anywhere, overlapping or not, with their first and last position."""
        seen: dict[str, tuple[int, int]] = {}
        first = self._first
        if first is None:
            return seen
        lengths, known = self._lengths, self._rank
        places = (
            m.start() for at in range(0, len(text), PART_LENGTH) for m in first.finditer(text, at, at + PART_LENGTH)
        )
        for at in places:
            for head in (text[at : at + 2], text[at]):
                for n in lengths.get(head, ()):
                    candidate = text[at : at + n]
                    if candidate in known:
                        seen[candidate] = (seen[candidate][0] if candidate in seen else at, at)
                if len(head) == 1:
                    break  # the last character of the text: both heads are one
        return seen


def _run_left(text: str, taken: bytearray, at: int) -> int:
    start = at
    while start and text[start - 1] in _SPACE and not taken[start - 1]:
        start -= 1
    return at - start


def _run_right(text: str, taken: bytearray, at: int) -> int:
    stop = at
    while stop < len(text) and text[stop] in _SPACE and not taken[stop]:
        stop += 1
    return stop - at
