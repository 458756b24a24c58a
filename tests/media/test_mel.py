"""Log-mel spectrograms against values of llama.cpp's mtmd-audio.cpp (b11434)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from llamado.media import mel
from llamado.media.errors import MediaError

Floats = NDArray[np.float32]


def signal(n: int, rate: int = 16000) -> Floats:
    """Return a falling chirp with a high tone and something like noise."""
    t = np.arange(n) / rate
    chirp = 0.4 * np.sin(2 * np.pi * (200 + 900 * t) * t) * np.exp(-2 * ((t * 3) % 1))
    noise = 0.02 * np.cos(np.arange(n) ** 2 * 0.37)
    return (chirp + 0.05 * np.sin(2 * np.pi * 3100 * t) + noise).astype(np.float32)


def parakeet(samples: Floats) -> list[Floats]:
    """Use a Hamming window and Slaney's filters as the file's."""
    filters = mel.mel_filters(80, 512, 16000).T.astype(np.float32)
    return [mel.parakeet_mel(samples, mel.parakeet_bank(np.hamming(400).astype(np.float32), filters))]


PREPROCESSORS: dict[str, Callable[[Floats], list[Floats]]] = {
    "whisper": lambda x: mel.whisper_mel(x, 80),
    "qwen3a": lambda x: mel.qwen3_mel(x, 128),
    "dots3note": lambda x: mel.dots3note_mel(x, 128),
    "mimo": lambda x: [mel.mimo_mel(x, 128)],
    "conformer": lambda x: [mel.conformer_mel(x, 128)],
    "parakeet": parakeet,
    "granite": lambda x: [mel.granite_mel(x, 160)],
    "gemma4a": lambda x: mel.gemma4_mel(x, 128),
    "gemma4ua": lambda x: [mel.raw_frames(x)],
}

# Shape, values at (0, 0), (1, 7), (5, 20), (least of 30 and the last, 60), the last, the middle; mean and deviation.
KNOWN: dict[str, tuple[tuple[int, int], list[float], float, float]] = {
    "whisper": ((3000, 80), [1.12764, 0.94252, 0.23306, -0.11104, -0.6524, -0.6524], -0.6352, 0.12853),
    "qwen3a": ((100, 128), [1.05188, 1.32677, 0.01596, 0.29231, 0.0, 0.17842], 0.12557, 0.23786),
    "dots3note": ((56, 128), [1.05188, 1.32677, 0.01596, 0.29231, 0.16022, 0.23868], 0.21902, 0.28079),
    "mimo": ((38, 128), [1.54735, 1.5089, 1.91816, -0.33168, 0.9725, -0.35136], -0.18466, 1.25937),
    "conformer": ((57, 128), [4.19225, 3.54573, -0.55031, 0.83703, 0.0, 0.38478], 0.0, 0.98229),
    "parakeet": ((57, 80), [4.50804, 1.06632, -0.41362, -1.27514, -2.03867, 0.1382], 0.00761, 1.00165),
    "granite": ((28, 160), [1.46812, 1.6408, 0.71006, 0.81954, 0.8371, 0.24195], 0.73542, 0.27756),
    "gemma4a": ((56, 128), [-6.90776, -0.04927, 1.55912, -1.63248, -0.99953, -2.02457], -1.61434, 1.60595),
    "gemma4ua": ((15, 640), [0.02, -0.07275, -0.1641, 0.0, 0.0, 0.01865], 0.00045, 0.15071),
}


@pytest.mark.parametrize("name", KNOWN)
def test_equals_llama_cpp(name: str) -> None:
    shape, values, mean, deviation = KNOWN[name]
    (found,) = PREPROCESSORS[name](signal(9000))
    assert found.shape == shape and found.dtype == np.float32 and found.flags.c_contiguous
    n, width = shape
    at = [(0, 0), (1, 7), (5, 20), (min(30, n - 1), 60), (n - 1, width - 1), (n // 2, width // 2)]
    assert [float(found[i]) for i in at] == pytest.approx(values, abs=1e-4)
    assert (float(found.mean()), float(found.std())) == pytest.approx((mean, deviation), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "n_samples", "n_frames"),
    [
        pytest.param("dots3note", 960_159, [6000], marks=pytest.mark.slow),
        pytest.param("dots3note", 960_160, [6000, 1], marks=pytest.mark.slow),
        ("whisper", 1, [3000]),
        ("whisper", 200, [3000]),
        ("whisper", 479_839, [3000]),
        # Thirty seconds of silence behind the sound make another piece.
        ("whisper", 479_840, [3000, 3000]),
        ("qwen3a", 1, [100]),
        ("qwen3a", 15_999, [100]),
        ("qwen3a", 16_000, [200]),
        ("qwen3a", 127_999, [800]),
        ("qwen3a", 128_000, [800, 100]),
        ("dots3note", 160, [1]),
        ("mimo", 1, [1]),
        ("mimo", 480, [3]),
        ("conformer", 320, [3]),
        ("parakeet", 479, [3]),
        ("granite", 160, [1]),
        ("granite", 480, [2]),
        ("gemma4a", 2, [1]),
        ("gemma4a", 320, [1]),
        ("gemma4a", 321, [2]),
        ("gemma4a", 480_001, [2999]),
        ("gemma4a", 480_002, [2999, 1]),
        ("gemma4ua", 640, [1]),
        ("gemma4ua", 641, [2]),
    ],
)
def test_pieces_and_frames(name: str, n_samples: int, n_frames: list[int]) -> None:
    found = PREPROCESSORS[name](signal(n_samples))
    assert [len(piece) for piece in found] == n_frames
    assert all(np.isfinite(piece).all() for piece in found)


@pytest.mark.parametrize(
    ("name", "n_samples"), [("dots3note", 159), ("conformer", 319), ("parakeet", 319), ("granite", 159), ("gemma4a", 1)]
)
def test_too_short(name: str, n_samples: int) -> None:
    with pytest.raises(MediaError, match="too short"):
        PREPROCESSORS[name](signal(n_samples))


def test_silence_and_the_loudest_sound_stay_finite() -> None:
    for name, preprocess in PREPROCESSORS.items():
        for value in (0.0, 1e6):
            assert all(np.isfinite(piece).all() for piece in preprocess(np.full(4000, value, np.float32))), name


def test_blocks_of_frames_do_not_show() -> None:
    sound = signal(16000 * 25)
    (whole,) = mel.gemma4_mel(sound, 128)
    assert len(whole) > 2048
    later = mel.gemma4_mel(sound[16000 * 20 - 160 :], 128)[0]
    np.testing.assert_allclose(whole[2000:2400], later[1:401], atol=1e-5)
