"""Base class of encoders of sounds: chunks of a prompt from pieces of a spectrogram."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import view_2d
from llamado.ggml.tensor import Tensor
from llamado.media.chunks import EncoderInput, MediaChunk, Piece
from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.media.mel import RATE
from llamado.models.encoders.encoder import EncoderPass, MediaEncoder
from llamado.models.encoders.parts.rows import as_f32

FRAMES = "frames"
"""Name of the input: the frames of a spectrogram, or of samples."""


class SoundEncoder(MediaEncoder):
    """Encoder of sounds, whose input are frames: F32 [n_bands, n_frames].

    The texts `begin` and `end` surround a sound in the prompt (mtmd.cpp, init_audio).
    """

    kind = MediaKind.AUDIO
    begin: ClassVar[str] = ""
    end: ClassVar[str] = ""

    @property
    def rate(self) -> int:
        return RATE

    @abstractmethod
    def frames(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Return the frames of each piece of a sound: float32 [n_frames, n_bands]. Raises MediaError."""

    @abstractmethod
    def n_tokens(self, n_frames: int) -> int:
        """Return the number of embeddings for a piece of `n_frames`."""

    def encoder_input(self, frames: NDArray[np.float32]) -> EncoderInput:
        """Return the graph's inputs for a piece, and the shape for `build`."""
        return EncoderInput((len(frames),), {FRAMES: np.ascontiguousarray(frames)})

    def prepare(self, media: Media) -> list[Piece]:
        if media.kind is not MediaKind.AUDIO or media.rate != self.rate:
            raise MediaError(f"a sound of {self.rate} samples a second is expected")
        if not media.data.size:
            raise MediaError("the sound is empty: it has no samples")
        pieces: list[Piece] = [self.begin]
        pieces += (self._chunk(media, i, frames) for i, frames in enumerate(self.frames(media.data)))
        pieces.append(self.end)
        return [piece for piece in pieces if piece != ""]

    def _chunk(self, media: Media, i: int, frames: NDArray[np.float32]) -> MediaChunk:
        given, n_tokens = self.encoder_input(frames), self.n_tokens(len(frames))
        return MediaChunk(MediaKind.AUDIO, given, n_tokens, self.digest(media, i), causal=self.causal)

    def input(self, step: EncoderPass, n_bands: int, n_frames: int) -> Tensor:
        """Return the input of a graph: F32 [n_bands, n_frames]."""
        return step.input(FRAMES, n_bands, n_frames)


def rows_of(table: Tensor, n: int) -> Tensor:
    """Return the first `n` rows of a table: F32 [ne0, n]."""
    return as_f32(view_2d(table, table.ne[0], n, table.nb[1]))
