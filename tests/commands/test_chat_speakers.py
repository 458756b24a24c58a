"""Who answers in `llamado run`: a model of this process, and servers."""

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
from llamado.commands.chat.here import EngineSpeaker
from llamado.commands.chat.remote import HttpSpeaker, ServerRefused
from llamado.commands.chat.speaker import Figures, Said, Speaker
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.text.template.chat import ChatTemplate, EndTokens

HELLO = [{"role": "user", "content": "Hello"}]


def spoken(speaker: Speaker, messages: Any = HELLO, **settings: Any) -> tuple[list[Said], Figures]:
    answer, found = speaker.answer(messages, settings), []
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


def test_what_a_server_is_asked(served: Any) -> None:
    asked = served(delta(content="Hi"))
    speaker = HttpSpeaker("h:1/", None, "secret")
    messages = [*HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}, *HELLO]
    spoken(speaker, messages, n_predict=7, top_k=3, stop=["x"])
    models, chat = asked
    assert str(models.url) == "http://h:1/v1/models" and str(chat.url) == "http://h:1/v1/chat/completions"
    assert chat.headers["authorization"] == "Bearer secret"
    body = json.loads(chat.content)
    assert body["messages"][1] == {"role": "assistant", "content": "Hi"}, "other servers refuse fields they do not know"
    assert (body["model"], body["stream"], body["max_tokens"], body["top_k"], body["stop"]) == (
        "tiny", True, 7, 3, ["x"],
    )  # fmt: skip
    assert str(HttpSpeaker("https://h/v1", "name")._base) == "https://h/v1"


def test_what_a_server_answers(served: Any) -> None:
    served(
        delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(reasoning="!"), delta(content="Hi"),
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4,
                                  "prompt_tokens_details": {"cached_tokens": 5}},
         "timings": {"predicted_per_second": 12.5, "cache_n": 5}},
    )  # fmt: skip
    said, figures = spoken(HttpSpeaker("h", "name"))
    assert said == [Said("hm", True), Said("!", True), Said("Hi")]
    assert (figures.n_prompt, figures.n_cached, figures.n_predicted, figures.tokens_per_second, figures.cut) == (
        9, 5, 4, 12.5, True,
    )  # fmt: skip
    assert figures.first_seconds is not None and 0 <= figures.first_seconds < GUARD
    served(delta(content="Hi"))
    said, figures = spoken(HttpSpeaker("h", "name"))
    assert figures.n_predicted is None and figures.tokens_per_second is None and not figures.cut


def test_what_a_server_refuses(served: Any) -> None:
    served({"error": {"message": "too \x1b[31mlong"}})
    with pytest.raises(ServerRefused, match=r"too \\x1b\[31mlong"):
        spoken(HttpSpeaker("h", "name"))
    served("{broken")
    with pytest.raises(ServerRefused, match="no JSON object"):
        spoken(HttpSpeaker("h", "name"))
    served(status=401)
    for ask in (lambda: HttpSpeaker("h", None), lambda: spoken(HttpSpeaker("h", "name"))):
        with pytest.raises(ServerRefused, match=r"answers 401.*--api-key"):
            ask()
    served(models=("a", "b"))
    with pytest.raises(ServerRefused, match=r"which model.*a, b"):
        HttpSpeaker("h", None)
    served(models=())
    with pytest.raises(ServerRefused, match="none"):
        HttpSpeaker("h", None)


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--url", "127.0.0.1:1", "-p", "hi"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert cli.main(["run", "--url", "127.0.0.1:1", "name", "-p", "hi"]) == 1
    assert "is a server running there" in capsys.readouterr().err


def test_flags_of_answers_go_to_the_server(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_model_answers_as_its_library_does(llama: LoadedModel) -> None:
    speaker = EngineSpeaker(llama, "tiny")
    said, figures = spoken(speaker, n_predict=12, seed=4)
    assert "".join(one.text for one in said) == llama.chat(HELLO, n_predict=12, seed=4)
    assert figures.n_predicted == 12 and figures.cut and figures.tokens_per_second
    _, again = spoken(speaker, n_predict=12, seed=4)
    assert again.n_cached and again.n_prompt == figures.n_prompt


@pytest.mark.slow
def test_an_answer_that_nobody_wants_frees_its_slot(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, real = [], llama.events

    def events(prompt: Any, **options: Any) -> Any:
        kept.append(real(prompt, **options))
        return kept[-1]

    monkeypatch.setattr(llama, "events", events)
    speaker = EngineSpeaker(llama, "tiny")
    answer = speaker.answer(HELLO, {"ignore_eos": True, "n_predict": 200})
    next(answer)
    answer.close()
    assert kept[0].gi_frame is None, "the engine's own is over, too"
    assert spoken(speaker, n_predict=2)[1].n_predicted == 2


@pytest.mark.slow
def test_thoughts_of_a_model_are_told_apart(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
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
    said, _ = spoken(EngineSpeaker(llama, "tiny"), n_predict=8, ignore_eos=True)
    assert "".join(one.text for one in said if one.thought).strip() == "let me see"
    assert "".join(one.text for one in said if not one.thought).strip() == "It is so"


def test_where_answers_of_a_model_that_cannot_end_them_end(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineSpeaker(llama, "tiny").notes == ()
    monkeypatch.setattr(llama, "lacks", ("no token that ends an answer",))
    (note,) = EngineSpeaker(llama, "tiny").notes
    assert "1,024 tokens" in note
