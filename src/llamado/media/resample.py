"""Resampling of sounds in a stream of blocks, as miniaudio's linear resampler does for llama.cpp.

A Butterworth low-pass filter of fourth order at half of the lower rate, before or behind linear interpolation, at the
higher of the two rates. Like miniaudio's, the result is one sample of the higher-rate stream late.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_ORDER = 4
_NEGLIGIBLE = 1e-12
"""The filter's response is cut off where it has decayed to this part."""

_SHORTEST = 2**14
"""Least length of a Fourier transform."""


class Resampler:
    """Resampler of one channel from `rate_in` to `rate_out` samples a second."""

    def __init__(self, rate_in: int, rate_out: int) -> None:
        divisor = math.gcd(rate_in, rate_out)
        self._in, self._out = rate_in // divisor, rate_out // divisor
        self._filter = LowPass(min(self._in, self._out) / max(self._in, self._out)) if self._in != self._out else None
        self._n_in = self._n_out = 0
        self._last = 0.0  # the input sample before those to come

    def push(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the samples that the next samples of the input complete."""
        if self._filter is None or not samples.size:
            return samples
        x: NDArray[np.float64] = samples.astype(np.float64)
        if self._in > self._out:
            return self._interpolated(self._filter.push(x)).astype(np.float32)
        return self._filter.push(self._interpolated(x)).astype(np.float32)

    def _interpolated(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the samples at the times of the output that lie in the next samples of the input."""
        first, self._n_in = self._n_in, self._n_in + x.size
        stop = -(-self._n_in * self._out // self._in)
        at = np.arange(self._n_out, stop, dtype=np.int64) * self._in
        self._n_out = stop
        whole, part = np.divmod(at, self._out)
        before = np.concatenate(([self._last], x))
        self._last = float(x[-1])
        left: NDArray[np.float64] = before[whole - first]
        found: NDArray[np.float64] = left + (before[whole - first + 1] - left) * (part / self._out)
        return found


def n_resampled(n: int, rate_in: int, rate_out: int) -> int:
    """Return how many samples llama.cpp takes of `n` resampled ones (ma_calculate_frame_count_after_resampling).

    It takes quotient and remainder of the rates for each other, so it may be one sample more or less than there are.
    """
    if rate_in == rate_out or n == 0:
        return n
    found = n * rate_out // rate_in
    return found + (found * (rate_in % rate_out) + found * (rate_in // rate_out) // rate_out <= n)


class LowPass:
    """Butterworth low-pass filter at a part `ratio` of half of the sampling rate, by overlapping Fourier transforms."""

    def __init__(self, ratio: float) -> None:
        sections = _sections(ratio)
        radius = max(float(np.abs(np.roots(a)).max()) for _, a in sections)
        n_taps = math.ceil(math.log(_NEGLIGIBLE) / math.log(radius)) + 1
        self._n_fft = 1 << (max(_SHORTEST, 4 * n_taps) - 1).bit_length()
        self._n_block = self._n_fft - n_taps
        self._response = np.ones(self._n_fft // 2 + 1, np.complex128)
        for b, a in sections:
            self._response *= np.fft.rfft(b, self._n_fft) / np.fft.rfft(a, self._n_fft)
        self._tail = np.zeros(n_taps)

    def push(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the next samples, filtered."""
        parts = [self._block(x[at : at + self._n_block]) for at in range(0, x.size, self._n_block)]
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def _block(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        n_taps = self._tail.size
        y = np.fft.irfft(np.fft.rfft(x, self._n_fft) * self._response, self._n_fft)[: x.size + n_taps]
        y[:n_taps] += self._tail
        self._tail = y[x.size :].copy()
        return y[: x.size]


def _sections(ratio: float) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return numerator and denominator of each section of second order (Audio EQ Cookbook: low-pass)."""
    w = math.pi * ratio
    found = []
    for i in range(_ORDER // 2):
        q = 0.5 / math.cos((2 * i + 1) * math.pi / (2 * _ORDER))
        alpha = math.sin(w) / (2 * q)
        gain = 2 * math.sin(w / 2) ** 2  # 1 - cos(w), without loss of digits
        b = np.array([gain / 2, gain, gain / 2]) / (1 + alpha)
        a = np.array([1, -2 * math.cos(w) / (1 + alpha), (1 - alpha) / (1 + alpha)])
        found.append((b, a))
    return found
