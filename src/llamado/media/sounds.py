"""Decoding of sound files: WAV, MP3, FLAC and Ogg to one channel at a given rate, within hard limits.

libsndfile decodes (through soundfile), in blocks, so that the memory used does not depend on what a file claims.
Mixing and resampling are those of miniaudio, which llama.cpp uses: the same file gives the same samples.
"""

from __future__ import annotations

import importlib
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.media.resample import Resampler, n_resampled

_SUBTYPES = {
    "WAV": {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM"},
    "FLAC": {"PCM_S8", "PCM_16", "PCM_24"},
    "MP3": {"MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"},
    "OGG": {"VORBIS", "OPUS"},
}
"""Encodings by format, as soundfile names them."""

_FORMATS = {"WAVEX": "WAV"}
"""Second names of formats."""

_HIGHEST_RATE = 768_000
_BLOCK, _BLOCK_SECONDS = 2**16, 128
_LOUDEST = 1e6
"""Floats of more are no sound, and their squares overflow in an encoder."""


@dataclass(frozen=True, slots=True)
class SoundLimits:
    """Limits of a sound: bytes of the file, seconds, and samples of all channels before mixing."""

    bytes: int = 64 * 2**20
    seconds: float = 1800
    samples: int = 2**29


DEFAULT_LIMITS = SoundLimits()


def is_sound(data: bytes) -> bool:
    """Return True if the first bytes are those of a sound file that `decode_sound` may read."""
    return _format(data) is not None


def decode_sound(data: bytes, rate: int, limits: SoundLimits = DEFAULT_LIMITS) -> Media:
    """Decode a sound file to one channel of `rate` samples a second.

    A WAV or MP3 file that is cut off gives the samples that it has. Raises MediaError if there are none, or if the file
    is of another format, damaged or beyond a limit.
    """
    if not data:
        raise MediaError("the sound is empty: it has no bytes")
    if len(data) > limits.bytes:
        raise MediaError(f"the sound has {len(data):,} bytes; at most {limits.bytes:,} are accepted")
    format = _format(data)
    if format is None:
        raise MediaError("the sound is of an unknown format; WAV, MP3, FLAC and Ogg are accepted")
    soundfile = _library()
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            samples = _read(file, format, rate, limits)
    except soundfile.SoundFileError as error:
        reason = getattr(error, "error_string", error)
        raise MediaError(f"the {format} sound is damaged: {reason}") from error
    if not samples.size:
        raise MediaError(f"the {format} sound is empty: it has no samples")
    return Media(MediaKind.AUDIO, samples, rate)


def _format(data: bytes) -> str | None:
    """Return the format that the first bytes are of, as llama.cpp's is_audio_file; Ogg as well."""
    if len(data) < 12:
        return None
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "WAV"
    if data[:3] == b"ID3" or (data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return "MP3"
    return {b"fLaC": "FLAC", b"OggS": "OGG"}.get(data[:4])


def _library() -> Any:
    try:
        return importlib.import_module("soundfile")
    except (ImportError, OSError) as error:  # OSError: the package has no libsndfile for this system
        raise MediaError(
            f"sounds cannot be decoded here: the package soundfile or its library libsndfile is missing ({error})"
        ) from error


def _read(file: Any, format: str, rate: int, limits: SoundLimits) -> NDArray[np.float32]:
    """Decode, mix and resample an open file block by block. Raises MediaError, or what soundfile raises."""
    found = _FORMATS.get(file.format, file.format)
    if found != format or file.subtype not in _SUBTYPES[format]:
        raise MediaError(f"the sound is encoded as {file.format} {file.subtype}, which is not supported")
    if not 0 < file.samplerate <= _HIGHEST_RATE:
        raise MediaError(f"the sound has {file.samplerate} samples a second; 1 to {_HIGHEST_RATE:,} are accepted")
    if file.channels < 1:
        raise MediaError("the sound has no channels")
    most = min(int(limits.seconds * file.samplerate), limits.samples // file.channels)
    # A block of a low rate becomes long when it is resampled.
    n_block = min(_BLOCK, 4 * _BLOCK // file.channels, _BLOCK_SECONDS * file.samplerate)
    block = np.empty((n_block, file.channels), np.float32)
    resampler = Resampler(file.samplerate, rate)
    parts: list[NDArray[np.float32]] = []
    n_frames = 0
    while len(frames := file.read(out=block)):
        n_frames += len(frames)
        if n_frames > most:
            raise MediaError(
                f"the sound is too long: more than {limits.seconds:g} seconds or {limits.samples:,} samples"
            )
        mono = _mixed(frames)
        # False for NaN as well.
        if not max(mono.max(), -mono.min()) <= _LOUDEST:
            raise MediaError(f"the {format} sound has samples that are not numbers, or too large")
        if file.subtype == "PCM_U8":
            # From libsndfile's scale, n / 128 - 1, to dr_wav's, n / 127.5 - 1.
            mono = (mono * np.float32(128) + np.float32(0.5)) / np.float32(127.5)
        parts.append(resampler.push(mono))
    samples = np.concatenate(parts) if parts else np.empty(0, np.float32)
    n = n_resampled(n_frames, file.samplerate, rate)
    return np.pad(samples[:n], (0, max(0, n - samples.size)))


def _mixed(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean of all channels of each frame. Adding columns is faster than numpy's mean of short rows."""
    mono = frames[:, 0].copy()
    for i in range(1, frames.shape[1]):
        mono += frames[:, i]
    return mono if frames.shape[1] == 1 else mono / np.float32(frames.shape[1])
