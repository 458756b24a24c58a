"""`llamado_receipt`, and seeds of jobs."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, client_of, events, served

from llamado.build import BUILD
from llamado.client import seed_of
from llamado.server.generate import receipt
from llamado.server.state import ServerState


def ask(path: Path, *requests: tuple[str, dict[str, Any]]) -> list[str]:
    """Return the bodies of answers of a server whose model is in a file."""

    async def run() -> list[str]:
        engine = FakeEngine("yes")
        model = served(engine)
        info = dataclasses.replace(model.info, path=str(path), instruction_set="avx2")
        async with client_of(ServerState(served=dataclasses.replace(model, info=info))) as http:
            found = [(await http.post(to, json=body)).text for to, body in requests]
        engine.close()
        return found

    return asyncio.run(run())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF, or something like it")
    return path


CHAT = {"messages": [{"role": "user", "content": "a"}]}


def test_answers_of_every_api_have_a_receipt_on_request(model: Path) -> None:
    bodies = {"/completion": {"prompt": "a"}, "/v1/completions": {"prompt": "a"}, "/v1/chat/completions": CHAT}
    for path, body in bodies.items():
        requested = {**body, "receipt": True, "seed": 5}
        whole, stream, without = ask(model, (path, requested), (path, {**requested, "stream": True}), (path, body))
        found = json.loads(whole)["llamado_receipt"]
        assert found["build"] == BUILD and found["seed"] == 5 and found["instruction_set"] == "avx2"
        sha256 = hashlib.sha256(model.read_bytes()).hexdigest()
        assert found["files"] == [{"name": "model.gguf", "sha256": sha256}]
        parts = [json.loads(part) for part in events(stream) if part != "[DONE]"]
        (streamed,) = [part["llamado_receipt"] for part in parts if "llamado_receipt" in part]
        assert streamed == found
        assert "llamado_receipt" not in without


def test_a_profile_changes_with_settings_that_change_tokens(model: Path) -> None:
    usual = {"prompt": "a", "receipt": True}
    changes: list[dict[str, Any]] = [
        {}, {"seed": 9}, {"n_predict": 3}, {"temperature": 0.25}, {"top_k": 3}, {"samplers": ["temperature"]}
    ]  # fmt: skip
    answers = ask(model, *(("/completion", {**usual, **change}) for change in changes))
    ids = [json.loads(text)["llamado_receipt"]["profile_id"] for text in answers]
    assert ids[0] == ids[1] == ids[2] and len({*ids[2:]}) == 4
    assert json.loads(answers[3])["llamado_receipt"]["profile"]["temperature"] == 0.25


def test_a_file_is_hashed_again_after_a_change(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = hashlib.file_digest

    def counted(file: Any, kind: Any) -> Any:
        read.append(kind)
        return real(file, kind)

    monkeypatch.setattr(receipt.hashlib, "file_digest", counted)
    first = receipt.file_hash(model)
    assert receipt.file_hash(model) == first and len(read) == 1
    model.write_bytes(b"GGUF, or something like IT")
    os.utime(model, ns=(1, 1))
    assert receipt.file_hash(model) not in (first, None) and len(read) == 2
    model.unlink()
    assert receipt.file_hash(model) is None  # the file is gone, its model still in memory


@pytest.mark.slow
def test_seeds_of_jobs() -> None:
    assert seed_of("job-1") == 40547897 == seed_of(b"job-1")
    assert seed_of(17) == seed_of("17") != seed_of("18")
    assert all(0 <= seed_of(i) < 0xFFFF_FFFF for i in range(1000)) and len({seed_of(i) for i in range(1000)}) == 1000
    code = "from llamado.client import seed_of; print(seed_of('job-1'))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert re.fullmatch(r"40547897\s*", done.stdout)


def test_a_job_never_gets_the_value_of_a_random_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ones:
        def __init__(self, _: bytes) -> None: ...

        def digest(self) -> bytes:
            return b"\xff" * 32

    monkeypatch.setattr(hashlib, "sha256", Ones)
    assert seed_of("x") == 0
