"""A model's vocabulary: text ↔ id, the kind of each token, and the ids of special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.gguf.metadata import Metadata, StringArray
from llamado.gguf.text_index import TextIndex, decode_all
from llamado.text.errors import TokenizerError

KEY = "tokenizer.ggml."


class Attribute(IntFlag):
    """The kind of a token; the numbers are llamado's, the meanings those of `llama_token_attr` (llama.h)."""

    UNKNOWN = 1
    UNUSED = 2
    NORMAL = 4
    CONTROL = 8
    USER_DEFINED = 16
    BYTE = 32
    LSTRIP = 64  # whitespace to the left belongs to the token
    RSTRIP = 128


# `tokenizer.ggml.token_type` (gguf: TokenType) → attribute, by index; values out of range have none.
_BY_TYPE = np.array(
    [
        0,
        Attribute.NORMAL,
        Attribute.UNKNOWN,
        Attribute.CONTROL,
        Attribute.USER_DEFINED,
        Attribute.UNUSED,
        Attribute.BYTE,
        0,
    ],
    np.uint8,
)

# Texts by which llama.cpp finds a token's role if the file has no id; earlier ones first.
_ROLES = {
    "eot": (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
        "<end_of_utterance>",
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}

# Texts that end a generation in any vocabulary that has them, regardless of the file.
_END_OF_GENERATION = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)

# Parts of gpt-oss's harmony format: text for the user of the API, so they are always shown.
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")

_ID_KEYS = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id",),  # this is the spelling in the format
    "pad": ("padding_token_id",),
    "mask": ("mask_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a role; None if a vocabulary has no such token."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    eom: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    fim_pre: int | None = None
    fim_suf: int | None = None
    fim_mid: int | None = None
    fim_pad: int | None = None
    fim_rep: int | None = None
    fim_sep: int | None = None


class Vocabulary:
    """Tokens of one model, from `tokenizer.ggml.*` of its file.

    `defaults` are the ids of a kind of tokenizer if the file has no others. `attributes`: uint8[n_vocab] of `Attribute`
    bits. Raises `TokenizerError` if lists are missing or do not fit together.
    """

    def __init__(self, metadata: Metadata, defaults: SpecialIds) -> None:
        self.strings: StringArray = metadata.strings(KEY + "tokens")
        self.n_vocab = len(self.strings)
        if not self.n_vocab:
            raise TokenizerError(f"the list of tokens ({KEY}tokens) is empty; the model file is damaged")
        self.ids = TextIndex(self.strings, last=True, names=empty_texts(self.strings))
        """Tokens by their texts. Bytes that are not UTF-8 are lone surrogates, which no input has."""
        self.attributes = self._attributes(metadata)
        self.special = self._special(metadata, defaults)
        self.eog: frozenset[int] = self._end_of_generation()
        self._strip(metadata)

    def text(self, token: int) -> str:
        """Return the token in the vocabulary's spelling."""
        return self.strings[token] or f"[EMPTY_{token}]"

    def has(self, token: int, attribute: int) -> bool:
        """Return True if the token has any of the bits of `attribute`."""
        return bool(self.attributes[token] & attribute)

    def with_attribute(self, attribute: int) -> list[int]:
        """Return every token that has any of the bits of `attribute`, ascending."""
        found: list[int] = np.flatnonzero(self.attributes & np.uint8(attribute)).tolist()
        return found

    @cached_property
    def specials(self) -> NDArray[np.int64]:
        """Ids that are matched in a text as a whole, before anything else cuts it; ascending."""
        return np.flatnonzero(self.attributes & (Attribute.CONTROL | Attribute.USER_DEFINED | Attribute.UNKNOWN))

    def scores(self, metadata: Metadata) -> NDArray[np.float32]:
        """Return the score of each token (`tokenizer.ggml.scores`), 0 if the file has none; float32[n_vocab]."""
        scores = metadata.array(KEY + "scores", None)
        if scores is None:
            return np.zeros(self.n_vocab, np.float32)
        self._fits(scores, "scores")
        return scores[: self.n_vocab].astype(np.float32)

    def _fits(self, array: NDArray[Any], name: str) -> None:
        if len(array) < self.n_vocab:
            raise TokenizerError(
                f"{KEY}{name} has {len(array)} entries for {self.n_vocab} tokens; the model file is damaged"
            )

    def _attributes(self, metadata: Metadata) -> NDArray[np.uint8]:
        types = metadata.array(KEY + "token_type", None)
        if types is None:
            return np.full(self.n_vocab, int(Attribute.NORMAL), np.uint8)
        self._fits(types, "token_type")
        return _BY_TYPE[np.where((types < 0) | (types > 6), 7, types)[: self.n_vocab]]

    def _special(self, metadata: Metadata, defaults: SpecialIds) -> SpecialIds:
        found: dict[str, int | None] = {}
        for role, keys in _ID_KEYS.items():
            token: int | None = getattr(defaults, role)
            if token is not None and token >= self.n_vocab:
                token = None
            for key in keys:
                given = metadata.int_(KEY + key, None)
                if given is not None and 0 <= given < self.n_vocab:
                    token = given
            if token is None and role in _ROLES:
                token = next((self.ids[text] for text in _ROLES[role] if text in self.ids), None)
                if token is not None:
                    self.attributes[token] |= np.uint8(Attribute.CONTROL)
            found[role] = token
        return SpecialIds(**found)

    def _end_of_generation(self) -> frozenset[int]:
        special, ids = self.special, self.ids
        eog = {special.fim_pad, special.fim_rep, special.fim_sep, special.eos, special.eot, special.eom}
        for text in _END_OF_GENERATION:
            if text in ids:
                eog.add(ids[text])
                self.attributes[ids[text]] |= np.uint8(Attribute.CONTROL)
        for text in _ALWAYS_SHOWN:
            if text in ids:
                self.attributes[ids[text]] = Attribute.USER_DEFINED
        eog.discard(None)
        texts = {self.text(token): token for token in eog if token is not None}
        calls = bool(texts.keys() & {"<|call|>", "<|calls|>"})
        if "<|end|>" in texts and calls and texts.keys() & {"<|return|>", "<|flush|>"}:
            # in these formats <|end|> closes one message of several
            eog.discard(texts["<|end|>"])
            self.attributes[texts["<|end|>"]] = Attribute.USER_DEFINED
        if "</s>" in texts and texts.keys() & {"<|tool_response>", "<|plamo:eos|>"}:
            eog.discard(texts["</s>"])
            self.attributes[texts["</s>"]] = Attribute.NORMAL
        return frozenset(token for token in eog if token is not None)

    def _strip(self, metadata: Metadata) -> None:
        """Set the whitespace that belongs to a token: not in the file, so by the model's name, as in llama.cpp."""
        pre = metadata.str_(KEY + "pre", "")
        name = metadata.str_("general.name", "").lower()
        architecture = metadata.str_("general.architecture", "")
        jina = ("jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert")
        if any(part in pre for part in jina) or any(p in architecture for p in ("nomic-bert-moe", "jina-bert-v3")):
            self._mark(("<mask>",), Attribute.LSTRIP)
        elif "phi-3" in name or "phi3" in name:
            self.attributes[self.specials] |= np.uint8(Attribute.RSTRIP)
            self._mark(("</s>",), Attribute.RSTRIP)
            for text in ("<unk>", "<s>", "<|endoftext|>"):
                if text in self.ids:
                    self.attributes[self.ids[text]] &= ~np.uint8(Attribute.RSTRIP)
        elif "modern-bert" in name:
            self._mark(("[MASK]",), Attribute.LSTRIP)

    def _mark(self, texts: Iterable[str], attribute: Attribute) -> None:
        for text in texts:
            if text in self.ids:
                self.attributes[self.ids[text]] |= np.uint8(attribute)


def empty_texts(strings: StringArray) -> dict[str, int]:
    """Return names of tokens without text."""
    return {f"[EMPTY_{token}]": token for token in np.flatnonzero(np.diff(strings.offsets) == 0).tolist()}


def all_ids(strings: StringArray) -> dict[str, int]:
    """Return text → id of every token, for callers that look up every part of a text; see `Vocabulary.ids`."""
    texts = decode_all(strings)
    ids = dict(zip(texts, range(len(texts)), strict=True)) | empty_texts(strings)
    ids.pop("", None)
    return ids
