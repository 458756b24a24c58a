"""Gemma 4's projector of sounds without an encoder: samples as they are, normed and projected (models/gemma4ua.cpp)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, mul_mat, rms_norm
from llamado.media.mel import FRAME, raw_frames
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.sounds.encoder import SoundEncoder
from llamado.models.weights import Weights

_EPS = 1e-6


class Gemma4RawAudioEncoder(SoundEncoder):
    """A token for each 640 samples (40 ms)."""

    begin, end = "<|audio>", "<audio|>"

    def _take_weights(self, weights: Weights) -> None:
        w = weights.shared
        self.n_embd = w.ne("mm.a.input_projection.weight")[1]
        self._out = w.require("mm.a.input_projection.weight", FRAME, self.n_embd)

    def frames(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return [raw_frames(samples)]

    def n_tokens(self, n_frames: int) -> int:
        return n_frames

    def build(self, shape: tuple[int, ...]) -> Graph:
        (n_frames,) = shape
        step = EncoderPass(_EPS)
        x = rms_norm(self.input(step, FRAME, n_frames), _EPS)
        step.graph.output(EMBEDDINGS, mul_mat(self._out, x))
        return step.graph
