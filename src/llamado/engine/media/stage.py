"""Encoding between the engine's steps: media that requests wait for, and the latest results.

A chunk is encoded when a slot comes to its first token, so that nothing is encoded whose cells come from a cache. The
engine's thread computes one segment of the oldest encoding per step, which takes about as long as a step with a piece
of a prompt. So generating slots continue meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.engine.errors import EngineError
from llamado.errors import LlamadoError
from llamado.media.chunks import MediaChunk

log = logging.getLogger(__name__)

_KEPT_BYTES = 256 << 20

Rows = NDArray[np.float32]


class Encoding(Protocol):
    """An encoder's work on one chunk."""

    def advance(self) -> Rows | None:
        """Compute the next segment; return the embeddings, [n_tokens, width], after the last one.

        Raises LlamadoError.
        """
        ...


class Encoder(Protocol):
    """Encoders of pictures and sounds (see EncoderRunner)."""

    def begin(self, chunk: MediaChunk) -> Encoding:
        """Begin to encode a chunk. Raises LlamadoError."""
        ...


class Requester(Protocol):
    """A request that needs embeddings."""

    embeddings: dict[bytes, Rows]


class EncodingFailed(EngineError):
    """A picture or sound could not be encoded; only the requests with it are lost."""


class FailedEncoding(NamedTuple):
    """An encoding that failed, and the requests that waited for it."""

    requesters: list[Requester]
    error: LlamadoError


class _PendingChunk(NamedTuple):
    chunk: MediaChunk
    requesters: list[Requester]


class MediaStage:
    """The encodings of an engine. Only the engine's thread uses it.

    `encoder`: None if the engine takes no media. `multi_positions`: True if the text model has multi-dimensional
    positions. `limit`: bytes of results that are kept for later requests.
    """

    def __init__(
        self, encoder: Encoder | None = None, *, multi_positions: bool = False, limit: int = _KEPT_BYTES
    ) -> None:
        self.multi_positions = multi_positions
        self._encoder = encoder
        self._limit = limit
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()
        self._n_bytes = 0
        self._wanted: OrderedDict[bytes, _PendingChunk] = OrderedDict()
        self._running: tuple[bytes, Encoding] | None = None
        self._seconds = 0.0

    @property
    def takes_media(self) -> bool:
        """True if prompts may have media. Any thread."""
        return self._encoder is not None

    @property
    def is_busy(self) -> bool:
        """True if there is something to encode."""
        return bool(self._wanted)

    def provide(self, requester: Requester, chunk: MediaChunk) -> bool:
        """Give a request the embeddings of a chunk; return False if they have to be computed first."""
        digest = chunk.digest
        if digest in requester.embeddings:
            return True
        rows = self._kept.get(digest)
        if rows is None:
            wanted = self._wanted.setdefault(digest, _PendingChunk(chunk, []))
            if not any(one is requester for one in wanted.requesters):
                wanted.requesters.append(requester)
            return False
        self._kept.move_to_end(digest)
        requester.embeddings[digest] = rows
        return True

    def advance(self) -> FailedEncoding | None:
        """Compute a segment of the oldest wanted chunk; return the failure if it failed."""
        if not self._wanted:
            return None
        digest, wanted = next(iter(self._wanted.items()))
        began = time.perf_counter()
        try:
            if self._running is None or self._running[0] != digest:
                assert self._encoder is not None
                self._running, self._seconds = (digest, self._encoder.begin(wanted.chunk)), 0.0
            rows = self._running[1].advance()
            self._seconds += time.perf_counter() - began
            if rows is None:
                return None
            self._check(wanted.chunk, rows)
        except Exception as error:
            if not isinstance(error, LlamadoError):
                log.exception("encoding failed")
            self._running = None
            del self._wanted[digest]
            return FailedEncoding(wanted.requesters, _named(error))
        self._running = None
        del self._wanted[digest]
        kind, n = wanted.chunk.kind.value, wanted.chunk.n_tokens
        log.info("%s encoded (tokens=%d, seconds=%.2f)", kind, n, self._seconds)
        for requester in wanted.requesters:
            requester.embeddings[digest] = rows
        self._keep(digest, rows)
        return None

    def retain(self, active: Sequence[Requester]) -> None:
        """Drop encodings that none of these requests waits for."""
        for digest, wanted in [*self._wanted.items()]:
            wanted.requesters[:] = [one for one in wanted.requesters if any(one is other for other in active)]
            if not wanted.requesters:
                del self._wanted[digest]
                if self._running is not None and self._running[0] == digest:
                    self._running = None

    @staticmethod
    def _check(chunk: MediaChunk, rows: Rows) -> None:
        if rows.shape[0] != chunk.n_tokens:
            raise EncodingFailed(f"the encoder returned {rows.shape[0]} embeddings for {chunk.n_tokens} tokens")
        if not np.isfinite(rows).all():
            raise EncodingFailed("the encoder returned NaN or infinity; the projector file may be damaged")

    def _keep(self, digest: bytes, rows: Rows) -> None:
        self._kept[digest] = rows
        self._n_bytes += rows.nbytes
        while self._n_bytes > self._limit:
            _, oldest = self._kept.popitem(last=False)
            self._n_bytes -= oldest.nbytes


def _named(error: Exception) -> LlamadoError:
    """Return an error as one of ours."""
    if isinstance(error, LlamadoError):
        return error
    failed = EncodingFailed(f"encoding failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
