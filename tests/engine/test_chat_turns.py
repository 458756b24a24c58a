"""Chats on real graphs with windows or states: each turn evaluates only new tokens, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiers import first_of
from tiny import TINY, make
from tiny_models import make_gemma3
from waiting import until

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.engine.cache.prompt_cache import CellReader, ReadRate
from llamado.engine.cache.snapshots import NEAR
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.request import GenerationParams, Request
from llamado.engine.sampling.params import Sampling
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model

from .fake import FakeTokenizer, ask, new_engine
from .test_snapshots import CONTROL, Chat, shared

MODELS = {"gemma3": True, "granitehybrid": True, "qwen3next": False}
"""True for models whose template drops the reasoning of earlier turns."""
N_TURNS = 20


@pytest.fixture(scope="module", params=first_of(MODELS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    if request.param == "gemma3":
        return make_gemma3(path, n_layer=4, n_swa=40, n_ctx=4096)
    return make(TINY[request.param], path)


class Server:
    """An engine over a forward pass of its own."""

    def __init__(self, path: Path, jit: Jit, folder: Path | None = None) -> None:
        self._file = GGUFFile.open(path)
        self.forward = forward = ModelRunner(
            self._file,
            load_model(self._file),
            [CpuDevice(1, jit=jit)],
            RunnerOptions(n_cells=2048, n_sequences=2, max_batch=64),
        )
        tokenizer = FakeTokenizer(dict.fromkeys(range(self.forward.n_vocab), b"x"), eog=())
        tokenizer.control = CONTROL
        cache = {} if folder is None else {"cache_ram": -1, "cache_disk": str(folder), "cache_disk_size": 1 << 30}
        self.engine = new_engine(forward, tokenizer, n_slots=2, n_ctx=2048, **cache)
        self.disk = self.engine.disk
        until(lambda: self.disk is None or self.disk._looked is not None)

    def close(self) -> None:
        self.engine.close()
        self.forward.close()
        self._file.close()


@pytest.fixture
def plain(path: Path, jit: Jit) -> Iterator[Server]:
    found = Server(path, jit)
    yield found
    found.close()


def req(prompt: list[int], **options: Any) -> Request:
    sampling = Sampling(temperature=0.8, seed=5)
    return Request(prompt=prompt, params=GenerationParams(n_predict=6, sampling=sampling, n_probs=2, **options))


@pytest.mark.slow
def test_each_of_twenty_turns_evaluates_only_new_tokens(
    path: Path, jit: Jit, plain: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Half of the turns follow a restart; another chat runs in between, and one slot is saved and restored."""
    thinks = MODELS[request.node.callspec.params["path"]]
    chat, other = Chat(1, thinks=thinks, head=100), Chat(2, thinks=not thinks, head=100)
    server = Server(path, jit, tmp_path / "cache")
    computed = new = 0
    try:
        for turn in range(N_TURNS):
            if turn in (7, 14):
                server.close()
                server = Server(path, jit, tmp_path / "cache")
            prompt = chat.prompt()
            found = ask(server.engine, req(prompt, id_slot=turn % 2 if turn == 10 else -1))
            if turn in (2, 7, 11, 19):
                right = ask(plain.engine, req(prompt, cache_prompt=False))
                assert (found.tokens, found.probs) == (right.tokens, right.probs), turn
            if chat.last:
                assert found.n_cached > shared(prompt, chat.last) - NEAR, turn
                computed += len(prompt) - found.n_cached
                new += len(prompt) - shared(prompt, chat.last)
            chat.answered(prompt, found.tokens)
            if turn == 10:
                saved = server.engine.save_slot(found.id_slot, tmp_path / "slot").result(60)
                server.engine.restore_slot(1 - found.id_slot, tmp_path / "slot").result(60)
                assert saved.n_tokens == len(chat.last) - 1
            if turn in (3, 15):
                asked = other.prompt()
                other.answered(asked, ask(server.engine, req(asked)).tokens)
        assert new <= computed < new + NEAR * N_TURNS
    finally:
        server.close()


@pytest.fixture(autouse=True)
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)
    monkeypatch.setattr(ReadRate, "pays", lambda self, n_bytes, n, pace: True)
