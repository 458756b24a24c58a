"""The table of parameters: each row by each of its names, in each API, down to the engine's request."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from fakes import EOS, FakeEngine, client, get, run

from llamado.commands.options import sampling_defaults
from llamado.engine.parameters import BY_NAME, PARAMETERS, Parameter, markdown
from llamado.engine.request import GenerationParams, Request
from llamado.engine.sampling.params import Sampling
from llamado.flags import FlagParser, add_flags, parse
from llamado.server.generate.request import GenerationRequest
from llamado.text.grammar.source import GrammarSource, Trigger

ROOT = Path(__file__).parents[2]
USER = [{"role": "user", "content": "Hi"}]
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("/completion", {"prompt": "a"}),
    "openai": ("/v1/completions", {"prompt": "a"}),
    "infill": ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    "chat": ("/v1/chat/completions", {"messages": USER}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "messages": ("/v1/messages", {"messages": USER}),
}
# Values that differ from all defaults: in the body, in the engine's request, and as text of a flag.
FORMS: dict[str, tuple[Any, Any, str]] = {
    "integer": (2, 2, "2"),
    "number": (0.25, 0.25, "0.25"),
    "seed": ("job 7", "job 7", "job 7"),
    "texts": (["x", ""], ["x"], "x"),
    "breakers": (["x"], ("x",), "x"),
    "biases": ([[5, 1.5], ["a", False]], {5: 1.5, 97: -math.inf}, "5+1.5"),
    "samplers": (["top-k", "nothing"], ("top_k",), "top_k"),
    "scales": ([{"id": 1, "scale": 0.5}], {1: 0.5}, ""),
    "slot": (3, 3, ""),
}
OTHERS = {"dry_base": 2.5, "dry_allowed_length": 3, "top_n_sigma": 1.25}
ENGINE = [row for row in PARAMETERS if row.of != "server" and row.names]
NUMBERS = [row for row in ENGINE if row.type in ("integer", "number")]


def value_of(row: Parameter) -> tuple[Any, Any, str]:
    if row.type == "boolean":
        return not row.default, not row.default, ""
    if row.name in OTHERS:
        return OTHERS[row.name], OTHERS[row.name], str(OTHERS[row.name])
    return FORMS[row.type]


def spellings(row: Parameter, api: str) -> list[str]:
    """Return the names of a row's fields in an API."""
    if api == "messages":
        return [row.messages] if row.messages else []
    if api == "chat":  # the chat API has OpenAI's boolean of this name
        return [name for name in row.names if name != "logprobs"]
    return [*row.names, *row.responses.split()] if api == "responses" else list(row.names)


def arrived(request: Request, row: Parameter) -> Any:
    return getattr(request.params.sampling if row.of == "sampling" else request.params, row.name)


class Answer(NamedTuple):
    """Status and body of an answer, and the engine's requests."""

    status: int
    body: Any
    requests: list[Request]


def ask(api: str, *bodies: dict[str, Any], **switches: Any) -> list[Answer]:
    """Send a minimal body with each of some sets of fields; return the answers."""

    async def work() -> list[Answer]:
        path, base = APIS[api]
        answers = []
        async with client(FakeEngine("ab"), **switches) as http:
            engine: FakeEngine = http.engine  # type: ignore[attr-defined]
            for fields in bodies:
                response = await http.post(path, content=orjson.dumps(base | fields))
                kind = response.headers["content-type"]
                answer = response.text if kind.startswith("text/") else response.json()
                answers.append(Answer(response.status_code, answer, list(engine.requests)))
                engine.requests.clear()
        return answers

    answers: list[Answer] = run(work())
    return answers


@pytest.mark.parametrize("api", APIS)
def test_every_row_reaches_the_engine_by_every_name(api: str) -> None:
    cases = []
    for row in ENGINE:
        known = spellings(row, api)
        for name in sorted({*known, *row.names, row.name, row.messages, row.responses} - {"", "logprobs"}):
            cases.append((row, name, value_of(row)[0], name in known))
    (plain,), *answers = (a.requests for a in ask(api, {}, *({name: sent} for _, name, sent, _ in cases)))
    assert len(cases) >= len(ENGINE)
    for (row, name, _, known), requests in zip(cases, answers, strict=True):
        wanted = value_of(row)[1]
        assert arrived(plain, row) != wanted, row.name
        assert requests, (name, "was refused")
        assert arrived(requests[0], row) == (wanted if known else arrived(plain, row)), (api, name)


def test_top_logprobs_of_the_chat_api_needs_logprobs() -> None:
    some, usual, none = ask("chat", {"logprobs": True, "top_logprobs": 3}, {"logprobs": True}, {"top_logprobs": 3})
    assert [r.params.n_probs for r in some.requests] == [3] and [r.params.n_probs for r in usual.requests] == [20]
    assert none.status == 400


@pytest.mark.parametrize("api", APIS)
def test_values_outside_of_the_limits_are_refused_or_clamped(api: str) -> None:
    cases = [
        (row, name, int(value) if row.type == "integer" else value)
        for row in NUMBERS
        for name in spellings(row, api)
        for value in (row.low - 1, row.high + 1)
        if abs(value) < 1e30
    ]
    # A whole vocabulary of probabilities is too much for an answer without a limit.
    answers = ask(
        api, *({name: value} | ({"n_predict": 1} if row.name == "n_probs" else {}) for row, name, value in cases)
    )
    for (row, name, value), (status, body, requests) in zip(cases, answers, strict=True):
        if not row.hard:
            cut = max(row.low, min(value, row.high))
            most = 257 if row.name == "n_probs" else math.inf  # the size of the vocabulary
            assert status == 200 and arrived(requests[0], row) == min(cut, most), (name, body)
            continue
        low, high, given = (f"{v:.6f}" if row.type == "number" else f"{v}" for v in (row.low, row.high, value))
        field = row.names[-1] if name in (row.messages, row.responses) else name
        why = f"Field '{field}': Value must be between {low} <= value <= {high}, but got {given}"
        assert (status, body["error"]["message"], requests) == (400, why, [])


@pytest.mark.parametrize("api", APIS)
def test_errors_for_wrong_types_name_the_field(api: str) -> None:
    rows = [row for row in ENGINE if row.type in ("boolean", "integer", "number")]
    cases = [(row, name) for row in rows for name in spellings(row, api)]
    wrong = ask(api, *({name: ["x"]} for _, name in cases))
    for (row, name), (status, answer, _) in zip(cases, wrong, strict=True):
        kind = "boolean" if row.type == "boolean" else "number"
        field = row.names[-1] if name in (row.messages, row.responses) else name
        assert (status, answer["error"]["message"]) == (400, f"Field '{field}': type must be {kind}, but is array")
    assert {status for status, _, _ in ask(api, *({name: None} for _, name in cases))} == {200}


@pytest.mark.parametrize("api", APIS)
def test_unknown_names_are_ignored(api: str) -> None:
    known = {name for row in PARAMETERS for name in (*row.names, row.messages, row.responses)}
    unknown = {name for row in ENGINE for name in (row.name.upper(), f"x_{row.name}", row.name.replace("_", "-"))}
    plain, other = ask(api, {}, dict.fromkeys(sorted(unknown - known), 7))
    for row in ENGINE:
        assert arrived(other.requests[0], row) == arrived(plain.requests[0], row), row.name


# Values of the server's own rows in the body and in the GenerationRequest.
OWN: dict[str, tuple[Any, Any]] = {
    "stream": (True, True),
    "n": (2, 2),
    "sse_ping_interval": (7, 7),
    "include_usage": ({"include_usage": True}, True),
    "response_fields": (["content"], ["content"]),
    "verbose": (True, True),
    "receipt": (True, True),
    "echo": (True, True),
    "backend_sampling": (True, True),
    "n_cache_reuse": (7, None),  # accepted without effect
}
LIMITS = {"grammar", "json_schema", "grammar_lazy", "grammar_triggers", "preserved_tokens"}


@pytest.mark.parametrize("api", APIS)
def test_the_servers_own_rows_reach_the_request(api: str) -> None:
    rows = [row for row in PARAMETERS if row.of == "server" and row.name not in LIMITS]
    assert {row.name for row in rows} == set(OWN)
    cases = [(row, name) for row in rows for name in row.names]
    plain, *answers = (read_request(answer) for answer in ask(api, {}, *({n: OWN[row.name][0]} for row, n in cases)))
    for (row, name), found in zip(cases, answers, strict=True):
        sent, wanted = OWN[row.name]
        known = name in spellings(row, api) and not (
            api == "responses" and row.name == "n"
        )  # the Responses API has one answer
        usual = getattr(plain, row.name, None)
        assert getattr(found, row.name, None) == (wanted if known else usual), (api, name)
        assert sent is None or wanted is None or usual != wanted


def read_request(answer: Answer) -> GenerationRequest:
    """Return the GenerationRequest of an answer's body."""
    assert answer.status == 200, answer.body
    request = answer.requests[0]
    assert isinstance(request.tag, GenerationRequest)
    assert not request.tag.prompts and not request.tag.texts  # an idle slot would keep them
    return request.tag


@pytest.mark.parametrize("api", ["native", "openai", "infill"])
def test_constraints_reach_the_request(api: str) -> None:
    fields = {"grammar": 'root ::= "a"', "grammar_lazy": True, "grammar_triggers": [{"type": 1, "value": "ab"}]}
    bodies = [fields, {"json_schema": {"type": "object"}}, {"preserved_tokens": ["a", "ab"]}]
    lazy, schema, preserved = (read_request(answer).constraints for answer in ask(api, *bodies))
    assert lazy.source == GrammarSource("gbnf", 'root ::= "a"') and lazy.lazy
    assert lazy.triggers == (Trigger("word", "ab"),) and schema.source is not None
    assert schema.source.kind == "json_schema" and preserved.preserved == {97}


def test_further_answers_of_a_prompt_have_other_seeds_and_any_slot() -> None:
    """Two prompts with two answers each."""
    (answer,) = ask("native", {"prompt": ["a", "bc"], "n": 2, "seed": 7, "id_slot": 1, "temperature": 0.25})
    requests = answer.requests
    assert [request.prompt for request in requests] == [[97], [97], [98, 99], [98, 99]]
    assert [request.params.sampling.seed for request in requests] == [7, 8, 7, 8]
    assert [request.params.id_slot for request in requests] == [1, -1, 1, -1]
    assert {request.params.sampling.temperature for request in requests} == {0.25}


def test_the_servers_grammar_lazy_grammars_and_ignore_eos() -> None:
    ours, theirs = GrammarSource("gbnf", 'root ::= "a"'), GrammarSource("gbnf", 'root ::= "b"')
    lazy = {"grammar": theirs.text, "grammar_lazy": True}
    bodies = [{}, {"grammar": theirs.text}, lazy, {"ignore_eos": True}]
    plain, own, never, endless = ask("native", *bodies, grammar=ours)
    limits = [None if r.constraint is None else r.constraint.source for (r,) in (plain[2], own[2], never[2])]
    assert limits == [ours, theirs, None]  # a lazy grammar without triggers is never enforced
    assert [a.body["generation_settings"]["grammar"] for a in (plain, own)] == ["", theirs.text]
    assert endless.body["generation_settings"]["logit_bias"] == [{"bias": None, "token": EOS}]


def test_slots_show_the_parameters_of_a_request() -> None:
    engine = FakeEngine("a" * 1000, delay=0.005)

    async def work() -> Any:
        async with client(engine) as http:
            body = {"messages": USER, "temperature": 0.25, "stop": ["x"], "reasoning_format": "deepseek-legacy"}
            asking = asyncio.ensure_future(http.post("/v1/chat/completions", json=body | {"stream": True}))
            while not engine.busy:
                await asyncio.sleep(0.01)
            slots = (await http.get("/slots")).json()
            asking.cancel()
            return slots[0]["params"]

    params = run(work())
    assert (params["temperature"], params["stream"], params["reasoning_in_content"]) == (0.25, True, True)
    assert params["generation_prompt"] == "<assistant>" and params["reasoning_format"] == "deepseek-legacy"
    assert not {"stop", "grammar", "logit_bias", "preserved_tokens"} & set(params)


def test_answers_show_each_parameter_as_sent() -> None:
    rows = [row for row in PARAMETERS if row.of != "server" and row.keys]
    for row, answer in zip(rows, ask("native", *({row.names[0]: value_of(row)[0]} for row in rows)), strict=True):
        wanted, settings = value_of(row)[1], answer.body["generation_settings"]
        shown: Any = list(wanted) if isinstance(wanted, tuple) else wanted
        if row.name == "logit_bias":
            shown = [{"bias": 1.5, "token": 5}, {"bias": None, "token": 97}]
        elif row.name == "lora":
            shown = [{"id": 1, "scale": 0.5}]
        assert [settings[key] for key in row.keys] == [shown] * len(row.keys), row.name


def test_flags_and_variables_set_defaults() -> None:
    parser = FlagParser()
    add_flags(parser, "serve")
    for row in PARAMETERS:
        if not row.flags or row.of == "server":
            continue
        _, wanted, text = value_of(row)
        wanted = {5: 1.5} if row.name == "logit_bias" else ("x",) if row.name == "stop" else wanted
        off = row.type == "boolean" and row.default is True
        for name in (row.off_flags if off else row.flags).split():
            given = [name] if row.type == "boolean" else [name, text]
            defaults = sampling_defaults(parse(parser, "serve", given, {})[0])
            found = getattr(defaults.sampling if row.of == "sampling" else defaults, row.name)
            assert found == wanted, name
        for variable in row.env.split():
            value = text or ("0" if off else "1")
            defaults = sampling_defaults(parse(parser, "serve", [], {variable: value})[0])
            assert getattr(defaults.sampling if row.of == "sampling" else defaults, row.name) == wanted, variable


def test_the_table_has_all_parameters_of_the_engine() -> None:
    fields = {f.name for kind in (Sampling, GenerationParams) for f in dataclasses.fields(kind)}
    assert {row.name for row in PARAMETERS if row.of != "server"} == fields - {"sampling", "preserved", "prompt_probs"}
    names = [name for row in PARAMETERS for name in row.names]
    assert len(names) == len(set(names)) and len(BY_NAME) == len(PARAMETERS)
    messages = {row.messages for row in PARAMETERS} - {""}
    assert messages == {"max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p"}
    assert {row.responses for row in PARAMETERS} - {""} == {"max_output_tokens"}


def test_the_openapi_document_has_every_field() -> None:
    paths = get("/openapi.json")[1]["paths"]
    for path, left_out in (("/completion", ()), ("/infill", ()), ("/v1/chat/completions", ("logprobs",))):
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        described = content["schema"]["properties"]
        for row in PARAMETERS:
            for name in set(row.names) - set(left_out):
                assert described[name]["description"] == (row.form or row.help), (path, name)


def test_the_page_matches_the_table() -> None:
    page = (ROOT / "docs" / "parameters.md").read_text()
    assert page == markdown(), "run: python -m llamado.engine.parameters > docs/parameters.md"
