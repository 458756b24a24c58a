"""Encoders of sounds: embeddings that llama.cpp computed, errors in files and sounds, long sounds, weight types."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from media.test_mel import signal
from numpy.typing import NDArray
from projectors import spec
from projectors.sounds import GEMMA4A, GEMMA4UA, GLMA, LFM2A, MIMO, PARAKEET, QWEN2A, QWEN3A, SOUNDS, ULTRAVOX, granite
from projectors.spec import TinyProjector
from tiers import chosen

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.ggml.graph import Graph, new_tensor
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import MediaChunk
from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.encoder import EncoderPass, MediaEncoder
from llamado.models.encoders.registry import SOUNDS as REGISTERED
from llamado.models.encoders.sounds import conformer, granite_speech, parakeet
from llamado.models.encoders.sounds.conformer import RelativeAttention, Window
from llamado.models.encoders.sounds.encoder import SoundEncoder
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Linear

Floats = NDArray[np.float32]
RATE = 16000

# Tokens of a sound of 1.5 seconds; values at token 0, column 0, at a third, 5, the middle, 31, and the last, 63; their
# root mean square. From the real mtmd of b11434.
KNOWN: dict[str, tuple[int, list[float], float]] = {
    "ultravox": (187, [-1.1507, -0.7388, -1.7902, 1.3362], 1.0136),
    "voxtral": (187, [0.2889, 0.3517, 0.3282, 0.5712], 0.5600),
    "qwen2a": (750, [-0.1062, 1.8009, 1.9578, -1.0675], 1.0932),
    "qwen2.5o": (750, [-0.1062, 1.8009, 1.9578, -1.0675], 1.0932),
    "musicflamingo": (750, [0.2939, -0.7778, 0.1126, -0.1698], 0.7438),
    "meralion": (100, [-0.334, -0.149, 0.0069, 0.3929], 0.3042),
    "glma": (377, [-0.1668, -0.9021, 0.9031, -0.0358], 0.6267),
    "qwen3a": (26, [0.033, 0.3225, 0.6416, -0.1221], 0.6212),
    "lfm2a": (19, [0.1246, 0.138, 0.0664, -0.1794], 0.2496),
    "parakeet": (19, [1.1493, -0.936, 0.3297, 2.0598], 0.9968),
    "granite_speech": (15, [1.792, -0.1536, -2.6452, 0.912], 1.2227),
    "granite_speech-features": (15, [0.5578, -1.4305, -0.0818, 0.0909], 0.9992),
    "gemma4a": (38, [-1.7533, -1.2074, 0.3542, -0.0473], 1.0194),
    "gemma4ua": (38, [0.4829, -1.1705, 0.3601, 0.8943], 0.9886),
    "dots3note_a": (19, [-0.4519, -0.6691, -0.166, -0.6459], 0.8062),
    "mimo_audio": (10, [-0.5053, -0.2865, -0.2775, -0.0236], 0.5536),
}
QUICK = [tiny for tiny in SOUNDS if not tiny.name.startswith(("ultra", "vox", "qwen2", "music", "mera", "glma"))]
"""Encoders that do not pad every sound to 30 seconds: their graphs are small."""
SHORTEST = [tiny for tiny in QUICK if tiny.name in ("qwen3a", "parakeet", "gemma4a", "mimo_audio")]
"""Encoders whose shortest sounds are tested by default: one for each way of cutting sounds into chunks."""


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit()


def sound(n: int = 24000, rate: int = RATE) -> Media:
    return Media(MediaKind.AUDIO, signal(n, rate), rate)


def rate_of(tiny: TinyProjector) -> int:
    return 24000 if tiny.projector == "mimo_audio" else RATE


def sound_for(tiny: TinyProjector) -> Media:
    """Return a sound of 1.5 seconds."""
    return sound(rate_of(tiny) * 3 // 2, rate_of(tiny))


def chunks_of(encoder: MediaEncoder, media: Media) -> list[MediaChunk]:
    return [piece for piece in encoder.prepare(media) if isinstance(piece, MediaChunk)]


def embed(tiny: TinyProjector, path: Path, media: Media, jit: Jit, wtype: str = "F32") -> list[Floats]:
    """Return the embeddings of each piece of a sound."""
    file, encoder = spec.encoder_of(spec.make(tiny, path, wtype=wtype), MediaKind.AUDIO)
    device = CpuDevice(2, jit=jit)
    return [spec.encode(device, file, encoder, chunk.input) for chunk in chunks_of(encoder, media)]


def test_every_projector_is_known() -> None:
    assert [tiny.name for tiny in SOUNDS] == list(KNOWN)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", SOUNDS, ids=lambda tiny: tiny.name)
def test_embeddings_are_those_of_llama_cpp(tiny: TinyProjector, tmp_path: Path, jit: Jit) -> None:
    n, values, size = KNOWN[tiny.name]
    (found,) = embed(tiny, tmp_path / "mmproj.gguf", sound_for(tiny), jit)
    assert found.shape == (n, tiny.n_embd)
    at = [(0, 0), (n // 3, 5), (n // 2, 31), (n - 1, 63)]
    assert [float(found[i]) for i in at] == pytest.approx(values, abs=5e-3 * max(size, 1))
    assert math.sqrt((found**2).mean()) == pytest.approx(size, rel=2e-3)


@pytest.mark.parametrize("tiny", SOUNDS, ids=lambda tiny: tiny.name)
def test_texts_surround_the_chunks(tiny: TinyProjector, tmp_path: Path) -> None:
    _, encoder = spec.encoder_of(spec.make(tiny, tmp_path / "mmproj.gguf"), MediaKind.AUDIO)
    pieces = encoder.prepare(sound_for(tiny))
    assert tuple(piece for piece in pieces if isinstance(piece, str)) == tiny.tokens
    (chunk,) = (piece for piece in pieces if isinstance(piece, MediaChunk))
    assert chunk.n_tokens == KNOWN[tiny.name][0] and chunk.kind is MediaKind.AUDIO
    assert pieces.index(chunk) == min(1, len(tiny.tokens))
    assert encoder.rate == rate_of(tiny) and encoder.n_embd == tiny.n_embd
    graph = encoder.build(chunk.input.shape)
    assert {name: t.nbytes for name, t in graph.inputs.items()} == {k: v.nbytes for k, v in chunk.input.arrays.items()}


def test_digests_differ_by_sound_and_piece(tmp_path: Path) -> None:
    _, encoder = spec.encoder_of(spec.make(GEMMA4A, tmp_path / "mmproj.gguf"), MediaKind.AUDIO)
    silence = Media(MediaKind.AUDIO, np.zeros(RATE * 61, np.float32), RATE)
    first, second, _ = (chunk.digest for chunk in chunks_of(encoder, silence))
    (other,) = (chunk.digest for chunk in chunks_of(encoder, sound()))
    assert len({first, second, other}) == 3
    assert chunks_of(encoder, silence)[0].digest == first


@pytest.mark.slow
def test_unusable_sounds(tmp_path: Path) -> None:
    _, encoder = spec.encoder_of(spec.make(LFM2A, tmp_path / "mmproj.gguf"), MediaKind.AUDIO)
    picture = Media(MediaKind.IMAGE, np.zeros((4, 4, 3), np.uint8))
    empty = Media(MediaKind.AUDIO, np.zeros(0, np.float32), RATE)
    for media, message in (
        (picture, "16000 samples a second"),
        (sound(rate=24000), "16000 samples a second"),
        (empty, "no samples"),
        (sound(319), "too short"),
        (sound(160 * 4001), "too long"),
    ):
        with pytest.raises(MediaError, match=message):
            encoder.prepare(media)
    assert len(chunks_of(encoder, sound(160 * 4001 - 1))) == 1
    _, encoder = spec.encoder_of(spec.make(MIMO, tmp_path / "mimo.gguf"), MediaKind.AUDIO)
    for samples, message in ((sound(479, 24000).data, "too short"), (np.zeros(24000 * 164, np.float32), "too long")):
        with pytest.raises(MediaError, match=message):
            encoder.prepare(Media(MediaKind.AUDIO, samples, 24000))


@pytest.mark.slow
@pytest.mark.parametrize("tiny", chosen(QUICK, SHORTEST, lambda tiny: str(tiny.name)))
def test_shortest_sounds(tiny: TinyProjector, tmp_path: Path, jit: Jit) -> None:
    for n in (2, 160, 320, 641):
        try:
            found = embed(tiny, tmp_path / "mmproj.gguf", sound(n, rate_of(tiny)), jit)
        except MediaError as error:
            assert "too short" in str(error) and n < (480 if tiny.projector == "mimo_audio" else 320)
        else:
            assert all(len(rows) and np.isfinite(rows).all() for rows in found)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [QWEN3A, PARAKEET, GEMMA4A, granite("")], ids=lambda tiny: tiny.name)
def test_half_precision_weights(tiny: TinyProjector, tmp_path: Path, jit: Jit) -> None:
    (plain,) = embed(tiny, tmp_path / "plain.gguf", sound(), jit)
    (found,) = embed(tiny, tmp_path / "mmproj.gguf", sound(), jit, "F16")
    assert float((plain * found).sum() / np.linalg.norm(plain) / np.linalg.norm(found)) > 0.9999
    assert not np.array_equal(plain, found)


@pytest.mark.parametrize(
    ("tiny", "change", "message"),
    [
        (QWEN2A, {"a.conv1d.1.weight": (3, 15, 80)}, "a.conv1d.1.weight"),
        (QWEN2A, {"a.conv1d.1.bias": (1, 79)}, "80 numbers"),
        (QWEN2A, {"a.position_embd.weight": (80, 1499)}, "1499 positions"),
        (QWEN2A, {"mm.a.fc.weight": None}, "mm.a.fc.weight"),
        (ULTRAVOX, {"mm.a.norm_mid.weight": 47}, "mm.a.norm_mid.weight"),
        (GLMA, {"v.boi": None}, "v.boi"),
        (QWEN3A, {"a.conv_out.weight": (41, 80)}, "a.conv_out.weight"),
        (QWEN3A, {"a.position_embd.weight": (80, 12)}, "a.position_embd.weight"),
        (LFM2A, {"a.conv1d.5.weight": (3, 3, 1, 11)}, "a.conv1d.5.weight"),
        (PARAKEET, {"a.window": 399}, "399"),
        (PARAKEET, {"a.mel_filters": None}, "a.mel_filters"),
        (GEMMA4UA, {"mm.a.input_projection.weight": (641, 64)}, "mm.a.input_projection.weight"),
        (GEMMA4A, {"a.conv1d.1.norm.weight": 9}, "a.conv1d.1.norm.weight"),
        (MIMO, {"a.downsample.conv.weight": (3, 80, 80)}, "a.downsample.conv.weight"),
        (MIMO, {"a.rvq.codebook.weight": (80, 15, 3)}, "codebook_size"),
        (granite(""), {"a.proj_query": (80, 4)}, "a.proj_query"),
    ],
)
def test_unusable_tensors(
    tiny: TinyProjector, change: dict[str, spec.Shape | None], message: str, tmp_path: Path
) -> None:
    tensors = {name: shape for name, shape in {**tiny.tensors, **change}.items() if shape is not None}
    path = spec.make(replace(tiny, tensors=tensors), tmp_path / "mmproj.gguf")
    with pytest.raises(InvalidModel, match=message):
        spec.encoder_of(path, MediaKind.AUDIO)


@pytest.mark.parametrize(
    ("tiny", "keys", "error", "message"),
    [
        (LFM2A, {"attention.head_count": 7}, InvalidModel, "7 heads"),
        (PARAKEET, {"subsampling_factor": 4}, UnsupportedModel, "must be 8"),
        (PARAKEET, {"conv_kernel_size": 8}, InvalidModel, "odd"),
        (GEMMA4A, {"attention.head_count": 3}, InvalidModel, "3 heads"),
        (MIMO, {"wa_pattern_mode": [-1, 0, -1]}, InvalidModel, "3 values for 4 layers"),
        (MIMO, {"rvq.codebook_size": [16, 21, 8]}, InvalidModel, "codebook_size"),
        (MIMO, {"rvq.num_quantizers": 2}, InvalidModel, "codebook_size"),
        (granite(""), {"num_mel_bins": 15}, InvalidModel, "even"),
        (granite(""), {"max_pos_emb": 18}, InvalidModel, "too few"),
        (granite(""), {"max_pos_emb": 46}, InvalidModel, "attn_rel_pos_emb"),
        (granite(""), {"feature_layer": [3]}, InvalidModel, "feature_layer"),
        (granite(""), {"feature_layer": [-1]}, InvalidModel, "feature_layer"),
        (granite(""), {"projector.downsample_rate": 16}, InvalidModel, "exceeds the window"),
        (granite(""), {"projector.head_count": 3}, InvalidModel, "3 heads"),
    ],
)
def test_unusable_keys(
    tiny: TinyProjector, keys: dict[str, object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = spec.make(replace(tiny, keys={**tiny.keys, **keys}), tmp_path / "mmproj.gguf")
    with pytest.raises(error, match=message):
        spec.encoder_of(path, MediaKind.AUDIO)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [PARAKEET, granite("")], ids=lambda tiny: tiny.name)
def test_blocks_of_attention_do_not_show(
    tiny: TinyProjector, tmp_path: Path, jit: Jit, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = embed(tiny, tmp_path / "mmproj.gguf", sound(16000 * 8), jit)
    for module in (conformer, granite_speech):
        monkeypatch.setattr(module, "_MOST_SCORES", 5 * 100 * 7)
    (found,) = embed(tiny, tmp_path / "mmproj.gguf", sound(16000 * 8), jit)
    assert np.array_equal(found, whole)


@pytest.mark.slow
def test_long_sounds_of_parakeet_attend_nearby(tmp_path: Path, jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames in reach of all others give the same embeddings; with a shorter reach, they change."""
    path = tmp_path / "mmproj.gguf"
    (whole,) = embed(PARAKEET, path, sound(), jit)
    monkeypatch.setattr(parakeet, "_MOST_FULL", 10)
    for reach, same in ((19, True), (18, True), (5, False)):
        monkeypatch.setattr(parakeet, "_REACH", reach)
        (found,) = embed(PARAKEET, path, sound(), jit)
        assert np.allclose(found, whole, atol=1e-4) is same


@pytest.mark.parametrize(("n", "n_block", "reach"), [(9, 9, None), (9, 4, None), (1, 1, None), (23, 6, 3), (5, 8, 4)])
def test_attention_with_relative_positions(n: int, n_block: int, reach: int | None, jit: Jit) -> None:
    """Compare with the definition: scores q · k + q · p[distance] for each pair in reach."""
    dim, n_head = 8, 2
    n_embd = dim * n_head
    window = Window(n, n_block, reach)
    rng = np.random.default_rng(n)
    values = {name: rng.standard_normal((n_embd, n_embd)).astype(np.float32) / 4 for name in ("q", "k", "v", "o", "p")}
    u, v = (rng.standard_normal((n_head, dim)).astype(np.float32) for _ in range(2))
    x = rng.standard_normal((n, n_embd)).astype(np.float32)

    weights = {name: new_tensor(TensorType.F32, n_embd, n_embd, name=name) for name in values}
    biases = [new_tensor(TensorType.F32, dim, n_head, name=name) for name in ("bias_u", "bias_v")]
    q, k, v_, out = (Linear(weights[name]) for name in ("q", "k", "v", "o"))
    attention = RelativeAttention(q, k, v_, out, weights["p"], *biases, n_head)
    step = EncoderPass(1e-5)
    result = attention(step, step.input("x", n_embd, n), window, "0")
    step.graph.output("result", result)
    loaded: list[tuple[Tensor, Floats]] = [(weights[name], values[name]) for name in values]
    found = _run(step.graph, [*loaded, *zip(biases, (u, v), strict=True)], {"x": x, **window.arrays(n_embd)}, jit)

    heads = {name: (x @ values[name].T).reshape(n, n_head, dim) for name in ("q", "k", "v")}
    expected = np.zeros((n, n_head, dim))
    for at in range(n):
        keys = [key for key in range(n) if reach is None or abs(at - key) <= reach]
        positions = np.stack([_position(at - key, n_embd) for key in keys]) @ values["p"].T
        for h in range(n_head):
            scores = heads["k"][keys, h] @ (heads["q"][at, h] + u[h])
            scores += positions.reshape(-1, n_head, dim)[:, h] @ (heads["q"][at, h] + v[h])
            part = np.exp((scores - scores.max()) / math.sqrt(dim))
            expected[at, h] = part @ heads["v"][keys, h] / part.sum()
    np.testing.assert_allclose(found, expected.reshape(n, n_embd) @ values["o"].T, atol=2e-3)


def _position(distance: int, n_embd: int) -> Floats:
    angles = distance * 10000.0 ** (-np.arange(0, n_embd, 2) / n_embd)
    return np.stack([np.sin(angles), np.cos(angles)], axis=1).reshape(n_embd).astype(np.float32)


def _run(graph: Graph, weights: list[tuple[Tensor, Floats]], inputs: dict[str, Floats], jit: Jit) -> Floats:
    device = CpuDevice(1, jit=jit)
    device.load([(tensor, values.reshape(-1).view(np.uint8)) for tensor, values in weights])
    (out,) = graph.outputs.values()
    device.place([*graph.inputs.values(), out])
    for name, tensor in graph.inputs.items():
        device.write(tensor, inputs[name].reshape(-1).view(np.uint8))
    device.submit(graph)
    read: Floats = device.read(out, 0, out.nbytes).result().view(np.float32).reshape(out.ne[1], out.ne[0])
    return read.copy()


def test_blocks_cover_all_frames() -> None:
    for window in (Window.of(10, 4), Window.of(5000, 8), Window.of(20_000, 8, 128), Window.of(1, 1, 128)):
        blocks = list(window.blocks())
        assert [i for block in blocks for i in block.queries] == list(range(window.n))
        assert all(len(block.queries) * len(block.keys) * 8 <= 2**24 for block in blocks)
        assert all(0 <= min(window.distances(block)) <= max(window.distances(block)) for block in blocks)
        assert all(max(window.distances(block)) < 2 * window.n_distances - 1 for block in blocks)


def test_every_encoder_of_sounds_is_one() -> None:
    assert all(issubclass(projector.load(), SoundEncoder) for projector in REGISTERED.values())
    assert set(REGISTERED) == {tiny.projector for tiny in SOUNDS}
