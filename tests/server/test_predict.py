"""Vertex AI's predict route, as in llama-server b11434."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import ANSWER, client, post, run

from llamado.server.api.predict import format_name
from llamado.server.switches import PredictRoutes

CHAT = {"@requestFormat": "chatCompletions", "messages": [{"role": "user", "content": "Hi"}]}


def ask(body: Any, path: str = "/predict", **routes: Any) -> tuple[int, Any]:
    return post(path, body, predict=PredictRoutes(**routes))


def test_routes_from_the_environment() -> None:
    assert PredictRoutes.read({}) is None
    assert PredictRoutes.read({"AIP_HTTP_PORT": "1", "AIP_PREDICT_ROUTE": "/p"}) is None
    assert PredictRoutes.read({"AIP_MODE": "PREDICTION"}) == PredictRoutes(predict="/predict", health="", port=8080)
    given = {"AIP_MODE": "PREDICTION", "AIP_PREDICT_ROUTE": "p", "AIP_HEALTH_ROUTE": "/h", "AIP_HTTP_PORT": "81"}
    assert PredictRoutes.read(given) == PredictRoutes(predict="/p", health="/h", port=81)
    for port in ("x", "-1", "65536"):
        with pytest.raises(ValueError):
            PredictRoutes.read({**given, "AIP_HTTP_PORT": port})


def test_names_of_formats() -> None:
    for path, name in (
        ("/v1/chat/completions", "chatCompletions"),
        ("/apply-template", "applyTemplate"),
        ("/v1/messages/count_tokens", "messagesCountTokens"),
        ("/slots/{id_slot}", "slots"),
        ("/completion", "completion"),
    ):
        assert format_name(path) == name


def test_instances_are_answered_by_their_endpoints_in_order() -> None:
    instances = [
        {**CHAT, "stream": True},
        {"@requestFormat": "/v1/completions", "prompt": "a", "max_tokens": 2},
        {"@requestFormat": "/completion", "prompt": "a", "n_predict": 1},
        {"@requestFormat": "tokenize", "content": "ab"},
        {"@requestFormat": "completion", "prompt": 5},
        {"@requestFormat": "nothing"},
        {"messages": []},
        7,
    ]
    status, answer = ask({"instances": instances})
    assert status == 200 and list(answer) == ["predictions"]
    chat, text, native, tokens, *errors = answer["predictions"]
    assert chat["choices"][0]["message"]["content"] == ANSWER and chat["object"] == "chat.completion"
    assert text["object"] == "text_completion" and text["usage"]["completion_tokens"] == 2
    assert native["content"] == ANSWER[0] and tokens == {"tokens": [97, 98]}
    assert [error["error"]["code"] for error in errors] == [400] * 4
    assert "nothing" in errors[1]["error"]["message"] and "@requestFormat" in errors[2]["error"]["message"]
    assert ask({"instances": []}) == (200, {"predictions": []})


@pytest.mark.parametrize("body", [[], {}, {"instances": {}}, {"instances": [CHAT] * 129}])
def test_bodies_without_instances_are_refused(body: Any) -> None:
    status, answer = ask(body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_other_paths() -> None:
    assert ask({"instances": []}, "/my/predict", predict="/my/predict") == (200, {"predictions": []})
    assert ask({"instances": []}, "/predict", predict="/my/predict")[0] == 404
    # The predict route cannot replace another endpoint.
    assert ask({"content": "a"}, "/tokenize", predict="/tokenize") == (200, {"tokens": [97]})

    async def health() -> int:
        async with client(predict=PredictRoutes(health="/ping")) as http:
            return (await http.get("/ping")).status_code

    assert run(health()) == 200


def test_no_predict_route_outside_of_vertex_ai() -> None:
    async def work() -> int:
        async with client() as http:
            return (await http.post("/predict", json={"instances": []})).status_code

    assert run(work()) == 404
