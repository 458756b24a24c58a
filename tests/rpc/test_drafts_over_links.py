"""Speculative decoding with the model or the draft model on workers: draft windows in flight, and a lost worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from drafted_answers import FreeDrafts, answers, told
from tiny import TINY, make
from tiny_models import make_llama
from wire_client import running

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.split.placement import ALL_LAYERS, SplitOptions
from llamado.engine.drafts.cost import DraftWindow
from llamado.engine.drafts.model import ModelKind
from llamado.engine.engine import Engine
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions, ModelSource
from llamado.rpc.tap.proxy import Tap, TapOptions
from llamado.rpc.worker.server import Worker

LATENCY_MS = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("m") / "m.gguf", n_layer=4)


@contextmanager
def worker() -> Iterator[Worker]:
    cpu = CpuDevice(1)
    with running(cpu, mem=1 << 30) as one:
        yield one
    cpu.close()


@pytest.mark.slow
def test_windows_over_links(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model is the model itself: every draft is right, and batches follow each other without a pause.

    The length of windows is fixed here; its choice by the speed of links and devices has its own tests.
    """
    monkeypatch.setattr(DraftWindow, "length", 4)
    with LoadedModel.load(model, EngineOptions(n_ctx=512, n_threads=1)) as llama:
        right = told(answers(llama))
    with ExitStack() as stack:
        ports = [
            stack.enter_context(Tap(TapOptions(
                listen_port=0, target_port=stack.enter_context(worker()).port, latency_ms=LATENCY_MS, all=True
            ))).port
            for _ in range(2)
        ]  # fmt: skip
        split = SplitOptions(rpc=tuple(f"127.0.0.1:{port}" for port in ports), tensor_split=(1.0, 1.0))
        passes = {}
        for kinds in ((), ("draft-simple",)):
            drafts = DraftOptions(kinds=kinds, model=ModelSource(spec=str(model)))
            options = EngineOptions(n_ctx=512, n_threads=1, split=split, drafts=drafts)
            with LoadedModel.load(model, options) as llama:
                assert isinstance(llama.engine, Engine)
                if kinds and llama.engine._drafts is not None:
                    llama.engine._drafts.cost = FreeDrafts()
                results = answers(llama)
                assert told(results) == right
                passes[kinds] = llama.engine.snapshot().counters.n_decode_total
                drafted = [(r.timings.draft_n or 0, r.timings.draft_n_accepted or 0) for r in results]
        assert sum(n for n, _ in drafted) > 30 and all(n == accepted for n, accepted in drafted)
        assert passes["draft-simple",] < 0.4 * passes[()]


@pytest.mark.full
@pytest.mark.parametrize("name", ["falcon-h1", "lfm2", "qwen35"])
def test_windows_of_a_recurrent_model(name: str, tmp_path: Path) -> None:
    """Its own drafts, which are right, and those of another model with its vocabulary, which are wrong."""
    path, other = (make(TINY[name], tmp_path / f"{i}.gguf", seed=i) for i in (1, 2))
    with LoadedModel.load(path, EngineOptions(n_ctx=512, n_threads=1)) as llama:
        right = told(answers(llama))
    with worker() as first, worker() as second:
        split = SplitOptions(rpc=(f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}"), tensor_split=(1.0, 1.0))
        for draft in (path, other):
            drafts = DraftOptions(kinds=("draft-simple",), model=ModelSource(spec=str(draft)))
            options = EngineOptions(n_ctx=512, n_threads=1, split=split, drafts=drafts)
            with LoadedModel.load(path, options) as llama:
                assert isinstance(llama.engine, Engine) and llama.engine._drafts is not None
                llama.engine._drafts.cost = FreeDrafts()
                results = answers(llama)
                assert told(results) == right
                rate = sum(r.timings.draft_n_accepted for r in results) / sum(r.timings.draft_n for r in results)
                assert rate == 1 if draft == path else rate < 0.5, (draft, rate)


@pytest.mark.full
def test_a_lost_worker_with_the_draft_model(model: Path) -> None:
    """Answers go on without drafts."""
    with LoadedModel.load(model, EngineOptions(n_ctx=512, n_threads=1)) as llama:
        right = told(answers(llama))
    with ExitStack() as lost:
        port = lost.enter_context(worker()).port
        own = SplitOptions(rpc=(f"127.0.0.1:{port}",), n_gpu_layers=ALL_LAYERS)
        drafts = DraftOptions(kinds=("draft-simple",), model=ModelSource(spec=str(model)), split=own)
        with LoadedModel.load(model, EngineOptions(n_ctx=512, n_threads=1, drafts=drafts)) as llama:
            assert isinstance(llama.engine, Engine) and llama.engine._drafts is not None
            llama.engine._drafts.cost = FreeDrafts()
            results = answers(llama)
            assert told(results) == right and any(r.timings.draft_n_accepted for r in results)
            (kind,) = llama.engine._drafts.kinds
            assert isinstance(kind, ModelKind) and not kind.lost
            lost.close()
            assert told(answers(llama)) == right
            assert kind.lost
