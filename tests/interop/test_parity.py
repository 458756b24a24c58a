"""Our numbers against the real llama.cpp's, with real models: distributions along its greedy answers, and perplexity.

With quantized weights both round the activations of every matrix product to 8 bits. A difference in the last bit of a
float, such as another order of additions makes, turns some roundings over, those turn over more in the next layer, and
after a few layers the two are as far apart as rounding is from no rounding: the real server is that far from itself
when one norm's weights change by their last bit. So distributions are held to the strict bar where nothing is rounded
(all weights in float32), and with the quantized weights to the distance the real server keeps from itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from long_text import long_text
from parity import HEADER, N_SLOTS, Comparison, compare, continuations, reported_again
from peer_server import llama_perplexity, llama_server
from texts import TEXTS
from weights import to_float32, with_nudged_norm

from llamado.commands.bench.perplexity import score_text
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions

pytestmark = pytest.mark.interop

N_CTX = 512
AGREEMENT = 0.99
MEAN_DIFFERENCE = 0.05
# Every so many texts the real server is compared with itself.
CONTROL = 5
# The text for perplexities: 8,192 tokens of it in either vocabulary.
N_CHARACTERS = 30_000
CHUNK = 512
N_CHUNKS = 16


@dataclass(frozen=True)
class TestedModel:
    name: str
    path: Path
    llama: LoadedModel


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def loaded(request: pytest.FixtureRequest, peer_bin: Path) -> Iterator[TestedModel]:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    with LoadedModel.load(path, EngineOptions(n_ctx=N_CTX, n_threads=2)) as llama:
        llama.engine.close()  # the forward pass is driven from here
        yield TestedModel(request.param, path, llama)


def options(cache: str) -> list[str]:
    """llama-server with the KV cache in `cache`, attention fused as ours is, no tokens of others in a slot's way.

    One thread: several wait for each other by spinning, which takes ten times as long beside other tests.
    """
    slots = ["-np", str(N_SLOTS), "-c", str(N_SLOTS * N_CTX), "--no-kv-unified", "--swa-full"]
    return [*slots, "-t", "1", "-fa", "on", "-ctk", cache, "-ctv", cache, "--no-warmup"]


def prompts_of(llama: LoadedModel, client: httpx.Client) -> dict[str, list[int]]:
    """The texts as tokens, which must be the real server's."""
    prompts = {}
    for name, text in TEXTS.items():
        prompt = text if isinstance(text, str) else llama.template.render(text)
        prompts[name] = llama.tokenize(prompt, add_special=True)
        body = {"content": prompt, "add_special": True, "parse_special": True}
        assert client.post("/tokenize", json=body).json()["tokens"] == prompts[name], name
    assert len(prompts) >= 40
    return prompts


def show(*lines: str) -> None:
    print("", *lines, sep="\n", file=sys.stderr)


@pytest.mark.full
def test_distributions_of_float_weights(loaded: TestedModel, peer_bin: Path, tmp_path: Path) -> None:
    path = to_float32(peer_bin, loaded.path, tmp_path / "float32.gguf")
    with llama_server(peer_bin, path, tmp_path / "llama-server.log", *options("f32")) as client:
        prompts = prompts_of(loaded.llama, client)
        answers = continuations(client, loaded.llama.tokenizer, list(prompts.values()))
    ours = Comparison()
    with LoadedModel.load(path, EngineOptions(n_ctx=N_CTX, n_threads=2, type_k="f32", type_v="f32")) as llama:
        llama.engine.close()
        for (name, tokens), steps in zip(prompts.items(), answers, strict=True):
            assert len(tokens) + len(steps) >= 64, name
            compare(ours, name, llama.forward, tokens, steps)
    path.unlink()
    show(*ours.disagreements, HEADER, ours.row(f"{loaded.name}, weights in float32"))
    assert ours.positions >= 2000
    assert ours.agreement >= AGREEMENT
    assert ours.mean_difference <= MEAN_DIFFERENCE


@pytest.mark.full
def test_distributions_of_quantised_weights(loaded: TestedModel, peer_bin: Path, tmp_path: Path) -> None:
    llama = loaded.llama
    with llama_server(peer_bin, loaded.path, tmp_path / "llama-server.log", *options("f16")) as client:
        prompts = prompts_of(llama, client)
        answers = continuations(client, llama.tokenizer, list(prompts.values()))
    ours, itself = Comparison(), Comparison()
    for (name, tokens), steps in zip(prompts.items(), answers, strict=True):
        compare(ours, name, llama.forward, tokens, steps)
    nudged = with_nudged_norm(loaded.path, tmp_path / "nudged.gguf")
    with llama_server(peer_bin, nudged, tmp_path / "nudged.log", *options("f16")) as client:
        for (name, tokens), steps in list(zip(prompts.items(), answers, strict=True))[::CONTROL]:
            for step, logprobs in reported_again(client, tokens, steps, llama.forward.n_vocab):
                itself.add(name, step, logprobs)
    nudged.unlink()
    show(*ours.disagreements, HEADER, ours.row(loaded.name), itself.row(f"{loaded.name}: llama.cpp and itself nudged"))
    assert ours.positions >= 2000
    assert ours.mean_difference <= max(MEAN_DIFFERENCE, 1.25 * itself.mean_difference)
    # 0.02 is what chance does to a share near 0.97 of 500 positions (2.5 standard errors).
    assert ours.agreement >= min(AGREEMENT, itself.agreement - 0.02)


@pytest.mark.full
def test_perplexity(loaded: TestedModel, peer_bin: Path, tmp_path: Path) -> None:
    text = long_text(N_CHARACTERS)
    (tmp_path / "text").write_text(text, encoding="utf-8")
    flags = ["-c", str(CHUNK), "-b", "2048", "-t", "2", "--chunks", str(N_CHUNKS)]
    theirs, _ = llama_perplexity(peer_bin, loaded.path, tmp_path / "text", flags)
    tokenizer = loaded.llama.tokenizer
    tokens = tokenizer.encode(text, add_special=True, parse_special=False)
    assert len(tokens) >= N_CHUNKS * CHUNK >= 4000
    bos = tokenizer.bos if tokenizer.add_bos else None
    score = score_text(loaded.llama.forward, tokens, CHUNK, bos=bos, chunks=N_CHUNKS)
    show(f"{loaded.name}: perplexity {score.perplexity:.4f}, llama.cpp's {theirs:.4f}")
    assert score.count == N_CHUNKS * (CHUNK // 2 - 1)
    assert score.perplexity == pytest.approx(theirs, rel=0.005)
