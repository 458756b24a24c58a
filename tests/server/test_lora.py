"""`/lora-adapters` and the field `lora` of requests, with the answers of llama-server b11434."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engine.fake import FakeForward
from engine.fake import FakeTokenizer as PieceTokenizer
from fakes import FakeEngine, client_of, served
from lora_files import make_adapter
from minilm import make_bert
from tiny_models import make_llama

from llamado.engine.engine import Engine
from llamado.engine.lora_scales import DefaultScales
from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.request import Defaults
from llamado.models import InvalidAdapter
from llamado.server.load import load_served
from llamado.server.model import AdapterInfo
from llamado.server.settings import Settings
from llamado.server.state import ServerState

POINT1, POINT3 = float(np.float32(0.1)), float(np.float32(0.3))


@asynccontextmanager
async def client(scales: tuple[float, ...]) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    """A client of a server with a fake forward pass and adapters of these scales."""
    engine = Engine(FakeForward(), PieceTokenizer(), EngineOptions(n_slots=2), scales=DefaultScales(scales))
    model = served(FakeEngine(n_slots=2))
    adapters = tuple(AdapterInfo(f"{i}.gguf", "rhymes" if i else "") for i in range(len(scales)))
    state = ServerState()
    state.served = replace(model, engine=engine, info=replace(model.info, adapters=adapters))
    async with client_of(state) as http:
        try:
            yield http, engine
        finally:
            engine.close()


async def post(http: httpx.AsyncClient, path: str, body: Any) -> tuple[int, Any]:
    answer = await (http.post(path, content=body) if isinstance(body, bytes) else http.post(path, json=body))
    return answer.status_code, answer.json()


async def test_without_adapters() -> None:
    async with client(()) as (http, _):
        assert (await http.get("/lora-adapters")).json() == []
        assert await post(http, "/lora-adapters", [{"id": 0, "scale": 1}]) == (200, {"success": True})
        assert (await http.get("/lora-adapters")).json() == []
        status, answer = await post(http, "/completion", {"prompt": [5], "lora": [{"id": 0, "scale": 1.0}]})
        assert status == 200 and answer["generation_settings"]["lora"] == [{"id": 0, "scale": 1.0}]


async def test_reading_and_changing() -> None:
    async with client((1.0, 0.3)) as (http, _):

        async def scales() -> list[float]:
            return [adapter["scale"] for adapter in (await http.get("/lora-adapters")).json()]

        assert (await http.get("/lora-adapters")).json() == [
            {"id": 0, "path": "0.gguf", "scale": 1.0, "task_name": "", "prompt_prefix": ""},
            {"id": 1, "path": "1.gguf", "scale": POINT3, "task_name": "rhymes", "prompt_prefix": ""},
        ]
        for body, expected in [
            ([], [0, 0]),
            ([{"id": 0, "scale": 0.1}], [POINT1, 0]),
            ([{"id": 9, "scale": 3}], [0, 0]),
            ([{"id": 0, "scale": "x"}], [0, 0]),
            ([{"id": 1, "scale": 0.25}, {"id": 1, "scale": 0.75}], [0, 0.75]),
            ([{"id": 0.9, "scale": 0.25}], [0.25, 0]),
            ([{"id": 0, "scale": True}], [1, 0]),
            ([{"scale": 0.5}, 5, None, [0, 1], {"id": 1, "scale": -1}], [0, -1]),
        ]:
            assert await post(http, "/lora-adapters", body) == (200, {"success": True})
            assert await scales() == expected, body
        for body in ({}, b"null", "a", {"id": 0, "scale": 1}):
            status, answer = await post(http, "/lora-adapters", body)
            assert (status, answer["error"]["message"]) == (400, "Request body must be an array")
        for raw in (b"x", b"", b'[{"id":0,"scale":1e400}]', b'[{"id":0,"scale":1e39}]', b"[" * 100_000):
            assert (await post(http, "/lora-adapters", raw))[0] == 400
        assert await scales() == [0, -1]


async def test_scales_of_a_request() -> None:
    async with client((1.0, 0.0)) as (http, _):

        async def ask(**options: Any) -> tuple[list[dict[str, float]], list[int]]:
            body = {"prompt": [5, 6, 7, 8, 9], "n_predict": 8, "temperature": 0, "return_tokens": True, **options}
            status, answer = await post(http, "/completion", body)
            assert status == 200, answer
            return answer["generation_settings"]["lora"], answer["tokens"]

        shown, as_set = await ask()
        assert shown == []
        assert await ask(lora=[]) == ([], as_set), "no adapter named: the default scales"
        assert await ask(lora=[{"id": 0, "scale": 1}]) == ([{"id": 0, "scale": 1.0}], as_set)
        shown, without = await ask(lora=[{"id": 0}])
        assert shown == [{"id": 0, "scale": 0.0}] and without != as_set
        # In order of ids; the last scale of an id wins.
        shown, found = await ask(lora=[{"id": 1, "scale": 0.3}, {"id": 0, "scale": 5}, {"id": 0, "scale": 0.1}])
        assert shown == [{"id": 0, "scale": POINT1}, {"id": 1, "scale": POINT3}]
        assert found not in (as_set, without)
        assert await ask(lora=[{"id": 7, "scale": 1}]) == ([{"id": 7, "scale": 1.0}], without)
        await post(http, "/lora-adapters", [])
        assert await ask() == ([], without)
        for wrong in ({}, 5, "x"):
            status, answer = await post(http, "/completion", {"prompt": [5], "lora": wrong})
            assert status == 400 and answer["error"]["message"] == (
                "Field 'lora': Error: 'lora' must be an array of objects with 'id' and 'scale' fields"
            )
        status, answer = await post(http, "/completion", {"prompt": [5], "lora": [{"id": 0, "scale": 1e39}]})
        assert status == 400 and "float32" in answer["error"]["message"]
        for id in (1e300, -1e300, 2**31):
            status, answer = await post(http, "/completion", {"prompt": [5], "lora": [{"id": id, "scale": 1}]})
            assert status == 400 and answer["error"]["message"] == "Field 'id': number overflow"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    model = make_llama(folder / "m.gguf", n_embd=64, n_ff=96, n_layer=1)
    make_adapter(folder / "a.gguf", model, size=0.3, task="rhymes")
    make_adapter(folder / "b.gguf", model, size=0.3, seed=1)
    return folder


def load(files: Path, **options: Any) -> Any:
    engine = EngineOptions(n_ctx=128, n_threads=1, n_slots=1, **options)
    settings = Settings(source=ModelSource(spec=str(files / "m.gguf")), engine=engine, defaults=Defaults())
    return load_served(settings, lambda share, what: None)


@pytest.mark.slow
def test_from_flags_to_the_model(files: Path) -> None:
    a, b = str(files / "a.gguf"), str(files / "b.gguf")
    model = load(files, lora=((a, 1.0), (b, 0.5)))
    assert model.info.adapters == (AdapterInfo(a, "rhymes"), AdapterInfo(b)) and model.engine.lora == (1.0, 0.5)
    model.close(0.0)
    model = load(files, lora=((a, 1.0), (b, 0.5)), lora_apply=False)
    assert len(model.info.adapters) == 2 and model.engine.lora == (0.0, 0.0)
    model.close(0.0)
    with pytest.raises(InvalidAdapter, match="m\\.gguf"):
        load(files, lora=((str(files / "m.gguf"), 1.0),))


@pytest.mark.slow
def test_an_encoder_with_adapters(tmp_path: Path) -> None:
    """Its vectors change with the scales."""
    model = make_bert(tmp_path / "m.gguf")
    adapter = make_adapter(tmp_path / "a.gguf", model, size=0.3)
    found = load(tmp_path, lora=((str(adapter), 1.0),), embeddings=True, lora_apply=False)
    assert found.info.adapters == (AdapterInfo(str(adapter)),) and found.engine.lora == (0.0,)

    def vector() -> bytes:
        vectors: np.ndarray[Any, Any] = found.embeddings.embedder.submit([[5, 6, 7]]).result(60)[0].vectors
        return vectors.tobytes()

    plain = vector()
    found.engine.set_lora({0: 1.0})
    assert found.engine.lora == (1.0,)
    applied = vector()
    found.engine.set_lora({})
    assert vector() == plain != applied
    found.close(0.0)
