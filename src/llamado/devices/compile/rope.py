"""Position parameters of attention: the angles of rotations (RoPE), and the slopes of distance biases (ALiBi)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.ops import RopeMode


def rope_frequencies(
    n_dims: int, n_ctx_orig: int, parameters: tuple[float, ...], places: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.float64], float]:
    """Return the angle per position of each pair (f64[n_dims/2]) and the magnitude of the rotation.

    `places` are the places of the pairs in the geometric series of frequencies; None: 0, 1, 2 and so on.

    RoPE (Su et al. 2021) with `parameters` (base, scale, ext_factor, attn_factor, beta_fast, beta_slow) as in ROPE's
    op_params: position interpolation by `scale`, and YaRN (Peng et al. 2023) if `ext_factor` > 0: pairs below the ramp
    keep their frequency, those above are interpolated.
    """
    base, scale, ext_factor, attn_factor, beta_fast, beta_slow = parameters
    i = np.arange(n_dims // 2 if places is None else places.size, dtype=np.float64)
    plain = float(base) ** (-2.0 * (i if places is None else places) / n_dims)
    frequencies, magnitude = plain * scale, attn_factor
    if ext_factor:

        def pair(rotations: float) -> float:
            return n_dims * math.log(n_ctx_orig / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(0.0, math.floor(pair(beta_fast))), min(n_dims - 1.0, math.ceil(pair(beta_slow)))
        ramp = 1.0 - np.clip((i - low) / max(0.001, high - low), 0.0, 1.0)
        mix = ramp * ext_factor
        frequencies = frequencies * (1 - mix) + plain * mix
        magnitude *= 1.0 + 0.1 * math.log(1.0 / scale)
    return np.ascontiguousarray(frequencies), float(magnitude)


def sections_of_pairs(n_pairs: int, mode: RopeMode, lengths: tuple[int, ...]) -> NDArray[np.int64] | None:
    """Return for each pair the one of a token's four positions that rotates it (M-RoPE, arXiv 2409.12191); None for
    other modes.

    MROPE, VISION: sections of these lengths follow one another and repeat. IMROPE: the first three alternate while they
    last, and the fourth has the rest.
    """
    if mode not in (RopeMode.MROPE, RopeMode.IMROPE, RopeMode.VISION):
        return None
    place = np.arange(n_pairs) % max(1, sum(lengths))
    if mode is not RopeMode.IMROPE:
        return np.searchsorted(np.cumsum(lengths[:3]), place, side="right").astype(np.int64)
    turn = place % 3
    return np.where(place < 3 * np.array(lengths)[turn], turn, 3).astype(np.int64)


def places_in_sections(n_pairs: int, lengths: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the place of each pair in its section: in VISION mode, the frequencies of each section begin anew."""
    place = np.arange(n_pairs) % max(1, sum(lengths))
    starts = np.cumsum([0, *lengths[:3]])
    found: NDArray[np.int64] = place - starts[np.searchsorted(starts[1:], place, side="right")]
    return found


def alibi_slopes(n_heads: int, max_bias: float) -> NDArray[np.float32]:
    """Return each head's factor for the mask (ALiBi, Press et al. 2021): even powers of ½ down to 2^−max_bias.

    Heads beyond a power of two lie in between. All factors are 1 without a bias.
    """
    if max_bias <= 0:
        return np.ones(n_heads, np.float32)
    n = 1 << (n_heads.bit_length() - 1)
    head = np.arange(n_heads)
    whole, half = 2.0 ** (-max_bias / n), 2.0 ** (-max_bias / 2 / n)
    slopes: NDArray[np.float64] = np.where(head < n, whole ** (head + 1.0), half ** (2.0 * (head - n) + 1))
    return slopes.astype(np.float32)
