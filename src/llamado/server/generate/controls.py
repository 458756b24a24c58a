"""Answers that their clients may steer while they are made."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from llamado.server.generate.streaming import Generation

if TYPE_CHECKING:
    from llamado.text.grammar.compiler import Constraint


class Controls:
    """The running chat completions by id; event loop only."""

    def __init__(self) -> None:
        self._generations: weakref.WeakValueDictionary[str, Generation] = weakref.WeakValueDictionary()
        self._constraints: weakref.WeakKeyDictionary[Generation, Constraint | None] = weakref.WeakKeyDictionary()

    def note(self, id: str, generation: Generation, constraint: Constraint | None) -> None:
        """Remember a completion for as long as it lives; `constraint`: what ends its thoughts, where that is wanted."""
        self._generations[id] = generation
        self._constraints[generation] = constraint

    def end_reasoning(self, id: str) -> str:
        """End the thoughts of a completion; returns why not, "" where it is done."""
        generation = self._generations.get(id)
        if generation is None or not generation.running:
            return "no active completion for this id"
        constraint = self._constraints.get(generation)
        if constraint is None:
            return "reasoning control not enabled for this completion"
        return "" if constraint.end_reasoning() else "the model is not thinking"
