"""Small sound files, and a process that decodes files which could crash it."""

from __future__ import annotations

import io

import numpy as np
import soundfile
from numpy.typing import NDArray


def encoded(samples: NDArray[np.floating], rate: int, format: str = "WAV", subtype: str = "PCM_16") -> bytes:
    """Return a sound file of samples of [n] or [n, channels]."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


def noise(n: int, n_channels: int = 1, seed: int = 0) -> NDArray[np.float64]:
    """Return random samples within -1 and 1: [n, n_channels]."""
    return np.clip(np.random.default_rng(seed).standard_normal((n, n_channels)) * 0.2, -1, 1)
