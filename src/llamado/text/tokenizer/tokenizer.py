"""Convert text to tokens and back like llama.cpp, with the vocabulary of a model file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.metadata import Metadata
from llamado.text.errors import TokenizerError
from llamado.text.tokenizer.bpe import BytePairs, unspell
from llamado.text.tokenizer.partition import Partition
from llamado.text.tokenizer.plamo import ScoredPieces
from llamado.text.tokenizer.pretokenizers import PreTokenizer, pre_tokenizer
from llamado.text.tokenizer.rwkv import LongestBytes
from llamado.text.tokenizer.spm import SPACE, ScoredPairs
from llamado.text.tokenizer.unigram import Unigram
from llamado.text.tokenizer.vocabulary import KEY, Attribute, SpecialIds, Vocabulary
from llamado.text.tokenizer.wpm import WordPieces

__all__ = ["Tokenizer", "TokenizerError", "load_tokenizer"]


class _Model(Protocol):
    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, without special tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenizerRules:
    """Special tokens and spaces that a tokenizer adds and removes."""

    add_bos: bool
    add_eos: bool
    add_sep: bool
    add_space_prefix: bool
    """True if decoding removes a space at the beginning."""
    encodes_prefix: bool = False
    """True if encoding adds it, as SentencePiece does."""
    clean_spaces: bool = False
    spaces_spelled: bool = True
    """True if tokens write a space as ▁; otherwise every byte is spelled as in GPT-2."""


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads.

    `bos`, `eos`, `eot`, `eom`, `unk`, `sep`, `pad`, `mask` and `fim_*` are ids or None; `eog` contains every id that
    ends a generation; `add_bos`, `add_eos` and `add_sep`: tokens are added around a text, or between two that are
    ranked.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        model: _Model,
        rules: TokenizerRules,
    ) -> None:
        self.vocabulary = vocabulary
        self.n_vocab = vocabulary.n_vocab
        self.eog = vocabulary.eog
        self.add_bos = rules.add_bos
        self.add_eos = rules.add_eos
        self.add_sep = rules.add_sep
        self.add_space_prefix = rules.add_space_prefix
        self.clean_spaces = rules.clean_spaces
        self.spaces_spelled = rules.spaces_spelled
        self._encodes_prefix = rules.encodes_prefix
        self._model = model
        self._pieces: dict[int, bytes] = {}
        self._found: dict[str, int | None] = {}
        special = vocabulary.special
        self.bos = special.bos
        self.eos = special.eos
        self.eot = special.eot
        self.eom = special.eom
        self.unk = special.unk
        self.sep = special.sep
        self.pad = special.pad
        self.mask = special.mask
        self.fim_pre = special.fim_pre
        self.fim_suf = special.fim_suf
        self.fim_mid = special.fim_mid
        self.fim_pad = special.fim_pad
        self.fim_rep = special.fim_rep
        self.fim_sep = special.fim_sep

    @cached_property
    def newline(self) -> int | None:
        """The token of a line feed."""
        tokens = self._model.encode("\n")
        return tokens[0] if tokens else self.pad

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Return the ids of `text`; with `add_special` also the tokens that the model needs at its ends.

        Without `parse_special`, control tokens in the text are plain text; user-defined tokens still match. A lone
        surrogate counts as U+FFFD.
        """
        begin, end = self._ends if add_special else (None, None)
        out = [] if begin is None else [begin]
        after_special = True
        for part in (self._with_special if parse_special else self._without_special).parts(_valid(text)):
            if isinstance(part, int):
                out.append(part)
                after_special = True
            else:
                out += self._model.encode(" " + part if self._encodes_prefix and after_special else part)
                after_special = False
        if end is not None:
            out.append(end)
        return out

    @cached_property
    def _ends(self) -> tuple[int | None, int | None]:
        """The tokens that `add_special` puts around a text."""
        if isinstance(self._model, WordPieces):
            return self.bos, self.sep  # regardless of the file, as in llama.cpp
        return self.bos if self.add_bos else None, self.eos if self.add_eos else None

    @cached_property
    def _hidden(self) -> frozenset[int]:
        return frozenset(self.vocabulary.with_attribute(Attribute.CONTROL | Attribute.UNKNOWN))

    @cached_property
    def longest(self) -> int:
        """The most characters of a text in one token; 0 if characters may vanish."""
        vocabulary = self.vocabulary
        loose = isinstance(self._model, (WordPieces, Unigram)) or vocabulary.with_attribute(
            Attribute.LSTRIP | Attribute.RSTRIP
        )
        return 0 if loose else int(np.diff(vocabulary.strings.offsets).max())

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token, which may be part of a character; control tokens are empty unless `special`.

        Raises IndexError for an id outside the vocabulary.
        """
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token {token} is not in the vocabulary of {self.n_vocab}")
        if not special and token in self._hidden:
            return b""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token)
        return piece

    def find(self, text: str) -> int | None:
        """Return the first token whose piece is `text`, also a control token; None if the vocabulary has none."""
        if text not in self._found:
            data = text.encode()
            self._found[text] = next((token for token in self._candidates(data) if self._piece(token) == data), None)
        return self._found[text]

    def _candidates(self, piece: bytes) -> Iterable[int]:
        """Return all tokens that may have a piece, ascending: by the lengths of the vocabulary's spellings."""
        if isinstance(self._model, (LongestBytes, ScoredPieces)):
            return range(self.n_vocab)
        lengths = np.diff(self.vocabulary.strings.offsets)
        # A byte is spelled with one to three, as in "▁", or as a byte token with six.
        fits = (lengths >= len(piece)) & (lengths <= 3 * len(piece))
        fits |= self.vocabulary.attributes & Attribute.BYTE != 0
        found: list[int] = np.flatnonzero(fits).tolist()
        return found

    def join(self, tokens: Iterable[int], *, special: bool = True) -> bytes:
        """Return the joined pieces, like llama-server's /detokenize."""
        return b"".join(map(partial(self.piece, special=special), tokens))

    def decode(self, tokens: Iterable[int], *, special: bool = False, remove_special: bool = False) -> str:
        """Return the text of whole tokens, like `llama_detokenize`; bytes that are not UTF-8 become U+FFFD.

        Removes the space that encoding put in front, and the spaces before punctuation if the vocabulary requires that;
        with `remove_special` also the tokens that `add_special` puts at the ends.
        """
        ids = list(tokens)
        strip = self.add_space_prefix
        if remove_special and self.add_bos and ids and ids[0] == self.bos:
            del ids[0]
            strip = False
        if remove_special and self.add_eos and ids and ids[-1] == self.eos:
            del ids[-1]
        text = self.join(ids[:1], special=special)
        if strip:
            text = text.removeprefix(b" ")
        text += self.join(ids[1:], special=special)
        if self.clean_spaces:
            text = _clean(text)
        return text.decode("utf-8", "replace")

    @cached_property
    def control(self) -> NDArray[np.int32]:
        """All control tokens, ascending."""
        return np.flatnonzero(self.vocabulary.attributes & Attribute.CONTROL).astype(np.int32)

    def text(self, token: int) -> str:
        """Return the token in the vocabulary's spelling."""
        return self.vocabulary.text(token)

    def _piece(self, token: int) -> bytes:
        vocabulary = self.vocabulary
        if isinstance(self._model, (LongestBytes, ScoredPieces)):
            return self._model.spelled(token)
        raw = vocabulary.strings.raw(token) or vocabulary.text(token).encode()
        if vocabulary.has(token, Attribute.CONTROL | Attribute.UNKNOWN | Attribute.USER_DEFINED):
            return raw
        if vocabulary.has(token, Attribute.NORMAL):
            if self.spaces_spelled:
                return raw.replace(SPACE.encode(), b" ")
            return unspell(raw.decode("utf-8", "surrogateescape"))
        if vocabulary.has(token, Attribute.BYTE):
            try:
                return bytes([int(raw[3:5], 16)])  # <0xXX>
            except ValueError:
                return b"\0"
        return b""  # unused tokens

    @cached_property
    def _with_special(self) -> Partition:
        return Partition(self.vocabulary, self.vocabulary.specials.tolist())

    @cached_property
    def _without_special(self) -> Partition:
        tokens = self.vocabulary.specials
        plain = self.vocabulary.attributes[tokens] & (Attribute.CONTROL | Attribute.UNKNOWN) == 0
        return Partition(self.vocabulary, tokens[plain].tolist())


def load_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return the tokenizer described by `tokenizer.ggml.*`.

    Raises `TokenizerError` for an unsupported kind or pre-tokenizer rule, `GgufError` for missing keys.
    """
    kind = metadata.str_(KEY + "model")
    if kind not in _KINDS:
        raise TokenizerError(
            f"vocabularies of kind '{kind}' ({KEY}model) are not supported; supported: {', '.join(sorted(_KINDS))}"
        )
    tokenizer = _KINDS[kind](metadata)
    tokenizer.encode("ab")  # builds the tables of the first text now, not during a request
    return tokenizer


def _load_gpt2(metadata: Metadata) -> Tokenizer:
    # llama.cpp's default ids of these kinds
    return _load_bpe(metadata, metadata.str_(KEY + "pre", ""), SpecialIds(bos=11, eos=11))


def _load_gemma4(metadata: Metadata) -> Tokenizer:
    return _load_bpe(metadata, "gemma4", SpecialIds())


def _load_bpe(metadata: Metadata, pre: str, defaults: SpecialIds) -> Tokenizer:
    rule = pre_tokenizer(pre)
    if rule.no_bos:
        defaults = replace(defaults, bos=None)
    vocabulary = Vocabulary(metadata, defaults)
    return _tokenizer(metadata, vocabulary, BytePairs(vocabulary, metadata, rule), rule)


def _load_spm(metadata: Metadata) -> Tokenizer:
    vocabulary = Vocabulary(metadata, SpecialIds(bos=1, eos=2, unk=0))
    return _tokenizer(metadata, vocabulary, ScoredPairs(vocabulary, metadata), None)


def _load_wpm(metadata: Metadata) -> Tokenizer:
    vocabulary = Vocabulary(metadata, SpecialIds(bos=101, unk=100, sep=102, pad=0, mask=103))
    return Tokenizer(
        vocabulary,
        WordPieces(vocabulary, metadata),
        TokenizerRules(
            add_bos=metadata.bool_(KEY + "add_bos_token", True),
            add_eos=metadata.bool_(KEY + "add_eos_token", False),
            add_sep=metadata.bool_(KEY + "add_sep_token", True),
            add_space_prefix=metadata.bool_(KEY + "add_space_prefix", False),
            clean_spaces=True,
        ),
    )


def _load_unigram(metadata: Metadata) -> Tokenizer:
    vocabulary = Vocabulary(metadata, SpecialIds(eos=1, unk=2, pad=0))
    add_space_prefix = metadata.bool_(KEY + "add_space_prefix", False)
    return Tokenizer(
        vocabulary,
        Unigram(vocabulary, metadata, add_space_prefix=add_space_prefix),
        TokenizerRules(
            add_bos=metadata.bool_(KEY + "add_bos_token", False),
            add_eos=metadata.bool_(KEY + "add_eos_token", True),
            add_sep=metadata.bool_(KEY + "add_sep_token", False),
            add_space_prefix=add_space_prefix,
        ),
    )


def _load_rwkv(metadata: Metadata) -> Tokenizer:
    vocabulary = Vocabulary(metadata, SpecialIds())
    return Tokenizer(
        vocabulary,
        LongestBytes(vocabulary),
        TokenizerRules(
            add_bos=False,  # regardless of the file, as in llama.cpp
            add_eos=False,
            add_sep=False,
            add_space_prefix=metadata.bool_(KEY + "add_space_prefix", False),
        ),
    )


def _load_plamo(metadata: Metadata) -> Tokenizer:
    vocabulary = Vocabulary(metadata, SpecialIds(bos=1, eos=2, unk=0, pad=3))
    return Tokenizer(
        vocabulary,
        ScoredPieces(vocabulary, metadata),
        TokenizerRules(
            add_bos=metadata.bool_(KEY + "add_bos_token", False),
            add_eos=metadata.bool_(KEY + "add_eos_token", False),
            add_sep=metadata.bool_(KEY + "add_sep_token", False),
            add_space_prefix=metadata.bool_(KEY + "add_space_prefix", False),
        ),
    )


_KINDS: dict[str, Callable[[Metadata], Tokenizer]] = {
    "bert": _load_wpm,
    "gemma4": _load_gemma4,
    "gpt2": _load_gpt2,
    "llama": _load_spm,
    "plamo2": _load_plamo,
    "rwkv": _load_rwkv,
    "t5": _load_unigram,
}


def _tokenizer(metadata: Metadata, vocabulary: Vocabulary, model: _Model, rule: PreTokenizer | None) -> Tokenizer:
    """Create a tokenizer with the file's flags over the defaults of its kind (`rule` is None for SentencePiece)."""
    add_bos = metadata.bool_(KEY + "add_bos_token", rule is None or rule.add_bos)
    add_space_prefix = metadata.bool_(KEY + "add_space_prefix", rule is None)
    if rule is pre_tokenizer("gemma4"):
        add_bos = True  # some published files have a wrong value
    return Tokenizer(
        vocabulary,
        model,
        TokenizerRules(
            add_bos=add_bos,
            add_eos=metadata.bool_(KEY + "add_eos_token", False),
            add_sep=metadata.bool_(KEY + "add_sep_token", rule is not None and rule.add_sep),
            add_space_prefix=add_space_prefix,
            clean_spaces=rule is not None and rule.clean_spaces,
            spaces_spelled=rule is None or not rule.byte_encode,
            encodes_prefix=rule is None and add_space_prefix,
        ),
    )


def _valid(text: str) -> str:
    """Return `text` with lone surrogates, which are not characters, replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


_CLEANING = (
    (re.compile(rb" ([?!.,])"), rb"\1"),
    (re.compile(rb" ' "), rb"'"),
    (re.compile(rb" '(?=[sm]|re|ve)"), rb"'"),
)


def _clean(text: bytes) -> bytes:
    """Clean English punctuation like `clean_up_tokenization_spaces`, as implemented in llama.cpp."""
    for pattern, replacement in _CLEANING:
        text = pattern.sub(replacement, text)
    return text
