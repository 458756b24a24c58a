"""Byte-pair encoding by ranked merges (`tokenizer.ggml.model` gpt2): a word's pair of lowest rank merges first."""

from __future__ import annotations

from functools import lru_cache
from math import inf

from llamado.gguf.metadata import Metadata
from llamado.gguf.text_index import TextIndex
from llamado.text.errors import TokenizerError
from llamado.text.tokenizer.merging import merge
from llamado.text.tokenizer.parts import PART_LENGTH, parts_of
from llamado.text.tokenizer.pretokenizers import PreTokenizer
from llamado.text.tokenizer.vocabulary import KEY, Vocabulary

CACHED_WORDS = 1 << 15
LONGEST_CACHED = 64  # characters; keeps the cache below about 10 MiB for any texts

# GPT-2 spells each byte as a printable character: those of Latin-1 as themselves, the rest as U+0100 onwards.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_REST = [byte for byte in range(256) if byte not in _PRINTABLE]
SPELLING = "".join(chr(byte if byte in _PRINTABLE else 0x100 + _REST.index(byte)) for byte in range(256))
_BYTE = {character: byte for byte, character in enumerate(SPELLING)}


def spell_bytes(text: str) -> str:
    """Return the bytes of `text` in UTF-8, each in GPT-2's spelling."""
    if len(text) > PART_LENGTH:
        return "".join(spell_bytes(part) for part in parts_of(text))
    return text.encode().decode("latin-1").translate(SPELLING)


def unspell(text: str) -> bytes:
    """Return the bytes of a token; a character that spells no byte is shown as in llama.cpp."""
    try:
        return bytes([_BYTE[character] for character in text])
    except KeyError:
        pass
    out = bytearray()
    for character in text:
        if character in _BYTE:
            out.append(_BYTE[character])
        else:
            code = character.encode("utf-8", "surrogateescape").hex()
            out += f"[UNK_BYTE_0x{code}{text}]".encode("utf-8", "surrogateescape")
    return bytes(out)


class BytePairs:
    """Plain text → ids for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata, rule: PreTokenizer) -> None:
        merges = metadata.strings(KEY + "merges", None)
        if merges is None:
            raise TokenizerError(
                f"the file lacks {KEY}merges, which a vocabulary of this kind needs; convert the model again"
            )
        rank = TextIndex(merges, last=False).find  # the first of equal merges counts
        self._find = vocabulary.ids.find
        self._rule = rule

        def cost(left: str, right: str) -> float:
            found = rank(f"{left} {right}")  # merges are stored in this form, and no symbol has a space
            return found if found >= 0 else inf

        self._cost = cost
        self._cached = lru_cache(CACHED_WORDS)(self._word)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text."""
        out: list[int] = []
        cached = self._cached
        if not self._rule.byte_encode:
            text = text.replace(" ", "▁")
        for word in self._rule.each_word(text):
            out += cached(word) if len(word) <= LONGEST_CACHED else self._word(word)
        return out

    def _word(self, word: str) -> tuple[int, ...]:
        find = self._find
        rule = self._rule
        spelled = spell_bytes(word) if rule.byte_encode else word
        whole = rule.ignore_merges or (rule.newlines_whole and not word.strip("\n"))
        if whole and (token := find(spelled)) >= 0:
            return (token,)
        out: list[int] = []
        for symbol in merge(spelled, self._cost):
            token = find(symbol)
            if token >= 0:
                out.append(token)
            else:
                out += self._unknown(symbol)
        return tuple(out)

    def _unknown(self, symbol: str) -> list[int]:
        """Return the tokens of a symbol without a token: those of its bytes; bytes without one are dropped as in
        llama.cpp.
        """
        if self._rule.byte_encode:
            spellings = [character for character in symbol if character.isascii()]
        else:
            spellings = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        return [token for token in map(self._find, spellings) if token >= 0]
