"""llguidance through its C functions (`parser/llguidance.h` in its sources), which let other threads run meanwhile.

Its Python package holds the interpreter's lock while it builds a tokenizer: one second for a vocabulary of 262,000.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.text.grammar.source import GrammarError

_MESSAGE = 500  # bytes of an error message


class ParserLimits(NamedTuple):
    """Limits of compiling and of each step, in llguidance's units ("fuel": about 20,000 per millisecond)."""

    max_items_in_row: int
    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int


# With these, compiling takes less than half a second, and a mask less than 50 ms.
LIMITS = ParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=400_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
)


class _TokenizerInit(ctypes.Structure):
    """`LlgTokenizerInitV2`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_void_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", ctypes.c_void_p),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class _ParserLimits(ctypes.Structure):
    """`LlgParserLimits`."""

    _fields_ = (
        ("max_items_in_row", ctypes.c_size_t),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", ctypes.c_size_t),
        ("max_lexer_states", ctypes.c_size_t),
        ("max_grammar_size", ctypes.c_size_t),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
    )


class _ConstraintInit(ctypes.Structure):
    """`LlgConstraintInit`, followed by bytes that must stay unwritten."""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", _ParserLimits),
        ("behind", ctypes.c_uint8 * 64),
    )


class _Library(NamedTuple):
    """The functions: `long` ones run without the interpreter's lock, `short` ones are too short to release it."""

    long: Any
    short: Any


@cache
def _library() -> _Library:
    """Load llguidance. Raises GrammarError if its structures differ from those declared here."""
    from llguidance import _lib

    path = _lib.__file__
    long, short = ctypes.CDLL(path), ctypes.PyDLL(path)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for library, name, result, arguments in (
        (long, "llg_new_tokenizer_v2", pointer, [pointer, ctypes.c_char_p, size]),
        (long, "llg_free_tokenizer", None, [pointer]),
        (long, "llg_new_matcher", pointer, [pointer, ctypes.c_char_p, ctypes.c_char_p]),
        (long, "llg_clone_matcher", pointer, [pointer]),
        (long, "llg_matcher_compute_mask_into", ctypes.c_int32, [pointer, pointer, size]),
        (long, "llg_free_matcher", None, [pointer]),
        (short, "llg_matcher_consume_token", ctypes.c_int32, [pointer, ctypes.c_uint32]),
        (short, "llg_matcher_consume_tokens", ctypes.c_int32, [pointer, pointer, size]),
        (short, "llg_matcher_validate_tokens", ctypes.c_int32, [pointer, pointer, size]),
        (short, "llg_matcher_is_stopped", ctypes.c_bool, [pointer]),
        (short, "llg_matcher_is_error", ctypes.c_bool, [pointer]),
        (short, "llg_matcher_get_error", ctypes.c_char_p, [pointer]),
        (short, "llg_constraint_init_set_defaults", None, [pointer, pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    init = _ConstraintInit()
    short.llg_constraint_init_set_defaults(ctypes.byref(init), 1)
    if not _has_expected_layout(init):
        raise GrammarError("grammars cannot be used: this version of llguidance is not supported; install another one")
    return _Library(long, short)


def _has_expected_layout(init: _ConstraintInit) -> bool:
    """Return True if llguidance wrote its defaults to the declared fields: limits of thousands, and two switches."""
    limits = init.limits
    counts = all(getattr(limits, name) >= 1000 for name in ParserLimits._fields)
    switches = limits.verbose_errors and limits.precompute_large_lexemes
    return init.tokenizer == 1 and counts and switches and not any(init.behind)


class GuidedTokenizer:
    """llguidance's form of a vocabulary."""

    def __init__(self, pieces: Sequence[bytes], ends: Sequence[int], slices: Sequence[str]) -> None:
        """`pieces`: the bytes of every token; `ends`: tokens that end an answer, at least one; `slices`: patterns of
        tokens that are allowed as a group if a grammar allows all such text. Raises GrammarError.
        """
        library = _library().long
        text = b"".join(pieces)
        lengths = np.fromiter(map(len, pieces), np.uint32, len(pieces))
        more = np.array(ends[1:], np.uint32)
        patterns = (ctypes.c_char_p * (len(slices) + 1))(*(pattern.encode() for pattern in slices), None)
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=len(pieces),
            tok_eos=ends[0],
            token_lens=lengths.ctypes.data,
            token_bytes=ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value,
            use_approximate_greedy_tokenize_fn=True,
            slices=ctypes.addressof(patterns),
            tok_eos_extra=more.ctypes.data,
            tok_eos_extra_count=len(more),
        )
        message = ctypes.create_string_buffer(_MESSAGE)
        self.pointer: int | None = library.llg_new_tokenizer_v2(ctypes.byref(init), message, _MESSAGE)
        if not self.pointer:
            raise GrammarError(f"grammars cannot be used: {message.value.decode('utf-8', 'replace')}")
        self.ends = frozenset(ends)
        weakref.finalize(self, library.llg_free_tokenizer, self.pointer).atexit = False


@cache
def bytes_tokenizer() -> GuidedTokenizer:
    """Return a vocabulary of the 256 bytes and an end of answers: for properties of grammars that hold in every
    vocabulary.
    """
    return GuidedTokenizer([bytes([byte]) for byte in range(256)] + [b"\xff<end>"], [256], ())


class GuidedMatcher:
    """A grammar and the position of an answer in it. For one thread at a time; several threads may copy it."""

    def __init__(self, tokenizer: GuidedTokenizer, pointer: int, source: tuple[str, ParserLimits]) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._pointer = pointer
        self._short = _library().short
        weakref.finalize(self, _library().long.llg_free_matcher, pointer).atexit = False

    @classmethod
    def of(cls, tokenizer: GuidedTokenizer, grammar: str, limits: ParserLimits) -> GuidedMatcher:
        """Compile a grammar in llguidance's Lark dialect, or a list of such grammars as JSON; see `error`."""
        if "\0" in grammar:
            raise GrammarError("the grammar cannot be used: it has a character of code 0, which no text may have")
        init = _ConstraintInit(
            tokenizer=tokenizer.pointer,
            limits=_ParserLimits(*limits, precompute_large_lexemes=True, verbose_errors=False),
        )
        text = grammar.encode("utf-8", "replace")
        pointer = _library().long.llg_new_matcher(ctypes.byref(init), b"llguidance", text)
        return cls(tokenizer, pointer, (grammar, limits))

    def copy(self) -> GuidedMatcher:
        """Return a copy in the same state; copies share the lexer, which grows with each copy's answer."""
        return GuidedMatcher(self._tokenizer, _library().long.llg_clone_matcher(self._pointer), self._source)

    def recompiled(self) -> GuidedMatcher:
        """Return a matcher at the beginning of the same grammar, with a new lexer."""
        return GuidedMatcher.of(self._tokenizer, *self._source)

    @property
    def error(self) -> str:
        """The reason of a failure; "" without one. A matcher that failed does nothing any more."""
        if not self._short.llg_matcher_is_error(self._pointer):
            return ""
        reason: bytes | None = self._short.llg_matcher_get_error(self._pointer)
        return (reason or b"").decode("utf-8", "replace").strip() or "llguidance gives no reason"

    def mask(self, into: NDArray[np.uint32]) -> None:
        """Write the tokens that are allowed next: bit `i % 32` of word `i // 32`. Runs without the
        interpreter's lock.
        """
        _library().long.llg_matcher_compute_mask_into(self._pointer, into.ctypes.data, into.nbytes)

    def accept(self, token: int) -> bool:
        """Advance by a token; False, and failed, if the grammar does not allow it."""
        if self._short.llg_matcher_is_stopped(self._pointer) and token in self._tokenizer.ends:
            return True
        return bool(self._short.llg_matcher_consume_token(self._pointer, token) == 0)

    def accept_all(self, tokens: Sequence[int]) -> bool:
        """Advance by all of these tokens, or by none."""
        array = np.array(tokens, np.uint32)
        given = array.ctypes.data, len(array)
        if self._short.llg_matcher_validate_tokens(self._pointer, *given) < len(array):
            return False
        return bool(self._short.llg_matcher_consume_tokens(self._pointer, *given) == 0)
