"""A router in front of real `llamado serve` processes with tiny models: inherited flags, swapping, crashes."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from router_process import Start
from tiers import first_of
from tiny_models import make_llama
from waiting import until

from llamado.router.child import Child


@pytest.mark.slow
@pytest.mark.parametrize("crash", first_of([False, True]))
def test_llamado_servers(start_router: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, crash: bool) -> None:
    caplog.set_level("INFO", "llamado")
    folder = tmp_path / "models"
    folder.mkdir()
    make_llama(folder / "one.gguf")
    make_llama(folder / "two.gguf")
    (folder / "broken.gguf").write_bytes(b"no model")
    ini = tmp_path / "p.ini"
    ini.write_text("[one]\nalias = uno\nn-predict = 3\nchat-template = chatml\n[two]\nn-predict = 5\nc = 128\n")
    flags = ["--models-dir", str(folder), "--models-preset", str(ini), "--models-max", "1", "-c", "256", "-np", "1"]
    router = start_router(None, *flags)
    body = {"prompt": "the quick brown", "temperature": 0, "seed": 1, "ignore_eos": True}

    def ask(model: str) -> tuple[int, str]:
        answer = router.http.post("/completion", json={"model": model, **body}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens_predicted"], answer.json()["model"]

    assert ask("uno") == (3, "one")
    assert router.http.get("/props?model=one").json()["default_generation_settings"]["n_ctx"] == 256
    listed = {m["id"]: m for m in router.http.get("/models").json()["data"]}
    assert listed["one"]["status"]["value"] == "loaded" and listed["one"]["meta"]["n_ctx_train"]
    assert listed["one"]["aliases"] == ["uno"] and listed["two"]["status"]["value"] == "unloaded"
    assert "--host" in listed["one"]["status"]["args"] and "--alias" in listed["one"]["status"]["args"]
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask, "two") for _ in range(3)]
        assert [one.result() for one in asked] == [(5, "two")] * 3
    # A killed process loses the log lines that it has not written yet.
    until(lambda: sum("[two]" in one.message and "completion 200, " in one.message for one in caplog.records) == 3)
    if crash:
        os.kill(router.running()["two"]["pid"], signal.SIGKILL)
        assert ask("two") == (5, "two")
    # The router logs the client and its own refusals; a model's errors are logged once, by the model.
    assert router.http.post("/completion", json={"model": "none", **body}).status_code == 400
    assert router.http.post("/completion", json={"model": "two", "prompt": 1.5}).status_code == 400
    until(lambda: sum(" 400, " in record.message for record in caplog.records) >= 2)
    lines = [record.message for record in caplog.records if "POST /completion" in record.message]
    assert (
        len([line for line in lines if "[two]" in line and "] 127.0.0.1 POST /completion 200, " in line]) == 3 + crash
    )
    (refused,) = [line for line in lines if "model 'none' not found" in line]
    assert refused.startswith("127.0.0.1 POST /completion 400, ")
    assert len([line for line in lines if " 400, " in line]) == 2
    failed = router.http.post("/completion", json={"model": "broken", **body}, timeout=60)
    assert failed.status_code == 500 and "not a GGUF file" in failed.json()["error"]["reason"]
    assert router.status("broken")["exit_code"] == 1
    # The model's files may change while the router runs.
    (folder / "broken.gguf").unlink()
    names = {m["id"] for m in router.http.get("/models?reload=1").json()["data"]}
    assert names == {"one", "two"}
    until(lambda: not router.running())


@pytest.mark.parametrize(
    ("code", "lines", "description"),
    [
        (137, ["context of 1024 tokens"], "ended by SIGKILL"),
        (128 + 99, [], "ended by signal 99"),
        (3, ["error: no room"], "exit code 3: error: no room"),
        (1, [], "exit code 1"),
        (127, [], "exit code 127"),
        (128, [], "exit code 128"),
        (129, [], "ended by SIGHUP"),
    ],
)
def test_exits_are_described(code: int, lines: list[str], description: str) -> None:
    """A signal is a reason in itself; earlier output is not."""
    child = Child.__new__(Child)
    child.exit = asyncio.Future(loop=asyncio.new_event_loop())
    child.exit.set_result(code)
    child._process = SimpleNamespace(last_lines=lines, last_words=lambda: "")  # type: ignore[assignment]
    assert child.describe_exit() == description
