"""Tokens → text while they come: a character is shown only when all of its bytes are there."""

from __future__ import annotations

import codecs

from llamado.text.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Text of one growing sequence of tokens; control tokens show only if `special`."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, which is "" in the middle of a character; bad bytes become U+FFFD."""
        return self._decoder.decode(self._tokenizer.piece(token, special=self._special))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never got complete. Starts afresh."""
        return self._decoder.decode(b"", True)
