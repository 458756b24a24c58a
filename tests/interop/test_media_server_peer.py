"""Prompts with pictures and sounds against the real llama-server: the likely next tokens, and their probabilities."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer_server import llama_server
from PIL import Image
from projectors import every, spec, text
from projectors.sounds import SOUNDS
from projectors.spec import TinyProjector
from tiny_models import make_gemma3

from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.media.decode import decode
from llamado.media.media import MediaKind

pytestmark = pytest.mark.interop

TINY: dict[str, TinyProjector] = {**every(), **{tiny.name: tiny for tiny in SOUNDS}}
NAMES = (
    "gemma3", "qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "glm4v", "hunyuanvl", "idefics3", "internvl",
    "llama4", "mlp", "pixtral", "ultravox", "qwen2a",
)  # fmt: skip
"""Projectors of each kind: without a causal mask, M-RoPE, DeepStack, tiles, rows with line ends, sounds."""
N_PROBS = 20


def picture(seed: int, width: int, height: int) -> bytes:
    """Return a PNG file with noise."""
    out = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


def sound(seed: int, seconds: float) -> bytes:
    """Return a WAV file with a chord and noise, 16,000 samples a second."""
    t = np.arange(int(16_000 * seconds)) / 16_000
    rng = np.random.default_rng(seed)
    samples = sum(np.sin(2 * np.pi * rate * t) for rate in rng.uniform(100, 3000, 4)) / 5 + rng.normal(0, 0.02, t.size)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes())
    return out.getvalue()


def files_of(tiny: TinyProjector) -> list[bytes]:
    """Return two pictures, or one sound."""
    if tiny.kind is MediaKind.AUDIO:
        return [sound(1, 1.7)]
    return [picture(1, 60, 44), picture(2, 33, 70)]


@pytest.fixture(params=NAMES)
def tiny(request: pytest.FixtureRequest) -> TinyProjector:
    return TINY[request.param]


@pytest.fixture
def paths(tiny: TinyProjector, tmp_path: Path) -> tuple[Path, Path]:
    """Return the text model and the projector."""
    model = tmp_path / "text.gguf"
    made = make_gemma3(model, n_embd=tiny.n_embd, wtype="F32") if tiny.name == "gemma3" else text.make(tiny, model)
    return made, spec.make(tiny, tmp_path / "mmproj.gguf")


@pytest.fixture
def loaded(paths: tuple[Path, Path]) -> Iterator[LoadedModel]:
    model, projector = paths
    with LoadedModel.load(model, EngineOptions(n_ctx=2048, n_slots=1, mmproj=str(projector))) as opened:
        yield opened


def test_next_tokens_have_the_probabilities_of_llama_cpp(
    peer_bin: Path, tmp_path: Path, tiny: TinyProjector, paths: tuple[Path, Path], loaded: LoadedModel
) -> None:
    model, projector = paths
    files = files_of(tiny)
    options = ["--mmproj", str(projector), "-c", "2048", "-np", "1", "--no-warmup"]
    with llama_server(peer_bin, model, tmp_path / "log", *options) as client:
        marker = client.get("/props").json()["media_marker"]
        prompt = "look: " + " and ".join([marker] * len(files)) + " what is"
        given = {"prompt_string": prompt, "multimodal_data": [base64.b64encode(data).decode() for data in files]}
        body = {"prompt": given, "n_predict": 4, "temperature": 0, "n_probs": N_PROBS, "return_tokens": True}
        answer = client.post("/completion", json=body)
        assert answer.status_code == 200, answer.text
        theirs: dict[str, Any] = answer.json()
    assert loaded.encoders is not None
    rate = loaded.encoders.of(tiny.kind).rate
    media = [decode(data, tiny.kind, rate) for data in files]
    asked = loaded.media_prompt(prompt, media, marker=marker)
    ours = loaded.complete(asked.tokens, media=asked.spans, n_predict=4, temperature=0.0, n_probs=N_PROBS)
    assert ours.n_prompt == theirs["tokens_evaluated"]
    assert ours.tokens == theirs["tokens"]
    probabilities = theirs["completion_probabilities"]
    assert probabilities  # it leaves out those of characters that are cut off
    for own, other in zip(ours.probs, probabilities, strict=False):
        expected = {one["id"]: one["logprob"] for one in other["top_logprobs"]}
        found = {one.id: one.logprob for one in own.top if one.id in expected}
        assert len(found) >= N_PROBS - 2
        np.testing.assert_allclose([*found.values()], [expected[token] for token in found], atol=0.02)
