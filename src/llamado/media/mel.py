"""Log-mel spectrograms of sounds, as audio encoders expect them (llama.cpp's mtmd-audio.cpp).

Each function takes the samples of a sound, float32 [n_samples], and returns float32 [n_frames, n_mel]: one array, or
a list of them if the encoder sees the sound in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from llamado.media.errors import MediaError

Floats = NDArray[np.float32]

RATE = 16000
"""Samples a second that all encoders take but MiMo's."""

MIMO_RATE = 24000
_HOP = 160
_FLOOR = 2.0**-24
_BLOCK = 2048
"""Frames that are transformed at once."""

WHISPER_FRAMES = 3000
"""Frames of a piece of 30 seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Bank:
    """Window of a frame and mel filters of its spectrum.

    `window`: float64 [n_fft]. `filters`: float64 [n_fft / 2 + 1, n_mel], for the power of each frequency or, if
    `magnitude`, for the root of it. `log` of a sum is taken of at least `floor`, or of `floor` more if `adds_floor`.
    """

    window: NDArray[np.float64]
    filters: NDArray[np.float64]
    hop: int
    log: Callable[[NDArray[np.float64]], NDArray[np.float64]] = np.log10
    floor: float = _FLOOR
    adds_floor: bool = False
    magnitude: bool = False

    def __call__(self, samples: Floats, n_frames: int | None = None) -> Floats:
        """Return the logarithm of each frame's mel spectrum: float32 [n_frames, n_mel].

        A frame begins every `hop` samples. Without `n_frames`, there are as many as lie in the samples; with it, there
        are that many, as if the samples went on with zeros.
        """
        n_fft = self.window.size
        whole = max(0, (samples.size - n_fft) // self.hop + 1)
        if n_frames is None:
            n_frames = whole
        found = np.empty((n_frames, self.filters.shape[1]), np.float32)
        # Frames that begin behind the samples are silent.
        n_sounding = min(n_frames, -(-samples.size // self.hop))
        if n_sounding > whole:
            samples = np.pad(samples, (0, (n_sounding - 1) * self.hop + n_fft - samples.size))
        if n_sounding:
            frames = sliding_window_view(samples, n_fft)[:: self.hop]
            for at in range(0, n_sounding, _BLOCK):
                stop = min(at + _BLOCK, n_sounding)
                found[at:stop] = self._log_mel(frames[at:stop])
        found[n_sounding:] = self.log(np.full(1, self.floor))
        return found

    def _log_mel(self, frames: Floats) -> NDArray[np.float64]:
        spectrum = np.fft.rfft(frames * self.window)
        power = spectrum.real**2 + spectrum.imag**2
        mel = (np.sqrt(power) if self.magnitude else power) @ self.filters
        return self.log(mel + self.floor if self.adds_floor else np.maximum(mel, self.floor))


def hann(n: int, n_fft: int, *, periodic: bool = True) -> NDArray[np.float64]:
    """Return a Hann window of `n` samples, rounded to float32, in the middle of `n_fft` zeros."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n) / (n if periodic else n - 1))
    return centered(window.astype(np.float32), n_fft)


def centered(window: NDArray[np.floating], n_fft: int) -> NDArray[np.float64]:
    """Return a window in the middle of `n_fft` zeros."""
    left = (n_fft - window.size) // 2
    return np.pad(window.astype(np.float64), (left, n_fft - window.size - left))


def mel_filters(n_mel: int, n_fft: int, rate: int, *, slaney: bool = True) -> NDArray[np.float64]:
    """Return triangular filters from 0 to half of the rate, rounded to float32: float64 [n_fft / 2 + 1, n_mel].

    `slaney`: on Slaney's scale, with areas of 1; otherwise on that of HTK, with peaks of 1.
    """
    to_mel, to_hz = (_slaney_mel, _slaney_hz) if slaney else (_htk_mel, _htk_hz)
    top = to_mel(np.array(rate / 2))
    hz = to_hz(top * np.arange(n_mel + 2) / (n_mel + 1))
    left, center, right = hz[:-2], hz[1:-1], hz[2:]
    f = (np.arange(n_fft // 2 + 1) * (rate / n_fft))[:, None]
    up, down = (f - left) / np.maximum(center - left, 1e-30), (right - f) / np.maximum(right - center, 1e-30)
    rising, falling = (f >= left) & (f <= center), (f > center) & (f <= right)
    filters = np.where(rising, up, np.where(falling, down, 0.0))
    if slaney:
        filters *= 2 / np.maximum(right - left, 1e-30)
    return filters.astype(np.float32).astype(np.float64)


_KINK_HZ, _KINK_MEL, _LOG_STEP = 1000.0, 15.0, np.log(6.4) / 27


def _slaney_mel(hz: NDArray[np.float64]) -> NDArray[np.float64]:
    high = _KINK_MEL + np.log(np.maximum(hz, _KINK_HZ) / _KINK_HZ) / _LOG_STEP
    return np.where(hz < _KINK_HZ, hz * (_KINK_MEL / _KINK_HZ), high)


def _slaney_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    high = _KINK_HZ * np.exp((np.maximum(mel, _KINK_MEL) - _KINK_MEL) * _LOG_STEP)
    return np.where(mel < _KINK_MEL, mel / (_KINK_MEL / _KINK_HZ), high)


def _htk_mel(hz: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = 2595 * np.log10(1 + hz / 700)
    return found


def _htk_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = 700 * (10 ** (mel / 2595) - 1)
    return found


@cache
def _whisper_bank(n_mel: int) -> Bank:
    return Bank(hann(400, 400), mel_filters(n_mel, 400, RATE), _HOP)


def whisper_mel(samples: Floats, n_mel: int) -> list[Floats]:
    """Return pieces of WHISPER_FRAMES frames (30 seconds); the last ends in silence.

    As in llama.cpp, 30 seconds of silence follow the sound, and a piece that they do not complete is left out: a sound
    of just 30 seconds gets a second, silent piece.
    """
    bank = _whisper_bank(n_mel)
    pad = bank.window.size // 2
    if samples.size <= pad:
        samples = np.pad(samples, (0, pad + 1 - samples.size))
    n_frames = samples.size // _HOP + WHISPER_FRAMES + 1
    mel = bank(np.concatenate([samples[pad:0:-1], samples]), n_frames)
    normalize_peak(mel)
    return [mel[at : at + WHISPER_FRAMES] for at in range(0, n_frames - WHISPER_FRAMES + 1, WHISPER_FRAMES)]


def normalize_peak(mel: Floats) -> None:
    """Bring values to about -1 to 1, in place: at most 8 (decimal orders of power) below the largest."""
    np.maximum(mel, mel.max() - np.float32(8), out=mel)
    mel += np.float32(4)
    mel /= np.float32(4)


QWEN3_PIECE, QWEN3_CHUNK = 800, 100
"""Frames of a piece, and of the chunks in it that a Qwen3 encoder's convolutions see apart."""


def qwen3_mel(samples: Floats, n_mel: int) -> list[Floats]:
    """Return pieces of at most QWEN3_PIECE frames; each ends in zeros up to a multiple of QWEN3_CHUNK."""
    bank = _whisper_bank(n_mel)
    mel = bank(reflected(samples, bank.window.size // 2))
    normalize_peak(mel)
    pieces = [mel[at : at + QWEN3_PIECE] for at in range(0, len(mel), QWEN3_PIECE)]
    pieces[-1] = np.pad(pieces[-1], ((0, -len(pieces[-1]) % QWEN3_CHUNK), (0, 0)))
    return pieces


def reflected(samples: Floats, pad: int, *, end: bool = True) -> Floats:
    """Return the samples, with `pad` mirrored ones at both ends; zeros where there are none to mirror.

    Without `end`, zeros follow the sound.
    """
    before, behind = samples[1 : pad + 1][::-1], samples[-pad - 1 : -1][::-1] if end else samples[:0]
    return np.concatenate(
        [np.zeros(pad - before.size, np.float32), before, samples, behind, np.zeros(pad - behind.size, np.float32)]
    )


DOTS_SECONDS = 60


def dots3note_mel(samples: Floats, n_mel: int) -> list[Floats]:
    """Return pieces of 60 seconds, each normalized on its own. Raises MediaError if the sound has no whole frame."""
    bank = _whisper_bank(n_mel)
    n_chunk = DOTS_SECONDS * RATE
    pieces = []
    for at in range(0, samples.size, n_chunk):
        chunk = samples[at : at + n_chunk]
        n_valid = chunk.size // _HOP
        if not n_valid:
            continue
        mel = bank(reflected(chunk, bank.window.size // 2, end=chunk.size == n_chunk))[:n_valid]
        normalize_peak(mel)
        pieces.append(mel)
    if not pieces:
        raise _too_short(_HOP)
    return pieces


@cache
def _mimo_bank(n_mel: int) -> Bank:
    filters = mel_filters(n_mel, 960, MIMO_RATE, slaney=False)
    return Bank(hann(960, 960), filters, 240, np.log, 1e-7, magnitude=True)


def mimo_mel(samples: Floats, n_mel: int) -> Floats:
    """Return the frames of a sound of MIMO_RATE samples a second."""
    bank = _mimo_bank(n_mel)
    return bank(reflected(samples, bank.window.size // 2))


@cache
def _conformer_bank(n_mel: int) -> Bank:
    window = hann(400, 512, periodic=False)
    return Bank(window, mel_filters(n_mel, 512, RATE), _HOP, np.log, adds_floor=True)


def conformer_mel(samples: Floats, n_mel: int) -> Floats:
    """Return frames with a mean of 0 and a deviation of 1 in each band; the last is 0. Raises MediaError."""
    mel = _emphasized_mel(samples, _conformer_bank(n_mel))
    n_valid = _normalize_bands(mel, samples.size)
    mel[n_valid:] = 0
    return mel


def parakeet_mel(samples: Floats, bank: Bank) -> Floats:
    """Return frames with a mean of 0 and a deviation of 1 in each band, but for the last. Raises MediaError."""
    mel = _emphasized_mel(samples, bank)
    _normalize_bands(mel, samples.size)
    return mel


def parakeet_bank(window: Floats, filters: Floats) -> Bank:
    """Return the bank for a window and filters of [n_mel, n_fft / 2 + 1] from a file."""
    n_fft = 2 * (filters.shape[1] - 1)
    return Bank(centered(window, n_fft), filters.T.astype(np.float64), _HOP, np.log, adds_floor=True)


def _emphasized_mel(samples: Floats, bank: Bank) -> Floats:
    """Return the frames of a sound with raised high frequencies between zeros."""
    sharp = samples.copy()
    sharp[1:] -= np.float32(0.97) * samples[:-1]
    return bank(np.pad(sharp, bank.window.size // 2))


def _normalize_bands(mel: Floats, n_samples: int) -> int:
    """Bring each band to a mean of 0 and a deviation of 1 in the frames within the sound, in place.

    Return the number of these frames. Raises MediaError if there are fewer than two.
    """
    n_valid = n_samples // _HOP
    if n_valid < 2:
        raise _too_short(2 * _HOP)
    valid = mel[:n_valid].astype(np.float64)
    mel -= valid.mean(axis=0)
    mel /= valid.std(axis=0, ddof=1) + 1e-5
    return n_valid


@cache
def _granite_bank(n_mel: int) -> Bank:
    return Bank(hann(400, 512), mel_filters(n_mel, 512, RATE, slaney=False), _HOP, floor=1e-10)


def granite_mel(samples: Floats, n_bins: int) -> Floats:
    """Return pairs of frames, each of `n_bins` / 2 bands: float32 [n_frames / 2, n_bins]. Raises MediaError."""
    bank = _granite_bank(n_bins // 2)
    pad = bank.window.size // 2
    at = np.arange(-pad, samples.size + pad)
    at = np.where(at < 0, np.minimum(-at, samples.size - 1), at)
    at = np.where(at >= samples.size, np.maximum(2 * samples.size - 2 - at, 0), at)
    mel = bank(samples[at])
    normalize_peak(mel)
    if len(mel) < 2:
        raise _too_short(_HOP)
    return mel[: len(mel) // 2 * 2].reshape(-1, 2 * mel.shape[1])


GEMMA4_SECONDS = 30


@cache
def _gemma4_bank(n_mel: int) -> Bank:
    window = np.pad(hann(320, 320), (0, 192))
    return Bank(window, mel_filters(n_mel, 512, RATE, slaney=False), _HOP, np.log, 1e-3, magnitude=True)


def gemma4_mel(samples: Floats, n_mel: int) -> list[Floats]:
    """Return pieces of 30 seconds. Raises MediaError if the sound has fewer than two samples."""
    bank = _gemma4_bank(n_mel)
    n_chunk = GEMMA4_SECONDS * RATE
    pieces = []
    for at in range(0, samples.size, n_chunk):
        chunk = samples[at : at + n_chunk]
        if chunk.size > 1:
            # 160 zeros before it; frames of 321 samples lie in it, of which the last counts for nothing.
            n_frames = max(0, chunk.size - 161) // _HOP + 1
            pieces.append(bank(np.pad(chunk, (160, 0)), n_frames))
    if not pieces:
        raise _too_short(2)
    return pieces


FRAME = 640
"""Samples of a frame of Gemma 4's encoder that takes samples as they are."""


def raw_frames(samples: Floats) -> Floats:
    """Return the samples in frames of FRAME; the last ends in zeros: float32 [n_frames, FRAME]."""
    return np.pad(samples, (0, -samples.size % FRAME)).reshape(-1, FRAME)


def _too_short(n_samples: int) -> MediaError:
    return MediaError(f"the sound is too short: this model needs at least {n_samples} samples")
