"""A model's thoughts under a constraint: free of the grammar, and limited by a budget.

States and counting follow llama.cpp's reasoning budget (common/reasoning-budget.h): the tokens after the opening tag
are counted. When the budget is used up, or on request, a message and the closing tag are forced token by token, but not
in the middle of a character.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from llamado.text.grammar.source import ConstraintError, GrammarError
from llamado.text.grammar.vocabulary import GuidedVocabulary

Mask = NDArray[np.uint32]


class Inner(Protocol):
    """The constraint of the text after thoughts."""

    def start(self) -> InnerMatcher: ...


class InnerMatcher(Protocol):
    def mask(self) -> Mask | None: ...
    def accept(self, token: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Thoughts:
    """The tags and limits of thoughts, for one vocabulary.

    `open`: the prompt has opened them. `budget`: tokens of thought, -1 without limit. `message`: the text that is
    forced before the closing tag when thoughts are cut off. Raises GrammarError.
    """

    vocabulary: GuidedVocabulary
    start: str
    end: str
    open: bool
    budget: int
    message: str
    opening: list[int] = field(init=False)
    """The tokens of the opening tag."""
    closing: list[int] = field(init=False)
    """The forced tokens: those of the message and the closing tag."""

    def __post_init__(self) -> None:
        if not self.end or not (self.start or self.open):
            raise GrammarError("the tags around thoughts must not be empty")
        object.__setattr__(self, "opening", self.vocabulary.spell(self.start))
        object.__setattr__(self, "closing", self.vocabulary.spell(self.message + self.end))

    @cached_property
    def allowed_thoughts(self) -> Mask:
        """All tokens except those that end the answer, or that have more than blanks after the closing tag."""
        vocabulary = self.vocabulary
        mask = vocabulary.mask_of(range(vocabulary.tokenizer.n_vocab))
        mask &= ~vocabulary.mask_of(vocabulary.tokenizer.eog)
        if len(vocabulary.spell(self.end)) > 1:
            mask &= ~vocabulary.mask_of(self._past_closing_tag())
        return mask

    def _past_closing_tag(self) -> list[int]:
        """Return the tokens that contain the end of the closing tag and then text."""
        end = self.end.encode()
        tails = [end[i:] for i in range(len(end))]
        found = []
        for token, piece in enumerate(self.vocabulary.pieces()):
            if end[-1] in piece[:-1] and any(
                (piece.startswith(tail) or (tail is end and tail in piece)) and piece.rpartition(tail)[2].strip()
                for tail in tails
            ):
                found.append(token)
        return found


class ThinkingConstraint:
    """Thoughts first (or, with a lazy grammar or none, at any time), then text that the inner constraint allows."""

    def __init__(self, thoughts: Thoughts, inner: Inner | None) -> None:
        self._thoughts = thoughts
        self._inner = inner
        self._lock = threading.Lock()
        self._running: WeakSet[ThinkingMatcher] = WeakSet()

    def start(self) -> ThinkingMatcher:
        matcher = ThinkingMatcher(self._thoughts, self._inner)
        with self._lock:
            self._running.add(matcher)
        return matcher

    def end_reasoning(self) -> bool:
        with self._lock:
            running = list(self._running)
        return sum(matcher.end_reasoning() for matcher in running) > 0


class ThinkingMatcher:
    """The state of one answer.

    Under a grammar that is not lazy, thoughts come before everything else, once, and cannot end the answer.
    """

    def __init__(self, thoughts: Thoughts, inner: Inner | None) -> None:
        self._thoughts = thoughts
        self._piece = thoughts.vocabulary.tokenizer.piece
        self._inner = inner.start() if inner else None
        self._free = inner is None or getattr(inner, "lazy", False)
        self._state: Literal["before", "opening", "thinking", "closing", "after"] = "before"
        self._forced: list[int] = []
        self._text = b""  # the end of the generated text, long enough to contain a tag or an incomplete character
        self._left = 0
        self._asked_to_end = False
        if thoughts.open:
            self._think(b"")

    def mask(self) -> Mask | None:
        if self._state == "thinking" and self._asked_to_end and not _inside_character(self._text):
            self._force()
        if self._state in ("opening", "closing"):
            return self._thoughts.vocabulary.mask_of(self._forced[:1])
        if self._state == "thinking":
            return None if self._free else self._thoughts.allowed_thoughts
        mask = self._inner.mask() if self._inner else None
        if self._state == "before" and not self._free and mask is not None and self._thoughts.start:
            return mask | self._thoughts.vocabulary.mask_of(self._thoughts.opening[:1])
        return mask

    def accept(self, token: int) -> None:
        if self._state in ("opening", "closing"):
            self._accept_forced(token)
        elif self._state == "thinking":
            self._accept_thought(token)
        elif self._free:
            self._accept_free(token)
        elif self._state == "before" and self._opens(token):
            self._forced = self._thoughts.opening[1:]
            if self._forced:
                self._state = "opening"
            else:
                self._think(b"")
        else:
            self._state = "after"
            if self._inner:
                self._inner.accept(token)

    def end_reasoning(self) -> bool:
        """Close the thoughts at the next token; False if the answer is not thinking."""
        if self._state != "thinking":
            return False
        self._asked_to_end = True
        return True

    def _opens(self, token: int) -> bool:
        """Return True if a token begins the opening tag rather than text of the inner constraint."""
        if not self._thoughts.start or token != self._thoughts.opening[0]:
            return False
        mask = self._inner.mask() if self._inner else None
        return mask is not None and not mask[token >> 5] >> (token & 31) & 1

    def _accept_free(self, token: int) -> None:
        if self._inner:
            self._inner.accept(token)
            if getattr(self._inner, "has_begun", False):
                return  # a tag here is text of a tool call
        start = self._thoughts.start.encode()
        if not start:
            return
        text = self._text + self._piece(token, special=True)
        at = text.rfind(start)
        if at >= 0:
            self._think(text[at + len(start) :])
        else:
            self._text = text[-len(start) :]

    def _think(self, text: bytes) -> None:
        self._state = "thinking"
        self._text = text
        self._left = self._thoughts.budget
        self._asked_to_end = False
        if self._left == 0:
            self._force()

    def _force(self) -> None:
        self._state = "closing"
        self._text = b""
        self._forced = list(self._thoughts.closing)

    def _accept_thought(self, token: int) -> None:
        end = self._thoughts.end.encode()
        text = self._text + self._piece(token, special=True)
        at = text.find(end)
        if at >= 0:
            self._close(token)
            if not self._free and text[at + len(end) :].strip():
                raise ConstraintError(f"the token that closes the thoughts contains text of the answer ({text!r})")
            return
        self._text = text[-max(len(end), 4) :]
        if self._left >= 0:
            self._left = max(0, self._left - 1)
            if self._left == 0 and not _inside_character(text):
                self._force()

    def _accept_forced(self, token: int) -> None:
        if token != self._forced[0]:
            raise ConstraintError(f"token {token} instead of the forced token {self._forced[0]}")
        del self._forced[0]
        if self._forced:
            return
        if self._state == "closing":
            self._close(token)
        else:
            self._think(b"")

    def _close(self, token: int) -> None:
        self._state = "after"
        self._text = b""
        if self._free and self._inner:
            self._inner.accept(token)  # a lazy grammar may look back at the tag


def _inside_character(text: bytes) -> bool:
    """Return True if the text ends with an incomplete UTF-8 character."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 != 0x80:
            return byte >= 0xC0 and back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
