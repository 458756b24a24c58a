"""Chunks of media in sequences: checks, prefixes that cut none, positions, and context shifts.

A chunk's tokens have ids below zero. Samplers, penalties and drafters get `text_tokens` of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from llamado.engine.errors import InvalidRequest
from llamado.media.chunks import MediaChunk, MediaSpan

Spans = tuple[MediaSpan, ...]


def text_tokens(tokens: Iterable[int]) -> list[int]:
    """Return the tokens of text, without those of media."""
    return [token for token in tokens if token >= 0]


def check_prompt(prompt: Sequence[int], spans: Spans, n_vocab: int) -> None:
    """Raise InvalidRequest unless the prompt's ids are in the vocabulary, and exactly those of the spans below zero."""
    tokens = np.array(prompt, np.int64)
    is_media = np.zeros(tokens.size, np.bool_)
    end = 0
    for start, chunk in spans:
        if chunk.n_tokens < 1 or not end <= start <= start + chunk.n_tokens <= tokens.size:
            raise InvalidRequest("the media of a prompt must be in order, apart from each other, and inside the prompt")
        end = start + chunk.n_tokens
        is_media[start:end] = True
    if ((tokens < 0) != is_media).any() or (tokens >= n_vocab).any() or (tokens < -(2**31)).any():
        raise InvalidRequest("Prompt contains invalid tokens")


def span_at(spans: Spans, place: int) -> MediaSpan | None:
    """Return the chunk that token `place` belongs to; None for text."""
    for span in spans:
        if span.start <= place < span.stop:
            return span
    return None


def next_change(spans: Spans, place: int) -> int | None:
    """Return the first token behind `place` with which a chunk or a text begins; None if there is only text."""
    return next((end for span in spans for end in (span.start, span.stop) if end > place), None)


def whole_chunks(spans: Spans, n: int) -> int:
    """Return the longest prefix of at most `n` tokens that ends within no chunk.

    Every prefix that is kept, shared or restored ends like that: the first tokens of a chunk alone cannot be computed
    if each of its tokens sees all of them.
    """
    span = span_at(spans, n)
    return n if span is None else span.start


def longest_whole(spans: Spans, n: int, limit: Callable[[int], int]) -> int:
    """Return the longest prefix of at most `n` tokens that ends within no chunk and that `limit` accepts: it returns
    the longest one of at most so many tokens.
    """
    while (found := limit(n)) != (n := whole_chunks(spans, found)):
        pass
    return n


def position_shift(spans: Spans, place: int) -> int:
    """Return the difference of a token's position in models with M-RoPE and its number, for a token of text or the
    first one of a chunk.
    """
    shift = 0
    for span in spans:
        if span.stop > place:
            break
        layout = span.chunk.layout
        if layout is not None:
            shift += layout.n_positions - span.chunk.n_tokens
    return shift


def chunk_positions(spans: Spans, span: MediaSpan, first: int, n: int) -> NDArray[np.int32] | None:
    """Return the positions of `n` tokens from token `first` on, all of chunk `span`, in models with M-RoPE.

    They are int32 [4, n]; None: one after the other.
    """
    start, chunk = span
    if chunk.layout is None:
        return None
    positions = chunk.layout.positions(start + position_shift(spans, start))
    return np.ascontiguousarray(positions[:, first - start : first - start + n], np.int32)


def fitted_discard(spans: Spans, length: int, n_keep: int, n_discard: int) -> tuple[int, int] | None:
    """Return the tokens to keep and to discard behind them in a context shift of `length` tokens, so that no chunk is
    cut: one that begins among the first `n_keep` and ends behind them is discarded, too.

    None if nothing would be left.
    """
    kept = whole_chunks(spans, n_keep)
    end = n_keep + n_discard
    cut = span_at(spans, end)
    if cut is not None and cut.start < end:
        end = cut.stop
    return None if end >= length else (kept, end - kept)


def shifted(spans: Spans, n_keep: int, n_discard: int) -> Spans:
    """Return the chunks that are left after a context shift, at their new places."""
    kept = [span for span in spans if span.stop <= n_keep]
    later = [span for span in spans if span.start >= n_keep + n_discard]
    return *kept, *(MediaSpan(span.start - n_discard, span.chunk) for span in later)


def check_batches(spans: Spans, max_batch: int) -> None:
    """Raise InvalidRequest if a chunk must be evaluated in one batch and is larger than batches are."""
    for _, chunk in spans:
        if not chunk.causal and chunk.n_tokens > max_batch:
            raise InvalidRequest(
                f"{_article(chunk)} of {chunk.n_tokens} tokens must be evaluated in one batch, and a batch has at most "
                f"{max_batch}: start with a larger --batch-size (-b) and --ubatch-size (-ub)"
            )


def _article(chunk: MediaChunk) -> str:
    return "an image" if chunk.kind.value == "image" else "a sound"
