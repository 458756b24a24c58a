"""`/slots/{id}?action=…` over an engine with a fake forward pass, with the answers of llama-server b11434."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine.fake import FakeForward
from engine.fake import FakeTokenizer as PieceTokenizer
from fakes import FakeEngine, client_of, run, served
from hypothesis import given
from hypothesis import strategies as st
from ports import free_port
from waiting import GUARD

from llamado.engine.engine import Engine
from llamado.engine.options import EngineOptions
from llamado.engine.request import GenerationParams, Request
from llamado.engine.sampling.params import Sampling
from llamado.server.api.slots import is_plain_name
from llamado.server.state import ServerState
from llamado.server.switches import Switches


def ask(engine: Engine, prompt: list[int], **kw: Any) -> None:
    over = threading.Event()
    request = Request(
        prompt=prompt, params=GenerationParams(n_predict=4, sampling=Sampling(seed=1, ignore_eos=True), **kw)
    )
    engine.submit(request, lambda event: over.set() if type(event).__name__ == "Done" else None)
    assert over.wait(GUARD)


@asynccontextmanager
async def client(folder: Path | None) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    engine = Engine(FakeForward(), PieceTokenizer(), EngineOptions(n_slots=2))
    state = ServerState(switches=Switches(slot_save_path=None if folder is None else str(folder)))
    state.served = served(FakeEngine(n_slots=2))
    object.__setattr__(state.served, "engine", engine)
    async with client_of(state) as http:
        try:
            yield http, engine
        finally:
            engine.close()


async def post(http: httpx.AsyncClient, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    answer = await http.post(path, content=content)
    return answer.status_code, answer.json()


PROMPT = [1 + i % 96 for i in range(100)]


async def test_save_restore_erase(tmp_path: Path) -> None:
    async with client(tmp_path) as (http, engine):
        ask(engine, PROMPT, id_slot=0)
        status, answer = await post(http, "/slots/0?action=save", {"filename": "a.bin"})
        ms = answer.pop("timings")
        assert status == 200 and list(ms) == ["save_ms"] and ms["save_ms"] > 0
        size = (tmp_path / "a.bin").stat().st_size
        assert answer == {"id_slot": 0, "filename": "a.bin", "n_saved": 103, "n_written": size}

        status, answer = await post(http, "/slots/1?action=restore", {"filename": "a.bin"})
        ms = answer.pop("timings")
        assert status == 200 and list(ms) == ["restore_ms"] and ms["restore_ms"] > 0
        assert answer == {"id_slot": 1, "filename": "a.bin", "n_restored": 103, "n_read": size}

        for n, body in ((103, None), (0, b"xx")):
            assert await post(http, "/slots/1?action=erase", body) == (200, {"id_slot": 1, "n_erased": n})


async def test_refusals(tmp_path: Path) -> None:
    def error(code: int, type: str, message: str) -> tuple[int, dict[str, Any]]:
        return code, {"error": {"code": code, "message": message, "type": type}}

    off = "This server does not support slots action. Start it with `--slot-save-path`"
    async with client(None) as (http, _):
        for action in ("save", "restore", "erase", "foo"):
            expected = error(501, "not_supported_error", off)
            assert await post(http, f"/slots/0?action={action}", {"filename": "a"}) == expected
    bad = "invalid_request_error"
    async with client(tmp_path) as (http, engine):
        for id in ("abc", "9", "-1", "99999999999", "-99999999999", "9" * 5000, "²"):
            for action in ("save", "restore", "erase"):
                found = await post(http, f"/slots/{id}?action={action}", {"filename": "a"})
                assert found == error(400, bad, "Invalid slot ID"), id
        for path in ("/slots/0", "/slots/0?action=foo", "/slots/0?action="):
            assert await post(http, path, {}) == error(400, bad, "Invalid action")
        assert await post(http, "/slots/1x?action=erase") == (200, {"id_slot": 1, "n_erased": 0})
        for action in ("save", "restore"):
            path = f"/slots/0?action={action}"
            for body in (b"", b"xx", [], {}, {"filename": 5}, {"filename": None}, "a"):
                status, answer = await post(http, path, body)
                assert status == 400 and answer["error"]["type"] == bad, body
            for name in (
                "",
                "../x",
                "/etc/passwd",
                "a/b",
                "a\\b",
                "a\0",
                "..",
                ".",
                ".part",
                "a.",
                " a",
                "x" * 256,
            ):
                assert await post(http, path, {"filename": name}) == error(400, bad, "Invalid filename"), name
        missing = "Unable to restore slot: nope: No such file or directory"
        assert await post(http, "/slots/0?action=restore", {"filename": "nope"}) == error(400, bad, missing)
        (tmp_path / "bad").write_bytes(b"garbage" * 50)
        status, answer = await post(http, "/slots/0?action=restore", {"filename": "bad"})
        assert status == 400 and answer["error"]["message"] == "Unable to restore slot: bad: it is not a saved slot"
        (tmp_path / "full").mkdir()
        status, answer = await post(http, "/slots/0?action=save", {"filename": "full"})
        assert status == 500 and answer["error"]["message"].startswith("Unable to save slot: full: ")
        assert answer["error"]["type"] == "server_error"
        engine.close()
        status, answer = await post(http, "/slots/0?action=erase")
        assert status == 503 and answer["error"]["type"] == "unavailable_error"
    assert {p.name for p in tmp_path.iterdir()} == {"bad", "full"}


async def test_health_answers_while_a_save_waits_for_its_slot(tmp_path: Path) -> None:
    async with client(tmp_path) as (http, engine):
        gate = threading.Event()
        engine._forward.before = lambda n: gate.wait(GUARD) and None  # type: ignore[attr-defined]
        busy = threading.Thread(target=ask, args=(engine, PROMPT), kwargs={"id_slot": 0})
        busy.start()
        while not engine.snapshot().requests_processing:
            time.sleep(0.001)
        save = asyncio.ensure_future(post(http, "/slots/0?action=save", {"filename": "a"}))
        for _ in range(5):
            assert (await http.get("/health")).status_code == 200
        assert not save.done()
        gate.set()
        status, answer = await save
        assert status == 200 and answer["n_saved"] == 103
        busy.join()


@pytest.mark.slow
@given(st.text(max_size=40))
def test_names_stay_in_the_folder(name: str) -> None:
    if is_plain_name(name):
        path = Path("/folder") / name
        assert path.parent == Path("/folder") and path.name == name and not name.startswith(".") and "\0" not in name
        assert Path("/folder/x", "..", name).resolve().parent == Path("/folder")


@pytest.mark.parametrize("name", ["a", "slot 1.bin", "ä", "日本語", "a-b_c.d", "x" * 255, "a..b"[:2] + "b"])
def test_good_names(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "name", ["ä" * 128, "a..b", "a\uff0eb", "a\u2215b", "a\u2044b", "a:b", "a\ufeff", "\ud800", "a\x85"]
)
def test_bad_names(name: str) -> None:
    assert not is_plain_name(name)


REQUESTS: list[tuple[str, object]] = [
    ("/slots/0?action=save", {"filename": "a.bin"}),
    ("/slots/1?action=restore", {"filename": "a.bin"}),
    ("/slots/1?action=erase", None),
    ("/slots/1?action=erase", b"xx"),
    ("/slots/1?action=save", {"filename": "empty.bin"}),
    ("/slots/1?action=restore", {"filename": "empty.bin"}),
    ("/slots/0?action=restore", {"filename": "nope.bin"}),
    *(("/slots/0?action=save", {"filename": name}) for name in ("../x", "", "a/b", "a.", "..", 5, None, [])),
    *(("/slots/0?action=save", body) for body in ({}, [], b"xx", b"")),
    ("/slots/abc?action=erase", None),
    ("/slots/1x?action=erase", None),
    ("/slots/99999999999?action=erase", None),
    ("/slots/0?action=foo", {}),
    ("/slots/0", {}),
]


@pytest.mark.interop
def test_answers_are_those_of_llama_server(tmp_path: Path, peer_bin: Path, smollm2_path: Path) -> None:
    """Status, keys, and messages except those about JSON and files."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    port = free_port()
    command = [str(peer_bin / "llama-server"), "-m", str(smollm2_path), "-c", "512", "-np", "2", "-t", "1"]
    command += ["--port", str(port), "--slot-save-path", str(theirs)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def test() -> None:
        async with client(ours) as (http, engine), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as peer:
            ask(engine, PROMPT[:10], id_slot=0)
            for _ in range(1200):
                with suppress(httpx.HTTPError):
                    if (await peer.get("/health")).status_code == 200:
                        break
                assert process.poll() is None
                await asyncio.sleep(0.05)
            filled = {"prompt": PROMPT[:10], "n_predict": 4, "id_slot": 0, "ignore_eos": True}
            assert (await peer.post("/completion", json=filled, timeout=60)).status_code == 200
            for path, body in REQUESTS:
                status, answer = await post(http, path, body)
                expected, right = await post(peer, path, body)
                assert (status, sorted(answer)) == (expected, sorted(right)), (path, body)
                for key in ("id_slot", "filename", "n_saved", "n_restored", "n_erased"):
                    assert answer.get(key) == right.get(key), (path, body)
                assert sorted(answer.get("timings", {})) == sorted(right.get("timings", {}))
                if status != 200:
                    assert answer["error"]["type"] == right["error"]["type"]
                    if right["error"]["message"].startswith("Invalid"):
                        assert answer["error"]["message"] == right["error"]["message"]

    try:
        run(test())
    finally:
        process.kill()
        process.wait()
