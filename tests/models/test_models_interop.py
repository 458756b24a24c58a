"""The reference run of our graphs against the real llama-server: the whole distribution of the next token."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ports import free_port
from reference import ReferenceModel
from tiny_models import make_gemma3, make_llama
from waiting import GUARD

from llamado.gguf.types import TensorType

N_TOKENS = 90


@contextmanager
def llama_server(peer_bin: Path, model: Path, log: Path) -> Iterator[httpx.Client]:
    """The real server with one slot, all in float32, so that only the order of additions differs."""
    port = free_port()
    options = ["-c", "512", "-np", "1", "-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "--no-warmup"]
    command = [peer_bin / "llama-server", "-m", model, "--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=GUARD) as client:
                deadline = time.monotonic() + 60
                while True:
                    try:
                        if client.get("/health").status_code == 200:
                            break
                    except httpx.TransportError:
                        pass
                    assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
                    time.sleep(0.05)
                yield client
        finally:
            server.terminate()


def next_token_logprobs(client: httpx.Client, prompt: list[int], n_top: int) -> dict[int, float]:
    # A token that ends the text would come without probabilities; the bias makes it another one and leaves them alone.
    bias = [[100, 1000.0]]
    body = {"prompt": prompt, "n_predict": 1, "n_probs": n_top, "logit_bias": bias, "cache_prompt": False}
    answer = client.post("/completion", json=body).raise_for_status().json()
    return {entry["id"]: entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}


TINY: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (make_llama, {}),
    "llama-biases-factors": (make_llama, {"biases": True, "freq_factors": True, "tied": True}),
    "llama-linear": (make_llama, {"rope_scaling": ("linear", 4.0)}),
    "llama-yarn": (make_llama, {"rope_scaling": ("yarn", 4.0), "freq_base": 500.0}),
    "gemma3": (make_gemma3, {"n_layer": 4}),
    "gemma3-softcap": (make_gemma3, {"softcap": 5.0, "n_swa": 7, "swa_period": 3, "n_layer": 3}),
}


@pytest.mark.interop
@pytest.mark.parametrize("name", TINY)
def test_distribution_equals_llama_cpp(peer_bin: Path, tmp_path: Path, name: str) -> None:
    make, options = TINY[name]
    path = make(tmp_path / "model.gguf", wtype="F32", **options)
    model = ReferenceModel(path, type_k=TensorType.F32, type_v=TensorType.F32)
    n_vocab = model.model.hparams.n_vocab
    prompt = np.random.default_rng(1).integers(3, 262, N_TOKENS).tolist()
    logits = model.logits(prompt)[0]
    ours = logits - np.logaddexp.reduce(logits)
    with llama_server(peer_bin, path, tmp_path / "server.log") as client:
        theirs = next_token_logprobs(client, prompt, n_vocab)
    # What exp() turns into 0 there has no logarithm.
    likely = [token for token, logprob in theirs.items() if logprob > -80]
    assert len(likely) > 20
    # A wrong rotation, window or scale changes these by whole units. GELU is a table of 16-bit floats there.
    np.testing.assert_allclose(ours[likely], [theirs[t] for t in likely], atol=1e-2)


@pytest.mark.interop
@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_real_models_agree_with_llama_cpp(
    peer_bin: Path, tmp_path: Path, fixture: str, request: pytest.FixtureRequest
) -> None:
    """Real quantized weights: llama.cpp rounds activations to 8 bits on the way, so probabilities agree roughly."""
    path: Path = request.getfixturevalue(fixture)
    text = "The quick brown fox jumps over the lazy dog. The capital of France is"
    with llama_server(peer_bin, path, tmp_path / "server.log") as client:
        prompt = client.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
        theirs = next_token_logprobs(client, prompt, 100)
    logits = ReferenceModel(path, dtype=np.float32).logits(prompt)[0]
    ours = logits - np.logaddexp.reduce(logits)
    top = sorted(theirs, key=theirs.__getitem__, reverse=True)[:20]
    assert np.mean([abs(ours[t] - theirs[t]) for t in top]) < 0.3
    assert ours.argmax() in top[:3]
