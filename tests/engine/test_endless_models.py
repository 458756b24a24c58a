"""Models without an end token: a warning is logged, and answers end after MOST_TOKENS by default."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import make_llama

from llamado.engine.engine import Engine
from llamado.engine.loaded_model import LoadedModel, lacks
from llamado.engine.options import EngineOptions
from llamado.engine.request import Defaults
from llamado.engine.sampling.params import Sampling
from llamado.gguf.metadata import Metadata
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model
from llamado.text.template.chat import ChatTemplate
from llamado.text.tokenizer.tokenizer import load_tokenizer

from .fake import FakeForward

KEY = "tokenizer.chat_template"
MOST_TOKENS = 64
"""A small MOST_TOKENS keeps the test quick."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("endless") / "tiny.gguf", n_vocab=320)


@pytest.fixture
def file(tiny: Path) -> Iterator[GGUFFile]:
    with GGUFFile.open(tiny) as found:
        yield found


def without(metadata: Metadata, *keys: str) -> Metadata:
    return type(metadata)({key: value for key, value in metadata.items() if key not in keys})


def loaded(tiny: Path, missing: list[str], n_predict: int = -1) -> LoadedModel:
    file = GGUFFile.open(tiny)
    tokenizer = load_tokenizer(file.metadata)
    forward = FakeForward(n_vocab=tokenizer.n_vocab)
    template = ChatTemplate.from_metadata(file.metadata, tokenizer)
    engine = Engine(forward, tokenizer, EngineOptions(n_slots=1, n_ctx=128))
    defaults = Defaults(sampling=Sampling(seed=3, ignore_eos=True), n_predict=n_predict)
    return LoadedModel(file, load_model(file), tokenizer, template, forward, engine, defaults, lacks=missing)


def test_missing_parts_of_a_model_are_detected(file: GGUFFile) -> None:
    tokenizer = load_tokenizer(file.metadata)
    assert lacks(file.metadata, tokenizer, None) == []
    plain = without(file.metadata, KEY)
    (line,) = lacks(plain, tokenizer, None)
    assert "no chat template" in line and "--chat-template" in line
    assert lacks(plain, tokenizer, "chatml") == []
    tokenizer.eog = frozenset()
    assert ["no end-of-answer token" in line for line in lacks(plain, tokenizer, None)] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("missing", [[], ["no template"]], ids=["whole", "lacking"])
def test_answers_end_at_the_limit(tiny: Path, missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamado.engine.loaded_model.MOST_TOKENS", MOST_TOKENS)
    with loaded(tiny, missing) as llama:
        messages = [{"role": "user", "content": "Hi"}]
        chat = llama.tokenize(llama.template.render(messages), add_special=True)
        whole = llama.engine.n_ctx - len(llama.tokenize("Hi", add_special=True))
        expected = MOST_TOKENS if missing else whole
        result = llama.complete("Hi")
        assert result.n_predicted == expected
        assert llama.generate("Hi") == result.content == "".join(llama.generate("Hi", stream=True))
        assert len(llama.complete(chat).tokens) == (MOST_TOKENS if missing else llama.engine.n_ctx - len(chat))
        assert llama.chat(messages) == llama.complete(chat).content == "".join(llama.chat(messages, stream=True))
        assert llama.complete("Hi", n_predict=None).n_predicted == expected
        for n, found in ((80, 80), (9, 9), (-1, whole)):
            assert llama.complete("Hi", n_predict=n).n_predicted == found
    with loaded(tiny, missing, n_predict=70) as llama:
        assert llama.complete("Hi").n_predicted == 70


@pytest.mark.slow
def test_a_missing_chat_template_is_logged(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llamado")
    options = EngineOptions(n_ctx=64, n_threads=1, metadata=(("general.name", "x"),))
    LoadedModel.load(tiny, options).close()
    assert not any("no chat template" in line for line in caplog.messages)
    monkeypatch.setattr("llamado.engine.loaded_model.override_metadata", lambda given, _: without(given, KEY))
    LoadedModel.load(tiny, options).close()
    assert sum("no chat template" in line for line in caplog.messages) == 1
