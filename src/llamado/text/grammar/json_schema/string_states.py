"""Strings whose automata grow without bounds: found when a schema is compiled, not in the middle of an answer.

A pattern together with other patterns or with lengths is a product of automata. llguidance makes their states as an
answer needs them and looks for each whether it can still end well, which its limits may not allow.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from llamado.text.grammar.deep_stack import with_deep_stack
from llamado.text.grammar.guidance import LIMITS, GuidedMatcher, bytes_tokenizer

# As for answers, with less fuel: a vocabulary's tokens reach further in one step than bytes do.
_LIMITS = LIMITS._replace(step_lexer_fuel=150_000)
_STEPS = 24  # bytes of a probe: states are largest at the beginning, when most of the length is left
_KEPT = 512
_FIRST = b"a 0A-b.1\\n:/@_"  # bytes to go on with, in turns


def has_too_many_states(string: Mapping[str, Any]) -> bool:
    """Return True if a string schema of patterns and lengths may exceed the limits while it generates."""
    return _probed(json.dumps({"type": "string", **string}))


@functools.lru_cache(maxsize=_KEPT)
def _probed(schema: str) -> bool:
    return with_deep_stack(lambda: _fails(f'%llguidance {{"no_forcing": true}}\nstart: %json {schema}\n'))


def _fails(grammar: str) -> bool:
    matcher = GuidedMatcher.of(bytes_tokenizer(), grammar, _LIMITS)
    mask = np.zeros(9, np.uint32)
    for step in range(_STEPS):
        matcher.mask(mask)
        if matcher.error:
            return step > 0  # compilation reports a grammar that cannot begin
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:256]
        turned = _FIRST[step % len(_FIRST) :] + _FIRST[: step % len(_FIRST)]
        token = next((byte for byte in turned if allowed[byte]), None)
        if token is None:
            found = np.flatnonzero(allowed)
            if not len(found):
                return False
            token = int(found[0])
        matcher.accept(token)
    return False
