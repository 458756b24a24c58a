"""Chat backends of `llamado run`: a model in this process, and servers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tiny_models import make_llama
from waiting import GUARD

from llamado.commands import cli
from llamado.commands.chat import remote
from llamado.commands.chat.backend import AnswerPiece, AnswerStats, ChatBackend
from llamado.commands.chat.local import LocalBackend
from llamado.commands.chat.remote import RemoteBackend, ServerRefused
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.text.template.chat import ChatTemplate, EndTokens

HELLO = [{"role": "user", "content": "Hello"}]


def spoken(backend: ChatBackend, messages: Any = HELLO, **settings: Any) -> tuple[list[AnswerPiece], AnswerStats]:
    answer, found = backend.answer(messages, settings), []
    try:
        while True:
            found.append(next(answer))
    except StopIteration as end:
        return found, end.value


# --- a server -------------------------------------------------------------------------------------------------------
CLIENT = httpx.Client


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[httpx.Request]]:
    def serve(*events: Any, status: int = 200, models: Any = ("tiny",)) -> list[httpx.Request]:
        asked: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            if request.method == "GET":
                return httpx.Response(status, json={"data": [{"id": name} for name in models]})
            lines = [f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in (*events, "[DONE]")]
            return httpx.Response(status, text=": a comment\n\n" + "".join(lines))

        client = functools.partial(CLIENT, transport=httpx.MockTransport(handle))
        monkeypatch.setattr(remote.httpx, "Client", client)
        return asked

    return serve


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": None}]}


def test_request_to_a_server(served: Any) -> None:
    asked = served(delta(content="Hi"))
    backend = RemoteBackend("h:1/", None, "secret")
    messages = [*HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}, *HELLO]
    spoken(backend, messages, n_predict=7, top_k=3, stop=["x"])
    models, chat = asked
    assert str(models.url) == "http://h:1/v1/models" and str(chat.url) == "http://h:1/v1/chat/completions"
    assert chat.headers["authorization"] == "Bearer secret"
    body = json.loads(chat.content)
    assert body["messages"][1] == {"role": "assistant", "content": "Hi"}, "other servers reject unknown fields"
    assert (body["model"], body["stream"], body["max_tokens"], body["top_k"], body["stop"]) == (
        "tiny", True, 7, 3, ["x"],
    )  # fmt: skip
    assert str(RemoteBackend("https://h/v1", "name")._base) == "https://h/v1"


def test_answer_of_a_server(served: Any) -> None:
    served(
        delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(reasoning="!"), delta(content="Hi"),
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4,
                                  "prompt_tokens_details": {"cached_tokens": 5}},
         "timings": {"predicted_per_second": 12.5, "cache_n": 5}},
    )  # fmt: skip
    pieces, stats = spoken(RemoteBackend("h", "name"))
    assert pieces == [AnswerPiece("hm", True), AnswerPiece("!", True), AnswerPiece("Hi")]
    assert (stats.n_prompt, stats.n_cached, stats.n_predicted, stats.tokens_per_second, stats.cut) == (
        9, 5, 4, 12.5, True,
    )  # fmt: skip
    assert stats.first_seconds is not None and 0 <= stats.first_seconds < GUARD
    served(delta(content="Hi"))
    pieces, stats = spoken(RemoteBackend("h", "name"))
    assert stats.n_predicted is None and stats.tokens_per_second is None and not stats.cut


def test_errors_of_a_server(served: Any) -> None:
    served({"error": {"message": "too \x1b[31mlong"}})
    with pytest.raises(ServerRefused, match=r"too \\x1b\[31mlong"):
        spoken(RemoteBackend("h", "name"))
    served("{broken")
    with pytest.raises(ServerRefused, match="not a JSON object"):
        spoken(RemoteBackend("h", "name"))
    served(status=401)
    for ask in (lambda: RemoteBackend("h", None), lambda: spoken(RemoteBackend("h", "name"))):
        with pytest.raises(ServerRefused, match=r"answers 401.*--api-key"):
            ask()
    served(models=("a", "b"))
    with pytest.raises(ServerRefused, match=r"no model given.*a, b"):
        RemoteBackend("h", None)
    served(models=())
    with pytest.raises(ServerRefused, match="none"):
        RemoteBackend("h", None)


def test_unreachable_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--url", "127.0.0.1:1", "-p", "hi"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert cli.main(["run", "--url", "127.0.0.1:1", "name", "-p", "hi"]) == 1
    assert "is a server running there" in capsys.readouterr().err


def test_sampling_flags_are_sent_to_the_server(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    asked = served(delta(content="Hi"))
    arguments = ["--temp", "0.5", "-n", "3", "-r", "end", "--sampler-seq", "kt", "-sys", "be brief", "-l", "5-inf"]
    assert cli.main(["run", "--url", "h", "name", "-p", "hi", *arguments]) == 0
    body = json.loads(asked[0].content)
    assert capsys.readouterr().out == "Hi\n" and body["model"] == "name"
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (body["temperature"], body["max_tokens"], body["stop"]) == (0.5, 3, ["end"])
    assert body["logit_bias"] == {"5": False}
    assert body["samplers"] == ["top_k", "temperature"] and "top_k" not in body and "seed" not in body


# --- a model of this process ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    path = make_llama(tmp_path_factory.mktemp("chat") / "tiny.gguf", n_vocab=320)
    with LoadedModel.load(path, EngineOptions(n_ctx=256, n_slots=1, n_threads=1)) as loaded:
        yield loaded


@pytest.mark.slow
def test_local_backend_answers_like_the_library(llama: LoadedModel) -> None:
    backend = LocalBackend(llama, "tiny")
    pieces, stats = spoken(backend, n_predict=12, seed=4)
    assert "".join(one.text for one in pieces) == llama.chat(HELLO, n_predict=12, seed=4)
    assert stats.n_predicted == 12 and stats.cut and stats.tokens_per_second
    so_far = [one.so_far.n_predicted for one in pieces if one.so_far]
    assert so_far == sorted(so_far, key=int) and so_far[-1] in (11, 12), "counted for an answer that is stopped"
    _, again = spoken(backend, n_predict=12, seed=4)
    assert again.n_cached and again.n_prompt == stats.n_prompt


@pytest.mark.slow
def test_closed_answer_frees_its_slot(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, real = [], llama.events

    def events(prompt: Any, **options: Any) -> Any:
        kept.append(real(prompt, **options))
        return kept[-1]

    monkeypatch.setattr(llama, "events", events)
    backend = LocalBackend(llama, "tiny")
    answer = backend.answer(HELLO, {"ignore_eos": True, "n_predict": 200})
    next(answer)
    answer.close()
    assert kept[0].gi_frame is None, "the generator of the engine is closed, too"
    assert spoken(backend, n_predict=2)[1].n_predicted == 2


@pytest.mark.slow
def test_reasoning_is_separated_from_the_answer(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
        "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
    monkeypatch.setattr(llama, "template", ChatTemplate(template, EndTokens("", "")))
    real = llama.events

    def events(prompt: Any, **options: Any) -> Any:
        made = real(prompt, **options)
        texts = iter(["<think>let me see", "</think>", "\n\nIt is ", "so"])
        try:
            while True:
                token = next(made)
                object.__setattr__(token, "text", next(texts, ""))
                yield token
        except StopIteration as end:
            return end.value

    monkeypatch.setattr(llama, "events", events)
    said, _ = spoken(LocalBackend(llama, "tiny"), n_predict=8, ignore_eos=True)
    assert "".join(one.text for one in said if one.is_reasoning).strip() == "let me see"
    assert "".join(one.text for one in said if not one.is_reasoning).strip() == "It is so"


def test_model_without_an_end_token_has_a_token_limit(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LocalBackend(llama, "tiny").notes == ()
    monkeypatch.setattr(llama, "lacks", ("no token that ends an answer",))
    (note,) = LocalBackend(llama, "tiny").notes
    assert "1,024 tokens" in note
