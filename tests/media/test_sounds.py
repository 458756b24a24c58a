"""Decoding of sound files: formats, rates, channels, limits, and hostile files."""

from __future__ import annotations

import itertools
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from media.sound_files import encoded, noise
from media.test_mel import signal
from numpy.typing import NDArray

import llamado
from llamado.media import sounds
from llamado.media.errors import MediaError
from llamado.media.media import MediaKind
from llamado.media.resample import Resampler
from llamado.media.sounds import SoundLimits, decode_sound, is_sound

RATE = 16000
SLOW_1_HZ = pytest.param(1, marks=pytest.mark.slow)


def wav(data: bytes, *, tag: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16, claimed: int = -1) -> bytes:
    """Return a WAV file with any header."""
    align = channels * bits // 8
    chunk = struct.pack("<4sIHHIIHH", b"fmt ", 16, tag, channels, rate, rate * align & 0xFFFFFFFF, align & 0xFFFF, bits)
    body = b"WAVE" + chunk + struct.pack("<4sI", b"data", len(data) if claimed < 0 else claimed) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body


@pytest.mark.parametrize(
    ("subtype", "error"),
    [("PCM_U8", 1e-2), ("PCM_16", 1e-4), ("PCM_24", 1e-6), ("PCM_32", 1e-7), ("FLOAT", 1e-7), ("DOUBLE", 1e-7)],
)
def test_wav(subtype: str, error: float) -> None:
    given = noise(500)
    media = decode_sound(encoded(given, RATE, subtype=subtype), RATE)
    assert media.kind is MediaKind.AUDIO and media.rate == RATE
    assert media.data.dtype == np.float32 and media.data.shape == (500,)
    np.testing.assert_allclose(media.data, given[:, 0], atol=error)


def test_bytes_of_a_wav_file_become_what_dr_wav_makes_of_them() -> None:
    sound = decode_sound(wav(bytes([0, 127, 128, 255]), bits=8), RATE).data
    np.testing.assert_allclose(sound, np.array([0, 127, 128, 255]) / 127.5 - 1, atol=1e-7)


@pytest.mark.parametrize(
    ("format", "subtype", "error"),
    [
        ("WAV", "ULAW", 0.02), ("WAV", "ALAW", 0.02), ("WAV", "IMA_ADPCM", 0.4), ("WAV", "MS_ADPCM", 0.4),
        ("WAVEX", "PCM_16", 1e-4), ("FLAC", "PCM_S8", 1e-2), ("FLAC", "PCM_16", 1e-4), ("FLAC", "PCM_24", 1e-6),
        ("MP3", "MPEG_LAYER_III", 0.05), ("OGG", "VORBIS", 0.05), ("OGG", "OPUS", 0.1),
    ],
)  # fmt: skip
def test_formats(format: str, subtype: str, error: float) -> None:
    rate = 48000 if subtype == "OPUS" else RATE
    given = 0.4 * np.sin(np.arange(rate // 4) * (2 * np.pi * 440 / rate))
    data = encoded(given, rate, format, subtype)
    assert is_sound(data)
    found = decode_sound(data, rate).data
    assert 0 <= found.size - given.size < 1200
    np.testing.assert_allclose(found[: given.size], given, atol=error)


@pytest.mark.parametrize("n_channels", range(1, 9))
def test_channels_are_averaged(n_channels: int) -> None:
    given = noise(300, n_channels)
    for format in ("WAV", "FLAC"):
        found = decode_sound(encoded(given, RATE, format, "PCM_24"), RATE).data
        np.testing.assert_allclose(found, given.mean(axis=1), atol=1e-6)


@pytest.mark.parametrize(
    ("rate_in", "rate_out", "n", "values"),
    # Samples 0, 1, 2, 100, the middle, the last but one, the last.
    [
        (44100, 16000, 1600, [0.0, 0.015134, 0.070149, 0.425894, 0.250108, -0.063837, -0.096182]),
        (8000, 16000, 1600, [0.0, 0.00094, 0.005639, 0.338579, 0.328726, -0.178902, -0.1215]),
        # One sample more than the rates give: llama.cpp's is zero.
        (48000, 24000, 2401, [0.0, 0.01211, 0.056878, -0.392135, 0.24548, -0.08587, 0.0]),
        # One less.
        (11025, 16000, 1599, [0.0, 0.003604, 0.023511, 0.36346, 0.303068, -0.148849, -0.095016]),
    ],
)
def test_resampling_equals_miniaudio(rate_in: int, rate_out: int, n: int, values: list[float]) -> None:
    found = decode_sound(encoded(signal(rate_in // 10, rate_in), rate_in, subtype="FLOAT"), rate_out).data
    assert found.size == n
    assert [float(v) for v in found[[0, 1, 2, 100, n // 2, -2, -1]]] == pytest.approx(values, abs=2e-6)


@pytest.mark.parametrize(("rate_in", "rate_out"), [(44100, 16000), (11025, 16000), (16000, 16000), (3, 7)])
def test_resampling_in_blocks(rate_in: int, rate_out: int) -> None:
    given = signal(40_000)
    whole = Resampler(rate_in, rate_out).push(given)
    blocks = Resampler(rate_in, rate_out)
    cuts = [0, 1, 2, 7, 500, 20_000, 20_000, 39_999, 40_000]
    parts = [blocks.push(given[at:stop]) for at, stop in itertools.pairwise(cuts)]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)


@pytest.mark.parametrize("rate_in", [SLOW_1_HZ, 7, 50, 1000, 8000, 11025, 12345, 96000, 192000, 384000, 768000])
def test_odd_rates(rate_in: int) -> None:
    n = min(max(rate_in // 20, 20), 20_000)
    found = decode_sound(encoded(np.full(n, 0.25), rate_in), RATE).data
    assert abs(found.size - n * RATE / rate_in) <= 1
    if found.size > 200:
        np.testing.assert_allclose(found[found.size // 2 : -1].mean(), 0.25, atol=0.03)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no bytes"),
        (b"RIFF", "unknown format"),
        (b"\x89PNG\r\n\x1a\n0000", "unknown format"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "unknown format"),
        (b"RIFF\0\0\0\0WAVE", "damaged"),
        (b"fLaC" + bytes(60), "damaged"),
        (b"OggS" + bytes(60), "damaged"),
        (b"ID3\x03" + bytes(60), "damaged"),
        (b"\xff\xfb" + bytes(60), "damaged"),
        (wav(b""), "no samples"),
        (wav(b"\0"), "no samples"),
        (wav(bytes(64), channels=0), "damaged"),
        (wav(bytes(64), rate=0), "damaged|samples a second"),
        (wav(bytes(64), rate=2**31), "damaged|samples a second"),
        (wav(bytes(64), rate=768_001), "samples a second"),
        (wav(bytes(64), bits=0), "damaged"),
        (encoded(noise(400), 8000, subtype="GSM610"), "not supported"),
        (wav(np.array([0.5, np.nan], "<f4").tobytes(), tag=3, bits=32), "not numbers"),
        (wav(np.array([0.5, -np.inf], "<f4").tobytes(), tag=3, bits=32), "not numbers"),
        (wav(np.array([0.5, 1e30], "<f4").tobytes(), tag=3, bits=32), "too large"),
        (wav(np.array([1e300], "<f8").tobytes(), tag=3, bits=64), "too large"),
    ],
)
def test_unusable_files(data: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        decode_sound(data, RATE)


def test_files_that_are_cut_off() -> None:
    given = noise(4000)
    cut = decode_sound(encoded(given, RATE)[:1001], RATE).data
    np.testing.assert_allclose(cut, given[: cut.size, 0], atol=1e-4)
    assert cut.size == (1001 - 44) // 2
    assert decode_sound(wav(bytes(200), claimed=2**32 - 1), RATE).data.size == 100
    assert 0 < decode_sound(encoded(given, RATE, "MP3", "MPEG_LAYER_III")[:1500], RATE).data.size < 4000


def test_equal_sounds_have_equal_digests() -> None:
    given = (noise(400) * 32767).astype(np.int16)
    first, second = (decode_sound(encoded(given, RATE, format), RATE) for format in ("WAV", "FLAC"))
    assert first.digest == second.digest
    assert decode_sound(encoded(given[1:], RATE), RATE).digest != first.digest


def test_limits() -> None:
    data = encoded(noise(RATE, 2), RATE, "FLAC")
    assert decode_sound(data, RATE, SoundLimits(len(data), 1, 2 * RATE)).data.size == RATE
    for limits, message in (
        (SoundLimits(bytes=len(data) - 1), "bytes"),
        (SoundLimits(seconds=0.999), "too long"),
        (SoundLimits(samples=2 * RATE - 1), "too long"),
    ):
        with pytest.raises(MediaError, match=message):
            decode_sound(data, RATE, limits)


def test_claimed_length_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that claims hours costs no memory: blocks have one size."""
    sizes: list[int] = []
    empty = np.empty

    def counted(shape: Any, *given: Any, **named: Any) -> NDArray[Any]:
        if isinstance(shape, tuple) and len(shape) == 2:
            sizes.append(shape[0] * shape[1])
        return empty(shape, *given, **named)

    monkeypatch.setattr(sounds.np, "empty", counted)
    data = bytearray(encoded(noise(3000, 2), 44100, "FLAC"))
    data[21:26] = bytes([data[21] | 0x0F, 255, 255, 255, 255])  # 2^36 - 1 frames
    try:
        assert decode_sound(bytes(data), 44100).data.size <= 3000
    except MediaError:
        pass
    decode_sound(wav(bytes(4000), channels=200, claimed=2**31), RATE)
    assert sizes and max(sizes) <= 2**18
    sizes.clear()
    decode_sound(wav(bytes(40_000), rate=50), 50)
    assert max(sizes) <= 128 * 50


def test_long_silence_in_few_bytes_stops_at_the_limit() -> None:
    data = encoded(np.zeros(RATE * 100), RATE, "FLAC")
    assert len(data) < 20_000
    with pytest.raises(MediaError, match="more than 20 seconds"):
        decode_sound(data, RATE, SoundLimits(seconds=20))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MediaError, match="the package soundfile"):
        decode_sound(wav(bytes(8)), RATE)


_CHILD = """
import resource, sys
import numpy as np
from media.test_sounds import mutants
from llamado.media.errors import MediaError
from llamado.media.sounds import SoundLimits, decode_sound
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = [0, 0]
for data in mutants(int(sys.argv[1])):
    try:
        media = decode_sound(data, 16000, SoundLimits(seconds=60))
        assert media.data.size and np.isfinite(media.data).all()
        found[0] += 1
    except MediaError:
        found[1] += 1
print(*found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def mutants(n: int) -> list[bytes]:
    """Return damaged sound files: changed, cut off, and with bytes pushed in between."""
    rng = np.random.default_rng(7)
    files = [
        encoded(noise(3000, channels), rate, format, subtype)
        for format, subtype, rate, channels in (
            ("WAV", "PCM_16", RATE, 1), ("WAV", "PCM_24", 8000, 6), ("WAV", "FLOAT", 44100, 2),
            ("WAV", "ULAW", 8000, 1), ("WAV", "IMA_ADPCM", RATE, 1), ("WAV", "MS_ADPCM", RATE, 2),
            ("FLAC", "PCM_16", 44100, 2), ("FLAC", "PCM_24", RATE, 1), ("OGG", "VORBIS", 48000, 2),
            ("OGG", "OPUS", 48000, 1), ("MP3", "MPEG_LAYER_III", 44100, 2), ("MP3", "MPEG_LAYER_III", RATE, 1),
        )
    ]  # fmt: skip
    files.append(b"ID3\x03\0\0\0\0\0\x10" + bytes(16) + files[-1])
    found = []
    for _ in range(n):
        data = bytearray(files[rng.integers(len(files))])
        kind = rng.integers(5)
        for _ in range(rng.integers(1, 12)):
            at = rng.integers(len(data) if kind < 2 else min(len(data), 120))
            data[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)]))
        if kind == 3:
            data = data[: rng.integers(1, len(data))]
        elif kind == 4:
            at = rng.integers(min(len(data), 200))
            data[at:at] = rng.bytes(rng.integers(1, 40))
        found.append(bytes(data))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("n", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_damaged_files_do_no_harm(n: int) -> None:
    """The decoders are written in C: a child process runs them, so that a crash shows as its exit status."""
    pytest.importorskip("resource")
    folders = [str(Path(llamado.__file__).parents[1]), str(Path(__file__).parents[1]), *sys.path]
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders!r}\n{_CHILD}", str(n)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    decoded, refused, mb = map(int, ran.stdout.split())
    assert decoded + refused == n and decoded > n // 10 and refused > n // 10
    assert mb < 200


def test_soundfile_has_the_formats() -> None:
    for format, subtypes in sounds._SUBTYPES.items():
        assert all(soundfile.check_format(format, name) for name in subtypes if not name.startswith("MPEG_LAYER_I")), (
            format
        )
