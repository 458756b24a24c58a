"""The Python API on a tiny model file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import make_llama

from llamado.devices.cpu.jit import Jit
from llamado.engine import loaded_model
from llamado.engine.engine import Engine
from llamado.engine.errors import ContextExceeded, EngineError, InvalidRequest
from llamado.engine.forward.fitting import context_size
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.engine.request import Defaults
from llamado.engine.sampling.params import Sampling
from llamado.gguf.errors import SourceError
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model
from llamado.text.template.chat import ChatTemplate
from llamado.text.tokenizer.tokenizer import load_tokenizer

from .fake import FakeForward


@pytest.fixture(autouse=True)
def few_graphs_ahead() -> None:
    """Prepare as many graphs as a server does."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", n_vocab=320)


@pytest.fixture
def llama(tiny: Path) -> Iterator[LoadedModel]:
    """A LoadedModel that computes nothing."""
    file = GGUFFile.open(tiny)
    tokenizer = load_tokenizer(file.metadata)
    forward = FakeForward(n_vocab=tokenizer.n_vocab)
    template = ChatTemplate.from_metadata(file.metadata, tokenizer)
    engine = Engine(forward, tokenizer, EngineOptions(n_slots=2, n_ctx=512))
    defaults = Defaults(sampling=Sampling(seed=3, ignore_eos=True), n_predict=16)
    with LoadedModel(file, load_model(file), tokenizer, template, forward, engine, defaults) as llama:
        yield llama


def test_generate_returns_and_streams_text(llama: LoadedModel) -> None:
    whole = llama.generate("Hello world")
    assert whole and "".join(llama.generate("Hello world", stream=True)) == whole
    assert llama.generate(llama.tokenize("Hello world", add_special=True)) == whole
    assert llama.generate("Hello world", seed=4) != whole
    result = llama.complete("Hello world", n_predict=5, n_probs=2)
    assert result.n_predicted == 5 and len(result.probs) == 5 and whole.startswith(result.content[:-1])


def test_chat_renders_the_template(llama: LoadedModel) -> None:
    messages = [{"role": "user", "content": "How are you?"}]
    prompt = llama.template.render(messages)
    expected = llama.generate(llama.tokenize(prompt, add_special=True), n_predict=7)
    assert llama.chat(messages, n_predict=7) == expected
    assert "".join(llama.chat(messages, stream=True, n_predict=7)) == expected


def test_chat_continues_a_given_answer(llama: LoadedModel) -> None:
    user = {"role": "user", "content": "How are you?"}
    prompt = llama.template.render([user]) + "I am"
    expected = llama.generate(llama.tokenize(prompt, add_special=True), n_predict=7)
    partial_answer = {"role": "assistant", "content": "I am"}
    assert llama.chat([user, partial_answer], n_predict=7) == expected
    assert (
        llama.chat([user, {**partial_answer, "content": [{"type": "text", "text": "I am"}]}], n_predict=7) == expected
    )
    assert llama.chat([user, partial_answer, user], n_predict=7) != expected


def test_leaving_a_stream_ends_its_request(llama: LoadedModel) -> None:
    stream = llama.generate("Hello", stream=True, n_predict=-1, logit_bias={})
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    for _ in range(1000):
        if not llama.engine.snapshot().requests_processing:
            return
        threading.Event().wait(0.005)
    pytest.fail("the request still runs")


def test_errors_reach_the_caller(llama: LoadedModel) -> None:
    with pytest.raises(InvalidRequest, match="temprature"):
        llama.generate("Hello", temprature=0.5)
    with pytest.raises(ContextExceeded):
        llama.generate([1] * 512)
    llama.forward.before = lambda n: 1 / 0  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        llama.generate("Hello")


def test_tokenize_and_detokenize(llama: LoadedModel) -> None:
    tokens = llama.tokenize("The quick brown fox")
    assert llama.detokenize(tokens) == "The quick brown fox"


@pytest.mark.slow
def test_requests_from_many_threads(llama: LoadedModel) -> None:
    expected = {i: llama.generate("Hello", seed=i) for i in range(8)}
    got: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: llama.generate("Hello", seed=i)})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


def test_context_size() -> None:
    assert context_size(4096, 4, True) == (4096, 4096)
    assert context_size(4000, 4, False) == (1000, 4096)
    assert context_size(100, 1, True) == (100, 256)
    with pytest.raises(EngineError):
        context_size(3, 4, False)


@pytest.mark.full
def test_concurrent_requests_on_a_real_device_match_single_ones(tiny: Path) -> None:
    """The text on a real device is the same alone, among other requests, and after them."""
    prompt, options = "One two three", {"n_predict": 24, "ignore_eos": True}
    with LoadedModel.load(tiny, EngineOptions(n_slots=1, n_ctx=512)) as alone:
        expected = [alone.generate(prompt, seed=i, **options) for i in range(6)]
        assert [alone.generate(prompt, seed=i, **options) for i in range(6)] == expected
    with LoadedModel.load(tiny, EngineOptions(n_slots=4, n_ctx=512, n_ubatch=32)) as llama:
        streams = [llama.generate(prompt, stream=True, seed=i, **options) for i in range(6)]
        got = [""] * 6

        def read(i: int) -> None:
            got[i] = "".join(streams[i])

        threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == expected


def test_load_errors_are_named(tiny: Path) -> None:
    with pytest.raises(SourceError):
        LoadedModel.load("/nowhere/at/all.gguf")
    with pytest.raises(EngineError, match="q3_x"):
        LoadedModel.load(tiny, EngineOptions(type_k="q3_x"))


def test_template_process_starts_and_ends_with_a_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts while the model is loaded, so that the first chat does not wait for it."""
    calls: list[str] = []
    process = SimpleNamespace(start=lambda: calls.append("start"), end=lambda: calls.append("end"))
    monkeypatch.setattr(loaded_model, "rendering", process)
    with LoadedModel.load(tiny, EngineOptions(n_slots=1, n_ctx=512)):
        assert calls == ["start"]
    assert calls == ["start", "end"]


def test_device_and_sampler_share_one_compiler(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Jit] = []
    make = Jit.__init__
    monkeypatch.setattr(Jit, "__init__", lambda self, *a, **kw: (made.append(self), make(self, *a, **kw))[1])
    with LoadedModel.load(tiny, EngineOptions(n_slots=1, n_ctx=512)) as llama:
        assert llama.generate("One", n_predict=2, seed=1, ignore_eos=True)
    assert len(made) == 1
