"""Ollama's API with a model's file: embeddings, model facts, `keep_alive`, the server's defaults."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fakes import FakeEngine, client, client_of, read, run, served
from minilm import make_bert
from ollama_documents import EMBED, EMBEDDINGS, SHOW, SKY, TAGS, problems
from tiny_models import make_llama
from waiting import until_async

from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.request import Defaults
from llamado.engine.sampling.params import Sampling
from llamado.server.api.ollama.describe import parameter_lines
from llamado.server.load import load_served
from llamado.server.model import ServedModel
from llamado.server.model_facts import read_facts, short_number
from llamado.server.ops.sleep import Sleep
from llamado.server.settings import Settings
from llamado.server.state import ServerState


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    path = make_bert(tmp_path_factory.mktemp("models") / "encoder.gguf")
    options = EngineOptions(n_threads=1, n_slots=2, embeddings=True)
    one = load_served(Settings(source=ModelSource(spec=str(path)), engine=options), lambda share, what: None)
    yield one
    one.close(1)


def ask(one: ServedModel, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    async def work() -> tuple[int, Any]:
        async with client_of(ServerState(served=one)) as http:
            return read(await (http.post(path, json=body) if body is not None else http.get(path)))

    return run(work())


@pytest.mark.slow
def test_vectors(encoder: ServedModel) -> None:
    status, answer = ask(encoder, "/api/embed", {"model": "e", "input": ["a cat", "a dog"]})
    assert status == 200 and problems(answer, EMBED) == [] and answer["prompt_eval_count"] > 2
    both = np.array(answer["embeddings"])
    assert np.linalg.norm(both, axis=1) == pytest.approx(1, abs=1e-5)
    _, one = ask(encoder, "/api/embed", {"model": "e", "input": "a cat"})
    assert one["embeddings"][0] == pytest.approx(both[0].tolist(), abs=1e-6)
    _, short = ask(encoder, "/api/embed", {"model": "e", "input": "a cat", "dimensions": 8})
    wanted = both[0][:8] / np.linalg.norm(both[0][:8])
    assert short["embeddings"][0] == pytest.approx(wanted.tolist(), abs=1e-5)
    _, raw = ask(encoder, "/api/embeddings", {"model": "e", "prompt": "a cat"})
    assert problems(raw, EMBEDDINGS) == []
    ratio = np.array(raw["embedding"]) / both[0]
    assert ratio == pytest.approx(np.full_like(ratio, ratio[0]), rel=1e-3)
    assert ask(encoder, "/api/embed", {"model": "e"}) == (200, {"model": "e", "embeddings": []})
    assert ask(encoder, "/api/embeddings", {"model": "e"}) == (200, {"embedding": []})
    assert ask(encoder, "/api/embed", {"model": "e", "input": [1]}) == (400, {"error": "invalid input type"})


@pytest.mark.slow
def test_long_texts_are_cut_unless_truncate_is_false(encoder: ServedModel) -> None:
    assert encoder.embeddings is not None
    most = encoder.embeddings.max_tokens
    long = "cat " * (2 * most)
    status, answer = ask(encoder, "/api/embed", {"model": "e", "input": long})
    assert status == 200 and answer["prompt_eval_count"] == most
    status, answer = ask(encoder, "/api/embed", {"model": "e", "input": long, "truncate": False})
    assert status == 400 and "exceeds the context length" in answer["error"]


@pytest.mark.slow
def test_a_model_that_only_embeds_does_not_chat(encoder: ServedModel) -> None:
    status, answer = ask(encoder, "/api/chat", {"model": "e", "messages": SKY})
    assert (status, answer) == (400, {"error": '"e" does not support chat'})
    _, shown = ask(encoder, "/api/show", {"model": "e"})
    assert shown["capabilities"] == ["embedding"] and shown["details"]["family"] == "bert"


def licensed(writer: gguf.GGUFWriter) -> None:
    writer.add_license("mit")


def test_show_has_the_facts_of_the_file(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m.gguf", edit=licensed)
    one = served(FakeEngine())
    one = dataclasses.replace(
        one,
        info=dataclasses.replace(one.info, path=str(path), chat_template="T"),
        defaults=Defaults(sampling=Sampling(temperature=0.25), stop=("x", "y"), n_predict=7),
    )
    _, tags = ask(one, "/api/tags")
    assert problems(tags, TAGS) == [] and tags["models"][0]["size"] == path.stat().st_size
    _, shown = ask(one, "/api/show", {"model": "m"})
    assert problems(shown, SHOW) == [] and shown["license"] == "mit" and shown["template"] == "T"
    assert shown["parameters"].splitlines() == [
        f"{'temperature':30} 0.25", f"{'stop':30} \"x\"", f"{'stop':30} \"y\"", f"{'num_predict':30} 7",
    ]  # fmt: skip
    assert f"FROM {path}" in shown["modelfile"] and "PARAMETER num_predict" in shown["modelfile"]
    assert shown["model_info"]["general.parameter_count"] > 0 and "tensors" not in shown
    assert parameter_lines(Defaults()) == ""


def test_a_digest_depends_on_the_contents(tmp_path: Path) -> None:
    first = make_llama(tmp_path / "a.gguf")
    second = tmp_path / "b.gguf"
    second.write_bytes(first.read_bytes())
    other = make_llama(tmp_path / "c.gguf", seed=1)
    found = [read_facts(path) for path in (first, second, other)]
    digests = [facts.digest if facts else "" for facts in found]
    assert digests[0] == digests[1] != digests[2] and all(len(digest) == 64 for digest in digests)
    second.write_bytes(other.read_bytes())
    changed = read_facts(second)
    assert changed is not None and changed.digest == digests[2]
    assert read_facts(tmp_path / "none.gguf") is None and read_facts(__file__) is None


@pytest.mark.parametrize(
    ("n", "shown"), [(134_515_008, "134.52M"), (8_030_261_248, "8.0B"), (7 * 10**9, "7B"), (22_500, "22K"), (9, "9")]
)
def test_numbers_of_parameters(n: int, shown: str) -> None:
    assert short_number(n) == shown


@pytest.mark.usefixtures("few_objects")
@pytest.mark.slow
async def test_keep_alive_of_a_server_of_one_model() -> None:
    async with client() as http:
        state: ServerState = http.state  # type: ignore[attr-defined]
        sleep = state.sleep = Sleep(state, lambda: served(FakeEngine()), 1000)
        watching = asyncio.ensure_future(sleep.watch())
        chat = {"model": "m", "messages": SKY, "stream": False}
        try:
            await http.post("/api/chat", json={**chat, "keep_alive": "10m"})
            assert 590 < (sleep.left or 0) <= 600
            await http.post("/api/chat", json={**chat, "keep_alive": -1})
            assert sleep.left is None
            await http.post("/api/chat", json=chat)
            assert 990 < (sleep.left or 0) <= 1000
            assert len((await http.get("/api/ps")).json()["models"]) == 1
            answer = (await http.post("/api/generate", json={"model": "m", "keep_alive": 0})).json()
            assert answer["done_reason"] == "unload"
            await until_async(lambda: sleep.asleep)
            assert (await http.get("/api/ps")).json() == {"models": []}
            assert len((await http.get("/api/tags")).json()["models"]) == 1 and sleep.asleep
            answer = (await http.post("/api/chat", json={"model": "m", "messages": []})).json()
            assert answer["done_reason"] == "load" and not sleep.asleep
        finally:
            watching.cancel()


@pytest.mark.slow
def test_a_too_large_num_ctx_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with client() as http:
            for n_ctx in (1024, 99999, 99999):
                await http.post("/api/chat", json={"model": "m", "messages": SKY, "options": {"num_ctx": n_ctx}})

    with caplog.at_level(logging.WARNING, "llamado.server"):
        run(work())
    assert [r.getMessage() for r in caplog.records] == ["num_ctx 99999: this server's context has 4096 tokens (-c)"]
