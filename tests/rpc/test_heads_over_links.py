"""Draft heads on this machine with the model on workers: hidden states return with the logits, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from drafted_answers import FreeDrafts, answers, told
from headed_models import make_headed
from wire_client import running

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.split.placement import ALL_LAYERS, SplitOptions
from llamado.engine.drafts.cost import DraftWindow
from llamado.engine.engine import Engine
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions
from llamado.rpc.tap.proxy import Tap, TapOptions


@contextmanager
def tapped(latency: float) -> Iterator[Tap]:
    cpu = CpuDevice(1)
    with (
        running(cpu, mem=1 << 30) as worker,
        Tap(TapOptions(listen_port=0, target_port=worker.port, latency_ms=latency, all=True)) as tap,
    ):
        yield tap
    cpu.close()


@pytest.mark.full
def test_windows_over_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is the model's layer: every draft is right, and windows follow each other before the first is verified.

    Their length is fixed here.
    """
    monkeypatch.setattr(DraftWindow, "length", 4)
    path = make_headed(tmp_path / "m.gguf", "glm4moe")
    with LoadedModel.load(path, EngineOptions(n_ctx=512, n_threads=1)) as llama:
        right = told(answers(llama))
    with ExitStack() as stack:
        ports = [stack.enter_context(tapped(5.0)).port for _ in range(2)]
        split = SplitOptions(rpc=tuple(f"127.0.0.1:{port}" for port in ports), tensor_split=(1.0, 1.0), n_gpu_layers=2)
        passes = {}
        for kinds in ((), ("draft-mtp",)):
            options = EngineOptions(n_ctx=512, n_threads=1, split=split, drafts=DraftOptions(kinds=kinds))
            with LoadedModel.load(path, options) as llama:
                assert isinstance(llama.engine, Engine)
                if llama.engine._drafts is not None:
                    llama.engine._drafts.cost = FreeDrafts()
                results = answers(llama)
                assert told(results) == right
                passes[kinds] = llama.engine.snapshot().counters.n_decode_total
        drafted = [(r.timings.draft_n or 0, r.timings.draft_n_accepted or 0) for r in results]
        assert sum(n for n, _ in drafted) > 30 and all(n == accepted for n, accepted in drafted)
        assert passes["draft-mtp",] < 0.4 * passes[()]


@pytest.mark.full
def test_a_lost_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After its return, sequences are read again and drafted for; answers go on with the same bytes."""
    path = make_headed(tmp_path / "m.gguf", "glm4moe", sway=0.2)
    with LoadedModel.load(path, EngineOptions(n_ctx=512, n_threads=1)) as llama:
        right = told(answers(llama, 120))
    cpu = CpuDevice(1)
    with ExitStack() as first:
        port = first.enter_context(running(cpu, mem=1 << 30)).port
        split = SplitOptions(rpc=(f"127.0.0.1:{port}",), n_gpu_layers=ALL_LAYERS)
        options = EngineOptions(n_ctx=512, n_threads=1, split=split, drafts=DraftOptions(kinds=("draft-mtp",), most=4))
        with LoadedModel.load(path, options) as llama:
            assert isinstance(llama.engine, Engine) and llama.engine._drafts is not None
            llama.engine._drafts.cost = FreeDrafts()
            before = answers(llama, 120)
            assert told(before) == right and sum(r.timings.draft_n_accepted or 0 for r in before) > 20
            found: list[list[Any]] = []
            asked = threading.Thread(target=lambda: found.append(answers(llama, 120)))
            asked.start()
            while llama.engine.snapshot().counters.tokens_predicted_total < 2 * 120 + 30:
                time.sleep(0.001)
            first.close()
            with running(cpu, mem=1 << 30, port=port):
                asked.join()
                assert told(found[0]) == right and "answers wait until it is back" in caplog.text
                assert sum(r.timings.draft_n_accepted or 0 for r in found[0]) > 20
    cpu.close()
