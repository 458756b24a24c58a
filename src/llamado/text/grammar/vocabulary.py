"""A model's vocabulary in the form that llguidance needs."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llamado.numerals import whole_number
from llamado.text.grammar.guidance import GuidedTokenizer
from llamado.text.grammar.source import GrammarError
from llamado.text.tokenizer.bpe import SPELLING
from llamado.text.tokenizer.spm import SPACE
from llamado.text.tokenizer.tokenizer import Tokenizer
from llamado.text.tokenizer.vocabulary import Attribute

_MARK = b"\xff"  # llguidance's mark of a token that text never matches; no UTF-8 text contains this byte
_UNSPELL = {ord(character): byte for byte, character in enumerate(SPELLING)}
# Tokens that llguidance allows as a group if a grammar allows all such text: those of JSON's strings. Short ones are
# separate, because a string with a greatest length has room for fewer and fewer. A third pattern would cost 20 MB for
# 262,000 tokens and halve the masks of a string's last 16 characters; one for whitespace would save nothing.
_SLICES = tuple(r'[^"\\\x00-\x1F\x7F]' + count for count in ("{1,16}", "+"))
_NO_TEXT = Attribute.CONTROL | Attribute.UNKNOWN


class GuidedVocabulary:
    """A tokenizer and llguidance's form of it, which is built on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.words = (tokenizer.n_vocab + 31) // 32
        """uint32 words of a mask."""
        self._lock = threading.Lock()
        self._guided: GuidedTokenizer | None = None

    @property
    def guided(self) -> GuidedTokenizer:
        """llguidance's tokenizer. Building takes 0.1 s for 49,000 tokens and 0.7 s for 262,000; other threads run
        meanwhile.
        """
        with self._lock:
            if self._guided is None:
                self._guided = self._build()
            return self._guided

    @cached_property
    def controls(self) -> dict[str, int]:
        """Tokens that text never matches, by their texts; longest first."""
        tokenizer = self.tokenizer
        found = ((tokenizer.piece(t, special=True), t) for t in tokenizer.vocabulary.with_attribute(_NO_TEXT))
        texts = {piece.decode("utf-8", "replace"): token for piece, token in found if piece}
        return dict(sorted(texts.items(), key=lambda item: -len(item[0])))

    def named_token(self, name: str) -> int | None:
        """Return the token that GBNF writes as `<[id]>` or as its text in angle brackets; None if it is not one
        token.
        """
        if name.startswith("<[") and name.endswith("]>") and (token := whole_number(name[2:-2])) is not None:
            return token if token < self.tokenizer.n_vocab else None
        tokens = self.spell(name)
        return tokens[0] if len(tokens) == 1 else None

    def control_parts(self, text: str) -> list[str | tuple[str, int]]:
        """Cut a text at the control tokens that are spelled in it; these are returned as (text, token)."""
        parts: list[str | tuple[str, int]] = []
        for part in self._control_pattern.split(text) if self.controls else [text]:
            if part:
                parts.append((part, self.controls[part]) if part in self.controls else part)
        return parts

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(map(re.escape, self.controls)) + ")")

    def mask_of(self, tokens: Iterable[int]) -> NDArray[np.uint32]:
        """Return a mask with the bits of these tokens."""
        mask = np.zeros(self.words, np.uint32)
        for token in tokens:
            mask[token >> 5] |= np.uint32(1 << (token & 31))
        return mask

    def spell(self, text: str) -> list[int]:
        """Return tokens that make up exactly `text`, including control tokens."""
        tokens = self.tokenizer.encode(text)
        raw = text.encode("utf-8", "replace")
        pieces = [self.tokenizer.piece(token, special=True) for token in tokens]
        joined = b"".join(pieces)
        if joined == raw:
            return tokens
        if joined == b" " + raw:  # SentencePiece puts a space in front
            return self.spell_bytes(pieces[0][1:]) + tokens[1:]
        return self.spell_bytes(raw)

    def spell_bytes(self, data: bytes) -> list[int]:
        """Return tokens for bytes that may begin or end inside a character, each as long as possible; no control
        tokens.
        """
        tokens, at = [], 0
        known, longest = self._by_piece
        while at < len(data):
            for end in range(min(len(data), at + longest), at, -1):
                token = known.get(data[at:end])
                if token is not None:
                    tokens.append(token)
                    at = end
                    break
            else:
                raise GrammarError(f"the vocabulary has no token for {data[at : at + 1]!r}")
        return tokens

    @cached_property
    def _by_piece(self) -> tuple[dict[bytes, int], int]:
        """Tokens of text by their bytes, and the length of the longest."""
        single = set(self.tokenizer.vocabulary.with_attribute(Attribute.BYTE))
        known: dict[bytes, int] = {}
        for token, piece in enumerate(self.pieces()):
            if piece[:1] not in (b"", _MARK) and (token not in single or piece not in known):
                known[piece] = token
        return known, max(map(len, known), default=0)

    def pieces(self) -> list[bytes]:
        """Return the bytes of every token, marked if text must not match them."""
        tokenizer, vocabulary = self.tokenizer, self.tokenizer.vocabulary
        space = SPACE.encode()
        special = _NO_TEXT | Attribute.USER_DEFINED | Attribute.BYTE | Attribute.UNUSED
        if tokenizer.spaces_spelled:
            pieces = [raw.replace(space, b" ") for raw in vocabulary.strings.raw_list()]
            odd = vocabulary.with_attribute(special)
        else:
            pieces = []
            odd = vocabulary.with_attribute(special)
            for token, raw in enumerate(vocabulary.strings.raw_list()):
                try:
                    pieces.append(raw.decode().translate(_UNSPELL).encode("latin-1"))
                except UnicodeError:  # characters that spell no byte
                    pieces.append(b"")
                    odd.append(token)
        for token in odd:
            piece = tokenizer.piece(token, special=True)
            pieces[token] = _MARK + piece if vocabulary.has(token, _NO_TEXT) else piece
        return pieces

    def _build(self) -> GuidedTokenizer:
        ends = sorted(self.tokenizer.eog)
        if not ends:
            raise GrammarError("grammars cannot be used: the vocabulary has no end-of-answer token")
        return GuidedTokenizer(self.pieces(), ends, _SLICES)
