"""Ollama's API over the fake engine: documented requests and answers, options, tools, thinking, errors."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from fakes import INFO, FakeEngine, FakeTokenizer, client, post, read
from ollama_documents import DOCUMENTED, EVERY_OPTION, OPEN_WEBUI, SKY, problems
from test_chat_api import CALLING, HERMES

from llamado.engine.parameters import PARAMETERS
from llamado.http.access import AccessRules
from llamado.server.api.ollama.bodies import chat_body, keep_alive
from llamado.server.api.ollama.describe import API_VERSION, tagged, untagged
from llamado.server.api.ollama.go_template import render
from llamado.server.errors import ApiError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}


def ask(path: str, body: dict[str, Any], engine: FakeEngine | None = None, **more: Any) -> tuple[int, Any]:
    """Return status and answer: an object, or the objects of a stream."""
    return post(path, body, engine, **{"source": HERMES, **more})


def prompt(path: str, body: dict[str, Any]) -> str:
    """Return the prompt of a body as text."""
    engine = FakeEngine()
    status, answer = ask(path, {"model": "m", "stream": False, **body}, engine)
    assert status == 200, answer
    return bytes(engine.requests[0].prompt).decode()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_answers_are_as_documented(name: str) -> None:
    kind, body, part, end = DOCUMENTED[name]
    status, answer = ask(f"/api/{kind}", {"model": "llama3.2", **body})
    assert status == 200, answer
    assert isinstance(answer, list) == (part is not None)
    parts, last = (answer[:-1], answer[-1]) if part is not None else ([], answer)
    assert problems(last, end) == [] and last["done"] and last["model"] == "llama3.2"
    assert all(problems(one, part) == [] and not one["done"] for one in parts)
    if part is not None:
        assert parts


@pytest.mark.parametrize("name", OPEN_WEBUI)
async def test_requests_of_open_webui(name: str) -> None:
    method, path, body, shape = OPEN_WEBUI[name]

    async with client(FakeEngine(), source=HERMES) as http:
        model = (await http.get("/api/tags")).json()["models"][0]["model"]
        content = orjson.dumps(body).replace(b"MODEL", model.encode()) if body else None
        status, answer = read(await http.request(method, path, content=content))
        assert status == 200
        assert problems(answer[-1] if isinstance(answer, list) else answer, shape) == []


def test_open_webui_can_compare_the_version() -> None:
    assert tuple(map(int, API_VERSION.split("."))) >= (0, 6, 4)


def test_thinking_text_and_calls() -> None:
    body = {"model": "m", "messages": SKY, "tools": [TOOL], "stream": False}
    _, answer = ask("/api/chat", body, FakeEngine(CALLING))
    message = answer["message"]
    assert (message["role"], message["thinking"], message["content"].strip()) == ("assistant", "hm", "Well.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"index": 0, "name": "f", "arguments": {"a": 1}} and answer["done_reason"] == "stop"
    _, parts = ask("/api/chat", {**body, "stream": True}, FakeEngine(CALLING))
    messages = [part["message"] for part in parts]
    assert "".join(m.get("thinking", "") for m in messages) == "hm"
    assert "".join(m["content"] for m in messages).strip() == "Well."
    assert [m["tool_calls"][0]["function"]["arguments"] for m in messages if "tool_calls" in m] == [{"a": 1}]


def test_two_calls_come_whole_and_once() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": %d}}\n</tool_call>'
    engine = FakeEngine(f"<think>\nhm\n</think>\n{call % 1}\n{call % 2}")
    _, parts = ask("/api/chat", {"model": "m", "messages": SKY, "tools": [TOOL]}, engine)
    found = [call["function"] for part in parts for call in part["message"].get("tool_calls", ())]
    assert [(f["index"], f["arguments"]) for f in found] == [(0, {"a": 1}), (1, {"a": 2})]


def test_tool_results_refer_to_their_calls() -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g", "f")]
    results = [{"role": "tool", "content": name, "tool_name": name} for name in ("g", "f", "f")]
    body = {"model": "m", "messages": [*SKY, {"role": "assistant", "tool_calls": calls}, *results]}
    _, message, *results = chat_body(body, n_ctx=1, thinks=False)["messages"]
    assert [(call["id"], call["function"]["arguments"]) for call in message["tool_calls"]] == [
        ("call00000", '{"a":1}'), ("call00001", '{"a":1}'), ("call00002", '{"a":1}'),
    ]  # fmt: skip
    assert [one["tool_call_id"] for one in results] == ["call00001", "call00000", "call00002"]


@pytest.mark.parametrize(
    ("named", "id"), [({}, "call00000"), ({"tool_name": "f"}, "call00000"), ({"tool_name": "g"}, None)]
)
def test_a_result_of_a_tool_that_was_not_called_answers_no_call(named: dict[str, str], id: str | None) -> None:
    call, result = {"function": {"name": "f"}}, {"role": "tool", "content": "1", **named}
    body = {"model": "m", "messages": [*SKY, {"role": "assistant", "tool_calls": [call]}, result]}
    assert chat_body(body, n_ctx=1, thinks=False)["messages"][-1].get("tool_call_id") == id


@pytest.mark.parametrize("row", [row for row in PARAMETERS if row.ollama], ids=lambda row: row.ollama)
def test_options_reach_the_engine(row: Any) -> None:
    engine = FakeEngine()
    ask("/api/generate", {"model": "m", "prompt": "a", "options": EVERY_OPTION, "raw": True}, engine)
    (request,) = engine.requests
    found = getattr(request.params.sampling if row.of == "sampling" else request.params, row.name)
    wanted = EVERY_OPTION[row.ollama]
    assert found == wanted or math.isclose(found, wanted, rel_tol=1e-6)


def test_every_documented_parameter_is_accepted() -> None:
    of_loading = {"numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "vocab_only", "use_mmap"}
    ignored = {
        "use_mlock",
        "num_thread",
        "penalize_newline",
    }  # the last one was removed from the API together with its samplers
    assert EVERY_OPTION.keys() - of_loading - ignored == {row.ollama for row in PARAMETERS if row.ollama}


def test_negative_numbers_mean_the_maximum() -> None:
    engine = FakeEngine()
    options = {"num_predict": -2, "repeat_last_n": -1, "nonsense": {}, "top_k": None}
    status, _ = ask("/api/generate", {"model": "m", "prompt": "a", "raw": True, "options": options}, engine)
    assert status == 200
    assert engine.requests[0].params.n_predict == -1 and engine.requests[0].params.sampling.repeat_last_n == INFO.n_ctx


def test_prompts_of_generate() -> None:
    assert prompt("/api/generate", {"prompt": "Hi", "system": "Be kind"}) == (
        "<|im_start|>systemBe kind<|im_end|><|im_start|>userHi<|im_end|><|im_start|>assistant"
    )
    assert prompt("/api/generate", {"prompt": "Hi", "raw": True}) == "Hi"
    template = "{{ if .System }}S: {{ .System }}\n{{ end }}U: {{ .Prompt }}\nA: {{ .Response }}<end>"
    assert prompt("/api/generate", {"prompt": "Hi", "template": template}) == "U: Hi\nA: "
    assert prompt("/api/generate", {"prompt": "a", "suffix": "b"}) == "\x03a\x04b\x05"


def test_durations_of_an_answer_are_nanoseconds() -> None:
    _, answer = ask("/api/generate", {"model": "m", "prompt": "Hi", "stream": False})
    durations = answer["prompt_eval_duration"], answer["eval_duration"]
    assert durations == (2_000_000, 3_000_000)  # those of the fake engine
    assert 100_000 < answer["load_duration"] + 100_000 < answer["total_duration"] + 100_000 < 60 * 10**9


def test_cached_tokens_of_a_prompt_are_counted() -> None:
    engine = FakeEngine()
    engine.n_cached = 3
    _, answer = ask("/api/generate", {"model": "m", "prompt": "Hi", "stream": False}, engine)
    assert answer["prompt_eval_count"] == len(engine.requests[0].prompt) > 3


def test_a_prompt_after_a_context_gets_no_bos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FakeTokenizer,
        "encode",
        lambda self, text, add_special=False, parse_special=True: [1] * add_special + list(text.encode()),
    )
    engine = FakeEngine()
    ask("/api/generate", {"model": "m", "prompt": "x", "context": [1, 65], "stream": False}, engine)
    assert engine.requests[0].prompt[:3] == [1, 65, ord("<")] and engine.requests[0].prompt.count(1) == 1


def test_a_conversation_continues_from_its_context() -> None:
    _, first = ask("/api/generate", {"model": "m", "prompt": "Hi", "stream": False, "options": {"num_predict": 5}})
    again = prompt("/api/generate", {"prompt": "And?", "context": first["context"]})
    assert bytes(first["context"]).decode() == "<|im_start|>userHi<|im_end|><|im_start|>assistantHello"
    assert again == bytes(first["context"]).decode() + "<|im_start|>userAnd?<|im_end|><|im_start|>assistant"
    status, answer = ask("/api/generate", {"model": "m", "prompt": "x", "context": [1 << 30]})
    assert (status, answer) == (400, {"error": "Prompt contains invalid tokens"})


@pytest.mark.parametrize(
    ("template", "values", "made"),
    [
        ("{{ .Prompt }}", {"Prompt": "x"}, "x"),
        ("a  {{- .Prompt -}}  b", {"Prompt": "x"}, "axb"),
        ("a  {{- .Prompt -}}\n b {{.Prompt}}", {"Prompt": "x"}, "axb x"),
        ("a \n{{- if .Prompt }} yes {{- end -}} \n b", {"Prompt": "x"}, "a yesb"),
        ("{{ if .System }}[{{ .System }}]{{ else }}none{{ end }}", {"System": "s"}, "[s]"),
        ("{{ if .System }}[{{ .System }}]{{ else }}none{{ end }}", {}, "none"),
        ("{{ if .Suffix }}1{{ else if .System }}2{{ else }}3{{ end }}", {"System": "s"}, "2"),
        (
            "{{ if and .System .Prompt }}both{{ end }}{{ if not .Suffix }}!{{ end }}",
            {"System": "s", "Prompt": "p"},
            "both!",
        ),
        ("{{ if .System }}{{ if .Prompt }}in{{ end }}{{ end }}out", {"Prompt": "p"}, "out"),
        ("<{{ .Prompt }}>{{ .Response }}</end>", {"Prompt": "x"}, "<x>"),
        ("{{/* a remark */}}{{ .Prompt }}", {"Prompt": "{{ .System }}"}, "{{ .System }}"),
    ],
)
def test_templates_of_a_turn(template: str, values: dict[str, str], made: str) -> None:
    assert render(template, values) == made


@pytest.mark.parametrize("template", ["{{ range .Messages }}", "{{ if .System }}", "{{ .Tools }}", "{{ end }}", "{{"])
def test_unsupported_templates(template: str) -> None:
    with pytest.raises(ApiError):
        render(template, {})


def test_formats_constrain_the_answer() -> None:
    for path, body in (("/api/chat", {"messages": SKY}), ("/api/generate", {"prompt": "x", "raw": True})):
        engine = FakeEngine()
        status, _ = ask(path, {"model": "m", "stream": False, "format": {"type": "integer"}, **body}, engine)
        source = getattr(engine.requests[0].constraint, "source", None)
        assert status == 200 and source is not None and '"integer"' in source.text
        free = FakeEngine()
        assert ask(path, {"model": "m", "format": "", **body}, free)[0] == 200 and free.requests[0].constraint is None


@pytest.mark.parametrize(("think", "shown"), [(False, "off"), (True, "on"), ("high", "on high"), (None, "on")])
def test_think(think: Any, shown: str) -> None:
    source = (
        "{{ 'on' if enable_thinking else 'off' }}{% if reasoning_effort %} {{ reasoning_effort }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% endfor %}"
    )
    engine = FakeEngine()
    status, _ = ask(
        "/api/chat", {"model": "m", "messages": SKY, "think": think, "stream": False}, engine, source=source
    )
    assert status == 200 and bytes(engine.requests[0].prompt).decode().startswith(shown)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"messages": SKY}, 400, "model is required"),
        ("chat", {"model": "m", "messages": "x"}, 400, "array"),
        ("generate", {"model": "m", "prompt": 5}, 400, '"prompt" must be a string'),
        ("generate", {"model": "m", "prompt": ["x"]}, 400, '"prompt" must be a string'),
        ("chat", {"model": "m", "messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "mmproj"),
        ("chat", {"model": "m", "messages": SKY, "format": "xml"}, 400, 'invalid format: "xml"'),
        ("chat", {"model": "m", "messages": SKY, "think": "hard"}, 400, "invalid think value"),
        (
            "chat",
            {"model": "m", "messages": SKY, "options": {"top_k": "x"}},
            400,
            'option "top_k" must be of type integer',
        ),
        ("chat", {"model": "m", "messages": SKY, "keep_alive": "soon"}, 400, "invalid duration"),
        ("chat", {"model": "m", "messages": SKY, "top_logprobs": 21}, 400, "between 0 and 20"),
        ("chat", {"model": "m", "messages": [], "keep_alive": 0}, 501, "keeps it"),
        ("chat", {"model": "m", "messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "tool_calls"),
        ("chat", {"model": "m", "messages": [{"role": "assistant", "tool_calls": [5]}]}, 400, "name"),
        ("generate", {"model": "m", "prompt": "x", "images": ["aGk="]}, 400, "mmproj"),
        ("generate", {"model": "m", "prompt": "x", "raw": True, "system": "y"}, 400, "raw mode"),
        ("generate", {"model": "m", "prompt": "x", "template": "{{ range }}"}, 400, "template"),
        ("generate", {"model": "m", "prompt": "x", "context": "y"}, 400, "context"),
        ("embed", {"model": "m", "input": "x"}, 501, "--embeddings"),
        ("pull", {"model": "m"}, 501, "router"),
        ("show", {}, 400, "model is required"),
    ],
)
def test_errors_are_texts(path: str, body: dict[str, Any], status: int, words: str) -> None:
    found, answer = ask(f"/api/{path}", body)
    assert found == status and list(answer) == ["error"] and words in answer["error"]


def test_think_is_refused_without_a_thinking_model() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    status, answer = ask("/api/chat", {"model": "m", "messages": SKY, "think": True}, source=source)
    assert (status, answer) == (400, {"error": '"m" does not support thinking'})


async def test_errors_of_access_control_and_loading_have_ollamas_form() -> None:
    access = AccessRules(api_keys=(b"secret",))
    async with client(access=access) as http:
        assert (await http.get("/api/tags")).json() == {"error": "Invalid API Key"}
        assert (await http.get("/v1/models")).json()["error"]["code"] == 401
    async with client(loaded=False) as http:
        response = await http.get("/api/tags")
        assert response.status_code == 503 and response.json() == {"error": "Loading model"}
    async with client() as http:
        wrong = await http.get("/api/chat")
        assert wrong.status_code == 404 and isinstance(wrong.json()["error"], str)
        bad = await http.post("/api/chat", content=b"{")
        assert bad.status_code == 400 and "parse error" in bad.json()["error"]


def test_a_failed_answer_ends_with_an_error() -> None:
    engine = FakeEngine()
    engine.fail, engine.fail_after = ApiError("server_error", "lost"), 2
    status, parts = ask("/api/generate", {"model": "m", "prompt": "x", "raw": True}, engine)
    assert status == 200 and parts[-1] == {"error": "lost"} and parts[0]["response"] == "x"
    engine = FakeEngine()
    engine.fail = ApiError("unavailable_error", "not now")
    assert ask("/api/generate", {"model": "m", "prompt": "x"}, engine) == (503, {"error": "not now"})


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("1h1m1s250ms", 3661.25),
        ("500000us", 0.5),
        ("500000\u00b5s", 0.5),
        ("500000\u03bcs", 0.5),
        ("500000000ns", 0.5),
        (30, 30),
        ("45", 45),
        ("-1", -1),
        ("-1m", -60),
        (0, 0),
        (None, None),
        (1e300, -1),
        ("9" * 30 + "h", -1),
    ],
)
def test_durations(given: Any, seconds: float | None) -> None:
    assert keep_alive({"keep_alive": given}) == seconds


def test_names_have_a_tag() -> None:
    assert tagged("a") == "a:latest" and tagged("u/m:Q4_0") == "u/m:Q4_0" and tagged("host:80/a") == "host:80/a:latest"
    assert untagged("a:latest") == "a" and untagged("a:7b") == "a:7b"
