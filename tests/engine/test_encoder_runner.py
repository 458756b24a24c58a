"""Encoders in segments: the bits of the whole graph, wherever it is cut, and errors that name what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from projectors import every, spec, text
from projectors.siglip import GEMMA3
from tiny_models import make_gemma3, make_llama

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.device import DeviceError
from llamado.engine.errors import EngineError
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.media import encoder_runner, placed_encoders, segments
from llamado.engine.media.encoder_runner import EncoderRunner, fingerprint, memory_needed
from llamado.engine.media.segments import SegmentedGraph, cost_of, cut_points
from llamado.engine.options import EngineOptions
from llamado.ggml.graph import Graph, add, mul_mat, new_tensor
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput, MediaChunk, Piece
from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.models import UnsupportedModel
from llamado.models.encoders.one_size.siglip import Gemma3Encoder
from llamado.models.encoders.registry import MediaEncoders, load_encoders

Array = np.ndarray[Any, Any]
N_PATCHES, N_TOKENS = 64, 4


def patches(seed: int = 0) -> EncoderInput:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((N_PATCHES, 48)).astype(np.float32)
    return EncoderInput((N_PATCHES,), {"patches": rows, "order": np.arange(N_PATCHES, dtype=np.int32)})


def chunk(seed: int = 0, n: int = N_TOKENS) -> MediaChunk:
    return MediaChunk(MediaKind.IMAGE, patches(seed), n, bytes([seed]))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spec.make(GEMMA3, tmp_path_factory.mktemp("projector") / "mmproj.gguf")


@pytest.fixture
def runner(path: Path, jit: Jit) -> Iterator[EncoderRunner]:
    file = GGUFFile.open(path)
    with closing(EncoderRunner(file, load_encoders(file), CpuDevice(1, jit=jit))) as found:
        yield found


def encoded(runner: EncoderRunner, chunk: MediaChunk) -> tuple[Array, int]:
    """Return the embeddings, and the number of calls that it took."""
    run = runner.begin(chunk)
    for calls in range(1, 1000):
        rows = run.advance()
        if rows is not None:
            return rows, calls
    raise AssertionError("it does not end")


@pytest.fixture(scope="module")
def right(path: Path, jit: Jit) -> Array:
    file, encoder = spec.encoder_of(path)
    with closing(file):
        return spec.encode(CpuDevice(1, jit=jit), file, encoder, patches())


@pytest.mark.parametrize("least", [1, 1e5, 1e12])
def test_segments_have_the_bits_of_the_whole(
    runner: EncoderRunner, right: Array, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_LEAST_COST", least)
    rows, _ = encoded(runner, chunk())
    assert rows.tobytes() == right.tobytes()
    other, _ = encoded(runner, chunk(1))
    assert other.tobytes() != right.tobytes()
    again, _ = encoded(runner, chunk())
    assert again.tobytes() == right.tobytes(), "results of different segments share memory"
    (graph,) = runner.here().graphs.values()
    assert (len(graph.graphs) == 1) == (least > 1e6)
    if len(graph.graphs) > 1:  # places are used again
        crossing = sum(tensor.nbytes for part in graph.graphs for tensor in part.outputs.values())
        assert sum(buffer.size for buffer in graph._buffers) < crossing


def test_it_returns_to_the_engine_when_time_is_up(runner: EncoderRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_LEAST_COST", 1)
    rows, once = encoded(runner, chunk())
    (graph,) = runner.here().graphs.values()
    runner.here().pace = 1e15  # everything fits
    assert encoded(runner, chunk())[1] <= once
    monkeypatch.setattr(encoder_runner, "_SECONDS", -1.0)
    slow, calls = encoded(runner, chunk())
    assert calls == len(graph.graphs) and slow.tobytes() == rows.tobytes()


def test_few_graphs_are_kept(runner: EncoderRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_encoders, "_GRAPHS_KEPT", 1)
    freed: list[SegmentedGraph] = []
    free = SegmentedGraph.free
    monkeypatch.setattr(SegmentedGraph, "free", lambda self: (freed.append(self), free(self)))
    encoder = runner.encoders.image
    assert encoder is not None
    first, _ = encoded(runner, chunk())
    build = encoder.build
    monkeypatch.setattr(encoder, "build", lambda shape: build(shape[:1]))
    runner.begin(replace(chunk(), input=replace(patches(), shape=(N_PATCHES, 1))))
    assert len(freed) == 1 and len(runner.here().graphs) == 1
    assert encoded(runner, chunk())[0].tobytes() == first.tobytes() and len(freed) == 2


def test_wrong_inputs_and_outputs_are_refused(runner: EncoderRunner) -> None:
    lacking = replace(chunk(), input=EncoderInput((N_PATCHES,), {"order": patches().arrays["order"]}))
    with pytest.raises(MediaError, match=r"input 'patches' takes 12288 bytes, and none are given"):
        runner.begin(lacking)
    short = {**patches().arrays, "patches": np.zeros(3, np.float32)}
    with pytest.raises(MediaError, match="takes 12288 bytes, and 12 bytes are given"):
        runner.begin(replace(chunk(), input=EncoderInput((N_PATCHES,), short)))
    with pytest.raises(MediaError, match="computed 4 embeddings for 5 tokens of 64 elements"):
        encoded(runner, chunk(n=5))


def test_error_of_a_device_names_the_encoder(runner: EncoderRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Graph) -> None:
        raise DeviceError("CPU lacks 3 GiB")

    monkeypatch.setattr(runner.device, "submit", fail)
    with pytest.raises(DeviceError, match=r"CPU lacks 3 GiB \(while encoding media on CPU\)"):
        encoded(runner, chunk())


def test_cuts_are_where_few_bytes_cross() -> None:
    costs = [4, 4, 4, 4, 4, 4, 4, 4]
    crossing = [0, 9, 9, 1, 9, 9, 2, 9, 0]
    assert cut_points(costs, crossing, 16) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert cut_points(costs, [1] * 9, 16) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert cut_points([100, 1, 1, 100], [0] * 5, 10) == [0, 1, 1, 2]
    assert cut_points([1, 1], [0, 0, 0], 10) == [0, 0]
    assert cut_points([], [0], 10) == []


def test_cost_of_operations() -> None:
    a, b = new_tensor(TensorType.F32, 32, 7), new_tensor(TensorType.F32, 32, 5)
    product = mul_mat(a, b)
    assert cost_of(product) == 2 * 32 * 7 * 5
    assert cost_of(add(product, product)) == 16 * 35


def test_fingerprint_tells_projectors_apart(path: Path, tmp_path: Path) -> None:
    other = spec.make(GEMMA3, tmp_path / "other.gguf", seed=1)
    mean = spec.make(replace(GEMMA3, keys={**GEMMA3.keys, "image_mean": [0.1, 0.2, 0.3]}), tmp_path / "mean.gguf")
    found = []
    for one in (path, other, mean):
        with closing(GGUFFile.open(one)) as file:
            found += [fingerprint(file, numerics) for numerics in ("a", "b")]
    assert len(set(found)) == 6
    with closing(GGUFFile.open(path)) as file:
        assert fingerprint(file, "a") == found[0]


def prepared(self: Gemma3Encoder, media: Media) -> list[Piece]:
    """Stand-in for the preparation of pictures: random patches that depend on the picture."""
    seed = int(media.data.sum()) % 1000
    own = MediaChunk(MediaKind.IMAGE, patches(seed), N_TOKENS, media.digest, causal=False)
    return ["<start_of_turn>", own, "<end_of_turn>"]


def picture(seed: int = 1) -> Media:
    data = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    return Media(MediaKind.IMAGE, data)


def test_digests_of_prepared_chunks_name_the_projector(
    runner: EncoderRunner, tmp_path: Path, jit: Jit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gemma3Encoder, "prepare", prepared)
    file = GGUFFile.open(spec.make(GEMMA3, tmp_path / "other.gguf", seed=1))
    with closing(EncoderRunner(file, load_encoders(file), CpuDevice(1, jit=jit))) as other:
        chunks = [one.prepare(picture())[1] for one in (runner, other, runner)]
    digests = [piece.digest for piece in chunks if isinstance(piece, MediaChunk)]
    assert len(digests) == 3 and digests[0] == digests[2] != digests[1]


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    return make_gemma3(tmp_path / "text.gguf", n_embd=64, n_layer=2, wtype="F32")


def test_a_model_answers_prompts_with_pictures(
    path: Path, text_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a decoded picture to an answer: the same alone, among others, and from the prompt cache."""
    monkeypatch.setattr(Gemma3Encoder, "prepare", prepared)
    options = EngineOptions(n_ctx=256, n_threads=1, n_slots=2, mmproj=str(path))
    with LoadedModel.load(text_model, options) as llama:
        assert llama.encoders is not None and llama.encoders.image is not None
        prompt = llama.media_prompt("Look: <__media__> and <__media__>. What is it?", [picture(1), picture(2)])
        assert prompt.tokens[0] == llama.tokenizer.bos and len(prompt.spans) == 2
        assert llama.detokenize(prompt.tokens).strip().startswith("Look:")

        def answer(spans: Any, tokens: list[int], **more: Any) -> list[int]:
            options = {"n_predict": 8, "temperature": 0, "ignore_eos": True, **more}
            return llama.complete(tokens, media=spans, **options).tokens

        alone = answer(prompt.spans, prompt.tokens)
        found: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: found.append(answer(prompt.spans, prompt.tokens, cache_prompt=False)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [alone] * 3
        swapped = llama.media_prompt("Look: <__media__> and <__media__>. What is it?", [picture(2), picture(1)])
        assert answer(swapped.spans, swapped.tokens) != alone
        assert answer(prompt.spans, prompt.tokens) == alone
        with pytest.raises(ValueError, match="does not match media"):
            llama.media_prompt("no marker", [picture(1)])
        with pytest.raises(MediaError, match="does not take audio input"):
            llama.media_prompt("<__media__>", [Media(MediaKind.AUDIO, np.zeros(9, np.float32), 16000)])


def test_a_model_without_projector_takes_no_pictures(text_model: Path) -> None:
    with LoadedModel.load(text_model, EngineOptions(n_ctx=128, n_threads=1)) as llama:
        assert llama.encoders is None
        with pytest.raises(MediaError, match="does not take image input"):
            llama.media_prompt("<__media__>", [picture()])


def test_a_projector_that_does_not_fit_is_refused(path: Path, tmp_path: Path, text_model: Path) -> None:
    wide = make_gemma3(tmp_path / "wide.gguf", n_embd=128)
    options = EngineOptions(n_ctx=128, n_threads=1)
    with pytest.raises(EngineError, match=r"text model \(n_embd = 128\) and mmproj \(n_embd = 64\)"):
        LoadedModel.load(wide, replace(options, mmproj=str(path)))
    with pytest.raises(UnsupportedModel, match="is no projector file"):
        LoadedModel.load(text_model, replace(options, mmproj=str(make_llama(tmp_path / "llama.gguf"))))


def test_a_vocabulary_without_the_tokens_of_tiles_is_refused(tmp_path: Path) -> None:
    tiny = replace(every()["idefics3"], tokens=("<fake_token_around_image>",))
    path, model = spec.make(tiny, tmp_path / "mmproj.gguf"), text.make(tiny, tmp_path / "text.gguf")
    options = EngineOptions(n_ctx=128, n_threads=1, mmproj=str(path))
    with pytest.raises(MediaError, match=r"the vocabulary has no token '<global-img>'.* belongs to another model"):
        LoadedModel.load(model, options)


def test_memory_of_encoders(path: Path) -> None:
    with closing(GGUFFile.open(path)) as mapped, closing(GGUFFile.open(path, mmap=False)) as read:
        least, most = (memory_needed(file, load_encoders(file)) for file in (mapped, read))
        assert most - least == sum(tensor.nbytes for tensor in load_encoders(read).each[0].weights.values())
        assert least > 4 * N_PATCHES * 32
        assert memory_needed(mapped, MediaEncoders()) == 0
