"""Media whose embeddings are those of known tokens: answers must be those to the same prompt with these tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.engine.media.stage import MediaStage
from llamado.engine.request import Request
from llamado.media.chunks import EncoderInput, MediaChunk, MediaSpan, PositionLayout
from llamado.media.media import MediaKind

from .fake import req

Table = Callable[[NDArray[np.int32]], NDArray[np.float32]]


def chunk_of(tokens: Sequence[int], *, layout: PositionLayout | None = None, causal: bool = True) -> MediaChunk:
    """Return a chunk with the embeddings of these tokens."""
    ids = np.array(tokens, np.int32)
    digest = hashlib.sha256(b"media" + ids.tobytes()).digest()
    return MediaChunk(MediaKind.IMAGE, EncoderInput((ids.size,), {"ids": ids}), ids.size, digest, layout, causal)


def ids_as_rows(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return rows for FakeForward."""
    return ids[:, None].astype(np.float32)


class FakeEncoder:
    """Looks embeddings up in a table, in `n_segments` steps. `begun`: digests of the chunks that it began to encode.

    `before` is called at each step; it may raise.
    """

    def __init__(self, table: Table = ids_as_rows, n_segments: int = 2) -> None:
        self.table, self.n_segments = table, n_segments
        self.begun: list[bytes] = []
        self.before: Callable[[], None] = lambda: None

    def begin(self, chunk: MediaChunk) -> FakeEncoding:
        self.begun.append(chunk.digest)
        return FakeEncoding(self, chunk)


class FakeEncoding:
    """The work on one chunk."""

    def __init__(self, encoder: FakeEncoder, chunk: MediaChunk) -> None:
        self._encoder, self._chunk = encoder, chunk
        self._left = encoder.n_segments

    def advance(self) -> NDArray[np.float32] | None:
        self._encoder.before()
        self._left -= 1
        return None if self._left else self._encoder.table(self._chunk.input.arrays["ids"])


def with_media(
    prompt: Sequence[int],
    *places: tuple[int, int],
    layout: Callable[[int], PositionLayout] | None = None,
    causal: bool = True,
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """Return the prompt with chunks in place of the tokens from the first to before the second of each of `places`."""
    ids, spans = list(prompt), []
    for start, stop in places:
        chunk = chunk_of(prompt[start:stop], layout=None if layout is None else layout(stop - start), causal=causal)
        ids[start:stop] = chunk.token_ids().tolist()
        spans.append(MediaSpan(start, chunk))
    return ids, tuple(spans)


def media_req(prompt: Sequence[int], *places: tuple[int, int], n_predict: int = 8, **fields: Any) -> Request:
    """Return a request like `req`, with chunks of media in place of some tokens."""
    ids, spans = with_media(prompt, *places)
    return req(ids, n_predict, media=spans, **fields)


def stage(encoder: FakeEncoder | None = None, **options: Any) -> MediaStage:
    """Return the stage of an engine that takes such media."""
    return MediaStage(encoder or FakeEncoder(), **options)
