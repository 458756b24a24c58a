"""Media in the token sequence of a prompt: chunks of positions whose embeddings an encoder computes.

A media token has an id like a text token, but below zero and derived from the contents. Everything that compares token
sequences (slots, prompt cache, slot files, cache on disk) thus recognizes pictures and sounds, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llamado.media.errors import MediaError
from llamado.media.media import MARKER, MediaKind


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInput:
    """Contents of an encoder's graph for one picture, tile or stretch of sound.

    `shape` selects the graph (`MediaEncoder.build`), `arrays` fill its inputs by name. All are contiguous.
    """

    shape: tuple[int, ...]
    arrays: Mapping[str, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class Grid(NamedTuple):
    """Positions of the tokens of a picture in models with M-RoPE: `nx` tokens in each of `ny` rows."""

    nx: int
    ny: int

    @property
    def n_positions(self) -> int:
        """Return how far the positions of the tokens behind the picture move on (mtmd_image_tokens_get_n_pos)."""
        return max(self.nx, self.ny)

    def positions(self, first: int) -> NDArray[np.int32]:
        """Return time, row, column and 0 of each token, for a picture at position `first`: int32 [4, nx · ny]
        (mtmd_image_tokens_get_decoder_pos).
        """
        at = np.arange(self.nx * self.ny, dtype=np.int32)
        found = np.zeros((4, at.size), np.int32)
        found[0] = first
        found[1] = first + at // self.nx
        found[2] = first + at % self.nx
        return found


class PositionLayout(Protocol):
    """Positions of a chunk in models with M-RoPE; see `Grid`."""

    @property
    def n_positions(self) -> int: ...

    def positions(self, first: int) -> NDArray[np.int32]: ...


@runtime_checkable
class CountingLayout(PositionLayout, Protocol):
    """A layout that depends on the number of pictures before this one in the prompt."""

    def behind(self, n_pictures: int) -> PositionLayout:
        """Return the layout behind `n_pictures` others."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MediaChunk:
    """`n_tokens` consecutive positions of a prompt, whose embeddings are the encoder's output for `input`.

    `digest` identifies media and preparation: equal digests mean equal embeddings. `layout`: positions in models with
    M-RoPE; None: one after the other, as those of text. If not `causal`, each token of the chunk sees all others of it,
    and the chunk must be evaluated in one batch.
    """

    kind: MediaKind
    input: EncoderInput
    n_tokens: int
    digest: bytes
    layout: PositionLayout | None = None
    causal: bool = True

    def token_ids(self) -> NDArray[np.int32]:
        """Return the ids of the chunk's tokens, all below zero: int32 [n_tokens].

        Each has 31 bits of a hash, so that sequences with different media differ.
        """
        bits = hashlib.shake_128(self.digest).digest(4 * self.n_tokens)
        return -1 - (np.frombuffer(bits, "<u4") & 0x7FFFFFFF).astype(np.int32)


class MediaSpan(NamedTuple):
    """A chunk, and the index of its first token in the prompt."""

    start: int
    chunk: MediaChunk

    @property
    def stop(self) -> int:
        """Return the index behind its last token."""
        return self.start + self.chunk.n_tokens


class TokenText(NamedTuple):
    """A text that is one token of the vocabulary and is not tokenized (`lookup_token` in mtmd.cpp).

    Tokenizing it could add a space, or take another token of the same text.
    """

    text: str


Piece = str | TokenText | MediaChunk | Callable[[int], MediaChunk]
"""A part of a prompt: text (special tokens are parsed), a token, or a chunk. Neighboring texts are tokenized apart.

A chunk that depends on its place is a function of the number of tokens before it, not counting `bos`.
"""


def chunks_of(pieces: Sequence[Piece]) -> list[MediaChunk]:
    """Return the chunks among pieces; one that depends on its place is that of the beginning of a prompt."""
    chunks = (piece for piece in pieces if not isinstance(piece, (str, TokenText)))
    return [chunk if isinstance(chunk, MediaChunk) else chunk(0) for chunk in chunks]


class MediaPrompt(NamedTuple):
    """A prompt with media: the ids of all tokens, and the chunks among them, in order."""

    tokens: list[int]
    spans: tuple[MediaSpan, ...] = ()


class Encode(Protocol):
    """Tokenizer.encode."""

    def __call__(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...


FindToken = Callable[[str], int | None]
"""Returns the token that a `TokenText` stands for (Tokenizer.find); None if the vocabulary has none."""

M = TypeVar("M")


def require_token(piece: TokenText, find: FindToken) -> int:
    """Return the token of a text. Raises MediaError if the vocabulary has none."""
    token = find(piece.text)
    if token is None:
        raise MediaError(
            f"the vocabulary has no token {piece.text!r}, which prompts with media need: the projector file belongs "
            "to another model"
        )
    return token


def tokenize(
    text: str,
    media: Sequence[M],
    encode: Encode,
    find: FindToken,
    prepare: Callable[[M], Sequence[Piece]],
    *,
    bos: int | None,
    eos: int | None,
    marker: str = MARKER,
) -> MediaPrompt:
    """Tokenize a text in which each `marker` stands for the next of `media`; as mtmd_tokenize does.

    `prepare`: `MediaEncoder.prepare` of the encoder for a medium's kind, or what returns the pieces it has made.
    `bos` and `eos` begin and end the whole prompt, if they are not None. Raises MediaError, and ValueError if there are
    more or fewer markers than media.
    """
    parts = text.split(marker)
    if len(parts) - 1 != len(media):
        raise ValueError(f"number of media markers in text ({len(parts) - 1}) does not match media ({len(media)})")
    tokens: list[int] = [] if bos is None else [bos]
    spans: list[MediaSpan] = []
    n_pictures = 0

    def add(piece: Piece) -> None:
        if isinstance(piece, str):
            if piece:
                tokens.extend(encode(piece, add_special=False, parse_special=True))
            return
        if isinstance(piece, TokenText):
            tokens.append(require_token(piece, find))
            return
        chunk = piece if isinstance(piece, MediaChunk) else piece(len(tokens) - (bos is not None))
        if isinstance(chunk.layout, CountingLayout):
            chunk = replace(chunk, layout=chunk.layout.behind(n_pictures))
        spans.append(MediaSpan(len(tokens), chunk))
        tokens.extend(chunk.token_ids().tolist())

    add(parts[0])
    for medium, behind in zip(media, parts[1:], strict=True):
        pieces = prepare(medium)
        for piece in pieces:
            add(piece)
        n_pictures += any(isinstance(piece, MediaChunk) and piece.kind is MediaKind.IMAGE for piece in pieces)
        add(behind)
    if eos is not None:
        tokens.append(eos)
    return MediaPrompt(tokens, tuple(spans))
