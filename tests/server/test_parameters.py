"""The table of parameters: each row by each of its spellings, in each API, down to the engine's request."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from fakes import EOS, FakeEngine, client, run
from test_endpoints import get

from llamado.commands.options import sampling_defaults
from llamado.engine.parameters import BY_NAME, PARAMETERS, Parameter, markdown
from llamado.engine.request import Request
from llamado.engine.sampling.params import Sampling
from llamado.flags import FlagParser, add_flags, parse
from llamado.server.generate.request import GenerationRequest
from llamado.server.generate.submission import SubmittedRequest
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
# Values that are no row's default: what is sent, what arrives, and how a flag says it.
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
    """The fields that say it in an API."""
    if api == "messages":
        return [row.messages] if row.messages else []
    if api == "chat":  # OpenAI's switch of this name stands beside `top_logprobs` there
        return [name for name in row.names if name != "logprobs"]
    return [*row.names, *row.responses.split()] if api == "responses" else list(row.names)


def arrived(request: Request, row: Parameter) -> Any:
    return getattr(request.sampling if row.of == "sampling" else request, row.name)


class Answer(NamedTuple):
    """Status and body of an answer, and what the engine was given."""

    status: int
    told: Any
    requests: list[Request]


def ask(api: str, *bodies: dict[str, Any], **switches: Any) -> list[Answer]:
    """One answer for each of some fields, beside what the API wants at least."""

    async def work() -> list[Answer]:
        path, base = APIS[api]
        answers = []
        async with client(FakeEngine("ab"), **switches) as http:
            engine: FakeEngine = http.engine  # type: ignore[attr-defined]
            for fields in bodies:
                response = await http.post(path, content=orjson.dumps(base | fields))
                kind = response.headers["content-type"]
                told = response.text if kind.startswith("text/") else response.json()
                answers.append(Answer(response.status_code, told, list(engine.requests)))
                engine.requests.clear()
        return answers

    answers: list[Answer] = run(work())
    return answers


@pytest.mark.parametrize("api", APIS)
def test_every_row_by_every_spelling_reaches_the_engine(api: str) -> None:
    asked = []
    for row in ENGINE:
        known = spellings(row, api)
        for name in sorted({*known, *row.names, row.name, row.messages, row.responses} - {"", "logprobs"}):
            asked.append((row, name, value_of(row)[0], name in known))
    (plain,), *answers = (a.requests for a in ask(api, {}, *({name: sent} for _, name, sent, _ in asked)))
    assert len(asked) >= len(ENGINE)
    for (row, name, _, known), requests in zip(asked, answers, strict=True):
        wanted = value_of(row)[1]
        assert arrived(plain, row) != wanted, row.name
        assert requests, (name, "was refused")
        assert arrived(requests[0], row) == (wanted if known else arrived(plain, row)), (api, name)


def test_the_likeliest_tokens_in_the_chat_api_have_a_switch_of_their_own() -> None:
    some, usual, none = ask("chat", {"logprobs": True, "top_logprobs": 3}, {"logprobs": True}, {"top_logprobs": 3})
    assert [r.n_probs for r in some.requests] == [3] and [r.n_probs for r in usual.requests] == [20]
    assert none.status == 400


@pytest.mark.parametrize("api", APIS)
def test_values_outside_of_the_limits_are_refused_or_cut(api: str) -> None:
    asked = [
        (row, name, int(value) if row.type == "integer" else value)
        for row in NUMBERS
        for name in spellings(row, api)
        for value in (row.low - 1, row.high + 1)
        if abs(value) < 1e30
    ]
    # All probabilities of a vocabulary are too many for an answer without an end.
    answers = ask(
        api, *({name: value} | ({"n_predict": 1} if row.name == "n_probs" else {}) for row, name, value in asked)
    )
    for (row, name, value), (status, told, requests) in zip(asked, answers, strict=True):
        if not row.hard:
            cut = max(row.low, min(value, row.high))
            most = 257 if row.name == "n_probs" else math.inf  # as many as there are tokens
            assert status == 200 and arrived(requests[0], row) == min(cut, most), (name, told)
            continue
        low, high, given = (f"{v:.6f}" if row.type == "number" else f"{v}" for v in (row.low, row.high, value))
        said = row.names[-1] if name in (row.messages, row.responses) else name
        why = f"Field '{said}': Value must be between {low} <= value <= {high}, but got {given}"
        assert (status, told["error"]["message"], requests) == (400, why, [])


@pytest.mark.parametrize("api", APIS)
def test_values_of_another_type_are_refused_by_the_fields_name(api: str) -> None:
    rows = [row for row in ENGINE if row.type in ("boolean", "integer", "number")]
    asked = [(row, name) for row in rows for name in spellings(row, api)]
    wrong = ask(api, *({name: ["x"]} for _, name in asked))
    for (row, name), (status, told, _) in zip(asked, wrong, strict=True):
        kind = "boolean" if row.type == "boolean" else "number"
        said = row.names[-1] if name in (row.messages, row.responses) else name
        assert (status, told["error"]["message"]) == (400, f"Field '{said}': type must be {kind}, but is array")
    assert {status for status, _, _ in ask(api, *({name: None} for _, name in asked))} == {200}


@pytest.mark.parametrize("api", APIS)
def test_unknown_spellings_are_ignored(api: str) -> None:
    known = {name for row in PARAMETERS for name in (*row.names, row.messages, row.responses)}
    unknown = {name for row in ENGINE for name in (row.name.upper(), f"x_{row.name}", row.name.replace("_", "-"))}
    plain, other = ask(api, {}, dict.fromkeys(sorted(unknown - known), 7))
    for row in ENGINE:
        assert arrived(other.requests[0], row) == arrived(plain.requests[0], row), row.name


# What the server's own rows are sent as, and what they are in the request that was read.
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
    "n_cache_reuse": (7, None),  # accepted, and nothing more
}
LIMITS = {"grammar", "json_schema", "grammar_lazy", "grammar_triggers", "preserved_tokens"}


@pytest.mark.parametrize("api", APIS)
def test_the_servers_own_rows_reach_the_request(api: str) -> None:
    rows = [row for row in PARAMETERS if row.of == "server" and row.name not in LIMITS]
    assert {row.name for row in rows} == set(OWN)
    asked = [(row, name) for row in rows for name in row.names]
    plain, *answers = (asked_for(answer) for answer in ask(api, {}, *({n: OWN[row.name][0]} for row, n in asked)))
    for (row, name), found in zip(asked, answers, strict=True):
        sent, wanted = OWN[row.name]
        known = name in spellings(row, api) and not (api == "responses" and row.name == "n")  # that has one answer
        usual = getattr(plain, row.name, None)
        assert getattr(found, row.name, None) == (wanted if known else usual), (api, name)
        assert sent is None or wanted is None or usual != wanted


def asked_for(answer: Answer) -> GenerationRequest:
    """What the body of an answer was read as."""
    assert answer.status == 200, answer.told
    request = answer.requests[0]
    assert isinstance(request, SubmittedRequest)
    assert not request.source.prompts and not request.source.texts  # an idle slot would keep those of all answers
    return request.source


@pytest.mark.parametrize("api", ["native", "openai", "infill"])
def test_what_limits_tokens_reaches_the_request(api: str) -> None:
    fields = {"grammar": 'root ::= "a"', "grammar_lazy": True, "grammar_triggers": [{"type": 1, "value": "ab"}]}
    bodies = [fields, {"json_schema": {"type": "object"}}, {"preserved_tokens": ["a", "ab"]}]
    lazy, schema, preserved = (asked_for(answer).constraints for answer in ask(api, *bodies))
    assert lazy.source == GrammarSource("gbnf", 'root ::= "a"') and lazy.lazy
    assert lazy.triggers == (Trigger("word", "ab"),) and schema.source is not None
    assert schema.source.kind == "json_schema" and preserved.preserved == {97}


def test_each_answer_of_a_prompt_has_its_own_seed_and_only_the_first_the_slot() -> None:
    """Of two prompts with two answers each."""
    (answer,) = ask("native", {"prompt": ["a", "bc"], "n": 2, "seed": 7, "id_slot": 1, "temperature": 0.25})
    requests = answer.requests
    assert [request.prompt for request in requests] == [[97], [97], [98, 99], [98, 99]]
    assert [request.sampling.seed for request in requests] == [7, 8, 7, 8]
    assert [request.id_slot for request in requests] == [1, -1, 1, -1]
    assert {request.sampling.temperature for request in requests} == {0.25}


def test_what_limits_every_answer_and_what_ends_none() -> None:
    ours, theirs = GrammarSource("gbnf", 'root ::= "a"'), GrammarSource("gbnf", 'root ::= "b"')
    lazy = {"grammar": theirs.text, "grammar_lazy": True}
    bodies = [{}, {"grammar": theirs.text}, lazy, {"ignore_eos": True}]
    plain, own, never, endless = ask("native", *bodies, grammar=ours)
    limits = [None if r.constraint is None else r.constraint.source for (r,) in (plain[2], own[2], never[2])]
    assert limits == [ours, theirs, None]  # a lazy grammar that nothing begins never does
    assert [a.told["generation_settings"]["grammar"] for a in (plain, own)] == ["", theirs.text]
    assert endless.told["generation_settings"]["logit_bias"] == [{"bias": None, "token": EOS}]


def test_slots_show_what_was_asked_for() -> None:
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


def test_answers_tell_each_as_it_was_sent() -> None:
    rows = [row for row in PARAMETERS if row.of != "server" and row.keys]
    for row, answer in zip(rows, ask("native", *({row.names[0]: value_of(row)[0]} for row in rows)), strict=True):
        wanted, settings = value_of(row)[1], answer.told["generation_settings"]
        shown: Any = list(wanted) if isinstance(wanted, tuple) else wanted
        if row.name == "logit_bias":
            shown = [{"bias": 1.5, "token": 5}, {"bias": None, "token": 97}]
        elif row.name == "lora":
            shown = [{"id": 1, "scale": 0.5}]
        assert [settings[key] for key in row.keys] == [shown] * len(row.keys), row.name


def test_flags_set_what_requests_get_that_do_not_say() -> None:
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


def test_the_table_holds_all_that_the_engine_can_be_asked() -> None:
    fields = {f.name for kind in (Sampling, Request) for f in dataclasses.fields(kind)}
    hooks = {"processor", "until", "on_prompt_row"}
    made_by_the_server = {"prompt", "sampling", "preserved", "constraint", "prompt_probs"} | hooks
    functions_of_a_program = {"processor", "until", "on_prompt_row"}
    named = fields - made_by_the_server - functions_of_a_program
    assert {row.name for row in PARAMETERS if row.of != "server"} == named
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


def test_the_page_is_that_of_the_table() -> None:
    page = (ROOT / "docs" / "parameters.md").read_text()
    assert page == markdown(), "run: python -m llamado.engine.parameters > docs/parameters.md"
