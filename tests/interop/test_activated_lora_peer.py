"""Activated LoRAs beside the real llama-server: where they begin to work, what is said of them, what is refused."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
from lora_files import make_adapter
from peer_server import llama_server
from tiny_models import make_llama

from llamado.engine.errors import InvalidRequest
from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.request import Defaults, Done, Failure, GenerationParams, Request, Result
from llamado.engine.sampling.params import Sampling
from llamado.server.load import load_served
from llamado.server.model import ServedModel
from llamado.server.settings import Settings

pytestmark = [pytest.mark.interop, pytest.mark.full]
CALL, OTHER = [87, 88], [89]
TEXT = [10 + i % 50 for i in range(40)]
TAIL = [*range(20, 28)]
PROMPTS: dict[str, tuple[list[int], dict[int, float]]] = {
    "none": ([*TEXT, *CALL, *TAIL], {}),
    "behind a text": ([*TEXT, *CALL, *TAIL], {0: 1.0}),
    "twice": ([*TEXT, *CALL, *TAIL, *CALL, 3], {0: 1.0}),
    "first": ([*CALL, *TEXT], {0: 1.0}),
    "second": ([5, *CALL, *TEXT], {0: 1.0}),
    "third": ([5, 6, *CALL, *TEXT], {0: 1.0}),
    "last": ([*TEXT, *CALL], {0: 0.5}),
    "nowhere": ([*TEXT, CALL[1], CALL[0]], {0: 1.0}),
    "doubled": ([*TEXT, *CALL, CALL[1]], {0: 1.0}),
    "the other": ([*TEXT, *CALL, *OTHER, *TAIL], {1: 1.0}),
    "beside one that always works": ([*TEXT, *CALL, *TAIL], {0: 1.0, 2: 0.5}),
}


def lora(scales: dict[int, float]) -> list[dict[str, float]]:
    return [{"id": i, "scale": scales.get(i, 0.0)} for i in range(3)]


def test_equals_llama_cpp(peer_bin: Path, tmp_path: Path) -> None:
    model = make_llama(tmp_path / "m.gguf", wtype="F32")
    adapters = [
        make_adapter(tmp_path / f"{i}.gguf", model, size=0.5, seed=i, invocation=tokens)
        for i, tokens in enumerate((CALL, OTHER, ()))
    ]
    flags = ["-c", "512", "-np", "1", "-t", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup"]
    for adapter in adapters:
        flags += ["--lora-scaled", f"{adapter}:0"]
    engine = EngineOptions(
        n_ctx=512, n_threads=1, n_slots=1, type_k="f32", type_v="f32", lora=tuple((str(path), 0.0) for path in adapters)
    )
    ours = load_served(
        Settings(source=ModelSource(spec=str(model)), engine=engine, defaults=Defaults()), lambda *_: None
    )
    assert ours.info is not None
    with llama_server(peer_bin, model, tmp_path / "server.log", *flags) as client:
        shown = client.get("/lora-adapters").json()
        for info, theirs in zip(ours.info.adapters, shown, strict=True):
            assert list(info.invocation) == theirs.get("alora_invocation_tokens", [])
            assert info.invocation_text == theirs.get("alora_invocation_string", "")
        compared = 0
        for name, (prompt, scales) in PROMPTS.items():
            theirs, found = asked(client, prompt, scales), answer(ours, prompt, scales)
            assert found.tokens == theirs["tokens"], name
            report = theirs["completion_probabilities"][0]
            if report["id"] == found.tokens[0]:  # there is none of a token that ends within a character
                assert abs(found.probs[0].token.logprob - report["logprob"]) < 1e-4, name
                compared += 1
        assert compared > len(PROMPTS) // 2
        # what was read without an adapter serves it (llama-server may also take cells of another one: not asked for)
        prompt = PROMPTS["none"][0]
        for scales, n_cached in (({}, None), ({0: 1.0}, len(TEXT) - 1)):
            theirs = asked(client, prompt, scales, cache_prompt=True)
            found = answer(ours, prompt, scales, cache_prompt=True)
            assert found.tokens == theirs["tokens"]
            assert n_cached is None or found.n_cached == theirs["timings"]["cache_n"] == n_cached
        body = {"prompt": TEXT, "n_predict": 1, "lora": lora({0: 1.0, 1: 1.0})}
        refused = client.post("/completion", json=body)
        assert refused.status_code == 400
    with pytest.raises(InvalidRequest) as error:
        answer(ours, TEXT, {0: 1.0, 1: 1.0})
    assert str(error.value) == refused.json()["error"]["message"]
    ours.close(0.0)


def asked(client: Any, prompt: list[int], scales: dict[int, float], *, cache_prompt: bool = False) -> Any:
    """The real one's greedy answer."""
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "n_probs": 1, "return_tokens": True}
    body |= {"lora": lora(scales), "cache_prompt": cache_prompt}
    return client.post("/completion", json=body).raise_for_status().json()


def answer(model: ServedModel, prompt: list[int], scales: dict[int, float], *, cache_prompt: bool = False) -> Result:
    """Ours."""
    request = Request(
        prompt=prompt,
        params=GenerationParams(
            n_predict=8,
            n_probs=1,
            sampling=Sampling(temperature=0.0),
            lora={i: scales.get(i, 0.0) for i in range(3)},
            cache_prompt=cache_prompt,
        ),
    )
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    model.engine.submit(request, events.put)
    while not isinstance(event := events.get(timeout=60), Done):
        assert not isinstance(event, Failure), event.error
    return event.result
